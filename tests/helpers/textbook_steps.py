"""Number of steps that a test compares with a textbook version."""

from __future__ import annotations

import os

__all__ = ["steps_for"]


def steps_for(world_size: int) -> int:
    """Return 50, and 22 for worlds of more than 3 ranks without ``scripts/test.sh --full``.

    Both are two steps after the end of a period of four.
    """
    return 22 if world_size > 3 and not os.environ.get("MPISHARD_TEST_FULL") else 50
