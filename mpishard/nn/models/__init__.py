"""Models: a chain of layers, a loss, and one flat vector of parameters.

Begin with ``model.py``: `Model`, and `SubModel`, consecutive layers of another model. ``parts.py``
has the flat vector, and the forward and backward pass over one batch.
``linear_models.py`` (with the perceptron) and ``gpt.py`` build the models that users name. This
chapter may import all other chapters of `mpishard.nn`.
"""
