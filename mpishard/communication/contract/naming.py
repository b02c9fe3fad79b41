"""How reports call ranks and groups of ranks: by their numbers in the root world, briefly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["GROUP_BYTES", "group_label", "group_members", "of_group", "ranks_text", "who"]

GROUP_BYTES = 64
"""Bytes of a group's label that a `CallFile` keeps."""

_FEW_IN_STEPS = 5
_LABEL = re.compile(r"[^()]+\(ranks? ([0-9, by-]+)\)")


def ranks_text(ranks: Sequence[int]) -> str:
    """Numbers in rising order, runs as ranges.

    Examples
    --------
    >>> ranks_text([0, 1, 2, 3, 8])
    '0-3, 8'
    >>> ranks_text(range(0, 512, 64))
    '0-448 by 64'
    """
    ranks = sorted(ranks)
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) >= _FEW_IN_STEPS and len(steps) == 1 and steps != {1}:
        return f"{ranks[0]}-{ranks[-1]} by {steps.pop()}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


def who(ranks: Sequence[int]) -> str:
    """The subject of a sentence: ``rank 1``, or ``ranks 0-3, 8``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"


def group_label(name: str, path: str, world_ranks: Sequence[int]) -> str:
    """What reports call a group that was split off, the same on its ranks and on no other group's.

    Parameters
    ----------
    name : str
        What it is for, such as an axis of a mesh; may be empty.
    path : str
        Which collective of the root world split it off, and which of that group's, and so on.
    world_ranks : sequence of int
        Its ranks, by their numbers in the root world.

    Examples
    --------
    >>> group_label("tensor", "17", [1, 3])
    'tensor group 17 (ranks 1, 3)'
    """
    words = f"{name} group {path}".strip()
    label = f"{words} ({who(world_ranks)})"
    if len(label) > GROUP_BYTES:
        label = f"{words} ({len(world_ranks)} ranks, {min(world_ranks)} to {max(world_ranks)})"
    return label


def group_members(label: str) -> list[int] | None:
    """The ranks that `group_label` names; None where it names too many to list them.

    Examples
    --------
    >>> group_members("tensor group 17 (ranks 1, 3-5)")
    [1, 3, 4, 5]
    """
    match = _LABEL.fullmatch(label)
    if match is None:
        return None
    members: list[int] = []
    for part in match.group(1).split(", "):
        ends, _, step = part.partition(" by ")
        first, _, last = ends.partition("-")
        members += range(int(first), int(last or first) + 1, int(step or 1))
    return members


def of_group(label: str) -> str:
    """Behind a collective's name: of which group it is. The root world has no label."""
    return f" of {label}" if label else ""
