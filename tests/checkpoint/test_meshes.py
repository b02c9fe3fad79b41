"""Saved by ranks that hold slices of tensors, restored by ranks that hold others."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpishard import checkpoint, run_in_threads
from mpishard.base.layout import ShardLayout
from mpishard.sharding import LocalParameter, ParameterEntry, Placement, whole_box
from mpishard.sharding.regions import box_shape

SHAPES = {
    "embed.weight": (7, 4),
    "qkv.weight": (9, 4),  # three blocks of rows, each cut
    "qkv.scale": (),
    "out.weight": (4, 6),  # cut along columns
    "out.bias": (4,),
    "kernel.weight": (3, 4, 2, 5),  # cut along its second dim, or by four ranks along two
}
LENGTH = 28 + 36 + 1 + 24 + 4 + 120
STAGES = [["embed.weight", "qkv.weight", "qkv.scale"], ["out.weight", "out.bias", "kernel.weight"]]


def cut(size: int, parts: int, part: int, start: int = 0) -> tuple[int, int]:
    layout = ShardLayout(size, parts)
    return start + layout.start(part), start + layout.start(part) + layout.size(part)


def slices_of(name: str, parts: int, part: int) -> tuple[tuple[Any, ...], bool]:
    """The boxes that one of ``parts`` tensor ranks holds, and whether it speaks for them."""
    shape = SHAPES[name]
    if name == "qkv.weight":
        return tuple((cut(3, parts, part, 3 * block), (0, 4)) for block in range(3)), True
    if name == "embed.weight":
        return ((cut(7, parts, part), (0, 4)),), True
    if name == "out.weight":
        return (((0, 4), cut(6, parts, part)),), True
    if name == "kernel.weight" and parts == 4:
        rows, columns = divmod(part, 2)
        return ((cut(3, 2, rows), cut(4, 2, columns), (0, 2), (0, 5)),), True
    if name == "kernel.weight":
        return (((0, 3), cut(4, parts, part), (0, 2), (0, 5)),), True
    return (whole_box(shape),), part == 0


class Rank:
    """A rank of a mesh of pipeline, tensor and data axes, and what it holds of each kind."""

    def __init__(self, backend: Any, mesh: tuple[int, int, int], fakes: Any, kinds: Any) -> None:
        pipeline, tensor, data = mesh
        rank, world_size = (0, 1) if backend is None else (backend.rank, backend.world_size)
        assert world_size == pipeline * tensor * data
        stage, rest = divmod(rank, tensor * data)
        part, place = divmod(rest, data)
        self.backend = backend
        self.subject = 0
        self.dtype = kinds["parameters"].dtype
        self.entries = fakes.entries(SHAPES)
        names = STAGES[stage] if pipeline == 2 else [*SHAPES] if stage == 0 else []
        held, start = [], 0
        for name in names:
            boxes, is_counted = slices_of(name, tensor, part)
            shapes = [box_shape(box) for box in boxes]
            shape = (sum(s[0] for s in shapes), *shapes[0][1:]) if shapes[0] else ()
            held.append(LocalParameter(ParameterEntry(name, shape, start), boxes, is_counted))
            start = held[-1].entry.stop
        self.placement = Placement(self.entries, held)
        layout = ShardLayout(self.placement.own_length, data)
        self.start = layout.start(place)
        self.own: dict[str, Any] = {}
        for kind, full in kinds.items():
            self.own[kind] = np.empty(layout.size(place), full.dtype)
            self.placement.take(full, self.start, self.own[kind])
        self.steps = 0

    def checkpointed(self) -> Any:
        return self

    def parameters(self) -> Any:
        return self.entries

    def arrays_to_write(self) -> checkpoint.Pieces:
        return self._pieces(written=True)

    def arrays_to_read(self) -> checkpoint.Pieces:
        return self._pieces()

    def _pieces(self, *, written: bool = False) -> checkpoint.Pieces:
        return {
            kind: self.placement.cut([(self.start, own)], written=written)
            for kind, own in self.own.items()
        }

    def checkpoint_metadata(self) -> Any:
        return {"steps": self.steps}

    def check_metadata(self, metadata: Any) -> None:
        pass

    def restored(self, metadata: Any) -> None:
        self.steps = metadata["steps"]

    def checkpoint_view(self, model: Any) -> Any:
        return self


def vectors(seed: int, fakes: Any, dtype: Any = np.float64) -> dict[str, dict[str, Any]]:
    """The parameters, and the state of an optimizer."""
    return {
        "model": {"parameters": fakes.values(seed, dtype, LENGTH)},
        "optimizer": {
            "optimizer/m": fakes.values(seed + 1, length=LENGTH),
            "optimizer/v": fakes.values(seed + 2, np.float32, LENGTH),
        },
    }


def pair(backend: Any, mesh: Any, fakes: Any, given: Any) -> tuple[Rank, Rank]:
    optimizer_kinds = given["optimizer"] | given["model"]  # whose dtype a Rank asks for
    optimizer = Rank(backend, mesh, fakes, optimizer_kinds)
    del optimizer.own["parameters"]
    return Rank(backend, mesh, fakes, given["model"]), optimizer


def save(backend: Any, mesh: Any, path: Path, fakes: Any, dtype: Any = np.float64) -> None:
    model, optimizer = pair(backend, mesh, fakes, vectors(1, fakes, dtype))
    model.steps = optimizer.steps = 12
    checkpoint.save(path, model, optimizer)


def load(backend: Any, mesh: Any, path: Path, fakes: Any, dtype: Any = np.float64) -> Any:
    expected = pair(backend, mesh, fakes, vectors(1, fakes, dtype))
    states = pair(backend, mesh, fakes, vectors(5, fakes, dtype))
    checkpoint.load(path, *states)
    for state, wanted in zip(states, expected, strict=True):
        assert state.steps == 12
        for kind, values in wanted.own.items():
            assert state.own[kind].tobytes() == values.tobytes()
    return states


MESHES = [(1, 1, 1), (1, 4, 1), (1, 2, 2), (1, 3, 1), (2, 1, 1), (2, 2, 1), (2, 3, 2), (1, 1, 3)]


@pytest.mark.parametrize("place", range(len(MESHES)))
def test_from_any_mesh_to_any_other_bitwise(place: int, tmp_path: Path, fakes: Any) -> None:
    first = MESHES[place]
    run_in_threads(math.prod(first), save, first, tmp_path / "c", fakes)
    for second in MESHES[place % 2 :: 2]:
        run_in_threads(math.prod(second), load, second, tmp_path / "c", fakes)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_checkpoint_of_a_mesh_is_read_without_ranks_in_any_dtype(
    dtype: Any, tmp_path: Path, fakes: Any
) -> None:
    run_in_threads(4, save, (1, 2, 2), tmp_path / "c", fakes, dtype)
    load(None, (1, 1, 1), tmp_path / "c", fakes, dtype)
    arrays = checkpoint.load_arrays(tmp_path / "c")
    assert {name: array.shape for name, array in arrays.items()} == SHAPES
    flat = np.concatenate([array.ravel() for array in arrays.values()])
    assert flat.tobytes() == vectors(1, fakes, dtype)["model"]["parameters"].tobytes()
    checkpoint.convert(tmp_path / "c", tmp_path / "one", "checkpoint")
    document = json.loads((tmp_path / "one" / "manifest.json").read_text())
    for record in document["content"]["arrays"].values():
        assert [piece["tensor"] for piece in record["pieces"]] == [*SHAPES]
    run_in_threads(4, load, (2, 2, 1), tmp_path / "one", fakes, dtype)
    assert "6 parameters" in str(checkpoint.check(tmp_path / "one"))


def test_a_rank_without_pieces(tmp_path: Path, fakes: Any) -> None:
    """As a stage without parameters: three stages, of which two have nothing."""
    run_in_threads(3, save, (3, 1, 1), tmp_path / "c", fakes)
    files = sorted(entry.name for entry in (tmp_path / "c").iterdir())
    assert files == ["manifest.json", "rank00000.safetensors"]
    run_in_threads(3, load, (3, 1, 1), tmp_path / "c", fakes)


def test_one_replica_writes_and_the_others_do_not(tmp_path: Path, fakes: Any) -> None:
    run_in_threads(2, save, (1, 2, 1), tmp_path / "c", fakes)
    document = json.loads((tmp_path / "c" / "manifest.json").read_text())
    pieces = document["content"]["arrays"]["parameters"]["pieces"]
    assert len([piece for piece in pieces if piece["tensor"] == "qkv.weight"]) == 6
    assert [p["file"][:9] for p in pieces if p["tensor"] == "out.bias"] == ["rank00000"]
