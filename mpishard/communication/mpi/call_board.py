"""Where ranks read each other's last collectives, without the owner's help.

A `CallFile` of each rank: in the job's folder, where `mpishard run` made one, which reads the files
when the job has ended and removes them; otherwise in a folder of the node that is removed as soon
as all of its ranks have opened the files, so that nothing stays behind however the job ends. A
rank that computes, sleeps or is stuck needs not answer.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpishard import settings
from mpishard.communication.contract.call import Call
from mpishard.communication.contract.call_file import (
    CallFile,
    LoggedCall,
    MessageWait,
    RankState,
    call_files,
    encode_place,
)
from mpishard.communication.contract.call_log import Journal
from mpishard.communication.contract.rank_record import RankRecord, records_of_files
from mpishard.communication.mpi.mapped_files import library_files

__all__ = ["CallBoard", "FileJournal"]

_LOCK = "report.lock"

_numbers = itertools.count()
"""Counts the root worlds of this process."""

_logger = logging.getLogger("mpishard")


class CallBoard:
    """The last collectives of each rank, as far as they can be read from this rank's node.

    Where the files cannot be made the job goes on without: this rank then knows of itself alone.

    Parameters
    ----------
    rank, world_size : int
        This rank of the root world, and its size. Communicates nothing: with a job's folder the
        rank can be seen from here on, in ``init``.
    launched_ranks : sequence of int, optional
        The number that each rank's process has among those of the launcher; default: its rank.
    """

    def __init__(
        self, rank: int, world_size: int, launched_ranks: Sequence[int] | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._launched = tuple(launched_ranks or range(world_size))
        self._number = next(_numbers)
        # A process may enter several root worlds, and start others that inherit its folder.
        launched = self._launched[rank]
        self.name = f"rank-{launched}-{os.getpid()}-{self._number}.calls"
        """The name of this rank's file."""
        self._names: list[str] = []
        """Those of all ranks, once they have met."""
        self._folder = _job_folder()
        """The job's folder, if there is one on this node."""
        self._files: dict[int, CallFile] = {}
        self._ring: list[int] = []
        """The node's other ranks whose process can be seen, from the one after this on."""
        self._ring_turn = 0
        self._is_shared = False
        self._lock = -1
        self._claiming = threading.Lock()
        self._error = ""
        self._is_alone = False
        """Whether a rank has no file, so that none reads another's."""
        file = None
        if self._folder is not None:
            try:
                file = self._create(self._folder)
            except OSError as error:
                self._error = str(error)
        self.journal = FileJournal(
            file or CallFile.unshared(rank, world_size, launched, self._number)
        )
        """What this rank says of itself."""

    def share(self, node_comm: Any, comm: Any, ranks: Sequence[int]) -> None:
        """Open the files of this node's other ranks. Collective.

        Parameters
        ----------
        node_comm : mpi4py.MPI.Intracomm
            The ranks of the node.
        comm : mpi4py.MPI.Intracomm
            All ranks: that files cannot be made on one is known on all, and said once.
        ranks : sequence of int
            The world rank of each rank of ``node_comm``.
        """
        is_first = self.rank == ranks[0]
        folder = node_comm.bcast(self._choose_folder() if is_first else None)
        self._make_file(folder)
        self._names = comm.allgather(self.name)
        self._agree(comm)
        if not self._is_alone and folder is not None:
            self._open_files(folder, ranks)
        self._agree(comm)
        if self._is_alone:
            self._files.clear()
            self._ring.clear()
        if is_first and folder is not None and folder != self._folder:
            shutil.rmtree(folder)
        self._is_shared = True

    def note_shared_memory(self) -> None:
        """Write down what of the MPI library lies in ``/dev/shm`` now, for its job to remove."""
        self.journal.file.note_shared_memory(library_files())

    def claim_report(self, code: int) -> bool:
        """Whether this rank is the first to report the end of the job, with exit code ``code``.

        The first of all ranks whose files lie in one folder, in whichever root world: they end
        together. Of this world's on the node, where the folder is its own.
        """
        import fcntl  # not on every system that only trains in memory

        with self._claiming:
            if self._lock >= 0:
                # The lock settles who is first; the mark outlives the process that held it.
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    return False
            files = [*self._files.values(), self.journal.file]
            if self._folder is not None:
                files += call_files(self._folder)
            if any(file.state is RankState.REPORTED for file in files):
                return False
            self.journal.file.end(RankState.REPORTED, code)
            return True

    def dead_rank(self) -> int | None:
        """A rank of this node whose process is gone without having left; None: none was seen.

        Each rank watches the next one of its node, in a ring, and beyond those that have left or
        are gone. Where that rank cannot watch, as it is stopped, the ranks that it watches are
        seen by the others in turn: each looks at one more, another one each time.
        """
        for rank in self._ring:
            if self._files[rank].state is not RankState.LEFT:
                if not self._files[rank].is_alive():
                    return rank
                break
        if len(self._ring) > 1:
            self._ring_turn = (self._ring_turn + 1) % len(self._ring)
            rank = self._ring[self._ring_turn]
            if self._files[rank].state is not RankState.LEFT and not self._files[rank].is_alive():
                return rank
        return None

    def records(self) -> list[RankRecord]:
        """One record of each rank of the root world, in rank order."""
        return records_of_files(
            {**self._all_files(), self.rank: self.journal.file},
            self.world_size,
            time.time(),
            all_are_here=self._folder is not None and not self._is_shared,
        )

    # ------------------------------------------------------------------------------------- making

    def _choose_folder(self) -> Path | None:
        if self._folder is not None:
            return self._folder
        try:
            return Path(tempfile.mkdtemp(prefix="mpishard-calls-"))
        except OSError as error:
            self._error = str(error)
            return None

    def _make_file(self, folder: Path | None) -> None:
        if folder is None:
            self._error = self._error or "the first rank of its node could make no folder"
        if self._error or folder is None:
            return
        try:
            if folder != self._folder:
                self.journal.file = self._create(folder)
            # Opened by each rank for itself: a lock belongs to the opening, not to the file.
            self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            weakref.finalize(self, os.close, self._lock)
        except OSError as error:
            self._error = str(error)

    def _create(self, folder: Path) -> CallFile:
        return CallFile.create(
            folder / self.name, self.rank, self.world_size, self._launched[self.rank], self._number
        )

    def _open_files(self, folder: Path, ranks: Sequence[int]) -> None:
        try:
            self._files = {rank: CallFile.open(folder / self._names[rank]) for rank in ranks}
        except (OSError, ValueError) as error:
            self._error = str(error)
        # In containers with process numbers of their own nobody sees whether another is alive.
        seen = [r for r in sorted(self._files) if r != self.rank and self._files[r].is_alive()]
        self._ring = [r for r in seen if r > self.rank] + [r for r in seen if r < self.rank]

    def _agree(self, comm: Any) -> None:
        """Hear whether a rank has failed; all then go on without, and rank 0 says so once."""
        if self._is_alone:
            return
        errors = comm.allgather(self._error)
        failed = [rank for rank, error in enumerate(errors) if error]
        if not failed:
            return
        self._is_alone = True
        if self.rank == 0:
            _logger.warning(
                "reports on ranks that fail or wait will say little: rank %d could not keep a "
                "file of its last collectives (%s). Training goes on; TMPDIR chooses the folder",
                failed[0], errors[failed[0]],
            )  # fmt: skip

    def _all_files(self) -> dict[int, CallFile]:
        """The files that can be read now: other nodes', too, where the job's folder is shared."""
        if self._folder is None:
            return self._files
        if not self._names:
            return {file.rank: file for file in call_files(self._folder) if self._may_be_ours(file)}
        found = dict(self._files)
        for rank, name in enumerate(self._names):
            if rank not in found:
                with suppress(OSError, ValueError):  # of a node that the folder is not on
                    found[rank] = CallFile.open(self._folder / name)
        return found

    def _may_be_ours(self, file: CallFile) -> bool:
        """Whether ``file``, whose name nobody has told yet, is that of a rank of this world.

        Its process enters a world of the same processes; of those it entered one by one the last
        is meant, and one that it has completed is not this.
        """
        return (
            file.state in (RankState.STARTED, RankState.REPORTED)
            and file.world_size == self.world_size
            and self._launched[file.rank] == file.launched_rank
        )


class FileJournal(Journal):
    """What a rank says of itself, in a file that others can read.

    Parameters
    ----------
    file : CallFile
        The rank's own.
    """

    def __init__(self, file: CallFile) -> None:
        super().__init__()
        self.file = file

    def place(self, call: Call, group: str) -> bytes:
        return encode_place(call, group)

    def record(self, call: Call, place: bytes) -> None:
        call.number = self.file.record(call.sequence, call.description, place)

    def wait(self, what: Call | MessageWait) -> None:
        self.awaited = what
        if isinstance(what, MessageWait):
            self.file.wait_for(what)
        else:
            self.file.wait(what.number)

    def go_on(self) -> None:
        self.awaited = None
        self.file.wait(0)

    def end(self, state: RankState) -> None:
        self.file.end(state)

    @property
    def last(self) -> LoggedCall | None:
        return next(iter(self.file.calls(1)), None)

    def record_of(self, rank: int, now: float) -> RankRecord:
        return records_of_files({rank: self.file}, rank + 1, now, all_are_here=True)[rank]


def _job_folder() -> Path | None:
    """The job's folder; a node that it is not on has none."""
    folder = settings.job_folder()
    return folder if folder is not None and folder.is_dir() else None
