"""Schedules by the names that a command line or a file gives them."""

from __future__ import annotations

from mpishard.arguments import nearest
from mpishard.pipeline.gpipe import GPipeSchedule
from mpishard.pipeline.interleaved import Interleaved1F1BSchedule
from mpishard.pipeline.looped_bfs import LoopedBFSSchedule
from mpishard.pipeline.one_forward_one_backward import OneForwardOneBackwardSchedule
from mpishard.pipeline.schedule import RuleSchedule
from mpishard.pipeline.zero_bubble import ZeroBubbleH1Schedule, ZeroBubbleH2Schedule
from mpishard.pipeline.zero_bubble_v import ZeroBubbleVSchedule

__all__ = ["SCHEDULE_NAMES", "schedule_by_name"]

_FIXED: dict[str, type[RuleSchedule]] = {
    "gpipe": GPipeSchedule,
    "1f1b": OneForwardOneBackwardSchedule,
    "zb-h1": ZeroBubbleH1Schedule,
    "zb-h2": ZeroBubbleH2Schedule,
    "zb-v": ZeroBubbleVSchedule,
}
_LOOPED: dict[str, type[Interleaved1F1BSchedule | LoopedBFSSchedule]] = {
    "interleaved": Interleaved1F1BSchedule,
    "looped-bfs": LoopedBFSSchedule,
}

SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v")
"""What `schedule_by_name` knows."""


def _bare(name: str) -> str:
    return name.lower().translate(dict.fromkeys(map(ord, "-_ ")))


_KNOWN = {_bare(name): name for name in SCHEDULE_NAMES}


def schedule_by_name(name: str, virtual_stages_per_rank: int | None = None) -> RuleSchedule:
    """A schedule.

    Parameters
    ----------
    name : str
        One of `SCHEDULE_NAMES`; upper and lower case are one, and "-", "_" and blanks do not count.
    virtual_stages_per_rank : int, optional
        Of interleaved and looped-bfs, 2 where it is not given. Others have their own number.

    Raises
    ------
    ValueError
        For another name, or a number of virtual stages that the schedule cannot have.
    """
    key = _KNOWN.get(_bare(name), "")
    if key in _LOOPED:
        return _LOOPED[key](2 if virtual_stages_per_rank is None else virtual_stages_per_rank)
    if key not in _FIXED:
        raise ValueError(
            f"schedule must be one of {', '.join(SCHEDULE_NAMES)}; got {name!r}"
            + nearest(name.lower(), SCHEDULE_NAMES)
        )
    schedule = _FIXED[key]()
    own = schedule.virtual_stages_per_rank
    if virtual_stages_per_rank not in (None, own):
        raise ValueError(
            f"{schedule.name} has {own} virtual stage{'s' * (own > 1)} per rank, got "
            f"{virtual_stages_per_rank}; {' and '.join(_LOOPED)} take 2 or more"
        )
    return schedule
