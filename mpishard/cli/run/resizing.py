"""``mpishard resize``: order a running job to go on with another number of ranks.

The command connects to a socket in the folder of ``--log-dir`` and sends the number. Answers come
back as lines of JSON; the last one has the exit code of the command. A job that a lost host has
left with fewer ranks gives itself such an order when the host answers again.
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

_SOCKET = ".orders"
_WORD_SECONDS = 1.0
_WORD_BYTES = 32
_HOSTS_SECONDS = 60.0
"""Between two looks whether lost hosts answer again."""


@contextmanager
def _orders_socket(folder: Path) -> Iterator[tuple[socket.socket, str]]:
    """Return a new socket, and the address of the job that logs to ``folder``.

    Raises
    ------
    OSError
        If the folder cannot be opened.
    """
    with ExitStack() as held:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        held.callback(os.close, handle)
        new = held.enter_context(socket.socket(socket.AF_UNIX))
        # The folder's own path may be longer than the 107 characters of an address.
        yield new, f"/proc/self/fd/{handle}/{_SOCKET}"


def resize(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of `mpishard run --log-dir` of the job.")
    ],
    ranks: Annotated[int, typer.Option("-n", "-np", metavar="N", help="Number of ranks.")],
) -> None:
    """Order a running job to go on with N ranks.

    At the next step boundary its ranks save, as when they are preempted, and `mpishard run` starts
    N ranks at once, which go on from there: parameters, optimizer state, position in the data and
    the error feedback of compression are dealt to them. The job must be in an
    optimize(checkpoint=FOLDER), and N within --min-ranks and --max-ranks of `mpishard run` and the
    bounds of an ElasticOptimizer. Otherwise nothing happens to it.

    Waits until the N ranks train. If they fail before that, the job goes back to its number of
    ranks. Exit codes: 0, the job has N ranks; 2, refused; 1, the change failed, or the job ended.
    """
    if ranks < 1:
        refuse("resize", f"a job has at least one rank, got -n {ranks}")
    if not run.is_dir():
        refuse("resize", f"there is no folder {run}")
    text, code = "the job has ended", 1
    try:
        with _orders_socket(run) as (connection, address):
            connection.connect(address)
            connection.sendall(f"{ranks}\n".encode())
            for line in connection.makefile():
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
class Order:
    """The number of ranks that a command has ordered, and the connection to it, if it was one."""

    ranks: int
    connection: socket.socket | None = None
    lost: Sequence[str] = ()
    """Hosts that could not be reached when it came."""

    def answer(self, text: str, code: int | None = None) -> None:
        """Tell the command; with an exit code it ends."""
        if self.connection is None:
            return
        with suppress(OSError):  # Ctrl-C has ended the command, and the change goes on
            self.connection.sendall(json.dumps([text, code]).encode() + b"\n")
        if code is not None:
            self.connection.close()


@dataclass(slots=True)
class Resizing:
    """The orders for other numbers of ranks, of which one at a time is carried out.

    The ranks receive SIGUSR1, save at the next step boundary and end; the job starts with the
    ordered number at once. The change is complete when these ranks train. If they fail before that,
    the job goes back to the number that it had.

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
    order: Order | None = None
    """The one that is being carried out."""
    before: int = 0
    """Number of ranks until the order; 0 as long as these have not saved."""
    wanted: int = 0
    """Number of ranks, if no host were lost."""
    sockets: list[socket.socket] = field(default_factory=list)
    """The socket that can be read when an order comes; none if nobody listens."""
    _answers: list[Sequence[str]] = field(default_factory=list)
    _asked_at: float = field(default_factory=time.monotonic)

    @contextmanager
    def listens(self, folder: Path) -> Iterator[None]:
        """Take orders during the block, through ``folder``, which is this job's alone.

        Raises
        ------
        OSError
            If its file system has no sockets.
        """
        with _orders_socket(folder) as (listening, address):
            (folder / _SOCKET).unlink(missing_ok=True)  # of a job that was killed
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
            Whether the job has been ordered to end.
        """
        try:
            connection, _ = self.sockets[0].accept()
            # The supervisor must not wait for a program that connects and says nothing.
            connection.settimeout(_WORD_SECONDS)
            order = Order(int(connection.recv(_WORD_BYTES)), connection)
        except (OSError, ValueError):  # the command has ended, or it is none of ours
            return False
        if self.order is None and not is_ending and order.ranks == self.ranks:
            order.answer(f"the job has {counted(self.ranks, 'rank')} already", 0)
            return False
        refusal = self._refusal(order, logs, is_ending)
        if refusal:
            order.answer(refusal, 2)
            return False
        order.answer(
            f"{counted(self.ranks, 'rank')} will save at the next step boundary; the job then "
            f"goes on with {order.ranks}"
        )
        self.order = order
        return True

    def take_back_hosts(self, logs: Callable[[], Mapping[int, RankLogs]]) -> bool:
        """Look whether lost hosts answer again; return whether the ranks are to save for it."""
        if self.order is not None or self.ranks >= self.wanted:
            return False
        now = time.monotonic()
        if now - self._asked_at > _HOSTS_SECONDS:
            self._asked_at = now
            # The supervisor must not wait for hosts that do not answer.
            Thread(target=lambda: self._answers.append(self.find_lost()), daemon=True).start()
        if not self._answers:
            return False
        order = Order(0, None, self._answers.pop())
        order.ranks = min(self.wanted, self._slots(order))
        least, most = _resumable_by(logs())
        if not (self.ranks < order.ranks and least <= order.ranks <= most):
            return False
        self.order = order
        return True

    def end(self, text: str, code: int) -> None:
        """Tell the command the end of the change."""
        if self.order is not None:
            self.order.answer(text, code)
        self.order, self.before = None, 0

    def _refusal(self, order: Order, logs: Mapping[int, RankLogs], is_ending: bool) -> str:
        """Return the reason to refuse ``order``; "" if there is none."""
        if self.order is not None:
            return (
                f"the job is changing from {counted(self.before or self.ranks, 'rank')} to "
                f"{self.order.ranks}: give the next order when that is done"
            )
        if is_ending:
            return "the job has been ordered to end"
        ranks, has = order.ranks, f"the job has {self.ranks}"
        if not self.least <= ranks <= self.most:
            return (
                f"{counted(ranks, 'rank')} cannot be had: `mpishard run` was started for "
                f"{self.least} to {self.most} (--min-ranks, --max-ranks), and {has}"
            )
        least, most = _resumable_by(logs)
        if not least:
            return (
                "no rank is in an optimize(checkpoint=FOLDER) now, from which another number of "
                f"ranks could go on; {has}"
            )
        if not least <= ranks <= most:
            return (
                f"{counted(ranks, 'rank')} cannot be had: the script's optimize allows "
                f"{least} to {most} (bounds of ElasticOptimizer; with local_data as "
                f"many as now), and {has}"
            )
        # Last, because hosts that do not answer take seconds.
        order.lost = self.find_lost()
        slots = self._slots(order)
        if self.hosts and ranks > slots:
            lost = f" without {', '.join(order.lost)}, which cannot be reached" * bool(order.lost)
            return f"{counted(ranks, 'rank')} cannot be had: the hosts take {slots}{lost}; {has}"
        return ""

    def _slots(self, order: Order) -> int:
        return sum(host.slots for host in self.hosts if host.name not in order.lost)


def _resumable_by(logs: Mapping[int, RankLogs]) -> tuple[int, int]:
    """Return the fewest and the most ranks that can go on; (0, 0) if no rank says so."""
    said = (log.resumable_by for log in logs.values() if log.resumable_by[0])
    return next(said, (0, 0))
