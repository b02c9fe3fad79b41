"""A model and an optimizer for tests, whose only content is vectors, sharded or replicated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.base.layout import ShardLayout
from mpishard.checkpoint import Pieces
from mpishard.communication import CommunicationBackend
from mpishard.sharding import Box, ParameterEntry, Placement, Region, by_parameter
from mpishard.sharding.regions import box_shape, take_region

__all__ = ["Fakes", "Model", "Optimizer", "State", "entries", "tiling", "values"]

SHAPES = {"a.weight": (3, 2), "a.bias": (2,), "b.scale": (), "b.empty": (0, 3), "b.weight": (4, 1)}
LENGTH = 13


def entries(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> tuple[ParameterEntry, ...]:
    result: list[ParameterEntry] = []
    for name, shape in shapes.items():
        result.append(ParameterEntry(name, shape, result[-1].stop if result else 0))
    return tuple(result)


def values(seed: int, dtype: Any = np.float64, length: int = LENGTH) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(length).astype(dtype)


def tiling(rng: np.random.Generator, name: str, box: Box) -> list[Region]:
    """Regions that together are ``box``, which is cut in two, again and again, along any dims."""
    shape = box_shape(box)
    cuttable = [dim for dim, size in enumerate(shape) if size > 1]
    if cuttable and rng.random() < 0.6:
        dim = rng.choice(cuttable)
        at = box[dim][0] + int(rng.integers(1, shape[dim]))
        return [
            region
            for half in ((box[dim][0], at), (at, box[dim][1]))
            for region in tiling(rng, name, (*box[:dim], half, *box[dim + 1 :]))
        ]
    size = math.prod(shape)
    edges = sorted({0, size, *rng.integers(0, size + 1, rng.integers(0, 3)).tolist()})
    return [Region(name, box, start, stop) for start, stop in itertools.pairwise(edges)]


class State:
    """Arrays by kind, of whose flat vector a rank holds two uneven pieces."""

    def __init__(
        self,
        backend: CommunicationBackend | None,
        vectors: Mapping[str, np.ndarray[Any, Any]],
        metadata: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    ) -> None:
        self.shapes = shapes
        self.metadata = dict(metadata)
        self.restored_with: Mapping[str, Any] | None = None
        self.pieces: dict[str, list[tuple[Region, np.ndarray[Any, Any]]]] = {}
        placement = Placement.whole(entries(shapes))
        rank, world_size = (0, 1) if backend is None else (backend.rank, backend.world_size)
        for kind, vector in vectors.items():
            cut = min(5, len(vector))  # as two units
            first, second = ShardLayout(cut, world_size), ShardLayout(len(vector) - cut, world_size)
            start = cut + second.start(rank)
            cut_pieces = placement.cut(
                [
                    (first.start(rank), vector[first.slice(rank)].copy()),
                    (start, vector[start : start + second.size(rank)].copy()),
                ]
            )
            # Both forms of regions, which a checkpoint may mix: of parameters, as on a mesh, and
            # of the flat vector.
            is_flat = kind != "parameters"
            self.pieces[kind] = (
                cut_pieces if is_flat else [*by_parameter(cut_pieces, placement.entries)]
            )

    def arrays_to_write(self) -> Pieces:
        return self.pieces

    def arrays_to_read(self) -> Pieces:
        return self.pieces

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        return self.metadata

    def restored(self, metadata: Mapping[str, Any]) -> None:
        self.restored_with = metadata
        self.metadata = dict(metadata)

    def equals(self, vectors: Mapping[str, np.ndarray[Any, Any]]) -> bool:
        """Return True if every piece has the bits of ``vectors``."""
        places = {entry.name: entry for entry in entries(self.shapes)}
        for kind, pieces in self.pieces.items():
            for region, array in by_parameter(pieces, entries(self.shapes)):
                entry, expected = places[region.name], np.empty_like(array)
                tensor = vectors[kind][entry.start : entry.stop].reshape(entry.shape)
                take_region(tensor, region, expected)
                if array.tobytes() != expected.tobytes():
                    return False
        return True


class Model(State):
    """A `Checkpointable` that is its own `CheckpointedModel`."""

    def __init__(
        self,
        backend: CommunicationBackend | None,
        vector: np.ndarray[Any, Any],
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    ) -> None:
        super().__init__(backend, {"parameters": vector}, {"kind": "fake"}, shapes)
        self.backend = backend
        self.subject = 0
        self.dtype = vector.dtype

    def checkpointed(self) -> Model:
        return self

    def parameters(self) -> Sequence[ParameterEntry]:
        return entries(self.shapes)

    def check_metadata(self, metadata: Mapping[str, Any]) -> None:
        if metadata["kind"] != "fake":
            raise ValueError(f"expected a fake, got {metadata['kind']}")


class Optimizer(State):
    """A `CheckpointableOptimizer` that is its own view."""

    def __init__(
        self,
        backend: CommunicationBackend | None,
        vectors: Mapping[str, np.ndarray[Any, Any]],
        step: int = 0,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    ) -> None:
        named = {f"optimizer/{name}": vector for name, vector in vectors.items()}
        super().__init__(backend, named, {"step": step}, shapes)

    def checkpoint_view(self, model: Any) -> Optimizer:
        return self


class Fakes:
    """Helpers that the tests of this folder share."""

    Model = Model
    Optimizer = Optimizer
    SHAPES = SHAPES
    LENGTH = LENGTH
    State = State
    entries = staticmethod(entries)
    tiling = staticmethod(tiling)
    values = staticmethod(values)
