"""The processes of this machine's ranks, and their ends.

The agent of a rank (`mpishard.cli.run.rank_agent`) appends a line to a file in the job's folder
when it has started the rank, and another one when the rank has ended. This module reads them.
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
        Process id of the launcher on this machine, if the rank was killed because it is gone.
    """

    rank: int
    pid: int
    agent: int
    exit_code: int | None = None
    ended_at: float = 0.0
    orphaned_by: int = 0

    @property
    def has_ended(self) -> bool:
        """True if its agent has noted the end."""
        return self.exit_code is not None or bool(self.orphaned_by)

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal, if it still runs."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def is_running(self) -> bool:
        """True if it runs, or its agent, which may be about to note the end."""
        return _is_running(self.pid) or _is_running(self.agent)

    def catches(self, number: signal.Signals) -> bool:
        """True if the process has a handler for the signal."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return False
        caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
        # A mask with signal n at bit n - 1: proc(5).
        return bool(int(caught, 16) >> (number - 1) & 1)


class RankProcesses:
    """The ranks of one job on this machine.

    Parameters
    ----------
    folder : Path
        The job's folder.
    world_size : int
        Number of ranks, on all machines.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        # On a shared file system other machines have files there, too, with process ids and clocks
        # of their own.
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
        """True if every rank of the job runs on this machine, or has run there."""
        return len(self.ranks) == self._world_size

    @property
    def running(self) -> list[RankProcess]:
        """The ranks whose end has not been noted."""
        return [process for process in self.ranks.values() if not process.has_ended]

    @property
    def orphaned(self) -> list[RankProcess]:
        """The ranks that were killed because the launcher's process on this machine is gone."""
        return [process for process in self.ranks.values() if process.orphaned_by]

    def look(self) -> list[RankProcess]:
        """Read the new lines of the agents; return the ranks that have been started since."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._read)
                lines = file.read().splitlines(keepends=True)
        # No agent has started yet.
        except FileNotFoundError:
            return []
        started = []
        for line in lines:
            if not line.endswith(b"\n"):  # the agent is writing it
                break
            self._read += len(line)
            rank, word, *values = line.decode().split()
            if word == "started":
                process = RankProcess(int(rank), int(values[1]), int(values[0]))
                self.ranks[process.rank] = process
                started.append(process)
                continue
            if word == "failed":
                self.failed.append(int(rank))
                continue
            process = self.ranks[int(rank)]
            if word == "orphaned":
                process.orphaned_by = int(values[0])
            else:
                process.exit_code, process.ended_at = int(values[0]), float(values[1])
                self.ended.append(process)
                # Two agents may write in another order than that in which their ranks ended.
                self.ended.sort(key=lambda other: other.ended_at)
        return started

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
