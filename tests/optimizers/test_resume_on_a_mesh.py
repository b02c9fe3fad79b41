"""A checkpoint of one mesh resumes on any other, under any strategy and in one process."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard import checkpoint
from mpishard.errors import CheckpointError

generator = np.random.default_rng(0)
TOKENS = generator.integers(0, 11, (26, 6))
TARGETS = generator.integers(-1, 11, (26, 6))
FIRST, TOTAL = 3, 6  # steps before and after; an epoch has three

# Strategy, world size, sizes, further options.
MESHES = {
    "fsdp": ("fsdp", 3, (), {}),
    "(2,2,1)": ("hybrid", 4, (2, 2, 1), {"schedule": "interleaved", "micro_batch_count": 2}),
    "(2,1,2) fsdp": (
        "hybrid", 4, (2, 1, 2),
        {"data_parallel_strategy": "fsdp", "schedule": "1f1b", "micro_batch_count": 3},
    ),
    "ddp": ("ddp", 2, (), {}),
    "(1,2,2) zero2": ("hybrid", 4, (1, 2, 2), {"data_parallel_strategy": "zero2"}),
    "(4,1,1)": ("hybrid", 4, (4, 1, 1), {"schedule": "zb-h1", "micro_batch_count": 4}),
    "(2,1,1) zb-v": ("hybrid", 2, (2, 1, 1), {"schedule": "zb-v", "micro_batch_count": 2}),
    "pipeline": ("pipeline", 3, (), {"micro_batch_count": 2}),
    "tensor": ("tensor", 3, (), {"sequence_parallel": True}),
    "(1,1,1)": ("hybrid", 1, (1, 1, 1), {}),
}  # fmt: skip
CLASSES = {
    "hybrid": (ms.HybridShardedModel, ms.HybridShardedOptimizer),
    "pipeline": (ms.PipelineParallelModel, ms.PipelineParallelOptimizer),
    "tensor": (ms.TensorParallelModel, ms.TensorParallelOptimizer),
    "fsdp": (ms.FSDPModel, ms.FSDPOptimizer),
    "ddp": (ms.DDPModel, ms.DDPOptimizer),
}
NAMES = list(MESHES)


def plain_model(seed: int = 0) -> Any:
    return ms.nn.GPT(
        vocabulary_size=11,
        context_length=6,
        width=12,
        heads=3,
        layers=2,
        seed=seed,
        dtype="float64",
        tied_embeddings=True,
    )


def rule(kind: str = "adam") -> Any:
    options = {"parameter_options": {"block0_mlp.*.bias": {"frozen": True}}}
    if kind == "sgd":
        return ms.optimizers.SGD(1e-3, 0.9, **options)
    return ms.optimizers.AdamW(1e-3, weight_decay=0.1, **options)


def build(backend: Any, name: str, kind: str = "adam", seed: int = 0) -> tuple[Any, Any]:
    strategy, _, sizes, options = MESHES[name]
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=40)
    model_class, optimizer_class = CLASSES[strategy]
    model = model_class(plain_model(seed), config, *sizes, **options)
    return model, optimizer_class(rule(kind), config, *sizes)


def train(
    name: str, kind: str = "adam", seed: int = 0, **options: Any
) -> tuple[list[float], Any, Any]:
    """Return losses, parameters at the end, and the best score."""

    def body(backend: Any) -> Any:
        model, optimizer = build(backend, name, kind, seed)
        data = ms.OptimizationInputData(
            model=model,
            x_train=TOKENS,
            y_train=TARGETS,
            x_validation=TOKENS[:7],
            y_validation=TARGETS[:7],
            batch_size=9,
            epochs=2,
            seed=3,
            progress=False,
            keep_best=True,
            validate_every=2,
            **options,
        )
        result = optimizer.optimize(data)
        assert result.iterations == options.get("max_steps", TOTAL)
        return result.loss_history, model.get_parameters(), result.best_fitness_score

    return ms.run_in_threads(MESHES[name][1], body)[0]


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def whole() -> Any:
    return {kind: train("fsdp", kind) for kind in ("sgd", "adam")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Any:
    """Return the checkpoints of each mesh in the middle of its run."""
    paths: dict[Any, Path] = {}

    def path(name: str, kind: str) -> Path:
        if (name, kind) not in paths:
            target = tmp_path_factory.mktemp("saved") / "run"
            train(name, kind, max_steps=FIRST, checkpoint=target)
            paths[name, kind] = target
        return paths[name, kind]

    return path


# Each mesh's checkpoint is read by two others.
PAIRS = [
    (NAMES[(place + distance) % len(NAMES)], name)
    for place, name in enumerate(NAMES)
    for distance in ((1, 4) if os.environ.get("MPISHARD_TEST_FULL") else (4,))
]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_run_goes_on_on_any_mesh(saved: Any, whole: Any, before: str, after: str) -> None:
    kind = "adam" if NAMES.index(after) % 2 else "sgd"
    losses, parameters, best = train(after, kind, seed=5, resume=saved(before, kind))
    close(losses, whole[kind][0][FIRST:])
    close(parameters, whole[kind][1])
    close(best, whole[kind][2])


@pytest.fixture(scope="module")
def resumed(saved: Any) -> Any:
    """Return the results of runs that resume on the mesh that saved them."""
    return functools.cache(lambda name: train(name, seed=5, resume=saved(name, "adam")))


@pytest.mark.parametrize("name", ["(2,2,1)", "(2,1,2) fsdp", "(2,1,1) zb-v"])
def test_on_the_same_mesh_to_the_bit(resumed: Any, name: str) -> None:
    losses, parameters, best = train(name)
    again = resumed(name)
    assert again[0] == losses[FIRST:]
    np.testing.assert_array_equal(again[1], parameters)
    assert again[2] == best


@pytest.mark.parametrize(
    ("world_size", "sizes", "options"),
    [
        (4, (4, 1, 1), {"schedule": "zb-v", "micro_batch_count": 2}),
        (6, (6, 1, 1), {"schedule": "interleaved", "micro_batch_count": 3}),
        (6, (3, 1, 2), {"schedule": "1f1b", "data_parallel_strategy": "fsdp"}),
    ],
)
def test_stages_without_parameters_or_layers(
    tmp_path: Path, world_size: int, sizes: Any, options: Any
) -> None:
    """Three layers over more stages: some ranks store, write and read nothing."""
    x = np.linspace(-1, 1, 60).reshape(12, 5)

    def body(backend: Any, path: Path | None = None, resume: Any = None) -> Any:
        config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
        plain = ms.nn.MLP([5, 4, 2], activation="tanh", seed=1 if resume is None else 9)
        mesh = sizes if backend.world_size > 1 else (1, 1, 1)
        model = ms.HybridShardedModel(plain, config, *mesh, **options)
        optimizer = ms.HybridShardedOptimizer(
            ms.optimizers.LAMB(
                1e-2, clip_global_norm=0.1, parameter_options={"*.bias": {"frozen": True}}
            ),
            config, *mesh,
        )  # fmt: skip
        result = optimizer.optimize(
            ms.OptimizationInputData(
                model=model,
                x_train=x,
                y_train=np.sin(x[:, :2]),
                x_validation=x[:5],
                y_validation=x[:5, :2],
                batch_size=4,
                epochs=2,
                progress=False,
                keep_best=True,
                max_steps=FIRST if path else TOTAL,
                checkpoint=path,
                resume=resume,
            )
        )
        owned = len(model.local_parameter_shard)
        assert optimizer.serialize() == optimizer.serialize()
        return result.loss_history, model.get_parameters(), owned

    ((losses, parameters, _),) = ms.run_in_threads(1, body)
    found = ms.run_in_threads(world_size, body)
    assert 0 in [owned for *_, owned in found]
    ms.run_in_threads(world_size, body, tmp_path / "run")
    checkpoint.check(tmp_path / "run")
    again = ms.run_in_threads(world_size, body, None, tmp_path / "run")
    one = ms.run_in_threads(1, body, None, tmp_path / "run")
    for (mine, full, _), wanted in ((found[-1], losses), (again[-1], losses[FIRST:])):
        close(mine, wanted)
        close(full, parameters)
    np.testing.assert_array_equal(again[0][1], found[0][1])
    close(one[0][1], parameters)


@pytest.mark.parametrize("name", NAMES[::2])
def test_a_checkpoint_is_read_without_ranks(
    saved: Any, resumed: Any, name: str, tmp_path: Path
) -> None:
    path = saved(name, "adam")
    checkpoint.check(path)
    arrays = checkpoint.load_arrays(path)
    plain = plain_model(7)
    plain.load_model(path)
    entries = plain.parameter_table.entries
    assert list(arrays) == [entry.name for entry in entries]
    full = plain.get_parameters()
    for entry in entries:
        np.testing.assert_array_equal(arrays[entry.name].ravel(), full[entry.start : entry.stop])
    whole_path = tmp_path / "one"
    checkpoint.convert(path, whole_path, "checkpoint")
    checkpoint.check(whole_path)
    for key, values in checkpoint.load_arrays(whole_path).items():
        np.testing.assert_array_equal(values, arrays[key])
    again = train(name, seed=5, resume=whole_path)
    np.testing.assert_array_equal(again[1], resumed(name)[1])


@pytest.mark.parametrize("name", NAMES[1::2])
def test_a_plain_models_file_is_loaded_and_back(name: str, tmp_path: Path) -> None:
    plain = plain_model(3)
    plain.save_model(tmp_path / "plain")

    def body(backend: Any) -> None:
        model, _ = build(backend, name)
        model.load_model(tmp_path / "plain")
        np.testing.assert_array_equal(model.get_parameters(), plain.get_parameters())
        model.train(TOKENS[:4], TARGETS[:4])
        model.save_model(tmp_path / "sharded")
        other = plain_model(4)
        other.load_model(tmp_path / "sharded")
        np.testing.assert_array_equal(model.get_parameters(), other.get_parameters())
        before = model.get_parameters()
        for path, kind in ((tmp_path / "none", FileNotFoundError), (" ", ValueError)):
            with pytest.raises(kind):
                model.load_model(path)
        wrong = ms.nn.GPT(
            vocabulary_size=11, context_length=6, width=12, heads=3, layers=3, dtype="float64"
        )
        if backend.rank == 0:
            wrong.save_model(tmp_path / "wrong")
        backend.barrier()
        with pytest.raises(CheckpointError, match="block2"):
            model.load_model(tmp_path / "wrong")
        np.testing.assert_array_equal(model.get_parameters(), before)

    ms.run_in_threads(MESHES[name][1], body)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_the_bytes_of_an_optimizer_are_the_same_everywhere(kind: str, whole: Any) -> None:
    """Each mesh resumes the runs of all others; without --full the rules take turns."""

    def half(backend: Any, name: str) -> tuple[bytes, bytes]:
        model, optimizer = build(backend, name, kind)
        data = ms.OptimizationInputData(
            model=model, x_train=TOKENS, y_train=TARGETS, batch_size=9, epochs=1, seed=3,
            progress=False,
        )  # fmt: skip
        optimizer.optimize(data)
        return model.serialize(), optimizer.serialize()

    def rest(backend: Any, name: str, given: tuple[bytes, bytes]) -> Any:
        model, optimizer = build(backend, name, kind, seed=8)
        model.deserialize(given[0])
        optimizer.deserialize(given[1])  # before it knows its model
        for step in range(FIRST, TOTAL):
            batch = order.batch(*divmod(step, order.batches_per_epoch))
            mine = ms.ShardLayout(len(batch), model.data_size).slice(model.data_rank)
            optimizer.step(model, TOKENS[batch][mine], TARGETS[batch][mine])
        assert optimizer.steps == TOTAL
        return model.get_parameters()

    order = ms.data.GlobalBatchSampler(26, 9, seed=3)
    for place, name in enumerate(NAMES):
        if place % 2 != (kind == "adam") and not os.environ.get("MPISHARD_TEST_FULL"):
            continue
        found = ms.run_in_threads(MESHES[name][1], half, name)
        assert all(other == found[0] for other in found)
        other = NAMES[(place + 4) % len(NAMES)]
        close(ms.run_in_threads(MESHES[other][1], rest, other, found[0])[-1], whole[kind][1])
