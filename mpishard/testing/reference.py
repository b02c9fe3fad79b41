"""The results of collectives, computed the plain way: every rank knows all inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.contract.call import DTYPES
from mpishard.communication.contract.reduction import ReductionOperation

__all__ = [
    "ADVERSARIAL_VALUES",
    "CommunicationChecks",
    "assert_raises",
    "assert_same",
    "bounds",
    "even_sizes",
    "operations",
    "shapes",
    "tree_reduce",
    "values",
]


SUM, PRODUCT, MIN, MAX, AVERAGE = ReductionOperation

ADVERSARIAL_VALUES = (
    1e16, 1.0, -1e16, 5e-324, -5e-324, 2.2e-308, 1e308, -1e308, 0.1, -0.0, 0.0, 3.0, np.nan, np.inf,
)  # fmt: skip
"""Numbers whose sum, or least or largest, depends on the order in which they are combined."""


def tree_reduce(arrays: Sequence[Array], operation: ReductionOperation) -> Array:
    """Combine ``arrays`` in the contract's tree order, the plain way.

    In round k slot i absorbs slot i + 2**k, for i a multiple of 2**(k+1), if it exists. 16-bit
    floats are combined as float32; AVERAGE divides once, at the end.
    """
    dtype = arrays[0].dtype
    wide = np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype
    combine: Callable[[Array, Array], Array] = {
        SUM: np.add, AVERAGE: np.add, PRODUCT: np.multiply, MIN: np.minimum, MAX: np.maximum,
    }[operation]  # fmt: skip
    slots = [array.astype(wide) for array in arrays]
    stride = 1
    with np.errstate(all="ignore"):
        while stride < len(slots):
            for i in range(0, len(slots) - stride, 2 * stride):
                slots[i] = combine(slots[i], slots[i + stride])
            stride *= 2
        result = slots[0] / np.array(len(slots), wide) if operation is AVERAGE else slots[0]
        return result.astype(dtype)


def assert_same(actual: Any, expected: Array, what: str) -> None:
    """Same shape, dtype and bits; NaNs are equal whatever their payload."""
    assert actual is not None, f"{what}: got None"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, not {expected.dtype}"
    if actual.tobytes() != expected.tobytes():
        both_nan = np.isnan(actual) & np.isnan(expected)
        sides = [np.where(both_nan, np.zeros((), a.dtype), a) for a in (actual, expected)]
        assert sides[0].tobytes() == sides[1].tobytes(), f"{what}: {actual} is not {expected}"


def values(dtype: np.dtype[Any], shape: int | tuple[int, ...], rank: int, salt: int = 0) -> Array:
    """The input of ``rank``, which every rank can compute."""
    generator = np.random.default_rng([rank, salt, 7])
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        return generator.integers(0, 100, shape).astype(dtype)
    real = generator.standard_normal(shape)
    if dtype.kind == "c":
        # Whole numbers: how a complex product is rounded depends on the processor's loop.
        return (np.round(4 * real) + 1j * np.round(4 * generator.standard_normal(shape))).astype(
            dtype
        )
    return real.astype(dtype)


def bounds(sizes: Sequence[int], rank: int) -> slice:
    """The range of ``rank`` if parts of these sizes stand end to end."""
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def even_sizes(length: int, world_size: int) -> list[int]:
    """The split of ``length`` over the ranks, remainder to the first."""
    return [length // world_size + (rank < length % world_size) for rank in range(world_size)]


def shapes(world_size: int) -> list[tuple[int, ...]]:
    """Empty, shorter than the world, around its size, long, and of several dims."""
    lengths = sorted({0, 1, world_size - 1, world_size, world_size + 1, 1000})
    return [(n,) for n in lengths] + [(0, 3), (world_size + 2, 3), (5, 0), (7, 2, 3)]


def assert_raises(
    kind: type[Exception], call: Callable[..., Any], *args: Any, **kwargs: Any
) -> str:
    """The message of the error that ``call`` raises; it must be a ``kind``."""
    try:
        call(*args, **kwargs)
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


class CommunicationChecks:
    """Checks of a backend: methods ``check_*`` that every rank of a world calls.

    Parameters
    ----------
    dtypes : sequence of dtype
        Those that travel on the backend. Default: all of the contract.
    """

    def __init__(self, dtypes: Sequence[np.dtype[Any]] = DTYPES) -> None:
        self.dtypes = tuple(dtypes)

    def _cases(self, world: int) -> Iterator[tuple[np.dtype[Any], tuple[int, ...]]]:
        for dtype in self.dtypes:
            for shape in shapes(world):
                yield dtype, shape

    def _has(self, name: str) -> np.dtype[Any] | None:
        """The dtype called ``name``, if it travels on the backend."""
        return next((dtype for dtype in self.dtypes if dtype.name == name), None)


def operations(dtype: np.dtype[Any]) -> list[ReductionOperation]:
    """The operations that have a meaning for ``dtype``."""
    found = [ReductionOperation.SUM, ReductionOperation.PRODUCT]
    if dtype.kind != "c":
        found += [ReductionOperation.MIN, ReductionOperation.MAX]
    if dtype.kind not in "iub":
        found.append(ReductionOperation.AVERAGE)
    return found
