"""The seven schedules, what they share, and their names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from mpishard.arguments import as_integer, nearest
from mpishard.pipeline.clock import bubble_fraction, run_clock
from mpishard.pipeline.operations import (
    IPipelineSchedule,
    PipelineOperation,
    PipelineOperationType,
)

__all__ = [
    "SCHEDULE_NAMES",
    "GPipeSchedule",
    "Interleaved1F1BSchedule",
    "LoopedBFSSchedule",
    "OneForwardOneBackwardSchedule",
    "Row",
    "RuleSchedule",
    "ZeroBubbleH1Schedule",
    "ZeroBubbleH2Schedule",
    "ZeroBubbleVSchedule",
    "check_virtual_stages",
    "schedule_by_name",
    "with_phases",
]


Row = tuple[PipelineOperationType, int, int]
"""Type, micro-batch and virtual stage of an operation."""


class RuleSchedule(IPipelineSchedule):
    """A schedule that is written down by rules, without a search.

    A subclass gives `name`, `_operations` and `published_bubble_fraction`.
    """

    def get_schedule(
        self, stage_id: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        num_stages = as_integer("num_stages", num_stages)
        num_micro_batches = as_integer("num_micro_batches", num_micro_batches)
        for count, what in (
            (num_stages, "num_stages"),
            (num_micro_batches, "num_micro_batches"),
        ):
            if count < 1:
                raise ValueError(f"{what} must be 1 or more, got {count}")
        if not 0 <= as_integer("stage_id", stage_id) < num_stages:
            raise ValueError(
                f"stage_id must be in [0, {num_stages}), the ranks of the pipeline; got {stage_id}"
            )
        return self._operations(stage_id, num_stages, num_micro_batches)

    @abstractmethod
    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        """The operations of one rank, for arguments that are right."""

    @abstractmethod
    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float | None:
        """The paper's formula for equal forward, backward-input and backward-weight times.

        None where the numbers of ranks and micro-batches are not those that it speaks of.
        """

    def estimate_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float:
        """The published fraction of time that a rank waits; 0 for P <= 1 or M <= 0.

        Outside of the formula's range it is the fraction on the virtual clock, with equal times
        and no communication.
        """
        if num_stages <= 1 or num_micro_batches <= 0:
            return 0.0
        published = self.published_bubble_fraction(num_stages, num_micro_batches)
        if published is not None:
            return published
        return bubble_fraction(run_clock(self, num_stages, num_micro_batches))


def with_phases(rows: Sequence[Row], warmup: int, cooldown: int) -> list[PipelineOperation]:
    """Operations of ``rows``, of which the first ``warmup`` and last ``cooldown`` are marked."""
    steady_until = len(rows) - cooldown
    return [
        PipelineOperation(kind, micro_batch, place < warmup, place >= steady_until, virtual_stage)
        for place, (kind, micro_batch, virtual_stage) in enumerate(rows)
    ]


def check_virtual_stages(virtual_stages_per_rank: int) -> int:
    """The number of virtual stages of a schedule that needs several.

    Raises
    ------
    ValueError
        For fewer than two.
    """
    count = as_integer("virtual_stages_per_rank", virtual_stages_per_rank)
    if count < 2:
        raise ValueError(
            f"virtual_stages_per_rank must be 2 or more, got {count}; with one stage per rank use "
            "OneForwardOneBackwardSchedule or GPipeSchedule"
        )
    return count


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

    @property
    def name(self) -> str:
        return "GPipe"

    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        forwards = [(PipelineOperationType.FORWARD, m, 0) for m in range(num_micro_batches)]
        backwards = [
            (PipelineOperationType.BACKWARD, m, 0) for m in reversed(range(num_micro_batches))
        ]
        return with_phases(forwards + backwards, num_micro_batches, num_micro_batches)

    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float:
        return (num_stages - 1) / (num_micro_batches + num_stages - 1)


class OneForwardOneBackwardSchedule(RuleSchedule):
    """After min(P-1-s, M) forwards of warm-up, rank s alternates one forward and one backward.

    Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021 (arXiv:2006.09503),
    as PipeDream-Flush. Bubble (P-1)/(M+P-1), which is GPipe's; rank s holds the activations of
    min(P-s, M) micro-batches at most, however many there are.
    """

    @property
    def name(self) -> str:
        return "1F1B"

    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        warmup = min(num_stages - 1 - rank, num_micro_batches)
        forwards = [(PipelineOperationType.FORWARD, m, 0) for m in range(num_micro_batches)]
        backwards = [(PipelineOperationType.BACKWARD, m, 0) for m in range(num_micro_batches)]
        rows = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            rows += [forward, backward]
        rows += backwards[num_micro_batches - warmup :]
        return with_phases(rows, warmup, warmup)

    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float:
        return (num_stages - 1) / (num_micro_batches + num_stages - 1)


class Interleaved1F1BSchedule(RuleSchedule):
    """1F1B over V stages per rank: P micro-batches through one of them, then through the next.

    Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", SC 2021 (arXiv:2104.04473), section 2.2. Bubble (P-1)/(VM+P-1) where P divides
    M. Rank s holds activations of at most (V-1)P + 2(P-1-s) + 1 pairs of micro-batch and stage:
    on rank 0 those of 1F1B's P micro-batches times 1 + (P-1)/(PV). It sends V times the messages.

    The paper wants P to divide M. Where it does not, the schedule is that of the next multiple
    of P, with the micro-batches left out that are not there.

    Parameters
    ----------
    virtual_stages_per_rank : int
        V, 2 or more.

    Raises
    ------
    ValueError
        For fewer than 2 virtual stages.
    """

    def __init__(self, virtual_stages_per_rank: int = 2) -> None:
        self._virtual_stages = check_virtual_stages(virtual_stages_per_rank)

    @property
    def name(self) -> str:
        return "Interleaved-1F1B"

    @property
    def virtual_stages_per_rank(self) -> int:
        return self._virtual_stages

    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        stages = range(self._virtual_stages)
        groups = range(-(-num_micro_batches // num_stages))
        forwards, backwards = [], []
        for group in groups:
            members = range(group * num_stages, (group + 1) * num_stages)
            forwards += [(PipelineOperationType.FORWARD, m, v) for v in stages for m in members]
            backwards += [
                (PipelineOperationType.BACKWARD, m, v) for v in reversed(stages) for m in members
            ]
        # Twice 1F1B's warm-up: a rank does not wait for the backward of what it has just sent on.
        warmup = (self._virtual_stages - 1) * num_stages + 2 * (num_stages - 1 - rank)
        warmup = min(warmup, len(forwards))
        rows = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            rows += [forward, backward]
        rows += backwards[len(backwards) - warmup :]
        operations = with_phases(rows, warmup, warmup)
        return [op for op in operations if op.micro_batch_index < num_micro_batches]

    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float | None:
        if num_micro_batches % num_stages:
            return None
        return (num_stages - 1) / (self._virtual_stages * num_micro_batches + num_stages - 1)


class LoopedBFSSchedule(RuleSchedule):
    """Stage by stage, breadth first: all micro-batches forward, and all of them back.

    Lamy-Poirier, "Breadth-first pipeline parallelism", 2023 (arXiv:2211.05953). Bubble
    (P-1)/(VM+P-1) for M >= P. Every rank holds the activations of all M micro-batches; a stage's
    parameters are needed in two runs of operations only, one for each direction, which is what
    sharded parameters like: they are gathered once per run.

    Parameters
    ----------
    virtual_stages_per_rank : int
        V, 2 or more.

    Raises
    ------
    ValueError
        For fewer than 2 virtual stages.
    """

    def __init__(self, virtual_stages_per_rank: int = 2) -> None:
        self._virtual_stages = check_virtual_stages(virtual_stages_per_rank)

    @property
    def name(self) -> str:
        return "Looped-BFS"

    @property
    def virtual_stages_per_rank(self) -> int:
        return self._virtual_stages

    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        stages = range(self._virtual_stages)
        members = range(num_micro_batches)
        forwards = [(PipelineOperationType.FORWARD, m, v) for v in stages for m in members]
        backwards = [
            (PipelineOperationType.BACKWARD, m, v) for v in reversed(stages) for m in members
        ]
        return with_phases(forwards + backwards, len(forwards), len(backwards))

    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float | None:
        if num_micro_batches < num_stages:
            return None
        return (num_stages - 1) / (self._virtual_stages * num_micro_batches + num_stages - 1)


_F = PipelineOperationType.FORWARD
_B = PipelineOperationType.BACKWARD_INPUT
_W = PipelineOperationType.BACKWARD_WEIGHT


class _BackwardHalves:
    """Appends a rank's B in order, and each W when ``most_pending`` others wait already."""

    def __init__(self, rows: list[Row], most_pending: int, num_micro_batches: int) -> None:
        self._rows = rows
        self._most_pending = most_pending
        self._num_micro_batches = num_micro_batches
        self._num_inputs = 0
        self._num_weights = 0

    def go_back(self) -> None:
        """The next B, and the oldest W if too many would wait."""
        self._rows.append((_B, self._num_inputs, 0))
        self._num_inputs += 1
        if self._num_inputs - self._num_weights > self._most_pending:
            self._rows.append((_W, self._num_weights, 0))
            self._num_weights += 1

    def finish(self) -> None:
        """All that is left."""
        while self._num_inputs < self._num_micro_batches:
            self.go_back()
        for micro_batch in range(self._num_weights, self._num_micro_batches):
            self._rows.append((_W, micro_batch, 0))


