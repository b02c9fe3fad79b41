"""What a rank asks of the others, in a form that can be compared before data is mixed."""

from __future__ import annotations

import contextlib
import math
import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from mmap import mmap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ml_dtypes
import numpy as np

from mpishard import settings
from mpishard.arrays import Array
from mpishard.communication.reduction import ReductionOperation
from mpishard.errors import CollectiveMismatchError, PeerError

__all__ = ["DTYPES", "HEADER_BYTES", "Call", "CallLog", "Kind", "check_calls"]

DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(t)
    for t in (
        np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32,
        np.uint64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64,
        np.complex128,
    )
)  # fmt: skip
"""The dtypes that travel. A header names one by its place here."""

_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_NUMBERS = 7 + settings.MAXIMUM_DIMS
_DESCRIPTION = struct.Struct(f"{_NUMBERS}q")
_HEADER = struct.Struct(f"q{_DESCRIPTION.size}s")
_FIELDS = struct.Struct(f"{1 + _NUMBERS}q")
_PADDING = tuple((0,) * n for n in range(settings.MAXIMUM_DIMS, -1, -1))
HEADER_BYTES = _HEADER.size
"""Number of bytes that describe a call on the wire."""

_PLACES_KEPT = 1024

# Frames that are not the user's: this package's, and those of the context managers in it.
_NOT_OF_USERS = (
    str(Path(__file__).resolve().parents[1]) + os.sep,
    contextlib.contextmanager.__code__.co_filename,
)


class Kind(IntEnum):
    """The collectives; LEAVE is what a rank calls when it ends."""

    LEAVE = 0
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    SCATTER = 5
    GATHER = 6
    ALL_TO_ALL = 7
    BARRIER = 8
    SPLIT = 9
    ALLOCATE_SHARED = 10

    @property
    def label(self) -> str:
        """The method's name."""
        return _LABELS[self]


_LABELS = {kind: kind.name.lower() for kind in Kind}


@dataclass(slots=True)
class Call:
    """One rank's call of one collective.

    ``sequence`` is the number of the call on its backend, from 1. ``dtype`` and ``shape`` are
    None where the rank passed no array; ``counts_hash`` and ``out_rows`` are -1 where not given.
    """

    sequence: int
    kind: Kind
    operation: ReductionOperation | None
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] | None
    root: int
    counts_hash: int
    out_rows: int
    filename: str = ""
    line: int = 0
    method: str = ""
    """The function of this package that the user called, such as ``FSDPModel.predict``."""
    _description: bytes = field(default=b"", compare=False, repr=False)

    @classmethod
    def describe(
        cls,
        sequence: int,
        kind: Kind,
        array: Array | None,
        *,
        operation: ReductionOperation | None = None,
        root: int = -1,
        counts: tuple[int, ...] | None = None,
        out_rows: int = -1,
    ) -> Call:
        """The call of ``kind`` with ``array``."""
        return cls(
            sequence,
            kind,
            operation,
            None if array is None else array.dtype,
            None if array is None else tuple(array.shape),
            root,
            -1 if counts is None else hash(counts) & 0x7FFFFFFF,
            out_rows,
        )

    @property
    def site(self) -> str:
        """``file:line`` in the user's code, where known."""
        return f"{self.filename}:{self.line}" if self.filename else "an unknown place"

    @property
    def nbytes(self) -> int:
        """Bytes of the array that was passed."""
        if self.shape is None or self.dtype is None:
            return 0
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        words = []
        if self.operation is not None:
            words.append(self.operation.name)
        if self.dtype is not None:
            words.append(f"{self.dtype.name}{list(self.shape or ())}")
        if self.root >= 0:
            words.append(f"root={self.root}")
        return f"{self.kind.label}({', '.join(words)})"

    def again(self, sequence: int) -> Call:
        """The same call, made another time."""
        return Call(
            sequence, self.kind, self.operation, self.dtype, self.shape, self.root,
            self.counts_hash, self.out_rows, _description=self.description,
        )  # fmt: skip

    def encode(self, out: bytearray | mmap, start: int = 0) -> None:
        """Write the call into ``out`` as `HEADER_BYTES` bytes, from ``start`` on."""
        _HEADER.pack_into(out, start, self.sequence, self.description)

    def to_bytes(self) -> bytes:
        """The call and where it was made, for whoever sends it as a message of its own."""
        packed = bytearray(HEADER_BYTES)
        self.encode(packed)
        return bytes(packed) + f"{self.line}\n{self.method}\n{self.filename}".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Call:
        """The call that `to_bytes` wrote."""
        call = cls.decode(data)
        line, call.method, call.filename = data[HEADER_BYTES:].decode().split("\n", 2)
        call.line = int(line)
        return call

    @property
    def description(self) -> bytes:
        """What `encode` writes after the sequence number: the same for every such call."""
        if not self._description:
            self._description = self._describe()
        return self._description

    def _describe(self) -> bytes:
        shape = self.shape or ()
        return _DESCRIPTION.pack(
            self.kind,
            -1 if self.operation is None else self.operation,
            -1 if self.dtype is None else _DTYPE_CODES[self.dtype],
            self.root,
            self.counts_hash,
            self.out_rows,
            -1 if self.shape is None else len(shape),
            *shape,
            *_PADDING[len(shape)],
        )

    @classmethod
    def decode(cls, data: bytes | bytearray | mmap, start: int = 0) -> Call:
        """The call that `encode` wrote."""
        sequence, kind, operation, dtype, root, counts_hash, out_rows, ndim, *dims = (
            _FIELDS.unpack_from(data, start)
        )
        return cls(
            sequence,
            Kind(kind),
            None if operation < 0 else ReductionOperation(operation),
            None if dtype < 0 else DTYPES[dtype],
            None if ndim < 0 else tuple(dims[:ndim]),
            root,
            counts_hash,
            out_rows,
        )


