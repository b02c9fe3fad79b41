"""Logs of a job: the folder of ``--log-dir``, and the call log of each rank."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, groupby
from pathlib import Path
from typing import Self

from mpishard.communication import RankRecord, RankState, records_in

CALLS = "calls"
"""Subfolder of the call logs that the ranks write."""

ENDED = "ended.json"
"""File in the folder of a start with a description of its end."""

_RESTARTS = "restart-[0-9]*"

_LOCK = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without locks, as some parallel ones are mounted."""


def folder_of_start(folder: Path, restart_count: int) -> Path:
    """Return the folder of the ranks' logs after so many restarts, inside ``folder``."""
    return folder / f"restart-{restart_count}" if restart_count else folder


def newest_start(folder: Path) -> Path:
    """Return the folder of the last start of the job whose logs are in ``folder``."""
    # As numbers, because restart-10 comes before restart-2 as text.
    counts = [path.name.rpartition("-")[2] for path in folder.glob(_RESTARTS)]
    return folder_of_start(folder, max((int(n) for n in counts if n.isdecimal()), default=0))


def check_log_folder(folder: Path) -> None:
    """Refuse a file, and the folder of a job that still runs.

    Raises
    ------
    ValueError
        If it is one of these, which the message names.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--log-dir must be a folder, and {folder} is a file")
    # The ranks that run may be those of any restart.
    starts = (folder, *folder.glob(_RESTARTS))
    for record in chain.from_iterable(
        records_in(start / CALLS, with_calls=False) for start in starts
    ):
        # A process of another machine may run or not: that cannot be known here.
        if record.host == socket.gethostname() and record.is_alive:
            raise ValueError(
                f"--log-dir {folder} belongs to a job that still runs: its rank "
                f"{record.launched_rank} is process {record.pid} on {record.host}. Give each job a "
                "folder of its own"
            )


@contextmanager
def locked_log_folder(folder: Path) -> Iterator[None]:
    """Make ``folder``, and lock it against other jobs during the block.

    The lock file stays. If it were removed, two jobs could each lock a file of that name.

    Raises
    ------
    OSError
        If it cannot be written.
    ValueError
        If another job holds it.
    """
    import fcntl  # not on every system that only trains in memory

    folder.mkdir(parents=True, exist_ok=True)
    # A link is not followed: in a folder that others may write to it could name any file.
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--log-dir {folder} belongs to a job that still runs. Give each job a folder of "
                "its own"
            ) from None
        except OSError as error:
            # Without locks, `check_log_folder` still finds a job of this machine.
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(handle)


def prepare_log_folder(folder: Path) -> Path | None:
    """Move the logs of an earlier job in ``folder`` aside; return the new folder.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    # Only what mpishard writes: metrics and checkpoints of the user may be there, too.
    names = ("rank-*.log", "rank-*.calls.txt", CALLS, ENDED, _RESTARTS)
    old = [path for name in names for path in folder.glob(name)]
    if not old:
        return None
    number = 1
    while (aside := folder / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for path in old:
        path.rename(aside / path.name)
    return aside


_ENDS = {
    RankState.STARTED: "ended in init()",
    RankState.RUNNING: "ended without leaving",
    RankState.LEAVING: "ended while it waited for the others to leave",
    RankState.LEFT: "left",
    RankState.REPORTED: "reported why the job ends",
}
"""Last state of a process -> description of its end."""


@dataclass(frozen=True, slots=True)
class RankLogs:
    """The call logs of one process, which is ``rank`` for the launcher.

    Parameters
    ----------
    records : sequence of RankRecord
        One or more, in the order in which the process entered their worlds.
    """

    records: Sequence[RankRecord]

    @classmethod
    def of_job(cls, records: Iterable[RankRecord]) -> dict[int, Self]:
        """Group the logs of a job, in the order of `records_in`, by rank."""
        # The records are sorted by rank, which groupby needs.
        by_rank = groupby(records, key=lambda record: record.launched_rank)
        return {rank: cls(tuple(of_rank)) for rank, of_rank in by_rank}

    @property
    def rank(self) -> int:
        """The launcher's number of the process."""
        return self.records[0].launched_rank

    @property
    def host(self) -> str:
        """Name of the machine."""
        return self.records[0].host

    @property
    def state(self) -> RankState:
        """State of the rank: ``LEFT`` if it left every root world that it entered."""
        states = [record.state or RankState.STARTED for record in self.records]
        # A rank that waits in init() makes no progress in its other worlds, so that state counts.
        for decisive in (RankState.REPORTED, RankState.STARTED):
            if decisive in states:
                return decisive
        return next((s for s in reversed(states) if s is not RankState.LEFT), RankState.LEFT)

    @property
    def has_begun(self) -> bool:
        """True if a world that the rank entered was complete."""
        return any(record.state is not RankState.STARTED for record in self.records)

    @property
    def is_saving(self) -> bool:
        """True if the rank saves and ends when it receives a notice of preemption."""
        return any(record.is_saving for record in self.records)

    @property
    def resumable_by(self) -> tuple[int, int]:
        """The fewest and the most ranks that can resume from its checkpoint; (0, 0) if unknown."""
        saving = (record.resumable_by for record in self.records if record.is_saving)
        return next(saving, (0, 0))

    @property
    def code(self) -> int:
        """Exit code of the job in the rank's report; 0 without a report."""
        return next((r.code for r in self.records if r.state is RankState.REPORTED), 0)

    @property
    def newest(self) -> RankRecord:
        """The record of the world that the rank used last."""
        return max(self.records, key=lambda record: record.last.time if record.last else 0.0)

    @property
    def place(self) -> str:
        """``in`` or ``after``, and the last collective of the rank in any of its worlds; or ""."""
        record = self.newest
        if record.last is None:
            return ""
        return f"{'in' if record.waits == record.last else 'after'} {record.last.full_text}"

    @property
    def end(self) -> str:
        """The last state of the process as its end, in words."""
        return _ENDS[self.state]

    def text(self) -> str:
        """Return a text for people: the rank, its end, and its last collectives."""
        texts = []
        for record in self.records:
            stood = f"{_ENDS[record.state or RankState.STARTED]}, {record.count} collectives"
            name = f"rank {record.rank} of {record.world_size}"
            name += f", process {record.pid} on {record.host}"
            # Users know the launcher's number, and a world that was made later may have others.
            if record.rank != record.launched_rank:
                name = f"rank {record.launched_rank} of the job, in a world of its own {name}"
            texts.append(f"{name}: {stood}\n")
            for call in record.calls:
                time = datetime.fromtimestamp(call.time).astimezone()
                texts[-1] += f"{time.isoformat(' ', 'microseconds')}  {call.full_text}\n"
        return "\n".join(texts)
