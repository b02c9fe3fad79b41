"""A file of a checkpoint, mapped into memory, whose blocks are verified before use."""

from __future__ import annotations

import json
import os
import weakref
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.checkpoint.format.tensor_file import BLOCK_BYTES, FileRecord, PieceRecord
from mpishard.errors import CheckpointError

_READ_BYTES = 1 << 18  # fits the L2 cache

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class MappedFile:
    """One file; each block is compared with its checksum before its first use.

    Parameters
    ----------
    file : Path
        The file to map.
    record : FileRecord
        Its length and the checksums of its blocks, from the manifest.
    tensors : mapping of str to (int, int)
        The bytes of each tensor, start and stop, from the manifest, by `tensor_key`.
    was_replaced : callable, optional
        Returns whether another checkpoint is in its place by now.

    Raises
    ------
    OSError, ValueError
        If it cannot be mapped, or is not as long.
    """

    def __init__(
        self,
        file: Path,
        record: FileRecord,
        tensors: Mapping[str, tuple[int, int]],
        was_replaced: Callable[[], bool] = lambda: False,
    ) -> None:
        self._file = file
        self._record = record
        self._tensors = tensors
        self._was_replaced = was_replaced
        self._descriptor = os.open(file, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        with open(self._descriptor, "rb", closefd=False) as stream:
            self._content: Bytes = np.memmap(stream, np.uint8, "r")
        if self._content.size != record.nbytes:
            raise ValueError(f"it has {self._content.size} bytes, not {record.nbytes}")
        self._verified = np.zeros(self.block_count, bool)
        self._is_as_listed = False

    @property
    def block_count(self) -> int:
        """Number of blocks."""
        return len(self._record.checksums)

    def bounds(self, block: int) -> tuple[int, int]:
        """Return the first byte of a block, and the one behind its last."""
        return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self._record.nbytes)

    def block_fault(self, block: int, what: str = "") -> str:
        """Return why a block is not as it was written, in words; "" if it is.

        ``what`` is the name of its content for these words.

        Raises
        ------
        OSError
            If it cannot be read.
        """
        low, high = self.bounds(block)
        if _checksum_at(self._descriptor, low, high - low) == self._record.checksums[block]:
            return ""
        of = f", of {what}," if what else ""
        return f"bytes {low} to {high}{of} do not have the checksum that they were written with"

    def verify(self, first: int, stop: int, what: str = "") -> None:
        """Compare the checksums of blocks that were not compared before."""
        for block in (first + np.flatnonzero(~self._verified[first:stop])).tolist():
            try:
                fault = self.block_fault(block, what)
            except OSError as error:
                raise CheckpointError(f"{self._file}: {error}") from error
            if fault:
                why = (
                    "the checkpoint was replaced while it was read"
                    if self._was_replaced()
                    else "the disk, or somebody, changed them"
                )
                raise CheckpointError(f"{self._file}: {fault}; {why}")
            self._verified[block] = True

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._close()

    def check_header(self) -> None:
        """Refuse a file whose header and manifest differ; compare them once."""
        if self._is_as_listed:
            return
        self.verify(0, 1, "the header")
        why = self.header_fault()
        if why:
            raise CheckpointError(f"{self._file}: {why}")
        self._is_as_listed = True

    def header_fault(self) -> str:
        """Return how the header differs from the manifest, in words; "" if it does not."""
        start = 8 + int.from_bytes(self._content[:8].tobytes(), "little")
        # Compared before it is read, so that a forged length cannot fill the memory.
        expected = min((low for low, _ in self._tensors.values()), default=self._content.size)
        if start != expected:
            return f"its header ends at byte {start}, and its tensors begin at {expected}"
        found = {}
        try:
            for key, entry in json.loads(self._content[8:start].tobytes().decode()).items():
                if key != "__metadata__":
                    low, high = entry["data_offsets"]
                    found[key] = start + low, start + high
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            return f"its header is none of a safetensors file: {type(error).__name__}: {error}"
        for key in [*self._tensors, *found]:
            if found.get(key) != self._tensors.get(key):
                return (
                    f"its header and the manifest differ: {key} lies in bytes {found.get(key)} by "
                    f"the one, {self._tensors.get(key)} by the other"
                )
        return ""

    def part(self, start: int, stop: int, what: str) -> Bytes:
        """Return bytes ``start`` to ``stop``, a view."""
        self.verify(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES), what)
        self.check_header()
        return self._content[start:stop]


def _checksum_at(descriptor: int, start: int, length: int) -> int:
    """Return the CRC-32 of ``length`` bytes of an open file, from byte ``start`` on.

    The bytes are read rather than mapped: with a map, a disk that fails or a file that is
    truncated would end the process with SIGBUS.

    Raises
    ------
    OSError
        If they cannot be read, or are not there.
    """
    buffer = memoryview(bytearray(min(length, _READ_BYTES)))
    crc, done = 0, 0
    while done < length:
        count = os.preadv(descriptor, [buffer[: length - done]], start + done)
        if not count:
            raise OSError(f"it ends at byte {start + done}")
        crc, done = zlib.crc32(buffer[:count], crc), done + count
    return crc


class PieceValues:
    """The values of a piece; a slice of them is read when it is taken."""

    def __init__(
        self, file: MappedFile, piece: PieceRecord, dtype: np.dtype[Any], kind: str
    ) -> None:
        self._file = file
        self._offset = piece.offset
        self._dtype = dtype
        self._what = f"{kind} of {piece.region.name}"

    def __getitem__(self, part: slice) -> np.ndarray[Any, Any]:
        low, high = (
            self._offset + index * self._dtype.itemsize for index in (part.start, part.stop)
        )
        return self._file.part(low, high, self._what).view(self._dtype)
