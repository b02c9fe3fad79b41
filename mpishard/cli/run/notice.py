"""SIGUSR1 to `mpishard run`: a notice of preemption, after which the job saves and ends.

It may come before there are ranks, or between two starts of a job that fails: the ranks of every
later start receive it, too.
"""

from __future__ import annotations

from types import FrameType


class Notice:
    """The notice of preemption, if this process has received it."""

    def __init__(self) -> None:
        self.is_given = False

    def receive(self, _number: int, _frame: FrameType | None) -> None:
        """Remember the signal until there are ranks to forward it to."""
        # A flag and no more, because a handler runs between any two instructions.
        self.is_given = True


notice = Notice()
"""The notice to the job of this process."""
