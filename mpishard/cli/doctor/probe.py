"""Programs that ``mpishard doctor`` asks, each in a process group of its own, with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from mpishard import settings

__all__ = ["Answer", "answer_line", "ask", "python_command"]

_MARK = "mpishard doctor: "
_GRACE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Answer:
    """How a program ended, and what it said.

    Parameters
    ----------
    code : int or None
        Exit code, -number of the signal that ended it, or None where it ran past the limit.
    out, err : str
        What it printed.
    limit : float
        Seconds that it was given.
    """

    code: int | None
    out: str
    err: str
    limit: float

    @property
    def found(self) -> Any:
        """What the program handed to `answer_line`; None where it did not come so far."""
        lines = [line for line in self.out.splitlines() if line.startswith(_MARK)]
        return json.loads(lines[-1].removeprefix(_MARK)) if lines else None

    @property
    def reason(self) -> str:
        """In one line, why it failed."""
        if self.code is None:
            return f"it did not end within {self.limit:g} s"
        said = [line.strip() for line in (self.err or self.out).splitlines()]
        said = [line for line in said if any(letter.isalnum() for letter in line)]
        if self.code < 0:
            return f"signal {-self.code} ({signal.strsignal(-self.code)}) ended it"
        return said[-1] if said else f"it ended with exit code {self.code}"


def answer_line(found: Any) -> str:
    """The line by which a program answers, among whatever its libraries print."""
    return _MARK + json.dumps(found)


def ask(
    command: Sequence[str], limit: float, variables: Mapping[str, str | None] | None = None
) -> Answer:
    """Run ``command`` outside the job that this process may be part of, for ``limit`` seconds.

    Raises
    ------
    OSError
        Where it cannot be started.
    """
    wanted: dict[str, str | None] = {**settings.outside_launcher(), **(variables or {})}
    environment = {name: value for name, value in wanted.items() if value is not None}
    # Files and not pipes: what the program leaves running holds its output open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = program.wait(limit)
        except subprocess.TimeoutExpired:
            # A launcher that is asked to end takes along its ranks, wherever they are.
            _signal(program, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(_GRACE_SECONDS)
        finally:
            if code is None:
                _signal(program, signal.SIGKILL)
                program.wait()
        return Answer(code, _text(out), _text(err), limit)


def python_command(code: str, *arguments: str) -> list[str]:
    """What runs ``code`` in a Python of its own; it answers by ``answer(found)``."""
    preamble = f"import json\ndef answer(found): print({_MARK!r} + json.dumps(found), flush=True)\n"
    return [sys.executable, "-c", preamble + code, *arguments]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _signal(program: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
        os.killpg(program.pid, number)
