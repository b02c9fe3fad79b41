"""Arrays that a communication backend must bring from rank to rank as they are."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.testing.checks import CommunicationChecks
from mpishard.testing.reference import assert_same, bounds, even_sizes, values

__all__ = ["MovementChecks"]


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
        """From every root, to ranks that bring an array and ranks that bring None."""
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
        """From every root; even pieces and counts of the root's own."""
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