class ZeroBubbleH1Schedule(RuleSchedule):
    """1F1B in which rank s puts off the parameters' gradients of up to s micro-batches.

    Bubble (P-1)/(3M+P-1) for M >= P and equal times: a third of 1F1B's. Rank s waits for the
    backward of min(P-s, M) micro-batches at most, as in 1F1B, and with what the halves that are
    put off keep it holds min(P, M): what rank 0 holds in 1F1B.
    """

    @property
    def name(self) -> str:
        return "ZB-H1"

    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        warmup = min(num_stages - 1 - rank, num_micro_batches)
        rows: list[Row] = [(_F, m, 0) for m in range(warmup)]
        backward = _BackwardHalves(rows, rank, num_micro_batches)
        for micro_batch in range(warmup, num_micro_batches):
            rows.append((_F, micro_batch, 0))
            backward.go_back()
        steady_until = len(rows)
        backward.finish()
        return with_phases(rows, warmup, len(rows) - steady_until)

    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float | None:
        if num_micro_batches < num_stages:
            return None
        return (num_stages - 1) / (3 * num_micro_batches + num_stages - 1)


class ZeroBubbleH2Schedule(RuleSchedule):
    """Rank s begins with 2(P-s)-1 forwards, and puts off parameters' gradients of up to 2s.

    Bubble 0 for M >= 2P-1 and equal times: from its first operation to its last no rank waits.
    The ranks still begin one after the other, and who begins last ends last: it is time won only
    for who lets rank 0 begin the next step when it is done with this one. Rank s waits for the
    backward of min(2(P-s)-1, M) micro-batches at most, and holds min(2P-1, M) with what the
    halves that are put off keep.
    """

    @property
    def name(self) -> str:
        return "ZB-H2"

    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        warmup = min(2 * (num_stages - rank) - 1, num_micro_batches)
        rows: list[Row] = [(_F, m, 0) for m in range(warmup)]
        backward = _BackwardHalves(rows, 2 * rank, num_micro_batches)
        for micro_batch in range(warmup, num_micro_batches):
            backward.go_back()
            rows.append((_F, micro_batch, 0))
        steady_until = len(rows)
        backward.finish()
        return with_phases(rows, warmup, len(rows) - steady_until)

    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float | None:
        return 0.0 if num_micro_batches >= 2 * num_stages - 1 else None


