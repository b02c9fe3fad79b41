"""The processes of this machine's ranks: which they are, and the order in which they end.

A launcher says little of it, each its own. The system does: ranks are found among the launcher's
descendants, by the number in their environment, and in the call logs that they write; a pidfd
tells of each end.

Which came first a pidfd may tell too late: Hydra hears of an end by a socket that the system closes
somewhat earlier, and a rank that it kills for it may be through sooner, where ranks share cores. So
each rank holds a pipe open that is closed just before that socket. Of two ranks that held one, the
one whose pipe was closed first is the first. A pipe may be closed and held again before, by
processes that follow each other in one rank: the last time counts.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mpishard.communication.contract.status import RankRecord, records_in
from mpishard.communication.failure import marks

__all__ = ["RankProcess", "RankProcesses", "held_pipes"]

# _IOWR(0xFF, 11, struct pidfd_info) of linux/pidfd.h, since Linux 6.15. Its first 64 bytes end
# with the wait status, which a process leaves here also after its parent has taken it.
_PIDFD_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
_PIDFD_INFO = struct.Struct("=Q52si")
_PIDFD_INFO_EXIT = 1 << 3

_END_SECONDS = 2.0

_OTHER_FILES = 64
"""That this process may have open, beside two for each rank."""


@dataclass(slots=True)
class RankProcess:
    """The process of a rank.

    ``status`` is its wait status, as `os.waitstatus_to_exitcode` takes it: None while it runs, and
    where the system did not tell.
    """

    rank: int
    pid: int
    status: int | None = None
    has_ended: bool = False

    @property
    def exit_code(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None where that is not known."""
        return None if self.status is None else os.waitstatus_to_exitcode(self.status)

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal, if it still runs."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def catches(self, number: signal.Signals) -> bool:
        """Whether the process does something of its own when it is sent the signal."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return False
        caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (number - 1) & 1)


class RankProcesses:
    """The ranks of one job on this machine.

    Parameters
    ----------
    launcher : int
        Process id of the launcher.
    rank_variable : str
        The environment variable in which it tells a process its rank.
    folder : Path
        Where the ranks write their call logs.
    world_size : int
        Number of ranks, on all machines.
    pipes : mapping of int to int
        The handles of `held_pipes`, which were made before the launcher was started; closed by
        `close`.
    """

    def __init__(
        self,
        launcher: int,
        rank_variable: str,
        folder: Path,
        world_size: int,
        pipes: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._launcher = launcher
        self._variable = f"{rank_variable}=".encode()
        self._folder = folder
        self._world_size = world_size
        self._handles: dict[int, RankProcess] = {}
        self._is_looking = False
        self._waiting = select.epoll()
        self._launcher_handle = os.pidfd_open(launcher)
        self._waiting.register(self._launcher_handle, select.EPOLLIN)
        self._pipes = pipes
        for handle in pipes:
            self._waiting.register(handle, select.EPOLLHUP | select.EPOLLET)
        self._closed: dict[int, int] = {}
        self._closings = 0
        self.ranks: dict[int, RankProcess] = {}
        """Those that were seen, by rank."""
        self.ended: list[RankProcess] = []
        """Those that have ended, the first one first."""

    @staticmethod
    def can_be_watched() -> bool:
        """Whether the system tells when a process ends that is not a child (Linux 5.3)."""
        try:
            os.close(os.pidfd_open(os.getpid()))
        except (AttributeError, OSError):
            return False
        return Path("/proc/self").is_dir()

    @property
    def all_seen(self) -> bool:
        """Whether every rank of the job is known: they all run here."""
        return len(self.ranks) == self._world_size

    def look(self) -> None:
        """Find ranks that have come since the last look.

        Nothing is done where a signal handler calls it in the middle of a look.
        """
        if self.all_seen or self._is_looking:
            return
        self._is_looking = True
        try:
            self._search(self._launcher)
            for record in records_in(self._folder, with_calls=False):
                rank = record.launched_rank
                if rank not in self.ranks and record.host == socket.gethostname():
                    self._add(rank, record.pid, record)
        finally:
            self._is_looking = False

    def wait(self, seconds: float | None) -> None:
        """Wait for the end of a rank or of the launcher, and note the ranks that have ended."""
        for handle, _ in self._waiting.poll(seconds):
            if handle in self._pipes:
                self._note_closing(self._pipes[handle])
                continue
            self._waiting.unregister(handle)
            if handle != self._launcher_handle:
                self._note_end(handle)

    def wait_for_all(self) -> None:
        """Wait until every known rank has ended, as they do when their launcher has."""
        deadline = time.monotonic() + _END_SECONDS
        while len(self.ended) < len(self.ranks) and time.monotonic() < deadline:
            self.wait(max(0, deadline - time.monotonic()))
        for handle, process in self._handles.items():
            if process.status is None:
                process.status = _status_kept(handle)

    def close(self) -> None:
        """Let go of the processes."""
        self._waiting.close()
        for handle in (self._launcher_handle, *self._handles, *self._pipes):
            os.close(handle)

    def _search(self, parent: int) -> None:
        for child in _children(parent):
            rank = self._rank_of(child)
            if rank is None:
                self._search(child)
            elif rank not in self.ranks:
                self._add(rank, child, None)

    def _rank_of(self, pid: int) -> int | None:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return None
        for variable in variables:
            if variable.startswith(self._variable):
                value = variable[len(self._variable) :]
                return int(value) if value.isdigit() else None
        return None

    def _add(self, rank: int, pid: int, record: RankRecord | None) -> None:
        process = RankProcess(rank, pid)
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            if record is not None:  # it came and went between two looks
                self.ranks[rank] = process
                self.wait(0)  # for what is known of others by now
                self._add_ended(process)
            return
        # Or the number is another process's by now.
        if record is not None and not record.is_alive:
            self.wait(0)
            self._add_ended(process)
            os.close(handle)
        else:
            self._handles[handle] = process
            self._waiting.register(handle, select.EPOLLIN)
        self.ranks[rank] = process

    def _note_end(self, handle: int) -> None:
        process = self._handles[handle]
        process.status = _status_of_zombie(process.pid)
        if process.status is None:
            process.status = _status_kept(handle)
        self._add_ended(process)

    def _add_ended(self, process: RankProcess) -> None:
        process.has_ended = True
        closed, place = self._closed.get(process.rank), len(self.ended)
        # Beyond one that held no pipe nothing is known but this order.
        while closed is not None and place:
            other = self._closed.get(self.ended[place - 1].rank)
            if other is None or other < closed:
                break
            place -= 1
        self.ended.insert(place, process)

    def _note_closing(self, rank: int) -> None:
        process = self.ranks.get(rank)
        if process is None or not process.has_ended:
            self._closings += 1
            self._closed[rank] = self._closings


def held_pipes(folder: Path, world_size: int) -> dict[int, int]:
    """A named pipe in ``folder`` for each rank to hold: our end's handle, and the rank's number.

    None where the file system has no named pipes, or this process may not open as many files: the
    order is that of the pidfds then.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and 2 * world_size + _OTHER_FILES > limit:
        return {}
    found: dict[int, int] = {}
    try:
        for rank in range(world_size):
            path = folder / f"{marks.HELD}{rank}"
            os.mkfifo(path, 0o600)
            found[os.open(path, os.O_RDONLY | os.O_NONBLOCK)] = rank
    except OSError:
        for handle in found:
            os.close(handle)
        return {}
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    # A process is listed under the thread that started it.
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def _status_of_zombie(pid: int) -> int | None:
    """The wait status of a process whose parent has not asked for it yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[49]) if fields[0] == b"Z" else None


def _status_kept(handle: int) -> int | None:
    """The wait status of a process that is gone, where the system keeps it (Linux 6.15)."""
    answer = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, b"", 0))
    try:
        fcntl.ioctl(handle, _PIDFD_GET_INFO, answer)
    except OSError:
        return None
    mask, _, status = _PIDFD_INFO.unpack(answer)
    return status if mask & _PIDFD_INFO_EXIT else None
