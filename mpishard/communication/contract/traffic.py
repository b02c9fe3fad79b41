"""How many bytes a rank has sent and read, and in how many calls."""

from __future__ import annotations

from collections import Counter

__all__ = ["Traffic"]


class Traffic:
    """Counts of what one rank sent to others, by collective.

    A piece that a rank keeps for itself is not counted. A broadcast counts the tree's messages
    at the ranks that forward them under plain MPI, that is (world size - 1) times the array in
    all, booked on the root. Headers are not counted.
    """

    def __init__(self) -> None:
        self.bytes_sent: Counter[str] = Counter()
        self.bytes_read: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def count(self, kind: str, nbytes: int) -> None:
        """Add one call of ``kind`` that sent ``nbytes`` to other ranks."""
        self.calls[kind] += 1
        self.bytes_sent[kind] += nbytes

    def count_read(self, kind: str, nbytes: int) -> None:
        """Add ``nbytes`` that a call of ``kind`` read from memory of other ranks."""
        self.bytes_read[kind] += nbytes

    @property
    def total_bytes(self) -> int:
        """Bytes sent to other ranks since the last `reset`."""
        return sum(self.bytes_sent.values())

    def reset(self) -> None:
        """Start counting from zero."""
        self.bytes_sent.clear()
        self.bytes_read.clear()
        self.calls.clear()
