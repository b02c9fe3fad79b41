"""A rank's call of a collective, in a form that ranks compare before data is mixed; its bytes.

The functions below refuse wrong arguments before anything is sent. Each rank checks its own
arguments alone, and raises alone. `mpishard.communication.contract.matching` finds differences
between ranks.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

import ml_dtypes
import numpy as np

from mpishard.base import (
    Array,
    CommunicationError,
    DType,
    array_namespace,
    as_flag,
    as_index,
    as_integer,
    even_sizes,
    settings,
)
from mpishard.communication.contract.reduction import ReductionOperation, accumulation_dtype

if TYPE_CHECKING:
    from mpishard.communication.contract.arena import Nodes

DTYPES: tuple[DType, ...] = tuple(
    np.dtype(t)
    for t in (
        np.bool_,
        np.int8,
        np.int16,
        np.int32,
        np.int64,
        np.uint8,
        np.uint16,
        np.uint32,
        np.uint64,
        np.float16,
        ml_dtypes.bfloat16,
        np.float32,
        np.float64,
        np.complex64,
        np.complex128,
    )
)
"""The dtypes that can be sent. A header has the index of the dtype in this tuple."""

# A dict: a search through the tuple would compare dtypes one by one in each call.
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_DIMS = settings.MAXIMUM_DIMS
# Kind, operation, dtype, number of dims, root, hash of counts, rows of out, subject, number of an
# arena and start of a part of it, and the dims.
# It is short because each cache line of a header that another core reads takes 0.1 us. It follows
# the sequence number so that the dims, and the data after them, are aligned to 8 bytes.
_DESCRIPTION = "bbbbiiqiqq"
_DESCRIPTIONS = [struct.Struct(f"={_DESCRIPTION}{n}q{8 * (_DIMS - n)}x") for n in range(_DIMS + 1)]
_FIELDS = struct.Struct(f"=q{_DESCRIPTION}{_DIMS}q")
_OF_PATHS = "surrogateescape"  # keeps the bytes of a script's path that the locale cannot decode
HEADER_BYTES = _FIELDS.size
"""Number of bytes that describe a call on the wire."""

GROUP_BYTES = 64
"""Bytes of a group's label that a status page keeps."""


# The numbers travel in headers and stand in status pages: add at the end, and change none.
class CollectiveKind(IntEnum):
    """The collectives."""

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
    REDUCE_INTO = 11
    REDUCE_IN_PLACE = 12
    GATHER_IN_PLACE = 13

    @property
    def label(self) -> str:
        """The method's name."""
        return self.name.lower()


