"""Refusals on every rank: before anything is sent, or before anything changes."""

from __future__ import annotations

import contextlib
import re
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.adapters import FunctionModel
from mpishard.communication import run_in_threads
from mpishard.errors import CollectiveMismatchError, NonFiniteLossError, PeerError, ShardingError
from mpishard.models import DDPModel, FSDPModel, ShardedModelBase, TensorParallelModel
from mpishard.models.engine.update import Policy
from mpishard.models.wrapper import wrapping
from mpishard.optimizers import SGD, AdamW, DDPOptimizer, FSDPOptimizer
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])


# -------------------------------------------------------------------------------------- wrapping


@by_strategy
def test_ranks_cannot_wrap_one_object(problems: Any, strategy: str) -> None:
    for plain in (problems.MODELS["mlp"](0), problems.MODELS["function"](0)):

        def body(backend: Any, plain: Any = plain) -> None:
            problems.STRATEGIES[strategy][0](plain, ShardingConfiguration(backend))

        with pytest.raises(ShardingError, match=r"wrapped already|are held by") as caught:
            run_in_threads(3, body, timeout=5)
        assert "build the model inside main" in str(caught.value) or "held by" in str(caught.value)


@pytest.mark.parametrize("kind", ["mlp", "function"])
@in_worlds(1, 2)
def test_a_wrapped_object_cannot_be_wrapped_again(backend: Any, problems: Any, kind: str) -> None:
    plain, config = problems.MODELS[kind](0), ShardingConfiguration(backend)
    model = DDPModel(plain, config)
    with pytest.raises(ShardingError):
        FSDPModel(plain, config)
    with pytest.raises(TypeError, match="sharded already"):
        FSDPModel(model, config)
    # Copies of the object are other objects.
    with model.unsharded() as copy:
        FSDPModel(copy.deep_copy(), config)


class Nameless(ShardedModelBase):
    pass


class WithoutPolicy(ShardedModelBase):
    strategy = "Mine"


@pytest.mark.parametrize(
    ("kind", "lacks"),
    [(ShardedModelBase, "strategy"), (Nameless, "strategy"), (WithoutPolicy, "policy")],
)
@in_worlds(2)
def test_a_class_without_strategy_does_not_own_the_model(
    backend: Any, kind: Any, lacks: str
) -> None:
    plain, config = nn.MLP([2, 2]), ShardingConfiguration(backend)
    with pytest.raises(TypeError, match=f"{kind.__name__} declares no '{lacks}': use FSDPModel"):
        kind(plain, config)
    FSDPModel(plain, config)


@pytest.mark.parametrize(
    "shards", [(False, True, False), (True, True, False), (True, False, False), (True, False, True)]
)
def test_a_policy_that_no_engine_runs_is_refused(shards: tuple[bool, ...]) -> None:
    with pytest.raises(ValueError, match=r"must shard gradients, .* must shard state, got Policy"):
        Policy(*shards)


@pytest.mark.parametrize(
    "variants",
    [
        lambda rank: nn.MLP([5, 7 + rank, 2]),
        lambda rank: nn.MLP([5, 7, 2], dtype=["float64", "float32"][rank]),
        lambda rank: nn.MLP([[2, 3, 2], [1, 3, 1, 3, 2]][rank]),  # 17 parameters, other units
        lambda rank: nn.MLP([[1, 4, 1], [4, 1, 1, 1, 1, 1]][rank]),  # 13 in one unit, other shapes
        lambda rank: [nn.MLP([3, 3]), FunctionModel(lambda *_: None, np.ones(12))][rank],
    ],
)
@in_worlds(2)
def test_models_that_differ_between_ranks_are_refused_on_all(backend: Any, variants: Any) -> None:
    config = ShardingConfiguration(backend, minimum_parameter_group_size=6)
    with pytest.raises(ValueError, match="every rank must wrap the same model"):
        FSDPModel(variants(backend.rank), config)


@pytest.mark.parametrize("make", [FSDPModel, TensorParallelModel])
@in_worlds(2)
def test_a_refused_model_can_be_wrapped_again(backend: Any, make: Any) -> None:
    model = nn.MLP([5, 7, 2])
    different = ShardingConfiguration(backend, minimum_parameter_group_size=1 + backend.rank)
    with pytest.raises(ValueError, match="minimum_parameter_group_size is 1, 2") as caught:
        make(model, different)
    assert make(model, ShardingConfiguration(backend)).parameter_count == 58
    assert caught.value.__traceback__ is not None  # which refers to the wrapper that failed


