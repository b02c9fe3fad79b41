"""Explain why ranks wait: find the odd one out, and report its activity.

All functions take records of ranks and communicate nothing. A waiting rank waits for other ranks:
those of its group that have not called the same collective, or the other end of a message. To
follow these waits from rank to rank leads to a rank that waits for nobody, which is the odd one
out, or into a circle. A rank whose process is stopped is always an odd one out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from mpishard.communication.contract import matching
from mpishard.communication.contract.call import Call, MessageWait, of_group, place_after
from mpishard.communication.contract.matching import divergence, members_of
from mpishard.communication.contract.status import RankRecord, RankState

_SENTENCES = 3
_AGO = "{ago}"
"""A placeholder for a time, which may differ between ranks that otherwise do the same."""


def describe_stall(records: Sequence[RankRecord]) -> str:
    """Explain why a job does not go on: which ranks wait for which, and a table of all ranks.

    Parameters
    ----------
    records : sequence of RankRecord
        One for each rank of the root world.

    Returns
    -------
    str
        The verdict of one or a few sentences, a line "What each rank does, and its last
        collectives:", and the table; no line break at the end.
    """
    now = time.time()
    return (
        f"{verdict(records, now)}\nWhat each rank does, and its last collectives:\n"
        f"{rank_table(records, now)}"
    )


def longest_waiting(records: Sequence[RankRecord]) -> int | None:
    """Return the rank that reports for all, which has waited longest; None if no rank waits.

    A rank that is stopped or gone cannot report. In ``init`` the first rank reports, if the state
    of all ranks is known or one is stopped.
    """
    able = [r for r in records if r.is_alive and not r.is_stopped]
    waiting = [r for r in able if r.waited]
    if not waiting and (all(r.is_known for r in records) or any(map(_is_stopped, records))):
        waiting = [r for r in able if r.state is RankState.STARTED]
    return max(waiting, key=lambda r: (r.waited, -r.rank)).rank if waiting else None


def verdict(records: Sequence[RankRecord], now: float) -> str:
    """Name the odd ones out and their activity, in a few sentences.

    If there is no odd one out, name the circle, or say that all ranks have called.

    Parameters
    ----------
    records : sequence of RankRecord
        One for each rank of the root world.
    now : float
        Seconds since the epoch.
    """
    waiting = [record for record in records if _is_waiting(record)]
    waits_for = _waits_for_each(records)
    wanted = {rank for ranks in waits_for.values() for rank in ranks}
    # Only in ``init`` may a rank have no page yet.
    is_in_init = any(record.state is RankState.STARTED for record in records)
    odd = [
        record
        for record in records
        if _is_stopped(record)
        or (is_in_init and record.is_known and record.state is None)
        or (
            record.is_known
            and not _is_waiting(record)
            and (record.rank in wanted or not (record.is_alive or record.has_left))
        )
    ]
    if odd:
        names = {record.rank for record in odd}
        # Ranks that wait for the odd ones directly; the others wait for these, and follow from
        # them.
        those = [r for r in waiting if names & set(waits_for[r.rank])] or waiting
        sentences = [*_waits(those), *_odd(odd, those, now)]
    elif waiting:
        sentences = _circle_text(waits_for, records) or _all_called(waiting, records)
    else:
        sentences = ["No rank is known to wait for another."]
    return _text(sentences)


def unfinished(records: Sequence[RankRecord], now: float) -> str:
    """Name the ranks that have not finished and their activity, in a few sentences.

    Parameters
    ----------
    records : sequence of RankRecord
        One for each rank of the root world.
    now : float
        Seconds since the epoch.
    """
    late = [r for r in records if r.is_known and (not r.has_left or _is_stopped(r))]
    if not late:
        return "for ranks of other nodes, of which nothing is known here"
    waiting = [record for record in late if _is_waiting(record)]
    others = [record for record in late if not _is_waiting(record)]
    sentences = [*_waits(waiting), *(_odd(others, waiting, now) if others else ())]
    return f"for {_who(late)}. {_text(sentences)}"


def _text(sentences: Sequence[str]) -> str:
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences if sentence)


def _is_waiting(record: RankRecord) -> bool:
    return record.waits is not None and not (_is_stopped(record) or record.has_left)


def _waits_for_each(records: Sequence[RankRecord]) -> dict[int, list[int]]:
    """Return the ranks that each waiting rank waits for, by rank."""
    found = {}
    for record in filter(_is_waiting, records):
        wait = record.waits
        if isinstance(wait, MessageWait):
            found[record.rank] = [wait.peer]
            continue
        assert wait is not None
        known = [r for r in members_of(wait.group, records) if r.is_known]
        others = [r for r in known if r.rank != record.rank]
        late = [r.rank for r in others if r.last_of(wait.group) < wait.sequence]
        # If all have called it, data move only while ranks wait, or call progress(): so this rank
        # waits for those that do neither.
        found[record.rank] = late or [
            r.rank for r in others if r.waits is None and not r.waited and not r.has_left
        ]
    return found


def _waits(waiting: Sequence[RankRecord]) -> list[str]:
    """Return sentences on the waiting ranks, the most frequent wait first."""
    groups = sorted(matching.grouped(waiting, _wait_text).items(), key=lambda item: -len(item[1]))
    return [
        f"{_who(same)} wait{'' if len(same) > 1 else 's'} {text}, "
        f"for {_seconds_text(r.waited for r in same)}."
        for text, same in groups[:_SENTENCES]
    ]


def _who(records: Sequence[RankRecord]) -> str:
    return matching.who([record.rank for record in records])


def _odd(odd: Sequence[RankRecord], waiting: Sequence[RankRecord], now: float) -> list[str]:
    """Return sentences on the odd ones out, and advice."""
    waits = [r.waits for r in waiting if isinstance(r.waits, Call)]
    groups = matching.grouped(odd, lambda record: _instead(record, waits))
    sentences = [f"{_activity(same, text, now)}." for text, same in groups.items()][:_SENTENCES]
    return [*sentences, _advice(odd, waits, waiting)]


def _instead(record: RankRecord, waits: Sequence[Call]) -> str:
    """Return the activity of an odd rank, to stand after its name.

    The text is the same for ranks that do the same.
    """
    behind = max((w.sequence - record.last_of(w.group) for w in waits), default=0)
    note = f", {behind} collectives behind" if behind > 1 else ""
    note += " (called, but not waited for, there)" if waits and behind <= 0 else ""
    text = _doing(record, note)
    if _is_stopped(record):
        return f" is {text}; continue it with kill -CONT {record.pid}, or end it"
    return f" {text}" if record.has_left else f": {text}"


def _advice(odd: Sequence[RankRecord], waits: Sequence[Call], waiting: Sequence[RankRecord]) -> str:
    """Return advice on the function of this package that every rank must call; may be empty."""
    if any(map(_is_stopped, odd)):
        return ""
    records = sorted([*odd, *waiting], key=lambda record: record.rank)
    for group in dict.fromkeys(wait.group for wait in waits):
        sentence = divergence(records, group)
        if sentence:
            return f"{sentence}."
    method = waits[0].method if waits else ""
    have_left = all(record.has_left for record in odd)
    elsewhere = any(r.last is None or r.last.method != method for r in odd)
    if method and (have_left or elsewhere):
        return f"{method} is collective: every rank calls it, equally often."
    return ""


def _circle_text(waits_for: dict[int, list[int]], records: Sequence[RankRecord]) -> list[str]:
    """Return sentences on a circle of ranks, each of which waits for the next; may be empty."""
    try:
        # It raises an error that has one of the circles, which saves a search of our own.
        TopologicalSorter(waits_for).prepare()
    except CycleError as error:
        *circle, _ = reversed(error.args[1])
    else:
        return []
    # Begun at the lowest rank, so that all ranks report the circle in the same words.
    first = circle.index(min(circle))
    circle = [*circle[first:], *circle[:first]]
    waits = {record.rank: record for record in records}
    edges = [
        f"rank {rank} waits {_wait_text(waits[rank])}"
        + f", for rank {following}" * isinstance(waits[rank].waits, Call)
        for rank, following in zip(circle, [*circle[1:], circle[0]], strict=True)
    ]
    shown = edges if len(edges) <= _SENTENCES + 1 else [*edges[:_SENTENCES], "and so on"]
    kinds = {type(waits[rank].waits) for rank in circle}
    if kinds == {Call}:
        advice = (
            "These ranks call the collectives of different groups in different orders: call them "
            "in one order on all ranks."
        )
    elif Call in kinds:
        advice = (
            "These ranks call a collective and exchange messages in different orders: one that "
            "waits for a message does not come to the collective that its sender is in."
        )
    else:
        advice = (
            "Each waits for a message that another would send later: send before you receive, or "
            "use receive_async."
        )
    return [f"{'; '.join(shown)}.", advice]


def _all_called(waiting: Sequence[RankRecord], records: Sequence[RankRecord]) -> list[str]:
    """Return sentences on a wait with no rank missing: calls that differ, or stuck data."""
    sentences = _waits(waiting)
    for wait in (r.waits for r in waiting if isinstance(r.waits, Call)):
        calls = {
            record.rank: call
            for record in members_of(wait.group, records)
            for call in record.calls_of(wait.group)
            if call.sequence == wait.sequence
        }
        difference = matching.differing_methods(calls) or matching.differing_calls(calls)
        if difference:
            return [*sentences, f"These do not belong together: {difference}."]
    unknown = [record for record in records if not record.is_known]
    if unknown:
        return [*sentences, f"Nothing is known of {_who(unknown)}, on other nodes."]
    numbers = {r.waits.sequence for r in waiting if isinstance(r.waits, Call)}
    hosts = sorted({record.host for record in waiting})
    called = "Every rank has called what it waits for"
    why = "its data are under way, or what carries them is stuck"
    if len(hosts) > 1:
        where = f"{', '.join(hosts[:-1])} and {hosts[-1]}"
        why = f"look at the network between {where}, which loses data or is down"
        if len(numbers) == 1:  # otherwise one rank has got the data of an earlier one
            both = "both" if len(waiting) == 2 else "all"
            called = f"{_who(waiting)} are {both} in collective {numbers.pop()}"
    return [*sentences, f"{called}: {why}."]


def describe_departure(
    rank: int,
    last: int,
    waiting: int,
    awaited: Call | MessageWait,
    records: Sequence[RankRecord],
) -> str:
    """Describe the departure of a rank for which another one waits, with advice to the user.

    Parameters
    ----------
    rank, last : int
        The rank that left, by its number in the root world, and the number of its last collective
        in the world that it left: that of ``awaited``.
    waiting : int
        The rank that waits, by its number in the root world.
    awaited : Call or MessageWait
        The collective or message that it waits for.
    records : sequence of RankRecord
        Those of all ranks; empty if they cannot be read.
    """
    text = (
        f"rank {rank} left after collective {last}{of_group(awaited.group)}, while rank "
        f"{waiting} waits {awaited.where}. "
    )
    # The waiting rank may not have written its wait to its page yet.
    seen = [replace(r, waits=awaited) if r.rank == waiting else r for r in records]
    circle = _circle_text(_waits_for_each(seen), seen)
    if circle:
        return text + _text(circle).removesuffix(".")
    if not isinstance(awaited, Call) or not awaited.method:
        text += f"Look for a loop or a branch that ends earlier on rank {rank}"
    else:
        text += (
            f"{awaited.method} is collective: look for a loop or a branch in which rank {rank} "
            "calls it less often"
        )
    diverged = divergence(records, awaited.group)
    return text + (f"; {diverged}" if diverged else "")


# ------------------------------------------------------------------------------------- the table


def rank_table(records: Sequence[RankRecord], now: float, *, calls: int = 3) -> str:
    """Return the activity of each rank, and its last collectives below, newest last.

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
    is_each_alone = len(records) <= matching.ONE_EACH
    groups = matching.grouped(
        records, lambda r: (_doing(r), _last_calls(r, calls), r.rank if is_each_alone else -1)
    )
    # First without collectives, then without ranks: the activity says most.
    if sum(1 + len(lines) for _, lines, _ in groups) > matching.MOST_LINES:
        groups = matching.grouped(records, lambda r: (_doing(r), (), -1))
    entries = list(groups.items())
    shown = len(entries) if len(entries) <= matching.MOST_LINES else matching.MOST_LINES - 1
    table = []
    for (text, lines, _), same in entries[:shown]:
        table += [f"  {_activity(same, f': {text}', now)}", *lines]
    others = [record for _, same in entries[shown:] for record in same]
    if others:
        table.append(f"  {_who(others)}: each does something else again")
    return "\n".join(table)


