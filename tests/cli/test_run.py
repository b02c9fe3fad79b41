"""``mpishard run``: real jobs, and refusals."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mpishard.base import settings
from mpishard.cli import app
from mpishard.cli.run import job as jobs
from mpishard.cli.run.job_report import JobResult, Outcome
from mpishard.cli.run.launcher import Launcher, MPILibrary
from mpishard.cli.run.supervisor import Supervisor

# The package's `run` is the command.

RANKS = """
import os, sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
threads = os.environ.get("OMP_NUM_THREADS")
MPI.COMM_WORLD.Barrier()
os.write(1, f"rank {comm.rank} of {comm.size} got {sys.argv[1:]} threads {threads}\\n".encode())
"""

FAILS = """
import os, time
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    END
time.sleep(60)
"""

ENDS = """
import os, signal, sys
print("before init", file=sys.stderr)
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
if "EARLY" in sys.argv and rank == "1":
    raise ValueError("boom")
import mpishard, numpy as np
from mpishard.base import settings
from mpishard.communication.mpi.job import library_files
backend = mpishard.init()
backend.all_reduce(np.ones(4))
if backend.rank == 1:
    os.write(1, f"left {settings.job_folder()} {' '.join(library_files())}\\n".encode())
    END
backend.barrier()
if backend.rank == 1:
    LAST
"""

ASKED = """
import os, signal, threading
import mpishard
backend = mpishard.init()
asked = threading.Event()
signal.signal(signal.SIGQUIT, lambda *_: asked.set())
os.write(1, b"ready\\n")
asked.wait()
os.write(1, f"rank {backend.rank} got {os.environ['A']} {os.environ['B']}\\n".encode())
"""

WAITS = """
import os, signal, sys, time
from mpi4py import MPI
if "deaf" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
os.write(1, f"pid {os.getpid()}\\n".encode())
time.sleep(60)
"""


@pytest.fixture
def needs_mpi():
    pytest.importorskip("mpi4py")


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "a script.py"
        path.write_text(text)
        return str(path)

    return write


def start(*arguments, **variables):
    return subprocess.Popen(
        [sys.executable, "-m", "mpishard", "run", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | variables,
        start_new_session=True,
    )


def finish(job):
    """Return the job's output; end a job that hangs."""
    try:
        return job.communicate(timeout=50)
    finally:
        if job.poll() is None:
            job.terminate()
            job.communicate(timeout=20)


def run(*arguments, **variables):
    job = start(*arguments, **variables)
    out, error = finish(job)
    return job.returncode, out, error


@pytest.mark.spawned
@pytest.mark.usefixtures("needs_mpi")
def test_ranks_meet_and_get_the_scripts_options(script):
    code, out, error = run("-n", "2", script(RANKS), "--lr", "3", "-n", "5", "--help", "--", "x y")
    assert code == 0, error
    options = "['--lr', '3', '-n', '5', '--help', '--', 'x y']"
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(re.findall(r"rank .*", out)) == [
        f"rank {rank} of 2 got {options} threads {threads}" for rank in (0, 1)
    ]
    lines = [line for line in error.splitlines() if line.startswith("mpishard run:")]
    assert len(lines) == 1
    assert re.search(r"2 ranks of (MPICH|Open MPI|Intel MPI) [\d.]+, started by /\S+", lines[0])


@pytest.mark.spawned
@pytest.mark.usefixtures("needs_mpi")
def test_threads_that_the_user_chose_stay(script):
    _, out, error = run("-n", "2", script(RANKS), OMP_NUM_THREADS="3")
    assert out.count("threads 3") == 2
    assert "OMP_NUM_THREADS" not in error


@pytest.mark.spawned
@pytest.mark.usefixtures("needs_mpi")
@pytest.mark.parametrize(
    ("end", "codes"),
    [
        ("MPI.COMM_WORLD.Abort(7)", {7}),
        # Hydra now and then reports the SIGKILL with which it then ended the other rank.
        ("os._exit(7)", {7, 9}),
    ],
    ids=["abort", "exit"],
)
def test_ends_with_the_code_of_the_rank_that_failed(script, end, codes):
    started = time.monotonic()
    code, _, _ = run("-n", "2", script(FAILS.replace("END", end)))
    assert code in codes
    assert time.monotonic() - started < 15


PLACE = r"collective 1, all_reduce\(SUM, float64\[4\]\), at .*a script.py:11"


