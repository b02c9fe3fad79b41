"""What a rank asks of the others, in a form that can be compared before data is mixed."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from mmap import mmap
from typing import Any

import ml_dtypes
import numpy as np

from mpishard import settings
from mpishard.arrays import Array
from mpishard.communication.contract.reduction import ReductionOperation

__all__ = [
    "DTYPES",
    "HEADER_BYTES",
    "Call",
    "Kind",
]

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
_OF_PATHS = "surrogateescape"  # bytes of a script's path that the locale cannot decode
HEADER_BYTES = _HEADER.size
"""Number of bytes that describe a call on the wire."""


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
    number: int = field(default=0, compare=False)
    """Its number among all collectives of its rank, from 1; 0 where nobody wrote it down."""
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
    def place(self) -> str:
        """`site`, and the function of this package that was called there, if one was."""
        return f"{self.site} in {self.method}" if self.method else self.site

    @property
    def nbytes(self) -> int:
        """Bytes of the array that was passed."""
        if self.shape is None or self.dtype is None:
            return 0
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def array_text(self) -> str:
        """Dtype and shape of the array that was passed; ``nothing`` where none was."""
        return "nothing" if self.dtype is None else f"{self.dtype.name}{list(self.shape or ())}"

    def __str__(self) -> str:
        words = []
        if self.operation is not None:
            words.append(self.operation.name)
        if self.dtype is not None:
            words.append(self.array_text)
        if self.root >= 0:
            words.append(f"root={self.root}")
        return f"{self.kind.label}({', '.join(words)})"

    def again(self, sequence: int) -> Call:
        """The same call, made another time."""
        return Call(  # all by position, which takes half as long as by name
            sequence, self.kind, self.operation, self.dtype, self.shape, self.root,
            self.counts_hash, self.out_rows, "", 0, "", 0, self.description,
        )  # fmt: skip

    def encode(self, out: bytearray | mmap, start: int = 0) -> None:
        """Write the call into ``out`` as `HEADER_BYTES` bytes, from ``start`` on."""
        _HEADER.pack_into(out, start, self.sequence, self.description)

    def to_bytes(self) -> bytes:
        """The call and where it was made, for whoever sends it as a message of its own."""
        packed = bytearray(HEADER_BYTES)
        self.encode(packed)
        place = f"{self.line}\n{self.method}\n{self.filename}"
        return bytes(packed) + place.encode(errors=_OF_PATHS)

    @classmethod
    def from_bytes(cls, data: bytes) -> Call:
        """The call that `to_bytes` wrote."""
        call = cls.decode(data)
        place = data[HEADER_BYTES:].decode(errors=_OF_PATHS)
        line, call.method, call.filename = place.split("\n", 2)
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
