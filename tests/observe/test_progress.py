"""The progress line: on terminals, in files, and on streams that fail."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpishard.observe import Progress
from mpishard.observe.progress import _duration, _loss, _quantity


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that reports that it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Terminal]]:
    """Makes terminals of a width."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)

    def make(columns: int = 120, term: str = "xterm") -> Terminal:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", "24")
        monkeypatch.setenv("TERM", term)
        return Terminal()

    return make


def run(stream: Any, clock: Clock, steps: int = 40, seconds: float = 1.0, **options: Any) -> None:
    options = {"stamp": ""} | options
    with Progress(steps, stream=stream, clock=clock, unit="tokens/s", **options) as progress:
        for step in range(1, steps + 1):
            clock.now += seconds
            progress.update(step, loss=5.0 / step, amount=1500)
            if step % 25 == 0:
                clock.now += 2.0
                progress.validation(step, 0.5)


def test_lines_in_a_file_begin_with_the_time(clock: Clock, terminal: Any) -> None:
    stream = io.StringIO()
    with Progress(2, stream=stream, clock=clock) as progress:
        progress.announce("two steps")
        progress.update(1, loss=0.5)
        progress.validation(1, 0.25, accuracy=0.875)
    lines = stream.getvalue().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", "at ", line) for line in lines] == [
        "at two steps",
        "at step 1/2  loss 0.5000",
        "at step 1/2  loss 0.5000  validation loss 0.2500  accuracy 87.5%",
    ]
    run(stream := terminal(term="dumb"), clock, 1, stamp="%Y")
    assert stream.getvalue().startswith("step 1/1")


def test_plain_lines_first_at_most_one_an_interval_validations_last(clock: Clock) -> None:
    stream = io.StringIO()
    run(stream, clock)
    assert stream.getvalue().splitlines() == [
        "step  1/40  loss 5.0000  1.5k tokens/s",
        "step 11/40  loss 0.4545  1.5k tokens/s  0:29 left",
        "step 21/40  loss 0.2381  1.5k tokens/s  0:19 left",
        "step 25/40  loss 0.2000  validation loss 0.5000",
        "step 29/40  loss 0.1724  1.5k tokens/s  0:12 left",
        "step 39/40  loss 0.1282  1.5k tokens/s  0:01 left",
        "step 40/40  loss 0.1250  1.5k tokens/s  0:42 in all",
    ]


def test_the_last_step_done_is_shown_when_a_run_ends_early(clock: Clock) -> None:
    stream = io.StringIO()

    def interrupted() -> None:
        with Progress(100, stream=stream, clock=clock, stamp="") as progress:
            for step in range(1, 6):
                clock.now += 1
                progress.update(step, loss=1.0, amount=1)
            raise RuntimeError("early")

    with pytest.raises(RuntimeError, match="early"):
        interrupted()
    assert [line.split("/")[0] for line in stream.getvalue().splitlines()] == [
        "step   1",
        "step   5",
    ]