@pytest.mark.spawned
@pytest.mark.usefixtures("needs_mpi")
def test_names_the_first_that_was_killed_and_keeps_its_log(script, tmp_path):
    text = ENDS.replace("END", "os.kill(os.getpid(), 9)").replace("LAST", "pass")
    code, out, error = run("-n", "2", "--log-dir", str(tmp_path / "my logs"), script(text))
    assert code == 137, error
    (line,) = re.findall(r"^mpishard run: rank .*", error, re.MULTILINE)
    words = r"was killed by signal 9 \(SIGKILL; out of memory\?\) after"
    assert re.search(rf"rank 1 \(process \d+ on .*\) {words} {PLACE}; the others were", line)
    _, folder, *shared = re.search(r"left.*", out).group().split(" /")
    assert folder.endswith("my logs/calls")
    assert shared
    assert not [path for path in shared if Path(f"/{path}").exists()]
    assert not (tmp_path / "my logs" / "calls").exists()
    for rank in (0, 1):
        calls = (tmp_path / "my logs" / f"rank-{rank}.calls.txt").read_text()
        assert calls.startswith(f"rank {rank} of 2, process ")
        assert re.search(rf"  {PLACE}\n", calls)
    log = (tmp_path / "my logs" / "rank-1.log").read_text()
    assert re.fullmatch(r"before init\nleft .*\n", log)


@pytest.mark.spawned
@pytest.mark.usefixtures("needs_mpi")
def test_a_rank_that_vanishes_with_code_0_fails_the_job(script):
    text = ENDS.replace("END", "os._exit(0)").replace("LAST", "pass")
    code, out, error = run("-n", "2", script(text))
    assert code == 1
    assert re.search(r"rank 1 .*(ended with code 0 without leaving|is gone)", error)
    assert not Path(re.search(r"left (\S+)", out).group(1)).exists()


@pytest.mark.spawned
@pytest.mark.usefixtures("needs_mpi")
def test_a_rank_that_leaves_well_has_its_own_code(script):
    text = ENDS.replace("END", "pass").replace("LAST", "sys.exit(3)")
    code, _, error = run("-n", "2", "--hosts", "localhost", script(text))
    assert code == 3
    assert "mpishard run: rank" not in error


@pytest.mark.spawned
@pytest.mark.usefixtures("needs_mpi")
def test_a_rank_that_fails_before_mpi_starts_ends_the_job(script, tmp_path):
    logs = tmp_path / "my logs"
    text = ENDS.replace("END", "pass").replace("LAST", "pass")
    code, _, error = run("-n", "2", "--log-dir", str(logs), script(text), "EARLY")
    assert code == 1
    assert error.count("ValueError: boom") == 1
    assert re.search(r"rank 1 .*(ended with code 1 before it called mpishard.init|failed)", error)
    log = (logs / "rank-1.log").read_text()
    assert log.startswith("before init\nTraceback")
    assert "ValueError: boom" in log
    assert (logs / "rank-0.log").read_text().startswith("before init\n")
    assert "SIGTERM" not in error
    assert not (logs / "calls").exists()


@pytest.mark.spawned
@pytest.mark.usefixtures("needs_mpi")
def test_ranks_continue_after_a_report_by_sigquit(script):
    job = start("-n", "2", "--env", "A=b c", "--env", "B", script(ASKED), B="d")
    assert job.stdout.readline() == job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGQUIT)
    out, error = finish(job)
    assert job.returncode == 0, error
    assert sorted(out.splitlines()) == ["rank 0 got b c d", "rank 1 got b c d"]
    assert "mpishard run: SIGQUIT (Ctrl-\\) went to ranks 0, 1\n" in error


