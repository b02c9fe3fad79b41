"""Parameters and state of one mesh load on any other, from files and from bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.models import HybridShardedModel
from mpishard.optimizers import HybridShardedOptimizer

# (pipeline, tensor, data), policy of the data axis, schedule.
MESHES = [
    ((1, 1, 1), "ddp", "gpipe"), ((1, 2, 1), "ddp", "gpipe"), ((1, 2, 2), "fsdp", "gpipe"),
    ((2, 1, 2), "zero1", "1f1b"), ((2, 2, 1), "ddp", "zb-v"), ((2, 2, 2), "zero2", "interleaved"),
    ((1, 4, 1), "fsdp", "gpipe"), ((3, 1, 1), "fsdp", "gpipe"),
]  # fmt: skip
FROZEN = {"*.norm.*": {"frozen": True}}


def build(backend: Any, problems: Any, kind: str, mesh: Any) -> tuple[Any, Any]:
    sizes, data, schedule = mesh
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    plain = problems.MODELS[kind](backend.rank)
    options = {"data_parallel_strategy": data, "schedule": schedule, "micro_batch_count": 2}
    model = HybridShardedModel(plain, config, *sizes, **options)
    rule = ms.optimizers.AdamW(1e-3, parameter_options=FROZEN if kind == "gpt" else {})
    return model, HybridShardedOptimizer(rule, config, *sizes)


def step(model: Any, optimizer: Any, problems: Any, kind: str, number: int) -> None:
    x, y = problems.batch(kind, number)
    mine = problems.part(len(x), number, model.data_rank, model.data_size)
    optimizer.step(model, x[mine], y[mine])


def world(mesh: Any) -> int:
    return int(np.prod(mesh[0]))


@pytest.mark.parametrize(
    ("place", "kind"), [(1, "gpt"), (2, "tied"), (3, "gpt"), (4, "tied"), (5, "gpt")]
)
def test_a_checkpoint_of_one_mesh_loads_on_others(
    place: int, kind: str, problems: Any, tmp_path: Path
) -> None:
    first, path = MESHES[place], tmp_path / "c"

    def save(backend: Any) -> Any:
        model, optimizer = build(backend, problems, kind, first)
        for number in range(2):
            step(model, optimizer, problems, kind, number)
        ms.checkpoint.save(path, model, optimizer)
        found = model.gather_full_parameters().tobytes(), optimizer.serialize(), model.serialize()
        step(model, optimizer, problems, kind, 2)
        return (*found, model.gather_full_parameters())

    saved = ms.run_in_threads(world(first), save)
    values, state, parameters, after = saved[0]
    assert all(rank[:3] == saved[0][:3] for rank in saved)
    arrays = ms.checkpoint.load_arrays(path)
    assert np.concatenate([a.ravel() for a in arrays.values()]).tobytes() == values

    def load(backend: Any, mesh: Any, *, from_bytes: bool) -> None:
        model, optimizer = build(backend, problems, kind, mesh)
        step(model, optimizer, problems, kind, 5)  # somewhere else
        if from_bytes:
            model.deserialize(parameters)
            optimizer.deserialize(state)
        else:
            ms.checkpoint.load(path, model, optimizer)
        assert model.gather_full_parameters().tobytes() == values
        assert optimizer.serialize() == state
        assert model.serialize() == parameters
        step(model, optimizer, problems, kind, 2)
        assert np.abs(model.gather_full_parameters() - after).max() < 1e-12

    for shift in (3, 7):
        mesh = MESHES[(place + shift) % len(MESHES)]
        ms.run_in_threads(world(mesh), load, mesh, from_bytes=shift == 3)


@pytest.mark.parametrize("mesh", [(1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)])
def test_ranks_with_the_same_parameters_write_them_in_turn(mesh: Any, tmp_path: Path) -> None:
    """Norms, positions and biases of a tensor group; embeddings that two stages share."""

    def save(backend: Any) -> None:
        model = ms.nn.GPT(
            vocabulary_size=512, context_length=512, width=128, heads=4, layers=2,
            tied_embeddings=True,
        )  # fmt: skip
        config = ms.ShardingConfiguration(backend)
        sharded = HybridShardedModel(model, config, *mesh, micro_batch_count=8)
        optimizer = HybridShardedOptimizer(ms.optimizers.AdamW(1e-3), config, *mesh)
        ms.checkpoint.save(tmp_path / "c", sharded, optimizer)

    ms.run_in_threads(int(np.prod(mesh)), save)
    content = json.loads((tmp_path / "c" / "manifest.json").read_text())["content"]
    written: dict[tuple[str, str], int] = {}
    for kind, record in content["arrays"].items():
        # That each element is written once, reading the manifest has checked; the sums are all.
        for piece in record["pieces"]:
            place = kind, piece["file"]
            written[place] = written.get(place, 0) + piece["stop"] - piece["start"]
        files = [elements for (of, _), elements in written.items() if of == kind]
        assert len(files) == np.prod(mesh)
        assert sum(files) == content["length"]
        # What data ranks share, they share by where it lies in units; the others take turns.
        groups = np.reshape(files, mesh).sum(axis=2)
        assert np.ptp(groups, axis=1).max() <= 1000, "norms and biases, 128 and 512 elements each"
        # The first stage has positions, 65,536 of 530,000 elements, and the second one has not.
        assert np.ptp(groups) <= (1000 if mesh[0] == 1 else 33_000)
    assert len(content["arrays"]) == 3
    ms.checkpoint.check(tmp_path / "c")