_this_thread = threading.local()


@pytest.mark.parametrize("make", [FSDPModel, TensorParallelModel])
@in_worlds(2)
def test_numba_on_some_ranks_alone_is_refused_on_all(
    backend: Any, make: Any, monkeypatch: Any
) -> None:
    _this_thread.rank = backend.rank
    monkeypatch.setattr(wrapping, "numba_module", lambda: None if _this_thread.rank else object())
    make(nn.MLP([4, 4, 2]), ShardingConfiguration(backend))  # float64: has no loops
    for precision in (None, "bfloat16"):
        config = ShardingConfiguration(backend, precision=precision)
        with pytest.raises(ValueError, match="passes of layers is numba, NumPy"):
            make(nn.MLP([4, 4, 2], dtype="float32"), config)


@in_worlds(2)
def test_onednn_on_some_ranks_alone_is_refused_on_all(backend: Any, monkeypatch: Any) -> None:
    _this_thread.rank = backend.rank
    found = SimpleNamespace(version="3.2.0")
    monkeypatch.setattr(wrapping, "library", lambda: None if _this_thread.rank else found)
    mlp = nn.MLP([4, 4, 2], dtype="float32")
    with pytest.raises(ValueError, match=r"products of bfloat16 is oneDNN 3\.2\.0, float32$"):
        FSDPModel(mlp, ShardingConfiguration(backend, precision="bfloat16"))
    FSDPModel(mlp, ShardingConfiguration(backend))
    # Rank 0's choice, with a library that only rank 0's host has.
    names = ["oneDNN 3.2.0", "NumPy"]
    monkeypatch.setattr(wrapping, "float32_products", lambda: names[_this_thread.rank])
    with pytest.raises(ValueError, match=r"products of float32 is oneDNN 3\.2\.0, NumPy$"):
        FSDPModel(nn.MLP([4, 4, 2], dtype="float32"), ShardingConfiguration(backend))

    def without() -> str:
        if _this_thread.rank:
            raise ValueError("no library; NumPy multiplies with MPISHARD_PRODUCTS=numpy")
        return names[0]

    # MPISHARD_PRODUCTS=onednn on a host without it: every rank gets the remedy.
    monkeypatch.setattr(wrapping, "float32_products", without)
    with pytest.raises(ValueError, match=r"is oneDNN 3\.2\.0, no library; .*=numpy$"):
        FSDPModel(nn.MLP([4, 4, 2], dtype="float32"), ShardingConfiguration(backend))
    _this_thread.rank = 1
    with pytest.raises(ValueError, match=r"^no library"):
        FSDPModel(nn.MLP([4, 4, 2], dtype="float32"), ShardingConfiguration(backend))


@in_worlds(2)
def test_strategies_that_differ_between_ranks_are_refused_on_all(backend: Any) -> None:
    with pytest.raises(ValueError, match="strategy"):
        [DDPModel, FSDPModel][backend.rank](nn.MLP([3, 2]), ShardingConfiguration(backend))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gradient_leaves", (None, 2)),
        ("enable_gradient_compression", (False, True)),
        ("allow_nonfinite", (True, False)),
        ("auto_sync_gradients", (True, False)),
        ("minimum_parameter_group_size", (4, 8)),
        ("cpu_offload_gradients", (True, False)),
        ("check_collectives", (False, True)),
    ],
)
@in_worlds(2)
def test_a_choice_that_differs_between_ranks_is_named_on_all(
    backend: Any, name: str, values: Any
) -> None:
    config = ShardingConfiguration(backend, **{name: values[backend.rank]})
    try:
        with pytest.raises(ValueError, match=f"{name} is {values[0]}, {values[1]}$"):
            DDPModel(nn.MLP([3, 2]), config)
    finally:
        backend.check_collectives = True


@pytest.mark.parametrize("wrap", [DDPModel, FSDPModel])
@in_worlds(1)
def test_arguments_of_the_wrappers(backend: Any, wrap: Any) -> None:
    config = ShardingConfiguration(backend)
    with pytest.raises(TypeError, match="got None"):
        wrap(None, config)
    with pytest.raises(TypeError, match="ShardingConfiguration, got InMemory"):
        wrap(nn.MLP([2, 2]), backend)
    with pytest.raises(TypeError, match=r"must be an optimizer of mpishard\.optimizers, got MLP"):
        FSDPOptimizer(nn.MLP([2, 2]), config)
    with pytest.raises(TypeError, match="ShardingConfiguration, got NoneType"):
        FSDPOptimizer(SGD(), None)


