"""What a rank asks of the others, in a form that can be compared before data is mixed."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from mmap import mmap
from typing import Any

import ml_dtypes
import numpy as np

from mpishard import settings
from mpishard.arrays import Array
from mpishard.communication.naming import of_group, who
from mpishard.communication.reduction import ReductionOperation
from mpishard.errors import CollectiveMismatchError, PeerError

__all__ = [
    "DTYPES",
    "HEADER_BYTES",
    "Call",
    "Kind",
    "advice_on_leaving",
    "check_calls",
    "differing_calls",
    "differing_methods",
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
HEADER_BYTES = _HEADER.size
"""Number of bytes that describe a call on the wire."""

_ONE_EACH = 8
"""Up to so many ranks have a line each in what `check_calls` says."""
_MOST_LINES = 40


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


def check_calls(
    calls: Sequence[Call],
    ranks: Sequence[int] | None = None,
    group: str = "",
    parting: Callable[[int], str] = lambda sequence: "",
) -> None:
    """Refuse calls, one per rank in rank order, that do not belong together.

    Parameters
    ----------
    calls : sequence of Call
        What each rank of one world calls.
    ranks : sequence of int, optional
        What messages call these ranks: their numbers in the root world. Default: 0, 1, ..
    group : str
        What messages call this world, where it was split off another.
    parting : callable
        What is known of where the ranks went different ways, up to the collective of this number.

    Raises
    ------
    PeerError
        Where a rank has left.
    CollectiveMismatchError
        Where kinds differ, or what the collective says must match does. The message names the odd
        ones out, where most ranks agree, and lists each rank's call.
    ValueError
        Where the rows of an ``out`` of all_gather are not the sum of the ranks' rows.
    """
    numbers = range(len(calls)) if ranks is None else ranks
    first = calls[0]
    if all(c is first or _is_alike(c, first) for c in calls) and first.out_rows < 0:
        return
    by_rank = dict(zip(numbers, calls, strict=True))
    for rank, call in by_rank.items():
        if call.kind is Kind.LEAVE and any(c.kind is not Kind.LEAVE for c in calls):
            waiting = next(c for c in calls if c.kind is not Kind.LEAVE)
            raise PeerError(
                f"rank {rank} left after collective {call.sequence - 1}{of_group(group)}, while "
                f"others wait for it in collective {waiting.sequence}, {waiting}. "
                f"{advice_on_leaving(waiting, rank)}",
                rank,
            )
    what = _difference(calls)[0]
    if what:
        sentences = [parting(first.sequence), differing_calls(by_rank)]
        if what == "kind or order" and not sentences[0]:
            sentences[0] = differing_methods(by_rank)
        more = "".join(f". {text[0].upper()}{text[1:]}" for text in sentences if text)
        raise CollectiveMismatchError(
            f"the ranks' collectives{of_group(group)} do not match in {what}; no data was mixed"
            f"{more}:\n{_listed(by_rank)}"
        )
    if first.kind is Kind.ALL_GATHER:
        rows = [call.shape[0] for call in calls if call.shape]
        for rank, call in by_rank.items():
            if call.out_rows not in (-1, sum(rows)):
                raise ValueError(
                    f"all_gather{of_group(group)}: out on rank {rank} has {call.out_rows} rows; "
                    f"the ranks send {rows}, {sum(rows)} in all"
                )


def _is_alike(call: Call, other: Call) -> bool:
    """Whether two ranks' calls are the same in all that travels."""
    return (
        call.kind is other.kind
        and call.sequence == other.sequence
        and call.shape == other.shape
        and call.dtype == other.dtype
        and call.operation is other.operation
        and call.root == other.root
        and call.counts_hash == other.counts_hash
        and call.out_rows == other.out_rows
    )


def advice_on_leaving(waiting: Call, rank: int) -> str:
    """What to look for where ``rank`` left and others wait for it in ``waiting``."""
    if waiting.method:
        return (
            f"{waiting.method} is collective: look for a loop or a branch in which rank {rank} "
            "calls it less often"
        )
    return (
        "A collective is called by every rank: look for a loop or a branch that ends earlier on "
        f"rank {rank}"
    )


