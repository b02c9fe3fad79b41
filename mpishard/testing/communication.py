"""Conformance of communication backends, as checks that run on any backend.

Each ``check_*`` method takes the backend of one rank, and is called by every rank of a world: by
threads, under mpiexec, or by a launcher of your own::

    from mpishard import run_in_threads
    from mpishard.testing.communication import CommunicationConformance

    run_in_threads(4, CommunicationConformance().run)

A check compares with results that each rank computes alone, from the inputs of all ranks, by simple
code of its own: a list of slots for the tree of a reduction, ``concatenate`` for a gather. It
raises AssertionError on the ranks that got another result.
"""

from __future__ import annotations

import numpy as np

from mpishard.communication import CommunicationBackend, ReductionOperation
from mpishard.testing.reductions import (
    MovementChecks,
    ReductionChecks,
    assert_same,
    bounds,
    even_sizes,
    right_calls,
    tree_reduce,
    values,
)
from mpishard.testing.refusals import RefusalChecks
from mpishard.testing.twins import TransferChecks, TwinChecks

SUM = ReductionOperation.SUM


class CommunicationConformance(
    ReductionChecks, MovementChecks, TwinChecks, TransferChecks, RefusalChecks
):
    """The contract of `CommunicationBackend`, check by check.

    Parameters
    ----------
    dtypes : sequence of dtype
        The dtypes that the backend can send. Default: all of the contract.
    """

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the checks, in the order in which `run` calls them."""
        parts = [*CommunicationConformance.__bases__, CommunicationConformance]
        return [name for part in parts for name in vars(part) if name.startswith("check_")]

    def run(self, backend: CommunicationBackend) -> None:
        """Call every check twice: the second call finds state that the first has left behind."""
        # In one order on all ranks, because every check is collective.
        for name in self.names():
            # Buffers, rings and rows are used again, so that some errors show only in a second
            # call.
            for _ in range(2):
                getattr(self, name)(backend)

    def check_split(self, backend: CommunicationBackend) -> None:
        """Splits with colors, None and keys that reverse the order; groups beside the world."""
        world, rank = backend.world_size, backend.rank
        sub = backend.split(rank % 2)
        assert sub is not None
        members = list(range(rank % 2, world, 2))
        assert (sub.world_size, sub.rank) == (len(members), members.index(rank))
        # Too long for a header, so that both need several steps and can block each other.
        outer = backend.all_reduce_async(np.full(300, float(rank)))
        inner = sub.all_reduce_async(np.full(400, float(rank)))
        if sub.rank % 2:
            # This rank waits for the group first and its peers for the world, so both operations
            # must progress in either wait.
            inner.wait()
        assert outer.wait()[0] == sum(range(world))
        assert inner.wait()[0] == sum(members)
        assert sub.all_gather(np.array([rank])).tolist() == members
        # A group of a group, in reverse order: ranks there differ from those in both other worlds.
        inside = sub.split(0, key=-sub.rank)
        assert inside is not None
        assert inside.all_gather(np.array([rank])).tolist() == members[::-1]
        some = backend.split(3 if rank == 0 else None)
        assert (some is not None) == (rank == 0)
        if some is not None:
            assert (some.rank, some.world_size) == (0, 1)
            assert some.all_reduce(np.array([5]))[0] == 5
        reverse = backend.split(0, key=world - rank)
        assert reverse is not None
        assert reverse.rank == world - 1 - rank
        assert int(reverse.broadcast(np.array(rank), root=0)) == world - 1
        for group in (inside, sub, some, reverse):
            if group is not None:
                group.shutdown()
        backend.barrier()

    def check_shared_memory(self, backend: CommunicationBackend) -> None:
        """Shared memory exists once for a node; arenas give the bits of other collectives."""
        world, rank, nodes = backend.world_size, backend.rank, backend.nodes
        for dtype in self.dtypes:
            # Fewer elements than ranks, and some that two nodes exchange.
            for length in (3, 1001):
                shared = backend.allocate_shared(world, dtype)
                arena = backend.allocate_arena(length + 1, dtype)
                common = backend.allocate_arena(length, dtype, once_per_node=True)
                if shared is None or arena is None or common is None:
                    continue
                assert (shared.shape, shared.dtype) == ((world,), dtype)
                assert not shared.any(), "shared memory that is not zeros"
                backend.barrier()
                inputs = [values(dtype, length, peer, 11) for peer in range(world)]
                total, own = tree_reduce(inputs, SUM), bounds(even_sizes(length, world), rank)
                part = slice(1, None)
                mine = arena.mine[part]
                mine[...] = inputs[rank]
                shared[rank : rank + 1] = inputs[rank][:1]
                out = np.empty(own.stop - own.start, dtype)
                arena.reduce_into(out, part).wait()
                assert_same(out, total[own], "reduce_into")
                # A reduction reads the arrays in place, and must not use them for its partial sums.
                for peer in backend.peers:
                    assert_same(arena.of(peer)[part], inputs[peer], "a vector that was reduced")
                    assert_same(shared[peer : peer + 1], inputs[peer][:1], "shared memory")
                arena.fence().wait()
                arena.reduce_into(mine[own], part).wait()
                assert_same(mine[own], total[own], "reduce_into this rank's own piece")
                mine[...] = inputs[rank]
                arena.reduce_in_place(part).wait()
                assert_same(mine, total, "reduce_in_place")
                mine[...] = 0
                for gathered, target in ((arena, mine), (common, common.mine)):
                    where = part if gathered is arena else slice(None)
                    gathered.gather_in_place(total[own].copy(), where).wait()
                    assert_same(target, total, "gather_in_place")
                backend.barrier()
                common.gather_in_place(common.mine[own]).wait()
                assert_same(common.mine, total, "gather_in_place of a piece that is there")
                assert len(backend.peers) == nodes.count(nodes[rank])

    def check_traffic(self, backend: CommunicationBackend) -> None:
        """The counted bytes are those of the contract, without headers."""
        world, rank = backend.world_size, backend.rank
        others = world - 1
        # Empty, less than one element for each rank, uneven, and beyond the size of a header.
        for length in (0, 1, world + 1, 1001):
            own = even_sizes(length, world)[rank]
            reduced = {"reduce_scatter": 8 * (length - own)}
            expected: dict[str, dict[str, int]] = {
                "all_reduce": reduced | {"all_gather": 8 * own * others},
                "reduce_scatter": reduced,
                "all_gather": {"all_gather": 8 * length * others},
                "broadcast": {"broadcast": 8 * length * others if rank == 0 else 0},
                "scatter": {"scatter": 8 * (length - own) if rank == 0 else 0},
                "gather": {"gather": 0 if rank == 0 else 8 * length},
                "all_to_all": {"all_to_all": 8 * length * others},
                "barrier": {},
            }
            for name, arguments in right_calls(backend, np.ones(length)).items():
                backend.traffic.reset()
                getattr(backend, name)(*arguments)
                got, booked = dict(backend.traffic.bytes_sent), expected[name]
                assert got == booked, f"{name} of {length}: booked {got}, expected {booked}"
                assert dict(backend.traffic.calls) == dict.fromkeys(booked, 1)
        backend.traffic.reset()

    def check_results_are_ones_own(self, backend: CommunicationBackend) -> None:
        """A write into a result, or into an input afterwards, changes no other array."""
        world, rank = backend.world_size, backend.rank
        for size in (4, 2000):
            mine = np.full(size, float(rank))
            kept = [
                backend.all_gather(mine),
                backend.all_reduce(mine, out=np.empty(size)),
                backend.reduce_scatter(mine),
                backend.broadcast(mine.copy() if rank == 0 else None),
                backend.scatter(mine if rank == 0 else None),
                *backend.all_to_all([mine] * world),
            ]
            copies = [array.copy() for array in kept]
            # After the collectives: a backend that passes references on would now change the
            # results.
            mine[...] = -1.0
            backend.all_reduce(mine, out=np.empty(size))
            backend.all_gather(mine)
            backend.barrier()
            for array, copy in zip(kept, copies, strict=True):
                assert_same(array, copy, "a result after later collectives")
                # A value of this rank alone, so that memory that two ranks share shows the other's
                # value.
                array[...] = -2.0 - rank
            backend.barrier()
            for array in kept:
                assert (array == -2.0 - rank).all(), "another rank wrote into this one's result"
            assert (mine == -1.0).all(), "a result of another rank is this one's input"

    def check_without_header_checks(self, backend: CommunicationBackend) -> None:
        """``check_collectives = False`` changes no result."""
        world, rank = backend.world_size, backend.rank
        backend.check_collectives = False
        try:
            for length in (0, 3, world, 3000):
                inputs = [values(np.dtype(np.float64), length, p, 8) for p in range(world)]
                expected = tree_reduce(inputs, SUM)
                assert_same(backend.all_reduce(inputs[rank].copy()), expected, "unchecked")
                assert_same(
                    backend.reduce_scatter(inputs[rank]),
                    expected[bounds(even_sizes(length, world), rank)],
                    "unchecked",
                )
                backend.barrier()
                assert_same(backend.all_gather(inputs[rank]), np.concatenate(inputs), "unchecked")
        finally:
            # Also after an error: the backend belongs to the caller.
            backend.check_collectives = True
