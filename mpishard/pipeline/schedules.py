"""The seven schedules, the rules that they share, and their names."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence

from mpishard.base import as_count, as_integer, nearest, require_type
from mpishard.pipeline.clock import bubble_fraction, run_clock
from mpishard.pipeline.operations import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    IPipelineSchedule,
    Order,
    PipelineOperation,
    PipelineOperationType,
)

Row = tuple[PipelineOperationType, int, int]
"""Type, micro-batch and virtual stage of an operation."""


class RuleSchedule(IPipelineSchedule):
    """A schedule that rules define, without a search.

    A subclass defines `_name`, `_operations` and the figures of its published bubble.
    """

    _name = ""
    _virtual_stages = 1
    _work: float = 1
    """W in the published bubble (P-1)/(WM+P-1)."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def virtual_stages_per_rank(self) -> int:
        return self._virtual_stages

    def get_schedule(self, stage_id: int, num_stages: int, num_micro_batches: int) -> Order:
        # Here and not in the rules, so that each rule may rely on its arguments.
        num_stages = as_count("num_stages", num_stages)
        num_micro_batches = as_count("num_micro_batches", num_micro_batches)
        if not 0 <= as_integer("stage_id", stage_id) < num_stages:
            raise ValueError(
                f"stage_id must be in [0, {num_stages}), the ranks of the pipeline; got {stage_id}"
            )
        return self._operations(stage_id, num_stages, num_micro_batches)

    @abstractmethod
    def _operations(self, rank: int, num_stages: int, num_micro_batches: int) -> Order:
        """Return the operations of one rank, for checked arguments."""

    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float | None:
        """Return the paper's bubble for equal forward, backward-input and backward-weight times.

        It is None if the formula does not cover these numbers of ranks and micro-batches.
        """
        if not self._is_published(num_stages, num_micro_batches):
            return None
        # P - 1 steps are spent on filling and draining.
        return (num_stages - 1) / (self._work * num_micro_batches + num_stages - 1)

    def _is_published(self, num_stages: int, num_micro_batches: int) -> bool:
        """Return whether the paper's formula holds for these numbers."""
        return True

    def estimate_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float:
        """Return the published fraction of time that a rank waits; 0 for P <= 1 or M <= 0.

        Outside the formula's range, the fraction is measured on the virtual clock, with equal
        times and no communication.
        """
        num_stages = as_integer("num_stages", num_stages)
        num_micro_batches = as_integer("num_micro_batches", num_micro_batches)
        if num_stages <= 1 or num_micro_batches <= 0:
            return 0.0
        published = self.published_bubble_fraction(num_stages, num_micro_batches)
        if published is not None:
            return published
        return bubble_fraction(run_clock(self, num_stages, num_micro_batches))


def with_phases(rows: Sequence[Row], warmup: int, cooldown: int) -> list[PipelineOperation]:
    """Return operations of ``rows``, with marks on the first ``warmup`` and last ``cooldown``."""
    steady_until = len(rows) - cooldown
    return [
        PipelineOperation(
            kind, micro_batch, position < warmup, position >= steady_until, virtual_stage
        )
        for position, (kind, micro_batch, virtual_stage) in enumerate(rows)
    ]


def _alternated(forwards: Sequence[Row], backwards: Sequence[Row], warmup: int) -> list[Row]:
    """Return ``warmup`` forwards, then forwards and backwards in turn, then other backwards."""
    rows = list(forwards[:warmup])
    # There are more backwards than forwards left; the rest follow below.
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        rows += [forward, backward]
    return rows + list(backwards[len(backwards) - warmup :])


class GPipeSchedule(RuleSchedule):
    """All forwards, then all backwards, the last micro-batch first.

    Huang et al., "GPipe: Efficient training of giant neural networks using pipeline parallelism",
    2019 (arXiv:1811.06965). Bubble (P-1)/(M+P-1); every rank holds the activations of all M
    micro-batches.

    Examples
    --------
    >>> from mpishard.pipeline import GPipeSchedule
    >>> [(str(op.type), op.micro_batch_index) for op in GPipeSchedule().get_schedule(0, 2, 2)]
    [('forward', 0), ('forward', 1), ('backward', 1), ('backward', 0)]
    """

    _name = "GPipe"

    def _operations(self, rank: int, num_stages: int, num_micro_batches: int) -> Order:
        forwards = [(FORWARD, m, 0) for m in range(num_micro_batches)]
        backwards = [(BACKWARD, m, 0) for m in reversed(range(num_micro_batches))]
        return with_phases(forwards + backwards, num_micro_batches, num_micro_batches)


