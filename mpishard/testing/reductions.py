"""Reductions and movements of arrays that a communication backend must compute, to the bit."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.call import DTYPES
from mpishard.communication.contract.reduction import ReductionOperation
from mpishard.testing.reference import (
    ADVERSARIAL_VALUES,
    CommunicationChecks,
    assert_same,
    bounds,
    even_sizes,
    operations,
    tree_reduce,
    values,
)

__all__ = ["MovementChecks", "ReductionChecks"]


SUM, PRODUCT, AVERAGE = (
    ReductionOperation.SUM,
    ReductionOperation.PRODUCT,
    ReductionOperation.AVERAGE,
)


class ReductionChecks(CommunicationChecks):
    """The checks of `CommunicationConformance` of all_reduce and reduce_scatter."""

    def check_all_reduce(self, backend: CommunicationBackend) -> None:
        """Every dtype, shape and operation, in place and into ``out``."""
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
        """Every dtype, shape and operation; counts of one's own; ``strict``, ``out``."""
        world, rank = backend.world_size, backend.rank
        for dtype, shape in self._cases(world):
            inputs = [values(dtype, shape, peer, 1) for peer in range(world)]
            even = even_sizes(shape[0], world)
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
            # In the input, where its own part is and where it is not; or beside it.
            out = mine[: even[rank]] if len(shape) < 3 else np.ones_like(mine[: even[rank]])
            assert backend.reduce_scatter(mine, strict=strict, out=out) is out
            assert_same(out, expected[bounds(even, rank)], f"reduce_scatter strict={strict}, out=")

    def check_accumulation(self, backend: CommunicationBackend) -> None:
        """16-bit floats are combined in float32 and rounded once, or never if ``out`` is."""
        world, rank = backend.world_size, backend.rank
        # ``much + 1`` is ``much`` in 16 bits, and twice ``high`` is infinite in float16.
        for name, much, high in (("float16", 2048.0, 60000.0), ("bfloat16", 256.0, 256.0)):
            dtype = self._has(name)
            if dtype is None:
                continue
            for length in (3, 3000):
                added = np.full(length, much if rank == 0 else 1.0).astype(dtype)
                total = np.full(length, much + world - 1.0)
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
        """Sums of numbers whose order shows, short (in headers) and long, and one by one."""
        world = backend.world_size
        numbers = np.array(ADVERSARIAL_VALUES)
        for name in ("float16", "bfloat16", "float32", "float64", "complex128"):
            dtype = next(d for d in DTYPES if d.name == name)
            if dtype not in self.dtypes:
                continue
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
                        piece, expected[bounds(sizes, backend.rank)],
                        f"tree {operation.name} {name}[{length}] scattered",
                    )  # fmt: skip


class MovementChecks(CommunicationChecks):
    """The checks of `CommunicationConformance` of collectives that combine nothing."""

    def check_all_gather(self, backend: CommunicationBackend) -> None:
        """Even, uneven and empty contributions; into ``out``, and from any part of ``out``."""
        world, rank = backend.world_size, backend.rank
        for dtype, shape in self._cases(world):
            for rows in ([shape[0]] * world, [(peer * 3) % (world + 1) for peer in range(world)]):
                trailing = shape[1:]
                inputs = [values(dtype, (n, *trailing), p, 2) for p, n in enumerate(rows)]
                expected = np.concatenate(inputs)
                what = f"all_gather {dtype.name} rows {rows} of {list(trailing)}"
                result = backend.all_gather(inputs[rank].copy())
                assert_same(result, expected, what)
                result[...] = 0  # a result that is another rank's buffer shows below
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
                strict = shape[0] % world == 0  # the root's business alone, as counts are
                piece = backend.scatter(
                    mine, root, counts=counts if rank == root else None, strict=strict
                )
                what = f"scatter {dtype.name}{list(shape)} of {root}, counts {counts}"
                assert_same(piece, sent[bounds(sizes, rank)], what)
                piece[...] = 0
                if mine is not None:
                    assert_same(mine, sent, f"{what}, input")

    def check_gather(self, backend: CommunicationBackend) -> None:
        """To every root, with uneven and empty contributions."""
        world, rank = backend.world_size, backend.rank
        for dtype, shape in self._cases(world):
            root = shape[0] % world
            rows = [(shape[0] + peer) % (world + 2) for peer in range(world)]
            inputs = [values(dtype, (n, *shape[1:]), p, 5) for p, n in enumerate(rows)]
            result = backend.gather(inputs[rank].copy(), root)
            if rank == root:
                assert_same(result, np.concatenate(inputs), f"gather {dtype.name} rows {rows}")
            else:
                assert result is None, "gather returned an array beside the root"

    def check_all_to_all(self, backend: CommunicationBackend) -> None:
        """Parts of any shape, empty ones among them."""
        world, rank = backend.world_size, backend.rank

        def part(dtype: np.dtype[Any], source: int, target: int) -> Array:
            shape = ((source + 2 * target) % 4, 1 + target) if source % 2 else (source * 40,)
            return values(dtype, shape, source, 6 + target)

        for dtype in self.dtypes:
            received = backend.all_to_all([part(dtype, rank, peer) for peer in range(world)])
            assert len(received) == world
            for peer, array in enumerate(received):
                assert_same(array, part(dtype, peer, rank), f"all_to_all {dtype.name}")
                array[...] = 0

    def check_barrier(self, backend: CommunicationBackend) -> None:
        """Nobody goes on before all have come."""
        world, rank, nodes = backend.world_size, backend.rank, backend.nodes
        for late in range(world):
            if rank == late:
                time.sleep(0.002)
            came = time.monotonic()
            backend.barrier()
            went = time.monotonic()
            arrivals = backend.all_gather(np.array([came]))
            for peer, arrival in enumerate(arrivals):
                # Of other nodes' clocks nothing is known.
                assert nodes[peer] != nodes[rank] or arrival <= went, (
                    f"rank {rank} left a barrier before rank {peer} came"
                )