# ------------------------------------------------------------------------------- model, optimizer


@in_worlds(2)
def test_one_strategy_and_one_backend_for_model_and_optimizer(backend: Any, problems: Any) -> None:
    other = backend.split(0)
    model, optimizer = problems.build(backend, "mlp", "fsdp")
    sequence = backend._sequence
    batch = problems.batch("mlp", 0)
    for wrong, message in (
        (DDPOptimizer(SGD(), ShardingConfiguration(backend)), "DDPOptimizer.*DDPModel.*FSDPModel"),
        (FSDPOptimizer(SGD(), ShardingConfiguration(other)), "backend.* is not the optimizer's"),
    ):
        with pytest.raises(ShardingError, match=message):
            wrong.step(model, *batch)
    with pytest.raises(TypeError, match="needs a sharded model, got MLP"):
        optimizer.step(nn.MLP([5, 2]), *batch)
    assert backend._sequence == sequence
    optimizer.step(model, *batch)
    second, _ = problems.build(backend, "mlp", "fsdp")
    with pytest.raises(ShardingError, match="another model"):
        optimizer.step(second, *batch)
    optimizer.reset()
    assert (optimizer.steps, dict(optimizer.state)) == (0, {})
    optimizer.step(second, *batch)


@in_worlds(2)
def test_a_pattern_that_matches_nothing_is_a_misspelling(backend: Any, problems: Any) -> None:
    options = {"*.biass": {"weight_decay": 0.0}}
    model, optimizer = problems.build(
        backend, "mlp", "fsdp", rule_options={"parameter_options": options}
    )
    with pytest.raises(ValueError, match=re.escape("'*.biass' matches none")):
        optimizer.step(model, *problems.batch("mlp", 0))


# ------------------------------------------------------------------------------------ bad batches

X, Y = np.ones((3, 5)), np.ones((3, 2))
TOKENS = np.ones((3, 6), np.int64)
BAD_BATCHES = [
    ("mlp", X[:, :4], Y, "5"),
    ("mlp", X[0], Y, r"shape \(samples, 5\), got shape \(5,\)"),
    ("mlp", X.tolist(), Y, "got list"),
    ("mlp", None, Y, "got NoneType"),
    ("mlp", X, Y[:2], "x has 3 samples and y has 2"),
    ("mlp", X, Y[:, :1], "one shape"),
    ("mlp", X, Y[:, 0], "one shape"),
    ("mlp", X, None, "MSE needs targets, and y .y_train. is None"),
    ("gpt", TOKENS[0], TOKENS, "shape"),
    ("gpt", np.ones((3, 7), np.int64), np.ones((3, 7), np.int64), "7"),
    ("gpt", TOKENS, TOKENS[:, :5], "targets of shape"),
    ("gpt", TOKENS, TOKENS.astype(float), "integer targets"),
    ("function", X, Y[:2], "x has 3 samples and y has 2"),
    ("function", 3.0, Y, "needs a length, got float"),
]


@pytest.mark.parametrize("kind", ["mlp", "gpt", "function"])
@by_strategy
@in_worlds(2)
def test_bad_batches_are_refused_before_anything_is_sent(
    backend: Any, problems: Any, kind: str, strategy: str
) -> None:
    model, optimizer = problems.build(backend, kind, strategy)
    backend.barrier()
    backend.traffic.reset()
    sequence = backend._sequence
    for x, y, message in [row[1:] for row in BAD_BATCHES if row[0] == kind]:
        for call in (optimizer.step, model.compute_gradients, model.evaluate, model.train):
            bound = (model,) if call == optimizer.step else ()
            with pytest.raises((TypeError, ValueError), match=message):
                call(*bound, x, y)
    assert (backend._sequence, dict(backend.traffic.calls)) == (sequence, {})
    optimizer.step(model, *problems.local_batch(backend, kind, 0))  # nothing is the worse for it