class OneForwardOneBackwardSchedule(RuleSchedule):
    """After min(P-1-s, M) forwards of warm-up, rank s alternates one forward and one backward.

    Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021 (arXiv:2006.09503),
    as PipeDream-Flush. Bubble (P-1)/(M+P-1), which is GPipe's; rank s holds the activations of
    min(P-s, M) micro-batches at most, however many there are.
    """

    _name = "1F1B"

    def _operations(self, rank: int, num_stages: int, num_micro_batches: int) -> Order:
        # One micro-batch for each later stage fills the pipeline after this rank.
        warmup = min(num_stages - 1 - rank, num_micro_batches)
        forwards = [(FORWARD, m, 0) for m in range(num_micro_batches)]
        backwards = [(BACKWARD, m, 0) for m in range(num_micro_batches)]
        return with_phases(_alternated(forwards, backwards, warmup), warmup, warmup)


class _LoopedSchedule(RuleSchedule):
    """A schedule of V virtual stages per rank, with V chosen by the user."""

    def __init__(self, virtual_stages_per_rank: int = 2) -> None:
        count = as_integer("virtual_stages_per_rank", virtual_stages_per_rank)
        if count < 2:
            raise ValueError(
                f"virtual_stages_per_rank must be 2 or more, got {count}; with one stage per rank "
                "use OneForwardOneBackwardSchedule or GPipeSchedule"
            )
        self._virtual_stages = self._work = count


