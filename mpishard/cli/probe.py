"""Programs that answer a question, each in a process group of its own, with a time limit."""

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

_MARK = "mpishard answer: "
_GRACE_SECONDS = 3.0


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
        """The answer that the program printed; None if it did not get so far."""
        lines = [line for line in self.out.splitlines() if line.startswith(_MARK)]
        return json.loads(lines[-1].removeprefix(_MARK)) if lines else None

    @property
    def reason(self) -> str:
        """Reason of the failure, in one line."""
        if self.code is None:
            return f"it did not end within {self.limit:g} s"
        said = [line.strip() for line in (self.err or self.out).splitlines()]
        said = [line for line in said if any(letter.isalnum() for letter in line)]
        if self.code < 0:
            return f"signal {-self.code} ({signal.strsignal(-self.code)}) ended it"
        return said[-1] if said else f"it ended with exit code {self.code}"


def answer_line(found: Any) -> str:
    """Return the line by which a program answers, among whatever its libraries print."""
    return _MARK + json.dumps(found)


def ask(
    command: Sequence[str], limit: float, variables: Mapping[str, str | None] | None = None
) -> Answer:
    """Run ``command`` outside the job that this process may be part of, for ``limit`` seconds.

    Raises
    ------
    OSError
        If it cannot be started.
    """
    wanted: dict[str, str | None] = {**settings.outside_launcher(), **(variables or {})}
    environment = {name: value for name, value in wanted.items() if value is not None}
    # Files and not pipes, because what the program leaves running holds its output open.
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
            # A launcher that is asked to end also ends its ranks, wherever they are.
            _signal(program, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(_GRACE_SECONDS)
        finally:
            if code is None:
                _signal(program, signal.SIGKILL)
                program.wait()
        return Answer(code, _text(out), _text(err), limit)


def python_command(code: str, *arguments: str) -> list[str]:
    """Return a command that runs ``code`` in a Python; it answers by ``answer(found)``."""
    preamble = f"import json\ndef answer(found): print({_MARK!r} + json.dumps(found), flush=True)\n"
    return [sys.executable, "-c", preamble + code, *arguments]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _signal(program: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
        os.killpg(program.pid, number)