# Without slots: fields that are set later stay class attributes until then, which saves time.
@dataclass
class Call:
    """One rank's call of one collective.

    ``sequence`` is the number of the call on its backend, from 1. ``dtype`` and ``shape`` are
    None if the rank passed no array; ``counts_hash`` and ``out_rows`` are -1 if not given.
    """

    sequence: int
    kind: CollectiveKind
    operation: ReductionOperation | None
    dtype: DType | None
    shape: tuple[int, ...] | None
    root: int
    counts_hash: int
    out_rows: int
    subject: int
    """The model, and the unit of it, whose data it combines: see `Subjects`; 0 if not given."""
    arena: int
    """The number of the `Arena` that it belongs to; 0 if it belongs to none."""
    start: int
    """The element of the arena's vectors at which the part begins that it reads or writes."""
    description: bytes = field(compare=False, repr=False)
    """The fields that ranks compare, except the sequence number, as bytes."""
    # Kept although they follow from shape and dtype: each collective asks for them several times.
    size: int = field(compare=False, repr=False)
    """Number of elements of the array that was passed."""
    nbytes: int = field(compare=False, repr=False)
    """Number of bytes of that array."""
    # Never changed: who counts anew replaces the mapping, as `Traffic` does.
    sends: Mapping[str, int] = field(compare=False, repr=False)
    """Bytes that this rank sends to others for the call, by the name in `Traffic`."""
    filename: str = field(default="", init=False)
    line: int = field(default=0, init=False)
    method: str = field(default="", init=False)
    """The function of this package that the user called, such as ``FSDPModel.predict``."""
    group: str = field(default="", init=False)
    """The label of the world on which it was called; empty for a root world."""
    number: int = field(default=0, init=False, compare=False)
    """Its number among all collectives of its rank, from 1; 0 if none was given."""
    time: float = field(default=0.0, init=False, compare=False)
    """Time at which it was written to the rank's status page, in seconds since the epoch."""

    @classmethod
    def describe(
        cls,
        kind: CollectiveKind,
        array: Array | None,
        *,
        operation: ReductionOperation | None = None,
        root: int = -1,
        counts: tuple[int, ...] | None = None,
        out_rows: int = -1,
        subject: int = 0,
        arena: int = 0,
        start: int = 0,
        sends: Mapping[str, int] = {},
        sequence: int = 0,
    ) -> Call:
        """Return the call of ``kind`` with ``array``, without its number and world."""
        dtype, shape, size, nbytes, code, dims, ndim = None, None, 0, 0, -1, (), -1
        if array is not None:
            dtype, size, nbytes = array.dtype, array.size, array.nbytes
            shape = dims = array.shape
            code, ndim = _DTYPE_CODES[dtype], len(dims)
        # Python's hash of integers is the same in every process; 31 bits of it fit the header.
        counts_hash = -1 if counts is None else hash(counts) & 0x7FFFFFFF
        description = _DESCRIPTIONS[len(dims)].pack(
            kind,
            -1 if operation is None else operation,
            code,
            ndim,
            root,
            counts_hash,
            out_rows,
            subject,
            arena,
            start,
            *dims,
        )
        return cls(
            sequence,
            kind,
            operation,
            dtype,
            shape,
            root,
            counts_hash,
            out_rows,
            subject,
            arena,
            start,
            description,
            size,
            nbytes,
            sends,
        )

    @property
    def site(self) -> str:
        """``file:line`` in the user's code, if it is known."""
        return f"{self.filename}:{self.line}" if self.filename else "an unknown place"

    @property
    def place(self) -> str:
        """`site`, and the function of this package that was called there, if any."""
        return f"{self.site} in {self.method}" if self.method else self.site

    @property
    def text(self) -> str:
        """The call, its world and its place."""
        return f"{self}{of_group(self.group)} at {self.place}"

    @property
    def full_text(self) -> str:
        """`text`, after the number of the call on its world."""
        return f"collective {self.sequence}, {self},{of_group(self.group)} at {self.place}"

    @property
    def name(self) -> str:
        """The call and its world, for errors of a rank that waits in it."""
        of = of_group(self.group)
        return f"collective {self.sequence}, {self},{of and of + ','}"

    @property
    def where(self) -> str:
        """The place of a rank that waits in the call, to stand after "rank 1 waits"."""
        return f"in {self.name} called at {self.place}"

    @property
    def array_text(self) -> str:
        """Dtype and shape of the array that was passed; ``nothing`` if none was."""
        return "nothing" if self.dtype is None else f"{self.dtype.name}{list(self.shape or ())}"

    def __str__(self) -> str:
        words = []
        if self.operation is not None:
            words.append(self.operation.name)
        if self.dtype is not None:
            words.append(self.array_text)
        if self.root >= 0:
            words.append(f"root={self.root}")
        if self.arena:
            words.append(f"arena={self.arena}, start={self.start}")
        return f"{self.kind.label}({', '.join(words)})"

    def to_bytes(self) -> bytes:
        """Return the call and its line as bytes, for a backend that sends them in one message."""
        # The path is last, because it alone may contain a line break.
        place = f"{self.line}\n{self.method}\n{self.filename}"
        header = self.sequence.to_bytes(8, sys.byteorder) + self.description
        return header + place.encode(errors=_OF_PATHS)

    @classmethod
    def from_bytes(cls, data: bytes) -> Call:
        """Return the call that `to_bytes` wrote."""
        call = cls.decode(data)
        place = data[HEADER_BYTES:].decode(errors=_OF_PATHS)
        line, call.method, call.filename = place.split("\n", 2)
        call.line = int(line)
        return call

    @classmethod
    def decode(cls, data: bytes) -> Call:
        """Return the call from the first `HEADER_BYTES` bytes: sequence number, description."""
        sequence, kind, operation, dtype, ndim, root, counts_hash, out_rows, *more = (
            _FIELDS.unpack_from(data)
        )
        subject, arena, start, *dims = more
        shape = None if ndim < 0 else tuple(dims[:ndim])
        known = None if dtype < 0 else DTYPES[dtype]
        size = 0 if known is None else math.prod(shape or ())
        reduction = None if operation < 0 else ReductionOperation(operation)
        nbytes = 0 if known is None else size * known.itemsize
        return cls(
            sequence,
            CollectiveKind(kind),
            reduction,
            known,
            shape,
            root,
            counts_hash,
            out_rows,
            subject,
            arena,
            start,
            data[8:HEADER_BYTES],
            size,
            nbytes,
            {},
        )