class Interleaved1F1BSchedule(_LoopedSchedule):
    """1F1B over V stages per rank: P micro-batches through one of them, then through the next.

    Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", SC 2021 (arXiv:2104.04473), section 2.2. Bubble (P-1)/(VM+P-1) if P divides M.
    Rank s holds activations of at most (V-1)P + 2(P-1-s) + 1 pairs of micro-batch and stage: on
    rank 0 those of 1F1B's P micro-batches times 1 + (P-1)/(PV). It sends V times the messages.

    The paper requires that P divides M. If it does not, the schedule is that of the next multiple
    of P, without the micro-batches that do not exist.

    Parameters
    ----------
    virtual_stages_per_rank : int
        V, 2 or more.

    Raises
    ------
    ValueError
        For fewer than 2 virtual stages.
    """

    _name = "Interleaved-1F1B"

    def _operations(self, rank: int, num_stages: int, num_micro_batches: int) -> Order:
        stages = range(self._virtual_stages)
        groups = range(-(-num_micro_batches // num_stages))
        forwards, backwards = [], []
        for group in groups:
            # P micro-batches fill the pipeline once; then the next virtual stage takes them.
            members = range(group * num_stages, (group + 1) * num_stages)
            forwards += [(FORWARD, m, v) for v in stages for m in members]
            backwards += [(BACKWARD, m, v) for v in reversed(stages) for m in members]
        # Twice 1F1B's warm-up, so that a rank does not wait for the backward of its last message.
        warmup = (self._virtual_stages - 1) * num_stages + 2 * (num_stages - 1 - rank)
        warmup = min(warmup, len(forwards))
        operations = with_phases(_alternated(forwards, backwards, warmup), warmup, warmup)
        # Dropping operations keeps the order of the others, so the schedule still comes to its end.
        return [op for op in operations if op.micro_batch_index < num_micro_batches]

    def _is_published(self, num_stages: int, num_micro_batches: int) -> bool:
        return num_micro_batches % num_stages == 0


class LoopedBFSSchedule(_LoopedSchedule):
    """Stage by stage, breadth first: all micro-batches forward, and all of them back.

    Lamy-Poirier, "Breadth-first pipeline parallelism", 2023 (arXiv:2211.05953). Bubble
    (P-1)/(VM+P-1) for M >= P. Every rank holds the activations of all M micro-batches; a stage's
    parameters are needed in only two runs of operations, one for each direction. Sharded
    parameters are therefore gathered only twice per step.

    Parameters
    ----------
    virtual_stages_per_rank : int
        V, 2 or more.

    Raises
    ------
    ValueError
        For fewer than 2 virtual stages.
    """

    _name = "Looped-BFS"

    def _operations(self, rank: int, num_stages: int, num_micro_batches: int) -> Order:
        stages = range(self._virtual_stages)
        members = range(num_micro_batches)
        forwards = [(FORWARD, m, v) for v in stages for m in members]
        backwards = [(BACKWARD, m, v) for v in reversed(stages) for m in members]
        return with_phases(forwards + backwards, len(forwards), len(backwards))

    def _is_published(self, num_stages: int, num_micro_batches: int) -> bool:
        return num_micro_batches >= num_stages


_F, _B, _W = FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT  # as the papers on zero bubbles call them


def _with_weights_put_off(
    num_micro_batches: int, warmup: int, most_pending: int, *, forward_first: bool
) -> list[PipelineOperation]:
    """Return a rank's operations, of which at most ``most_pending`` weight gradients are postponed.

    After ``warmup`` forwards, each round has one forward, if there is one left, one B, and the
    oldest W if more than ``most_pending`` would wait.
    """
    rows: list[Row] = [(_F, m, 0) for m in range(warmup)]
    # Only the weight gradients may wait: no other rank needs them, and the update comes last.
    steady_until = warmup
    for m in range(num_micro_batches):
        backward = [(_B, m, 0)] + [(_W, m - most_pending, 0)] * (m >= most_pending)
        if warmup + m < num_micro_batches:
            forward = [(_F, warmup + m, 0)]
            rows += forward + backward if forward_first else backward + forward
            steady_until = len(rows)
        else:
            rows += backward
    rows += [(_W, m, 0) for m in range(max(0, num_micro_batches - most_pending), num_micro_batches)]
    return with_phases(rows, warmup, len(rows) - steady_until)


class ZeroBubbleH1Schedule(RuleSchedule):
    """1F1B in which rank s postpones the weight gradients of up to s micro-batches.

    Bubble (P-1)/(3M+P-1) for M >= P and equal times: a third of 1F1B's. Rank s waits for the
    backward of min(P-s, M) micro-batches at most, as in 1F1B. With those that the postponed
    halves keep, it holds min(P, M), as rank 0 does in 1F1B.
    """

    _name = "ZB-H1"
    _work = 3

    def _operations(self, rank: int, num_stages: int, num_micro_batches: int) -> Order:
        warmup = min(num_stages - 1 - rank, num_micro_batches)
        return _with_weights_put_off(num_micro_batches, warmup, rank, forward_first=True)

    def _is_published(self, num_stages: int, num_micro_batches: int) -> bool:
        return num_micro_batches >= num_stages


class ZeroBubbleH2Schedule(RuleSchedule):
    """Rank s begins with 2(P-s)-1 forwards, and postpones up to 2s weight gradients.

    Bubble 0 for M >= 2P-1 and equal times: from its first operation to its last no rank waits.
    The ranks still begin one after the other, and the last to begin is the last to end: time is
    saved only if rank 0 begins the next step as soon as it has ended this one. Rank s waits for
    the backward of min(2(P-s)-1, M) micro-batches at most, and holds min(2P-1, M) with those
    that the postponed halves keep.
    """

    _name = "ZB-H2"
    _work = math.inf  # no bubble

    def _operations(self, rank: int, num_stages: int, num_micro_batches: int) -> Order:
        # About twice 1F1B's warm-up fills the bubble in front, and holds twice the activations.
        warmup = min(2 * (num_stages - rank) - 1, num_micro_batches)
        return _with_weights_put_off(num_micro_batches, warmup, 2 * rank, forward_first=False)

    def _is_published(self, num_stages: int, num_micro_batches: int) -> bool:
        return num_micro_batches >= 2 * num_stages - 1


_DOWN, _UP = 0, 1  # virtual stages: global stages r and 2P-1-r


class ZeroBubbleVSchedule(RuleSchedule):
    """Two stages per rank in the shape of a V: rank r has global stages r and 2P-1-r.

    Qi et al., "Zero bubble pipeline parallelism", 2023 (arXiv:2401.10241), and "Pipeline
    parallelism with controllable memory", 2024 (arXiv:2405.15362). Bubble 0 for M >= 2P-1 and
    equal times. Every rank holds at most 2P pairs of micro-batch and stage, each of half a rank's
    layers: the memory of P micro-batches, as rank 0 does in 1F1B.

    Rank 0 has the model's first *and* last layers, so that loss and tied embeddings stay on it.
    Activations between the two stages of rank P-1 are not sent.

    With fewer than 2P-1 micro-batches the schedule is that of 2P-1, without the micro-batches
    that do not exist.
    """

    _name = "ZB-V"
    _virtual_stages = 2
    _work = math.inf  # no bubble

    def global_stage(self, stage_id: int, virtual_stage_index: int, num_stages: int) -> int:
        """Return stage r for the way down, 2P-1-r for the way up."""
        return stage_id if virtual_stage_index == _DOWN else 2 * num_stages - 1 - stage_id

    def _operations(self, rank: int, num_stages: int, num_micro_batches: int) -> Order:
        rows = _OrderBuilder()
        # The rules below assume a pipeline that fills up, which takes 2P-1 micro-batches.
        count = max(num_micro_batches, 2 * num_stages - 1)
        # Forwards only, until the first micro-batch has come up again.
        rows.add(_DOWN, *[_F] * (2 * (num_stages - rank) - 1))
        for _ in range(rank):
            rows.add(_UP, _F)
            rows.add(_DOWN, _F)
        warmup = len(rows.rows)
        # The stage on the way up runs all three; gradients of the way down have not arrived yet.
        for _ in range(num_stages - rank):
            rows.add(_UP, _F, _B, _W)
        while rows.done[_UP, _F] < count:
            if rows.done[_DOWN, _F] < count:
                rows.add(_DOWN, _F)
            rows.add(_DOWN, _B, _W)
            rows.add(_UP, _F, _B, _W)
        steady_until = len(rows.rows)
        # B before W, because other ranks wait for it.
        for _ in range(rank):
            rows.add(_DOWN, _B)
            rows.add(_UP, _B)
        for _ in range(num_stages - rank):
            rows.add(_DOWN, _B, _W)
        for virtual_stage in (_UP, _DOWN):
            rows.add(virtual_stage, *[_W] * (count - rows.done[virtual_stage, _W]))
        operations = with_phases(rows.rows, warmup, len(rows.rows) - steady_until)
        return [op for op in operations if op.micro_batch_index < num_micro_batches]

    def _is_published(self, num_stages: int, num_micro_batches: int) -> bool:
        return num_micro_batches >= 2 * num_stages - 1


class _OrderBuilder:
    """Makes a rank's order: each type and virtual stage takes the micro-batches by rising index."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.done: Counter[tuple[int, PipelineOperationType]] = Counter()

    def add(self, virtual_stage: int, *kinds: PipelineOperationType) -> None:
        """Append operations, each for the first micro-batch that has not had it in this stage."""
        for kind in kinds:
            self.rows.append((kind, self.done[virtual_stage, kind], virtual_stage))
            self.done[virtual_stage, kind] += 1


_SCHEDULES: dict[str, type[RuleSchedule]] = {
    "gpipe": GPipeSchedule,
    "1f1b": OneForwardOneBackwardSchedule,
    "interleaved": Interleaved1F1BSchedule,
    "looped-bfs": LoopedBFSSchedule,
    "zb-h1": ZeroBubbleH1Schedule,
    "zb-h2": ZeroBubbleH2Schedule,
    "zb-v": ZeroBubbleVSchedule,
}

SCHEDULE_NAMES = tuple(_SCHEDULES)
"""The names that `schedule_by_name` takes."""


def _bare(name: str) -> str:
    return name.lower().translate(dict.fromkeys(map(ord, "-_ ")))


def about_schedule(name: str) -> str:
    """Return the end of an error about a schedule's name in a wrong place; empty for others."""
    if _bare(name) in ("dualpipe", "dualpipev"):
        return (
            f"; {name} is a pipeline schedule that mpishard does not have. zb-v, too, has two "
            "stages per rank and splits backward passes: strategy 'pipeline' or 'hybrid' takes "
            "schedule='zb-v'"
        )
    found = [key for key in SCHEDULE_NAMES if _bare(key) == _bare(name)]
    if not found:
        return ""
    return f"; it is a schedule: strategy 'pipeline' or 'hybrid' takes schedule={found[0]!r}"


def schedule_by_name(name: str, virtual_stages_per_rank: int | None = None) -> RuleSchedule:
    """Return the schedule of this name.

    Parameters
    ----------
    name : str
        One of `SCHEDULE_NAMES`, in upper or lower case; "-", "_" and blanks may be left out.
    virtual_stages_per_rank : int, optional
        Number for interleaved and looped-bfs. Default: 2. The other schedules have their own.

    Raises
    ------
    TypeError
        For a name that is not a string, or a number that is not an integer.
    ValueError
        For another name, or a number of virtual stages that the schedule cannot have.
    """
    require_type("schedule", name, str)
    found = next((kind for key, kind in _SCHEDULES.items() if _bare(key) == _bare(name)), None)
    if found is None:
        raise ValueError(
            f"schedule must be one of {', '.join(SCHEDULE_NAMES)}; got {name!r}"
            + (about_schedule(name) or nearest(name.lower(), SCHEDULE_NAMES))
        )
    if issubclass(found, _LoopedSchedule):
        return found(2 if virtual_stages_per_rank is None else virtual_stages_per_rank)
    schedule = found()
    own = schedule.virtual_stages_per_rank
    if virtual_stages_per_rank is not None and (
        as_integer("virtual_stages_per_rank", virtual_stages_per_rank) != own
    ):
        raise ValueError(
            f"{schedule.name} has {own} virtual stage{'s' * (own > 1)} per rank, got "
            f"{virtual_stages_per_rank}; interleaved and looped-bfs take 2 or more"
        )
    return schedule
