"""A full vector that every rank is given: parameters or gradients, the same on all of them."""

from __future__ import annotations

import zlib

import numpy as np

from mpishard.arrays import Array, array_namespace, to_host
from mpishard.models.engine.engine import Engine

__all__ = ["agreed_vector"]


def agreed_vector(engine: Engine, vector: Array, name: str, rate: float = 0.0) -> Array:
    """``vector`` in host memory and the model's dtype, once all ranks have the same. Collective.

    Parameters
    ----------
    engine : Engine
        Of the model whose flat vector it is like.
    vector : Array
        Shape (parameter_count,).
    name : str
        What the user called.
    rate : float
        A learning rate that goes with it.

    Raises
    ------
    TypeError
        For what is no array of real numbers, before anything is communicated.
    ValueError
        For another length, before anything is communicated; on every rank for vectors, or rates,
        that differ.
    """
    length, dtype = engine.placement.length, engine.layout.dtype
    array_namespace(vector)
    if vector.shape != (length,):
        raise ValueError(f"{name}: expected a vector of shape ({length},), got {vector.shape}")
    if not np.can_cast(vector.dtype, dtype, "same_kind"):
        raise TypeError(f"{name}: expected real numbers, got a vector of {vector.dtype}")
    vector = np.ascontiguousarray(to_host(vector), dtype=dtype)
    own = [zlib.crc32(vector), zlib.crc32(repr(rate).encode())]
    marks = engine.world.all_gather(np.array([own]))
    if (marks[:, 1] != marks[0, 1]).any():
        raise ValueError(f"{name}: the learning rates differ between ranks; this one is {rate}")
    marks = marks[:, 0]
    if (marks != marks[0]).any():
        raise ValueError(
            f"{name}: the vectors differ between ranks (checksums {marks.tolist()}); every "
            "rank must pass the same values"
        )
    return vector
