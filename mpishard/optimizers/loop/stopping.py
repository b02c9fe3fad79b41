"""Early stopping: the best evaluation so far, its parameters, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mpishard.arrays import Array
from mpishard.checkpoint import CheckpointState, Pieces
from mpishard.models import ShardedModelBase
from mpishard.observe.ledger import MemoryCategory

__all__ = ["BestParameters", "EarlyStopping"]


@dataclass
class EarlyStopping:
    """The best of the evaluations so far, and whether to go on.

    The best is the one with the lowest score. Early stopping asks for more: an evaluation counts
    as an improvement if its score lies at least ``tolerance`` below that of the last
    improvement, and training is to stop after ``patience`` evaluations in a row that were none
    (after Prechelt, "Early Stopping - But When?", in "Neural Networks: Tricks of the Trade", 1998,
    which compares several such criteria). A score that is not a number is never the best and
    never an improvement.

    Parameters
    ----------
    patience : int or None
        Evaluations without improvement after which to stop; None: never.
    tolerance : float
        Least improvement that counts, in units of the score.

    Examples
    --------
    >>> stopping = EarlyStopping(patience=2, tolerance=0.1)
    >>> [stopping.observe(step, score) for step, score in enumerate([1.0, 0.95, 0.92])]
    [True, True, True]
    >>> stopping.is_exhausted, stopping.best_step
    (True, 2)
    """

    patience: int | None = None
    tolerance: float = 0.0
    best_score: float = math.inf
    best_step: int | None = None
    reference: float = math.inf
    waited: int = 0

    def observe(self, step: int, score: float) -> bool:
        """Record an evaluation after ``step`` updates; return whether it is the best so far."""
        if score < self.reference and self.reference - score >= self.tolerance:
            self.reference = score
            self.waited = 0
        else:
            self.waited += 1
        if not score < self.best_score:
            return False
        self.best_score, self.best_step = score, step
        return True

    @property
    def is_exhausted(self) -> bool:
        """True if patience is at its end."""
        return self.patience is not None and self.waited >= self.patience

    def position(self) -> dict[str, Any]:
        """Return the part that a checkpoint saves, for JSON."""
        return {k: v for k, v in asdict(self).items() if k not in {"patience", "tolerance"}}

    def restore(self, position: Mapping[str, Any]) -> None:
        """Go on from a saved `position`."""
        for name in self.position():
            setattr(self, name, position[name])


class BestParameters(CheckpointState):
    """The parameters of the best evaluation: this rank's pieces of them.

    Each rank keeps its shard, 1/N of the parameters under every strategy; nothing is gathered.
    Checkpoints hold it as a state of its own.

    Parameters
    ----------
    model : ShardedModelBase
        The model.
    """

    KIND = "training/best_parameters"

    def __init__(self, model: ShardedModelBase) -> None:
        self._engine = model.engine
        self._pieces = model.engine.layout.pieces()
        self._kept: Array | None = None

    @property
    def _vector(self) -> Array:
        if self._kept is None:
            length = sum(piece.length for piece in self._pieces)
            self._kept = self._engine.layout.allocate(MemoryCategory.BEST_PARAMETERS, length)
        return self._kept

    def keep(self) -> None:
        """Copy this rank's shard of the parameters. Communicates nothing."""
        kept = self._vector  # made here, also if this rank owns nothing
        owned = self._engine.parameters.owned(self._pieces)
        for piece, values in zip(self._pieces, owned, strict=True):
            kept[piece.in_shard] = values

    def put_back(self) -> None:
        """Put the kept parameters back into the model. Collective."""
        engine = self._engine
        owned = engine.parameters.owned(self._pieces)
        for piece, target in zip(self._pieces, owned, strict=True):
            target[...] = self._vector[piece.in_shard]
        engine.parameters.publish(self._pieces)
        engine.changed()

    def arrays_to_write(self) -> Pieces:
        """Return the rank's pieces, of replicas a part; no kind before anything was kept."""
        return {} if self._kept is None else self._regions(written=True)

    def arrays_to_read(self) -> Pieces:
        """Return the rank's pieces, to be filled."""
        return self._regions()

    def _regions(self, *, written: bool = False) -> Pieces:
        parts = [(p.start, self._vector[p.in_shard]) for p in self._pieces]
        return {self.KIND: self._engine.placement.cut(parts, written=written)}

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        """Return nothing: the loop's position has the rest."""
        return {}

    def restored(self, metadata: Mapping[str, Any]) -> None:
        """Do nothing, because nothing is cached."""
