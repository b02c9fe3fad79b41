"""Models: a chain of layers, a loss, and one flat vector of parameters.

Begin with ``model.py``: `Model`, and `SubModel`, consecutive layers of another model. Its parts
are in ``parts.py``: the flat vector, and forward and backward on one batch.
``linear_models.py`` (with the perceptron) and ``gpt.py`` build the models that users name. This
chapter may import all other chapters of `mpishard.nn`.
"""
