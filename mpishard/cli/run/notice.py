"""SIGUSR1 to `mpishard run`: the order to save and end, for this start of the job and later ones.

It may come before there are ranks, or between two starts of a job that fails: the ranks of each
start receive it.
"""

from __future__ import annotations

from types import FrameType

__all__ = ["Notice", "notice"]


class Notice:
    """Whether this process has received the order that its job is to save and end."""

    def __init__(self) -> None:
        self.is_given = False

    def receive(self, _number: int, _frame: FrameType | None) -> None:
        """Keep the order while there is no job to pass it on to."""
        self.is_given = True


notice = Notice()
"""The order to the job of this process."""
