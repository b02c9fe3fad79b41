"""Mixed precision on meshes: stages, slices and replicas compute in bfloat16, to the same bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mpishard as ms
from mpishard import checkpoint, nn
from mpishard.pipeline import SCHEDULE_NAMES, ActivationCheckpointConfig
from mpishard.testing.worlds import in_worlds

MESHES = {  # strategy, options
    "tensor": ("tensor", {}),
    "sequence": ("tensor", {"sequence_parallel": True}),
    "pipeline": ("pipeline", {"micro_batch_count": 2}),
    "data": ("hybrid", {"data_parallel_strategy": "fsdp"}),
}
FOUR = ("hybrid", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2})


def gpt(**options: Any) -> nn.GPT:
    return nn.GPT(
        vocabulary_size=11,
        context_length=6,
        width=16,
        heads=4,
        layers=2,
        seed=5,
        dtype=np.float32,
        **options,
    )


def wrapped(backend: Any, model: Any, strategy: str, options: Any, precision: Any) -> Any:
    return (
        ms.as_distributed(model, backend, strategy, precision=precision, **options),
        ms.as_distributed(ms.optimizers.AdamW(1e-2), backend, strategy, **options),
    )


def trained(
    backend: Any, strategy: str, options: Any, precision: Any = "bfloat16", **kind: Any
) -> Any:
    model, optimizer = wrapped(backend, gpt(**kind), strategy, options, precision)
    for step in range(3):
        rng = np.random.default_rng((step, model.data_rank))
        tokens = rng.integers(0, 11, (3 + model.data_rank, 7))
        optimizer.step(model, tokens[:, :-1], tokens[:, 1:])
    prediction = model.predict(tokens[:, :-1])
    assert prediction.dtype == np.float32
    return model, model.gather_full_parameters(), prediction


def check(backend: Any, monkeypatch: Any, strategy: str, options: Any, **kind: Any) -> None:
    """Arena and messages have the same bits, near those of float32 and not equal to them."""
    found = {}
    for arena, precision in (("auto", "bfloat16"), ("off", "bfloat16"), ("auto", None)):
        backend.barrier()
        monkeypatch.setenv("MPISHARD_ARENA", arena)
        backend.barrier()
        model, *found[arena, precision] = trained(backend, strategy, options, precision, **kind)
        if precision:
            parameters = model.engine.parameters
            for unit in model.engine.program.units:
                masters = np.empty(unit.length, np.float32)
                parameters.read(unit, masters)
                seen = parameters.unshard(unit).copy()
                parameters.reshard(unit)
                np.testing.assert_array_equal(seen, masters.astype(ml_dtypes.bfloat16))
    backend.barrier()
    by_arena, by_messages, single = found.values()
    for here, there, exact in zip(by_arena, by_messages, single, strict=True):
        np.testing.assert_array_equal(here, there)
        assert 1e-4 < np.linalg.norm(here - exact) / np.linalg.norm(exact) < 0.2


@pytest.mark.parametrize("mesh", MESHES)
@in_worlds(2, 3)
def test_every_axis_computes_in_bfloat16(backend: Any, mesh: str, monkeypatch: Any) -> None:
    check(backend, monkeypatch, *MESHES[mesh], dropout=0.2, tied_embeddings=mesh != "pipeline")


@in_worlds(4)
def test_a_mesh_of_stages_and_slices_computes_in_bfloat16(backend: Any, monkeypatch: Any) -> None:
    check(backend, monkeypatch, *FOUR, kv_heads=2, tied_embeddings=True)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@in_worlds(2)
def test_a_pipeline_has_the_bits_of_one_rank(backend: Any, schedule: str) -> None:
    (_, alone, prediction), *_ = ms.run_in_threads(1, trained, "ddp", {})
    options = {"schedule": schedule}
    again = ActivationCheckpointConfig(enabled=True, checkpoint_every_n_layers=2)
    for given in (options, options | {"checkpoint_config": again}):
        _, found, predicted = trained(backend, "pipeline", given)
        np.testing.assert_array_equal(found, alone)
        np.testing.assert_array_equal(predicted, prediction)


@in_worlds(2)
def test_generation_accumulation_and_checkpoints_on_a_mesh(backend: Any, shared_path: Any) -> None:
    model, full, _ = trained(backend, "tensor", {}, tied_embeddings=True)
    drawn = model.generate([3, 1, 4], 3, 0)
    chosen = model.predict(drawn[None, :5])[0, 2:5]
    np.testing.assert_allclose(chosen[np.arange(3), drawn[3:6]], chosen.max(axis=-1), atol=2.0**-6)
    checkpoint.save(shared_path / "saved", model)
    for strategy, precision in (("pipeline", "bfloat16"), ("fsdp", None)):
        other, _ = wrapped(backend, gpt(tied_embeddings=True), strategy, {}, precision)
        checkpoint.load(shared_path / "saved", other)
        np.testing.assert_array_equal(other.gather_full_parameters(), full)
    tokens = np.random.default_rng(0).integers(0, 11, (4, 7))
    results = []
    for parts in ([slice(0, 4)], [slice(0, 1), slice(1, 4)]):
        model, optimizer = wrapped(backend, gpt(), "pipeline", {}, "bfloat16")
        for part in parts[:-1]:
            with model.accumulate():
                optimizer.step(model, tokens[part, :-1], tokens[part, 1:])
        optimizer.step(model, tokens[parts[-1], :-1], tokens[parts[-1], 1:])
        results.append(model.gather_full_parameters())
    np.testing.assert_allclose(*results, rtol=0, atol=1e-4)


def images(**options: Any) -> nn.Model:
    chain = nn.Sequential(
        nn.Conv2D(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.Conv2D(4, 6, 2, stride=2),
        nn.Flatten(),
        nn.FeatureLinear(24, 5),
        nn.Softmax(),
        nn.Linear(5, 3, bias=False),
    )
    return nn.Model(chain, nn.CrossEntropy(), input_shape=(1, 8, 8), dtype=np.float32, **options)


@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "pipeline"])
@in_worlds(2, 3)
def test_a_model_of_images_computes_in_bfloat16(backend: Any, strategy: str) -> None:
    x = np.random.default_rng(0).standard_normal((6, 1, 8, 8)).astype("f4")
    y = np.arange(6) % 3
    gradients = {}
    for precision in ("bfloat16", None):
        model = ms.as_distributed(images(seed=3), backend, strategy, precision=precision)
        own = ms.ShardLayout(6, model.data_size).slice(model.data_rank)
        gradients[precision] = model.compute_gradients(x[own], y[own])
        model.train(x[own], y[own])
        assert model.gather_full_parameters().dtype == np.float32
    error, exact = gradients["bfloat16"] - gradients[None], gradients[None]
    # Eight roundings each way, and a maximum that moves to another element of a window.
    assert 1e-4 < np.linalg.norm(error) / np.linalg.norm(exact) < 0.1


def bits(values: Any) -> Any:
    return values.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2D(2, 3, 3, padding=1), nn.Conv2D(2, 3, (2, 3), stride=2, bias=False),
        nn.MaxPool2D(2), nn.MaxPool2D(3, stride=1), nn.Flatten(), nn.Softmax(),
    ],
)  # fmt: skip
def test_layers_of_images_round_once(layer: Any) -> None:
    rng = np.random.default_rng(1)
    x = bits(rng.standard_normal((5, 2, 6, 7)))
    p = {n: bits(rng.standard_normal(spec.shape)) for n, spec in layer.parameters.items()}
    wide = {name: value.astype("f4") for name, value in p.items()}
    y, saved = layer.forward(p, x, nn.Context())
    exact, exact_saved = layer.forward(wide, x.astype("f4"), nn.Context())
    np.testing.assert_array_equal(y, bits(exact))
    if isinstance(layer, nn.Softmax):  # what is saved is rounded, too
        exact_saved = y.astype("f4")
    dy = bits(rng.standard_normal(y.shape))
    found = {name: np.zeros(value.shape, "f4") for name, value in p.items()}
    expected = {name: value.copy() for name, value in found.items()}
    d = layer.backward(wide, exact_saved, dy.astype("f4"), expected)
    dx = layer.backward(p, saved, dy.copy(), found)
    np.testing.assert_array_equal(dx, bits(d))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5)