@pytest.mark.spawned
@pytest.mark.usefixtures("needs_mpi")
@pytest.mark.parametrize(
    ("number", "options"),
    [(signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGINT, ["deaf"])],
    ids=["SIGINT", "SIGTERM", "SIGINT ignored by the ranks"],
)
def test_a_signal_ends_all_ranks(script, number, options):
    job = start("-n", "2", script(WAITS), *options)
    text = ""
    while len(pids := re.findall(r"pid (\d+)\n", text)) < 2:
        text += job.stdout.readline()
    started = time.monotonic()
    job.send_signal(number)
    finish(job)
    assert job.returncode == 128 + number
    assert time.monotonic() - started < 5
    while any(is_running(int(pid)) for pid in pids):
        assert time.monotonic() - started < 10, "a rank outlived the job"
        time.sleep(0.05)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "SCRIPT"], "at least one rank, got -n 0"),
        (["-n", "2", "nowhere.py"], "there is no script nowhere.py"),
        (["-n", "2", "--hosts", "a,,b", "SCRIPT"], "--hosts has an empty name: 'a,,b'"),
        (["-n", "1", "--hosts", "a,b", "SCRIPT"], "names 2 machines for 1 ranks"),
        (["-n", "2", "--hosts", "a,-b", "SCRIPT"], "--hosts takes names or addresses of machines"),
        (["-n", "4", "--hosts", "a:1,b:2", "SCRIPT"], "has 3 slots for 4 ranks"),
        (
            ["-n", "1", "--hosts", "no.invalid", "SCRIPT"],
            "knows no address of no.invalid, and `ssh no.invalid true` fails",
        ),
        (["-n", "1", "--env", "=x", "SCRIPT"], "--env takes NAME or NAME=VALUE; got '=x'"),
        (["-n", "1", "--env", "NOT_SET_AT_ALL", "SCRIPT"], "there is no such variable"),
        (["-n", "1", "--log-dir", "SCRIPT", "SCRIPT"], "--log-dir must be a folder"),
        (["-n", "1", "--log-dir", " ", "SCRIPT"], "--log-dir must not be blank"),
        (["-n", "2", "--max-restarts", "-1", "SCRIPT"], "--max-restarts must be 0 or more; got -1"),
        (["-n", "2", "--on-failure", "go", "SCRIPT"], "Invalid value for '--on-failure': 'go'"),
        (["-n", "2", "--min-ranks", "1", "SCRIPT"], "--min-ranks 1 is for restarts: give --max-re"),
        (
            ["-n", "2", "--max-restarts", "1", "--hosts", "a,b", "--min-ranks", "3", "SCRIPT"],
            "--min-ranks must be 1 to 2, the job's ranks; got 3",
        ),
        (
            ["-n", "2", "--max-restarts", "1", "--min-ranks", "1", "SCRIPT"],
            "--min-ranks 1 is for jobs whose hosts may be lost: give --hosts",
        ),
        (["-n", "2", "--max-ranks", "4", "SCRIPT"], "--max-ranks 4 is for restarts: give --max-re"),
        (
            ["-n", "2", "--max-restarts", "1", "--hosts", "a,b", "--max-ranks", "1", "SCRIPT"],
            "--max-ranks must be 2, the job's ranks, or more; got 1",
        ),
        (["-n", "two", "SCRIPT"], "Invalid value for '-n'"),
        (["SCRIPT"], "give the number of ranks before the script: -n 4 SCRIPT"),
        (["-n", "2"], "Missing argument"),
        (["-n", "2", "--bogus", "SCRIPT"], "No such option: --bogus"),
    ],
)
def test_refuses(script, arguments, message):
    path = script("")
    result = CliRunner().invoke(app, ["run", *(path if a == "SCRIPT" else a for a in arguments)])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("name", "value"), [("MPISHARD_TIMEOUT", "soon"), ("MPISHARD_ARENA", "sand")]
)
def test_a_bad_setting_is_refused_before_the_job_starts(script, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["run", "-n", "2", script("")])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"mpishard run: {name} must be ")
    assert line.endswith(f"got {value!r}")


