"""One rank's file: named 1-D arrays in safetensors format, with a checksum for each block.

The format (https://huggingface.co/docs/safetensors): the length of the header as 8 bytes, little
end first; the header, JSON, padded with spaces; the arrays, one after the other, without gaps.
It is written here because the library's writer tells neither where an array lies nor what the
bytes add up to, and lets no other thread run meanwhile. The library reads it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.checkpoint import disk
from mpishard.errors import CheckpointError

__all__ = ["BLOCK_BYTES", "TensorFile", "checksums_of"]

BLOCK_BYTES = 4 << 20
"""Bytes of a file that share a checksum; the last block may be shorter."""

_PIECE_BYTES = 1 << 20  # what is read through once for the checksum and again for the disk
_ALIGNMENT = 64  # bytes; where the arrays begin, so that a memory map of them is aligned

_DTYPES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def checksums_of(content: Bytes, first: int = 0, last: int | None = None) -> list[int]:
    """CRC-32 of blocks ``first`` to ``last`` of a file, of which ``content`` is all bytes."""
    stop = -(-content.size // BLOCK_BYTES) if last is None else last
    return [
        zlib.crc32(content[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES].data)
        for index in range(first, stop)
    ]


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    array: np.ndarray[Any, Any]
    start: int
    """Where it lies behind the header."""


class TensorFile:
    """What will be one file: where each array lies is known before anything is written.

    Parameters
    ----------
    tensors : mapping of str to array
        1-D, contiguous, in host memory.
    metadata : mapping of str to str
        For the header.

    Raises
    ------
    CheckpointError
        For a dtype that the format does not have.
    """

    def __init__(
        self, tensors: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str]
    ) -> None:
        self._entries: list[_Entry] = []
        start = 0
        # Wide elements first: then each array is aligned to its own.
        for key, array in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
            self._entries.append(_Entry(key, array, start))
            start += array.nbytes
        self._header = self._make_header(metadata)
        self.nbytes: int = len(self._header) + start
        """Length of the file."""
        self.checksums: list[int] = []
        """CRC-32 of each block, once it is written."""

    @property
    def offsets(self) -> dict[str, int]:
        """Where in the file each array begins, in bytes."""
        return {entry.key: len(self._header) + entry.start for entry in self._entries}

    def write(self, file: Path) -> None:
        """Write it, durably, and note the `checksums`.

        Raises
        ------
        OSError
            Where the file is there already or cannot be written.
        """
        self.checksums.clear()
        disk.write_file(file, self._parts())

    def _make_header(self, metadata: Mapping[str, str]) -> bytes:
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        for entry in self._entries:
            name = entry.array.dtype.name
            if name not in _DTYPES:
                raise CheckpointError(
                    f"{entry.key} has dtype {name}, which no safetensors file holds; it holds "
                    f"{', '.join(_DTYPES)}"
                )
            header[entry.key] = {
                "dtype": _DTYPES[name],
                "shape": list(entry.array.shape),
                "data_offsets": [entry.start, entry.start + entry.array.nbytes],
            }
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    def _parts(self) -> Iterator[memoryview]:
        """The content, while its checksums are taken."""
        crc, filled = 0, 0
        header = np.frombuffer(self._header, np.uint8)
        for content in (header, *(entry.array.view(np.uint8) for entry in self._entries)):
            for start in range(0, content.size, _PIECE_BYTES):
                rest = piece = content[start : start + _PIECE_BYTES].data
                while rest:
                    part = rest[: BLOCK_BYTES - filled]
                    crc, filled = zlib.crc32(part, crc), filled + len(part)
                    if filled == BLOCK_BYTES:
                        self.checksums.append(crc)
                        crc, filled = 0, 0
                    rest = rest[len(part) :]
                yield piece
        if filled:
            self.checksums.append(crc)
