"""Where the ranks of a node read each other's last collectives, without the owner's help.

One file for the node, mapped by its ranks and unlinked as soon as all have it, so that nothing
stays behind however the job ends. A rank that computes, sleeps or is stuck needs not answer.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

from mpishard import settings
from mpishard.communication.call import HEADER_BYTES, Call, CallLog

__all__ = ["CallBoard", "SharedCallLog"]

_SITE_BYTES = 128
_ROW_BYTES = HEADER_BYTES + _SITE_BYTES
_ROWS = settings.CALL_LOG_LENGTH
_RANK_BYTES = (1 + _ROWS) * _ROW_BYTES
# The first row of a rank is about itself.
_COUNT, _PROCESS, _REPORTED, _LEFT = 0, 8, 16, 24
_NUMBER = struct.Struct("=q")
_ROW = struct.Struct(f"q{HEADER_BYTES - 8}s{_SITE_BYTES}s")


class CallBoard:
    """The last collectives of each rank of this node.

    Parameters
    ----------
    node_comm : mpi4py.MPI.Intracomm
        The ranks of the node. The constructor is collective over it.
    ranks : sequence of int
        The world rank of each rank of ``node_comm``.
    """

    def __init__(self, node_comm: Any, ranks: list[int]) -> None:
        self.ranks = ranks
        self._local = node_comm.Get_rank()
        nbytes = len(ranks) * _RANK_BYTES
        path = None
        if self._local == 0:
            handle, path = tempfile.mkstemp(prefix="mpishard-calls-")
            os.ftruncate(handle, nbytes)
            os.close(handle)
        path = node_comm.bcast(path)
        # Opened by each rank for itself: a lock belongs to the opening, not to the file.
        self._file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._file)
        self._map = mmap.mmap(self._file, nbytes)
        self._number = 0
        self._write(self._local, _PROCESS, os.getpid())
        node_comm.Barrier()
        if self._local == 0:
            Path(path).unlink()
        self._sites: dict[tuple[str, int, str], bytes] = {}

    def record(self, call: Call, group: str) -> None:
        """Write down ``call`` of this rank in the world that reports call ``group``."""
        start = self._local * _RANK_BYTES + (1 + self._number % _ROWS) * _ROW_BYTES
        key = (call.filename, call.line, group)
        site = self._sites.get(key)
        if site is None:
            text = (call.site if not group else f"{call.site} ({group})").encode()
            site = self._sites[key] = text[-_SITE_BYTES:].ljust(_SITE_BYTES, b"\0")
        _ROW.pack_into(self._map, start, call.sequence, call.description, site)
        self._number += 1
        self._write(self._local, _COUNT, self._number)

    def claim_report(self) -> bool:
        """Whether this rank is the first of its node to report the end of the job."""
        import fcntl  # not on every system that only trains in memory

        # The lock settles who is first; the mark outlives the process that held it.
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        if any(self._read(local, _REPORTED) for local in range(len(self.ranks))):
            return False
        self._write(self._local, _REPORTED, 1)
        return True

    def set_left(self, *, left: bool) -> None:
        """Say whether this rank has left every world: its process may be gone then."""
        self._write(self._local, _LEFT, int(left))

    def dead_rank(self) -> int | None:
        """The first rank of this node whose process is gone, and that had not left; or None."""
        if not Path("/proc/self").is_dir():
            return None
        for local, rank in enumerate(self.ranks):
            if self._read(local, _LEFT):
                continue
            try:
                stat = Path(f"/proc/{self._read(local, _PROCESS)}/stat").read_bytes()
            except OSError:
                return rank
            if stat.rpartition(b")")[2].split()[0] in b"ZX":
                return rank
        return None

    def table(self, world_size: int, count: int = 3, *, only: int | None = None) -> str:
        """The last ``count`` collectives of each rank, or of ``only`` one, newest last."""
        lines = []
        for rank in range(world_size) if only is None else (only,):
            if rank not in self.ranks:
                lines.append(f"  rank {rank}: on another node")
                continue
            local = self.ranks.index(rank)
            number = self._read(local, _COUNT)
            lines.append(f"  rank {rank}:" + ("" if number else " no collective yet"))
            for index in range(max(0, number - count), number):
                start = local * _RANK_BYTES + (1 + index % _ROWS) * _ROW_BYTES
                call = Call.decode(self._map, start)
                text = self._map[start + HEADER_BYTES : start + _ROW_BYTES].rstrip(b"\0")
                site = text.decode(errors="replace")
                lines.append(f"    collective {call.sequence}, {call}, at {site}")
        return "\n".join(lines)

    def _read(self, local: int, field: int) -> int:
        number: int = _NUMBER.unpack_from(self._map, local * _RANK_BYTES + field)[0]
        return number

    def _write(self, local: int, field: int, number: int) -> None:
        _NUMBER.pack_into(self._map, local * _RANK_BYTES + field, number)


class SharedCallLog(CallLog):
    """A call log that the other ranks of the node can read."""

    def __init__(self, board: CallBoard, group: str) -> None:
        super().__init__()
        self._board = board
        self._group = group

    def record(self, call: Call, frame: FrameType | None) -> None:
        super().record(call, frame)
        self._board.record(call, self._group)
