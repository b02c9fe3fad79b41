"""An update: its policy, the passes before it, the pieces that change, and the report."""

from __future__ import annotations

import itertools
import math
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpishard.base import (
    Array,
    NonFiniteLossError,
    Scalar,
    ShardingError,
    ShardLayout,
    chunk_length,
    read_numbers,
)
from mpishard.callbacks import Requests
from mpishard.communication import differences
from mpishard.models.programs.program import Program
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.sharding import Piece, Placement, ShardingConfiguration, pieces_within

_SETTINGS = 1 << 20  # squares of checksums below it add up exactly in float64, on 8192 ranks


@dataclass(frozen=True, slots=True)
class Policy:
    """A row of the table in Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
    Trillion Parameter Models", SC 2020, section 5: what is sharded, and what each rank holds
    whole. Each stage shards what the stage before it shards, and one thing more.

    Raises
    ------
    ValueError
        For other combinations: a rank that has only a part of the gradient or of the parameters
        cannot update a whole state.
    """  # noqa: D205

    shards_parameters: bool
    shards_gradients: bool
    shards_state: bool

    def __post_init__(self) -> None:
        # Booleans are ordered: what a stage of ZeRO shards, all later ones shard, too.
        if self.shards_parameters > self.shards_gradients or (
            self.shards_gradients > self.shards_state
        ):
            raise ValueError(
                "a policy that shards parameters must shard gradients, and one that shards "
                f"gradients must shard state, got {self}"
            )


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of one step, the same on every rank unless replicas train alone.

    ``loss`` is the mean over all samples of the round, NaN if a black box computes none;
    ``weight`` is their total weight. ``gradient_norm`` is the Euclidean norm of the mean gradient
    before clipping, None for a step that only accumulated. With `LocalSGDOptimizer` it is the norm
    of this rank's replica; with ``auto_sync_gradients=False`` all three are of its own samples.
    ``unused`` has the names of the trained parameters to which no rank's pass gave a gradient, as
    a module of PyTorch may: rules leave them out. With ``is_sum`` the loss and its gradient are
    sums over all samples and not means, as `Engine.sums_loss` says.
    """

    loss: float
    weight: float
    gradient_norm: float | None
    unused: frozenset[str] = frozenset()
    is_sum: bool = False

    @property
    def divisor(self) -> float:
        """Number by which the sum of the gradients is divided."""
        return 1.0 if self.is_sum else self.weight


@dataclass(slots=True)
class TrainingRecord:
    """Figures of a model's training, for its metadata and its checkpoints.

    Attributes
    ----------
    samples : float
        Weight of all batches: samples, or tokens, as the loss weighs them.
    seconds : float
        Time of all steps on this rank, of earlier jobs too.
    last_loss, best_loss : float or None
        Mean loss of the last step, and the lowest of a step; None if no step computed one.
    validation_score : float or None
        Loss of the last evaluation on validation data.
    trained_at : float or None
        Time of the last step, in seconds since the epoch.
    """

    samples: float = 0.0
    seconds: float = 0.0
    last_loss: float | None = None
    best_loss: float | None = None
    validation_score: float | None = None
    trained_at: float | None = None

    def add(self, report: StepReport, seconds: float) -> None:
        """Count a step."""
        self.samples += report.weight
        self.seconds += seconds
        self.trained_at = time.time()
        # A black box may compute no loss: NaN would stay the best for ever.
        if math.isfinite(report.loss):
            self.last_loss = report.loss
            if self.best_loss is None or report.loss < self.best_loss:
                self.best_loss = report.loss

    def properties(self) -> dict[str, float]:
        """Return the figures that are known, as the model's metadata name them."""
        figures = {
            "Samples": self.samples,
            "TrainingSeconds": self.seconds,
            "LastLoss": self.last_loss,
            "BestLoss": self.best_loss,
            "ValidationScore": self.validation_score,
        }
        return {name: value for name, value in figures.items() if value is not None}


