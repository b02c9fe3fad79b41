"""The agent of a rank: the rank's end, its signals, and the order of its output in the log."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mpishard.cli.run import rank_agent

pytestmark = [
    pytest.mark.spawned,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux"),
]

TALKS = """
import os, sys
for i in range(300):
    os.write(1 + i * i % 7 % 2, b"%d\\n" % i)
os.write(1, b"x" * 100_000 + b"\\n")
os.write(2, b"half a line")
"""


@pytest.fixture
def start(tmp_path):
    def begin(*program, logs=tmp_path / "logs", **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return subprocess.Popen(
            [sys.executable, "-I", "-S", rank_agent.__file__, "A_RANK", logs, *program],
            text=True,
            **({"env": {"A_RANK": "3", "MPISHARD_JOB_FOLDER": str(tmp_path)}} | options),
        )

    return begin


@pytest.fixture
def log(tmp_path):
    return tmp_path / "logs" / "rank-3.log"


def test_both_streams_are_logged_in_order_and_passed_on_separately(start, log):
    process = start(sys.executable, "-c", TALKS)
    out, error = process.communicate(timeout=20)
    numbers = range(300)
    assert log.read_text().split("\n") == [*map(str, numbers), "x" * 100_000, "half a line"]
    on_error = [i for i in numbers if i * i % 7 % 2]
    assert out.split("\n") == [*(str(i) for i in numbers if i not in on_error), "x" * 100_000, ""]
    assert error.split("\n") == [*map(str, on_error), "half a line"]


@pytest.fixture
def noted(tmp_path):
    """The notes of the agent, as words."""

    def read():
        (file,) = tmp_path.glob("agents-*")
        return [line.split() for line in file.read_text().splitlines()]

    return read


@pytest.mark.parametrize(
    ("end", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9), ("kill -11 $$", -11),
                      ("kill -15 $$", -15)]
)  # fmt: skip
def test_the_agent_notes_how_the_rank_ended_and_ends_alike(start, noted, tmp_path, end, code):
    before = time.monotonic()
    process = start("/bin/sh", "-c", f"echo $PPID $$; wait; {end}", logs="", cwd=tmp_path)
    out, _ = process.communicate(timeout=20)
    agent, rank = out.split()
    assert int(agent) == process.pid
    assert process.returncode == code
    started, ended = noted()
    assert started == ["3", "started", agent, rank]
    assert ended[:3] == ["3", "ended", str(code)]
    assert before < float(ended[3]) < time.monotonic()
    assert not list(tmp_path.glob("core*"))


def test_a_missing_job_folder_ends_no_rank(start, tmp_path):
    process = start(
        "/bin/sh", "-c", "exit 7", logs="", env={"MPISHARD_JOB_FOLDER": str(tmp_path / "none")}
    )
    process.communicate(timeout=20)
    assert process.returncode == 7
    assert not list(tmp_path.iterdir())


TELLS = r"""
import os, signal, time
signal.signal(signal.SIGUSR2, lambda *_: os.write(1, b"forwarded\n"))
signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
os.write(1, b"ready\n")
while True:
    time.sleep(1)
