"""SIGUSR1 to `mpishard run`: the order to save and end, for this start of the job and later ones.

It may come before there are ranks, or between two starts of a job that fails: the ranks of each
start receive it.
"""

from __future__ import annotations

from types import FrameType


class Notice:
    """The order to save and end, if this process has received it."""

    def __init__(self) -> None:
        self.is_given = False

    def receive(self, _number: int, _frame: FrameType | None) -> None:
        """Keep the order until there is a job that can obey it."""
        self.is_given = True


notice = Notice()
"""The order to the job of this process."""