def _last_calls(record: RankRecord, count: int) -> tuple[str, ...]:
    # Without the collective that the rank waits in, which the line above has.
    awaited = record.waits if record.is_alive and not record.has_left else None
    calls = [c for c in record.calls[-count:] if c != awaited]
    return tuple(f"    {c.sequence}: {c.text}" for c in calls)


def _activity(same: Sequence[RankRecord], text: str, now: float) -> str:
    """Return the names of the ranks, and their activity ``text`` with the seconds for `_AGO`."""
    last = ((r.waited, r.last.time if r.last else now) for r in same)
    seconds = _seconds_text(waited or max(0.0, now - time) for waited, time in last)
    return f"{_who(same)}{text.replace(_AGO, seconds)}"


def _seconds_text(seconds: Iterable[float]) -> str:
    """Return a time, or the range of several: ``31 s``, ``28 to 31 s``."""
    texts = [f"{s:.1f}" if s < 10 else f"{s:.0f}" for s in sorted(seconds)]
    return f"{texts[0]} s" if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]} s"


def _wait_text(record: RankRecord) -> str:
    """Return the collective or message that a rank waits for, to stand after "waits"."""
    wait = record.waits
    if wait is None:
        return "in a collective that its log does not hold any more"
    return f"in {wait.full_text}" if isinstance(wait, Call) else wait.where


