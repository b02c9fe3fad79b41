"""SIGUSR1 to `mpishard run`: the order to make room, for the present start of a job and later ones.

It may come before there are ranks, or between two starts of a job that fails: each start is told.
"""

from __future__ import annotations

from types import FrameType

__all__ = ["Notice", "notice"]


class Notice:
    """Whether this process has been told that its job is to make room."""

    def __init__(self) -> None:
        self.is_given = False

    def hear(self, _number: int, _frame: FrameType | None) -> None:
        """Keep the order, while there is no job to tell of it."""
        self.is_given = True


notice = Notice()
"""That of this process."""
