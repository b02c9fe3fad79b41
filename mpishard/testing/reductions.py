"""Checks of reductions and movements of arrays, which a backend must compute to the bit.

Every rank knows all inputs, so it computes the expected results by itself, with simple code.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpishard.base import Array, DType
from mpishard.communication import DTYPES, CommunicationBackend, ReductionOperation

SUM, PRODUCT, MIN, MAX, AVERAGE = ReductionOperation

ADVERSARIAL_VALUES = (
    1e16, 1.0, -1e16, 5e-324, -5e-324, 2.2e-308, 1e308, -1e308, 0.1, -0.0, 0.0, 3.0, np.nan, np.inf,
)  # fmt: skip
"""Numbers whose sum, minimum or maximum depends on the order in which they are combined."""


def tree_reduce(arrays: Sequence[Array], operation: ReductionOperation) -> Array:
    """Combine ``arrays`` in the contract's tree order, with simple code.

    In round k slot i absorbs slot i + 2**k, for i a multiple of 2**(k+1), if it exists. 16-bit
    floats are combined as float32; AVERAGE divides once, at the end.
    """
    dtype = arrays[0].dtype
    wide = np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype
    combine: Callable[[Array, Array], Array] = {
        SUM: np.add,
        AVERAGE: np.add,
        PRODUCT: np.multiply,
        MIN: np.minimum,
        MAX: np.maximum,
    }[operation]
    # The oracle shares no code with `TreeReducer`, so that an error there cannot hide itself.
    slots = [array.astype(wide) for array in arrays]
    stride = 1
    with np.errstate(all="ignore"):
        while stride < len(slots):
            for i in range(0, len(slots) - stride, 2 * stride):
                slots[i] = combine(slots[i], slots[i + stride])
            stride *= 2
        result = slots[0] / np.array(len(slots), wide) if operation is AVERAGE else slots[0]
        return result.astype(dtype)


def expected_result(
    method: str,
    inputs: Sequence[Any],
    rank: int,
    *,
    operation: ReductionOperation = SUM,
    root: int = 0,
    counts: Sequence[int] = (),
) -> Any:
    """Return the result of a collective on one rank, computed with simple code.

    Parameters
    ----------
    method : str
        The collective.
    inputs : sequence
        Each rank's array; for "all_to_all" each rank's list of arrays.
    rank : int
        The rank that gets the result.
    operation, root, counts
        Arguments of the collective; without ``counts`` pieces are even.
    """
    if method in ("all_reduce", "reduce_scatter", "broadcast", "scatter"):
        is_reduced = method in ("all_reduce", "reduce_scatter")
        whole = tree_reduce(inputs, operation) if is_reduced else inputs[root]
        if method in ("all_reduce", "broadcast"):
            return whole
        return whole[bounds(counts or even_sizes(len(whole), len(inputs)), rank)]
    if method == "all_to_all":
        return [parts[rank] for parts in inputs]
    if method == "all_gather" or (method == "gather" and rank == root):
        return np.concatenate(inputs)
    return None


def right_calls(
    backend: CommunicationBackend, array: Array, root: int = 0
) -> dict[str, tuple[object, ...]]:
    """Return the arguments of a right call of each collective with ``array``, by its name."""
    rooted = array if backend.rank == root else None
    return {
        "all_reduce": (array.copy(),),
        "reduce_scatter": (array,),
        "all_gather": (array,),
        "broadcast": (rooted, root),
        "scatter": (rooted, root),
        "gather": (array, root),
        "all_to_all": ([array] * backend.world_size,),
        "barrier": (),
    }


def assert_same(actual: Any, expected: Any, what: str) -> None:
    """Require the same shape, dtype and bits; NaNs are equal whatever their payload.

    ``expected`` is an array, a list of them, or None.
    """
    if isinstance(expected, list):
        assert len(actual) == len(expected), f"{what}: {len(actual)} arrays, not {len(expected)}"
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other, what)
        return
    if expected is None:
        assert actual is None, f"{what}: got {actual!r}, not None"
        return
    assert actual is not None, f"{what}: got None"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, not {expected.dtype}"
    # As bytes, because -0.0 equals 0.0 in a comparison of numbers.
    if actual.tobytes() != expected.tobytes():
        both_nan = np.isnan(actual) & np.isnan(expected)
        sides = [np.where(both_nan, np.zeros((), a.dtype), a) for a in (actual, expected)]
        assert sides[0].tobytes() == sides[1].tobytes(), f"{what}: {actual} is not {expected}"


def values(dtype: DType, shape: int | tuple[int, ...], rank: int, salt: int = 0) -> Array:
    """Return the input of ``rank``, which every rank can compute, as a new array."""
    return _drawn(dtype, shape, rank, salt).copy()


@functools.lru_cache(maxsize=1024)  # to draw an array takes longer than most collectives on it
def _drawn(dtype: DType, shape: int | tuple[int, ...], rank: int, salt: int) -> Array:
    generator = np.random.default_rng([rank, salt, 7])
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        # Sums may wrap in 8 bits, which gives the same bits in every order.
        return generator.integers(0, 100, shape).astype(dtype)
    real = generator.standard_normal(shape)
    if dtype.kind == "c":
        # Whole numbers, because the rounding of a complex product depends on the processor's loop.
        return (np.round(4 * real) + 1j * np.round(4 * generator.standard_normal(shape))).astype(
            dtype
        )
    return real.astype(dtype)


def bounds(sizes: Sequence[int], rank: int) -> slice:
    """Return the range of ``rank`` if parts of these sizes lie end to end."""
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def even_sizes(length: int, world_size: int) -> list[int]:
    """Return the even split of ``length`` over the ranks, with the remainder on the first."""
    return [length // world_size + (rank < length % world_size) for rank in range(world_size)]


def shapes(world_size: int) -> list[tuple[int, ...]]:
    """Return shapes: empty, shorter than the world, about its size, long, of several dims."""
    # About the world size lie the lengths at which a rank has no element, or one more than others.
    lengths = sorted({0, 1, world_size - 1, world_size, world_size + 1, 1000})
    return [(n,) for n in lengths] + [(0, 3), (world_size + 2, 3), (5, 0), (7, 2, 3)]


def assert_raises(
    kind: type[Exception], call: Callable[..., object], *args: object, **kwargs: object
) -> str:
    """Return the message of the error that ``call`` raises, which must be a ``kind``."""
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
        The dtypes that the backend can send. Default: all of the contract.
    """

    def __init__(self, dtypes: Sequence[DType] = DTYPES) -> None:
        self.dtypes = tuple(np.dtype(dtype) for dtype in dtypes)
        if not self.dtypes:
            raise ValueError("dtypes must name one dtype or more: without one nothing is checked")

    def _cases(self, world: int) -> Iterator[tuple[DType, tuple[int, ...]]]:
        for dtype in self.dtypes:
            for shape in shapes(world):
                yield dtype, shape


