"""The first message of every MPI collective: what each rank calls, and its data where small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.call import HEADER_LENGTH, Call

__all__ = ["INLINE_BYTES", "ROW_LENGTH", "Headers", "make_row"]

_INLINE_LENGTH = 16
INLINE_BYTES = 8 * _INLINE_LENGTH
"""Arrays of up to this many bytes travel in the header, and need no second message."""

ROW_LENGTH = HEADER_LENGTH + _INLINE_LENGTH
"""Number of int64 values that each rank sends."""

_HEADER_BYTES = 8 * HEADER_LENGTH

Rows = np.ndarray[Any, np.dtype[np.int64]]


def make_row(call: Call, payload: Array | None) -> Rows:
    """The message of one rank, int64 of shape (ROW_LENGTH,).

    ``payload`` is a host array, and is left out where it is larger than `INLINE_BYTES`.
    """
    row = np.zeros(ROW_LENGTH, np.int64)
    call.encode(row)
    if payload is not None and 0 < payload.nbytes <= INLINE_BYTES:
        inline = row.view(np.uint8)[_HEADER_BYTES : _HEADER_BYTES + payload.nbytes]
        inline[:] = payload.reshape(-1).view(np.uint8)
    return row


class Headers:
    """What all ranks sent.

    Parameters
    ----------
    rows : ndarray
        int64 of shape (world_size, ROW_LENGTH).
    own : Call
        This rank's call.
    """

    def __init__(self, rows: Rows, own: Call, rank: int) -> None:
        self._rows = rows
        heads = rows[:, :HEADER_LENGTH]
        self.identical = bool((heads == heads[rank]).all())
        self.calls: Sequence[Call] = (
            (own,) * len(rows) if self.identical else tuple(Call.decode(h) for h in heads)
        )

    @property
    def all_inline(self) -> bool:
        """Whether every rank's array came with its header."""
        if self.identical:
            return self.calls[0].nbytes <= INLINE_BYTES
        return all(call.nbytes <= INLINE_BYTES for call in self.calls)

    def inline(self, rank: int) -> Array:
        """The array that ``rank`` sent in its header: a view."""
        call = self.calls[rank]
        assert call.dtype is not None
        assert call.shape is not None
        data = self._rows[rank].view(np.uint8)[_HEADER_BYTES : _HEADER_BYTES + call.nbytes]
        return data.view(call.dtype).reshape(call.shape)

    def integers(self, count: int) -> list[list[int]]:
        """The ``count`` int64 values that each rank sent in its header."""
        rows: list[list[int]] = self._rows[:, HEADER_LENGTH : HEADER_LENGTH + count].tolist()
        return rows
