"""Layers: descriptions of parameters, with forward and backward functions; they hold no arrays.

Begin with ``layer.py``, the interface, and ``linear.py``, a short and complete layer.
``composites.py`` has `Sequential` and `Residual`, the only layers that contain layers. The others
are leaves: ``activations.py``, ``attention.py``, ``convolution.py``, ``dropout.py``,
``embedding.py``, ``normalization.py``. ``initializers.py`` makes initial values, ``products.py``
matrix products. ``cache.py`` keeps the keys and values of attention between passes.

A layer imports arrays, arguments, contracts and sharding, and no other chapter of `mpishard.nn`.
"""
