import importlib
import os
import socket
import sys
import threading

import pytest

import mpishard
from mpishard import run_in_threads
from mpishard.base import settings
from mpishard.communication.failure import hooks as exit_hooks
from mpishard.communication.failure.hooks import claim_rank, is_helper
from mpishard.communication.mpi.library import (
    check_launched_world,
    check_machine,
    delay_aborts,
    launcher_name,
)
from mpishard.communication.mpi.slurm_pmi import limit_values
from mpishard.errors import CommunicationError, MPIUnavailableError

start = importlib.import_module("mpishard.communication.process")
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


def test_init_returns_the_backend_of_a_thread_rank(alone):
    def body(backend):
        assert mpishard.init() is backend
        return mpishard.init("memory").rank

    assert run_in_threads(3, body) == [0, 1, 2]
    assert mpishard.init().world_size == 1


def test_another_name_of_a_backend_is_refused(alone):
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
    for words in (f"started {count} processes", family, "Some MPI v1.2", "library's mpiexec"):
        assert words in str(caught.value)


def test_a_launcher_may_start_one_process(alone):
    check_launched_world(1, "any")
    alone.setenv("PMI_SIZE", "1")
    check_launched_world(1, "any")
    alone.delenv("PMI_SIZE")
    alone.setenv("PMIX_RANK", "0")
    check_launched_world(1, "any")


@pytest.mark.parametrize(
    ("library", "taken", "words"),
    [
        ("MPICH Version: 5", None, r"`srun --mpi=pmi2` \(it took none; .* names others\), or with"),
        ("Open MPI v5.0.11", "pmi2", r"start with `srun --mpi=pmix` \(it took pmi2; "),
        ("Open MPI v5.0.11", "pmix", "start with that library's mpiexec"),
    ],
)
def test_srun_with_the_wrong_plugin_is_refused_with_the_right_one(alone, library, taken, words):
    alone.setenv("SLURM_STEP_NUM_TASKS", "2")
    alone.delenv("SLURM_MPI_TYPE", raising=False)
    if taken:
        alone.setenv("SLURM_MPI_TYPE", taken)
    with pytest.raises(MPIUnavailableError, match=words):
        check_launched_world(1, library)


def test_open_mpi_waits_under_srun_alone_for_the_report(alone):
    for name in ("OMPI_MCA_mpi_abort_delay", "MPISHARD_JOB_FOLDER"):
        alone.delenv(name, raising=False)
    delay_aborts()
    assert "OMPI_MCA_mpi_abort_delay" not in os.environ
    alone.setenv("SLURM_STEP_NUM_TASKS", "2")
    alone.setenv("MPISHARD_JOB_FOLDER", "/nowhere")
    delay_aborts()
    assert "OMPI_MCA_mpi_abort_delay" not in os.environ
    alone.delenv("MPISHARD_JOB_FOLDER")
    alone.setenv("OMPI_MCA_mpi_abort_delay", "0")  # the user's choice
    delay_aborts()
    assert os.environ.pop("OMPI_MCA_mpi_abort_delay") == "0"
    delay_aborts()
    assert os.environ.pop("OMPI_MCA_mpi_abort_delay") == "1"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("library", ["MPICH Device: ch4:ucx ofi", "MPICH Device: ch4:ofi"])
def test_the_values_of_pmi2_are_shortened(alone, library):
    """This thread is MPI_Init; what it would find in a value of 1024 bytes no longer matters."""
    ours, slurm = socket.socketpair()
    alone.setenv("SLURM_STEP_NUM_TASKS", "2")
    alone.setenv("PMI_FD", str(ours.fileno()))

    def answer():
        for reply in (b"cmd=response_to_init rc=0\n", b"cmd=maxes vallen_max=1024\n", b"direct\n"):
            asked.append(slurm.recv(100))
            slurm.sendall(reply)

    asked, replies = [], []
    server = threading.Thread(target=answer)
    server.start()
    limit_values(library)
    for request in (b"cmd=init\n", b"cmd=get_maxes\n", b"cmd=get_appnum\n"):
        os.write(ours.fileno(), request)
        replies.append(os.read(ours.fileno(), 100))
    server.join(10)
    assert asked == [b"cmd=init\n", b"cmd=get_maxes\n", b"cmd=get_appnum\n"]
    limit = 512 if "ucx" in library else 1024
    assert replies[1:] == [b"cmd=maxes vallen_max=%d\n" % limit, b"direct\n"]
    helpers = [thread for thread in threading.enumerate() if thread.name == "mpishard-pmi"]
    for thread in helpers:
        thread.join(10)
    assert not any(thread.is_alive() for thread in helpers)
    ours.close()
    slurm.close()


# --------------------------------------------------------------------- before MPI is started

MIB = 2**20
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: .."


class Memory:
    """A /dev/shm of ``total`` bytes, of which ``free`` are free."""

    f_frsize = 1

    def __init__(self, total, free):
        self.f_blocks, self.f_bavail = total, free


