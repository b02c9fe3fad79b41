"""The training loop: its batches, its reports, and how it resumes."""

import numpy as np
import pytest

import mpishard as ms
from mpishard.data import GlobalBatchSampler
from mpishard.errors import CheckpointError, NonFiniteLossError, ShardingError
from mpishard.observe import read_metrics
from mpishard.testing.worlds import in_worlds

SAMPLES, BATCH, EPOCHS = 50, 16, 5
STEPS = 4 * EPOCHS  # the last batch of an epoch has two samples
RATE = 1e-3
generator = np.random.default_rng(0)
X = generator.standard_normal((SAMPLES, 5))
Y = np.sin(X[:, :2])
X_NEW, Y_NEW = X[:21] + 0.1, Y[:21]

by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])


def plain_model(kind="mlp"):
    if kind == "mlp":
        return ms.nn.MLP([5, 7, 2], activation="tanh", seed=1)
    return ms.FunctionModel(squared_error, np.linspace(-1, 1, 10))


def squared_error(theta, x, y):
    error = x @ theta.reshape(5, 2) - y
    return float((error**2).mean()), (x.T @ error).ravel() / len(x)


def rule():
    return ms.optimizers.AdamW(
        ms.optimizers.WarmUp(3, ms.optimizers.Cosine(RATE, 17)), weight_decay=0.1
    )


def data(model, **options):
    choices = {
        "x_train": X, "y_train": Y, "batch_size": BATCH, "epochs": EPOCHS, "seed": 3,
        "progress": False,
    }  # fmt: skip
    return ms.OptimizationInputData(model=model, **(choices | options))


def train(backend, strategy="fsdp", kind="mlp", **options):
    """Return the result, and the parameters at the end."""
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    model = ms.as_distributed(plain_model(kind), config, strategy)
    result = ms.as_distributed(rule(), config, strategy).optimize(data(model, **options))
    return result, model.get_parameters()


def by_hand(kind="mlp", steps=STEPS, drop_last=False, shuffle=True):
    """Return losses before each update, and parameters at the end, without the loop or a rule."""
    model = plain_model(kind)
    theta = model.get_parameters()
    m, v, losses = 0 * theta, 0 * theta, []
    sampler = GlobalBatchSampler(SAMPLES, BATCH, seed=3, shuffle=shuffle, drop_last=drop_last)
    for step in range(steps):
        batch = sampler.batch(*divmod(step, sampler.batches_per_epoch))
        model.set_parameters(theta)
        loss, g = model.compute_loss_and_gradients(X[batch], Y[batch])
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        cosine = (1 + np.cos(np.pi * (step - 3) / 17)) / 2
        rate = RATE * ((step + 1) / 3 if step < 3 else cosine)
        move = m / (1 - 0.9 ** (step + 1)) / (np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-8)
        theta = theta - rate * (move + 0.1 * theta)
        losses.append(loss)
    return losses, theta


def close(actual, expected, tolerance=1e-12):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


# ----------------------------------------------------------------------------------- going through


@by_strategy
@pytest.mark.parametrize("kind", ["mlp", "function"])
@in_worlds(1, 2, 3, 5)
def test_the_loop_trains_as_a_loop_by_hand(backend, strategy, kind):
    result, parameters = train(backend, strategy, kind)
    losses, expected = by_hand(kind)
    close(parameters, expected)
    close(result.loss_history, losses)
    weights = [16, 16, 16, 2]
    means = [np.dot(losses[e : e + 4], weights) / SAMPLES for e in range(0, STEPS, 4)]
    close(result.fitness_history, means)
    close(result.best_fitness_score, min(means))
    assert result.iterations == STEPS
    assert result.weight == EPOCHS * SAMPLES
    assert result.validation_history == []
    assert result.test_loss is None
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [
        ({"drop_last": True}, 15, 5),
        ({"shuffle": False}, 20, 5),
        ({"max_steps": 6}, 6, 2),
        ({"max_steps": 8}, 8, 2),
        ({"max_steps": 99}, 20, 5),
    ],
)
@in_worlds(1, 3)
def test_a_run_ends_after_the_given_epochs_or_steps(backend, options, steps, epochs):
    result, parameters = train(backend, **options)
    by_hand_options = {k: v for k, v in options.items() if k != "max_steps"}
    losses, expected = by_hand(steps=steps, **by_hand_options)
    close(parameters, expected)
    close(result.loss_history, losses)
    assert result.iterations == steps
    assert len(result.fitness_history) == epochs


@by_strategy
@in_worlds(1, 3)
def test_validation_losses_are_those_of_the_model(backend, strategy):
    given = {"x_validation": X_NEW, "y_validation": Y_NEW, "x_test": X_NEW, "y_test": Y_NEW}
    each_epoch, parameters = train(backend, strategy, **given)
    assert [step for step, _ in each_epoch.validation_history] == [4, 8, 12, 16, 20]
    often, _ = train(backend, strategy, validate_every=6, **given)
    assert [step for step, _ in often.validation_history] == [6, 12, 18, 20]
    loss = ms.nn.MSE()(plain_model().with_parameters(parameters).predict(X_NEW), Y_NEW)
    for result in (each_epoch, often):
        close(result.validation_history[-1][1], loss)
        close(result.test_loss, loss)
        assert result.best_fitness_score == min(v for _, v in result.validation_history)
        close(parameters, result.model.get_parameters())  # to look is not to learn


