"""Lost ranks and the world of the remaining ones: on threads, and refusals under MPI."""

import threading

import numpy as np
import pytest

import mpishard as ms
from mpishard.cli.run.launcher import Launcher, MPILibrary
from mpishard.communication.mpi.ulfm import check_survivable
from mpishard.communication.threads import backend as memory
from mpishard.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    MPIUnavailableError,
    NotInitializedError,
    PeerError,
)
from mpishard.testing.communication import CommunicationConformance


def lose(backend, *ranks):
    """The world without ``ranks``, which raise."""
    if backend.rank in ranks:
        raise OSError(f"no space left for rank {backend.rank}")
    with pytest.raises(PeerError) as caught:
        backend.barrier()
    assert caught.value.rank in ranks
    return backend.shrink()


@pytest.mark.parametrize(
    ("ranks", "lost", "left"),
    [
        (2, [0], [None, (0, 1)]),
        (3, [1], [(0, 2), None, (1, 2)]),
        (5, [0, 3], [None, (0, 3), (1, 3), None, (2, 3)]),
    ],
)
def test_the_remaining_ranks_are_renumbered_in_order(ranks, lost, left, caplog):
    def body(backend):
        heir = lose(backend, *lost)
        suite = CommunicationConformance([np.dtype(np.float32)])
        suite.check_all_reduce(heir)
        return heir.rank, heir.world_size

    assert ms.run_in_threads(ranks, body, on_failure="shrink") == left
    logged = [record.message for record in caplog.records]
    assert len(logged) == len(lost)
    assert f"rank {lost[-1]} of {ranks} failed alone; the others may go on\nOSError: no space" in (
        "\n".join(logged)
    )
    assert not [name for name in memory._environments if name.startswith("threads-")]


def test_two_losses_one_after_the_other():
    def body(backend):
        first = backend.rank
        for lost in (2, 0):
            if first == lost:
                raise ValueError
            with pytest.raises(PeerError):
                backend.barrier()
            backend = backend.shrink()
        return first, backend.rank, backend.all_gather(np.array([first])).tolist()

    ends = ms.run_in_threads(4, body, on_failure="shrink")
    assert ends == [None, (1, 0, [1, 3]), None, (3, 1, [1, 3])]


def test_the_old_world_refuses_calls_and_names_the_fix():
    def body(backend):
        pair = backend.split(0)
        shared = backend.allocate_shared(4, np.float64)
        heir = lose(backend, 1)
        for old in (backend, pair):
            for call in (old.barrier, old.initialize, old.shrink):
                with pytest.raises(NotInitializedError, match="go on with the backend of 2 that"):
                    call()
            assert not old.is_initialized
        assert ms.init() is heir
        shared[:] = 1
        return heir.split(0).all_reduce(np.ones(2)).tolist()

    assert ms.run_in_threads(3, body, on_failure="shrink")[0] == [2, 2]


def test_waiting_ranks_raise_after_a_shrink_without_a_loss():
    def body(backend):
        if backend.rank == 0:
            heir = backend.shrink()
        else:
            with pytest.raises(PeerError, match=r"rank 0 goes on without this world") as caught:
                backend.receive(0, 1)
            assert caught.value.rank == -1
            heir = backend.shrink()
        return heir.world_size, heir.rank == backend.rank

    assert ms.run_in_threads(3, body) == [(3, True)] * 3


def test_shrink_does_not_wait_for_a_rank_that_has_ended():
    def body(backend):
        if backend.rank == 1:
            return None
        with pytest.raises(PeerError, match="rank 1 left"):
            backend.barrier()
        return backend.shrink().world_size

    assert ms.run_in_threads(3, body) == [2, None, 2]


def test_shrink_does_not_wait_for_a_rank_that_fails_late():
    come = threading.Event()

    def body(backend):
        if backend.rank == 0:
            raise ValueError("the first")
        if backend.rank == 1:
            come.wait(10)
            raise ValueError("the second")
        with pytest.raises(PeerError):
            backend.barrier()
        come.set()
        return backend.shrink().world_size

    assert ms.run_in_threads(3, body, on_failure="shrink") == [None, None, 1]