def differing_methods(calls: Mapping[int, Call], seen: Counter[str] | None = None) -> str:
    """Which functions of this package ranks called for the same collective, where they differ.

    Parameters
    ----------
    calls : mapping of int to Call
        By world rank.
    seen : Counter of str, optional
        How often each function was called before: of two that equally many ranks called, the
        rarer one is the odd one.

    Returns
    -------
    str
        A sentence without its end, or nothing. What fewest ranks called comes first.
    """
    by_method: dict[str, list[int]] = {}
    for rank, call in calls.items():
        by_method.setdefault(call.method, []).append(rank)
    if len(by_method) < 2:
        return ""
    before = seen or Counter()
    rarest = min(filter(None, by_method), key=lambda m: (len(by_method[m]), before[m]))
    others = [
        f"{who(ranks)} called {method or f'{calls[ranks[0]].kind.label} itself'} "
        f"at {calls[ranks[0]].site}"
        for method, ranks in by_method.items()
        if method != rarest
    ]
    ranks = by_method[rarest]
    return (
        f"{rarest} is collective: {who(ranks)} called it at {calls[ranks[0]].site}, "
        + ", ".join(others)
    )


def differing_calls(calls: Mapping[int, Call]) -> str:
    """Whose call is not as most ranks' are; empty where they match, or no majority agrees."""
    what, values = _difference(list(calls.values()))
    if not what:
        return ""
    most, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return ""
    odd = {rank: v for rank, v in zip(calls, values, strict=True) if v != most}
    given = ", ".join(dict.fromkeys(odd.values()))
    rest = [rank for rank in calls if rank not in odd]
    is_odd = "is the odd one out" if len(odd) == 1 else "are the odd ones out"
    if what == "counts":  # of which only a number is known
        return f"{who(list(odd))} {is_odd}"
    return f"{who(list(odd))} {is_odd}: {given}, where {who(rest)} gave {most}"


def _listed(calls: Mapping[int, Call]) -> str:
    """A line for each rank; for many, one for those that do the same."""
    alike: dict[tuple[str, int], list[int]] = {}
    for rank, call in calls.items():
        text = f"collective {call.sequence}, {call}"
        text += f" at {call.place}" if call.filename else ""
        alike.setdefault((text, rank if len(calls) <= _ONE_EACH else -1), []).append(rank)
    lines = [f"  {who(ranks)}: {text}" for (text, _), ranks in alike.items()]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"  and {len(lines) - _MOST_LINES} more"]
    return "\n".join(lines)


def _difference(calls: Sequence[Call]) -> tuple[str, list[str]]:
    """The first thing that differs and must not, or an empty string; and what each rank has."""
    first = calls[0]
    if any(c.kind is not first.kind or c.sequence != first.sequence for c in calls):
        return "kind or order", [f"collective {c.sequence}, {c.kind.label}" for c in calls]
    for what, values in _compared(first.kind, calls):
        if len(set(values)) > 1:
            return what, [str(value) for value in values]
    return "", []


_OF_ONE_DTYPE = (
    Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.GATHER, Kind.ALL_TO_ALL,
    Kind.ALLOCATE_SHARED,
)  # fmt: skip


def _compared(kind: Kind, calls: Sequence[Call]) -> Iterator[tuple[str, list[Hashable]]]:
    """What must be the same on all ranks, and what each has."""
    if kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALLOCATE_SHARED):
        yield "operation", [c.operation and c.operation.name for c in calls]
        yield "shape", [c.shape for c in calls]
        yield "counts", [c.counts_hash for c in calls]
    if kind in _OF_ONE_DTYPE:
        yield "dtype", [c.dtype and c.dtype.name for c in calls]
    if kind in (Kind.ALL_GATHER, Kind.GATHER):
        yield "trailing dims", [(c.shape or ())[1:] for c in calls]
    yield "root", [c.root for c in calls]
    if kind is Kind.BROADCAST:
        sent = calls[calls[0].root]
        yield (
            "shape or dtype of the arrays that receive",
            [(sent if c.shape is None else c).array_text for c in calls],
        )