class Round:
    """The passes since the last update: their losses, and the settings that ranks must share.

    Parameters
    ----------
    config : ShardingConfiguration
        Backend of all ranks, and whether losses that are not finite are refused.
    program : Program
        The computation, on the ranks of its replica.
    subject : int
        The model's number in collectives: `CommunicationBackend.number_model`.

    Attributes
    ----------
    is_open : bool
        Whether a pass waits for its update.
    accumulates : bool
        Whether the next pass only adds to the round.
    defers : bool
        Whether its gradients stay on this rank until the round's last pass.
    parts : list of (float, float)
        Sum and weight of the loss of each pass that this rank has added. On a GPU they are arrays
        of one element until `read`.
    used : set of str
        Parameters to which a pass of this rank gave a gradient: see `Program.used`.
    unused : frozenset of str
        Those of `Program.optional` that no rank had used at the last `totals`.
    requests : Requests or None
        Requests of callbacks, which travel with the totals; None on all ranks if there are none.
    """

    def __init__(self, config: ShardingConfiguration, program: Program, subject: int) -> None:
        self._program = program
        # For messages: a user gave batches to data ranks, and not to each rank of a mesh.
        self._replicas = program.replica.members
        self._subject = subject
        self.is_open = False
        self.accumulates = False
        self.defers = False
        self.parts: list[tuple[Scalar, Scalar]] = []
        self.used: set[str] = set()
        self.unused = frozenset[str]()
        self.requests: Requests | None = None
        self._samples = 0  # of all ranks in this round; counted only if the program is random
        self._backend = config.communication_backend
        self._axis = program.replica.sample_group
        self._config = config

    def add(self, loss: Scalar, weight: Scalar, used: Collection[str]) -> None:
        """Count one pass, with the sum and weight of its loss, and the parameters it used."""
        self.is_open = True
        self.parts.append((loss, weight))
        self.used.update(used)

    def read(self, *numbers: float | Array) -> list[float]:
        """Return the sums of losses and of weights over this rank's samples, and other numbers.

        What lies on a GPU is read by one copy.
        """
        read = read_numbers([*itertools.chain.from_iterable(self.parts), *numbers])
        own = 2 * len(self.parts)
        parts = list(zip(read[:own:2], read[1:own:2], strict=True))
        self.parts[:] = parts
        loss = weight = 0.0
        for part, its_weight in parts:  # Python's sum would round otherwise from 3.12 on
            loss += part
            weight += its_weight
        return [loss, weight, *read[own:]]

    @property
    def passes(self) -> int:
        """Number of passes that this rank has added."""
        return len(self.parts)

    def end(self) -> None:
        """Reset, after an update or an error."""
        # `accumulates` is not reset here: it holds until its block ends, even after an error.
        self.is_open = False
        self.parts.clear()
        self.used.clear()
        self._samples = 0

    def require_none(self, purpose: str) -> None:
        """Refuse a change during accumulation: gradients that wait for their update become stale.

        Raises
        ------
        ShardingError
            After a step inside `accumulate`, until a step has ended the round.
        """
        if self.is_open:
            raise ShardingError(
                f"{purpose} is not allowed during accumulation: the gradients of {len(self.parts)} "
                "batches of this rank are not yet applied. Call step() after the "
                "accumulate() block first"
            )

    def sample_start(self, samples: int) -> int:
        """Return the index of this rank's first sample among those of all ranks. Collective."""
        # A world of one sends nothing, on a GPU in particular, where a message waits for it.
        if self._axis.world_size == 1:
            return self.own_sample_start(samples)
        before = self._samples
        counts = self._axis.all_gather(np.array([samples]), subject=self._subject)
        self._samples += int(counts.sum())
        return before + int(counts[: self._axis.rank].sum())

    def own_sample_start(self, samples: int) -> int:
        """Return the index of the first of new samples among those of this rank."""
        before = self._samples
        self._samples += samples
        return before

    def totals(
        self,
        message: Sequence[float] | Array,
        own_loss: float | Array,
        settings: Mapping[str, object],
        step: int,
        fold: Callable[[Array], Iterable[float]] = tuple,
    ) -> tuple[float, float, float]:
        """Return the sums over ranks of [loss sum, weight, squared norm]. Collective.

        One small all-reduce also sums two numbers of each rank and their squares: the passes of the
        round, and a checksum of the settings. From these sums every rank sees whether the numbers
        are equal on all. It also counts the ranks that have used each parameter. ``step`` is the
        number in error messages. If ``message`` has another form, ``fold`` turns the ranks' sum of
        it into the three results.

        Raises
        ------
        ShardingError
            On every rank, if passes or settings differ.
        NonFiniteLossError
            On every rank, if a sum is not finite.
        """
        backend = self._backend
        # A checksum, because the message has one number for settings, whatever the rule.
        mark = zlib.crc32(repr(settings).encode()) % _SETTINGS
        # Half a pass more distinguishes a rank inside accumulate() from one that ends its round.
        own = np.array([len(self.parts) + 0.5 * self.accumulates, mark])
        requested = () if self.requests is None else self.requests.own
        optional = self._program.optional
        # In the message that travels anyway: a collective of its own would cost its latency.
        used = [name in self.used for name in optional]
        message = np.array([*own, *(own * own), *requested, *used, *message])
        sums = backend.all_reduce(message, subject=self._subject)
        if self.requests is not None:
            self.requests.exchanged(sums[4:6])
        # (sum)^2 = N (sum of squares) holds only if all summands are equal (Cauchy-Schwarz).
        same = sums[:2] ** 2 == sums[2:4] * backend.world_size
        counts, rest = np.split(sums[4 + len(requested) :], [len(used)])
        self.unused = frozenset(name for name, n in zip(optional, counts, strict=True) if not n)
        total, weight, squared = (float(v) for v in fold(rest))
        if not same[0]:
            raise ShardingError(
                f"the ranks have accumulated different numbers of batches: rank {backend.rank} "
                f"has {len(self.parts)}, all {backend.world_size} ranks together {int(sums[0])}. "
                "One rank did not enter accumulate(), or left it by an exception that its script "
                "caught. Nothing was updated, and every rank drops its accumulated gradients"
            )
        if not same[1]:
            # All ranks come here, because all see the same sums: a second collective is safe.
            found = differences(backend, {name: str(value) for name, value in settings.items()})
            raise ShardingError(
                f"step {step}: the settings of the update differ between ranks; by rank, {found}. "
                "Nothing was updated; give every rank the same settings"
            )
        if not all(map(math.isfinite, (total, weight, squared))):
            losses = []
            if not self._config.allow_nonfinite:
                # All ranks see the same sums, so that all come here: another collective is safe.
                losses = backend.all_gather(np.array(read_numbers([own_loss]))).tolist()
            self.refuse_nonfinite(self._describe_nonfinite(losses), step)
        return total, weight, squared

    def _describe_nonfinite(self, losses: Sequence[float]) -> str:
        """Describe the ranks whose loss is not finite; in a replica all but one rank report 0."""
        if not losses:
            return "the loss or the gradient is not finite"
        sums = [sum(losses[rank] for rank in ranks) for ranks in self._replicas]
        wrong = [rank for rank, value in enumerate(sums) if not math.isfinite(value)]
        if len(sums) == len(losses):
            what = f"the loss of ranks {wrong}" if wrong else "the gradient, and no rank's loss,"
            return f"{what} is not finite (loss sums by rank: {losses})"
        where = "; ".join(f"{rank}: ranks {list(self._replicas[rank])}" for rank in wrong)
        what = (
            f"the loss of data ranks {wrong} ({where})"
            if wrong
            else "the gradient, and no replica's loss,"
        )
        return f"{what} is not finite (loss sums by data rank: {sums})"

    def refuse_nonfinite(self, what: str, step: int) -> None:
        """Raise `NonFiniteLossError` with the text ``what``, unless the configuration allows it."""
        if self._config.allow_nonfinite:
            return
        raise NonFiniteLossError(
            f"step {step}: {what}. The step changed no parameters. Look for NaN and infinity in "
            "the data, as by np.isfinite(x).all(); if there is none, lower the learning rate, or "
            "give the rule clip_global_norm=1.0. ShardingConfiguration(allow_nonfinite=True) turns "
            "this check off"
        )