def test_open_mpi_forwards_the_variables_of_ranks_on_other_machines(script, monkeypatch, tmp_path):
    commands = []

    def supervise(supervisor, environment):
        commands.append((supervisor.command, environment))
        return Outcome(JobResult(0), "", True, 1.0)

    library = MPILibrary("Open MPI v5.0.11")
    monkeypatch.setattr(jobs, "loaded_library", lambda: library)
    monkeypatch.setattr(jobs, "find_launcher", lambda lib: Launcher(Path("/bin/mpiexec"), lib))
    monkeypatch.setattr(Supervisor, "run", supervise)
    monkeypatch.setenv("MPISHARD_TIMEOUT", "7")
    monkeypatch.setenv("MY_OWN", "here")
    more = ["--max-restarts", "1", "--max-ranks", "9"]
    # Addresses, because names must be known.
    hosts = "127.0.0.1:1,127.0.0.2"
    options = [*more, "--hosts", hosts, "--env", "MINE=x=y", "--log-dir", str(tmp_path / "logs")]
    result = CliRunner().invoke(app, ["run", "-n", "3", *options, script("")])
    assert result.exit_code == 0, result.output
    assert "--max-ranks 9 is above the 3 slots of --hosts" in result.output
    ((command, environment),) = commands
    names = [after for word, after in pairwise(command) if word == "-x"]
    assert len(names) == len(set(names))
    ours = {"MPISHARD_JOB_FOLDER", "MPISHARD_RESTART", "MPISHARD_MAX_RESTARTS"}
    assert ours | {"MINE", "MPISHARD_TIMEOUT", "PATH"} < set(names)
    assert "MY_OWN" not in names
    assert environment["MINE"] == "x=y"
    assert environment["MPISHARD_RESTART"] == "0"
    assert environment["MPISHARD_MAX_RESTARTS"] == "1"
    assert "OMPI_COMM_WORLD_RANK" in command


@pytest.mark.spawned
def test_without_mpi4py(script, tmp_path):
    # A module of that name that cannot be imported stands for one that is not there.
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError(\"No module named 'mpi4py'\")")
    code, _, error = run("-n", "2", script(RANKS), PYTHONPATH=f"{tmp_path}:{Path.cwd()}")
    assert code == 2
    assert error.startswith("mpishard run: mpi4py cannot be used here")
    assert len(error.splitlines()) == 2


def test_version_and_help():
    assert CliRunner().invoke(app, ["--version"]).exit_code == 0
    listed = CliRunner().invoke(app, ["run", "--help"])
    assert listed.exit_code == 0
    assert "SCRIPT [ARGS]..." in listed.stdout
    commands = CliRunner().invoke(app, ["--help"]).stdout.split("Commands:")[1]
    names = [line.split()[0] for line in commands.splitlines() if line[2:3].strip()]
    assert names == [
        "run",
        "doctor",
        "verify",
        "plan",
        "bench",
        "checkpoint",
        "resize",
        "trace",
        "plot",
        "watch",
    ]
    for name in names:  # the list imports no command, so it has the summaries a second time
        summary = CliRunner().invoke(app, [name, "--help"]).stdout.split("\n\n")[1]
        listed = commands.partition(f"  {name} ")[2].partition(".\n")[0] + "."
        assert listed.split() == summary.split()


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"]])
def test_help_waits_for_no_arrays(words):
    program = f"""
import sys
from mpishard.cli import app
try:
    app({words!r})
except SystemExit:
    print("numpy" in sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.endswith("False\n")


def test_run_waits_for_no_models():
    program = """
import sys
from mpishard.cli import app
try:
    app(["run", "-n", "2", "nowhere.py"])
except SystemExit as ended:
    unwanted = {"mpishard.models", "mpishard.optimizers", "mpishard.nn", "mpishard.checkpoint"}
    print(ended.code, sorted(unwanted & sys.modules.keys()))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "2 []\n"


def test_restart_count(monkeypatch):
    monkeypatch.setenv("MPISHARD_RESTART", "2")
    assert settings.restart_count() == 2
    monkeypatch.delenv("MPISHARD_RESTART")
    assert settings.restart_count() == 0


def test_terminal_columns(monkeypatch):
    monkeypatch.setenv("MPISHARD_COLUMNS", "132")
    assert settings.terminal_columns() == 132
    monkeypatch.delenv("MPISHARD_COLUMNS")
    assert settings.terminal_columns() is None


SLEEPS = """
import os, time, mpishard
backend = mpishard.init()
with open(f"/proc/{os.getppid()}/stat") as file:
    proxy = file.read().rpartition(")")[2].split()[1]
os.write(1, f"pid {os.getpid()} proxy {proxy}\\n".encode())
time.sleep(60)
"""


def started_ranks(job):
    """The process of each rank, and those of the launcher that started them."""
    text = ""
    while len(found := re.findall(r"pid (\d+) proxy (\d+)\n", text)) < 2:
        text += (line := job.stdout.readline())
        assert line, job.communicate()
    return {int(pid) for pid, _ in found}, {int(proxy) for _, proxy in found}


def wait_for_the_end_of(pids, seconds):
    started = time.monotonic()
    while any(map(is_running, pids)):
        assert time.monotonic() - started < seconds, "a rank outlived the job"
        time.sleep(0.05)


