"""What a rank holds of a sharded model, and all of it together."""

from __future__ import annotations

import contextlib
import copy
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from mpishard.arrays import Array, array_namespace
from mpishard.contracts import ILayeredModel, IShardedModel
from mpishard.errors import ShardingError
from mpishard.models.engine.engine import Engine
from mpishard.sharding import Piece

__all__ = ["Shards"]


class Shards(IShardedModel):
    """The part of a sharded model that looks at shards, and gathers them."""

    _remembered: tuple[weakref.ref[Any], int] | None = None

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The one way in which the parameters change."""

    @property
    def local_parameter_shard(self) -> Array:
        """A copy of what this rank holds, its pieces end to end; all where replicated."""
        owned = self.engine.parameters.owned(self._held_pieces)
        if not owned:  # a stage without parameters
            return self.engine.layout.device.namespace.empty(0, self.engine.layout.dtype)
        return array_namespace(owned[0]).concatenate(owned)

    @property
    def _held_pieces(self) -> tuple[Piece, ...]:
        return self.engine.layout.pieces(sharded=self.engine.policy.shards_parameters)

    # What subclasses know of a rank's shard.

    @property
    def _local_shard(self) -> Array:
        return self.local_parameter_shard

    @property
    def _shard_start_index(self) -> int:
        return self._only_range[0]

    @property
    def _shard_size(self) -> int:
        start, stop = self._only_range
        return stop - start

    @property
    def _only_range(self) -> tuple[int, int]:
        ranges = self.owned_ranges
        if len(ranges) > 1:
            raise ShardingError(
                f"this rank owns a piece of each of {len(ranges)} units, which have no one start "
                "and size: owned_ranges lists them"
            )
        return ranges[0] if ranges else (0, 0)  # more ranks than parameters

    @property
    def _cached_full_parameters(self) -> Array | None:
        """What was gathered last, while somebody holds it and parameters have not changed."""
        full, version = self._remembered or (None, -1)
        return full() if full is not None and version == self.engine.version else None

    def _invalidate_cache(self) -> None:
        self._remembered = None

    def _update_local_shard_from_full(self, full: Array) -> None:
        """Take this rank's part of ``full``, which is the same on every rank. Collective."""
        self.engine.take(full)

    @property
    def owned_ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges ``(start, stop)`` of the model's flat vector that this rank holds.

        One per unit; on a mesh, where columns of a matrix are no one range, as few as it takes.
        """
        placement = self.engine.placement
        if placement.is_whole:
            if not self.engine.policy.shards_parameters:
                return ((0, self.parameter_count),)
            return tuple((piece.start, piece.stop) for piece in self._held_pieces)
        held = ((piece.start, piece.stop) for piece in self._held_pieces)
        found: list[tuple[int, int]] = []
        for start, stop in (r for own in held for r in placement.ranges(*own)):
            if found and found[-1][1] == start:
                found[-1] = found[-1][0], stop
            else:
                found.append((start, stop))
        return tuple(found)

    @contextlib.contextmanager
    def unsharded(self, root: int | None = None) -> Iterator[Any]:
        """The plain model with all parameters, for sampling, plotting, export. Collective.

        Parameters
        ----------
        root : int, optional
            The only rank that gets it; the others get None. Default: every rank gets one.

        Yields
        ------
        object or None
            A plain model, let go on exit. Changes to its parameters are not taken back.
        """
        if root is not None and not 0 <= root < self.world_size:
            raise ValueError(f"root {root} is outside [0, {self.world_size})")
        full = self.engine.gather() if root is None else self.engine.gather_on(root)
        if full is None:
            yield None
            return
        model = self.wrapped_model
        if hasattr(model, "with_parameters"):
            model = model.with_parameters(full)
        else:
            model = copy.deepcopy(model)
            if isinstance(model, ILayeredModel):
                model.reclaim_parameters(full)
            else:
                model.set_parameters(full)
        del full
        try:
            yield model
        finally:
            if isinstance(model, ILayeredModel):
                model.release_parameters(f"a {type(self).__name__}, after unsharded() ended")

    def gather_full_parameters(self) -> Array:
        """All parameters in layer order, a new vector on every rank. Collective."""
        full = self.engine.gather()
        self._remembered = (weakref.ref(full), self.engine.version)
        return full

    def get_parameters(self) -> Array:
        """As `gather_full_parameters`. Collective."""
        return self.gather_full_parameters()
