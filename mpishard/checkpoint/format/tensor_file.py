"""A file of named tensors in safetensors format, with a checksum for each block.

The format (https://huggingface.co/docs/safetensors): the length of the header as 8 bytes, little
end first; the header, JSON, padded with spaces; the arrays, one after the other, without gaps.
The library's own writer tells neither the offset of an array nor a checksum, and holds Python's
lock meanwhile; so the files are written here. The library reads them.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np

from mpishard.checkpoint.format import disk
from mpishard.errors import CheckpointError
from mpishard.sharding.table import check_name

__all__ = ["BLOCK_BYTES", "DTYPES_OF_FILES", "ChecksumThread", "LazyTensor", "Tensor", "TensorFile"]

BLOCK_BYTES = 4 << 20
"""Bytes of a file that share a checksum; the last block may be shorter."""

_PART_BYTES = 4 << 20  # what is given to the system at once
_ALIGNMENT = 64  # bytes, of the first array, so that a memory map of the arrays is aligned

_DTYPES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip

DTYPES_OF_FILES: dict[str, np.dtype[Any]] = {
    code: np.dtype(getattr(ml_dtypes, name, name)) for name, code in _DTYPES.items()
}
"""The format's names of the dtypes that a checkpoint can hold."""

# By the dtype itself: NumPy makes up its name anew each time, in microseconds.
_CODES = {dtype: code for code, dtype in DTYPES_OF_FILES.items()}

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is not in memory.

    Parameters
    ----------
    dtype : dtype
        Of its elements.
    shape : tuple of int
        Its shape.
    blocks : callable
        Yields its elements in row-major order, as 1-D contiguous arrays.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[np.ndarray[Any, Any]]]

    @property
    def size(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.size * self.dtype.itemsize


Tensor = np.ndarray[Any, Any] | LazyTensor
"""A tensor to be written."""


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    tensor: Tensor
    start: int
    """Offset in bytes behind the header."""

    def contents(self) -> Iterator[Bytes]:
        if isinstance(self.tensor, LazyTensor):
            for block in self.tensor.blocks():
                yield block.view(np.uint8)
        else:
            yield self.tensor.view(np.uint8)


class TensorFile:
    """One file, laid out before anything is written.

    Parameters
    ----------
    tensors : mapping of str to array or LazyTensor
        Arrays are 1-D, contiguous, in host memory.
    metadata : mapping of str to str
        For the header.

    Raises
    ------
    CheckpointError
        For a dtype or a name that the format cannot hold.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self._entries: list[_Entry] = []
        start = 0
        # Wide elements first: then each array is aligned to its own.
        for key, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
            self._entries.append(_Entry(key, tensor, start))
            start += tensor.nbytes
        self._header = self._make_header(metadata)
        self.nbytes: int = len(self._header) + start
        """Length of the file."""
        self.checksums: list[int] = []
        """CRC-32 of each block, once it is written."""

    @property
    def offsets(self) -> dict[str, int]:
        """Offset of each array in the file, in bytes."""
        return {entry.key: len(self._header) + entry.start for entry in self._entries}

    def write(self, file: Path, check: Callable[[], None] | None = None) -> None:
        """Write the file durably, and set `checksums`.

        ``check`` is called before each part of an array, and may raise: then no more is written.

        Raises
        ------
        OSError
            If the file exists already or cannot be written.
        """
        # Arrays are in memory anyway. Lazy tensors are read meanwhile, and few blocks may wait.
        is_lazy = any(isinstance(entry.tensor, LazyTensor) for entry in self._entries)
        with ChecksumThread(BLOCK_BYTES, 2 if is_lazy else 0) as thread:
            disk.write_file(file, thread.watch(self._parts(check)))
        self.checksums = thread.checksums

    def _make_header(self, metadata: Mapping[str, str]) -> bytes:
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        for entry in self._entries:
            try:
                check_name(entry.key, "tensor")
            except ValueError as error:
                raise CheckpointError(str(error)) from None
            code = _CODES.get(entry.tensor.dtype)
            if code is None:
                raise CheckpointError(
                    f"{entry.key} has dtype {entry.tensor.dtype}, which no safetensors file holds; "
                    f"it holds {', '.join(_DTYPES)}"
                )
            header[entry.key] = {
                "dtype": code,
                "shape": list(entry.tensor.shape),
                "data_offsets": [entry.start, entry.start + entry.tensor.nbytes],
            }
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    def _parts(self, check: Callable[[], None] | None) -> Iterator[memoryview]:
        """Yield the content, a few MiB at a time; call ``check`` before each part."""
        yield memoryview(self._header)
        for entry in self._entries:
            for content in entry.contents():
                for start in range(0, content.size, _PART_BYTES):
                    if check is not None:
                        check()
                    yield content[start : start + _PART_BYTES].data


class ChecksumThread:
    """Computes the CRC-32 of each block of a stream while its parts go to the disk.

    A checksum takes as long as the copy to the system, or longer, and the processor is idle while
    the disk works. Use as a context manager; at its end `checksums` are complete.

    Parameters
    ----------
    block_bytes : int
        Bytes of a block; the last one may be shorter.
    ahead : int
        Number of parts that may wait for their checksum, in memory; 0 for no limit.
    """

    def __init__(self, block_bytes: int, ahead: int = 0) -> None:
        self._block_bytes = block_bytes
        self._parts: queue.Queue[memoryview | None] = queue.Queue(ahead)
        self._thread = threading.Thread(target=self._run, name="mpishard-checksums", daemon=True)
        self.checksums: list[int] = []
        """CRC-32 of each block."""

    def watch(self, parts: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the same parts, and have their checksums computed."""
        for part in parts:
            self._parts.put(part)
            yield part

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.put(None)
        self._thread.join()

    def _run(self) -> None:
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
