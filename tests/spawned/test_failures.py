"""Jobs under mpiexec that fail: each ends soon, with an exit code, and names the rank."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from spawned_jobs import ROOT, environment_of_a_job

from mpishard import run_in_threads
from mpishard.cli.run.launcher import loaded_library

SCENARIOS = Path(__file__).with_name("scenarios.py")
MPIEXEC = shutil.which("mpiexec", path=Path(sys.executable).parent) or shutil.which("mpiexec")
LIMIT = 30
IS_FULL = bool(os.environ.get("MPISHARD_TEST_FULL"))

pytestmark = pytest.mark.spawned
needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and mpiexec",
)


class Ended:
    def __init__(self, process, out, err, seconds):
        self.code, self.out, self.err, self.seconds = process.returncode, out, err, seconds

    def __repr__(self):
        return f"code {self.code} after {self.seconds:.1f} s\n{self.out}\n{self.err}"


def job(scenario, ranks=2, *, first_on_path=(), shell="", by_run=False, **extra):
    """Run a scenario, under mpiexec unless ``ranks`` is 0; return its end."""
    launcher = [] if ranks == 0 else [MPIEXEC, "-n", str(ranks)]
    command = [sys.executable, str(SCENARIOS), *scenario.split()]
    if by_run:
        launcher = [sys.executable, "-m", "mpishard", "run", "-n", str(ranks)]
        del command[0]
    if shell:
        command = ["sh", "-c", shlex.join(command) + shell]
    with subprocess.Popen(
        [*launcher, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_of_a_job(
            PYTHONPATH=os.pathsep.join([*map(str, first_on_path), str(ROOT)]), **extra
        ),
    ) as process:
        try:
            started = time.monotonic()
            out, err = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    return Ended(process, out, err, time.monotonic() - started)


@needs_mpi
@pytest.mark.parametrize("by_run", [False, True])
def test_a_failure_of_a_rank_without_stderr_is_reported(by_run):
    ended = job("raising_rank_without_stderr", by_run=by_run)
    assert ended.code == 1, ended
    said = ended.err if by_run else ended.out
    assert "rank 1 of 2 failed before any collective; the job ends\n" in said, ended
    assert "ValueError: nobody can read this" in said, ended


@needs_mpi
def test_a_rank_that_left_can_be_survived():
    ended = job("leaving_is_caught", 3)
    assert ended.code == 0, ended
    assert ended.out.count("caught, of rank 1: rank 1 left after collective 0") == 4, ended


@needs_mpi
def test_exit_codes_of_the_script_are_kept():
    ended = job("exit_3_everywhere")
    assert ended.code == 3, ended
    assert "mpishard" not in ended.err, ended


@needs_mpi
def test_an_exception_in_a_micro_batch_ends_the_job_and_names_the_rank():
    ended = job("breaks_in_a_micro_batch raise 2 2", 4)
    assert ended.code == 1, ended
    assert ended.seconds < 10, ended
    assert "rank 1 of 4" in ended.err, ended
    assert "ValueError: boom in micro-batch 2" in ended.err, ended
    assert ended.err.count("the job ends") == 1, ended
    assert ended.out.count("predicted") == 4, ended  # what lay in a buffer is not lost
    assert "trained" not in ended.out, ended


@needs_mpi
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory of Linux")
def test_a_killed_rank_ends_the_job_and_leaves_no_shared_memory_of_mpishard():
    before = set(Path("/dev/shm").iterdir())
    ended = job("killed_rank_in_the_arena")
    assert ended.code != 0, ended
    assert ended.seconds < 10, ended
    assert ended.out.count("trained on rank") == 2, ended
    # What the MPI library leaves has names of its own.
    left = {path.name for path in set(Path("/dev/shm").iterdir()) - before}
    assert not [name for name in left if "mpishard" in name], left


@needs_mpi
@pytest.mark.parametrize("scenario", ["breaks_in_a_micro_batch kill 3 1", "quits_rank"])
def test_survivors_name_the_dead_rank_if_the_launcher_spares_them(scenario):
    """Slurm does by default. Here the launcher starts shells, and does not see who is gone.

    Known: hydra, MPICH's mpiexec, kills the others within milliseconds of a rank that is gone
    without MPI_Finalize, before they can look. After ``os._exit(0)`` on one of two ranks the job
    then ends with code 0 and without a word, and nothing in the ranks can change that.
    """
    ended = job(scenario, 3, shell="; sleep 60")
    assert ended.code != 0, ended
    assert ended.seconds < 10, ended
    assert "the process of rank 1 of 3 is gone" in ended.err, ended
    assert "trained" not in ended.out, ended


@pytest.mark.timeout(60)
@needs_mpi
@pytest.mark.parametrize(
    ("scenario", "waits", "says"),
    [("hang", "in collective 2, all_reduce(SUM, float64[5000])",
      "Rank 1: in no collective since collective 1, barrier(), at "),
     ("hang_in_receive", "for a message with tag 5 from rank 1",
      "call a collective and exchange messages in different orders")],
)  # fmt: skip
def test_the_wait_for_a_rank_that_never_comes_is_limited(scenario, waits, says):
    ended = job(scenario, 2, MPISHARD_TIMEOUT="2", MPISHARD_WARN_AFTER="1")
    assert ended.code == 124, ended
    assert 2 < ended.seconds < 10, ended
    assert f"rank 0 of 2 has waited 1 s {waits}" in ended.err, ended
    assert "the job ends (MPISHARD_TIMEOUT)" in ended.err, ended
    # Only for a rank that may be computing.
    assert ("so long, raise MPISHARD_TIMEOUT" in ended.err) == (scenario == "hang"), ended
    report = ended.err.split("the job ends (MPISHARD_TIMEOUT)")[1]
    said, _, table = report.partition("What each rank does, and its last collectives:")
    assert says in said, ended
    assert re.search(rf"rank 0: waits [0-9.]+ s {re.escape(waits)}", table), ended
    assert "    1: barrier() at " in table.split("rank 1: ")[1], ended


@pytest.mark.timeout(60)
@needs_mpi
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the process table of Linux")
@pytest.mark.parametrize(
    ("scenario", "where", "way"),
    [(scenario, where, way)
     for scenario, where in (
         ("stopped_in_a_collective", "in collective 2, all_reduce(SUM, float64[5000]), at "),
         ("stopped_in_init", None),
         ("stopped_before_init", "before or in init"),
     )
     for way in ("plain", "job's folder", "mpishard run")
     # mpishard run makes that folder for each job.
     if IS_FULL or way != "job's folder"],
)  # fmt: skip
def test_a_rank_that_is_stopped_is_named(scenario, where, way, tmp_path):
    has_folder, by_run = way != "plain", way == "mpishard run"
    folder = {"MPISHARD_JOB_FOLDER": str(tmp_path)} if has_folder and not by_run else {}
    limits = {"MPISHARD_TIMEOUT": "2", "MPISHARD_WARN_AFTER": "1"}
    ended = job(scenario, 3, by_run=by_run, **limits, **folder)
    assert ended.code == 124, ended
    assert ended.seconds < 25, ended  # the start of MPI has 1 s more here
    where = where or ("in init" if has_folder else "before or in init")
    words = f"ank 1 is stopped (SIGSTOP, Ctrl-Z or a debugger) {where}"
    warning, _, report = ended.err.partition("the job ends (MPISHARD_TIMEOUT)")
    assert re.search(
        rf"{re.escape(words)}.*; continue it with kill -CONT \d+, or end it", report
    ), ended
    assert words in warning, ended
    assert f"rank 1: stopped (SIGSTOP, Ctrl-Z or a debugger) {where}" in report, ended


@needs_mpi
@pytest.mark.parametrize("ranks", [5, 6, 7, 8] if IS_FULL else [5])
def test_more_ranks_than_cores(ranks):
    specification = importlib.util.spec_from_file_location("scenarios", SCENARIOS)
    scenarios = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(scenarios)
    (bits,) = set(run_in_threads(ranks, scenarios.reduced_bits))
    ended = job("conformance full" if IS_FULL else "conformance", ranks)
    assert ended.code == 0, ended
    assert f"passed in a world of {ranks}" in ended.out, ended
    assert ended.out.count(bits) == ranks, ended


@needs_mpi
def test_messages_outlive_their_sender():
    ended = job("messages_outlive_the_sender")
    assert ended.code == 0, ended
    assert "received" in ended.out, ended


@needs_mpi
def test_messages_that_nobody_receives_delay_nothing():
    ended = job("messages_nobody_takes")
    assert ended.code == 0, ended
    assert ended.seconds < 10, ended


@needs_mpi
def test_communicators_of_groups_are_freed():
    """An MPI library has a few thousand communicators; meshes come and go in one process."""
    ended = job("many_groups")
    assert ended.code == 0, ended
    assert "done" in ended.out, ended


@needs_mpi
def test_several_nodes():
    ended = job("several_nodes", 4, MPIR_CVAR_NUM_CLIQUES="2")
    assert ended.code == 0, ended
    if "nodes (0, 0, 0, 0)" in ended.out:
        pytest.skip("this MPI library does not pretend to have several nodes")
    # MPICH pretends that even ranks are on one node and odd ranks on another.
    assert "nodes (0, 1, 0, 1) of 2" in ended.out, ended


# A /dev of its own: to remove the real /dev/shm would remove it for every process.
WITHOUT_DEV_SHM = (
    "mount -t tmpfs -o mode=755 tmpfs /dev; mknod -m 666 /dev/null c 1 3; "
    "mknod -m 666 /dev/zero c 1 5; mknod -m 666 /dev/urandom c 1 9; ln -s /proc/self/fd /dev/fd"
)


@needs_mpi
@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (WITHOUT_DEV_SHM, "memory that processes share, and there is none: mkdir -p /dev/shm"),
        ("mount -t tmpfs -o size=1m tmpfs /dev/shm", "needs about 20 MiB for 2 ranks"),
        ("mount -t tmpfs -o ro,size=1g tmpfs /dev/shm", "is read-only for this"),
    ],
    ids=["absent", "tiny", "read-only"],
)
def test_too_little_shared_memory_is_named_before_mpi_crashes(memory, words):
    if run_quietly("unshare", "-m", "true"):
        pytest.skip("needs root")
    launch = shlex.join([MPIEXEC, "-n", "2", sys.executable, str(SCENARIOS), "just_init"])
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{memory}; exec {launch}"],
        capture_output=True, text=True, timeout=LIMIT, env=environment_of_a_job(), check=False,
    )  # fmt: skip
    if "MPICH" not in loaded_library().version:  # Open MPI does without
        assert ended.returncode == 0, ended
        return
    assert ended.returncode == 1, ended
    assert "MPIUnavailableError: MPI cannot start on this machine: " in ended.stderr, ended
    assert words in ended.stderr, ended
    assert "SIG" not in ended.stderr, ended


def run_quietly(*command):
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode
    except FileNotFoundError:
        return 127


@needs_mpi
def test_too_few_open_files_are_named_before_mpi_crashes():
    ranks = f"ulimit -n 20; exec {shlex.join([sys.executable, str(SCENARIOS), 'just_init'])}"
    ended = subprocess.run(
        [MPIEXEC, "-n", "2", "sh", "-c", ranks],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment_of_a_job(),
        check=False,
    )
    assert ended.returncode == 1, ended
    assert "MPI cannot start on this machine: a process may open 20 files" in ended.stderr, ended


# ------------------------------------------------------------------------------------ no MPI


@pytest.fixture
def no_mpi4py(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('no mpi4py here')\n")
    return tmp_path


@pytest.mark.parametrize("name", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_launcher_without_mpi4py_is_an_error_that_names_the_fix(name, no_mpi4py):
    ended = job("just_init", 0, first_on_path=[str(no_mpi4py)], **{name: "2"})
    assert ended.code == 1, ended
    assert "MPIUnavailableError" in ended.err, ended
    assert "pip install 'mpishard[mpi]'" in ended.err, ended


@needs_mpi
@pytest.mark.parametrize("name", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_launcher_of_another_mpi_is_an_error_that_names_both(name):
    ended = job("just_init", 0, **{name: "2"})
    assert ended.code == 1, ended
    assert "MPIUnavailableError: the launcher started 2 processes" in ended.err, ended
    assert name in ended.err, ended
    assert "sees a world of one" in ended.err, ended
    assert ("srun --mpi=" if name.startswith("SLURM") else "mpishard run") in ended.err, ended


def test_mpi_without_a_launcher_is_refused():
    ended = job("just_init mpi", 0)
    assert ended.code == 1, ended
    assert "no MPI launcher started this process" in ended.err, ended
    assert "mpiexec -n 4" in ended.err, ended


def test_memory_under_a_launcher_is_refused():
    ended = job("just_init memory", 0, PMI_SIZE="2")
    assert ended.code == 1, ended
    assert "init('memory') under a launcher of 2 processes" in ended.err, ended


def test_a_batch_script_is_no_launcher():
    ended = job("just_init", 0, SLURM_NTASKS="8")
    assert ended.code == 0, ended
    assert "InMemoryCommunicationBackend(rank 0 of 1, environment " in ended.out, ended


@needs_mpi
def test_one_rank_under_a_launcher_is_fine():
    ended = job("just_init mpi", 1)
    assert ended.code == 0, ended
    assert "MPICommunicationBackend(rank 0 of 1)" in ended.out, ended
