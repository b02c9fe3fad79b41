"""Files of named tensors in safetensors format, with a checksum for each block.

A file (https://huggingface.co/docs/safetensors) begins with the length of the header as 8
little-endian bytes. The header follows, JSON padded with spaces, and then the arrays, without gaps.
The library's own writer returns neither offsets nor checksums, and holds Python's lock while it
writes. The files are therefore written here; the library can read them.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from mpishard.base import Array, CheckpointError, Document, DType, check_name
from mpishard.checkpoint.format import disk
from mpishard.sharding import ParameterEntry, Region

BLOCK_BYTES = 4 << 20
"""Bytes of a block of a file. Each block has a checksum, and the last may be shorter."""

TABLE = "table"
"""Key of `table_checksum` in a file's metadata."""

_PART_BYTES = 4 << 20  # Maximum bytes that are given to the system at once.
_ALIGNMENT = 64  # Alignment of the first array in bytes, for memory maps of the arrays.

_DTYPES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip

DTYPES_OF_FILES: dict[str, DType] = {
    code: np.dtype(getattr(ml_dtypes, name, name)) for name, code in _DTYPES.items()
}
"""Dtypes that a checkpoint can have, by their names in the format."""

# The keys are dtypes and not their names, which NumPy makes again each time, in microseconds.
_CODES = {dtype: code for code, dtype in DTYPES_OF_FILES.items()}

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """Tensor that is not in memory.

    Parameters
    ----------
    dtype : dtype
        Dtype of the elements.
    shape : tuple of int
        Shape of the tensor.
    blocks : callable
        ``blocks()`` yields the elements in row-major order, as 1-D contiguous arrays.
    """

    dtype: DType
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[Array]]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return self.size * self.dtype.itemsize


Tensor = Array | LazyTensor
"""Tensor to be written."""