def test_a_resumed_run_counts_its_own_steps_only(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(100, start=90, stream=stream, clock=clock, stamp="") as progress:
        for step, seconds in enumerate((100, 3, 3), 91):  # the first compiles, say
            clock.now += seconds
            progress.update(step, loss=1.0, amount=6)
    assert stream.getvalue().splitlines()[-1].endswith("0:21 left")


def test_throughput_is_of_the_last_seconds(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(100, stream=stream, clock=clock, stamp="", interval=0) as progress:
        clock.now += 1000  # compiling, say
        progress.update(1, loss=1.0, amount=10)
        for step in range(2, 40):
            clock.now += 1
            progress.update(step, loss=1.0, amount=10)
    assert "  10 samples/s  " in stream.getvalue().splitlines()[-1]


def test_without_amounts_there_is_no_throughput(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(2, stream=stream, clock=clock, stamp="") as progress:
        clock.now += 1
        progress.update(1, loss=np.float32(0.25))
    assert stream.getvalue() == "step 1/2  loss 0.2500\n"


def test_a_validation_before_any_step(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress(2, stream=stream, clock=clock, stamp="") as progress:
        progress.validation(0, 5.5)
    assert stream.getvalue() == "step 0/2  validation loss 5.5000\n"


def test_on_a_terminal_one_line_is_drawn_over_and_over(
    clock: Clock, terminal: Callable[..., Terminal]
) -> None:
    stream = terminal()
    run(stream, clock)
    text = stream.getvalue()
    assert text.count("\n") == 1, "the cursor moves on once, at the end"
    assert "\x1b[?25l" not in text, "a killed rank would leave the cursor hidden"
    assert text.count("\x1b[2K") >= 40
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.split("\x1b[2K")[-1])
    assert re.fullmatch(
        r"\s*step 40/40 +\S+ +loss 0.1250  validation loss 0.5000  1.5k tokens/s  0:42 in all\s*",
        last,
    )


def test_a_terminal_is_not_drawn_on_more_than_ten_times_a_second(
    clock: Clock, terminal: Callable[..., Terminal]
) -> None:
    stream = terminal()
    run(stream, clock, steps=1000, seconds=0.001)
    assert stream.getvalue().count("\x1b[2K") < 100


@pytest.mark.parametrize("columns", [1, 5, 20, 60, 79, 200])
def test_the_line_fits_any_width(
    columns: int, clock: Clock, terminal: Callable[..., Terminal]
) -> None:
    stream = terminal(columns)
    run(stream, clock)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "step 40"[: max(1, columns - 1)] in plain
    assert max(len(line) for line in re.split("[\r\n]", plain)) <= columns
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_dumb_terminal_gets_plain_lines(
    term: str, clock: Clock, terminal: Callable[..., Terminal]
) -> None:
    stream = terminal(term=term)
    run(stream, clock)
    assert "\x1b" not in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 7


@pytest.mark.parametrize(
    ("variables", "output", "draws"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "/home/me/log", False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "/dev/pts/3", True),
        ({"MPISHARD_JOB_FOLDER": "/tmp/job"}, "/dev/pts/3", False),
        ({"MPISHARD_JOB_FOLDER": "/tmp/job", "MPISHARD_COLUMNS": "80"}, "pipe:[7]", True),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "pipe:[7]", True),  # srun --pty
    ],
)
def test_a_terminal_of_the_launcher_whose_output_is_redirected_is_none(
    variables: dict[str, str],
    output: str,
    draws: bool,
    clock: Clock,
    terminal: Callable[..., Terminal],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "MPISHARD_JOB_FOLDER", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "readlink", lambda path: output)
    stream = terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    run(stream, clock)
    assert ("\x1b" in stream.getvalue()) == draws


class Broken(Terminal):
    """A stream that fails after some characters, as a closed pipe does."""

    def __init__(self, error: Exception, after: int = 0, live: bool = True) -> None:
        super().__init__()
        self.live = live
        self.error = error
        self.left = after

    def isatty(self) -> bool:
        return self.live

    def write(self, text: str) -> int:
        self.left -= len(text)
        if self.left < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("after", [0, 100, 1000])
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("standard", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(32, "Broken pipe"),
        ValueError("I/O operation on closed file"),
        UnicodeEncodeError("ascii", "x", 0, 1, "ordinal not in range"),
    ],
)
def test_a_stream_that_breaks_ends_the_output_and_not_the_training(
    error: Exception,
    standard: bool,
    live: bool,
    after: int,
    clock: Clock,
    terminal: Callable[..., Terminal],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal()
    stream = Broken(error, after, live)
    with monkeypatch.context() as patch:
        if standard:
            patch.setattr(sys, "stdout", stream)
        before = sys.stdout, sys.stderr
        run(stream, clock)
        assert (sys.stdout, sys.stderr) == before


def test_a_stream_that_is_no_stream(clock: Clock) -> None:
    run(object(), clock)


def test_an_ascii_terminal(clock: Clock, terminal: Callable[..., Terminal]) -> None:
    terminal()
    raw = io.BytesIO()
    raw.isatty = lambda: True  # type: ignore[method-assign]
    stream = io.TextIOWrapper(raw, encoding="ascii")
    run(stream, clock)
    stream.flush()
    assert b"step 40/40" in raw.getvalue()


SCRIPT = """
import sys, time
from mpishard.observe import Progress
with Progress(30, unit="tokens/s") as progress:
    for step in range(1, 31):
        time.sleep(0.01)
        progress.update(step, loss=1 / step, amount=10)
        if step == 10:
            print("a line of the script")
            progress.validation(step, 0.5)
print("the end")
"""


@pytest.mark.spawned
@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_on_a_pseudo_terminal(term: str, tmp_path: Path) -> None:
    master, slave = os.openpty()
    environment = os.environ | {"TERM": term, "COLUMNS": "100", "LINES": "30"}
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        environment.pop(name, None)
    root = str(Path(sys.modules["mpishard"].__file__ or "").parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        env=environment,
        cwd=tmp_path,
    )
    os.close(slave)
    output = b""
    while True:
        try:
            block = os.read(master, 4096)
        except OSError:  # Linux says so when the last writer has gone
            break
        if not block:
            break
        output += block
    os.close(master)
    assert process.wait() == 0
    text = output.decode()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n").splitlines()
    assert "a line of the script" in [line.strip() for line in lines]
    assert lines[-1] == "the end"
    assert re.search(r"step 30/30 .*loss 0\.0333 .*tokens/s", lines[-2])
    assert ("\x1b[2K" in text) == (term != "dumb")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (3.14159, "3.14"), (950, "950"), (18_230, "18.2k"), (1.239e6, "1.24M")],
)
def test_quantities(value: float, text: str) -> None:
    assert _quantity(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3661, "1:01:01")]
)
def test_durations(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0000"), (2.5, "2.5000"), (1.5e-7, "1.500e-07"), (2e9, "2.000e+09")],
)
def test_losses(value: float, text: str) -> None:
    assert _loss(value) == text
    assert _loss(float("nan")) == "nan"
