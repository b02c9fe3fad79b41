"""The table of all ranks: the activity and the last collectives of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpishard.communication.contract.matching import who
from mpishard.communication.contract.status import LoggedCall, MessageWait, RankRecord, RankState

__all__ = ["AGO", "doing", "is_stopped", "rank_table", "seconds_text", "wait_text"]

_ONE_EACH = 8
"""In larger worlds, ranks that do the same share an entry."""
_MOST_LINES = 40
AGO = "{ago}"
"""Stands for a time that differs between ranks that otherwise do the same."""


def rank_table(records: Sequence[RankRecord], now: float, *, calls: int = 3) -> str:
    """The activity of each rank, and its last collectives below, newest last.

    Parameters
    ----------
    records : sequence of RankRecord
        One for each rank.
    now : float
        Seconds since the epoch.
    calls : int
        Number of collectives to show for each, if the table fits a screen with them.

    Returns
    -------
    str
        Indented lines, about 40 at most.
    """
    entries = _entries(records, now, calls, are_merged=len(records) > _ONE_EACH)
    if sum(1 + len(lines) for _, lines, _ in entries) > _MOST_LINES:
        entries = _entries(records, now, 0, are_merged=True)
    shown = len(entries) if len(entries) <= _MOST_LINES else _MOST_LINES - 1
    table = []
    for (text, lines, _), same in list(entries.items())[:shown]:
        time = seconds_text(seconds for _, seconds in same)
        table += [f"  {who([rank for rank, _ in same])}: {text.replace(AGO, time)}", *lines]
    others = [rank for same in list(entries.values())[shown:] for rank, _ in same]
    if others:
        table.append(f"  {who(others)}: each does something else again")
    return "\n".join(table)


def _entries(
    records: Sequence[RankRecord], now: float, calls: int, *, are_merged: bool
) -> dict[tuple[str, tuple[str, ...], int], list[tuple[int, float]]]:
    """The entries of the table, by their text and lines, with each entry's ranks and seconds."""
    entries: dict[tuple[str, tuple[str, ...], int], list[tuple[int, float]]] = {}
    for record in records:
        text, seconds = doing(record, now)
        # The text has the collective that the rank waits in.
        awaited = record.waits if record.is_alive and not record.has_left else None
        lines = tuple(
            f"    {c.call.sequence}: {c.text}"
            for c in (record.calls[-calls:] if calls else ())
            if c != awaited
        )
        key = text, lines, -1 if are_merged else record.rank
        entries.setdefault(key, []).append((record.rank, seconds))
    return entries


def seconds_text(seconds: Iterable[float]) -> str:
    """A time, or the range of several: ``31 s``, ``28 to 31 s``."""
    texts = [f"{s:.1f}" if s < 10 else f"{s:.0f}" for s in sorted(seconds)]
    return f"{texts[0]} s" if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]} s"


def wait_text(record: RankRecord) -> str:
    """The collective or message that a rank waits for, behind "waits"."""
    wait = record.waits or "in a collective that its log does not hold any more"
    return f"in {wait}" if isinstance(wait, LoggedCall) else str(wait)


def _stopped_text(record: RankRecord) -> str:
    """The place where the process of a rank is stopped."""
    if record.state is None:
        where = "before or in init"
    elif record.state is RankState.STARTED:
        where = "in init"
    elif record.state is RankState.LEAVING:
        where = "while it waits for the others to leave"
    elif record.waits is not None:
        is_message = isinstance(record.waits, MessageWait)
        where = f"{'while it waits ' if is_message else ''}{wait_text(record)}"
    else:
        where = f"in or after {record.calls[-1]}" if record.calls else "before any collective"
    return f"stopped (SIGSTOP, Ctrl-Z or a debugger) {where}"


def doing(record: RankRecord, now: float, note: str = "") -> tuple[str, float]:
    """The activity of a rank, with `AGO` in place of the seconds, which come second.

    A ``note`` on a rank that is in no collective stands behind its last one.
    """
    last = record.calls[-1] if record.calls else None
    after = "before any collective" if last is None else f"after {last}"
    if is_stopped(record):
        return _stopped_text(record), 0.0
    if not record.is_known:
        return "on another node, whose status pages cannot be read from here", 0.0
    if record.state is None:
        return "not yet come to init", 0.0
    if record.has_left:
        return f"left {after}", 0.0
    if not record.is_alive:
        return f"its process is gone (killed, or out of memory?), {after}", 0.0
    if record.state is RankState.STARTED:
        return "in init, where ranks wait for each other", 0.0
    if record.state is RankState.REPORTED:
        return f"reported why the job ends, {after}", 0.0
    if record.waited:
        return f"waits {AGO} {wait_text(record)}", record.waited
    if last is None:
        return "has called no collective yet: computing, asleep or stuck", 0.0
    text = f"in no collective since {last}, {AGO} ago{note}: computing, asleep or stuck"
    return text, max(0.0, now - last.time)


def is_stopped(record: RankRecord) -> bool:
    """Whether the process is stopped, and others may need it."""
    return record.is_stopped and record.state is not RankState.LEFT