@pytest.mark.spawned
@pytest.mark.usefixtures("needs_mpi")
def test_a_launcher_s_process_that_is_killed_ends_the_job(script, tmp_path):
    job = start("-n", "2", script(SLEEPS), TMPDIR=str(tmp_path))
    ranks, (proxy,) = started_ranks(job)
    started = time.monotonic()
    os.kill(proxy, signal.SIGKILL)
    _, error = finish(job)
    assert time.monotonic() - started < 10
    assert job.returncode == 1
    assert f"ranks 0, 1 were killed: process {proxy} of mpiexec, which had started" in error
    wait_for_the_end_of(ranks, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["a script.py"]


@pytest.mark.spawned
@pytest.mark.usefixtures("needs_mpi")
def test_a_killed_command_leaves_nothing_behind(script, tmp_path):
    job = start("-n", "2", script(SLEEPS), TMPDIR=str(tmp_path))
    ranks, _ = started_ranks(job)
    job.kill()
    job.communicate(timeout=20)
    wait_for_the_end_of(ranks, 10)
    deadline = time.monotonic() + 10
    while len(left := list(tmp_path.iterdir())) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [path.name for path in left] == ["a script.py"]


LONG = """
import mpishard
backend = mpishard.init()
if backend.rank == 1:
    raise ValueError("x" * 50_000_000)
backend.barrier()
"""


@pytest.mark.spawned
@pytest.mark.usefixtures("needs_mpi")
def test_the_text_of_an_exception_is_cut(script, tmp_path):
    started = time.monotonic()
    code, _, error = run("-n", "2", script(LONG), TMPDIR=str(tmp_path))
    assert code == 1
    assert time.monotonic() - started < 15
    assert "49900000 characters are left out here" in error
    assert len(error) < 500_000
    assert [path.name for path in tmp_path.iterdir()] == ["a script.py"]


@pytest.mark.spawned
@pytest.mark.usefixtures("needs_mpi")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(script, tmp_path, closed):
    out = tmp_path / "out"
    text = f"import mpi4py.MPI as m; open({str(out)!r}, 'a').write('x')"
    command = f'exec "$0" -m mpishard run -n 2 "$1" {closed}'
    ended = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, script(text)],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended
    assert "Error" not in ended.stderr
    assert out.read_text() == "xx"


# Root may have as many processes as it likes; another user cannot read root's files.
RIGHTS = "+dac_override,+dac_read_search"
ANOTHER_USER = [
    "setpriv",
    "--reuid",
    "UID",
    "--regid",
    "UID",
    "--clear-groups",
    "--inh-caps",
    RIGHTS,
    "--ambient-caps",
    RIGHTS,
    "prlimit",
    "--nproc=LIMIT:LIMIT",
]


@pytest.mark.spawned
@pytest.mark.usefixtures("needs_mpi")
@pytest.mark.parametrize("limit", [2, 3, 4, 5])
def test_too_few_processes(limit):
    user = [
        word.replace("UID", f"{47110 + limit}").replace("LIMIT", f"{limit}")
        for word in ANOTHER_USER
    ]
    try:
        # A clone in a home folder of mode 700 has no programs for other users.
        reaches = "import os, sys; sys.exit(not os.access(sys.prefix, os.X_OK))"
        subprocess.run([*user, sys.executable, "-c", reaches], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root can try this, with setpriv, and in a folder that all users reach")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "script.py").write_text(SLEEPS)
        ended = subprocess.run(
            [*user, sys.executable, "-m", "mpishard", "run", "-n", "2", folder / "script.py"],
            capture_output=True, text=True, timeout=40, check=False,
            env=os.environ | {"TMPDIR": name, "HOME": name},
        )  # fmt: skip
        assert ended.returncode == 1, ended
        assert re.search(r"mpishard run: .*ulimit -u", ended.stderr)
        assert not list(folder.glob("mpishard-job-*"))


@pytest.mark.spawned
@pytest.mark.usefixtures("needs_mpi")
def test_too_few_open_files(tmp_path):
    (tmp_path / "script.py").write_text(SLEEPS)
    words = [sys.executable, "-m", "mpishard", "run", "-n", "2", tmp_path / "script.py"]
    ended = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -n 20; exec "$@"', "sh", *words],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert ended.returncode == 1, ended
    assert re.search(r"mpishard run: .*ulimit -n", ended.stderr), ended