def test_a_rank_that_does_not_call_shrink_is_named():
    done = threading.Event()

    def body(backend):
        if backend.rank == 1:
            done.wait(10)
            return
        words = r"rank 0 waited 0\.2 s in shrink\(\) for ranks \[1\], which neither failed nor left"
        with pytest.raises(CollectiveTimeoutError, match=words):
            backend.shrink()
        done.set()

    ms.run_in_threads(2, body, timeout=0.2)


def test_the_first_failure_is_raised_if_no_rank_remains():
    def body(backend):
        raise ValueError(f"boom on {backend.rank}")

    with pytest.raises(ValueError, match="boom on"):
        ms.run_in_threads(2, body, on_failure="shrink")


def test_shrink_of_a_group_is_refused():
    def body(backend):
        with pytest.raises(CommunicationError, match="split off another world"):
            backend.split(0).shrink()

    ms.run_in_threads(2, body)


@pytest.mark.parametrize("lost", [0, 1])
def test_launch_begins_again_with_the_remaining_ranks(lost):
    begun, own = [], threading.local()

    def main(backend, word):
        assert word == "given"
        if not hasattr(own, "rank"):
            own.rank = backend.rank
        begun.append((own.rank, backend.world_size))
        backend.barrier()
        if own.rank == lost:
            raise ValueError("boom")
        return backend.all_gather(np.array([own.rank])).tolist()

    result = ms.launch(main, "given", world_size=3, on_failure="shrink")
    assert result == [rank for rank in range(3) if rank != lost]
    assert sorted(begun) == sorted(
        [(rank, 3) for rank in range(3)] + [(rank, 2) for rank in range(3) if rank != lost]
    )


def test_finished_ranks_take_part_in_the_smaller_world():
    """Rank 1 is lost after rank 0 has finished ``main``: all remaining ranks begin again."""
    begun, own = [], threading.local()
    finished = threading.Event()

    def main(backend):
        if not hasattr(own, "rank"):
            own.rank = backend.rank
        begun.append(own.rank)
        backend.barrier()
        if own.rank == 1:
            finished.wait(10)
            raise ValueError("boom")
        if own.rank == 0:
            finished.set()
        return backend.world_size

    assert ms.launch(main, world_size=3, on_failure="shrink") == 2
    assert sorted(begun) == [0, 0, 1, 2, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda word: ms.init(on_failure=word),
        lambda word: ms.run_in_threads(1, print, on_failure=word),
        lambda word: ms.launch(print, on_failure=word),
    ],
)
def test_another_on_failure_is_refused(call):
    with pytest.raises(ValueError, match="on_failure must be 'abort' or 'shrink', got 'ignore'"):
        call("ignore")
    with pytest.raises(ValueError, match=r"on_failure must be 'abort' or 'shrink', got array\("):
        call(np.ones(2))


@pytest.mark.parametrize("word", ["gloo", 5, None, np.ones(2)])
def test_another_backend_is_refused(word):
    for call in (lambda: ms.init(word), lambda: ms.launch(print, backend=word)):
        with pytest.raises(ValueError, match="must be 'auto', 'mpi', 'nccl' or 'memory', got "):
            call()


def test_an_mpi_without_fault_tolerance_is_refused(monkeypatch):
    with pytest.raises(MPIUnavailableError, match=r"this is MPICH Version.*max-restarts"):
        check_survivable("MPICH Version:      5.0.2\nMPICH Release date: ...")
    version = "Open MPI v5.0.11, package: Open MPI\0"
    monkeypatch.delenv("OMPI_MCA_mpi_ft_enable", raising=False)
    with pytest.raises(MPIUnavailableError, match=r"Open MPI v5\.0\.11 .* --on-failure shrink`"):
        check_survivable(version)
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", "1")
    check_survivable(version)


def test_the_launcher_gets_the_option_of_fault_tolerance(tmp_path):
    open_mpi = Launcher(tmp_path / "mpiexec", MPILibrary("Open MPI v5.0.11"))
    command = open_mpi.command(2, ["x"], survives=True)
    assert command[1:5] == ["--with-ft", "ulfm", "-n", "2"]
    assert "--with-ft" not in open_mpi.command(2, ["x"])
    for other in (
        Launcher(tmp_path / "srun", MPILibrary("Open MPI v5.0.11")),
        Launcher(tmp_path / "mpiexec", MPILibrary("MPICH Version: 5.0.2")),
    ):
        with pytest.raises(ValueError, match="--on-failure shrink needs Open MPI 5"):
            other.command(2, ["x"], survives=True)
