"""The use of MPI: arrays are never pickled, messages of the user stay apart, groups run out."""

import pickle

import numpy as np
import pytest

from mpishard.errors import CommunicationError
from mpishard.testing.communication import CommunicationConformance
from mpishard.testing.reductions import MovementChecks, ReductionChecks
from mpishard.testing.twins import TransferChecks

_SMALL = 2048
"""Bytes that words about a group may take: names of files, counts."""


@pytest.fixture
def mpi():
    return pytest.importorskip("mpi4py.MPI")


@pytest.fixture
def no_array_is_pickled(mpi, monkeypatch):
    """Let mpi4py's lower-case methods, and pickle itself, refuse arrays."""
    dumps = pickle.dumps

    def refuse(value, *arguments, **options):
        data = dumps(value, *arguments, **options)
        # The module of what makes an array; `init` compares a setting whose value is "numpy".
        assert b"numpy." not in data, f"an array is pickled: {value!r}"
        assert len(data) <= _SMALL, f"{len(data)} bytes are pickled"
        return data

    monkeypatch.setattr(pickle, "dumps", refuse)
    mpi.pickle.__init__(refuse, pickle.loads)
    yield
    mpi.pickle.__init__(dumps, pickle.loads)


@pytest.mark.mpi
@pytest.mark.usefixtures("no_array_is_pickled")
@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
def test_arrays_are_never_pickled(path, mpi, backend):
    with pytest.raises(AssertionError, match="an array is pickled"):
        mpi.COMM_SELF.allgather(np.ones(3))
    with pytest.raises(AssertionError, match="bytes are pickled"):
        mpi.COMM_SELF.bcast(bytes(_SMALL))
    suite = CommunicationConformance([np.dtype(np.float64)])
    parts = ReductionChecks, MovementChecks, TransferChecks
    for name in (name for part in parts for name in vars(part) if name.startswith("check_")):
        getattr(suite, name)(backend)
    large = np.arange(300_000.0)
    assert np.array_equal(backend.all_reduce(large.copy()), large * backend.world_size)


@pytest.mark.mpi
@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
def test_messages_of_the_user_are_not_mixed_with_ours(path, mpi, backend):
    """A wildcard receive of the user gets no message of ours, and ours get none of the user's."""
    comm, rank, size = mpi.COMM_WORLD, backend.rank, backend.world_size
    following, before = (rank + 1) % size, (rank - 1) % size
    mine = np.full(4, 100.0 + rank)
    theirs = np.zeros(4)
    receive = comm.Irecv(theirs, mpi.ANY_SOURCE, mpi.ANY_TAG)
    sends = []
    for number in range(20):
        if number == 10:  # between collectives, with tags that ours have too
            sends.append(comm.Isend(mine, following, 0))
        works = [backend.all_reduce_async(np.full(n, float(rank))) for n in (3, 5000)]
        if size > 1:
            backend.send_async(np.full(4, float(rank)), following, 0)
            assert backend.receive(before, 4, 0).tolist() == [before] * 4
        for work in works:
            assert (work.wait() == sum(range(size))).all()
        group = backend.split(0) if number in (0, 15) else None
        if group is not None:
            assert group.all_gather(np.array([rank])).tolist() == list(range(size))
            group.shutdown()
        backend.barrier()
        if number < 9:  # nobody has sent yet
            assert not receive.Test()
    receive.Wait()
    assert theirs.tolist() == [100.0 + before] * 4
    for send in sends:
        send.Wait()
    backend.barrier()
    assert not comm.Iprobe(mpi.ANY_SOURCE, mpi.ANY_TAG)


@pytest.mark.mpi
def test_an_error_names_the_limit_of_groups(mpi, backend, monkeypatch):
    kept = [backend.split(0) for _ in range(2)]

    def refuse():
        raise mpi.Exception(mpi.ERR_OTHER)

    with monkeypatch.context() as patch:
        patch.setattr(backend._job, "tidy", refuse)
        with pytest.raises(CommunicationError, match=r"is in 3 of them.*shutdown\(\) on groups"):
            backend.split(0)
    # The world is as it was.
    assert backend.all_reduce(np.ones(1)).tolist() == [backend.world_size]
    for one in kept:
        one.shutdown()
    assert backend.split(0).world_size == backend.world_size
