"""The public conformance suite, on thread-ranks and on MPI processes."""

import os

import numpy as np
import pytest

from mpishard import run_in_threads
from mpishard.communication import (
    InMemoryCommunicationBackend,
    MPICommunicationBackend,
    ReductionOperation,
)
from mpishard.communication.contract.call import DTYPES
from mpishard.communication.contract.work import Session
from mpishard.communication.mpi import messages
from mpishard.communication.mpi.node_memory import RowChannel
from mpishard.testing.communication import CommunicationConformance
from mpishard.testing.reductions import ADVERSARIAL_VALUES, assert_same, tree_reduce
from mpishard.testing.worlds import in_worlds

FULL = bool(os.environ.get("MPISHARD_TEST_FULL"))
# What worlds of other sizes do differently has nothing to do with the dtype.
SAMPLE = tuple(d for d in DTYPES if d.name in ("bool", "bfloat16", "float64", "complex64"))


def suite(world_size):
    return CommunicationConformance(DTYPES if world_size == 3 or FULL else SAMPLE)


@pytest.mark.parametrize("name", CommunicationConformance.names())
@in_worlds(1, 2, 3, 4, 5, 6, 7, 8)
def test_conformance(backend, name):
    check = getattr(suite(backend.world_size), name)
    # Stale buffers and left-over messages show in the second run.
    for _ in range(2 if backend.world_size < 3 or FULL else 1):
        check(backend)


# How a world is divided: color and key of each rank.
DIVISIONS = {
    "turned round": lambda rank, world: (0, world - rank),
    "two side by side": lambda rank, world: (rank % 2, -rank),
    "one alone": lambda rank, world: (min(rank, 1), None),
    "one left out": lambda rank, world: (None if rank == 0 else 5, -rank),
}


@pytest.mark.parametrize("division", DIVISIONS)
@in_worlds(2, 3, 4)
def test_conformance_of_groups(backend, division):
    """The groups of one world work at the same time, at different speeds."""
    color, key = DIVISIONS[division](backend.rank, backend.world_size)
    group = backend.split(color, key)
    if group is not None:
        # One dtype on this page of the matrix and the other on the next.
        place = 1 + (list(DIVISIONS).index(division) + backend.world_size) % 2
        inner = CommunicationConformance(DTYPES if FULL else SAMPLE[place : place + 1])
        for name in inner.names():
            # What costs most, in every division of one world or another.
            if name != "check_mismatches" or place == 1 or FULL:
                getattr(inner, name)(group)
        group.shutdown()
    CommunicationConformance(SAMPLE[:1]).check_all_reduce(backend)


@in_worlds(3, 4)
def test_a_group_and_its_world_work_at_once(backend):
    """Works of both are under way, and ranks wait for them in different orders."""
    group = backend.split(backend.rank % 2, key=-backend.rank)
    works = []
    for length in (3, 700, 0, 16, 5000):
        for world in (backend, group):
            ones, members = np.ones(length), world.world_size
            works += [
                (world.all_reduce_async(ones.copy()), np.full(length, float(members))),
                (world.all_gather_async(ones), np.ones(length * members)),
                (
                    world.broadcast_async(np.full(length, float(world.rank)), 1 % members),
                    np.full(length, float(1 % members)),
                ),
            ]
    for index in np.random.default_rng(backend.rank).permutation(len(works)):
        work, expected = works[index]
        assert_same(work.wait(), expected, "of a group beside its world")
    group.shutdown()


@in_worlds(2, 3, 4)  # tests/spawned: 5 ranks, --full: 8
def test_mpi_and_memory_give_the_same_bits(backend):
    for dtype in (np.float16, np.float32, np.float64):
        for length in (5, 3001):

            def contribution(rank, dtype=dtype, length=length):
                order = np.random.default_rng([rank, 3]).integers(0, 13, length)
                with np.errstate(all="ignore"):
                    return np.array(ADVERSARIAL_VALUES)[order].astype(dtype)

            for operation in ReductionOperation:
                here = backend.all_reduce(contribution(backend.rank), operation)
                in_memory = run_in_threads(
                    backend.world_size,
                    lambda b, o=operation, c=contribution: b.all_reduce(c(b.rank), o),
                )
                for other in in_memory:
                    assert here.tobytes() == other.tobytes()