def check_calls(calls: Sequence[Call]) -> None:
    """Refuse calls, one per rank in rank order, that do not belong together.

    Raises
    ------
    PeerError
        Where a rank has left.
    CollectiveMismatchError
        Where kinds differ, or what the collective says must match does. The message lists each
        rank's call.
    ValueError
        Where the rows of an ``out`` of all_gather are not the sum of the ranks' rows.
    """
    first = calls[0]
    for rank, call in enumerate(calls):
        if call.kind is Kind.LEAVE and any(c.kind is not Kind.LEAVE for c in calls):
            waiting = next(c for c in calls if c.kind is not Kind.LEAVE)
            raise PeerError(
                f"rank {rank} left after collective {call.sequence - 1}, while others wait for it "
                f"in collective {waiting.sequence}, {waiting}. A collective is called by every "
                "rank: look for a loop or a branch that ends earlier on that rank",
                rank,
            )
    what = _difference(calls)
    if what:
        lines = "\n".join(
            f"  rank {rank}: collective {call.sequence}, {call}"
            + (f" at {call.site}" if call.filename else "")
            for rank, call in enumerate(calls)
        )
        raise CollectiveMismatchError(
            f"the ranks' collectives do not match in {what}; no data was mixed:\n{lines}"
        )
    if first.kind is Kind.ALL_GATHER:
        rows = [call.shape[0] for call in calls if call.shape]
        for rank, call in enumerate(calls):
            if call.out_rows not in (-1, sum(rows)):
                raise ValueError(
                    f"all_gather: out on rank {rank} has {call.out_rows} rows; the ranks send "
                    f"{rows}, {sum(rows)} in all"
                )


def _difference(calls: Sequence[Call]) -> str:
    """The first thing that differs and must not, or an empty string."""
    first = calls[0]
    if any(c.kind is not first.kind or c.sequence != first.sequence for c in calls):
        return "kind or order"
    kind = first.kind
    if kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALLOCATE_SHARED):
        if any(c.operation is not first.operation for c in calls):
            return "operation"
        if any(c.shape != first.shape for c in calls):
            return "shape"
        if any(c.counts_hash != first.counts_hash for c in calls):
            return "counts"
    has_dtype = kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.GATHER,
                         Kind.ALL_TO_ALL, Kind.ALLOCATE_SHARED)  # fmt: skip
    if has_dtype and any(c.dtype != first.dtype for c in calls):
        return "dtype"
    if kind in (Kind.ALL_GATHER, Kind.GATHER) and any(
        (c.shape or ())[1:] != (first.shape or ())[1:] for c in calls
    ):
        return "trailing dims"
    if any(c.root != first.root for c in calls):
        return "root"
    if kind is Kind.BROADCAST:
        sent = calls[first.root]
        if any(c.shape is not None and (c.shape, c.dtype) != (sent.shape, sent.dtype)
               for c in calls):  # fmt: skip
            return "shape or dtype of the arrays that receive"
    return ""


class CallLog:
    """The last collectives of one rank, newest last, with the lines that called them."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque(maxlen=settings.CALL_LOG_LENGTH)
        self._places: dict[tuple[int, int], tuple[CodeType, str, int]] = {}

    def __iter__(self) -> Iterator[Call]:
        return iter(tuple(self._calls))

    def __len__(self) -> int:
        return len(self._calls)

    def record(self, call: Call, frame: FrameType | None) -> None:
        """Append ``call``, placed at the nearest frame of the user's code."""
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_OF_USERS):
            frame = frame.f_back
        if frame is not None:
            # To count lines takes long; the code is kept, so that its id stays its own.
            code = frame.f_code
            key = id(code), frame.f_lasti
            place = self._places.get(key)
            if place is None:
                if len(self._places) == _PLACES_KEPT:
                    self._places.clear()
                place = self._places[key] = code, code.co_filename, frame.f_lineno
            _, call.filename, call.line = place
        self._calls.append(call)

    def tail(self, count: int = 3) -> str:
        """The last ``count`` calls, one a line."""
        calls = list(self._calls)[-count:]
        return "\n".join(f"    {c.sequence}: {c} at {c.site}" for c in calls) or "    none"
