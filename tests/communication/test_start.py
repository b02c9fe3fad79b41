import pytest

import mpishard
from mpishard import run_in_threads
from mpishard.communication import start
from mpishard.communication.launcher import check_launched_world, launcher_name
from mpishard.errors import CommunicationError, MPIUnavailableError

LAUNCHERS = ("PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "SLURM_STEP_NUM_TASKS")


@pytest.fixture
def alone(monkeypatch):
    """A process that no launcher started and that has no backend."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(start, "_process_backend", None)
    yield monkeypatch
    made = start._process_backend
    if made is not None:
        made.shutdown()


def test_one_backend_for_one_process(alone):
    backend = mpishard.init()
    assert (backend.rank, backend.world_size) == (0, 1)
    assert backend.is_initialized
    assert mpishard.init() is backend
    assert mpishard.init("memory") is backend
    with pytest.raises(CommunicationError, match="already"):
        mpishard.init("mpi")
    backend.shutdown()
    assert mpishard.init().is_initialized


def test_thread_ranks_get_their_own(alone):
    def body(backend):
        assert mpishard.init() is backend
        return mpishard.init("memory").rank

    assert run_in_threads(3, body) == [0, 1, 2]
    assert mpishard.init().world_size == 1


def test_a_word_that_is_no_backend(alone):
    with pytest.raises(ValueError, match="gloo"):
        mpishard.init("gloo")


def test_mpi_not_launched(alone):
    alone.delitem(__import__("sys").modules, "mpi4py.MPI", raising=False)
    with pytest.raises(MPIUnavailableError, match="no MPI launcher started this process"):
        mpishard.init("mpi")
    with pytest.raises(MPIUnavailableError, match="no MPI launcher"):
        mpishard.MPICommunicationBackend()


def test_memory_under_a_launcher(alone):
    alone.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(CommunicationError, match="launcher of 4 processes"):
        mpishard.init("memory")


def test_a_batch_job_is_not_launched(alone):
    alone.setenv("SLURM_NTASKS", "16")
    assert mpishard.init().world_size == 1


@pytest.mark.parametrize(
    ("variables", "family", "count"),
    [
        ({"PMI_SIZE": "4"}, "MPICH family", "4"),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, "Open MPI", "3"),
        ({"PMIX_RANK": "2"}, "Open MPI", "3"),
        ({"SLURM_STEP_NUM_TASKS": "8", "PMI_SIZE": "8"}, "Slurm", "8"),
    ],
)
def test_a_world_of_one_under_a_foreign_launcher(alone, variables, family, count):
    for name, value in variables.items():
        alone.setenv(name, value)
    assert family in launcher_name()
    check_launched_world(2, "any")
    with pytest.raises(MPIUnavailableError) as caught:
        check_launched_world(1, "Some MPI v1.2\nmore")
    for words in (f"started {count} processes", family, "Some MPI v1.2", "mpishard run"):
        assert words in str(caught.value)


def test_a_world_of_one_that_was_asked_for(alone):
    check_launched_world(1, "any")
    alone.setenv("PMI_SIZE", "1")
    check_launched_world(1, "any")
    alone.delenv("PMI_SIZE")
    alone.setenv("PMIX_RANK", "0")
    check_launched_world(1, "any")


def test_under_srun_without_its_mpi_plugin_the_mend_names_it(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.delenv("PMI_SIZE", raising=False)
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    with pytest.raises(MPIUnavailableError, match="srun --mpi=pmi2"):
        check_launched_world(1, "MPICH Version: 5")
