"""An update: what the strategy shards, the pieces that a rule changes, and what a step reports."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mpishard.arrays import Array, chunk_length
from mpishard.layout import ShardLayout
from mpishard.models.programs.leaves import GradientLeaves
from mpishard.models.programs.program import Program
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.sharding import Piece, Placement, pieces_within

__all__ = [
    "Policy",
    "Rule",
    "StepReport",
    "TrainingRecord",
    "Update",
    "UpdatePieces",
    "dealt",
    "descent",
]


@dataclass(frozen=True, slots=True)
class Policy:
    """A row of the table in Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
    Trillion Parameter Models", SC 2020, section 5: what is sharded, and what each rank holds
    whole. Each stage shards what the stage before it shards, and one thing more.

    Raises
    ------
    ValueError
        For other combinations: gradients or parameters that are sharded leave a rank nothing to
        update a whole state with.
    """  # noqa: D205

    shards_parameters: bool
    shards_gradients: bool
    shards_state: bool

    def __post_init__(self) -> None:
        if self.shards_parameters > self.shards_gradients or (
            self.shards_gradients > self.shards_state
        ):
            raise ValueError(
                "a policy that shards parameters must shard gradients, and one that shards "
                f"gradients must shard state, got {self}"
            )


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of one step, the same on every rank.

    ``loss`` is the mean over all samples of the round, NaN if a black box does not tell it,
    ``weight`` their total weight,
    ``gradient_norm`` the Euclidean norm of the mean gradient before clipping; None for a step
    that only accumulated.
    """

    loss: float
    weight: float
    gradient_norm: float | None


@dataclass(slots=True)
class TrainingRecord:
    """Training of a model in figures, which its metadata show and its checkpoints keep.

    Attributes
    ----------
    samples : float
        Weight of all batches: samples, or tokens, as the loss weighs them.
    seconds : float
        Time of all steps on this rank, of earlier jobs too.
    last_loss, best_loss : float or None
        Mean loss of the last step, and the lowest of a step; None if no step told one.
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
        # A black box may tell no loss: NaN would stay the best for ever.
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


@dataclass(frozen=True, slots=True)
class Update:
    """The input of an update rule for one owned piece.

    ``parameters`` and ``gradients`` are 1-D views of equal length; the gradient is the *sum*
    over samples, to be multiplied by ``1 / report.weight``. It is read-only: other ranks may read
    the same memory.
    """

    piece: Piece
    parameters: Array
    gradients: Array


Rule = Callable[[list[Update], StepReport], None]
"""Changes the parameters of each owned piece by its gradient."""


def descent(rate: float) -> Rule:
    """Plain gradient descent on the mean loss."""

    def descend(updates: list[Update], report: StepReport) -> None:
        scale = rate / report.weight
        for update in updates:
            parameters, gradients = update.parameters, update.gradients
            # In chunks, because the product would be a temporary array as large as the gradient.
            length = chunk_length(parameters)
            for start in range(0, update.piece.length, length):
                parameters[start : start + length] -= scale * gradients[start : start + length]

    return descend


@dataclass(frozen=True, slots=True)
class UpdatePieces:
    """The pieces that an update reads, changes and counts, as long as the same are trained.

    Parameters
    ----------
    published : tuple of Piece
        Owned pieces of the units that have a gradient. If parameters are whole, the other ranks
        get them after an update.
    owned : tuple of Piece
        The trained parts of these.
    updated : tuple of Piece
        Pieces that this rank's rule updates: ``owned``, or all that is trained if the state is
        replicated.
    counted : tuple of Piece
        Parts of ``owned`` that add to this rank's part of a norm: one of the tensor ranks counts
        what all hold alike; with gradient leaves, cell by cell.
    """

    published: tuple[Piece, ...]
    owned: tuple[Piece, ...]
    updated: tuple[Piece, ...]
    counted: tuple[Piece, ...]

    @classmethod
    def of(
        cls, program: Program, layout: StoreLayout, policy: Policy, leaves: GradientLeaves | None
    ) -> UpdatePieces:
        """The pieces of a program, without its frozen parameters; ``leaves`` are told of them."""
        without_gradient, trained = program.frozen_units, program.trained
        own, every = (
            tuple(piece for piece in pieces if piece.unit.index not in without_gradient)
            for pieces in (layout.pieces(), layout.pieces_of_all())
        )
        owned = counted = trained(own)
        if leaves is not None:
            counted = leaves.count_in(trained(every), owned)
        elif not program.vector.placement.is_whole:
            counted = pieces_within(owned, program.vector.placement.counted_ranges)
        return cls(own, owned, owned if policy.shards_state else trained(every), counted)

    def to_write(self, program: Program) -> tuple[Piece, ...]:
        """The ``updated`` ones whose state this rank writes to a checkpoint: of replicas, a part.

        Together the ranks write each element once.
        """
        owned = {(piece.start, piece.stop) for piece in self.owned}
        mine = tuple(piece for piece in self.updated if (piece.start, piece.stop) in owned)
        return written_here(mine, program.vector.placement)


def dealt(pieces: Sequence[Piece], size: int, rank: int) -> list[Piece]:
    """Return the part of each of ``pieces`` that is ``rank``'s of ``size`` ranks with the same."""
    parts = []
    for piece in pieces:
        part = ShardLayout(piece.length, size).slice(rank)
        start, stop = piece.start + part.start, piece.start + part.stop
        parts.append(replace(piece, start=start, stop=stop, offset=piece.offset + part.start))
    return parts


def written_here(pieces: Sequence[Piece], placement: Placement) -> tuple[Piece, ...]:
    """Return the parts of ``pieces`` that this rank writes: of copies on a mesh one rank's."""
    if placement.is_whole:
        return tuple(pieces)
    return tuple(
        Piece(piece.unit, part.start, part.stop, piece.offset + part.start - piece.start)
        for piece in pieces
        for part in pieces_within([piece], placement.written_ranges)
    )
