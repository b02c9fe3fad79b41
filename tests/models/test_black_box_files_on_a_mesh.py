"""Checkpoints of a black box on a mesh load on other meshes and in one process. Copies."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.base.arrays import to_host
from mpishard.models import HybridShardedModel
from mpishard.optimizers import HybridShardedOptimizer
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds
from mpishard.training.run_state import BestParameters

X = np.random.default_rng(0).standard_normal((40, 5))
Y = np.sin(X[:, :2])
# Where the ranks stand when a job is saved, and where when it goes on.
MESHES = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    3: [(3, 1, 1), (1, 3, 1), (1, 1, 3)],
    4: [(2, 2, 1), (2, 1, 2), (1, 2, 2)],
}
DATA = ("ddp", "fsdp", "zero1", "zero2")


def build(
    backend: Any,
    problems: Any,
    kind: str,
    mesh: Any,
    data: str = "zero1",
    rule: str = "adamw",
    **options: Any,
) -> tuple[Any, Any]:
    config = ShardingConfiguration(backend)
    model = HybridShardedModel(
        problems.MODELS[kind](backend.rank), config, *mesh, data_parallel_strategy=data
    )
    return model, HybridShardedOptimizer(problems.RULES[rule](**options), config, *mesh)


def steps(model: Any, optimizer: Any, *numbers: int) -> None:
    for number in numbers:
        batch = slice(8 * number, 8 * number + 8)
        mine = ms.ShardLayout(8, model.data_size).slice(model.data_rank)
        optimizer.step(model, X[batch][mine], Y[batch][mine])


def training(model: Any, **options: Any) -> Any:
    return ms.OptimizationInputData(
        model=model, x_train=X, y_train=Y, batch_size=8, epochs=3, seed=3, progress=False, **options
    )


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def sequential(problems: Any, kind: str, rule: str = "adamw", count: int = 5) -> Any:
    """Parameters after some steps in one process."""

    def body(backend: Any) -> Any:
        model, optimizer = build(backend, problems, kind, (1, 1, 1), rule=rule)
        steps(model, optimizer, *range(count))
        return model.get_parameters()

    return ms.run_in_threads(1, body)[0]


@pytest.mark.parametrize("kind", ["function", "autograd", "one_number"])
@pytest.mark.parametrize("way", ["directory", "bytes"])
@in_worlds(2, 3, 4)
def test_a_run_continues_on_another_mesh(
    backend: Any, problems: Any, shared_path: Any, kind: str, way: str
) -> None:
    expected = sequential(problems, kind)
    found = MESHES[backend.world_size]
    for number, (here, there) in enumerate(zip(found, [*found[1:], found[0]], strict=True)):
        model, optimizer = build(backend, problems, kind, here, DATA[number % 4])
        steps(model, optimizer, 0, 1, 2)
        other, go_on = build(backend, problems, kind, there, DATA[number % 3])
        if way == "bytes":
            data = model.serialize()
            assert len(set(backend.all_gather(np.array([zlib.crc32(data)])).tolist())) == 1
            state = optimizer.serialize()
            other.deserialize(data)
            go_on.deserialize(state)
        else:
            ms.checkpoint.save(shared_path / f"{kind}{number}", model, optimizer)
            arrays = ms.checkpoint.load_arrays(shared_path / f"{kind}{number}")
            flat = np.concatenate([array.ravel() for array in arrays.values()])
            np.testing.assert_array_equal(flat, model.get_parameters())
            backend.barrier()
            ms.checkpoint.load(shared_path / f"{kind}{number}", other, go_on)
        np.testing.assert_array_equal(other.get_parameters(), model.get_parameters())
        if kind != "autograd":
            np.testing.assert_array_equal(
                other.wrapped_model.get_parameters(), model.get_parameters()
            )
        steps(other, go_on, 3, 4)
        close(other.get_parameters(), expected)


@in_worlds(4)
def test_a_mesh_reads_what_data_parallelism_wrote_and_the_reverse(
    backend: Any, problems: Any, shared_path: Any
) -> None:
    kind = "function"
    config = ShardingConfiguration(backend)
    plain = ms.as_distributed(problems.MODELS[kind](0), config, "fsdp")
    rule = ms.as_distributed(problems.RULES["adamw"](), config, "fsdp")
    steps(plain, rule, 0, 1)
    ms.checkpoint.save(shared_path / "fsdp", plain, rule)
    model, optimizer = build(backend, problems, kind, (2, 1, 2))
    ms.checkpoint.load(shared_path / "fsdp", model, optimizer)
    steps(model, optimizer, 2)
    ms.checkpoint.save(shared_path / "mesh", model, optimizer)
    ms.checkpoint.load(shared_path / "mesh", plain, rule)
    steps(plain, rule, 3, 4)
    close(plain.get_parameters(), sequential(problems, kind))


# ------------------------------------------------------------------------------------ the loop


@pytest.mark.parametrize("kind", ["function", "one_number"])
@in_worlds(2, 3)
def test_the_loop_keeps_the_best_and_resumes_elsewhere(
    backend: Any, problems: Any, shared_path: Any, kind: str
) -> None:
    """Validation, the best parameters, checkpoints and resumption, at two meshes."""
    theta = problems.MODELS["function"](0).get_parameters()
    # Farther from the training data than the first parameters are: the last are not the best.
    away = 10.0 + 0 * Y[:7] if kind == "one_number" else 5 * (X[:7] @ theta[:10].reshape(5, 2))
    options = {
        "x_validation": X[:7], "y_validation": away, "keep_best": True, "validate_every": 3,
        "training_statistics": True,
    }  # fmt: skip

    def alone(inner: Any) -> Any:
        model, optimizer = build(inner, problems, kind, (1, 1, 1))
        optimizer.wrapped_optimizer.learning_rate = 0.01
        return optimizer.optimize(training(model, **options)), model.get_parameters()

    ((expected, theta),) = ms.run_in_threads(1, alone)
    assert expected.best_iteration < expected.iterations
    first, *_, last = MESHES[backend.world_size]
    folder = shared_path / kind
    for mesh, more in ((first, {"max_steps": 7}), (last, {"resume": folder})):
        model, optimizer = build(backend, problems, kind, mesh)
        optimizer.wrapped_optimizer.learning_rate = 0.01
        result = optimizer.optimize(training(model, checkpoint=folder, **options, **more))
    assert result.iterations == expected.iterations
    close(result.fitness_history, expected.fitness_history)
    close(
        [loss for _, loss in result.validation_history],
        [loss for _, loss in expected.validation_history],
    )
    assert result.best_iteration == expected.best_iteration
    close(model.get_parameters(), theta)
    close(model.wrapped_model.get_parameters(), theta)
    close(result.training_result.stats["loss"], expected.training_result.stats["loss"])


@in_worlds(2)
def test_a_rank_that_owns_nothing_writes_the_same_kinds(backend: Any, problems: Any) -> None:
    model, _ = build(backend, problems, "one_number", (2, 1, 1))
    best = BestParameters(model)
    assert best.arrays_to_write() == {}
    best.keep()
    assert [*best.arrays_to_write()] == [BestParameters.KIND]
    assert len(best.arrays_to_write()[BestParameters.KIND]) == 1 - backend.rank


@in_worlds(4)
def test_a_plain_model_is_wrapped_with_the_optimizers_mesh(backend: Any, problems: Any) -> None:
    optimizer = HybridShardedOptimizer(
        problems.RULES["sgd"](),
        ShardingConfiguration(backend),
        2,
        1,
        2,
        data_parallel_strategy="ddp",
    )
    result = optimizer.optimize(training(problems.MODELS["function"](0)))
    assert result.model.mesh.sizes == (2, 1, 2)
    assert result.model.get_model_metadata().properties["DataParallelStrategy"] == "ddp"
    assert result.fitness_history[-1] < result.fitness_history[0]


# ------------------------------------------------------------------------------------- the surface


@pytest.mark.parametrize("kind", ["function", "autograd"])
@in_worlds(1, 2, 3, 4)
def test_copies_and_vectors(backend: Any, problems: Any, kind: str) -> None:
    for mesh in MESHES[backend.world_size]:
        model, optimizer = build(backend, problems, kind, mesh)
        steps(model, optimizer, 0)
        theta = model.get_parameters()
        sent = backend.traffic.total_bytes, model.mesh.model.traffic.total_bytes
        copied = model.deep_copy()
        assert sent == (backend.traffic.total_bytes, model.mesh.model.traffic.total_bytes)
        assert copied.wrapped_model is not model.wrapped_model
        copied.train(*(a[: 8 * (model.data_rank + 1)] for a in (X, Y)))
        np.testing.assert_array_equal(model.get_parameters(), theta)
        assert (copied.get_parameters() != theta).all()
        other = model.with_parameters(2 * theta)
        np.testing.assert_array_equal(other.get_parameters(), 2 * theta)
        np.testing.assert_array_equal(model.get_parameters(), theta)
        model.set_parameters(3 * theta)
        np.testing.assert_array_equal(model.get_parameters(), 3 * theta)
        np.testing.assert_array_equal(np.concatenate(list(model.get_parameter_chunks())), 3 * theta)
        model.apply_gradients(theta, 1.0)
        close(model.get_parameters(), 2 * theta)
        plain = problems.MODELS[kind](0).with_parameters(2 * theta)
        mine = X[:4] + model.data_rank, Y[:4]
        close(model.compute_gradients(*mine), plain.compute_gradients(*mine))
        with model.unsharded() as whole:
            close(whole.get_parameters(), 2 * theta)
        last = backend.world_size - 1
        with model.unsharded(root=last) as whole:
            assert (whole is not None) == (backend.rank == last)
            if whole is not None:
                close(whole.get_parameters(), 2 * theta)
        optimizer.apply_gradients(theta, model)
        assert (model.get_parameters() != 2 * theta).all()
        theta = model.get_parameters()
        released = model.release()
        np.testing.assert_array_equal(released.get_parameters(), theta)


@in_worlds(1, 2, 4)
def test_each_rank_predicts_alone(backend: Any) -> None:
    """Every rank has all parameters: rows may differ, and one rank may predict alone."""
    model = HybridShardedModel(
        ms.FunctionModel(lambda t, x, y: (0.0, t), np.arange(3.0), lambda t, x: x @ t),
        ShardingConfiguration(backend),
        *MESHES[backend.world_size][0],
    )
    if backend.rank == 0:
        close(model.predict(np.ones((2, 3))), [3, 3])


@pytest.mark.parametrize("data", ["ddp", "zero1", "fsdp"])
@in_worlds(1, 2, 3, 4)
def test_frozen_parameters_do_not_change(backend: Any, problems: Any, data: str) -> None:
    """Some ranks own parts of frozen parameters alone, and have no gradient at all."""
    plain = problems.MODELS["autograd"](0)
    frozen = [e.name for e in plain.parameter_entries][1:]
    options = {name: {"frozen": True} for name in frozen}
    mask = np.concatenate(
        [np.full(e.size, float(e.name not in frozen)) for e in plain.parameter_entries]
    )
    expected, v = plain.get_parameters(), 0.0
    for number in range(3):
        batch = slice(8 * number, 8 * number + 8)
        g = plain.with_parameters(expected).compute_gradients(X[batch], Y[batch]) * mask
        v = 0.9 * v + g * min(1.0, 0.05 / np.linalg.norm(g))
        expected = expected - problems.RATE * v
    for mesh in MESHES[backend.world_size]:
        model, optimizer = build(
            backend, problems, "autograd", mesh, data, "sgd", parameter_options=options,
            clip_global_norm=0.05,
        )  # fmt: skip
        steps(model, optimizer, 0, 1, 2)
        close(to_host(model.get_parameters()), expected)
