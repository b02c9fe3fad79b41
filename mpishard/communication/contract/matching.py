"""Compare the ranks' calls, find the odd one out, and name ranks and groups in reports."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from mpishard.base import CollectiveMismatchError, OutMismatchError
from mpishard.communication.contract.call import GROUP_BYTES, Call, CollectiveKind, of_group
from mpishard.communication.contract.status import RankRecord

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

_FEW_IN_STEPS = 5
_SUBJECT = "the model or its unit"
_SAME_ORDER = "every rank must use its models, and the layers of each, in the same order"
_IN_ARENAS = (
    CollectiveKind.REDUCE_INTO,
    CollectiveKind.REDUCE_IN_PLACE,
    CollectiveKind.GATHER_IN_PLACE,
)
_LABEL = re.compile(r"[^()]+\(ranks? ([0-9, by-]+)\)")

ONE_EACH = 8
"""Number of ranks above which ranks that do the same share a line or an entry of a table."""
MOST_LINES = 40
"""Largest number of lines in a table of all ranks."""


def check_calls(
    calls: Sequence[Call],
    ranks: Sequence[int] | None = None,
    group: str = "",
    divergence: Callable[[int], str] = lambda sequence: "",
    subject_text: Callable[[int], str] = "subject {}".format,
) -> None:
    """Refuse calls, one per rank in rank order, that do not belong together.

    Parameters
    ----------
    calls : sequence of Call
        The call of each rank of one world.
    ranks : sequence of int, optional
        The numbers of these ranks in the root world, for messages. Default: 0, 1, ..
    group : str
        The label of this world in messages; empty for a root world.
    divergence : callable
        Takes the number of a collective; returns a sentence on the first divergence of the ranks up
        to it, which is empty if there is none.
    subject_text : callable
        Takes `Call.subject`; returns the name of the model and the unit.

    Raises
    ------
    CollectiveMismatchError
        If kinds differ, or an argument differs that must be alike in this collective. The message
        names the odd ones out, if most ranks agree, and lists each rank's call.
    OutMismatchError
        If the rows of an ``out`` of all_gather are not the sum of the ranks' rows.
    """
    numbers = range(len(calls)) if ranks is None else ranks
    first = calls[0]
    same = first.sequence, first.description
    # The usual case. A description has every argument that must be alike, so only the rows of an
    # ``out`` remain to be compared.
    are_same = all((c.sequence, c.description) == same for c in calls)
    if are_same and first.out_rows < 0:
        return
    by_rank = dict(zip(numbers, calls, strict=True))
    what = "" if are_same else _difference(calls, subject_text)[0]
    if what:
        sentences = [divergence(first.sequence), differing_calls(by_rank, subject_text)]
        if what == "kind or order" and not sentences[0]:
            sentences[0] = differing_methods(by_rank)
        if what == _SUBJECT:
            sentences.append(_SAME_ORDER)
        more = "".join(f". {text[0].upper()}{text[1:]}" for text in sentences if text)
        raise CollectiveMismatchError(
            f"the ranks' collectives{of_group(group)} do not match in {what}; no data was mixed"
            f"{more}:\n{_listed(by_rank, subject_text)}"
        )
    if first.kind is CollectiveKind.ALL_GATHER:
        # Ranks may send different numbers of rows, so no rank could check its ``out`` alone.
        rows = [call.shape[0] for call in calls if call.shape]
        # The first rank in order, so that all ranks raise the same message.
        for rank, call in by_rank.items():
            if call.out_rows not in (-1, sum(rows)):
                raise OutMismatchError(
                    f"all_gather{of_group(group)}: out on rank {rank} has {call.out_rows} rows; "
                    f"the ranks send {rows}, {sum(rows)} in all"
                )


def differing_methods(calls: Mapping[int, Call], seen: Counter[str] | None = None) -> str:
    """Name the functions of this package that ranks called for one collective, if they differ.

    Parameters
    ----------
    calls : mapping of int to Call
        By world rank.
    seen : Counter of str, optional
        How often each function was called before. If equally many ranks called two functions, the
        rarer one is named as the odd one.

    Returns
    -------
    str
        A sentence without its end, or nothing. The function that fewest ranks called comes first.
    """
    by_method = grouped(calls, lambda rank: calls[rank].method)
    if len(by_method) < 2:
        return ""
    before = seen or Counter()
    # The method is empty for a rank that called the collective itself, which comes last.
    # The rarer call is the likelier mistake: functions of a training step were seen often before.
    methods = sorted(by_method, key=lambda m: (not m, len(by_method[m]), before[m]))
    called = []
    for method in methods:
        ranks, call = by_method[method], calls[by_method[method][0]]
        what = "it" if method == methods[0] else method or f"{call.kind.label} itself"
        called.append(f"{who(ranks)} called {what} at {call.site}")
    return f"{methods[0]} is collective: {', '.join(called)}"


def divergence(records: Sequence[RankRecord], group: str, upto: int | None = None) -> str:
    """Name the first collective that ranks of ``group`` called in different functions, if any.

    Collectives of one kind and shape match whatever their purpose. So ranks that have diverged
    may go on for a while before a mismatch is found.

    Parameters
    ----------
    records : sequence of RankRecord
        One for each rank of the root world.
    group : str
        The world's name.
    upto : int, optional
        Look only at collectives up to this number.
    """
    histories = {
        record.rank: calls
        for record in members_of(group, records)
        if record.is_known and (calls := {call.sequence: call for call in record.calls_of(group)})
    }
    if len(histories) < 2:
        return ""
    # A call log has the last 256 collectives, and ranks may be at different ones.
    common = set.intersection(*map(set, histories.values()))
    for sequence in sorted(s for s in common if upto is None or s <= upto):
        at_once = {rank: calls[sequence] for rank, calls in histories.items()}
        if len({call.method for call in at_once.values()}) > 1:
            seen = Counter(call.method for calls in histories.values() for call in calls.values())
            sentence = differing_methods(at_once, seen)
            return f"the ranks diverged at collective {sequence}{of_group(group)}: {sentence}"
    return ""


def differing_calls(
    calls: Mapping[int, Call], subject_text: Callable[[int], str] = "subject {}".format
) -> str:
    """Name the ranks whose call differs from the majority's; empty if there is no such rank.

    ``subject_text`` as in `check_calls`.
    """
    what, values = _difference(list(calls.values()), subject_text)
    if not what:
        return ""
    most, count = Counter(values).most_common(1)[0]
    # Without a majority no side is the odd one. Two models that are no longer known have one name.
    if not len(values) / 2 < count < len(values):
        return ""
    odd = {rank: v for rank, v in zip(calls, values, strict=True) if v != most}
    given = ", ".join(dict.fromkeys(odd.values()))
    rest = [rank for rank in calls if rank not in odd]
    is_odd = "is the odd one out" if len(odd) == 1 else "are the odd ones out"
    if what == "counts":  # only their hash is known
        return f"{who(list(odd))} {is_odd}"
    return f"{who(list(odd))} {is_odd}: {given}, where {who(rest)} gave {most}"


def _listed(calls: Mapping[int, Call], subject_text: Callable[[int], str]) -> str:
    """Return a line for each rank, or in large worlds one for all ranks that do the same.

    If the ranks' calls belong to different models or units, the lines name these.
    """
    # Left out if they agree, because a line for each rank is long enough without it.
    subjects_differ = len({call.subject for call in calls.values()}) > 1

    def text(rank: int) -> str:
        call = calls[rank]
        name = subject_text(call.subject) if subjects_differ else ""
        what = f"{call} of {name}" if name else f"{call}"
        return f"collective {call.sequence}, {what}" + f" at {call.place}" * bool(call.filename)

    alike = grouped(calls, lambda rank: (text(rank), rank if len(calls) <= ONE_EACH else -1))
    lines = [f"  {who(ranks)}: {text}" for (text, _), ranks in alike.items()]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"  and {len(lines) - MOST_LINES} more"]
    return "\n".join(lines)


def _difference(calls: Sequence[Call], subject_text: Callable[[int], str]) -> tuple[str, list[str]]:
    """Return the first property that must not differ and does, and its value on each rank.

    Without a difference the property is an empty string.
    """
    kind, sequence = calls[0].kind, calls[0].sequence
    # First, because arguments of different collectives have nothing to do with each other.
    if any(c.kind is not kind or c.sequence != sequence for c in calls):
        return "kind or order", [f"collective {c.sequence}, {c.kind.label}" for c in calls]
    # Before shapes, which differ only because the models do.
    if len({c.subject for c in calls}) > 1:
        return _SUBJECT, [subject_text(c.subject) or "no model" for c in calls]
    alike: dict[str, Sequence[object]] = {"operation": [c.operation for c in calls]}
    # Before shapes, too: parts of other arenas have other lengths.
    alike["arena"] = [f"arena {c.arena}" if c.arena else "no arena" for c in calls]
    if kind in _IN_ARENAS:
        parts = [f"elements {c.start} to {c.start + c.size}" for c in calls]
        alike["part of the arena"] = parts
    if kind in (
        CollectiveKind.ALL_REDUCE,
        CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.ALLOCATE_SHARED,
    ):
        alike["shape"] = [c.shape for c in calls]
        alike["counts"] = [c.counts_hash for c in calls]
    if kind not in (
        CollectiveKind.BROADCAST,
        CollectiveKind.SCATTER,
    ):  # in these a rank may pass no array
        alike["dtype"] = [c.dtype for c in calls]
    if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER):
        alike["trailing dims"] = [(c.shape or ())[1:] for c in calls]
    alike["root"] = [c.root for c in calls]
    if kind is CollectiveKind.BROADCAST:
        # Ranks that pass no array receive a new one of the shape that is sent.
        sent = calls[calls[0].root]
        arrays = [(sent if c.shape is None else c).array_text for c in calls]
        alike["shape or dtype of the arrays that receive"] = arrays
    for what, values in alike.items():
        if len(set(values)) > 1:
            return what, [getattr(value, "name", str(value)) for value in values]
    return "", []


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by their key, in their order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the numbers in rising order, with runs as ranges.

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
    """Return the ranks as the subject of a sentence: ``rank 1``, or ``ranks 0-3, 8``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"


