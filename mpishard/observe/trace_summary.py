"""Figures of a trace: the shares of computing, waiting and idling, and the cost of collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mpishard.observe.trace_reader import JobTrace, TraceEvent, TraceFacts

_PASSES = ("forward", "backward", "backward_input", "backward_weight")

_Spans = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RankShares:
    """The time of one rank in its steps; without steps, from its first event to its last.

    ``computing``, ``waiting`` and ``idle`` add up to ``seconds``. Idle time is neither inside a
    `span` nor inside a collective, a receive or a wait. ``in_flight`` is the time in which a
    collective or message of the rank was under way. ``hidden`` is the part of it in which the rank
    did not wait.

    Parameters
    ----------
    rank, node, steps : int
        The rank, its node, and its number of steps.
    seconds, computing, waiting, idle, in_flight, hidden : float
        Times in seconds.
    last : float
        The fraction of the collectives, recorded by other ranks too, to which it came last.
    """

    rank: int
    node: int
    steps: int
    seconds: float
    computing: float
    waiting: float
    idle: float
    in_flight: float
    hidden: float
    last: float


@dataclass(frozen=True, slots=True)
class CallTotals:
    """Cost, over all ranks, of the collectives or messages of one kind in one world or axis.

    Parameters
    ----------
    kind, group : str
        The method, such as ``all_reduce``; the mesh axis, or the world, on which it was called.
    calls, nbytes : int
        Number of calls of all ranks, and bytes of the arrays that they passed.
    in_flight, waiting : float
        Seconds, added up over all ranks.
    median_wait : float
        Median of the seconds that a rank waited in one call.
    """

    kind: str
    group: str
    calls: int
    nbytes: int
    in_flight: float
    waiting: float
    median_wait: float


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The result of `summarize_trace`.

    Parameters
    ----------
    ranks : list of RankShares
        The times of each rank, in rank order.
    calls : list of CallTotals
        The calls, those with the longest waits first.
    step_seconds : float
        Median over the steps of the time of the slowest rank, in seconds; NaN without steps.
    bubble : float
        Median over the steps of 1 - (mean computing time of a rank's passes) / (the longest time
        of a rank from its first pass to the end of its last); NaN without passes.
    uncertainty : float
        Largest error, in seconds, of the difference of times on different nodes.
    """

    ranks: list[RankShares]
    calls: list[CallTotals]
    step_seconds: float
    bubble: float
    uncertainty: float


class _RankEvents:
    """Spans of one rank, as (start, end) in microseconds."""

    def __init__(self) -> None:
        # By category: step, compute, wait, communication; and "pass", the passes in compute.
        self.spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.numbers: list[int] = []
        """The numbers of the steps, in the order of their spans."""

    def add(self, event: TraceEvent) -> None:
        times = event["ts"], event["ts"] + event["dur"]
        self.spans[event["cat"]].append(times)
        if event["cat"] == "step":
            self.numbers.append(event["args"]["step"])
        elif event["cat"] == "compute" and event["name"] in _PASSES:
            self.spans["pass"].append(times)


class _Calls:
    """Collectives and messages of all ranks."""

    def __init__(self) -> None:
        self._flights: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
        self._waits: dict[tuple[str, str], dict[object, float]] = defaultdict(dict)
        self._latest: dict[tuple[str, int], tuple[float, int, int]] = {}
        self._joined: dict[int, list[tuple[str, int]]] = defaultdict(list)

    def add(self, event: TraceEvent) -> None:
        given = event.get("args", {})
        if "group" not in given:
            return
        kind = event["name"], given.get("axis") or _family(given["group"])
        rank = event["pid"]
        if event["cat"] == "communication":
            self._flights[kind].append((event["dur"], given.get("bytes", 0)))
            if "sequence" in given:
                collective, at = (given["group"], given["sequence"]), event["ts"]
                time, last, count = self._latest.get(collective, (-1.0, rank, 0))
                # The rank that started last kept the others waiting.
                latest = (at, rank) if at > time else (time, last)
                self._latest[collective] = (*latest, count + 1)
                self._joined[rank].append(collective)
        else:
            occurrence = (rank, given["group"], given.get("sequence", event["ts"]))
            # A rank may wait for one call in several spans, and the median is that of calls.
            waits = self._waits[kind]
            waits[occurrence] = waits.get(occurrence, 0.0) + event["dur"]

    def share_last(self, rank: int) -> float:
        """Return the fraction of this rank's collectives to which it came last."""
        # Without collectives that only one rank recorded, to which no rank came last.
        met = [self._latest[c] for c in self._joined[rank] if self._latest[c][2] > 1]
        return sum(last == rank for _, last, _ in met) / len(met) if met else 0.0

    def totals(self) -> list[CallTotals]:
        """Return the totals by kind and group, those with the longest waits first."""
        found = []
        for (kind, group), flights in self._flights.items():
            waits = list(self._waits[kind, group].values())
            found.append(
                CallTotals(
                    kind,
                    group,
                    len(flights),
                    sum(nbytes for _, nbytes in flights),
                    sum(time for time, _ in flights) / 1e6,
                    sum(waits) / 1e6,
                    float(np.median(waits)) / 1e6 if waits else 0.0,
                )
            )
        return sorted(found, key=lambda totals: -totals.waiting)


