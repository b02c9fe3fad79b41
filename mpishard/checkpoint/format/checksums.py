"""Checksums of what is being written, by a thread of their own."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Iterable, Iterator
from typing import Self

__all__ = ["ChecksumThread"]


class ChecksumThread:
    """Takes the CRC-32 of each block of a stream while its parts go to the disk.

    A checksum takes as long as copying to the system does, or longer, and while the disk works
    the processor has nothing else to do. Use as a context manager; `checksums` are complete behind
    it.

    Parameters
    ----------
    block_bytes : int
        Bytes of a block; the last one may be shorter.
    ahead : int
        How many parts may wait for their checksum: as many as there are where 0. They stay in
        memory meanwhile.
    """

    def __init__(self, block_bytes: int, ahead: int = 0) -> None:
        self._block_bytes = block_bytes
        self._parts: queue.Queue[memoryview | None] = queue.Queue(ahead)
        self._thread = threading.Thread(target=self._run, name="mpishard-checksums", daemon=True)
        self.checksums: list[int] = []
        """CRC-32 of each block."""

    def watch(self, parts: Iterable[memoryview]) -> Iterator[memoryview]:
        """The same parts, of which checksums are taken."""
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