@in_worlds(2, 3)
def test_the_suite_detects_a_backend_that_accepts_mismatches(backend):

    class Wrong(type(backend)):
        def _verify(self, calls):
            pass  # lets mismatches through

    broken = backend.split(0)
    broken.__class__ = Wrong
    with pytest.raises(AssertionError, match="was not raised"):
        CommunicationConformance().check_mismatches(broken)


def test_the_reference_reduction_follows_the_documented_tree():
    a = [np.array([x]) for x in (0.1, 0.2, 0.3, 0.4, 0.5)]
    expected = ((a[0] + a[1]) + (a[2] + a[3])) + a[4]
    assert tree_reduce(a, ReductionOperation.SUM).tobytes() == expected.tobytes()
    assert tree_reduce(a, ReductionOperation.AVERAGE).tobytes() == (expected / 5).tobytes()


@pytest.mark.mpi
@pytest.mark.parametrize(("nodes", "arena"), [("1", "off"), ("2", "off"), ("2", "auto")])
def test_large_arrays_are_sent_in_several_messages(backend, nodes, arena, monkeypatch):
    """The limit is small here; `test_large.py` sends arrays that are really large."""
    monkeypatch.setenv("MPISHARD_VIRTUAL_NODES", nodes)
    monkeypatch.setenv("MPISHARD_ARENA", arena)
    monkeypatch.setattr(messages, "_LARGE_BYTES", 400)
    monkeypatch.setattr(messages, "_BLOCK_BYTES", 96)
    monkeypatch.setattr(messages.MessageChannel, "ROUND_BYTES", 300)
    with MPICommunicationBackend() as world:
        checks = CommunicationConformance(SAMPLE[1:3])
        for name in (
            "all_reduce",
            "reduce_scatter",
            "all_gather",
            "broadcast",
            "scatter",
            "gather",
            "all_to_all",
            "twins",
            "shared_memory",
            "point_to_point",
            "async_point_to_point",
        ):
            getattr(checks, f"check_{name}")(world)


@in_worlds(1, 2, 3)
def test_scratch_bytes_counts_the_buffers_that_are_kept(backend):
    group = backend.split(0)
    assert group.scratch_bytes == 0
    before = backend.scratch_bytes
    for length in (1_100_000, 1_060_000, 1_100_000):
        group.all_reduce_async(np.ones(length)).wait()
    others = group.world_size - 1
    rows = 0
    if isinstance(group, MPICommunicationBackend) and others:
        rows = 2 * RowChannel.ROW_BYTES
    chunks = group._reducer.scratch_bytes
    assert (0 < chunks < 2**22) or (others < 2 and chunks == 0), "two are combined in one pass"
    assert group.scratch_bytes == rows + chunks
    assert backend.scratch_bytes == before, "a group counts its own"


def test_a_world_of_one_compares_no_calls(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "mpishard.communication.contract.backend.check_calls",
        lambda *given: compared.append(given),
    )
    with InMemoryCommunicationBackend(0, 1, "compared with nobody") as backend:
        backend.all_reduce(np.ones(3))
        backend.all_gather(np.ones(3))
        backend.barrier()
        assert not compared
        backend.all_gather(np.ones(3), out=np.ones(3))
        assert len(compared) == 1  # the rows of out can be wrong


@pytest.mark.mpi
def test_a_rank_that_waits_for_one_collective_polls_only_that(backend, monkeypatch):
    def progress(session):
        raise AssertionError("looked at every world")

    group = backend.split(0)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "progress", progress)
        for world in (backend, group):
            for _ in range(20):
                world.barrier()
                assert world.all_reduce(np.ones(2000))[0] == world.world_size
    first, second = backend.all_reduce_async(np.ones(2000)), group.all_reduce_async(np.ones(2))
    assert (second.wait()[0], first.wait()[0]) == (backend.world_size,) * 2
    assert not backend._pending
    assert not group._pending
