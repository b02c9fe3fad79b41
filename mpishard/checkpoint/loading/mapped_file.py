"""File of a checkpoint that is mapped into memory, and whose blocks are verified before use."""

from __future__ import annotations

import json
import os
import weakref
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mpishard.base import Array, CheckpointError, DType
from mpishard.checkpoint.format.tensor_file import BLOCK_BYTES, TABLE, FileRecord, PieceRecord

_READ_BYTES = 1 << 18  # Bytes per read, which fit in the L2 cache.

Bytes = npt.NDArray[np.uint8]


class MappedFile:
    """Mapped file; each block is compared with its checksum before its first use.

    Parameters
    ----------
    file : Path
        The file to map.
    record : FileRecord
        Length of the file and checksums of its blocks, from the manifest.
    tensors : mapping of str to (int, int)
        Byte range (start, stop) of each tensor, from the manifest, by `tensor_key`.
    table : int or None
        `table_checksum` of the manifest's parameters, if the file has ranges of the flat vector.
        The names of other tensors have those of the parameters.
    was_replaced : callable, optional
        ``was_replaced()`` is True if another checkpoint is at the same path now.

    Raises
    ------
    OSError, ValueError
        If the file cannot be mapped, or has another length.
    """

    def __init__(
        self,
        file: Path,
        record: FileRecord,
        tensors: Mapping[str, tuple[int, int]],
        table: int | None,
        was_replaced: Callable[[], bool] = lambda: False,
    ) -> None:
        self._file = file
        self._record = record
        self._tensors = tensors
        self._table = table
        self._was_replaced = was_replaced
        # The open file keeps its content if another save removes its name.
        self._descriptor = os.open(file, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        """Closes the file, when it is called or the object is freed. Further calls do nothing."""
        with open(self._descriptor, "rb", closefd=False) as stream:
            # As a plain array: slices of a memory map take five times as long.
            self._content: Bytes = np.asarray(np.memmap(stream, np.uint8, "r"))
        if self._content.size != record.nbytes:
            raise ValueError(f"it has {self._content.size} bytes, not {record.nbytes}")
        # Pieces of several regions share blocks, and each block is verified once.
        self._verified: set[int] = set()
        self._is_as_listed = False

    @property
    def block_count(self) -> int:
        """Number of blocks."""
        return len(self._record.checksums)

    def bounds(self, block: int) -> tuple[int, int]:
        """Return the byte range (start, stop) of a block."""
        return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self._record.nbytes)

    def block_fault(self, block: int, what: str = "") -> str:
        """Return a text if a block's checksum differs from the one recorded, otherwise "".

        The text names the block's content ``what``.

        Raises
        ------
        OSError
            If the bytes cannot be read, or are beyond the end of the file.
        """
        low, high = self.bounds(block)
        # The bytes are read and not mapped. With a map, a failing disk or a truncated file would
        # end the process with SIGBUS.
        buffer = memoryview(bytearray(min(high - low, _READ_BYTES)))
        crc, position = 0, low
        while position < high:
            count = os.preadv(self._descriptor, [buffer[: high - position]], position)
            if not count:
                raise OSError(f"it ends at byte {position}")
            crc, position = zlib.crc32(buffer[:count], crc), position + count
        if crc == self._record.checksums[block]:
            return ""
        of = f", of {what}," if what else ""
        return f"bytes {low} to {high}{of} do not have the checksum that they were written with"

    def verify(self, first: int, stop: int, what: str = "") -> None:
        """Compare the checksums of the blocks [first, stop) that were not compared before.

        Raises
        ------
        CheckpointError
            If a block has changed or cannot be read.
        """
        for block in range(first, stop):
            if block in self._verified:
                continue
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
            self._verified.add(block)

    def check_header(self) -> None:
        """Refuse a file whose header differs from the manifest. Only the first call compares."""
        if self._is_as_listed:
            return
        self.verify(0, 1, "the header")
        why = self.header_fault()
        if why:
            raise CheckpointError(f"{self._file}: {why}")
        self._is_as_listed = True

    def header_fault(self) -> str:
        """Return a text if the header differs from the manifest, otherwise ""."""
        start = 8 + int.from_bytes(self._content[:8].tobytes(), "little")
        # The length is checked before the header is read: a forged one cannot fill the memory.
        expected = min((low for low, _ in self._tensors.values()), default=self._content.size)
        if start != expected:
            return f"its header ends at byte {start}, and its tensors begin at {expected}"
        found = {}
        try:
            header = json.loads(self._content[8:start].tobytes().decode())
            table = header.pop("__metadata__", {}).get(TABLE)
            for key, entry in header.items():
                low, high = entry["data_offsets"]
                found[key] = start + low, start + high
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            return f"its header is none of a safetensors file: {type(error).__name__}: {error}"
        if self._table is not None and table != str(self._table):
            return (
                "its header and the manifest differ: they have parameters of other names or "
                f"shapes, or in another order (checksum {table} and {self._table})"
            )
        for key in [*self._tensors, *found]:
            if found.get(key) != self._tensors.get(key):
                return (
                    f"its header and the manifest differ: {key} lies in bytes {found.get(key)} by "
                    f"the one, {self._tensors.get(key)} by the other"
                )
        return ""

    def values(self, piece: PieceRecord, dtype: DType, needed: slice, what: str) -> Array:
        """Return the values of a piece as a view, after those in ``needed`` are verified.

        Errors name the content ``what``.
        """
        start, size = piece.offset, dtype.itemsize
        first, last = start + needed.start * size, start + needed.stop * size
        self.verify(first // BLOCK_BYTES, -(-last // BLOCK_BYTES), what)
        self.check_header()
        return self._content[start : start + piece.region.length * size].view(dtype)