@dataclass(frozen=True, slots=True)
class MessageWait:
    """The wait of a rank for a message, or for another rank to take one.

    ``peer`` is the other rank, by its number in the root world. ``group`` is the label of the world
    of the message.
    """

    peer: int
    tag: int
    is_send: bool
    group: str
    sends: ClassVar[Mapping[str, int]] = {}
    """Empty, unlike `Call.sends`: the bytes of a message are counted when it is sent."""

    @property
    def name(self) -> str:
        """The message and its world, for errors: see `Call.name`."""
        way = "send to" if self.is_send else "receive from"
        inside = f" in {self.group}," if self.group else ""
        return f"{way} rank {self.peer}, tag {self.tag},{inside}"

    @property
    def where(self) -> str:
        """The place of a rank that waits for it: see `Call.where`."""
        message = f"a message with tag {self.tag}"
        receive, send = f"{message} from rank {self.peer}", f"rank {self.peer} to take {message}"
        return f"for {send if self.is_send else receive}" + (f" in {self.group}" * bool(self.group))


def of_group(label: str) -> str:
    """Return the group of a collective, to stand after its name; empty for a root world."""
    return f" of {label}" if label else ""


def place_after(last: Call | None, word: str = "after") -> str:
    """Return the place of a rank that is in no collective: ``word`` its ``last`` one."""
    return "before any collective" if last is None else f"{word} {last.full_text}"


