"""Layers: descriptions of parameters and of a forward and a backward function; they hold no arrays.

Begin with ``layer.py``, the interface, and ``linear.py``, the shortest complete layer.
``composites.py`` has `Sequential` and `Residual`, the only layers that hold layers. The others are
leaves: ``activations.py``, ``attention.py``, ``convolution.py``, ``dropout.py``,
``embedding.py``, ``normalization.py``. ``initializers.py`` makes first values.

A layer imports arrays, arguments, contracts and sharding, and no other chapter of `mpishard.nn`.
"""