def operations(dtype: DType) -> list[ReductionOperation]:
    """Return the operations that have a meaning for ``dtype``."""
    found = [ReductionOperation.SUM, ReductionOperation.PRODUCT]
    if dtype.kind != "c":
        found += [ReductionOperation.MIN, ReductionOperation.MAX]
    if dtype.kind not in "iub":
        found.append(ReductionOperation.AVERAGE)
    return found


class ReductionChecks(CommunicationChecks):
    """The part of `CommunicationConformance` that checks all_reduce and reduce_scatter."""

    def check_all_reduce(self, backend: CommunicationBackend) -> None:
        """Reductions of every dtype, shape and operation, in place and into ``out``."""
        world = backend.world_size
        for dtype, shape in self._cases(world):
            inputs = [values(dtype, shape, rank) for rank in range(world)]
            for operation in operations(dtype) if len(shape) == 1 else [SUM]:
                what = f"all_reduce {operation.name} {dtype.name}{list(shape)}"
                expected = tree_reduce(inputs, operation)
                mine = inputs[backend.rank].copy()
                result = backend.all_reduce(mine, operation)
                assert result is mine, f"{what}: not in place"
                assert_same(mine, expected, what)
            mine, out = inputs[backend.rank].copy(), np.zeros(shape, dtype)
            assert backend.all_reduce(mine, out=out) is out
            assert_same(out, tree_reduce(inputs, SUM), "all_reduce out=")
            assert_same(mine, inputs[backend.rank], "all_reduce input with out=")

    def check_reduce_scatter(self, backend: CommunicationBackend) -> None:
        """Reductions of every dtype, shape and operation; with counts, ``strict`` and ``out``."""
        world, rank = backend.world_size, backend.rank
        for dtype, shape in self._cases(world):
            inputs = [values(dtype, shape, peer, 1) for peer in range(world)]
            even = even_sizes(shape[0], world)
            # The most uneven counts: every other rank has an empty piece.
            all_on_last = [0] * (world - 1) + [shape[0]]
            for operation in operations(dtype) if len(shape) == 1 else [SUM]:
                what = f"reduce_scatter {operation.name} {dtype.name}{list(shape)}"
                expected = tree_reduce(inputs, operation)
                mine = inputs[rank].copy()
                piece = backend.reduce_scatter(mine, operation)
                assert_same(piece, expected[bounds(even, rank)], what)
                assert_same(mine, inputs[rank], f"{what}, input")
            expected = tree_reduce(inputs, SUM)
            piece = backend.reduce_scatter(inputs[rank].copy(), counts=all_on_last)
            assert_same(piece, expected[bounds(all_on_last, rank)], "reduce_scatter counts=")
            mine, strict = inputs[rank].copy(), shape[0] % world == 0
            # ``out`` lies in the input, on this rank's own part or not; or in other memory.
            out = mine[: even[rank]] if len(shape) < 3 else np.ones_like(mine[: even[rank]])
            assert backend.reduce_scatter(mine, strict=strict, out=out) is out
            assert_same(out, expected[bounds(even, rank)], f"reduce_scatter strict={strict}, out=")

    def check_accumulation(self, backend: CommunicationBackend) -> None:
        """16-bit floats are combined in float32, and rounded once; never if ``out`` is float32."""
        world, rank = backend.world_size, backend.rank
        # ``much + 1`` is ``much`` in 16 bits, and twice ``high`` is infinite in float16.
        narrow = {"float16": (2048.0, 60000.0), "bfloat16": (256.0, 256.0)}
        for dtype in (dtype for dtype in self.dtypes if dtype.name in narrow):
            name, (much, high) = dtype.name, narrow[dtype.name]
            for length in (3, 3000):
                added = np.full(length, much if rank == 0 else 1.0).astype(dtype)
                total = np.full(length, much + world - 1.0)
                # The first product overflows float16, and the third factor brings it back into its
                # range.
                factor = {0: high, 1: 2.0, 2: 0.5}.get(rank, 1.0) if world > 2 else high**rank
                cases = [
                    (SUM, added, total),
                    (AVERAGE, np.full(length, high).astype(dtype), np.full(length, high)),
                    (PRODUCT, np.full(length, factor).astype(dtype), np.full(length, high)),
                ]
                for operation, mine, expected in cases if world > 1 else []:
                    what = f"{operation.name} of {length} {name} in float32"
                    own = bounds(even_sizes(length, world), rank)
                    once = expected.astype(dtype)
                    assert_same(backend.all_reduce(mine.copy(), operation), once, what)
                    assert_same(backend.reduce_scatter(mine, operation), once[own], what)
                wide = np.empty(total[bounds(even_sizes(length, world), rank)].shape, np.float32)
                assert backend.reduce_scatter(added, out=wide) is wide
                exact = np.full(wide.shape, much + world - 1, np.float32)
                assert_same(wide, exact, f"reduce_scatter of {name} into float32")

    def check_tree_order(self, backend: CommunicationBackend) -> None:
        """Sums that depend on their order, of short arrays (in headers) and of long ones."""
        world = backend.world_size
        numbers = np.array(ADVERSARIAL_VALUES)
        names = ("float16", "bfloat16", "float32", "float64", "complex128")
        for dtype in (dtype for dtype in self.dtypes if dtype.name in names):
            name = dtype.name
            for length in (3, len(numbers), 4097):
                inputs = []
                for rank in range(world):
                    order = np.random.default_rng([rank, length]).integers(0, len(numbers), length)
                    with np.errstate(all="ignore"):
                        inputs.append(numbers[order].astype(dtype))
                for operation in operations(dtype):
                    if dtype.kind == "c" and operation is not SUM:
                        continue
                    expected = tree_reduce(inputs, operation)
                    result = backend.all_reduce(inputs[backend.rank].copy(), operation)
                    assert_same(result, expected, f"tree {operation.name} {name}[{length}]")
                    sizes = even_sizes(length, world)
                    piece = backend.reduce_scatter(inputs[backend.rank], operation)
                    assert_same(
                        piece,
                        expected[bounds(sizes, backend.rank)],
                        f"tree {operation.name} {name}[{length}] scattered",
                    )


