"""A model's optimizer state as a checkpoint sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpishard.arrays import Array
from mpishard.checkpoint import CheckpointState, Pieces
from mpishard.checkpoint.format.metadata import COUNT, OBJECT, require_form
from mpishard.models.engine.engine import Engine
from mpishard.sharding import Piece

__all__ = ["StateView"]


@dataclass(frozen=True, slots=True)
class StateView(CheckpointState):
    """Pieces of the state, and settings and step count beside them.

    Parameters
    ----------
    engine : Engine
        Says what this rank updates.
    rule : str
        Name of the rule's class. It is part of the kinds, so that another rule's state is
        refused unread.
    state : mapping of str to Array
        This rank's state vectors.
    metadata : mapping
        ``settings`` and ``optimizer_steps``.
    go_on : callable
        Called with the saved steps and settings once the vectors have been read.
    """

    engine: Engine
    rule: str
    state: Mapping[str, Array]
    metadata: Mapping[str, Any]
    go_on: Callable[[int, Mapping[str, Any]], None]

    def arrays_to_write(self) -> Pieces:
        """What this rank writes: its own, and of replicas a part."""
        return self._regions(self.engine.pieces.to_write(self.engine.program))

    def arrays_to_read(self) -> Pieces:
        """All that this rank updates."""
        return self._regions(self.engine.pieces.updated)

    def _regions(self, pieces: Sequence[Piece]) -> Pieces:
        placement = self.engine.placement
        return {
            f"optimizer/{self.rule}/{name}": placement.cut(
                (p.start, vector[p.in_shard]) for p in pieces
            )
            for name, vector in self.state.items()
        }

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        """Settings and step count."""
        return self.metadata

    def restored(self, metadata: Mapping[str, Any]) -> None:
        """Go on from the saved step."""
        form = {"optimizer_steps": COUNT, "settings": OBJECT}
        require_form(metadata, form, "metadata.optimizer")
        self.go_on(metadata["optimizer_steps"], metadata["settings"])
