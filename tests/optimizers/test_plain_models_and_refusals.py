"""`optimize`: plain models that it wraps, refused input, and arguments that are NumPy scalars."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mpishard as ms
from mpishard.errors import NonFiniteLossError, NoSampleError, ShardingError
from mpishard.mirror import OptimizationAlgorithmOptions
from mpishard.optimizers import Cosine
from mpishard.testing.worlds import in_worlds

X = np.random.default_rng(0).standard_normal((12, 3))
Y = X[:, :1] - X[:, 1:2]


def mlp():
    return ms.nn.MLP([3, 4, 1], seed=1, dtype="float64")


def squares():
    def loss(theta, x, y):
        error = x @ theta - y[:, 0]
        return float((error**2).mean()), 2 * x.T @ error / len(x)

    return ms.FunctionModel(loss, np.ones(3), lambda theta, x: x @ theta[:, None])


def data(model, **options):
    given = {"x_train": X, "y_train": Y, "batch_size": 4, "progress": False}
    return ms.OptimizationInputData(model=model, **(given | options))


def optimizer_of(backend, rule=None, strategy="fsdp"):
    return ms.as_distributed(rule or ms.optimizers.Adam(0.01), backend, strategy)


# ----------------------------------------------------------------------------------- plain models

REFUSED = [
    ("before wrapping", {"local_data": True, "batch_size": 1}, ValueError, None),
    ("a pattern", {}, ValueError, {"parameter_options": {"nothing": {"frozen": True}}}),
    ("no agreement", lambda rank: {"seed": rank}, ValueError, None),
    ("nothing to resume", {"resume": "nowhere"}, FileNotFoundError, None),
    ("the last rate", {}, ValueError, {"learning_rate": lambda step: 1.5 - step}),
    ("the first rate", {}, ValueError, {"learning_rate": lambda step: step - 1.0}),
    ("no first rate", {}, KeyError, {"learning_rate": {1: 0.1, 2: 0.1}.__getitem__}),
    ("the first loss", {"x_train": X * np.nan}, NonFiniteLossError, None),
]


@pytest.mark.parametrize(("make", "strategy"), [(mlp, "fsdp"), (squares, "ddp")])
@pytest.mark.parametrize(
    ("options", "error", "settings"), [pytest.param(*row, id=what) for what, *row in REFUSED]
)
@in_worlds(2)
def test_a_refused_plain_model_is_as_it_was(backend, make, strategy, options, error, settings):
    options = options(backend.rank) if callable(options) else options
    plain = make()
    before = plain.get_parameters()
    optimizer = optimizer_of(backend, ms.optimizers.Adam(**(settings or {})), strategy)
    with pytest.raises(error):
        optimizer.optimize(data(plain, **options))
    np.testing.assert_array_equal(plain.get_parameters(), before)
    assert plain.predict(X).shape == (12, 1)
    assert optimizer.steps == 0
    assert not optimizer.state
    again = optimizer_of(backend, strategy=strategy).optimize(data(plain))
    fresh = optimizer_of(backend, strategy=strategy).optimize(data(make()))
    np.testing.assert_array_equal(again.model.get_parameters(), fresh.model.get_parameters())


@in_worlds(2)
def test_a_refusal_that_one_rank_finds(backend):
    plain = mlp()
    before = plain.get_parameters()
    options = {"*.bais" if backend.rank else "*.bias": {"weight_decay": 0.0}}
    refused = optimizer_of(backend, ms.optimizers.Adam(0.01, parameter_options=options))
    with pytest.raises(ValueError, match=r"'\*.bais' matches none"):
        refused.optimize(data(plain))
    np.testing.assert_array_equal(plain.get_parameters(), before)
    assert optimizer_of(backend).optimize(data(plain)).iterations == 3


class Unlike(ms.optimizers.Adam):
    """A rule whose clipping differs between ranks from the first step on."""

    rank = 0

    def checked_rate(self, step):
        self.clip_value = 1.0 + self.rank
        return super().checked_rate(step)


@in_worlds(2)
def test_refusals_of_the_first_step(backend):
    rule = Unlike(0.01)
    rule.rank = backend.rank
    plain, optimizer = mlp(), optimizer_of(backend, rule)
    before = plain.get_parameters()
    with pytest.raises(ShardingError, match="the settings of the update differ between ranks"):
        optimizer.optimize(data(plain))
    np.testing.assert_array_equal(plain.get_parameters(), before)
    tokens = np.zeros((12, 3), np.int64)
    gpt = ms.nn.GPT(vocabulary_size=2, context_length=3, width=4, heads=2, layers=1)
    before, optimizer = gpt.get_parameters(), optimizer_of(backend)
    with pytest.raises(NoSampleError, match="no rank has a sample that counts"):
        optimizer.optimize(data(gpt, x_train=tokens, y_train=tokens - 1))
    np.testing.assert_array_equal(gpt.get_parameters(), before)
    assert optimizer.model is None


@in_worlds(2)
def test_an_error_in_a_user_s_loss_names_where_the_parameters_are(backend):
    def loss(theta, x, y):
        raise LookupError("no such sample")

    plain, optimizer = ms.FunctionModel(loss, np.ones(3)), optimizer_of(backend, strategy="ddp")
    assert optimizer.model is None
    with pytest.raises(LookupError) as caught:
        optimizer.optimize(data(plain))
    assert "optimizer.model.release()" in caught.value.__notes__[-1]
    assert optimizer.model.wrapped_model is plain
    assert optimizer.model.release() is plain
    np.testing.assert_array_equal(plain.get_parameters(), np.ones(3))


@pytest.mark.parametrize(
    "settings", [{"resume": "nowhere"}, {"rate": lambda step: 0.1 - step}], ids=["resume", "rate"]
)
@in_worlds(2)
def test_a_refused_run_writes_no_metrics(backend, shared_path, settings):
    options = dict(settings)
    rule = ms.optimizers.Adam(options.pop("rate", 0.1))
    with pytest.raises((ValueError, FileNotFoundError)):
        optimizer_of(backend, rule).optimize(data(mlp(), metrics=shared_path / "d/m", **options))
    backend.barrier()
    assert not (shared_path / "d").exists()


@in_worlds(2)
def test_a_refused_run_keeps_the_loaded_state(backend):
    trained = optimizer_of(backend)
    model = trained.optimize(data(mlp())).model
    optimizer, plain = optimizer_of(backend), mlp()
    optimizer.deserialize(trained.serialize())
    with pytest.raises(ValueError, match="seed is 0, 1"):
        optimizer.optimize(data(plain, seed=backend.rank))
    optimizer.optimize(data(plain, max_steps=1))
    assert optimizer.steps == trained.steps + 1
    assert model.engine.step_number == 3


@pytest.mark.parametrize("make", [mlp, squares])
@in_worlds(2)
def test_a_plain_model_goes_on_with_its_wrapper(backend, make):
    plain, optimizer = make(), optimizer_of(backend)
    first = optimizer.optimize(data(plain))
    second = optimizer.optimize(data(plain))
    assert second.model is first.model
    assert optimizer.steps == 6
    at_once = optimizer_of(backend)
    model = at_once.optimize(data(make())).model
    at_once.optimize(data(model))
    np.testing.assert_array_equal(model.get_parameters(), second.model.get_parameters())
    other = make()
    before, sequence = other.get_parameters(), backend._sequence
    with pytest.raises(ShardingError, match=r"state of another model; .*reset\(\)"):
        optimizer.optimize(data(other))
    assert backend._sequence == sequence
    np.testing.assert_array_equal(other.get_parameters(), before)


@in_worlds(2)
def test_a_model_that_is_set(backend):
    optimizer, plain = optimizer_of(backend), mlp()
    with pytest.raises(TypeError, match="set_model needs a model"):
        optimizer.set_model(None)
    with pytest.raises(TypeError, match="needs a model"):
        optimizer.optimize(data(None))
    optimizer.set_model(plain)
    assert optimizer.optimize(data(None)).model.wrapped_model is plain


@in_worlds(2)
def test_members_without_meaning_for_shards_name_those_with_one(backend):
    optimizer = optimizer_of(backend)
    with pytest.raises(NotImplementedError, match=r"apply_gradients\(gradients, model\)"):
        optimizer.update_parameters(np.ones(3), np.ones(3))
    with pytest.raises(NotImplementedError, match="checkpoint"):
        optimizer.reverse_update(np.ones(3), np.ones(3))


# ------------------------------------------------------------------------------------------ drift


@pytest.mark.parametrize("is_plain", [False, True])
@in_worlds(2)
def test_replicas_that_drift_have_no_training_loop(backend, shared_path, is_plain):
    config = ms.ShardingConfiguration(backend, auto_sync_gradients=False)
    model = mlp() if is_plain else ms.as_distributed(mlp(), config, "ddp")
    optimizer = ms.as_distributed(ms.optimizers.SGD(0.1), config, "ddp")
    before, sequence = model.get_parameters(), backend._sequence
    for options in ({}, {"checkpoint": shared_path / "c"}, {"patience": 1}):
        with pytest.raises(ValueError, match=r"call step\(\) in a loop, and synchronize_gradients"):
            optimizer.optimize(data(model, **options))
    assert backend._sequence == sequence
    np.testing.assert_array_equal(model.get_parameters(), before)
    if is_plain:
        return
    for _ in range(2):
        optimizer.step(model, X[backend.rank :], Y[backend.rank :])
    model.synchronize_gradients()
    config.auto_sync_gradients = True
    assert optimizer.optimize(data(model)).iterations == 3


# ---------------------------------------------------------------------------------- NumPy scalars


@in_worlds(2)
def test_numpy_scalars(backend, shared_path):
    def train(rate, beta, numbers, flag, flags, clip):
        rule = ms.optimizers.Adam(
            rate,
            beta1=beta(0.5),
            clip_global_norm=clip(1.0),
            parameter_options={"*.bias": {"frozen": flag(True)}},
        )
        return optimizer_of(backend, rule).optimize(
            data(
                mlp(),
                **{k: numbers(v) for k, v in COUNTS.items()},
                **{k: flag(v) for k, v in flags.items()},
                tolerance=clip(0.5),
                checkpoint=shared_path / str(flag.__name__),
                x_validation=X,
                y_validation=Y,
            )
        )

    flags = {
        "shuffle": True,
        "drop_last": True,
        "keep_best": True,
        "predictions": True,
        "training_statistics": True,
        "local_data": False,
    }
    plain = train(lambda step: 0.25, float, int, bool, flags, float)
    for rate in (lambda step: np.float32(0.25), lambda step: np.array(0.25)):
        scalars = train(rate, np.float32, np.int64, np.bool_, flags, np.float32)
        assert scalars.validation_history == plain.validation_history
        assert scalars.iterations == plain.iterations == 3


COUNTS = {
    "batch_size": 5,
    "epochs": 3,
    "max_steps": 3,
    "seed": 2,
    "validate_every": 2,
    "patience": 9,
    "checkpoint_every": 2,
}


@pytest.mark.parametrize("name", ["shuffle", "local_data", "keep_best", "progress"])
def test_flags_of_other_types(name):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got 'no'"):
        ms.optimizers.SGD().optimize(data(mlp(), **{name: "no"}))


def test_settings_of_numpy_scalars_are_written():
    def rule(number, flag, count):
        schedule = Cosine(number(0.5), count(9), number(0.25))
        options = {"*": {"weight_decay": number(0.5)}}
        return ms.optimizers.SGD(
            schedule, number(0.5), flag(True), clip_value=number(2), parameter_options=options
        )

    scalars = rule(np.float32, np.bool_, np.int64)
    assert scalars.serialize() == rule(float, bool, int).serialize()
    assert scalars.fingerprint() == rule(float, bool, int).fingerprint()
    made = ms.optimizers.RMSprop(centered=np.bool_(True), clip_global_norm=np.float32(1))
    made.deserialize(made.serialize())
    options = OptimizationAlgorithmOptions(
        max_iterations=np.int64(7), use_early_stopping=np.bool_(False), tolerance=np.float32(0.5)
    )
    assert options == OptimizationAlgorithmOptions(
        max_iterations=7, use_early_stopping=False, tolerance=0.5
    )
    ms.optimizers.SGD.from_options(options).serialize()


# ------------------------------------------------------------------------------ schedules that end


@in_worlds(2)
def test_a_table_as_long_as_the_run(backend, shared_path):
    table = [0.1, 0.1, 0.05, 0.05, 0.02, 0.02]

    def train(schedule, **options):
        optimizer = optimizer_of(backend, ms.optimizers.SGD(schedule))
        return optimizer.optimize(data(mlp(), epochs=2, **options))

    whole = train(lambda step: table[step])
    endless = train(lambda step: table[min(step, 5)])
    np.testing.assert_array_equal(whole.loss_history, endless.loss_history)
    half = train(lambda step: table[step], max_steps=3, checkpoint=shared_path / "half")
    rest = train(lambda step: table[step], resume=shared_path / "half")
    assert [*half.loss_history, *rest.loss_history] == whole.loss_history
    with pytest.raises(IndexError):
        train(lambda step: table[:5][step])
    with pytest.raises(ValueError, match=r"learning rate of -1\.0 for step 5"):
        train(lambda step: 4.0 - step)


@in_worlds(2)
def test_tables_that_differ_between_ranks(backend):
    table = [0.1, 0.1 + backend.rank]
    optimizer = optimizer_of(backend, ms.optimizers.SGD(lambda step: table[step]))
    with pytest.raises(ValueError, match=r"learning_rate is \[0.1, 0.1, None, .*\[0.1, 1.1, None"):
        optimizer.optimize(data(mlp(), max_steps=2))


def test_a_schedule_that_gives_no_number():
    rule = ms.optimizers.SGD(lambda step: "fast")
    with pytest.raises(TypeError, match="what the schedule gives for step 0 must be a number"):
        rule.step(mlp(), X, Y)
    assert rule.fingerprint()["learning_rate"] == [None] * 6
    nan = ms.optimizers.SGD(lambda step: float("nan"))
    assert nan.fingerprint() == nan.fingerprint()


# --------------------------------------------------------------- what one rank alone can know


@pytest.mark.parametrize("path", ["/proc/nope/m.jsonl", "/dev/null/m.jsonl"])
@in_worlds(2)
def test_metrics_that_cannot_be_written(backend, path):
    plain, optimizer = mlp(), optimizer_of(backend)
    with pytest.raises(OSError, match=r"nope|null"):
        optimizer.optimize(data(plain, metrics=path))
    assert optimizer.optimize(data(plain)).iterations == 3


@in_worlds(2)
def test_collectives_are_logged_at_the_user_s_line(backend):
    plain, optimizer = mlp(), optimizer_of(backend)
    with pytest.raises(ValueError, match="3"):
        optimizer.optimize(data(plain, x_test=X[:, :2], y_test=Y))
    call = backend.status.read().calls[-1]
    assert call.site.startswith(f"{Path(__file__)}:")
