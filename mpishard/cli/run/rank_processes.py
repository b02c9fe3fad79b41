"""The processes of a job's ranks, and their ends.

The agent of a rank (`mpishard.cli.run.rank_agent`) appends a line to a file in the job's folder
when it has started the rank, and another one when the rank has ended. This module reads them, and
receives those of other hosts.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpishard.cli.run.hosts import HostConnection, Hosts

_END_SECONDS = 2.0
_GLANCE_SECONDS = 0.02


@dataclass(slots=True)
class RankProcess:
    """The process of a rank.

    Parameters
    ----------
    rank : int
        Its number among those of the launcher.
    pid : int
        Its process id.
    agent : int
        Process id of its agent.
    exit_code : int, optional
        Exit code, or minus the number of the signal that ended it. None while it runs, and if a
        launcher that ends a job has killed its agent, too.
    ended_at : float
        Time of the end, by `time.monotonic`.
    orphaned_by : int
        Process id of the launcher on its host, if the rank was killed because it is gone.
    host : HostConnection, optional
        The connection to its host; None for this one.
    is_gone : bool
        Whether neither it nor its agent runs any more on another host.
    """

    rank: int
    pid: int
    agent: int
    exit_code: int | None = None
    ended_at: float = 0.0
    orphaned_by: int = 0
    host: HostConnection | None = None
    is_gone: bool = False

    @property
    def has_ended(self) -> bool:
        """True if its agent has noted the end."""
        return self.exit_code is not None or bool(self.orphaned_by)

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal, if it still runs."""
        if self.host is not None:
            self.host.send(signal=[self.pid, int(number)])
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def is_running(self) -> bool:
        """True if it runs, or its agent, which may be about to note the end."""
        if self.host is not None:
            return not (self.is_gone or self.host.is_closed)
        return _is_running(self.pid) or _is_running(self.agent)

    def catches(self, number: signal.Signals) -> bool:
        """True if the process has a handler for the signal, which another host's agent checks."""
        if self.host is not None:
            return True
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return False
        caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
        # A mask with signal n at bit n - 1: proc(5).
        return bool(int(caught, 16) >> (number - 1) & 1)


class RankProcesses:
    """The ranks of one job.

    Parameters
    ----------
    folder : Path
        The job's folder.
    world_size : int
        Number of ranks, on all hosts.
    hosts : Hosts, optional
        The other hosts of the job; None if all ranks run on this one.
    """

    def __init__(self, folder: Path, world_size: int, hosts: Hosts | None = None) -> None:
        self._hosts = hosts
        self._file = folder / f"agents-{socket.gethostname()}"
        self._world_size = world_size
        self._read = 0
        self.ranks: dict[int, RankProcess] = {}
        """The ranks that have been started, by number."""
        self.failed: list[int] = []
        """Numbers of the ranks that their agents could not start."""
        self.ended: list[RankProcess] = []
        """The ranks that have ended by themselves, the first one first."""

    @property
    def all_seen(self) -> bool:
        """True if every rank of the job has been started."""
        return len(self.ranks) == self._world_size

    @property
    def running(self) -> list[RankProcess]:
        """The ranks whose end has not been noted."""
        return [process for process in self.ranks.values() if not process.has_ended]

    @property
    def orphaned(self) -> list[RankProcess]:
        """The ranks that were killed because the launcher's process on their host is gone.

        The first one comes first: the loss of one of its processes ends a launcher on all hosts.
        """
        found = [process for process in self.ranks.values() if process.orphaned_by]
        return sorted(found, key=lambda process: process.ended_at)

    def look(self) -> list[RankProcess]:
        """Read the new notes of the agents; return the ranks that have been started since."""
        notes = [(None, words) for words in self._new_lines()]
        started = []
        for host, (number, word, *values) in [
            *notes,
            *(self._hosts.receive() if self._hosts else ()),
        ]:
            rank = int(number)
            if word == "started":
                process = RankProcess(rank, int(values[1]), int(values[0]), host=host)
                self.ranks[rank] = process
                started.append(process)
                continue
            if word == "failed":
                self.failed.append(rank)
                continue
            process = self.ranks[rank]
            process.is_gone = True
            if word == "orphaned":
                process.orphaned_by, process.ended_at = int(values[0]), float(values[1])
            elif word == "ended":
                process.exit_code, process.ended_at = int(values[0]), float(values[1])
                self.ended.append(process)
                # Two agents may write in another order than that in which their ranks ended.
                self.ended.sort(key=lambda other: other.ended_at)
        return started

    def _new_lines(self) -> list[list[str]]:
        try:
            with self._file.open("rb") as file:
                file.seek(self._read)
                lines = file.read().splitlines(keepends=True)
        # No agent has started yet.
        except FileNotFoundError:
            return []
        whole = [line for line in lines if line.endswith(b"\n")]  # an agent is writing the last one
        self._read += sum(map(len, whole))
        return [line.decode().split() for line in whole]

    def wait_for_all(self) -> None:
        """Wait until every rank has ended, as ranks do after their launcher."""
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            # Before the file is read: an agent that has ended by now has written its last line.
            running = [process for process in self.running if process.is_running()]
            self.look()
            if not running:
                return
            time.sleep(_GLANCE_SECONDS)


def _is_running(pid: int) -> bool:
    try:
        # Not kill(pid, 0), which also finds a process that has ended and waits for its parent.
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not select.select([handle], [], [], 0)[0]  # readable once the process has ended
    finally:
        os.close(handle)


def can_be_watched() -> bool:
    """True if ranks have agents on this system: Linux 5.3 or newer."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True