def summarize_trace(trace: JobTrace) -> TraceSummary:
    """Compute the figures of a trace, whose ``endings`` are complete afterwards.

    Raises
    ------
    ValueError
        If a file is damaged.
    """
    ranks = {about["rank"]: _RankEvents() for about in trace.ranks}
    calls = _Calls()
    for event in trace.events():
        # Phase X is a span; other events name rows, or are the ends of arrows.
        if event["ph"] == "X":
            ranks[event["pid"]].add(event)
            calls.add(event)
    shares = [
        _shares(about, ranks[about["rank"]], calls.share_last(about["rank"]))
        for about in trace.ranks
    ]
    lengths, bubbles = _of_steps(list(ranks.values()))
    return TraceSummary(
        shares,
        calls.totals(),
        float(np.median(lengths)) / 1e6 if lengths else float("nan"),
        float(np.median(bubbles)) if bubbles else float("nan"),
        max(about["clock_uncertainty_us"] for about in trace.ranks) / 1e6,
    )


def _shares(about: TraceFacts, events: _RankEvents, last: float) -> RankShares:
    computing, waits, flights = (events.spans[c] for c in ("compute", "wait", "communication"))
    everything = [*computing, *waits, *flights]
    within = union(events.spans["step"])
    if not len(within) and everything:
        # Without steps, as in a script of collectives alone, the whole activity is one step.
        within = np.array([[min(s for s, _ in everything), max(e for _, e in everything)]])

    def covered(*spans: Iterable[tuple[float, float]]) -> float:
        """Return the seconds inside the steps that any of ``spans`` covers."""
        any_of = union([one for some in spans for one in some])
        both = union([*map(tuple, any_of), *map(tuple, within)])
        # |A and B| = |A| + |B| - |A or B|, because spans nest and overlap.
        return (_length(any_of) + _length(within) - _length(both)) / 1e6

    seconds = _length(within) / 1e6
    waiting = covered(waits)
    busy = covered(computing, waits)
    return RankShares(
        about["rank"],
        about["node"],
        len(events.numbers),
        seconds,
        computing=busy - waiting,
        waiting=waiting,
        idle=seconds - busy,
        in_flight=covered(flights),
        # In flight and not waited for: |flights or waits| - |waits|.
        hidden=covered(flights, waits) - waiting,
        last=last,
    )


def _of_steps(ranks: list[_RankEvents]) -> tuple[list[float], list[float]]:
    """Return the length of each step that all ranks have, and its bubble if it has passes.

    The k-th step is the same on every rank. It is found by its place, because step numbers begin
    anew with another model.
    """
    by_rank = []
    for events in ranks:
        passes, waits = union(events.spans["pass"]), union(events.spans["wait"])
        measured: list[list[float]] = []  # length, work, first start, last end
        previous = None
        for number, (start, end) in zip(events.numbers, events.spans["step"], strict=True):
            inside, blocked = _clipped(passes, start, end), _clipped(waits, start, end)
            # Passes that accumulate gradients have one number, and are one step.
            if number != previous:
                measured.append([0.0, 0.0, np.inf, -np.inf])
            previous, now = number, measured[-1]
            now[0] += end - start
            if len(inside):
                # A wait inside a pass, such as that for a gathered unit, is no work.
                any_of = union([*map(tuple, inside), *map(tuple, blocked)])
                now[1] += _length(any_of) - _length(blocked)
                now[2] = min(now[2], inside[0, 0])
                now[3] = max(now[3], inside[-1, 1])
        by_rank.append(measured)
    lengths, bubbles = [], []
    for found in zip(*by_rank, strict=False):  # a killed rank has fewer steps
        lengths.append(max(length for length, *_ in found))
        longest = max(end - start for _, _, start, end in found)
        if longest > 0:
            bubbles.append(1 - float(np.mean([work for _, work, *_ in found])) / longest)
    return lengths, bubbles


def union(spans: Iterable[tuple[float, ...]]) -> _Spans:
    """Return the union of ``spans``, shape (n, 2): ascending spans that do not touch."""
    ordered = np.array(sorted(spans), np.float64).reshape(-1, 2)
    if not len(ordered):
        return ordered
    # A span begins a new piece if it starts after all before it have ended.
    reach = np.maximum.accumulate(ordered[:, 1])
    begins = np.concatenate([[True], ordered[1:, 0] > reach[:-1]])
    ends = np.concatenate([begins[1:], [True]])
    return np.stack([ordered[begins, 0], reach[ends]], axis=1)


def _length(spans: _Spans) -> float:
    return float((spans[:, 1] - spans[:, 0]).sum())


def _clipped(spans: _Spans, start: float, end: float) -> _Spans:
    """Return the part of disjoint, ascending ``spans`` that lies in ``[start, end]``."""
    # Two binary searches, because a long run has many steps and millions of spans.
    low = int(np.searchsorted(spans[:, 1], start, "right"))
    high = int(np.searchsorted(spans[:, 0], end, "left"))
    return np.clip(spans[low:high], start, end)


def _family(group: str) -> str:
    """Return the name of a world without its color: groups of one split are counted together."""
    head, slash, tail = group.rpartition("/")
    return f"{head}{slash}{tail.partition('.')[0]}" if slash else group