def group_label(name: str, path: str, world_ranks: Sequence[int]) -> str:
    """Return the label of a group that was split off: the same on its ranks, and unique.

    Parameters
    ----------
    name : str
        The purpose of the group, such as an axis of a mesh; may be empty.
    path : str
        The number of the collective that split it off the root world; for a group of a group the
        numbers of both, and so on.
    world_ranks : sequence of int
        Its ranks, by their numbers in the root world.

    Examples
    --------
    >>> group_label("tensor", "17", [1, 3])
    'tensor group 17 (ranks 1, 3)'
    """
    words = f"{name} group {path}".strip()
    label = f"{words} ({who(world_ranks)})"
    # A status page has room for this many bytes of it, and readers parse the label.
    if len(label) > GROUP_BYTES:
        label = f"{words} ({len(world_ranks)} ranks, {min(world_ranks)} to {max(world_ranks)})"
    return label


def group_members(label: str) -> list[int] | None:
    """Return the ranks that `group_label` names; None if they were too many to be listed.

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


def members_of(group: str, records: Sequence[RankRecord]) -> list[RankRecord]:
    """Return the ranks of the world with the label ``group``.

    If the label does not list its ranks, these are the ranks whose last calls were made there.
    """
    if not group:
        return list(records)
    members = group_members(group)
    return [r for r in records if (r.calls_of(group) if members is None else r.rank in members)]
