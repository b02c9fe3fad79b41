"""The parameters that a rank holds: their values, and their places in the flat vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpishard.arrays import Array, array_namespace, copy_into
from mpishard.checkpoint.format.consensus import together
from mpishard.models.engine.engine import Engine
from mpishard.sharding import Piece

__all__ = ["HeldParameters"]


@dataclass(frozen=True, slots=True)
class HeldParameters:
    """The pieces of the parameters on this rank, end to end; all of them if they are replicated.

    In mixed precision they are those that the rank holds in float32, and updates.

    Parameters
    ----------
    engine : Engine
        The engine of the model.
    """

    engine: Engine

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces, in order."""
        engine = self.engine
        sharded = engine.policy.shards_parameters or engine.parameters.owners_only
        return engine.layout.pieces(sharded=sharded)

    @property
    def length(self) -> int:
        """Number of elements."""
        return sum(piece.length for piece in self.pieces)

    def values(self) -> Array:
        """Return a copy of the values, shape (length,)."""
        owned = self.engine.parameters.owned(self.pieces)
        if not owned:  # a stage without parameters
            layout = self.engine.layout
            return layout.device.namespace.empty(0, layout.dtype)
        return array_namespace(owned[0]).concatenate(owned)

    def write(self, values: Array) -> None:
        """Replace the values by a vector of this length. Collective.

        Raises
        ------
        ValueError
            On every rank, if one rank's vector has another shape.
        ShardingError
            On every rank, in the middle of a round of accumulation.
        """
        engine = self.engine
        with together(engine.world):  # and no rank writes what another still reads
            if getattr(values, "shape", None) != (self.length,):
                raise ValueError(
                    f"_local_shard: expected a vector of shape ({self.length},), got "
                    f"{getattr(values, 'shape', type(values).__name__)}"
                )
            engine.round.require_none("_local_shard is assigned")
        start = 0
        for target in engine.parameters.owned(self.pieces):
            stop = start + int(target.size)
            copy_into(target, values[start:stop])
            start = stop
        engine.read()

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges ``(start, stop)`` of the flat vector, as few as it takes."""
        placement = self.engine.placement
        held = [(piece.start, piece.stop) for piece in self.pieces]
        # Without a mesh a piece is one range of the model's vector already.
        if placement.is_whole:
            return tuple(held) if self.engine.policy.shards_parameters else ((0, placement.length),)
        found: list[tuple[int, int]] = []
        for start, stop in (r for own in held for r in placement.ranges(*own)):
            # Slices that follow each other are one range.
            if found and found[-1][1] == start:
                found[-1] = found[-1][0], stop
            else:
                found.append((start, stop))
        return tuple(found)

    def properties(self) -> dict[str, Any]:
        """Return what is sharded, as the model's metadata say it."""
        policy = self.engine.policy
        return {
            "ShardSize": self.length,
            "ParametersSharded": policy.shards_parameters,
            "ParametersReplicated": not policy.shards_parameters,
            "GradientsSharded": policy.shards_gradients,
            "GradientsReplicated": not policy.shards_gradients,
            "OptimizerStateSharded": policy.shards_state,
        }