class TensorFile:
    """File of named tensors, whose layout is fixed before anything is written.

    Parameters
    ----------
    tensors : mapping of str to array or LazyTensor
        The tensors. Arrays must be 1-D, contiguous, and in host memory.
    metadata : mapping of str to str
        Metadata for the header.

    Raises
    ------
    CheckpointError
        If the format cannot represent a dtype or a name.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        # Arrays with wide elements come first. Each array is then aligned to its element size.
        self._tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
        header: Document = {"__metadata__": dict(metadata)}
        start = 0
        for key, tensor in self._tensors.items():
            try:
                check_name(key, "tensor")
            except ValueError as error:
                raise CheckpointError(str(error)) from None
            code = _CODES.get(tensor.dtype)
            if code is None:
                raise CheckpointError(
                    f"{key} has dtype {tensor.dtype}, which no safetensors file holds; it holds "
                    f"{', '.join(_DTYPES)}"
                )
            # Offsets count from the end of the header, whose length is not known yet.
            header[key] = {
                "dtype": code,
                "shape": list(tensor.shape),
                "data_offsets": [start, start + tensor.nbytes],
            }
            start += tensor.nbytes
        text = json.dumps(header).encode()
        # The format allows spaces behind the JSON, and they align the first array.
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        self._header = len(text).to_bytes(8, "little") + text
        self.nbytes: int = len(self._header) + start
        """Length of the file."""
        self.checksums: list[int] = []
        """CRC-32 of each block; empty until the file is written."""

    @property
    def offsets(self) -> dict[str, int]:
        """Offset of each array in the file, in bytes."""
        sizes = (tensor.nbytes for tensor in self._tensors.values())
        return dict(zip(self._tensors, accumulate(sizes, initial=len(self._header)), strict=False))

    def write(self, file: Path, check: Callable[[], None] | None = None) -> None:
        """Write the file, sync it to the disk, and set `checksums`.

        ``check`` is called before each part of an array. If it raises, no more is written.

        Raises
        ------
        OSError
            If the file exists already or cannot be written.
        """
        # Parts that wait for their checksum stay in memory. Arrays are there anyway, but the number
        # of waiting blocks of lazy tensors is limited.
        is_lazy = any(isinstance(tensor, LazyTensor) for tensor in self._tensors.values())
        with ChecksumThread(BLOCK_BYTES, 2 if is_lazy else 0) as thread:
            disk.write_file(file, thread.watch(self.parts(check)))
        self.checksums = thread.checksums

    def parts(self, check: Callable[[], None] | None = None) -> Iterator[memoryview]:
        """Yield the content, a few MiB at a time, and call ``check`` before each part."""
        yield memoryview(self._header)
        for tensor in self._tensors.values():
            for block in tensor.blocks() if isinstance(tensor, LazyTensor) else (tensor,):
                content: Bytes = block.view(np.uint8)
                for start in range(0, content.size, _PART_BYTES):
                    if check is not None:
                        check()
                    yield content[start : start + _PART_BYTES].data


class ChecksumThread:
    """Thread that computes the CRC-32 of each block of a stream while it is written to the disk.

    A checksum takes at least as long as the copy of the data to the system, and the processor is
    idle while the disk works. It is a context manager, at whose end `checksums` is complete.

    Parameters
    ----------
    block_bytes : int
        Bytes of a block. The last block may be shorter.
    ahead : int
        Maximum number of parts that wait for their checksum, in memory; 0 for no limit.
    """

    def __init__(self, block_bytes: int, ahead: int = 0) -> None:
        self._block_bytes = block_bytes
        self._parts: queue.Queue[memoryview | None] = queue.Queue(ahead)
        self._thread = threading.Thread(target=self._run, name="mpishard-checksums", daemon=True)
        self.checksums: list[int] = []
        """CRC-32 of each block."""

    def watch(self, parts: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the same parts, and pass them to the thread."""
        for part in parts:
            self._parts.put(part)
            yield part

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # None ends the thread, also if the writer has raised.
        self._parts.put(None)
        self._thread.join()

    def _run(self) -> None:
        # Blocks and parts have bounds of their own: either may end inside the other.
        crc, filled = 0, 0
        while (rest := self._parts.get()) is not None:
            while rest:
                part = rest[: self._block_bytes - filled]
                crc, filled = zlib.crc32(part, crc), filled + len(part)
                if filled == self._block_bytes:
                    self.checksums.append(crc)
                    crc, filled = 0, 0
                rest = rest[len(part) :]
        if filled:
            self.checksums.append(crc)


def table_checksum(parameters: Sequence[ParameterEntry]) -> int:
    """Return a number that differs if parameters differ in name, shape or order.

    It is in each file, where a range of the flat vector has no names of parameters.
    """
    return zlib.crc32(repr([(e.name, tuple(e.shape)) for e in parameters]).encode())


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    # With leading zeros, the names are listed in the order of ranks.
    return f"rank{rank:05d}.safetensors"