class MovementChecks(CommunicationChecks):
    """The part of `CommunicationConformance` that checks collectives without a reduction."""

    def check_all_gather(self, backend: CommunicationBackend) -> None:
        """Gathers of even, uneven and empty arrays; into ``out``, and from any part of ``out``."""
        world, rank = backend.world_size, backend.rank
        for dtype, shape in self._cases(world):
            for rows in ([shape[0]] * world, [(peer * 3) % (world + 1) for peer in range(world)]):
                trailing = shape[1:]
                inputs = [values(dtype, (n, *trailing), p, 2) for p, n in enumerate(rows)]
                expected = np.concatenate(inputs)
                what = f"all_gather {dtype.name} rows {rows} of {list(trailing)}"
                result = backend.all_gather(inputs[rank].copy())
                assert_same(result, expected, what)
                result[...] = 0  # if it is another rank's buffer, a comparison below fails
                out = np.zeros(expected.shape, dtype)
                mine = inputs[rank].copy()
                if rows[0] != rows[-1]:
                    mine = out[bounds(rows, rank)]  # where it belongs already
                    mine[...] = inputs[rank]
                assert backend.all_gather(mine, out=out) is out
                assert_same(out, expected, f"{what}, out=")
                if dtype != self.dtypes[-1]:
                    continue
                for start in (0, (len(out) - rows[rank]) // 2, len(out) - rows[rank]):
                    out = np.zeros(expected.shape, dtype)
                    part = out[start : start + rows[rank]]
                    part[...] = inputs[rank]
                    backend.all_gather(part, out=out)
                    assert_same(out, expected, f"{what}, from row {start} of out")

    def check_broadcast(self, backend: CommunicationBackend) -> None:
        """Broadcasts from every root, to ranks that bring an array and ranks that bring None."""
        for dtype, shape in self._cases(backend.world_size):
            # Another root for each shape, so that all ranks are roots.
            root = (len(shape) + shape[0]) % backend.world_size
            expected = values(dtype, shape, root, 3)
            for brings in (False, True):
                mine: Array | None = np.zeros(shape, dtype) if brings else None
                if backend.rank == root:
                    mine = expected.copy()
                result = backend.broadcast(mine, root)
                assert_same(result, expected, f"broadcast {dtype.name}{list(shape)} of {root}")
                assert mine is None or result is mine, "broadcast returned another array"
        for root in range(backend.world_size):
            sent = np.array(root * 11) if backend.rank == root else None
            assert int(backend.broadcast(sent, root)) == root * 11

    def check_scatter(self, backend: CommunicationBackend) -> None:
        """Scatters from every root, in even pieces and in counts that the root chooses."""
        world, rank = backend.world_size, backend.rank
        for dtype, shape in self._cases(world):
            root = shape[0] % world
            sent = values(dtype, shape, root, 4)
            first_takes_all = [shape[0]] + [0] * (world - 1)
            for counts in (None, first_takes_all):
                sizes = counts or even_sizes(shape[0], world)
                mine = sent.copy() if rank == root else None
                strict = shape[0] % world == 0  # only the root looks at it, and at counts
                piece = backend.scatter(
                    mine, root, counts=counts if rank == root else None, strict=strict
                )
                what = f"scatter {dtype.name}{list(shape)} of {root}, counts {counts}"
                assert_same(piece, sent[bounds(sizes, rank)], what)
                piece[...] = 0
                if mine is not None:
                    assert_same(mine, sent, f"{what}, input")

    def check_gather(self, backend: CommunicationBackend) -> None:
        """Gathers to every root, of uneven and empty arrays."""
        world, rank = backend.world_size, backend.rank
        for dtype, shape in self._cases(world):
            root = shape[0] % world
            rows = [(shape[0] + peer) % (world + 2) for peer in range(world)]
            inputs = [values(dtype, (n, *shape[1:]), p, 5) for p, n in enumerate(rows)]
            result = backend.gather(inputs[rank].copy(), root)
            expected = expected_result("gather", inputs, rank, root=root)
            assert_same(result, expected, f"gather {dtype.name} rows {rows}")

    def check_all_to_all(self, backend: CommunicationBackend) -> None:
        """Exchanges of parts of any shape, empty ones among them."""
        world, rank = backend.world_size, backend.rank

        def part(dtype: DType, source: int, target: int) -> Array:
            shape = ((source + 2 * target) % 4, 1 + target) if source % 2 else (source * 40,)
            return values(dtype, shape, source, 6 + target)

        for dtype in self.dtypes:
            received = backend.all_to_all([part(dtype, rank, peer) for peer in range(world)])
            assert len(received) == world
            for peer, array in enumerate(received):
                assert_same(array, part(dtype, peer, rank), f"all_to_all {dtype.name}")
                array[...] = 0

    def check_barrier(self, backend: CommunicationBackend) -> None:
        """No rank leaves a barrier before all have come to it."""
        world, rank, nodes = backend.world_size, backend.rank, backend.nodes
        for late in range(world):
            if rank == late:
                time.sleep(0.002)
            # Before the barrier on the late rank, too: no rank may leave before this moment.
            came = time.monotonic()
            backend.barrier()
            went = time.monotonic()
            arrivals = backend.all_gather(np.array([came]))
            for peer, arrival in enumerate(arrivals):
                # The clocks of other nodes cannot be compared with this one.
                assert nodes[peer] != nodes[rank] or arrival <= went, (
                    f"rank {rank} left a barrier before rank {peer} came"
                )
