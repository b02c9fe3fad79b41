"""`CommunicationManager`: one backend for each rank that sets one, and its results."""

import threading

import numpy as np
import pytest

import mpishard as ms
from mpishard.communication import CommunicationManager as Manager
from mpishard.errors import CommunicationError, NotInitializedError
from mpishard.testing.worlds import in_worlds

CALLS = [
    Manager.get_rank,
    Manager.get_world_size,
    Manager.barrier,
    lambda: Manager.all_reduce(np.ones(2)),
    lambda: Manager.reduce_scatter(np.ones(2)),
    lambda: Manager.all_gather(np.ones(2)),
    lambda: Manager.broadcast(np.ones(2)),
    lambda: Manager.scatter(np.ones(2)),
]


@pytest.mark.parametrize("call", CALLS)
def test_calls_before_initialize_are_refused(call):
    assert Manager.is_initialized is False
    with pytest.raises(NotInitializedError, match=r"CommunicationManager\.initialize\(backend\)"):
        call()


@in_worlds(1, 2, 3)
def test_every_rank_has_its_own_backend(backend):
    assert not Manager.is_initialized
    Manager.initialize(backend)
    rank, size = backend.rank, backend.world_size
    for _ in range(2):
        assert Manager.is_initialized is True
        assert (Manager.get_rank(), Manager.get_world_size()) == (rank, size)
        Manager.barrier()
        array = np.array([rank + 1.0, 2.0])
        assert Manager.all_reduce(array) is array
        assert array.tolist() == [size * (size + 1) / 2, 2 * size]
        largest = Manager.all_reduce(np.array([rank], np.float32), ms.ReductionOperation.Max)
        assert largest.tolist() == [size - 1]
        piece = Manager.reduce_scatter(np.arange(4.0), ms.ReductionOperation.AVERAGE)
        mine = ms.ShardLayout(4, size).slice(rank)
        assert piece.tolist() == np.arange(4.0)[mine].tolist()
        assert Manager.all_gather(np.array([rank])).tolist() == list(range(size))
        last = size - 1
        assert Manager.broadcast(np.array([rank]), root=last).tolist() == [last]
        given = np.arange(4) if rank == last else None
        assert Manager.scatter(given, root=last).tolist() == np.arange(4)[mine].tolist()
    with pytest.raises(CommunicationError, match="has a backend already"):
        Manager.initialize(backend)
    Manager.barrier()  # nobody leaves while others still compare
    Manager.shutdown()
    Manager.shutdown()
    assert not Manager.is_initialized
    assert not backend.is_initialized


@in_worlds(1, 2)
def test_wrong_arguments_of_the_manager_are_refused(backend):
    for wrong in (None, "mpi", ms.InMemoryCommunicationBackend):
        with pytest.raises(TypeError, match="must be a CommunicationBackend"):
            Manager.initialize(wrong)
    Manager.initialize(backend)
    for root in (-1, backend.world_size):
        with pytest.raises(ValueError, match=f"root {root} is outside"):
            Manager.broadcast(np.ones(1), root)
        with pytest.raises(ValueError, match=f"root {root} is outside"):
            Manager.scatter(np.ones(1), root)
    for dtype in (np.int64, np.float16, np.complex128, bool):
        for reduce in (Manager.all_reduce, Manager.reduce_scatter):
            with pytest.raises(NotImplementedError, match=f"got {np.dtype(dtype)}"):
                reduce(np.ones(2, dtype))
    for call in (Manager.all_reduce, Manager.reduce_scatter, Manager.all_gather):
        with pytest.raises(TypeError):
            call(None)
    assert Manager.all_reduce(np.ones(1)).tolist() == [backend.world_size]  # nobody is stranded
    backend.shutdown()  # not through the manager, which has none then
    assert not Manager.is_initialized
    with pytest.raises(NotInitializedError):
        Manager.get_rank()


def test_the_manager_initialises_its_backend_and_may_begin_again():
    for environment in ("manager_a", "manager_b"):
        backend = ms.InMemoryCommunicationBackend(0, 1, environment)
        Manager.initialize(backend)
        assert backend.is_initialized
        Manager.shutdown()
        assert not backend.is_initialized


def test_other_threads_have_no_backend():
    seen = []
    Manager.initialize(ms.InMemoryCommunicationBackend(0, 1, "manager_threads"))
    try:
        thread = threading.Thread(target=lambda: seen.append(Manager.is_initialized))
        thread.start()
        thread.join()
        ranks = ms.run_in_threads(2, lambda _: Manager.is_initialized)
    finally:
        Manager.shutdown()
    assert (seen, ranks) == ([False], [False, False])


def test_a_backend_that_fails_to_start_is_not_kept(monkeypatch):
    backend = ms.InMemoryCommunicationBackend(0, 1, "manager_fails")

    def fail():
        raise OSError("no")

    monkeypatch.setattr(backend, "initialize", fail)
    with pytest.raises(OSError, match="no"):
        Manager.initialize(backend)
    assert not Manager.is_initialized