def tensor_key(kind: str, region: Region) -> str:
    """Return the name of a piece in the header of its file."""
    box = ", ".join([f"{low}:{high}" for low, high in region.box])
    return f"{kind}@{region.name}[{box}][{region.start}:{region.stop}]"


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """Place of a region's values: a 1-D array that begins at byte ``offset`` of ``file``."""

    file: str
    offset: int
    region: Region


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Length of a file in bytes, and the CRC-32 of each block of `BLOCK_BYTES`."""

    nbytes: int
    checksums: tuple[int, ...]

    def tear(self, file: Path) -> str:
        """Return a text if ``file`` is missing or of another length than recorded, otherwise ""."""
        # A read of a pipe or a device could wait for ever.
        if not file.is_file():
            return "is not a regular file" if file.exists() else "is missing"
        nbytes = file.stat().st_size
        return "" if nbytes == self.nbytes else f"has {nbytes} of {self.nbytes} bytes"


class RankFile:
    """File of one rank, whose layout is fixed before anything is written.

    Parameters
    ----------
    rank : int
        The rank.
    pieces : mapping of str to sequence of (Region, Tensor)
        Kind -> regions and their 1-D values, in host memory or lazy.
    table : int
        `table_checksum` of the model's parameters.

    Raises
    ------
    ValueError
        If a region is given twice.
    CheckpointError
        If the format cannot represent a dtype or a name.
    """

    def __init__(
        self, rank: int, pieces: Mapping[str, Sequence[tuple[Region, Tensor]]], table: int
    ) -> None:
        self.name = file_name(rank)
        self._table = table
        self._kinds: dict[str, list[tuple[str, Region]]] = {}
        tensors: dict[str, Tensor] = {}
        for kind, given in pieces.items():
            own = self._kinds[kind] = []
            for region, tensor in given:
                key = tensor_key(kind, region)
                if key in tensors:
                    raise ValueError(f"{kind}: {region} is given twice")
                tensors[key] = tensor
                own.append((key, region))
        self._tensors = tensors
        self.is_empty = not tensors
        """True if the rank has nothing to write."""
        # Small pieces come first, side by side. Several ranks read small pieces from each other's
        # files. They are then in a few blocks, and each of these ranks verifies only those.
        ordered = dict(sorted(tensors.items(), key=lambda item: item[1].nbytes))
        self._file = TensorFile(ordered, {"format": "np", TABLE: str(table)})
        self.nbytes = 0 if self.is_empty else self._file.nbytes
        """Length of the file in bytes; 0 if there is none."""

    def write(self, directory: Path, check: Callable[[], None] | None = None) -> None:
        """Write the file unless it `is_empty`. ``check`` is as in `TensorFile.write`.

        Raises
        ------
        OSError
            If the file cannot be written.
        """
        if not self.is_empty:
            self._file.write(directory / self.name, check)

    def record(self) -> Document:
        """Return the record of the written file for the manifest, which JSON can represent."""
        # Pieces are lists and not objects, because rank 0 gets the records of all ranks as text.
        offsets = self._file.offsets
        kinds = {
            kind: {
                "dtypes": [dtype.name for dtype in {self._tensors[key].dtype for key, _ in given}],
                "pieces": [
                    [offsets[key], region.name, region.box, region.start, region.stop]
                    for key, region in given
                ],
            }
            for kind, given in self._kinds.items()
        }
        return {
            "file": self.name,
            "bytes": self.nbytes,
            "crc32": self._file.checksums,
            TABLE: self._table,
            "kinds": kinds,
        }


def bytes_of(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None) -> bytes:
    """Return named arrays in safetensors format, with ``metadata`` in the header.

    Raises
    ------
    ValueError
        If an array could not be read again under its name.
    """
    for name in tensors:
        check_name(name, "tensor")
    return safetensors.numpy.save(dict(tensors), None if metadata is None else dict(metadata))


def tensors_of(data: object, whose: str = "") -> dict[str, Array]:
    """Return the arrays in the bytes of ``serialize``. Errors put ``whose`` before that name.

    Raises
    ------
    TypeError
        If ``data`` is not bytes.
    ValueError
        If the bytes are something else, or incomplete.
    """
    if not isinstance(data, bytes | bytearray):
        raise TypeError(f"deserialize needs bytes, got {type(data).__name__}")
    try:
        return safetensors.numpy.load(bytes(data))
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"these {len(data)} bytes are not those of {whose}serialize(): {error}"
        ) from None


def metadata_of(data: bytes) -> dict[str, str]:
    """Return the metadata in the header of bytes that `tensors_of` has read; empty if none.

    They are decoded here, because the library reads only the metadata of files.
    """
    length = int.from_bytes(data[:8], "little")
    return dict(json.loads(data[8 : 8 + length]).get("__metadata__") or {})


def tensors_and_document(data: Any, key: str) -> tuple[dict[str, Array], Any]:
    """Return the arrays of an optimizer's bytes, and the JSON under ``key`` of the metadata.

    The errors raised are those of `tensors_of`, and a ValueError if there is no such key.
    """
    tensors = tensors_of(data, "an optimizer's ")
    text = metadata_of(data).get(key)
    if text is None:
        raise ValueError(
            f"these {len(data)} bytes are not those of an optimizer's serialize(): their header "
            f"has no {key!r}"
        )
    return tensors, json.loads(text)
