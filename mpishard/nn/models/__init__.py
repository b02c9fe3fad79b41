"""Models: a chain of layers, a loss, and one flat vector of parameters.

Begin with ``model.py``: `Model`, and `SubModel`, consecutive layers of another model. Its parts
are ``vector.py``, the flat vector, and ``chain.py``, facts about the layers and a training pass
through them. ``mlp.py``, ``gpt.py`` and ``linear_models.py`` build the models that users name.
This chapter may import all other chapters of `mpishard.nn`.
"""