@dataclass(frozen=True, slots=True)
class Update:
    """The input of an update rule for one owned piece.

    ``parameters`` and ``gradients`` are 1-D views of equal length; the gradient is the *sum*
    over samples, to be divided by ``report.divisor``. It is read-only: other ranks may read
    the same memory.
    """

    piece: Piece
    parameters: Array
    gradients: Array


Rule = Callable[[list[Update], StepReport], None]
"""Changes the parameters of each owned piece by its gradient."""


def descent(rate: float) -> Rule:
    """Plain gradient descent on the loss."""

    def descend(updates: list[Update], report: StepReport) -> None:
        scale = rate / report.divisor
        for update in updates:
            parameters, gradients = update.parameters, update.gradients
            # In chunks, because the product would be a temporary array as large as the gradient.
            length = chunk_length(parameters)
            for start in range(0, update.piece.length, length):
                parameters[start : start + length] -= scale * gradients[start : start + length]

    return descend


@dataclass(frozen=True, slots=True)
class UpdatePieces:
    """The pieces that an update changes, publishes and counts, for one set of frozen parameters.

    Parameters
    ----------
    published : tuple of Piece
        The pieces whose new values this rank gives to the others after an update: its pieces of
        the units that have a gradient, or none if every rank updates all parameters itself.
    owned : tuple of Piece
        The trained parts of the rank's pieces.
    updated : tuple of Piece
        The pieces that this rank's rule updates: ``owned``, or all that is trained if the state is
        replicated.
    counted : tuple of Piece
        The parts of ``owned`` whose squares this rank adds to a norm. Copies on several tensor
        ranks are counted by one of them; with gradient leaves each part is a common piece.
    """

    published: tuple[Piece, ...]
    owned: tuple[Piece, ...]
    updated: tuple[Piece, ...]
    counted: tuple[Piece, ...]

    @classmethod
    def of(cls, program: Program, layout: StoreLayout, policy: Policy) -> UpdatePieces:
        """Return the pieces of a program's trained parameters."""
        trained = program.trained
        own = _with_gradient(layout.pieces(), program)
        owned = counted = trained(own)
        if not program.vector.placement.is_whole:
            # A copy on each tensor rank would count as often in the norm.
            counted = pieces_within(owned, program.vector.placement.counted_ranges)
        # Every rank makes the same update of everything, so that nothing is published.
        if not policy.shards_state:
            every = _with_gradient(layout.pieces_of_all(), program)
            return cls((), owned, trained(every), counted)
        return cls(own, owned, owned, counted)

    def to_write(self, program: Program) -> tuple[Piece, ...]:
        """Return the ``updated`` pieces whose state this rank writes to a checkpoint.

        Together the ranks write each element once, also if the state is replicated.
        """
        # A replicated state is on every rank; each writes the pieces that it would own.
        owned = {(piece.start, piece.stop) for piece in self.owned}
        mine = tuple(piece for piece in self.updated if (piece.start, piece.stop) in owned)
        return pieces_to_write(mine, program.vector.placement)


def _with_gradient(pieces: Sequence[Piece], program: Program) -> tuple[Piece, ...]:
    frozen = program.frozen_units
    return tuple(piece for piece in pieces if piece.unit.index not in frozen)


def divided_pieces(pieces: Sequence[Piece], size: int, rank: int) -> list[Piece]:
    """Return ``rank``'s part of each piece, if ``size`` ranks divide each piece."""
    parts = []
    for piece in pieces:
        part = ShardLayout(piece.length, size).slice(rank)
        start, stop = piece.start + part.start, piece.start + part.stop
        parts.append(replace(piece, start=start, stop=stop, offset=piece.offset + part.start))
    return parts


def pieces_to_write(pieces: Sequence[Piece], placement: Placement) -> tuple[Piece, ...]:
    """Return the parts of ``pieces`` that this rank writes; of copies on a mesh one is written."""
    if placement.is_whole:
        return tuple(pieces)
    return tuple(
        Piece(piece.unit, part.start, part.stop, piece.offset + part.start - piece.start)
        for piece in pieces
        for part in pieces_within([piece], placement.written_ranges)
    )