class Traffic:
    """Counts of the bytes that one rank sent to others, by collective.

    A collective is counted by its definition, whatever messages a backend sends for it, so that
    backends can be compared. Each call is counted once, when it is done (`Call.sends`). An
    all_reduce counts as a reduce_scatter and an all_gather. Headers, and the piece that a rank
    keeps for itself, are not counted. A broadcast counts on the root: (world size - 1) times the
    bytes of the array.
    """

    def __init__(self) -> None:
        # Each call adds to these, which takes a Counter four times as long.
        self.bytes_sent: defaultdict[str, int] = defaultdict(int)
        self.bytes_read: defaultdict[str, int] = defaultdict(int)
        self.calls: defaultdict[str, int] = defaultdict(int)

    def __repr__(self) -> str:
        sent = ", ".join(
            f"{kind} {self.calls[kind]:,} x, {nbytes:,} B"
            for kind, nbytes in self.bytes_sent.items()
        )
        return f"{type(self).__name__}({sent or 'nothing sent'})"

    @property
    def total_bytes(self) -> int:
        """Bytes sent to other ranks since the last `reset`."""
        return sum(self.bytes_sent.values())

    def reset(self) -> None:
        """Set all counts to zero."""
        self.bytes_sent.clear()
        self.bytes_read.clear()
        self.calls.clear()

    def add(self, sends: Mapping[str, int]) -> None:
        """Add one call of each kind in ``sends``, with the bytes that it sent to other ranks."""
        calls, bytes_sent = self.calls, self.bytes_sent
        for kind, nbytes in sends.items():
            calls[kind] += 1
            bytes_sent[kind] += nbytes

    def count_read(self, kind: str, nbytes: int) -> None:
        """Add ``nbytes`` that a call of ``kind`` read from memory of other ranks."""
        self.bytes_read[kind] += nbytes

    def share_reduce(self, call: Call, nodes: Nodes, sizes: Sequence[int], dtype: DType) -> None:
        """Count ``call`` as a reduction of arrays that each node's ranks share.

        ``sizes`` are the elements of the ranks' pieces. ``nodes`` is
        `CommunicationBackend.topology`.
        """
        if nodes.count == len(nodes.numbers):
            return  # nothing is shared: it sends as it was counted
        sent = 0
        if nodes.clients:
            sums = len(nodes.subtrees(nodes.own))
            sent = sum(sizes[rank] for rank in nodes.clients) * sums
        # Partial sums of 16-bit data travel in float32, so they count with 4 bytes.
        sent *= accumulation_dtype(dtype).itemsize
        call.sends = {**call.sends, "reduce_scatter": sent}
        read = (len(nodes.peers) - 1) * sizes[nodes.rank] * dtype.itemsize
        self.count_read("reduce_scatter", read)

    def share_gather(self, call: Call, nodes: Nodes, sizes: Sequence[int], dtype: DType) -> None:
        """Count ``call`` as a gather of pieces of ``sizes`` elements, once to each of ``nodes``."""
        sent = sizes[nodes.rank] * (nodes.count - 1) * dtype.itemsize
        call.sends = {**call.sends, "all_gather": sent}


@functools.lru_cache(maxsize=4096)  # each training step uses the same sizes
def sent_by_all_reduce(size: int, itemsize: int, world_size: int, rank: int) -> Mapping[str, int]:
    """Return the bytes that ``rank`` sends for an all_reduce of ``size`` elements."""
    # As a reduce_scatter and an all_gather of even pieces, whatever the backend sends.
    own = even_sizes(size, world_size)[rank]
    gathered = own * itemsize * (world_size - 1)
    return {"reduce_scatter": (size - own) * itemsize, "all_gather": gathered}


def check_dtype(dtype: DType, refusal: str) -> None:
    """Refuse a dtype that cannot be sent, with a `ValueError` that begins with ``refusal``."""
    if dtype in _DTYPE_CODES:
        return
    fix = f"; known are {', '.join(known.name for known in DTYPES)}"
    # Its name is that of the dtype of this machine's byte order.
    if not dtype.isnative and dtype.newbyteorder("=") in _DTYPE_CODES:
        fix = f" in another byte order; .astype({dtype.name!r}) converts it"
    raise ValueError(f"{refusal} dtype {dtype.name}{fix}")


def check_array(
    array: Array | None, name: str, *, needs_dim: bool = False, is_written: bool = False
) -> None:
    """Refuse an array that cannot be sent or, with ``needs_dim``, cannot be cut along dim 0.

    With ``is_written`` also refuse a read-only array, into which no result can be written.

    Raises
    ------
    TypeError
        For an argument that is no array.
    ValueError
        For an array of another dtype, of too many dims, not C-contiguous, or read-only.
    """
    if array is None:
        raise TypeError(f"{name} needs an array, got None")
    kind: type = type(array)
    if kind is not np.ndarray:
        array_namespace(array)
        if issubclass(kind, np.generic):  # has no memory that can be written, such as x.sum()
            raise TypeError(
                f"{name} needs an array, got {array!r}, a NumPy scalar; pass numpy.array([value])"
            )
    if array.dtype not in _DTYPE_CODES:
        check_dtype(array.dtype, f"{name} cannot send")
    flags = array.flags
    # Refused and not copied: a result written to the copy would be lost without a word.
    if not flags.c_contiguous:
        raise ValueError(
            f"{name} needs a C-contiguous array, got shape {array.shape} with strides "
            f"{array.strides}; pass a copy (numpy.ascontiguousarray)"
        )
    if needs_dim and array.ndim == 0:
        raise ValueError(f"{name} splits along dim 0, and a 0-dim array has none")
    if array.ndim > settings.MAXIMUM_DIMS:
        raise ValueError(
            f"{name} takes arrays of up to {settings.MAXIMUM_DIMS} dims, got {array.ndim}"
        )
    # CuPy has no read-only arrays.
    if is_written and not getattr(flags, "writeable", True):
        raise ValueError(
            f"{name} writes its result into a read-only array of shape {array.shape} and "
            f"dtype {array.dtype.name}; pass a copy, or a writeable out"
        )