@by_strategy
@in_worlds(1, 3)
def test_a_step_without_any_sample_is_refused_on_all(
    backend: Any, problems: Any, strategy: str
) -> None:
    model, optimizer = problems.build(backend, "mlp", strategy)
    before = model.get_parameters()
    with pytest.raises(ValueError, match="no rank has a sample"):
        optimizer.step(model, X[:0], Y[:0])
    assert model.get_parameters().tobytes() == before.tobytes()
    assert optimizer.steps == 0


@by_strategy
@in_worlds(1, 2)
def test_a_failure_in_the_middle_of_a_pass_leaves_no_gradient(
    backend: Any, problems: Any, strategy: str
) -> None:
    """The embedding refuses unknown tokens, when gathers are under way already."""
    expected = problems.train_sequentially("gpt", problems.TEXTBOOK["adamw"], 2)
    model, optimizer = problems.build(backend, "gpt", strategy, "adamw")
    unknown = TOKENS + 99
    for step, theta in enumerate(expected.parameters):
        for call in (
            lambda: optimizer.step(model, unknown, TOKENS),
            lambda: model.predict(unknown),
            lambda: model.compute_gradients(unknown, TOKENS),
        ):
            with pytest.raises((ValueError, IndexError)):
                call()
        optimizer.step(model, *problems.local_batch(backend, "gpt", step))
        np.testing.assert_allclose(model.get_parameters(), theta, rtol=0, atol=1e-12)
    with pytest.raises((ValueError, IndexError)):
        model.predict(unknown)
    model.set_parameters(2 * theta)  # a unit that was left unsharded would have the old values
    plain = problems.MODELS["gpt"](0)
    plain.set_parameters(2 * theta)
    np.testing.assert_allclose(model.predict(TOKENS), plain.predict(TOKENS), rtol=0, atol=1e-12)


@by_strategy
@in_worlds(2)
def test_a_step_that_met_another_collective_can_be_repeated(backend: Any, strategy: str) -> None:
    def train(odd: int) -> tuple[Any, int]:
        model = ms.as_distributed(nn.MLP([5, 40, 1], seed=0), backend, strategy)
        optimizer = ms.as_distributed(SGD(0.1), backend, strategy)
        refused = 0
        for number in range(4):
            try:
                if number == 1 and backend.rank == odd:
                    backend.broadcast(np.ones(1))
                else:
                    optimizer.step(model, X, X[:, :1])
            except CollectiveMismatchError:
                refused += 1
                optimizer.step(model, X, X[:, :1])
        return model.gather_full_parameters(), refused

    expected, refused = train(odd=-1)
    assert refused == 0
    again, refused = train(odd=1)
    assert refused == 1
    np.testing.assert_array_equal(again, expected)


def test_an_exception_of_one_rank_raises_on_all(problems: Any) -> None:
    seen = []

    def body(backend: Any) -> None:
        model, optimizer = problems.build(backend, "gpt", "fsdp")
        x = TOKENS + 99 * (backend.rank == 1)
        try:
            optimizer.step(model, x, TOKENS)
        except Exception as error:
            seen.append((backend.rank, type(error)))
            raise

    with pytest.raises((ValueError, IndexError)):
        run_in_threads(3, body, timeout=5)
    assert [kind for rank, kind in sorted(seen, key=str) if rank != 1] == [PeerError, PeerError]


# -------------------------------------------------------------------------------------- NaN losses


@by_strategy
@pytest.mark.parametrize("kind", ["mlp", "function"])
@in_worlds(1, 2, 3)
def test_a_nan_stops_every_rank_and_changes_nothing(
    backend: Any, problems: Any, kind: str, strategy: str
) -> None:
    model, optimizer = problems.build(backend, kind, strategy, "adamw")
    expected = problems.train_sequentially(kind, problems.TEXTBOOK["adamw"], 3)
    for step in range(2):
        optimizer.step(model, *problems.local_batch(backend, kind, step))
    before = [model.local_parameter_shard, *(v.copy() for v in optimizer.state.values())]
    x, y = problems.batch(kind, 0)
    culprit = backend.world_size - 1
    x = np.where(backend.rank == culprit, np.nan, x)
    for accumulating in (False, True):
        message = rf"step 3: the loss of ranks \[{culprit}\] is not finite"
        context = model.accumulate() if accumulating else contextlib.nullcontext()
        with pytest.raises(NonFiniteLossError, match=message), context:
            optimizer.step(model, x, y)
        after = [model.local_parameter_shard, *optimizer.state.values()]
        assert [a.tobytes() for a in after] == [b.tobytes() for b in before]
        assert optimizer.steps == 2
    loss = optimizer.step(model, *problems.local_batch(backend, kind, 2))
    np.testing.assert_allclose(loss, expected.losses[2], rtol=0, atol=1e-12)
    np.testing.assert_allclose(model.get_parameters(), expected.parameters[2], rtol=0, atol=1e-12)


