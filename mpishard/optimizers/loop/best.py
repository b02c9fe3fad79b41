"""The parameters of the best evaluation so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpishard.arrays import Array
from mpishard.checkpoint import CheckpointState, Pieces
from mpishard.checkpoint.exchange.plain import PlainModelFiles, choices_in
from mpishard.models import ShardedModelBase
from mpishard.observe.ledger import MemoryCategory

__all__ = ["BestParameters"]


class BestParameters(CheckpointState):
    """The parameters of the best evaluation: this rank's pieces of them.

    Each rank keeps its shard, 1/N of the parameters under every strategy; nothing is gathered.
    With them go the choices of the plain model, such as running means. Checkpoints hold both as a
    state of its own.

    Parameters
    ----------
    model : ShardedModelBase
        The model.
    """

    KIND = "training/best_parameters"

    def __init__(self, model: ShardedModelBase) -> None:
        self._engine, self._plain = model.engine, model.wrapped_model
        self._choices: dict[str, Any] = {}
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
        if isinstance(self._plain, PlainModelFiles):
            self._choices = self._plain.choices()

    def put_back(self) -> None:
        """Put the kept parameters back into the model. Collective."""
        engine = self._engine
        if isinstance(self._plain, PlainModelFiles):
            self._plain.take_choices(self._choices)
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
        pieces = self._pieces if self._engine.is_writer or not written else ()
        parts = [(p.start, self._vector[p.in_shard]) for p in pieces]
        return {self.KIND: self._engine.placement.cut(parts, written=written)}

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        """Return the choices; the loop's position has the rest."""
        return {"choices": self._choices} if self._choices else {}

    def restored(self, metadata: Mapping[str, Any]) -> None:
        """Take the choices; nothing of the parameters is cached."""
        self._choices = choices_in(metadata)