@in_worlds(2)
def test_a_resumed_run_writes_each_metric_once(backend, shared_path):
    train(backend, metrics=shared_path / "m", x_validation=X_NEW, y_validation=Y_NEW)
    backend.barrier()  # rank 0 writes
    records = read_metrics(shared_path / "m")
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    close([record["loss"] for record in steps], by_hand()[0])
    assert steps[0]["learning_rate"] == pytest.approx(RATE / 3)
    assert {"gradient_norm", "weight", "epoch", "time"} <= set(steps[0])
    assert sum("validation_loss" in record for record in records) == EPOCHS


# --------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize(
    ("world_size", "strategy", "stop"),
    [(3, "fsdp", 6), (3, "fsdp", 19), (2, "ddp", 4), (1, "fsdp", 6)],
)
def test_resumed_in_the_same_world_it_is_the_same_run(tmp_path, stop, world_size, strategy):
    validation = {"x_validation": X_NEW, "y_validation": Y_NEW}
    whole, parameters = ms.run_in_threads(world_size, train, strategy, **validation)[0]
    saved = {"checkpoint": tmp_path / "run", **validation}
    ms.run_in_threads(world_size, train, strategy, max_steps=stop, **saved)
    resumed = ms.run_in_threads(world_size, train, strategy, resume=tmp_path / "run", **validation)
    for result, values in resumed:
        assert values.tobytes() == parameters.tobytes()
        assert result.loss_history == whole.loss_history[stop:]
        assert result.fitness_history == whole.fitness_history
        assert result.model.engine.step_number == STEPS  # what randomness depends on
        assert set(whole.validation_history) <= set(result.validation_history)
        assert result.iterations == STEPS


@pytest.mark.parametrize(
    ("worlds", "strategies", "kind"),
    [
        ((1, 3), ("fsdp", "fsdp"), "mlp"),
        ((3, 2), ("ddp", "fsdp"), "function"),
        ((2, 5), ("fsdp", "ddp"), "mlp"),
        ((3, 2), ("fsdp", "ddp"), "mlp"),
    ],
)
def test_a_run_resumes_in_another_world(tmp_path, worlds, strategies, kind):
    losses, expected = by_hand(kind)
    path = tmp_path / "run"
    ms.run_in_threads(
        worlds[0], train, strategies[0], kind,
        max_steps=6, checkpoint=path, checkpoint_every=4,
    )  # fmt: skip
    for result, parameters in ms.run_in_threads(
        worlds[1], train, strategies[1], kind, resume=path, checkpoint=path
    ):
        close(parameters, expected, 1e-10)
        close(result.loss_history, losses[6:], 1e-10)
        assert len(result.fitness_history) == EPOCHS
    finished = ms.run_in_threads(1, train, strategies[0], kind, resume=path)
    assert finished[0][0].loss_history == []
    close(finished[0][1], expected, 1e-10)


@in_worlds(1, 3)
def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(backend, shared_path):
    class KilledError(Exception):
        pass

    class Data:
        """Ends the run in the middle of its eighth step."""

        reads = 0

        def __len__(self):
            return SAMPLES

        def __getitem__(self, indices):
            self.reads += 1
            if self.reads == 8:
                raise KilledError
            return X[indices]

    path = shared_path / "run"
    config = ms.ShardingConfiguration(backend)
    model = ms.as_distributed(plain_model(), config)
    optimizer = ms.as_distributed(rule(), config)
    # Of a batch of two, a rank may get no sample; it still reads.
    with pytest.raises(KilledError):
        optimizer.optimize(data(model, x_train=Data(), checkpoint=path, checkpoint_every=3))
    result, parameters = train(backend, resume=path)
    assert len(result.loss_history) == STEPS - 6
    close(parameters, by_hand()[1], 1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 8}, "batch_size was 16 and is 8"),
        ({"seed": 4}, "seed was 3 and is 4"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"drop_last": True}, "drop_last was False and is True"),
        ({"x_train": X[:40], "y_train": Y[:40]}, "samples was 50 and is 40"),
    ],
)
@in_worlds(2)
def test_a_run_refuses_to_continue_in_another_order(backend, shared_path, options, message):
    train(backend, max_steps=5, checkpoint=shared_path / "run")
    config = ms.ShardingConfiguration(backend)
    model = ms.as_distributed(plain_model(), config)
    optimizer = ms.as_distributed(rule(), config)
    before = model.get_parameters()
    with pytest.raises(ValueError, match=message):
        optimizer.optimize(data(model, resume=shared_path / "run", **options))
    assert model.get_parameters().tobytes() == before.tobytes()
    assert optimizer.steps == 0