def _stopped_text(record: RankRecord) -> str:
    """Return the place where the process of a rank is stopped."""
    if record.state is None:
        where = "before or in init"
    elif record.state is RankState.STARTED:
        where = "in init"
    elif record.state is RankState.LEAVING:
        where = "while it waits for the others to leave"
    elif record.waits is not None:
        is_message = isinstance(record.waits, MessageWait)
        where = f"{'while it waits ' if is_message else ''}{_wait_text(record)}"
    else:
        where = place_after(record.last, "in or after")
    return f"stopped (SIGSTOP, Ctrl-Z or a debugger) {where}"


def _doing(record: RankRecord, note: str = "") -> str:
    """Return the activity of a rank, with `_AGO` in place of the seconds.

    A ``note`` on a rank that is in no collective stands behind its last one.
    """
    last, after = record.last, place_after(record.last)
    if _is_stopped(record):
        return _stopped_text(record)
    if not record.is_known:
        return "on another node, whose status pages cannot be read from here"
    if record.state is None:
        return "not yet come to init"
    if record.has_left:
        return f"left {after}"
    if not record.is_alive:
        return f"its process is gone (killed, or out of memory?), {after}"
    if record.state is RankState.STARTED:
        return "in init, where ranks wait for each other"
    if record.state is RankState.REPORTED:
        return f"reported why the job ends, {after}"
    if record.waited:
        return f"waits {_AGO} {_wait_text(record)}"
    if last is None:
        return "has called no collective yet: computing, asleep or stuck"
    return f"in no collective since {last.full_text}, {_AGO} ago{note}: computing, asleep or stuck"


def _is_stopped(record: RankRecord) -> bool:
    """Return whether the process is stopped, and others may need it."""
    return record.is_stopped and record.state is not RankState.LEFT
