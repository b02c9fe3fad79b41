"""Members of the user's own model, and arguments of collective calls that ranks must share."""

from __future__ import annotations

import copy
import logging
import zlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mpishard.base import Array, MissingMemberError, array_namespace, to_host
from mpishard.communication import CommunicationBackend, ReductionOperation
from mpishard.contracts import ILayeredModel, UserModel
from mpishard.models.engine.engine import Engine
from mpishard.nn import GPT, generate

_log = logging.getLogger("mpishard")


def holding(model: UserModel, parameters: Array) -> Any:
    """Return a plain model with the structure of ``model`` and these ``parameters``."""
    if hasattr(model, "with_parameters"):
        return model.with_parameters(parameters)
    # A copy: the wrapped model itself must stay without parameters.
    model = copy.deepcopy(model)
    if isinstance(model, ILayeredModel):
        model.reclaim_parameters(parameters)
    else:
        model.set_parameters(parameters)
    return model


def generate_tokens(
    engine: Engine,
    model: object,
    prompt: Any,
    length: int,
    temperature: float,
    seed: int,
    top_k: int | None,
    slide: int,
) -> Array:
    """Continue a sequence of tokens, computed by ``engine``. Collective."""
    if not isinstance(model, GPT):
        raise MissingMemberError(f"{type(model).__name__} has no generate")
    require_alike(
        engine.world,
        "generate: the arguments",
        (np.asarray(prompt).ravel().tolist(), length, temperature, seed, top_k, slide),
    )
    with _gathered_once(engine, length):
        return generate(
            lambda tokens, cache: engine.predict_next(tokens, cache)[0],
            prompt,
            length,
            vocabulary_size=model.vocabulary_size,
            context_length=model.context_length,
            temperature=temperature,
            seed=seed,
            top_k=top_k,
            slide=slide,
        )


def _gathered_once(engine: Engine, passes: int) -> AbstractContextManager[None]:
    """Return a context that gathers each unit once for several forward passes. Collective.

    If the units of a node's ranks do not fit into half of its free memory together, each pass
    gathers them, and rank 0 logs a warning that says how many bytes.
    """
    if not engine.policy.shards_parameters:
        return nullcontext()
    store, world, device = engine.parameters.computed, engine.world, engine.layout.device
    # Where a node's ranks share all parameters, nothing is gathered.
    needed = 0 if store.is_whole else store.layout.length * store.layout.dtype.itemsize
    free = device.free_bytes
    room = needed if free is None else free // (2 if device.is_gpu else 2 * len(world.peers))
    # Together, because ranks that decided differently would gather at different times.
    spare = int(world.all_reduce(np.array([room - needed]), ReductionOperation.MIN)[0])
    if spare >= 0:
        return engine.parameters.held()
    if world.rank == 0:
        _log.warning(
            "generate: each of %d passes gathers the parameters, %.3g GB on each rank and %.3g GB "
            "in all of them, because a rank has %.3g GB too little memory to gather them once; on "
            "a node with more, sample from the plain model of `unsharded(root=0)`",
            passes,
            needed / 1e9,
            passes * needed / 1e9,
            -spare / 1e9,
        )
    return nullcontext()


def require_alike(world: CommunicationBackend, what: str, given: object) -> None:
    """Refuse a call if ``what``, in words, differs between the ranks. Collective."""
    # A checksum, because arguments such as a prompt may be long.
    marks = world.all_gather(np.array([zlib.crc32(repr(given).encode())]))
    if (marks != marks[0]).any():
        raise ValueError(
            f"{what} differ between ranks (checksums {marks.tolist()}); every rank must pass the "
            "same"
        )


def agreed_vector(engine: Engine, vector: Array, name: str, rate: float = 0.0) -> Array:
    """Return ``vector`` in host memory and the model's dtype, if ranks agree. Collective.

    Parameters
    ----------
    engine : Engine
        Engine of the model.
    vector : Array
        Shape (parameter_count,).
    name : str
        Name of the method that the user called.
    rate : float
        A learning rate that must be equal, too.

    Raises
    ------
    TypeError
        For anything but an array of real numbers, before anything is communicated.
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
    # Checksums are of bytes, so that layout and dtype must be the same on all ranks before.
    vector = np.ascontiguousarray(to_host(vector), dtype=dtype)
    own = np.array([[zlib.crc32(vector.data), rate]])  # float64 holds both
    marks, rates = engine.world.all_gather(own, subject=engine.layout.subject).T
    if (rates != rates[0]).any():
        raise ValueError(f"{name}: the learning rates differ between ranks: {rates.tolist()}")
    if (marks != marks[0]).any():
        raise ValueError(
            f"{name}: the vectors differ between ranks (checksums {marks.astype(int).tolist()}); "
            "every rank must pass the same values"
        )
    return vector