@in_worlds(2)
def test_other_checkpoints_than_this_runs_are_refused(backend, shared_path):
    with pytest.raises(FileNotFoundError):
        train(backend, resume=shared_path / "nothing")
    model = ms.as_distributed(plain_model(), backend)
    model.save_model(shared_path / "model")
    with pytest.raises((ValueError, CheckpointError), match=r"no position|without an optimizer"):
        train(backend, resume=shared_path / "model")
    train(backend, max_steps=2, checkpoint=shared_path / "run")
    sgd = ms.as_distributed(ms.optimizers.SGD(0.1, 0.9), backend)
    with pytest.raises(CheckpointError, match="velocity"):
        sgd.optimize(data(model, resume=shared_path / "run"))


# ------------------------------------------------------------------------------------ plain models


@pytest.mark.parametrize("kind", ["mlp", "function"])
def test_a_plain_optimizer_trains_a_plain_model(kind):
    model = plain_model(kind)
    result = rule().optimize(data(model))
    losses, expected = by_hand(kind)
    assert result.model is result.best_solution is model
    close(model.get_parameters(), expected)
    close(result.loss_history, losses)
    rule().optimize(data(model, epochs=1))  # and again
    assert np.isfinite(model.train(X, Y))


def test_a_plain_model_has_its_parameters_after_a_failure():
    model = plain_model()
    before = model.get_parameters()
    with pytest.raises(NonFiniteLossError, match="step 1"):
        rule().optimize(data(model, x_train=X * np.nan))
    assert model.get_parameters().tobytes() == before.tobytes()


@by_strategy
@in_worlds(1, 3)
def test_a_sharded_optimizer_wraps_a_plain_model(backend, strategy):
    plain = plain_model()
    optimizer = ms.as_distributed(rule(), backend, strategy)
    result = optimizer.optimize(data(plain))
    assert result.model.wrapped_model is plain
    assert result.model.strategy == strategy.upper().replace("ZERO", "ZeRO-")
    close(result.model.get_parameters(), by_hand()[1])


# ---------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": None}, TypeError, "needs a model"),
        ({"x_train": None}, TypeError, "x_train must be given"),
        ({"y_train": Y[:7]}, ValueError, "x_train has 50 samples and y_train has 7"),
        ({"x_train": X.tolist()}, TypeError, r"pass numpy.asarray\(x_train\)"),
        ({"x_train": X[:0], "y_train": Y[:0]}, ValueError, "x_train holds no samples"),
        ({"x_validation": X}, TypeError, "x_validation and y_validation must both"),
        ({"x_test": X, "y_test": Y[:3]}, ValueError, "x_test has 50"),
        ({"batch_size": 0}, ValueError, "batch_size must be 1 or more"),
        ({"epochs": 0}, ValueError, "epochs must be 1 or more"),
        ({"max_steps": 0}, ValueError, "max_steps must be 1 or more"),
        ({"checkpoint_every": 5}, ValueError, "checkpoint_every needs checkpoint"),
        ({"keep_last": 5}, ValueError, "keep_last needs checkpoint.*keep_last=5"),
        ({"validate_every": 5}, ValueError, "validate_every needs x_validation"),
        ({"batch_size": 64, "drop_last": True}, ValueError, "drop_last=True leaves no batch"),
    ],
)
@in_worlds(2)
def test_bad_input_is_refused_before_anything_is_sent(backend, options, error, message):
    plain = options.get("model", plain_model())
    sharded = ms.as_distributed(rule(), backend)
    options = {name: value for name, value in options.items() if name != "model"}
    before = backend._sequence
    for optimizer in (sharded, sharded.wrapped_optimizer):
        with pytest.raises(error, match=message):
            optimizer.optimize(data(plain, **options))
        with pytest.raises(TypeError, match="got None"):
            optimizer.optimize(None)
    assert backend._sequence == before


@in_worlds(2)
def test_a_model_of_another_strategy_is_refused(backend):
    model = ms.as_distributed(plain_model(), backend, "ddp")
    before = backend._sequence
    with pytest.raises(ShardingError, match="use one strategy for both"):
        ms.as_distributed(rule(), backend, "fsdp").optimize(data(model))
    with pytest.raises(TypeError, match="wrap the rule too"):
        rule().optimize(data(model))
    assert backend._sequence == before


@pytest.mark.parametrize(
    ("ends", "steps"),
    [
        ({}, 4),
        ({"max_steps": 30}, 30),
        ({"max_steps": 3}, 3),
        ({"epochs": 2}, 8),
        ({"epochs": 2, "max_steps": 30}, 8),
        ({"epochs": 2, "max_steps": 5}, 5),
    ],
)
@in_worlds(2)
def test_epochs_and_max_steps_each_end_training_alone(backend, ends, steps):
    model = ms.as_distributed(ms.nn.MLP([2, 1]), backend)
    optimizer = ms.as_distributed(ms.optimizers.SGD(0.01), backend)
    data = ms.OptimizationInputData(
        model=model, x_train=np.ones((8, 2)), y_train=np.ones((8, 1)), batch_size=2,
        progress=False, **ends,
    )  # fmt: skip
    result = optimizer.optimize(data)
    assert result.iterations == steps
    assert len(result.fitness_history) == -(-steps // 4)