_DOWN, _UP = 0, 1  # virtual stages: global stages r and 2P-1-r


class ZeroBubbleVSchedule(RuleSchedule):
    """Two stages per rank in the shape of a V: rank r has global stages r and 2P-1-r.

    Qi et al., "Zero bubble pipeline parallelism", 2023 (arXiv:2401.10241), and "Pipeline
    parallelism with controllable memory", 2024 (arXiv:2405.15362). Bubble 0 for M >= 2P-1 and
    equal times. Every rank holds at most 2P pairs of micro-batch and stage, each of half a rank's
    layers: the memory of P micro-batches, as rank 0 does in 1F1B.

    Rank 0 has the model's first *and* last layers, so that loss and tied embeddings stay on it,
    and what rank P-1 hands from one of its stages to the other is not sent.

    With fewer than 2P-1 micro-batches the schedule is that of 2P-1, with those left out that are
    not there.
    """

    @property
    def name(self) -> str:
        return "ZB-V"

    @property
    def virtual_stages_per_rank(self) -> int:
        """Two: down and up."""
        return 2

    def global_stage(self, stage_id: int, virtual_stage_index: int, num_stages: int) -> int:
        """Stage r on the way down, 2P-1-r on the way up."""
        return stage_id if virtual_stage_index == _DOWN else 2 * num_stages - 1 - stage_id

    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        rows = _Rows()
        count = max(num_micro_batches, 2 * num_stages - 1)
        # Forwards only, until the first micro-batch has come up again.
        for _ in range(2 * (num_stages - rank) - 1):
            rows.add(_F, _DOWN)
        for _ in range(rank):
            rows.add(_F, _UP)
            rows.add(_F, _DOWN)
        warmup = len(rows.rows)
        # The way up goes both directions; the gradient of the way down is not here yet.
        for _ in range(num_stages - rank):
            rows.add(_F, _UP)
            rows.add(_B, _UP)
            rows.add(_W, _UP)
        while rows.done(_F, _UP) < count:
            if rows.done(_F, _DOWN) < count:
                rows.add(_F, _DOWN)
            rows.add(_B, _DOWN)
            rows.add(_W, _DOWN)
            rows.add(_F, _UP)
            rows.add(_B, _UP)
            rows.add(_W, _UP)
        steady_until = len(rows.rows)
        # B before W: other ranks wait for it.
        for _ in range(rank):
            rows.add(_B, _DOWN)
            rows.add(_B, _UP)
        for _ in range(num_stages - rank):
            rows.add(_B, _DOWN)
            rows.add(_W, _DOWN)
        for virtual_stage in (_UP, _DOWN):
            while rows.done(_W, virtual_stage) < count:
                rows.add(_W, virtual_stage)
        operations = with_phases(rows.rows, warmup, len(rows.rows) - steady_until)
        return [op for op in operations if op.micro_batch_index < num_micro_batches]

    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float | None:
        return 0.0 if num_micro_batches >= 2 * num_stages - 1 else None


class _Rows:
    """Operations whose micro-batches, of each type and stage, come in order."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._done: dict[tuple[PipelineOperationType, int], int] = {}

    def done(self, kind: PipelineOperationType, virtual_stage: int) -> int:
        """How many micro-batches have had this operation."""
        return self._done.get((kind, virtual_stage), 0)

    def add(self, kind: PipelineOperationType, virtual_stage: int) -> None:
        """Do it to the next micro-batch."""
        micro_batch = self.done(kind, virtual_stage)
        self.rows.append((kind, micro_batch, virtual_stage))
        self._done[kind, virtual_stage] = micro_batch + 1


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
