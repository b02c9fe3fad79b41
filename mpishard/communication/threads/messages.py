"""Messages between thread-ranks: a copy, or the sender's own array until it is copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Self

from mpishard.arrays import Array, beside, synchronize
from mpishard.communication.threads.world import Absence

__all__ = ["Delivery", "Letter", "Taken"]

Key = tuple[int, int, int]
"""Sender, receiver, tag."""


class Letter:
    """A message that was sent.

    Parameters
    ----------
    array : Array
        What is in it.
    is_copy : bool
        Whether the array is nobody else's. The sender's own is copied when it is received, and
        the sender waits until then.
    """

    __slots__ = ("array", "is_copy", "is_taken")

    def __init__(self, array: Array, *, is_copy: bool) -> None:
        self.array = array
        self.is_copy = is_copy
        self.is_taken = False

    def open(self) -> Array:
        """An array of the receiver's own."""
        message = beside(self.array, self.array)  # of this thread's GPU
        if message is self.array:
            if self.is_copy:
                return message
            message = message.copy()
        synchronize(message)  # the sender may use its memory for something else after this
        return message


class Taken(Absence):
    """True when the receiver has copied a letter."""

    __slots__ = ("_letter", "_receiver")

    def __init__(self, letter: Letter, receiver: int) -> None:
        self._letter = letter
        self._receiver = receiver

    def test(self) -> bool:
        return self._letter.is_taken

    def missing(self) -> list[int]:
        return [self._receiver]


class Delivery(Absence):
    """One receive's place in the line of those that want letters of one key.

    Used as a context manager by the receive, which leaves the line when it has its letter, or
    when it ends without. True when it stands first and a letter is there.
    """

    __slots__ = ("_key", "_letters", "_lines")

    def __init__(
        self, letters: Mapping[Key, deque[Letter]], key: Key, lines: dict[Key, deque[Delivery]]
    ) -> None:
        self._letters = letters
        self._key = key
        self._lines = lines
        lines.setdefault(key, deque()).append(self)

    def test(self) -> bool:
        return self._lines[self._key][0] is self and bool(self._letters.get(self._key))

    def missing(self) -> list[int]:
        return [self._key[0]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        line = self._lines[self._key]
        line.remove(self)
        if not line:
            del self._lines[self._key]
