"""Programs that answer a question, each in a process group of its own, within a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO, Any

from mpishard.base import settings

_MARK = "mpishard answer: "
_GRACE_SECONDS = 3.0
_GLANCE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Answer:
    """End and output of a program.

    Parameters
    ----------
    code : int or None
        Exit code, -number of the signal that ended it, or None if it ran past the limit.
    out, err : str
        Its output.
    limit : float
        Its time limit in seconds.
    """

    code: int | None
    out: str
    err: str
    limit: float

    @property
    def found(self) -> Any:
        """The answer that the program printed; None if it ended before."""
        # Libraries print to the same stream. The last answer counts: a program may give two.
        lines = [line for line in self.out.splitlines() if line.startswith(_MARK)]
        return json.loads(lines[-1].removeprefix(_MARK)) if lines else None

    @property
    def reason(self) -> str:
        """Reason of the failure, in one line."""
        if self.code is None:
            return f"it did not end within {self.limit:g} s"
        lines = [line.strip() for line in (self.err or self.out).splitlines()]
        # Launchers draw frames of other characters around their messages.
        lines = [line for line in lines if any(letter.isalnum() for letter in line)]
        if self.code < 0:
            return f"signal {-self.code} ({signal.strsignal(-self.code)}) ended it"
        return lines[-1] if lines else f"it ended with exit code {self.code}"


def answer_line(found: object) -> str:
    """Return the line of an answer, which is found among the output of the program's libraries."""
    return _MARK + json.dumps(found)


def ask(
    command: Sequence[str], limit: float, variables: Mapping[str, str | None] | None = None
) -> Answer:
    """Run ``command`` for up to ``limit`` seconds, outside a job that this process may belong to.

    Raises
    ------
    OSError
        If it cannot be started.
    """
    # With the variables of a running job, a program could join that job as one of its ranks.
    wanted: dict[str, str | None] = {**settings.outside_launcher(), **(variables or {})}
    environment = {name: value for name, value in wanted.items() if value is not None}
    (answer,) = ask_all([command], limit, environment)
    return answer


def ask_all(
    commands: Sequence[Sequence[str]],
    limit: float,
    environment: Mapping[str, str],
    is_over: Callable[[], bool] = lambda: False,
) -> list[Answer]:
    """Run all of ``commands`` at once, for up to ``limit`` seconds, or until ``is_over()``.

    Raises
    ------
    OSError
        If one cannot be started.
    """
    started: dict[subprocess.Popen[bytes], tuple[IO[bytes], IO[bytes]]] = {}
    codes: dict[subprocess.Popen[bytes], int] = {}
    with ExitStack() as files:
        try:
            for command in commands:
                # Files and not pipes: a child that a program leaves behind would hold a pipe open.
                out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
                program = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=environment,
                    # A session of its own, so that a signal reaches all that it starts, and not us.
                    start_new_session=True,
                )
                started[program] = out, err
            end = time.monotonic() + limit
            for program in started:
                while program.poll() is None and time.monotonic() < end and not is_over():
                    # In short waits, because `is_over` may become true meanwhile.
                    with suppress(subprocess.TimeoutExpired):
                        program.wait(_GLANCE_SECONDS)
            codes |= {p: p.returncode for p in started if p.poll() is not None}
            # After SIGTERM a launcher also ends its ranks, even in sessions of their own.
            late = started.keys() - codes.keys()
            for program in late:
                _signal(program, signal.SIGTERM)
            for program in late:
                with suppress(subprocess.TimeoutExpired):
                    program.wait(_GRACE_SECONDS)
        finally:
            # Also after an exception such as Ctrl-C: no program outlives the call.
            for program in started.keys() - codes.keys():
                _signal(program, signal.SIGKILL)
                program.wait()
        return [
            Answer(codes.get(program), _text(out), _text(err), limit)
            for program, (out, err) in started.items()
        ]


def python_command(code: str, *arguments: str) -> list[str]:
    """Return a command that runs ``code`` in Python; ``answer(found)`` there prints the answer."""
    preamble = f"import json\ndef answer(found): print({_MARK!r} + json.dumps(found), flush=True)\n"
    return [sys.executable, "-c", preamble + code, *arguments]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _signal(program: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # the group is empty
        os.killpg(program.pid, number)
