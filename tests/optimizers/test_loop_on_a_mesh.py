"""Training loops on meshes: the same run as in one process, resumed on any mesh."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.testing.worlds import in_worlds

IS_FULL = bool(os.environ.get("MPISHARD_TEST_FULL"))
SAMPLES, BATCH = 26, 9
generator = np.random.default_rng(0)
TOKENS = generator.integers(0, 11, (SAMPLES, 6))
TARGETS = generator.integers(-1, 11, (SAMPLES, 6))
X = generator.standard_normal((SAMPLES, 5))
Y = np.sin(X[:, :2])

# Strategy, world size, sizes, further options.
MESHES = {
    "(1,1,1)": ("hybrid", 1, (1, 1, 1), {}),
    "(2,1,1)": ("hybrid", 2, (2, 1, 1), {"schedule": "zb-v", "micro_batch_count": 2}),
    "(2,1,2) fsdp": (
        "hybrid", 4, (2, 1, 2),
        {"data_parallel_strategy": "fsdp", "schedule": "1f1b", "micro_batch_count": 3},
    ),
    "(2,2,1)": ("hybrid", 4, (2, 2, 1), {"schedule": "interleaved", "micro_batch_count": 2}),
    "(1,2,2) zero2": ("hybrid", 4, (1, 2, 2), {"data_parallel_strategy": "zero2"}),
    "(4,1,1)": ("hybrid", 4, (4, 1, 1), {"schedule": "zb-h1", "micro_batch_count": 4}),
    "pipeline": ("pipeline", 3, (), {"micro_batch_count": 2}),
    "tensor": ("tensor", 3, (), {"sequence_parallel": True}),
    "fsdp": ("fsdp", 3, (), {}),
    "zero1": ("zero1", 2, (), {}),
}  # fmt: skip
CLASSES = {
    "hybrid": (ms.HybridShardedModel, ms.HybridShardedOptimizer),
    "pipeline": (ms.PipelineParallelModel, ms.PipelineParallelOptimizer),
    "tensor": (ms.TensorParallelModel, ms.TensorParallelOptimizer),
    "fsdp": (ms.FSDPModel, ms.FSDPOptimizer),
    "zero1": (ms.ZeRO1Model, ms.ZeRO1Optimizer),
}
NAMES = [name for name in MESHES if name != "(1,1,1)"]
by_mesh, by_odd_meshes, by_even_meshes = (
    pytest.mark.parametrize(("name", "world_size"), [(name, MESHES[name][1]) for name in names])
    for names in (NAMES, *((NAMES, NAMES) if IS_FULL else (NAMES[::2], NAMES[1::2])))
)


def plain_model(kind: str = "gpt", seed: int = 1) -> Any:
    if kind == "mlp":
        return ms.nn.MLP([5, 7, 6, 2], activation="tanh", seed=seed)
    return ms.nn.GPT(
        vocabulary_size=11, context_length=6, width=12, heads=3, layers=2, seed=seed,
        dtype="float64", tied_embeddings=True,
    )  # fmt: skip


def rule(kind: str = "adam") -> Any:
    options = {"parameter_options": {"block0_mlp.*.bias": {"frozen": True}}}
    if kind == "sgd":
        return ms.optimizers.SGD(1e-3, 0.9, **options)
    rate = ms.optimizers.WarmUp(3, ms.optimizers.Cosine(1e-3, 20))
    return ms.optimizers.AdamW(rate, weight_decay=0.1, clip_global_norm=0.05, **options)


def build(backend: Any, name: str, kind: str = "adam", plain: Any = None) -> tuple[Any, Any]:
    strategy, _, sizes, options = MESHES[name]
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=40)
    model_class, optimizer_class = CLASSES[strategy]
    plain = plain_model(seed=backend.rank) if plain is None else plain
    model = model_class(plain, config, *sizes, **options)
    return model, optimizer_class(rule(kind), config, *sizes)


def data(model: Any, **options: Any) -> Any:
    choices = {
        "x_train": TOKENS, "y_train": TARGETS, "x_validation": TOKENS[:7],
        "y_validation": TARGETS[:7], "x_test": TOKENS[5:15], "y_test": TARGETS[5:15],
        "batch_size": BATCH, "epochs": 3, "seed": 3, "progress": False, "validate_every": 2,
        "training_statistics": True,
    }  # fmt: skip
    return ms.OptimizationInputData(model=model, **(choices | options))


def close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def in_one_process(kind: str = "adam", **options: Any) -> tuple[Any, Any]:
    def body(backend: Any) -> tuple[Any, Any]:
        model, optimizer = build(backend, "fsdp", kind, plain_model(seed=0))
        result = optimizer.optimize(data(model, **options))
        return result, model.get_parameters()

    (found,) = ms.run_in_threads(1, body)
    return found


@pytest.fixture(scope="module")
def whole_run() -> Any:
    return in_one_process()


@by_mesh
@in_worlds()
def test_a_run_is_that_of_one_process(backend: Any, name: str, whole_run: Any) -> None:
    expected, parameters = whole_run
    model, optimizer = build(backend, name)
    found = optimizer.optimize(data(model, predictions=True))
    close(found.loss_history, expected.loss_history)
    close(found.fitness_history, expected.fitness_history)
    close(found.validation_history, expected.validation_history)
    assert found.best_iteration == expected.best_iteration
    assert found.weight == expected.weight
    close(model.get_parameters(), parameters)
    for part in ("training", "validation", "test"):
        mine, other = (getattr(r, f"{part}_result") for r in (found, expected))
        assert mine.stats.keys() == other.stats.keys() >= {"loss", "accuracy"}
        for key, value in mine.stats.items():
            close(value, other.stats[key])
        # The samples of its data rank, all of it on each of its ranks; all data ranks have all.
        plain = plain_model()
        plain.set_parameters(parameters)
        close(mine.predictions, plain.predict(mine.x[mine.indices]))
        seen = np.zeros((model.data_size, len(mine.x)))
        seen[model.data_rank, mine.indices] = 1
        seen = backend.all_reduce(seen)
        assert (seen.sum(axis=0) == backend.world_size / model.data_size).all()
    assert found.test_loss == found.test_result.stats["loss"]


@by_odd_meshes
@in_worlds()
def test_a_plain_model_is_wrapped_as_the_optimizer_says(
    backend: Any, name: str, whole_run: Any
) -> None:
    strategy, _, sizes, options = MESHES[name]
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=40)
    optimizer = CLASSES[strategy][1](rule(), config, *sizes, **options)
    plain = plain_model(seed=backend.rank)
    result = optimizer.optimize(data(plain, max_steps=2))
    model = result.model
    assert isinstance(model, CLASSES[strategy][0])
    if "micro_batch_count" in options:
        assert model.micro_batch_count == options["micro_batch_count"]
    close(result.loss_history, whole_run[0].loss_history[:2])
    assert optimizer.optimize(data(plain, max_steps=1)).model is model  # goes on with it
    full = model.get_parameters()
    assert optimizer.model is model
    np.testing.assert_array_equal(model.release().get_parameters(), full)


# Noise to fit: the validation loss goes up at once.
NOISE = {
    "y_validation": (TARGETS[:7] + 5) % 11, "patience": 2, "epochs": 20, "validate_every": 1,
    "batch_size": 26, "shuffle": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def run_on_noise() -> Any:
    return in_one_process("sgd", **NOISE)


@by_odd_meshes
@in_worlds()
def test_the_best_is_put_back_and_patience_ends(backend: Any, name: str, run_on_noise: Any) -> None:
    expected, parameters = run_on_noise
    model, optimizer = build(backend, name, "sgd")
    found = optimizer.optimize(data(model, **NOISE))
    assert found.stopped_early is expected.stopped_early
    assert found.iterations == expected.iterations
    assert found.best_iteration == expected.best_iteration
    close(found.best_fitness_score, expected.best_fitness_score)
    close(model.get_parameters(), parameters)
    close(found.validation_result.stats["loss"], found.best_fitness_score)


# ---------------------------------------------------------------------------------- local data


@functools.cache
def descent(bounds: tuple[int, ...]) -> tuple[Any, float]:
    """Parameters after four steps, each on one sample of each data rank; the loss of all."""
    plain = plain_model(seed=0)
    theta, velocity = plain.get_parameters(), 0
    mask = np.ones(len(theta))
    for entry in plain.parameter_table.entries:
        if entry.name.startswith("block0_mlp") and entry.name.endswith(".bias"):
            mask[entry.start : entry.stop] = 0
    for step in range(4):
        rows = [start + step for start in bounds[:-1]]
        g = plain.with_parameters(theta).compute_gradients(TOKENS[rows], TARGETS[rows])
        velocity = 0.9 * velocity + mask * g
        theta = theta - 1e-3 * velocity
    return theta, plain.with_parameters(theta).compute_loss_and_gradients(TOKENS, TARGETS)[0]


@by_even_meshes
@in_worlds()
def test_each_data_rank_may_bring_its_own(backend: Any, name: str) -> None:
    model, optimizer = build(backend, name, "sgd")
    bounds = (*[0, 15, 22][: model.data_size], SAMPLES)
    mine = slice(bounds[model.data_rank], bounds[model.data_rank + 1])
    given = {
        "x_train": TOKENS[mine], "y_train": TARGETS[mine], "local_data": True,
        "x_validation": TOKENS[mine], "y_validation": TARGETS[mine], "x_test": None,
        "y_test": None, "batch_size": model.data_size, "epochs": 1, "max_steps": 4,
        "shuffle": False, "validate_every": 4,
    }  # fmt: skip
    found = optimizer.optimize(data(model, **given))
    theta, total = descent(bounds)
    close(model.get_parameters(), theta)
    close(found.validation_result.stats["loss"], total)


@by_odd_meshes
@in_worlds()
def test_ranks_of_a_replica_must_bring_the_same(backend: Any, name: str) -> None:
    model, optimizer = build(backend, name, "sgd")
    if model.data_size == backend.world_size:
        return
    before = model.get_parameters()
    more = int(backend.rank == backend.world_size - 1)
    own = {
        "local_data": True,
        "batch_size": 8,
        "x_test": None,
        "y_test": None,
        "epochs": 1,
        "shuffle": False,
    }
    for part in ("train", "validation"):
        short = {f"x_{part}": TOKENS[: 10 + more], f"y_{part}": TARGETS[: 10 + more]}
        with pytest.raises(
            ValueError, match=rf"x_{part} has 10 samples on rank \d and 11 on rank.*data_rank"
        ):
            optimizer.optimize(data(model, **own, **short))
    with pytest.raises(ValueError, match="must be given the same"):
        optimizer.optimize(data(model, **own, x_train=(TOKENS + more) % 11))
    np.testing.assert_array_equal(model.get_parameters(), before)
    # Targets of a validation are no input: one rank of a replica reports them.
    found = optimizer.optimize(data(model, **own, y_validation=(TARGETS[:7] + more) % 11))
    losses = backend.all_gather(np.array([found.validation_history[-1][1]]))
    assert (losses == losses[0]).all()
    with pytest.raises(ValueError, match="every rank must ask for the same training"):
        optimizer.optimize(data(model, epochs=1 + more))
