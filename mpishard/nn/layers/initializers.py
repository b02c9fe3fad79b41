"""First values of parameters, as functions of (seed, parameter name) alone.

An initializer is a callable ``initializer(generator, shape) -> float64 array``; these are the
factories. That the generator is keyed by the parameter's name makes a value independent of the
rank, of the world size and of the order in which parameters are made.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from mpishard.nn.layers.layer import Initializer


def parameter_generator(seed: int, name: str) -> np.random.Generator:
    """The random stream of one parameter.

    A counter-based Philox generator (Salmon et al., "Parallel random numbers: as easy as 1, 2,
    3", SC 2011) whose 128-bit key is a hash of both arguments, so that parameters of equal
    shape differ and every rank of any world draws the same values.

    Parameters
    ----------
    seed : int
        The model's seed.
    name : str
        The parameter's full dotted name.
    """
    digest = hashlib.blake2b(f"{int(seed)}/{name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def zeros() -> Initializer:
    """All elements 0."""
    return lambda _, shape: np.zeros(shape)


def ones() -> Initializer:
    """All elements 1."""
    return lambda _, shape: np.ones(shape)


def normal(std: float) -> Initializer:
    """Independent normal elements of mean 0 and standard deviation ``std``."""
    return lambda generator, shape: std * generator.standard_normal(shape)


def uniform(bound: float) -> Initializer:
    """Independent uniform elements of [-bound, bound)."""
    return lambda generator, shape: generator.uniform(-bound, bound, shape)


def kaiming_uniform(fan_in: int) -> Initializer:
    """Uniform elements of variance 2 / fan_in, for weights that feed on rectified inputs.

    He et al., "Delving deep into rectifiers", ICCV 2015, eq. 10.
    """
    return uniform(math.sqrt(6.0 / fan_in))


def glorot_uniform(fan_in: int, fan_out: int) -> Initializer:
    """Uniform elements of variance 2 / (fan_in + fan_out), for symmetric activations.

    Glorot & Bengio, "Understanding the difficulty of training deep feedforward neural
    networks", AISTATS 2010, eq. 16.
    """
    return uniform(math.sqrt(6.0 / (fan_in + fan_out)))
