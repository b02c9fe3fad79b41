"""What a save writes: pieces in host memory, laid out in one file for each rank."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.arrays import address, to_host
from mpishard.checkpoint.format.manifest import (
    FileRecord,
    KindRecord,
    Manifest,
    PieceRecord,
    file_name,
    tensor_key,
)
from mpishard.checkpoint.format.protocol import Pieces
from mpishard.checkpoint.format.streaming import StreamingCopy, streaming_copy
from mpishard.checkpoint.format.tensor_file import Tensor, TensorFile
from mpishard.errors import CheckpointError
from mpishard.sharding.regions import Region
from mpishard.sharding.table import ParameterEntry

__all__ = ["Content", "RankFile", "StagingBuffer", "assemble", "on_host", "staged_bytes"]

_ALIGNMENT = 64  # bytes

HostPieces = dict[str, list[tuple[Region, np.ndarray[Any, Any]]]]


@dataclass(frozen=True, slots=True)
class Content:
    """What a checkpoint is made of.

    Parameters
    ----------
    parameters : sequence of ParameterEntry
        The parameters along the flat vector. Rank 0's counts.
    dtype : dtype
        Of the parameters.
    arrays : mapping of str to sequence of (Region, Array)
        Kind -> this rank's pieces, as `CheckpointState.arrays_to_write` says.
    metadata : mapping
        What JSON can hold, NumPy scalars too. Rank 0's counts.
    """

    parameters: Sequence[ParameterEntry]
    dtype: np.dtype[Any]
    arrays: Pieces
    metadata: Mapping[str, Any]


class StagingBuffer:
    """Host memory that a save copies into, so that training goes on while it is written.

    It grows to what a save needs and is kept for the next. The first save waits while the system
    gives the memory, unless it was reserved before; what was reserved is also copied into faster,
    where numba is.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._copy: StreamingCopy | None = None
        self._is_lent = False

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return int(self._memory.nbytes)

    def reserve(self, nbytes: int) -> None:
        """Take memory for copies of ``nbytes`` bytes, where there is less, and make them fast.

        Raises
        ------
        ValueError
            Where a save is still being written from it.
        OSError
            Where the system has no such memory.
        """
        self._grow(nbytes)
        self._copy = streaming_copy()  # it may have to be compiled

    def copies(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """Copies of 1-D arrays, valid until they are given back.

        Raises
        ------
        ValueError
            Where a save is still being written from it.
        """
        self._require_own()
        runs = _runs(arrays)
        starts = [0, *accumulate(_aligned(sum(a.nbytes for a in run)) for run in runs)]
        self._grow(starts.pop())
        self._is_lent = True
        copied = []
        for run, start in zip(runs, starts, strict=True):
            whole = _end_to_end(run)
            copy = self._memory[start : start + whole.nbytes].view(whole.dtype)
            if self._copy is None:
                copy[...] = whole
            else:
                self._copy(whole, copy)
            copied += np.split(copy, list(accumulate(array.size for array in run[:-1])))
        return copied

    def give_back(self) -> None:
        """Hear that nothing reads the copies any more."""
        self._is_lent = False

    def _grow(self, nbytes: int) -> None:
        if self._memory.size < nbytes:
            self._require_own()
            self._memory = np.empty(0, np.uint8)  # not both at a time
            self._memory = _touched_memory(nbytes)

    def _require_own(self) -> None:
        if self._is_lent:
            raise ValueError(
                "this staging buffer holds a save that is still being written: wait for that one, "
                "or give this one a buffer of its own"
            )


def staged_bytes(arrays: Pieces) -> int:
    """Bytes of a staging buffer that holds copies of the pieces, as `on_host` makes them."""
    return sum(
        _aligned(array.nbytes)
        for given in arrays.values()
        for _, array in given
        if isinstance(array, np.ndarray)
    )


def _runs(arrays: Sequence[np.ndarray[Any, Any]]) -> list[list[np.ndarray[Any, Any]]]:
    """``arrays`` in their order, together as far as they lie end to end in memory.

    A vector's pieces do. To copy them at once takes two thirds of the time of one by one.
    """
    runs: list[list[np.ndarray[Any, Any]]] = []
    end: tuple[int, np.dtype[Any]] | None = None
    for array in arrays:
        start = address(array)
        if (start, array.dtype) == end:
            runs[-1].append(array)
        else:
            runs.append([array])
        end = start + array.nbytes, array.dtype
    return runs


def _end_to_end(run: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """One array of all of a run: it ends where the last one does."""
    length = sum(array.size for array in run)
    return np.lib.stride_tricks.as_strided(run[0], (length,), writeable=False)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _touched_memory(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """New memory, whose pages the system has given already, where it can be asked to.

    NumPy would ask for huge pages, page by page as they are written to; to make room for those
    the system moves others about, and the first save would wait for it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags), np.uint8)


def on_host(arrays: Pieces, staging: StagingBuffer | None) -> HostPieces:
    """The pieces in host memory, without the empty ones, and apart from what training changes."""
    pieces: HostPieces = {}
    shared: list[tuple[str, int]] = []
    for kind, given in arrays.items():
        pieces[kind] = []
        for region, array in given:
            if array.shape != (region.length,):
                raise ValueError(
                    f"{kind}: the piece {region} has shape ({region.length},), got {array.shape}"
                )
            if array.size:
                host = np.ascontiguousarray(to_host(array))
                # CuPy's arrays are copied by to_host; NumPy cannot be asked of them.
                if (
                    staging is not None
                    and isinstance(array, np.ndarray)
                    and np.may_share_memory(host, array)
                ):
                    shared.append((kind, len(pieces[kind])))
                pieces[kind].append((region, host))
    if staging is not None:
        copies = staging.copies([pieces[kind][index][1] for kind, index in shared])
        for (kind, index), copy in zip(shared, copies, strict=True):
            pieces[kind][index] = (pieces[kind][index][0], copy)
    return pieces


class RankFile:
    """The file of one rank, and what rank 0 needs to know of it.

    Parameters
    ----------
    rank : int
        Whose it is.
    pieces : mapping of str to sequence of (Region, array)
        What `on_host` gave, or tensors that are not in memory.

    Raises
    ------
    ValueError
        For a region that is given twice.
    CheckpointError
        For a dtype that a file cannot hold.
    """

    def __init__(self, rank: int, pieces: Mapping[str, Sequence[tuple[Region, Tensor]]]) -> None:
        self._rank = rank
        self._pieces = {
            kind: [(region, array.dtype) for region, array in given]
            for kind, given in pieces.items()
        }
        tensors: dict[str, Tensor] = {}
        for kind, given in pieces.items():
            for region, array in given:
                key = tensor_key(kind, region)
                if key in tensors:
                    raise ValueError(f"{kind}: {region} is given twice")
                tensors[key] = array
        self.is_empty = not tensors
        """Whether the rank has nothing to write."""
        # Small ones first, side by side: they are what ranks read of each other's files, and then
        # share the few blocks that each of those ranks must verify.
        ordered = dict(sorted(tensors.items(), key=lambda item: item[1].nbytes))
        self._file = TensorFile(ordered, {"format": "np"})

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return 0 if self.is_empty else self._file.nbytes

    def write(self, directory: Path, check: Callable[[], None] | None = None) -> None:
        """Write it, if there is anything to write; ``check`` as for `TensorFile.write`.

        Raises
        ------
        OSError
            Where it cannot be written.
        """
        if not self.is_empty:
            self._file.write(directory / file_name(self._rank), check)

    def record(self) -> dict[str, Any]:
        """What `assemble` takes, as JSON knows it. Once it is written."""
        offsets = self._file.offsets
        kinds = {
            kind: {
                "dtypes": sorted(dtype.name for dtype in {dtype for _, dtype in given}),
                "pieces": [
                    [offsets[tensor_key(kind, region)], region.name, region.box, region.start,
                     region.stop]
                    for region, _ in given
                ],
            }
            for kind, given in self._pieces.items()
        }  # fmt: skip
        file = None if self.is_empty else [self._file.nbytes, self._file.checksums]
        return {"rank": self._rank, "kinds": kinds, "file": file}


def assemble(
    identity: str, sequence: int, content: Content, records: Iterable[Mapping[str, Any]]
) -> Manifest:
    """The manifest of what the ranks wrote.

    Parameters
    ----------
    identity, sequence
        As those of `Manifest`.
    content : Content
        Rank 0's.
    records : iterable of mapping
        Of each rank, what `RankFile.record` gave.

    Raises
    ------
    CheckpointError
        Where a kind's pieces differ in dtype, and as `Manifest`.
    """
    files: dict[str, FileRecord] = {}
    dtypes: dict[str, set[str]] = {}
    pieces: dict[str, list[PieceRecord]] = {}
    for record in records:
        name = file_name(record["rank"])
        if record["file"] is not None:
            nbytes, checksums = record["file"]
            files[name] = FileRecord(nbytes, tuple(checksums))
        for kind, given in record["kinds"].items():
            dtypes.setdefault(kind, set()).update(given["dtypes"])
            of_kind = pieces.setdefault(kind, [])
            for offset, parameter, box, start, stop in given["pieces"]:
                region = Region(parameter, tuple((low, high) for low, high in box), start, stop)
                of_kind.append(PieceRecord(name, offset, region))
    for kind, names in dtypes.items():
        if len(names) > 1:
            raise CheckpointError(f"{kind}: pieces have the dtypes {sorted(names)}; one is allowed")
    own = np.dtype(content.dtype)
    return Manifest(
        identity=identity,
        sequence=sequence,
        dtype=own,
        parameters=tuple(content.parameters),
        arrays={
            kind: KindRecord.of(np.dtype(next(iter(dtypes[kind] or {own.name}))), given)
            for kind, given in pieces.items()
        },
        files=files,
        metadata=content.metadata,
    )