"""


def test_a_signal_to_the_agent_is_forwarded(start):
    process = start(sys.executable, "-c", TELLS, logs="")
    assert process.stdout.readline() == "ready\n"
    stranger = f"kill -USR2 {process.pid}"
    subprocess.run(["/bin/sh", "-c", stranger], check=True)
    assert process.stdout.readline() == "forwarded\n"
    subprocess.run(["/bin/sh", "-c", stranger.replace("USR2", "TERM")], check=True)
    assert process.wait(20) == 5
    process.communicate()


def test_a_signal_of_the_launcher_to_the_group_comes_once(start):
    process = start(sys.executable, "-c", TELLS, logs="", start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGUSR2)
    assert process.stdout.readline() == "forwarded\n"
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert out == ""
    assert process.returncode == 5


def test_a_notice_stays_pending_until_the_rank_imports_mpishard(start):
    text = "import os, time; os.write(1, b'ready\\n'); time.sleep(0.5); import mpishard\n"
    text += "from mpishard.communication.failure.watchdog import preemption_notice\n"
    text += "print(preemption_notice.is_given)"
    variables = os.environ | {"PMI_RANK": "0", "PMI_SIZE": "1", "MPISHARD_JOB_FOLDER": "/nowhere"}
    process = start(sys.executable, "-c", text, logs="", env=variables)
    assert process.stdout.readline() == "ready\n"
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:  # noqa: PTH123
        os.kill(int(file.read()), signal.SIGUSR1)
    out, error = process.communicate(timeout=30)
    assert (process.returncode, out.splitlines()[0]) == (0, "True"), error


LAUNCHER = """
import os, subprocess, sys
group = subprocess.Popen(sys.argv[1:], start_new_session=True)
group.wait()
"""


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("victim", ["launcher", "agent"])
def test_no_rank_outlives_its_launcher_or_its_agent(tmp_path, noted, victim):
    script = "sleep 60 & echo $PPID $$ $!; wait"
    command = [
        sys.executable,
        "-I",
        "-S",
        rank_agent.__file__,
        "A_RANK",
        "",
        "/bin/sh",
        "-c",
        script,
    ]
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *command], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"A_RANK": "0", "MPISHARD_JOB_FOLDER": str(tmp_path)},
    )  # fmt: skip
    agent, rank, helper = map(int, launcher.stdout.readline().split())
    os.kill(launcher.pid if victim == "launcher" else agent, signal.SIGKILL)
    deadline = time.monotonic() + 5
    left = [rank, agent, *[helper] * (victim == "launcher")]
    while any(map(is_running, left)):
        assert time.monotonic() < deadline, "a process outlived the other"
        time.sleep(0.01)
    if victim == "launcher":
        assert noted()[1][:3] == ["0", "orphaned", str(launcher.pid)]
    else:
        os.kill(helper, signal.SIGKILL)
    launcher.stdout.close()
    launcher.wait()


def test_output_before_sigkill_is_not_lost(start, log):
    process = start("/bin/sh", "-c", "printf last; kill -9 $$")
    out, _ = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL
    assert out == log.read_text() == "last"


def test_signals_to_the_group_end_the_program_and_not_its_log(start, log):
    process = start(
        "/bin/sh",
        "-c",
        "trap 'echo forwarded; exit 3' TERM; echo ready; read line",
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 3
    assert log.read_text() == "ready\nforwarded\n"


def test_a_log_continues_while_a_process_of_a_killed_group_writes(start, log):
    late = "setsid sh -c 'echo ready; while kill -0 $0; do sleep 0.02; done; echo late' $$ &"
    process = start("/bin/sh", "-c", f"{late} sleep 60", start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    process.communicate(timeout=20)
    assert log.read_text().startswith("ready\n")
    assert "late\n" in log.read_text()


def test_an_unfinished_line_is_shown_soon(start):
    process = start("/bin/sh", "-c", "printf 50%%; read line")
    assert process.stdout.read(3) == "50%"
    process.kill()
    process.communicate(timeout=20)


def test_a_terminal_that_is_gone_does_not_stop_the_log(start, log):
    process = start(
        "/bin/sh",
        "-c",
        "read line; echo one; echo two",
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    process.stdout.close()
    process.stdin.write("go\n")
    process.stdin.close()
    assert process.wait(20) == 0
    deadline = time.monotonic() + 10
    while log.read_text() != "one\ntwo\n" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert log.read_text() == "one\ntwo\n"


def test_a_folder_that_cannot_be_made(start, tmp_path):
    (tmp_path / "logs").write_text("")
    process = start("/bin/echo", "hello")
    out, error = process.communicate(timeout=20)
    assert (process.returncode, out) == (1, "")
    assert "--log-dir" in error


def test_an_agent_that_was_suspended_goes_on(start, tmp_path):
    """Python's `sigtimedwait` would return an undefined signal then, such as SIGTERM."""
    process = start("/bin/sh", "-c", "echo ready; sleep 4.5; exit 3", logs="", cwd=tmp_path)
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):
        time.sleep(0.3)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.4)
        process.send_signal(signal.SIGCONT)
    _, error = process.communicate(timeout=20)
    assert (process.returncode, error) == (3, "")
