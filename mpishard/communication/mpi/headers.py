"""The first message of every MPI collective: what each rank calls, and its data where small."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.contract.call import HEADER_BYTES, Call
from mpishard.communication.contract.nodes import Places
from mpishard.communication.mpi.node_memory import PRIVATE

__all__ = [
    "APART",
    "AT_HOME",
    "COPIED",
    "INLINE_BYTES",
    "ROW_BYTES",
    "Headers",
    "Readiness",
    "make_row",
]

INLINE_BYTES = 128
"""Arrays of up to this many bytes travel in the header, and need no second message."""

ROW_BYTES = HEADER_BYTES + INLINE_BYTES
"""Number of bytes that each rank sends."""

_PLACES = struct.Struct("=5q")
_READINESS_AT = _PLACES.size - 8


class Readiness(IntEnum):
    """What a rank has done with an array that is too long for its header."""

    AT_HOME = 0
    """Nothing."""
    COPIED = 1
    """What others need of it stands in the rank's row of the bounce buffers."""
    ON_DEVICE = 2
    """It lies on a GPU, and goes from there."""
    APART = 3
    """Nothing, and its result lies in this process's own memory, not in the array."""


COPIED = _PLACES.pack(*PRIVATE, *PRIVATE, Readiness.COPIED)
"""What stands in a header instead of a private array that was copied."""

AT_HOME = _PLACES.pack(*PRIVATE, *PRIVATE, Readiness.AT_HOME)
"""What stands in a header instead of a private array that was not."""

APART = _PLACES.pack(*PRIVATE, *PRIVATE, Readiness.APART)
"""What stands in a header instead of a private array whose result lies apart."""


def make_row(
    call: Call,
    payload: Array | None,
    places: Places = (PRIVATE, PRIVATE),
    readiness: Readiness = Readiness.AT_HOME,
) -> bytearray:
    """The message of one rank: `ROW_BYTES` bytes.

    ``payload`` is a host array. Where it is larger than `INLINE_BYTES`, there stand instead
    ``places``, where it and the result lie in memory that the node's ranks share, and
    ``readiness``.
    """
    row = bytearray(ROW_BYTES)
    call.encode(row)
    if payload is not None:
        if payload.nbytes <= INLINE_BYTES:
            row[HEADER_BYTES : HEADER_BYTES + payload.nbytes] = payload.tobytes()
        else:
            _PLACES.pack_into(row, HEADER_BYTES, *places[0], *places[1], readiness)
    return row


class Headers:
    """What all ranks sent.

    Parameters
    ----------
    rows : bytearray
        The ranks' rows end to end.
    own : Call
        This rank's call.
    rank : int
        This rank.
    """

    def __init__(self, rows: bytearray, own: Call, rank: int) -> None:
        self._rows = rows
        starts = range(0, len(rows), ROW_BYTES)
        mine = rows[starts[rank] : starts[rank] + HEADER_BYTES]
        self.identical = all(rows[start : start + HEADER_BYTES] == mine for start in starts)
        self.calls: Sequence[Call] = (
            (own,) * len(starts)
            if self.identical
            else tuple(Call.decode(rows, start) for start in starts)
        )

    @property
    def all_inline(self) -> bool:
        """Whether every rank's array came with its header."""
        if self.identical:
            return self.calls[0].nbytes <= INLINE_BYTES
        return all(call.nbytes <= INLINE_BYTES for call in self.calls)

    @property
    def any_inline(self) -> bool:
        """Whether any rank's array came with its header."""
        return any(call.nbytes <= INLINE_BYTES for call in self.calls)

    def flat(self, rank: int) -> Array:
        """The elements that ``rank`` sent in its header: a view, 1-D."""
        call = self.calls[rank]
        assert call.dtype is not None
        start = rank * ROW_BYTES + HEADER_BYTES
        return np.frombuffer(self._rows, call.dtype, call.nbytes // call.dtype.itemsize, start)

    def inline(self, rank: int) -> Array:
        """The array that ``rank`` sent in its header: a view."""
        shape = self.calls[rank].shape
        assert shape is not None
        return self.flat(rank).reshape(shape)

    def places(self, rank: int) -> Places:
        """Where the array of ``rank`` and its result lie, where that array is not inline."""
        number, offset, out_number, out_offset, _ = _PLACES.unpack_from(
            self._rows, rank * ROW_BYTES + HEADER_BYTES
        )
        return (number, offset), (out_number, out_offset)

    def has_copied(self, rank: int) -> bool:
        """Whether the array of ``rank`` stands in its row of the bounce buffers."""
        return self._readiness(rank) == Readiness.COPIED

    @property
    def all_have_copied(self) -> bool:
        """Whether that is so of every rank."""
        return all(self.has_copied(rank) for rank in range(len(self.calls)))

    @property
    def all_apart(self) -> bool:
        """Whether every rank's result lies apart."""
        return all(self._readiness(rank) == Readiness.APART for rank in range(len(self.calls)))

    @property
    def any_on_device(self) -> bool:
        """Whether the array of any rank goes from its GPU."""
        return any(self._readiness(rank) == Readiness.ON_DEVICE for rank in range(len(self.calls)))

    def _readiness(self, rank: int) -> int:
        if self.calls[rank].nbytes <= INLINE_BYTES:
            return Readiness.AT_HOME
        # A small number in the first of eight bytes, the others 0.
        return self._rows[rank * ROW_BYTES + HEADER_BYTES + _READINESS_AT]

    def integers(self, count: int) -> list[list[int]]:
        """The ``count`` int64 values that each rank sent in its header."""
        return [
            np.frombuffer(self._rows, np.int64, count, rank * ROW_BYTES + HEADER_BYTES).tolist()
            for rank in range(len(self.calls))
        ]