def check_out(out: Array, shape: tuple[int, ...], dtype: DType, name: str) -> None:
    """Refuse an ``out`` for a result of this ``shape`` and ``dtype``; errors as `check_array`."""
    check_array(out, name, is_written=True)
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(
            f"{name}: out has shape {out.shape} and dtype {out.dtype.name}, expected "
            f"{shape} and {dtype.name}"
        )


def check_peer(rank: int, tag: int, own_rank: int, world_size: int) -> None:
    """Refuse a peer that is not another rank, and a wrong tag.

    Raises
    ------
    TypeError
        For a rank or tag that is no integer.
    ValueError
        For another number.
    """
    if as_index("rank", rank, world_size) == own_rank:
        raise ValueError(f"rank {rank} cannot send to or receive from itself")
    if not 0 <= as_integer("tag", tag) <= settings.MAXIMUM_TAG:
        raise ValueError(f"tag must be in [0, {settings.MAXIMUM_TAG}], got {tag}")


def piece_sizes(
    rows: int, counts: Sequence[int] | None, world_size: int, name: str, *, strict: bool
) -> tuple[int, ...]:
    """Return the rows of each rank's piece: ``counts``, or those of `ShardLayout` without them.

    Raises
    ------
    TypeError
        If ``counts`` are no integers, or ``strict`` is not a bool.
    ValueError
        If ``counts`` has not one count for each rank, or they do not add up to ``rows``; if
        ``strict``, also for a remainder.
    """
    # Each step of training comes here, nearly always with False.
    if strict is not False and as_flag("strict", strict) and rows % world_size:
        raise ValueError(
            f"{name}: {rows} rows over {world_size} ranks leave "
            f"{rows % world_size}; strict=True allows no remainder"
        )
    if counts is None:
        return even_sizes(rows, world_size)
    if not isinstance(counts, Iterable):
        raise TypeError(f"{name}: counts must be a sequence of integers, got {counts!r}")
    pieces = tuple(as_integer(f"{name}: a count", count) for count in counts)
    if len(pieces) != world_size or min(pieces) < 0 or sum(pieces) != rows:
        raise ValueError(
            f"{name}: counts {pieces} must be {world_size} numbers, none negative, "
            f"that add up to {rows}; they add up to {sum(pieces)}"
        )
    return pieces


def refuse_other_message(
    size: int,
    dtype: DType,
    expected_size: int,
    expected_dtype: DType | None,
    source: int,
    tag: int,
) -> None:
    """Refuse a message of another size or dtype than expected.

    ``source`` is the sender by its number in the root world, for the error.

    Raises
    ------
    CommunicationError
        Naming the received and the expected size, and the dtypes if one is expected.
    """
    if size != expected_size or expected_dtype not in (None, dtype):
        of, expected_of = "", ""
        if expected_dtype is not None:
            of, expected_of = f" of {dtype.name}", f" of {expected_dtype.name}"
        raise CommunicationError(
            f"the next message with tag {tag} from rank {source} has {size} elements{of}, "
            f"{expected_size}{expected_of} were expected; it stays queued"
        )
