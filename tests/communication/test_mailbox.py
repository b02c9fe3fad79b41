"""Headers through shared memory: rings that wrap round, ranks that run ahead, groups that end."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.communication import MPICommunicationBackend, ReductionOperation
from mpishard.communication.contract.call import DTYPES, Call, Kind
from mpishard.communication.contract.reduction import FixedReducer
from mpishard.communication.mpi import rings as mailbox
from mpishard.communication.mpi.headers import INLINE_BYTES, ROW_BYTES, Headers, make_row
from mpishard.communication.mpi.rings import NO_RING, SLOTS, Mailbox, PostOffice
from mpishard.errors import CollectiveMismatchError
from mpishard.testing.communication import CommunicationConformance
from mpishard.testing.reference import ADVERSARIAL_VALUES, assert_same, tree_reduce

SUM = ReductionOperation.SUM
MOST = 99 if os.environ.get("MPISHARD_TEST_FULL") else 4


def post_offices(world):
    memory = np.zeros(PostOffice.nbytes(world), np.uint8)
    return [PostOffice(memory, rank) for rank in range(world)]


def mailboxes(offices):
    rings = [office.take() for office in offices]
    return [Mailbox(office, rings, rank) for rank, office in enumerate(offices)]


def row(rank, number):
    return bytearray(np.full(ROW_BYTES // 8, 1000 * rank + number, np.int64).tobytes())


def said(rows):
    """What `row` was given, of each rank."""
    numbers = np.frombuffer(rows, np.int64).reshape(-1, ROW_BYTES // 8)
    assert (numbers == numbers[:, :1]).all()
    return numbers[:, 0].tolist()


class TestMailbox:
    @pytest.mark.parametrize("world", [2, 3, 5])
    def test_carries_rows_and_wraps_round(self, world):
        boxes = mailboxes(post_offices(world))
        for number in range(3 * SLOTS + 5):
            letters = []
            for rank in np.random.default_rng(number).permutation(world).tolist():
                assert not any(letter.test() for letter in letters)
                letters.append(boxes[rank].post(row(rank, number)))
            assert all(letter.test() for letter in letters)
            for letter in letters:
                assert said(letter.rows) == [1000 * rank + number for rank in range(world)]

    def test_a_rank_ahead_waits_for_room_and_overtakes_nothing(self):
        boxes = mailboxes(post_offices(3))
        many = 3 * SLOTS
        ahead = [boxes[0].post(row(0, number)) for number in range(many)]
        behind = [boxes[1].post(row(1, number)) for number in range(many)]
        assert not ahead[0].test()
        assert not boxes[0].is_idle
        last = []
        for number in range(many):
            last.append(boxes[2].post(row(2, number)))
            # The newest is asked first, and takes those before it.
            for letters in (ahead, behind, last):
                letters[-1].test()
                assert letters[number].done or letters[number].test()
        for letters in (ahead, behind, last):
            assert [said(letter.rows) for letter in letters] == [
                [number, 1000 + number, 2000 + number] for number in range(many)
            ]
        assert all(box.is_idle for box in boxes)

    def test_a_rank_that_reads_nothing_holds_the_others_back(self):
        first, second = mailboxes(post_offices(2))
        for _ in range(SLOTS):
            assert first.is_idle
            first.post(row(0, 0))
            second.post(row(1, 0))
            first.collect()
        assert not first.is_idle
        second.collect()
        assert first.is_idle

    def test_fences_open_when_all_have_come(self):
        boxes = mailboxes(post_offices(3))
        for _ in range(2 * SLOTS):
            fences = [boxes[0].fence(), boxes[1].fence()]
            assert not any(fence.test() for fence in fences)
            fences.append(boxes[2].fence())
            assert all(fence.test() for fence in fences)

    def test_one_exchange_at_once(self):
        first, second = mailboxes(post_offices(2))
        calls = [Call.describe(3, Kind.ALL_REDUCE, np.ones(2), operation=SUM) for _ in range(2)]
        number = first.post_at_once(3, calls[0].description, b"mine")
        assert not first.meet(number, 10, crowded=False)
        letter = first.take_up(make_row(calls[0], None))
        assert second.post_at_once(3, calls[1].description, b"theirs") == number
        assert second.meet(number, 0, crowded=True)
        payloads = [payload.tobytes().rstrip(b"\0") for payload in second.payloads(number % SLOTS)]
        assert payloads == [b"mine", b"theirs"]
        second.have_read(number)
        assert letter.test()
        assert Headers(letter.rows, calls[0], 0).identical
        # What says another thing is not met.
        number = first.post_at_once(4, calls[0].description, b"")
        second.post_at_once(5, calls[1].description, b"")
        assert not first.meet(number, 10, crowded=False)


class TestPostOffice:
    def test_a_ring_comes_back_when_the_others_have_read_it(self):
        offices = post_offices(2)
        rings = set()
        for number in range(10 * mailbox._RINGS):
            first, second = boxes = mailboxes(offices)
            rings.add(first._ring)
            letters = [box.post(row(rank, number)) for rank, box in enumerate(boxes)]
            assert letters[1].test()
            first.close()  # and has not read: a rank that left reads no more
            second.close()
            assert letters[0].test()
            assert said(letters[0].rows) == said(letters[1].rows) == [number, 1000 + number]
            assert [box.fence().test() for box in boxes] == [False, True]
        assert len(rings) < 4

    def test_rings_run_out(self):
        (office,) = post_offices(1)
        taken = [office.take() for _ in range(mailbox._RINGS)]
        assert len(set(taken)) == mailbox._RINGS
        assert office.take() == NO_RING
        office.put_back(NO_RING)
        assert office.take() == NO_RING
        office.put_back(taken[3])
        assert office.take() == taken[3]


@given(
    world=st.integers(2, 9),
    dtype=st.sampled_from([d for d in DTYPES if d.kind != "c" and d.name != "bool"]),
    operation=st.sampled_from(list(ReductionOperation)),
    seed=st.integers(0, 1000),
)
def test_the_fixed_reducer_is_the_naive_tree(world, dtype, operation, seed):
    if dtype.kind in "iu" and operation is ReductionOperation.AVERAGE:
        return
    generator = np.random.default_rng(seed)
    shape = [(), (1,), (2, 3)][seed % 3]
    arrays = [np.empty(shape, dtype) for _ in range(world)]
    reducer = FixedReducer(arrays, operation)
    for _ in range(2):
        for array in arrays:
            with np.errstate(all="ignore"):
                numbers = generator.choice(ADVERSARIAL_VALUES, shape)
                if dtype.kind in "iu":
                    numbers = generator.integers(0, 100, shape)
                array[...] = np.asarray(numbers).astype(dtype)
        out = np.empty(shape, dtype)
        reducer.reduce(out)
        assert_same(out, np.asarray(tree_reduce(arrays, operation)), operation.name)


# ---------------------------------------------------------------------------------- under MPI


@pytest.mark.mpi
class TestWorlds:
    def test_many_are_issued_before_anybody_waits(self, backend):
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

    def test_small_and_long_and_groups_mixed(self, backend):
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

    def test_mismatches_between_small_calls_are_told(self, backend):
        for number in range(SLOTS):
            kind = (number + backend.rank) % 2
            call = backend.barrier if kind else lambda: backend.all_reduce(np.ones(1))
            with pytest.raises(CollectiveMismatchError, match=r"rank 1: .*test_mailbox.py:"):
                call()
            with pytest.raises(CollectiveMismatchError, match="in shape"):
                backend.all_reduce(np.ones(1 + kind))
            assert backend.all_reduce(np.ones(1)) == backend.world_size

    def test_a_message_goes_on_while_its_sender_waits_for_others(self, backend):
        """A long message is not sent by Isend alone, and reading memory does not call MPI."""
        group = backend.split(0)
        if backend.rank == 0:
            group.send(np.arange(1_000_000), 1)
        if backend.rank == 1:
            assert group.receive(0, 1_000_000)[-1] == 999_999
        backend.barrier()

    def test_groups_beyond_the_rings_send_messages(self, backend):
        groups = [backend.split(0) for _ in range(mailbox._RINGS + 4)]
        for group in groups:
            assert group.all_reduce(np.array([1]))[0] == backend.world_size
            group.barrier()
        assert groups[-1]._group.mailbox is None
        del groups, group
        for _ in range(4):  # those that nobody holds are left, and their rings come back
            backend.split(0).barrier()
        if backend._group.mailbox is not None:
            assert backend.split(0)._group.mailbox is not None

    def test_traffic_is_that_of_messages(self, backend, monkeypatch):
        def count(other):
            for length in (1, 3, 16, 17):
                for dtype in (np.float16, np.float64):
                    other.all_reduce(np.ones((length, 1), dtype))
            other.barrier()
            return other.traffic.calls, other.traffic.bytes_sent

        here = count(backend.split(0))
        plain = backend.split(0)
        plain._group.mailbox = None
        assert count(plain) == here

    def test_no_mailbox_where_memory_is_not_shared(self, backend, monkeypatch):
        assert isinstance(backend, MPICommunicationBackend)
        for arena, nodes in (("off", "1"), ("auto", "2")):
            with monkeypatch.context() as patch:
                patch.setenv("MPISHARD_ARENA", arena)
                patch.setenv("MPISHARD_VIRTUAL_NODES", nodes)
                other = MPICommunicationBackend(backend._comm)
                other.initialize()
                try:
                    assert other._group.mailbox is None
                    CommunicationConformance().check_async_orders(other)
                    # Messages know no third rank. Where ranks are more than cores it takes seconds.
                    if other.world_size == 2 or (arena == "auto" and other.world_size < MOST):
                        CommunicationConformance().check_mismatches(other)
                    # Ranks of one pretended node have a mailbox of their own.
                    node = other.split(other.nodes[other.rank])
                    has_mailbox = node._group.mailbox is not None
                    assert has_mailbox == (arena == "auto" and node.world_size > 1)
                    node.barrier()
                finally:
                    other.shutdown()
