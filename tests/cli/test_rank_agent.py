"""What a rank prints, in its log in order, and on the terminal as before."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mpishard.cli import rank_output

pytestmark = [
    pytest.mark.spawned,
    pytest.mark.skipif(not hasattr(os, "pipe2"), reason="needs Linux"),
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
    def begin(*program, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return subprocess.Popen(
            [sys.executable, "-I", "-S", rank_output.__file__, tmp_path / "logs",
             "rank-${A_RANK}.log", *program],
            env={"A_RANK": "3"}, text=True, **options,
        )  # fmt: skip

    return begin


@pytest.fixture
def log(tmp_path):
    return tmp_path / "logs" / "rank-3.log"


def test_both_streams_in_order_and_each_where_it_was(start, log):
    process = start(sys.executable, "-c", TALKS)
    out, error = process.communicate(timeout=20)
    numbers = range(300)
    assert log.read_text().split("\n") == [*map(str, numbers), "x" * 100_000, "half a line"]
    on_error = [i for i in numbers if i * i % 7 % 2]
    assert out.split("\n") == [*(str(i) for i in numbers if i not in on_error), "x" * 100_000, ""]
    assert error.split("\n") == [*map(str, on_error), "half a line"]


def test_the_program_is_the_process_that_was_started(start, log):
    process = start("/bin/sh", "-c", "echo $$; wait; echo no child; exit 7")
    out, _ = process.communicate(timeout=20)
    assert out == f"{process.pid}\nno child\n"
    assert process.returncode == 7


def test_last_words_survive_sigkill(start, log):
    process = start("/bin/sh", "-c", "printf last; kill -9 $$")
    out, _ = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL
    assert out == log.read_text() == "last"


def test_signals_to_the_group_end_the_program_and_not_its_log(start, log):
    process = start(
        "/bin/sh", "-c", "trap 'echo told; exit 3' TERM; echo ready; read line",
        stdin=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 3
    assert log.read_text() == "ready\ntold\n"


def test_a_killed_group_leaves_the_log_to_who_still_writes(start, log):
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
        "/bin/sh", "-c", "read line; echo one; echo two", stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
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
