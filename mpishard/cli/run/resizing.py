"""``mpishard resize``: change the number of ranks of a running job.

The command connects to a socket in the folder of ``--log-dir`` and sends the number. Answers come
back as lines of JSON; the last one has the exit code of the command. A job with fewer ranks since
a host was lost makes such a request itself when the host answers again.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Annotated

import typer

from mpishard.cli.run.launcher import Host
from mpishard.cli.run.logs import RankLogs
from mpishard.cli.wording import counted, refuse

_SOCKET = ".resize"
_REQUEST_SECONDS = 1.0
# The request is a number and a line break; more bytes are those of another program.
_REQUEST_BYTES = 32
# Rare, because each check starts an ssh for each host.
_HOSTS_SECONDS = 60.0
"""Time between two checks whether lost hosts answer again."""


@contextmanager
def _request_socket(folder: Path) -> Iterator[tuple[socket.socket, str]]:
    """Return a new socket, and the address of the job that logs to ``folder``.

    Raises
    ------
    OSError
        If the folder cannot be opened.
    """
    with ExitStack() as stack:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, handle)
        new = stack.enter_context(socket.socket(socket.AF_UNIX))
        # The folder's own path may be longer than the 107 characters of an address.
        yield new, f"/proc/self/fd/{handle}/{_SOCKET}"


def resize(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of `mpishard run --log-dir` of the job.")
    ],
    ranks: Annotated[int, typer.Option("-n", "-np", metavar="N", help="Number of ranks.")],
) -> None:
    """Change the number of ranks of a running job to N.

    The ranks save at the next step boundary, as when they are preempted. Then `mpishard run` starts
    N ranks at once, which resume there: parameters, optimizer state, position in the data and the
    error feedback of compression are divided among them. The job must be in an
    optimize(checkpoint=FOLDER), and N within --min-ranks and --max-ranks of `mpishard run` and the
    bounds of an ElasticOptimizer. Otherwise the job does not change.

    Waits until the N ranks train. If they fail before that, the job returns to its number of ranks.
    Exit codes: 0, the job has N ranks; 2, refused; 1, the change failed, or the job ended.
    """
    if ranks < 1:
        refuse("resize", f"a job has at least one rank, got -n {ranks}")
    if not run.is_dir():
        refuse("resize", f"there is no folder {run}")
    # The answer if the connection ends without one, because `mpishard run` was killed.
    text, code = "the job has ended", 1
    try:
        with _request_socket(run) as (connection, address):
            connection.connect(address)
            connection.sendall(f"{ranks}\n".encode())
            for line in connection.makefile():
                # Lines without a code report the progress of the change.
                text, code = json.loads(line)
                if code is not None:
                    break
                typer.echo(text)
                text, code = "the job has ended", 1
    except (FileNotFoundError, ConnectionRefusedError):
        refuse("resize", f"no `mpishard run --log-dir {run}` runs on this machine")
    except OSError as error:
        refuse("resize", f"{run}: {error}", 1)
    if code:
        refuse("resize", text, code)
    typer.echo(text)


@dataclass(slots=True)
class Request:
    """A number of ranks, and the connection to the command that asked for it, if it was one."""

    ranks: int
    connection: socket.socket | None = None
    lost: Sequence[str] = ()
    """Hosts that could not be reached when the request came."""

    def answer(self, text: str, code: int | None = None) -> None:
        """Send a line to the command, which ends if it is given an exit code."""
        if self.connection is None:
            return
        with suppress(OSError):  # Ctrl-C ended the command; the change continues
            self.connection.sendall(json.dumps([text, code]).encode() + b"\n")
        if code is not None:
            self.connection.close()


@dataclass(slots=True)
class Resizing:
    """The requests for other numbers of ranks. One at a time is carried out.

    The ranks receive SIGUSR1, save at the next step boundary and end; the job starts with the
    new number at once. The change is complete when these ranks train. If they fail before that,
    the job returns to the number that it had.

    Parameters
    ----------
    ranks : int
        Number of ranks now.
    least, most : int
        The bounds that the user gave.
    hosts : sequence of Host
        The machines of the job; empty if it runs on this one alone.
    find_lost : callable
        Returns the names of the hosts that cannot be reached now.
    """

    ranks: int
    least: int
    most: int
    hosts: Sequence[Host] = ()
    find_lost: Callable[[], Sequence[str]] = tuple
    request: Request | None = None
    """The request that is being carried out."""
    before: int = 0
    """Number of ranks before the change; 0 until these have saved."""
    wanted: int = 0
    """Number of ranks that the job would have without lost hosts."""
    sockets: list[socket.socket] = field(default_factory=list)
    """The socket that becomes readable when a request comes; none if the job accepts none."""
    _answers: list[Sequence[str]] = field(default_factory=list)
    _asked_at: float = field(default_factory=time.monotonic)

    @contextmanager
    def listens(self, folder: Path) -> Iterator[None]:
        """Accept requests during the block, through ``folder``, which only this job uses.

        Raises
        ------
        OSError
            If its file system has no sockets.
        """
        with _request_socket(folder) as (listening, address):
            (folder / _SOCKET).unlink(missing_ok=True)  # left by a job that was killed
            listening.bind(address)
            # Only this user may change the job.
            (folder / _SOCKET).chmod(0o600)
            listening.listen()
            self.sockets = [listening]
            try:
                yield
            finally:
                self.sockets = []
                (folder / _SOCKET).unlink(missing_ok=True)

    def take(self, logs: Mapping[int, RankLogs], *, is_ending: bool) -> bool:
        """Answer a command that has connected; return whether the ranks are to save now.

        Parameters
        ----------
        logs : mapping of int to RankLogs
            Of the ranks that run.
        is_ending : bool
            Whether the job is ending.
        """
        try:
            connection, _ = self.sockets[0].accept()
            # The supervisor must not wait for a program that connects and sends nothing.
            connection.settimeout(_REQUEST_SECONDS)
            request = Request(int(connection.recv(_REQUEST_BYTES)), connection)
        except (OSError, ValueError):  # the command has ended, or another program connected
            return False
        if self.request is None and not is_ending and request.ranks == self.ranks:
            request.answer(f"the job has {counted(self.ranks, 'rank')} already", 0)
            return False
        refusal = self._refusal(request, logs, is_ending)
        if refusal:
            request.answer(refusal, 2)
            return False
        request.answer(
            f"{counted(self.ranks, 'rank')} will save at the next step boundary; the job then "
            f"continues with {request.ranks}"
        )
        self.request = request
        return True

    def take_back_hosts(self, logs: Callable[[], Mapping[int, RankLogs]]) -> bool:
        """Check whether lost hosts answer again; return whether the ranks are to save for them."""
        if self.request is not None or self.ranks >= self.wanted:
            return False
        now = time.monotonic()
        if now - self._asked_at > _HOSTS_SECONDS:
            self._asked_at = now
            # The supervisor must not wait for hosts that do not answer.
            Thread(target=lambda: self._answers.append(self.find_lost()), daemon=True).start()
        if not self._answers:
            return False
        request = Request(0, None, self._answers.pop())
        request.ranks = min(self.wanted, self._slots(request))
        least, most = _resumable_by(logs())
        # Saving costs time: only for more ranks than now, and if the run can resume with them.
        if not (self.ranks < request.ranks and least <= request.ranks <= most):
            return False
        self.request = request
        return True

    def end(self, text: str, code: int) -> None:
        """Tell the command how the change ended."""
        if self.request is not None:
            self.request.answer(text, code)
        self.request, self.before = None, 0

    def _refusal(self, request: Request, logs: Mapping[int, RankLogs], is_ending: bool) -> str:
        """Return the reason to refuse ``request``; "" if there is none."""
        if self.request is not None:
            return (
                f"the job is changing from {counted(self.before or self.ranks, 'rank')} to "
                f"{self.request.ranks}: ask again when that is done"
            )
        if is_ending:
            return "the job is ending"
        ranks, has = request.ranks, f"the job has {self.ranks}"
        if not self.least <= ranks <= self.most:
            return (
                f"the job cannot have {counted(ranks, 'rank')}: `mpishard run` was started for "
                f"{self.least} to {self.most} (--min-ranks, --max-ranks), and {has}"
            )
        least, most = _resumable_by(logs)
        if not least:
            return (
                "no rank is in an optimize(checkpoint=FOLDER) now, from which another number of "
                f"ranks could resume; {has}"
            )
        if not least <= ranks <= most:
            return (
                f"the job cannot have {counted(ranks, 'rank')}: the script's optimize allows "
                f"{least} to {most} (bounds of ElasticOptimizer; with local_data as "
                f"many as now), and {has}"
            )
        # Last, because hosts that do not answer take seconds.
        request.lost = self.find_lost()
        slots = self._slots(request)
        if self.hosts and ranks > slots:
            lost = f" without {', '.join(request.lost)}, which cannot be reached" * bool(
                request.lost
            )
            text = f"the job cannot have {counted(ranks, 'rank')}: the hosts take {slots}{lost}"
            return f"{text}; {has}"
        return ""

    def _slots(self, request: Request) -> int:
        return sum(host.slots for host in self.hosts if host.name not in request.lost)


def _resumable_by(logs: Mapping[int, RankLogs]) -> tuple[int, int]:
    """Return the fewest and the most ranks that can resume; (0, 0) if no rank is saving."""
    bounds = (log.resumable_by for log in logs.values() if log.resumable_by[0])
    return next(bounds, (0, 0))