@pytest.mark.parametrize(
    ("ranks", "total", "free", "words"),
    [
        (2, 1 * MIB, 1 * MIB, r"has 1.0 MiB, of which 1.0 are free, .* about 20 MiB for 2 ranks"),
        (16, 64 * MIB, 64 * MIB, "needs about 128 MiB for 16 ranks: .*docker run --shm-size=2g"),
        (2, 1000 * MIB, 1 * MIB, "of which 1.0 are free"),
        (8, 64 * MIB, 8 * MIB, ""),
        (2, 20 * MIB, 20 * MIB, ""),
    ],
)
def test_too_little_shared_memory_for_mpich_is_refused(monkeypatch, ranks, total, free, words):
    monkeypatch.setenv("MPI_LOCALNRANKS", str(ranks))
    monkeypatch.setattr(os, "statvfs", lambda _: Memory(total, free))
    if words:
        with pytest.raises(MPIUnavailableError, match=words):
            check_machine(MPICH)
    else:
        check_machine(MPICH)
    check_machine("Open MPI v5.0.11")  # which has other ways


def test_missing_or_read_only_shared_memory_is_refused(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        with pytest.raises(MPIUnavailableError, match="is read-only for this process: mount -o"):
            check_machine(MPICH)

    def fails(_):
        raise FileNotFoundError

    monkeypatch.setattr(os, "statvfs", fails)
    with pytest.raises(MPIUnavailableError, match="and there is none"):
        check_machine(MPICH)


def test_too_few_file_descriptors_are_refused(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    with pytest.raises(MPIUnavailableError, match=r"may open 20 files, \d+ are .*ulimit -n 1024"):
        check_machine("Open MPI v5.0.11")


OF_OPEN_MPI = {
    "PMIX_NAMESPACE": "prterun-1",
    "PMIX_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_VERSION": "5.0.11",
}


@pytest.mark.parametrize(
    ("variables", "library", "words"),
    [
        (OF_OPEN_MPI, MPICH, "Open MPI 5.0.11 started this process, and mpi4py loads MPICH Ver"),
        ({"PMIX_NAMESPACE": "x"}, MPICH, "a PMIx launcher started .*: start with `mpishard run`"),
        (OF_OPEN_MPI | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0",
                        "SLURM_PROCID": "0"}, MPICH, "srun --mpi=pmix .* `srun --mpi=pmi2` "),
        (OF_OPEN_MPI, f"{MPICH}\nMPICH configure: --with-pmix=/usr", ""),
        (OF_OPEN_MPI | {"PMI_FD": "7"}, MPICH, ""),  # a Hydra with both
        (OF_OPEN_MPI, "Open MPI v5.0.11", ""),
    ],
)  # fmt: skip
def test_a_launcher_that_mpich_cannot_join(alone, variables, library, words):
    for name, value in variables.items():
        alone.setenv(name, value)
    if words:
        with pytest.raises(MPIUnavailableError, match=words):
            check_machine(library)
    else:
        check_machine(library)


# ------------------------------------------------------------------------- helpers of a rank


@pytest.fixture
def rank_process(alone):
    """A process that a launcher started as rank 1 of 2, and that has claimed to be it."""
    alone.setenv("PMI_SIZE", "2")
    alone.setenv("PMI_RANK", "1")
    alone.delenv("PMI_FD", raising=False)
    alone.setenv("MPISHARD_RANK_PROCESS", "")
    claim_rank()
    return alone


def test_a_process_that_a_rank_starts_is_no_rank(rank_process):
    assert not is_helper()
    claim_rank()  # as every import does
    assert not is_helper()
    rank = os.getpid()
    rank_process.setattr(os, "getpid", lambda: rank + 1)
    assert is_helper()
    claim_rank()
    assert is_helper()
    for make in (mpishard.init, lambda: mpishard.init("mpi"), mpishard.MPICommunicationBackend):
        with pytest.raises(MPIUnavailableError, match=rf"helper process of rank 1: .*\({rank}\)"):
            make()
    assert mpishard.init("memory").world_size == 1
    assert run_in_threads(2, lambda backend: backend.rank) == [0, 1]


def test_a_helper_hooks_no_exceptions(rank_process):
    rank = os.getpid()
    rank_process.setattr(exit_hooks, "_hooked", set())
    hooks = []
    rank_process.setattr(exit_hooks, "_hook_exceptions", lambda: hooks.append(1))
    exit_hooks.install_before_init()
    assert hooks == [1]
    rank_process.setattr(os, "getpid", lambda: rank + 1)
    exit_hooks.install_before_init()
    assert hooks == [1]


@pytest.mark.parametrize("identity", ["PMI_RANK", "PMIX_NAMESPACE", "SLURM_STEP_ID"])
def test_a_process_of_an_inner_job_is_a_rank(rank_process, identity):
    rank = os.getpid()
    rank_process.setattr(os, "getpid", lambda: rank + 1)
    rank_process.setenv(identity, "another 0")
    assert not is_helper()
    claim_rank()
    rank_process.setattr(os, "getpid", lambda: rank + 2)
    assert is_helper()


def test_a_process_with_its_own_launcher_connection_is_a_rank(rank_process):
    rank = os.getpid()
    outer, inner = socket.socketpair(), socket.socketpair()
    with outer[0], outer[1], inner[0], inner[1]:
        rank_process.setenv("PMI_FD", str(outer[0].fileno()))
        claim_rank()
        rank_process.setattr(os, "getpid", lambda: rank + 1)
        assert is_helper()  # inherited, as by os.system
        rank_process.setenv("PMI_FD", str(inner[0].fileno()))
        assert not is_helper()
        rank_process.setenv("PMI_FD", "99999")  # closed, as by subprocess
        assert is_helper()


def test_a_job_outside_the_launcher_inherits_no_rank(rank_process):
    assert "MPISHARD_RANK_PROCESS" not in settings.outside_launcher()
