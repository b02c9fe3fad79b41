"""Mixed precision: float32 with the owners, bfloat16 in the layers, float32 sums and gradients."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mpishard as ms
from mpishard import checkpoint, nn
from mpishard.base import onednn
from mpishard.models.programs.program import Batch
from mpishard.observe.ledger import MemoryCategory
from mpishard.testing.worlds import in_worlds

SIZES, RATE = [5, 7, 6, 2], 0.05
by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
every_path = pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)


@pytest.fixture(autouse=True)
def same_way_on_every_machine(monkeypatch: Any) -> Any:
    """Ranks compute as a machine without the unit does; test_bfloat16.py has the unit's sums."""
    monkeypatch.setenv("MPISHARD_ONEDNN", "off")
    onednn.library.cache_clear()
    yield
    onednn.library.cache_clear()


def wrapped(backend: Any, strategy: str, precision: str | None = "bfloat16", **choices: Any) -> Any:
    config = ms.ShardingConfiguration(backend, RATE, minimum_parameter_group_size=1, **choices)
    model = nn.MLP(SIZES, seed=1, dtype=np.float32)
    return ms.as_distributed(model, config, strategy, precision=precision)


def batch(step: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(step)
    return rng.standard_normal((9, 5)).astype("f4"), rng.standard_normal((9, 2)).astype("f4")


def trained(backend: Any, model: Any, steps: int = 3) -> Any:
    part = ms.ShardLayout(9, backend.world_size).slice(backend.rank)
    for step in range(steps):
        x, y = batch(step)
        model.train(x[part], y[part])
    return model.get_parameters()


def r(values: Any) -> Any:
    """Values rounded to bfloat16, as float64."""
    return values.astype("f4").astype(ml_dtypes.bfloat16).astype("f8")


def reference(rows: list[slice], steps: int, rounds: Any = r) -> Any:
    """The same training in float64, with a rounding at each place that rounds."""
    master = nn.MLP(SIZES, seed=1, dtype=np.float32).get_parameters().astype("f8")
    for step in range(steps):
        x_all, y_all = (a.astype("f8") for a in batch(step))
        total = np.zeros_like(master)
        for part in rows:
            layers, at = [], 0
            for i, o in itertools.pairwise(SIZES):
                w, b = master[at : at + i * o].reshape(o, i), master[at + i * o : at + i * o + o]
                layers.append((rounds(w), rounds(b), at))
                at += i * o + o
            x, kept = rounds(x_all[part]), []
            for number, (w, b, _) in enumerate(layers):
                kept.append(x)
                x = rounds(x @ w.T + b)
                x = np.maximum(x, 0) if number < len(layers) - 1 else x
            dy = rounds(2 * (x - y_all[part]) / SIZES[-1])
            gradient = np.zeros_like(master)
            for (w, b, at), x in zip(layers[::-1], kept[::-1], strict=True):
                gradient[at : at + w.size] = (dy.T @ x).ravel()
                gradient[at + w.size : at + w.size + b.size] = dy.sum(axis=0)
                dy = rounds(dy @ w) * (x > 0)
            total += gradient
        master -= RATE * total / len(x_all)
    return master


@by_strategy
@every_path
@in_worlds(1, 2, 3)
def test_trains_as_a_float64_reference_that_rounds_at_the_same_places(
    backend: Any, strategy: str, path: str
) -> None:
    found = trained(backend, wrapped(backend, strategy))
    rows = [ms.ShardLayout(9, backend.world_size).slice(rank) for rank in range(backend.world_size)]
    assert found.dtype == np.float32
    # A sum that float32 rounds across a tie moves one activation by one spacing, and no more.
    np.testing.assert_allclose(found, reference(rows, 3), rtol=0, atol=2e-4)
    exact = reference(rows, 3, rounds=lambda values: values)
    assert np.abs(found - exact).max() > 5e-4  # what leaving out a rounding would give


@in_worlds(2, 3)
def test_strategies_and_paths_give_the_same_bits(backend: Any, monkeypatch: Any) -> None:
    results = []
    for arena in ("auto", "off"):
        backend.barrier()
        monkeypatch.setenv("MPISHARD_ARENA", arena)
        backend.barrier()
        results += [
            trained(backend, wrapped(backend, s)) for s in ("ddp", "zero1", "zero2", "fsdp")
        ]
    backend.barrier()
    for found in results[1:]:
        np.testing.assert_array_equal(found, results[0])


@by_strategy
@in_worlds(2)
def test_owners_hold_float32_and_ranks_read_the_nearest_bfloat16(
    backend: Any, strategy: str
) -> None:
    model = wrapped(backend, strategy)
    full = trained(backend, model)
    store = model.engine.parameters
    held = np.concatenate(store.owned(store.local_pieces))
    assert held.dtype == np.float32
    for unit in model.engine.program.units:
        seen = store.unshard(unit).copy()
        store.reshard(unit)
        nearest = full[unit.start : unit.stop].astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(seen, nearest)
    lost = full != full.astype(ml_dtypes.bfloat16)
    assert lost.mean() > 0.5  # the owners' values are finer than what is computed with
    assert model.predict(batch(0)[0]).dtype == np.float32


@by_strategy
@in_worlds(2)
def test_steps_smaller_than_a_spacing_add_up(backend: Any, strategy: str) -> None:
    model = wrapped(backend, strategy)
    model.sharding_configuration.learning_rate = 1e-5
    before = model.get_parameters()
    moved = np.abs(trained(backend, model, 1) - before).max()
    assert 0 < moved < np.abs(before).max() * 2.0**-9


@pytest.mark.usefixtures("messages_only")
@in_worlds(2, 3)
def test_copies_travel_in_half_the_bytes_and_gradients_in_float32(backend: Any) -> None:
    n, bytes_of = backend.world_size, {}
    for strategy in ("ddp", "zero1", "zero2", "fsdp"):
        model = wrapped(backend, strategy)
        backend.traffic.reset()
        part = ms.ShardLayout(9, n).slice(backend.rank)
        x, y = batch(0)
        model.train(x[part], y[part])
        total = backend.traffic.total_bytes
        backend.traffic.reset()
        backend.all_reduce(np.zeros(7))
        total -= backend.traffic.total_bytes
        bytes_of[strategy] = int(backend.all_reduce(np.array([total]))[0])
    s = model.parameter_count * 4
    k = model.engine.program.units[-1].length * 4
    assert bytes_of == {
        "ddp": 2 * (n - 1) * s,
        "zero1": (n - 1) * (s + s // 2),
        "zero2": (n - 1) * (s + s // 2),
        "fsdp": (n - 1) * (s + (s - k) // 2 + s // 2),
    }


def test_gradient_leaves_give_the_same_bits_in_worlds_of_1_2_and_4() -> None:
    def main(backend: Any) -> Any:
        model = wrapped(backend, "fsdp", gradient_leaves=4)
        for step in range(3):
            x, y = batch(step)
            mine = model.batch_indices(9)
            model.train(x[mine], y[mine])
        return model.get_parameters()

    results = [ms.run_in_threads(size, main)[0] for size in (1, 2, 4)]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@by_strategy
@in_worlds(2)
def test_a_checkpoint_holds_the_masters_and_loads_in_either_precision(
    backend: Any, strategy: str, shared_path: Any
) -> None:
    model = wrapped(backend, strategy)
    full = trained(backend, model, 2)
    checkpoint.save(shared_path / "saved", model)
    loaded = {p: wrapped(backend, "fsdp", p) for p in ("bfloat16", None)}
    for other in loaded.values():
        checkpoint.load(shared_path / "saved", other)
        np.testing.assert_array_equal(other.get_parameters(), full)
    np.testing.assert_array_equal(
        trained(backend, loaded["bfloat16"]), trained(backend, model)
    )  # the copies, too, are of what was loaded
    copied = model.deep_copy()
    np.testing.assert_array_equal(trained(backend, copied), trained(backend, model))


@in_worlds(2)
def test_accumulation_and_drifting_replicas_round_as_one_step_does(backend: Any) -> None:
    x, y = batch(0)
    part = ms.ShardLayout(9, 2).slice(backend.rank)
    model = wrapped(backend, "ddp")
    with model.accumulate():
        model.train(x[part], y[part])
    model.train(x[part], y[part])
    once = wrapped(backend, "fsdp")
    once.train(x[part], y[part])
    np.testing.assert_allclose(model.get_parameters(), once.get_parameters(), atol=1e-6)
    alone = wrapped(backend, "ddp", auto_sync_gradients=False)
    alone.train(x[part], y[part])
    alone.synchronize_gradients()
    np.testing.assert_allclose(alone.get_parameters(), once.get_parameters(), atol=1e-6)
    np.testing.assert_array_equal(
        alone.engine.parameters.unshard(alone.engine.program.units[0]),
        alone.get_parameters()[: alone.engine.program.units[0].length].astype(ml_dtypes.bfloat16),
    )


@in_worlds(2)
def test_layers_without_bfloat16_are_refused_by_name(backend: Any) -> None:
    config = ms.ShardingConfiguration(backend, precision="bfloat16")
    fun = ms.FunctionModel(lambda theta, x, y: (0.0, theta), np.ones(3))
    with pytest.raises(ValueError, match=r"FunctionModel, which computes in a dtype of its own"):
        ms.as_distributed(fun, config)
    with pytest.raises(ValueError, match=r"float64.*dtype=numpy.float32"):
        ms.as_distributed(nn.MLP([2, 2], dtype=np.float64), config)

    class Doubled(nn.Layer):
        def output_shape(self, input_shape: Any) -> Any:
            return input_shape

        def forward(self, p: Any, x: Any, context: Any) -> Any:
            return 2 * x, None

        def backward_input(self, p: Any, saved: Any, dy: Any) -> Any:
            return 2 * dy, None

    chain = nn.Sequential(nn.Residual(Doubled()), nn.Linear(2, 2))
    own = nn.Model(chain, nn.MSE(), input_shape=(2,), dtype="f4")
    for strategy in ("fsdp", "tensor", "pipeline"):
        unsupported = r"layers that do not support bfloat16: Doubled\. .*True"
        with pytest.raises(ValueError, match=unsupported):
            ms.as_distributed(own, config, strategy)
    mlp = nn.MLP([2, 2], dtype=np.float32)
    with pytest.raises(ValueError, match="float16 needs loss scaling"):
        ms.as_distributed(mlp, backend, precision="float16")
    with pytest.raises(ValueError, match="got 'float32'; leave precision out: a model computes"):
        ms.as_distributed(mlp, backend, precision="float32")
    ms.as_distributed(mlp, backend)  # nothing of it is claimed


@in_worlds(2)
def test_precisions_that_differ_between_ranks_are_named(backend: Any) -> None:
    with pytest.raises(ValueError, match="precision"):
        wrapped(backend, "fsdp", "bfloat16" if backend.rank else None)


@pytest.mark.parametrize(
    ("has_unit", "setting", "reason"),
    [
        (False, "auto", "the processor has no unit for bfloat16 (AVX512-BF16 or AMX-BF16)"),
        (True, "off", "MPISHARD_ONEDNN=off"),
        (True, "auto", "no oneDNN library was found: pip install 'mpishard[bf16]'"),
    ],
)
def test_one_warning_gives_the_speeds_without_the_bfloat16_unit(
    caplog: Any, monkeypatch: Any, has_unit: bool, setting: str, reason: str
) -> None:
    monkeypatch.setattr(onednn, "processor_has_unit", lambda: has_unit)
    monkeypatch.setattr(onednn, "_candidate_paths", lambda: iter(()))
    monkeypatch.setenv("MPISHARD_ONEDNN", setting)
    onednn.library.cache_clear()
    with caplog.at_level(logging.WARNING, "mpishard"):
        ms.run_in_threads(2, lambda backend: wrapped(backend, "fsdp"))
    told = [m for m in caplog.messages if "bfloat16" in m]
    assert len(told) == 1
    assert reason in told[0]
    assert "GFLOP/s" in told[0]


GPTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"kv_heads": 2, "tied_embeddings": True, "dropout": 0.2},
}


def gpt(kind: str, length: int = 6, **options: Any) -> nn.GPT:
    return nn.GPT(
        vocabulary_size=11,
        context_length=length,
        width=16,
        heads=4,
        layers=2,
        seed=5,
        dtype=np.float32,
        **GPTS[kind],
        **options,
    )


@pytest.mark.parametrize("kind", GPTS)
@in_worlds(1, 2, 3)
def test_a_gpt_has_the_same_bits_in_every_strategy_and_learns_as_float32(
    backend: Any, kind: str, monkeypatch: Any
) -> None:
    found = {}
    for strategy, arena, precision in (
        ("ddp", "auto", "bfloat16"), ("zero1", "auto", "bfloat16"), ("fsdp", "auto", "bfloat16"),
        ("fsdp", "off", "bfloat16"), ("fsdp", "auto", None),
    ):  # fmt: skip
        backend.barrier()
        monkeypatch.setenv("MPISHARD_ARENA", arena)
        backend.barrier()
        model = ms.as_distributed(gpt(kind), backend, strategy, precision=precision)
        optimizer = ms.as_distributed(ms.optimizers.AdamW(1e-2), backend, strategy)
        losses = []
        for step in range(4):
            rng = np.random.default_rng((step, backend.rank))
            tokens = rng.integers(0, 11, (3 + backend.rank, 7))
            losses.append(optimizer.step(model, tokens[:, :-1], tokens[:, 1:]))
        found[strategy, arena, precision] = model.get_parameters(), losses
    backend.barrier()
    (first, losses), *others, (_, exact) = found.values()
    for other, _ in others:
        np.testing.assert_array_equal(other, first)
    assert losses != exact
    np.testing.assert_allclose(losses, exact, rtol=2.0**-7)


@pytest.mark.parametrize("kind", GPTS)
@pytest.mark.parametrize("length", [6, 150])  # 150: several blocks of queries
def test_gradients_of_a_gpt_are_near_those_of_float32(kind: str, length: int) -> None:
    tokens = np.random.default_rng(3).integers(0, 11, (3, length + 1))

    def main(backend: Any, precision: str | None) -> Any:
        model = ms.as_distributed(gpt(kind, length), backend, "fsdp", precision=precision)
        gradient = model.compute_gradients(tokens[:, :-1], tokens[:, 1:])
        return model.parameter_entries, gradient, model.get_parameters()

    ((entries, found, vector),) = ms.run_in_threads(1, main, "bfloat16")
    ((_, single, _),) = ms.run_in_threads(1, main, None)
    errors = []
    for entry in entries:
        part = slice(entry.start, entry.stop)
        errors.append(np.linalg.norm(found[part] - single[part]) / np.linalg.norm(single[part]))
    # A wrong term is off by its own size; roundings of 2^-8 along some 20 operations are not.
    assert max(errors) < 20 * 2.0**-8
    assert vector.dtype == found.dtype == np.float32


@in_worlds(2)
def test_a_gpt_generates_in_bfloat16(backend: Any) -> None:
    model = ms.as_distributed(gpt("grouped"), backend, "fsdp", precision="bfloat16")
    drawn = model.generate([3, 1, 4], 4, 0)
    assert drawn.shape == (7,)
    prediction = model.predict(drawn[None, :5])
    assert prediction.dtype == np.float32
    chosen = prediction[0, 2:5]
    np.testing.assert_allclose(chosen[np.arange(3), drawn[3:6]], chosen.max(axis=-1), atol=2.0**-6)


@pytest.mark.parametrize("layer", [nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.GELU(), nn.SwiGLU()])
def test_activations_round_once(layer: Any) -> None:
    x = np.random.default_rng(0).standard_normal((300, 400)).astype(ml_dtypes.bfloat16)
    y, saved = layer.forward({}, x, nn.Context())
    exact, exact_saved = layer.forward({}, x.astype("f4"), nn.Context())
    np.testing.assert_array_equal(y, exact.astype(ml_dtypes.bfloat16))
    dy = y.copy()
    expected, _ = layer.backward_input({}, exact_saved, dy.astype("f4"))
    dx, _ = layer.backward_input({}, saved, dy)
    # What was saved is rounded, too, and the slope of a function of it changes as much.
    np.testing.assert_allclose(dx.astype("f4"), expected, rtol=2.0**-6, atol=2.0**-7)


@pytest.mark.parametrize("shape", [(3, 5), (40_000, 3)])
def test_relu_of_bfloat16_keeps_nan(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(ml_dtypes.bfloat16)
    x[0, :3] = [-np.nan, -np.inf, -0.0]
    x[1, :2] = [np.nan, np.inf]
    layer = nn.ReLU()
    y, saved = layer.forward({}, x, nn.Context())
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y.astype("f4"), np.maximum(x.astype("f4"), 0))
    dx, _ = layer.backward_input({}, saved, np.ones(shape, x.dtype))
    np.testing.assert_array_equal(dx[2:].astype("f4"), (x[2:].astype("f4") > 0).astype("f4"))


def buffers(held: Any) -> dict[int, Any]:
    """The memory of all arrays in nested lists and tuples, each once."""
    if isinstance(held, np.ndarray):
        while isinstance(held.base, np.ndarray):
            held = held.base
        return {id(held): held}
    inner = held if isinstance(held, list | tuple) else ()
    return {key: array for each in inner for key, array in buffers(each).items()}


@in_worlds(2)
def test_saved_activations_take_half_the_memory(backend: Any) -> None:
    tokens = np.zeros((4, 64), np.int64)
    saved, held = {}, {}
    for precision in ("bfloat16", None):
        model = ms.as_distributed(
            nn.GPT(
                vocabulary_size=11,
                context_length=64,
                width=64,
                heads=4,
                layers=2,
                dtype=np.float32,
            ),
            backend,
            "fsdp",
            precision=precision,
        )
        engine = model.engine
        batch = Batch(tokens, tokens, engine.program.default_loss, nn.Context())
        _, _, (activations, *_) = engine.program.forward(engine.parameters, batch)
        saved[precision] = sum(array.nbytes for array in buffers(activations).values())
        engine.parameters.abandon()
        held[precision] = engine.layout.ledger.held(MemoryCategory.PARAMETERS)
    assert 0.5 < saved["bfloat16"] / saved[None] < 0.55
    assert held["bfloat16"] == 1.5 * held[None]
