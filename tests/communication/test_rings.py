"""Headers in shared memory: rings that wrap round, ranks that are ahead, groups that end."""

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mpishard.communication import MPICommunicationBackend
from mpishard.communication.contract.call import DTYPES
from mpishard.communication.mpi.headers import (
    INLINE_BYTES,
    ROW_BYTES,
    SLOTS,
    MessageExchange,
    RingExchange,
)
from mpishard.errors import CollectiveMismatchError
from mpishard.testing.communication import CommunicationConformance

MOST = 99 if os.environ.get("MPISHARD_TEST_FULL") else 4


def exchanges(world):
    memory = np.zeros(RingExchange.nbytes(world), np.uint8)
    return [RingExchange(memory, rank, world) for rank in range(world)]


def row(rank, number):
    return np.full(ROW_BYTES // 8, 1000 * rank + number, np.int64).tobytes()


def integers_of(rows):
    """Return the integer that each rank gave to `row`."""
    numbers = np.frombuffer(b"".join(rows), np.int64).reshape(-1, ROW_BYTES // 8)
    assert (numbers == numbers[:, :1]).all()
    return numbers[:, 0].tolist()


class TestExchange:
    @pytest.mark.parametrize("world", [2, 3, 5])
    def test_rings_carry_rows_and_wrap_round(self, world):
        boxes = exchanges(world)
        for number in range(3 * SLOTS + 5):
            posted = []
            for rank in np.random.default_rng(number).permutation(world).tolist():
                assert not any(each.test() for each in posted)
                posted.append(boxes[rank].post(row(rank, number)))
            assert all(each.test() for each in posted)
            for each in posted:
                assert integers_of(each.rows) == [1000 * rank + number for rank in range(world)]

    def test_a_rank_that_is_ahead_waits_for_room(self):
        boxes = exchanges(3)
        many = 3 * SLOTS
        ahead = [boxes[0].post(row(0, number)) for number in range(many)]
        behind = [boxes[1].post(row(1, number)) for number in range(many)]
        assert not ahead[0].test()
        last = []
        for number in range(many):
            last.append(boxes[2].post(row(2, number)))
            # The newest is asked first, and takes those before it.
            for posted in (ahead, behind, last):
                posted[-1].test()
                assert posted[number].done or posted[number].test()
        for posted in (ahead, behind, last):
            assert [integers_of(each.rows) for each in posted] == [
                [number, 1000 + number, 2000 + number] for number in range(many)
            ]

    def test_a_rank_that_reads_no_row_stops_the_others(self):
        first, second = exchanges(2)
        for _ in range(SLOTS):
            first.post(row(0, 0))
            second.post(row(1, 0))
            first.collect()
        waiting = first.post(row(0, 1))
        latest = [second.post(row(1, 1))]
        assert not latest[0].done
        assert not waiting.test()
        second.collect()
        assert not latest[0].test()
        assert waiting.test() or waiting.test()
        assert latest[0].test()

    def test_a_fence_is_complete_when_all_have_reached_it(self):
        boxes = exchanges(3)
        for _ in range(2 * SLOTS):
            fences = [boxes[0].fence(), boxes[1].fence()]
            assert not any(fence.test() for fence in fences)
            fences.append(boxes[2].fence())
            assert all(fence.test() for fence in fences)


# ---------------------------------------------------------------------------------- under MPI


@pytest.mark.mpi
class TestWorlds:
    def test_many_works_are_issued_before_the_first_wait(self, backend):
        many = 3 * SLOTS
        for _ in range(2):
            works = [
                backend.all_reduce_async(np.array([backend.rank + number, number]))
                for number in range(many)
            ]
            total = sum(range(backend.world_size))
            if backend.rank % 2:
                works.reverse()
            results = [work.wait().tolist() for work in works]
            if backend.rank % 2:
                results.reverse()
            assert results == [
                [total + number * backend.world_size, number * backend.world_size]
                for number in range(many)
            ]

    def test_an_all_reduce_takes_few_calls(self, backend):
        """The time of a small one is that of its calls, whose number depends on no load."""
        if backend.world_size != 2 or backend.allocate_shared(1, np.int8) is None:
            pytest.skip("two ranks that share memory")
        array, counts = np.zeros(1), []
        for _ in range(50):
            backend.barrier()
            if backend.rank == 0:  # comes last, and so does not poll
                time.sleep(0.002)
            calls = []
            sys.setprofile(lambda frame, event, _, to=calls: to.append((frame.f_code, event)))
            backend.all_reduce(array)
            sys.setprofile(None)
            counts.append(sum(event == "call" for _, event in calls))
        assert backend.rank or min(counts) <= 40

    def test_small_and_long_arrays_in_several_groups(self, backend):
        group = backend.split(0)
        world = backend.world_size
        for number in range(2 * SLOTS):
            long = backend.all_reduce_async(np.full(100, number))
            assert group.all_reduce(np.array([number]))[0] == number * world
            group.barrier()
            assert backend.all_reduce(np.array(number)) == number * world  # behind `long`
            assert long.wait()[-1] == number * world
            assert group.all_gather(np.array([number])).tolist() == [number] * world
            backend.barrier()

    def test_small_reductions_of_every_dtype(self, backend):
        for _ in range(2):
            CommunicationConformance().check_tree_order(backend)
            for dtype in DTYPES:
                for length in (1, INLINE_BYTES // dtype.itemsize, 1 + 128 // dtype.itemsize):
                    array = np.ones(length, dtype)
                    assert backend.all_reduce(array) is array
                    assert (array == np.asarray(backend.world_size).astype(dtype)).all()

    def test_mismatches_of_small_calls_are_refused(self, backend):
        for number in range(SLOTS):
            kind = (number + backend.rank) % 2
            call = backend.barrier if kind else lambda: backend.all_reduce(np.ones(1))
            with pytest.raises(CollectiveMismatchError, match=r"rank 1: .*test_rings.py:"):
                call()
            with pytest.raises(CollectiveMismatchError, match="in shape"):
                backend.all_reduce(np.ones(1 + kind))
            assert backend.all_reduce(np.ones(1)) == backend.world_size

    def test_a_message_advances_while_its_sender_waits(self, backend):
        """MPI sends a long message only during later calls, and a wait at a ring calls no MPI."""
        group = backend.split(0)
        if backend.rank == 0:
            group.send(np.arange(1_000_000), 1)
        if backend.rank == 1:
            assert group.receive(0, 1_000_000)[-1] == 999_999
        backend.barrier()

    def test_each_group_has_rings_and_frees_them(self, backend):
        def descriptors():
            return len(list(Path("/proc/self/fd").iterdir()))

        backend.split(0).barrier()
        before = descriptors()
        groups = [backend.split(0) for _ in range(12)]
        for group in groups:
            assert group.all_reduce(np.array([1]))[0] == backend.world_size
            group.barrier()
            assert type(group._group.exchange) is type(backend._group.exchange)
        del groups, group
        for _ in range(4):  # groups that nobody holds are left, and their memory is let go
            backend.barrier()
            backend.split(0).barrier()
        assert descriptors() <= before + 6

    def test_rings_count_the_same_traffic_as_messages(self, backend, monkeypatch):
        def count(other):
            for length in (1, 3, 16, 17):
                for dtype in (np.float16, np.float64):
                    other.all_reduce(np.ones((length, 1), dtype))
            other.barrier()
            return other.traffic.calls, other.traffic.bytes_sent

        here = count(backend.split(0))
        plain = backend.split(0)
        group = plain._group
        group.exchange = MessageExchange(group.mpi, group.comm, group.data, group.in_flight)
        assert count(plain) == here

    def test_no_rings_if_memory_is_not_shared(self, backend, monkeypatch):
        assert isinstance(backend, MPICommunicationBackend)
        for arena, nodes in (("off", "1"), ("auto", "2")):
            with monkeypatch.context() as patch:
                patch.setenv("MPISHARD_ARENA", arena)
                patch.setenv("MPISHARD_VIRTUAL_NODES", nodes)
                other = MPICommunicationBackend(backend._comm)
                other.initialize()
                try:
                    assert isinstance(other._group.exchange, MessageExchange)
                    CommunicationConformance().check_async_orders(other)
                    # Messages know no third rank. Where ranks are more than cores it takes seconds.
                    if other.world_size == 2 or (arena == "auto" and other.world_size < MOST):
                        CommunicationConformance().check_mismatches(other)
                    # Ranks of one pretended node have rings of their own.
                    node = other.split(other.nodes[other.rank])
                    has_rings = isinstance(node._group.exchange, RingExchange)
                    assert has_rings == (arena == "auto" and node.world_size > 1)
                    node.barrier()
                finally:
                    other.shutdown()