@in_worlds(2)
def test_a_gradient_that_overflows_is_found_too(backend: Any) -> None:
    def fun(theta: Any, x: Any, y: Any) -> Any:
        return 1.0, np.array([np.inf if backend.rank == 1 else 0.0, 0.0])

    config = ShardingConfiguration(backend)
    model = FSDPModel(FunctionModel(fun, np.ones(2)), config)
    with pytest.raises(NonFiniteLossError, match="the gradient, and no rank's loss, is not"):
        FSDPOptimizer(AdamW(), config).step(model, X, Y)
    assert model.get_parameters().tolist() == [1, 1]


@in_worlds(1, 2)
def test_nonfinite_numbers_can_be_allowed(backend: Any) -> None:
    config = ShardingConfiguration(backend, allow_nonfinite=True)
    model = FSDPModel(nn.MLP([5, 2]), config)
    assert np.isnan(model.train(X * np.nan, Y))
    assert np.isnan(model.get_parameters()).any()
    config.allow_nonfinite = False
    with pytest.raises(NonFiniteLossError):
        model.train(X, Y)


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: nn.MLP([5, 7, 2], activation="tanh" if rank else "relu"),
        lambda rank: _with_features(nn.LinearRegression(5), [0, 1] if rank else [0, 1, 2]),
    ],
)
@in_worlds(2, 3)
def test_models_that_compute_differently_are_not_wrapped(backend: Any, make: Any) -> None:
    with pytest.raises(ValueError, match=r"by rank, (layer 1 is ReLU, Tanh|active_features is)"):
        FSDPModel(make(backend.rank), ShardingConfiguration(backend))


def _chain(*layers: Any) -> nn.Model:
    return nn.Model(nn.Sequential(*layers), nn.MSE(), input_shape=(6, 6))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r: nn.MLP([5, 2], loss=nn.MAE() if r else nn.MSE()), "loss is MSE, MAE"),
        (lambda r: nn.MLP([5, 2], loss=nn.Huber(1 + r)), r"loss\.delta is 1\.0, 2\.0"),
        (lambda r: _chain(nn.Linear(6, 6), nn.Dropout(r / 2)), r"layer 1\.rate is 0\.0, 0\.5"),
        (lambda r: _chain(nn.LayerNorm(6, 1 + r)), r"layer 0\.epsilon is 1\.0, 2\.0"),
        (
            lambda r: _chain(nn.Residual(nn.Linear(6, 18), nn.Attention(2 + r, causal=bool(r)))),
            r"layer 0\.1\.heads is 2, 3; .*layer 0\.1\.causal is False, True",
        ),
    ],
)
@in_worlds(2)
def test_settings_that_no_shape_shows_are_compared(backend: Any, make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"every rank must wrap the same model.*{message}"):
        FSDPModel(make(backend.rank), ShardingConfiguration(backend))


class _OfThisRank(nn.ReLU):
    def __init__(self, rank: int) -> None:
        self.rank = rank


@in_worlds(2)
def test_attributes_of_a_users_layer_may_belong_to_one_rank(backend: Any) -> None:
    for strategy in ("fsdp", "tensor"):
        model = nn.Model(
            nn.Sequential(
                nn.Linear(np.int64(5) if backend.rank else 5, 2), _OfThisRank(backend.rank)
            ),
            nn.MSE(),
            input_shape=(5,),
        )
        ms.as_distributed(model, backend, strategy).predict(X)


def _with_features(model: Any, indices: list[int]) -> Any:
    model.set_active_feature_indices(indices)
    return model


@in_worlds(2)
def test_a_model_without_a_sequence_is_not_cut_along_it(backend: Any) -> None:
    config = ShardingConfiguration(backend)
    TensorParallelModel(nn.MLP([4, 4, 2]), config)
    with pytest.raises(ValueError, match=r"samples of shape \(time, \.\.\.\)") as caught:
        TensorParallelModel(nn.MLP([4, 4, 2]), config, sequence_parallel=True)
    assert "linear0 takes samples of shape (4,)" in str(caught.value)
