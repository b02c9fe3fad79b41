"""The table of what each rank does: ranks that do the same share an entry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpishard.communication.contract.matching import of_group, who
from mpishard.communication.contract.status import LoggedCall, MessageWait, RankRecord, RankState

__all__ = ["rank_table", "seconds_text", "stopped_text"]

_ONE_EACH = 8
"""Up to so many ranks each has an entry of its own."""
_MOST_LINES = 40


def rank_table(records: Sequence[RankRecord], now: float, *, calls: int = 3) -> str:
    """What each rank does, and its last collectives below, newest last.

    Parameters
    ----------
    records : sequence of RankRecord
        One for each rank.
    now : float
        Seconds since the epoch.
    calls : int
        Collectives to show of each, where the table is not longer than a screen with them.

    Returns
    -------
    str
        Indented lines, about 40 at most.
    """
    entries = [_entry(record, now, calls) for record in records]
    if len(records) > _ONE_EACH:
        entries = _merged(entries)
    if sum(1 + len(entry.calls) for entry in entries) > _MOST_LINES:
        entries = _merged([_entry(record, now, 0) for record in records])
    shown = entries if len(entries) <= _MOST_LINES else entries[: _MOST_LINES - 1]
    lines = [line for entry in shown for line in entry.lines()]
    if len(shown) < len(entries):
        others = [rank for entry in entries[len(shown) :] for rank in entry.ranks]
        lines.append(f"  {who(others)}: each does something else again")
    return "\n".join(lines)


def seconds_text(seconds: Iterable[float]) -> str:
    """A time, or the range of several: ``31 s``, ``28 to 31 s``."""
    texts = [f"{s:.1f}" if s < 10 else f"{s:.0f}" for s in sorted(seconds)]
    return f"{texts[0]} s" if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]} s"


def stopped_text(record: RankRecord) -> str:
    """The place where the process of a rank is stopped."""
    if record.state is None:
        where = "before or in init"
    elif record.state is RankState.STARTED:
        where = "in init"
    elif record.state is RankState.LEAVING:
        where = "while it waits for the others to leave"
    elif isinstance(record.waits, MessageWait):
        where = f"while it waits {record.waits}"
    elif record.waits is not None:
        where = f"in {record.waits}"
    else:
        where = f"in or after {record.calls[-1]}" if record.calls else "before any collective"
    return f"stopped (SIGSTOP, Ctrl-Z or a debugger) {where}"


@dataclass(frozen=True, slots=True)
class _Entry:
    """What some ranks do: ``text`` with ``{time}`` for how long, of which ``times`` has each."""

    ranks: tuple[int, ...]
    text: str
    times: tuple[float, ...]
    calls: tuple[str, ...]

    def lines(self) -> list[str]:
        text = self.text.format(time=seconds_text(self.times))
        return [f"  {who(self.ranks)}: {text}", *self.calls]


def _merged(entries: Iterable[_Entry]) -> list[_Entry]:
    alike: dict[object, list[_Entry]] = {}
    for entry in entries:
        alike.setdefault((entry.text, entry.calls), []).append(entry)
    return [
        _Entry(
            tuple(rank for entry in same for rank in entry.ranks),
            same[0].text,
            tuple(time for entry in same for time in entry.times),
            same[0].calls,
        )
        for same in alike.values()
    ]


def _entry(record: RankRecord, now: float, calls: int) -> _Entry:
    text, time = _standing(record, now)
    # The one that it waits in stands in the text.
    awaited = record.waits if record.is_alive and not record.has_left else None
    shown = [c for c in record.calls[-calls:] if c != awaited] if calls else []
    lines = tuple(
        f"    {c.call.sequence}: {c.call}{of_group(c.group)} at {c.call.place}" for c in shown
    )
    return _Entry((record.rank,), text, (time,), lines)


def _standing(record: RankRecord, now: float) -> tuple[str, float]:
    """What the rank does, with ``{time}`` for the seconds that come second."""
    last = record.calls[-1] if record.calls else None
    after = "before any collective" if last is None else f"after {_literal(str(last))}"
    if record.is_stopped and record.state is not RankState.LEFT:
        return _literal(stopped_text(record)), 0.0
    if not record.is_known:
        return "on another node, whose status pages cannot be read from here", 0.0
    if record.state is None:
        return "has not come to init", 0.0
    if record.has_left:
        return f"left {after}", 0.0
    if not record.is_alive:
        return f"its process is gone, {after}", 0.0
    if record.state is RankState.STARTED:
        return "in init, where ranks wait for each other", 0.0
    if record.state is RankState.REPORTED:
        return f"reported why the job ends, {after}", 0.0
    if record.waited:
        return f"waits {{time}} {_literal(_awaited(record))}", record.waited
    if last is None:
        return "has called no collective yet: computing, asleep or stuck", 0.0
    where = _literal(str(last))
    text = f"in no collective since {where}, {{time}} ago: computing, asleep or stuck"
    return text, max(0.0, now - last.time)


def _awaited(record: RankRecord) -> str:
    if isinstance(record.waits, LoggedCall):
        return f"in {record.waits}"
    return str(record.waits or "in a collective that its log does not hold any more")


def _literal(text: str) -> str:
    """``text`` as `str.format` gives it back."""
    return text.replace("{", "{{").replace("}", "}}")
