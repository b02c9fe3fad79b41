"""Initial values of parameters, as functions of (seed, parameter name) alone.

An initializer is a callable ``initializer(generator, shape) -> float64 array``; the functions here
make them, of functions of this module, so that models can be pickled. The generator is keyed by the
parameter's name. A value therefore does not depend on the rank, the world size, or the order in
which parameters are made.
"""

from __future__ import annotations

import hashlib
import math
from functools import partial

import numpy as np

from mpishard.base import Array
from mpishard.nn.layers.layer import Initializer


def parameter_generator(seed: int, name: str) -> np.random.Generator:
    """Return the random generator of one parameter.

    It is a counter-based Philox generator (Salmon et al., "Parallel random numbers: as easy as 1,
    2, 3", SC 2011) whose 128-bit key is a hash of both arguments. Parameters of equal shape
    therefore differ, and every rank of any world draws the same values.

    Parameters
    ----------
    seed : int
        The model's seed.
    name : str
        The parameter's full dotted name.
    """
    # Not Python's hash(), which differs from process to process.
    digest = hashlib.blake2b(f"{int(seed)}/{name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def zeros() -> Initializer:
    """Return an initializer that sets all elements to 0."""
    # Not a lambda, which pickle refuses.
    return partial(_constant, 0.0)


def ones() -> Initializer:
    """Return an initializer that sets all elements to 1."""
    return partial(_constant, 1.0)


def normal(std: float) -> Initializer:
    """Return an initializer of independent normal elements, mean 0, standard deviation ``std``."""
    return partial(_normal, std)


def uniform(bound: float) -> Initializer:
    """Return an initializer of independent uniform elements of [-bound, bound)."""
    return partial(_uniform, bound)


def kaiming_uniform(fan_in: int) -> Initializer:
    """Return an initializer of uniform elements of variance 2 / fan_in, for rectified inputs.

    He et al., "Delving deep into rectifiers", ICCV 2015, eq. 10.
    """
    return uniform(math.sqrt(6.0 / fan_in))


def glorot_uniform(fan_in: int, fan_out: int) -> Initializer:
    """Return an initializer of uniform elements of variance 2 / (fan_in + fan_out).

    It is meant for symmetric activations such as tanh.

    Glorot & Bengio, "Understanding the difficulty of training deep feedforward neural
    networks", AISTATS 2010, eq. 16.
    """
    return uniform(math.sqrt(6.0 / (fan_in + fan_out)))


def _constant(value: float, _: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return np.full(shape, value)


def _normal(std: float, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return std * generator.standard_normal(shape)


def _uniform(bound: float, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return generator.uniform(-bound, bound, shape)
