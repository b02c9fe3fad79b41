"""The bits of all reductions of adversarial values, to be compared between backends and jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from mpishard.base.arrays import Array
from mpishard.communication.contract.arena import Arena
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.call import DTYPES
from mpishard.communication.contract.reduction import ReductionOperation, accumulation_dtype
from mpishard.testing.reductions import (
    ADVERSARIAL_VALUES,
    bounds,
    even_sizes,
    operations,
    tree_reduce,
)

__all__ = ["adversarial", "canonical_bytes", "reduction_digests"]

_LENGTHS = (0, 5, 131, 1501)
# Beside those of `ADVERSARIAL_VALUES`: the largest and smallest numbers of the narrower floats.
_NARROW = (65504.0, -65504.0, 6e-8, 6e-5, 3.3e38, -3.3e38, 1e-40, 1.0009765625, -np.inf, 0.0)


def adversarial(dtype: np.dtype[Any], length: int, rank: int) -> Array:
    """What ``rank`` brings: numbers with which every order and every rounding shows.

    Floats: overflow, cancellation, denormals, both zeros, infinities and NaN. Integers: their
    extremes, so that sums and products wrap around.
    """
    generator = np.random.default_rng([rank, length, 11])
    if dtype.kind == "b":
        return generator.integers(0, 2, length).astype(bool)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        numbers = np.array(
            [limits.min, limits.max, 0, 1, 3, limits.max - 1, limits.max // 2 + 1], dtype
        )
        return numbers[generator.integers(0, len(numbers), length)]
    numbers = np.array([*ADVERSARIAL_VALUES, *_NARROW])
    real, imaginary = numbers[generator.integers(0, len(numbers), (2, length))]
    with np.errstate(all="ignore"):
        if dtype.kind != "c":
            return real.astype(dtype)
        both = np.empty(length, np.complex128)
        both.real, both.imag = real, imaginary
        return both.astype(dtype)


def canonical_bytes(array: Array) -> bytes:
    """The bytes of ``array`` with every NaN the same: NumPy's loops take either operand's sign."""
    if array.dtype.kind in "biu":
        return bytes(array.tobytes())
    parts = array.view(array.real.dtype) if array.dtype.kind == "c" else array
    one_nan: Array = np.where(np.isnan(parts), np.array(np.nan, parts.dtype), parts)
    return bytes(one_nan.tobytes())


def reduction_digests(
    backend: CommunicationBackend, dtypes: Sequence[np.dtype[Any]] = DTYPES
) -> dict[str, str]:
    """Digests of the results of all reductions, the same for every backend. Collective.

    Each is made of one dtype, operation and length, by all_reduce and reduce_scatter, blocking and
    not, and for sums in an arena; 16-bit floats also into float32. All of these ways must give the
    bits of the tree, on every rank.

    Returns
    -------
    dict of str to str
        A name of the case, and the SHA-256 of its result.

    Raises
    ------
    AssertionError
        Where one of the ways gives other bits.
    """
    world, rank = backend.world_size, backend.rank
    digests = {}
    for dtype in dtypes:
        arena = backend.allocate_arena(max(_LENGTHS), dtype)
        for length in _LENGTHS:
            inputs = [adversarial(dtype, length, peer) for peer in range(world)]
            own = bounds(even_sizes(length, world), rank)
            mine = np.empty(length, dtype)
            for operation in operations(dtype):
                name = f"{operation.name} of {length} {dtype.name}"
                total = tree_reduce(inputs, operation)
                wide = _wide_sum(inputs, operation)
                ways = _ways(backend, mine, inputs[rank], operation)
                if arena is not None and operation is ReductionOperation.SUM:
                    part = arena.part(0, length)
                    ways = chain(ways, _ways_in_arena(part, inputs[rank], own.stop - own.start))
                for way, result in ways:
                    whole = total if result.dtype == dtype else wide
                    expected = whole if "all_reduce" in way else whole[own]
                    assert canonical_bytes(result) == canonical_bytes(expected), (
                        f"{name} by {way}, rank {rank} of {world}: {result} is not {expected}"
                    )
                both = canonical_bytes(total) + canonical_bytes(wide)
                digests[name] = hashlib.sha256(both).hexdigest()
    return digests


def _wide_sum(inputs: Sequence[Array], operation: ReductionOperation) -> Array:
    """The reduction of ``inputs`` in the dtype in which they are accumulated."""
    wide = accumulation_dtype(inputs[0].dtype)
    return tree_reduce([array.astype(wide) for array in inputs], operation)


def _ways(
    backend: CommunicationBackend, mine: Array, values: Array, operation: ReductionOperation
) -> Iterator[tuple[str, Array]]:
    """The name of a way to reduce, and what it gives this rank; ``mine`` is overwritten."""

    def fresh() -> Array:
        mine[...] = values
        return mine

    calls: dict[str, Callable[[Array], Array]] = {
        "all_reduce": lambda a: backend.all_reduce(a, operation),
        "all_reduce_async": lambda a: backend.all_reduce_async(a, operation).wait(),
        "all_reduce, out=": lambda a: backend.all_reduce(a, operation, out=np.empty_like(a)),
        "reduce_scatter": lambda a: backend.reduce_scatter(a, operation),
        "reduce_scatter_async": lambda a: backend.reduce_scatter_async(a, operation).wait(),
    }
    wide = accumulation_dtype(mine.dtype)
    if wide != mine.dtype:
        size = even_sizes(mine.size, backend.world_size)[backend.rank]
        calls["reduce_scatter, wide out="] = lambda a: backend.reduce_scatter(
            a, operation, out=np.empty(size, wide)
        )
    for way, call in calls.items():
        yield way, call(fresh())


def _ways_in_arena(arena: Arena, values: Array, size: int) -> Iterator[tuple[str, Array]]:
    """The same for sums in ``arena``; ``size`` is the length of this rank's piece."""
    arena.mine[...] = values
    for dtype in {values.dtype, accumulation_dtype(values.dtype)}:
        out = np.empty(size, dtype)
        arena.reduce_into(out).wait()
        yield f"reduce_into {dtype.name}", out
    arena.reduce_in_place().wait()
    yield "all_reduce in an arena", arena.mine
