"""Optimizers without strategy: vectors, plain models, reversal."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mpishard as ms
from mpishard.errors import NonFiniteLossError, ShardingError
from mpishard.optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Cosine,
    Lion,
    OneCycle,
    RMSprop,
    StepDecay,
    WarmUp,
)

RULES = [
    SGD(0.1, 0.9, nesterov=True, weight_decay=0.1),
    SGD(0.1, weight_decay=2.0),
    Adagrad(0.1, weight_decay=0.1),
    RMSprop(0.1, momentum=0.5, centered=True, weight_decay=0.1),
    Adam(Cosine(0.1, 9), weight_decay=0.1, clip_value=0.3),
    AdamW(WarmUp(2, OneCycle(0.1, 9)), weight_decay=0.1, clip_global_norm=0.3),
    Lion(0.1, weight_decay=0.1),
    LAMB(StepDecay(0.1, 2), weight_decay=0.1),
]
by_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)

X = np.random.default_rng(0).standard_normal((12, 3))
Y = X[:, :1] - 1


def numbers(seed, shape=(7,), dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def mlp(seed=0):
    return ms.nn.MLP([3, 4, 1], seed=seed, dtype="float64")


@pytest.fixture(autouse=True)
def anew():
    yield
    for rule in RULES:
        rule.reset()


# ------------------------------------------------------------------------------------- updates


def test_vector_matrix_and_layers():
    rule, v, p = SGD(0.1, 0.9), 0.0, numbers(0, (2, 3))
    for step in range(3):
        g = numbers(step + 1, (2, 3))
        before, given = p.copy(), p
        v = 0.9 * v + g
        p = rule.update_parameters(given, g)
        np.testing.assert_allclose(p, before - 0.1 * v, rtol=0, atol=1e-15)
        assert (given == before).all()
        assert (rule.last_computed_gradients == g.ravel()).all()
    layers = [numbers(3, (2, 3)), numbers(4, (4,), np.float64)]
    rule = SGD(0.1, parameter_options={"0": {"learning_rate_scale": 0.5}, "1": {"frozen": True}})
    new = rule.update_parameters(layers, [np.ones((2, 3)), np.ones(4)])
    np.testing.assert_allclose(new[0], layers[0] - 0.05, atol=1e-15)
    assert (new[1] == layers[1]).all()


@by_rule
def test_steps_on_a_plain_model_are_those_of_the_engine(rule):
    model, steps = mlp(), 4
    losses = [rule.step(model, X, Y) for _ in range(steps)]
    assert rule.get_current_learning_rate() == rule.learning_rate(steps)
    other = mlp()
    result = rule.optimize(
        ms.OptimizationInputData(
            model=other,
            x_train=X,
            y_train=Y,
            batch_size=12,
            epochs=steps,
            shuffle=False,
            progress=False,
        )
    )
    np.testing.assert_allclose(losses, result.loss_history, rtol=0, atol=1e-12)
    np.testing.assert_allclose(model.get_parameters(), other.get_parameters(), rtol=0, atol=1e-12)


def test_apply_gradients_from_here_and_from_before():
    model, g = mlp(), numbers(1, (21,))
    original = model.get_parameters()
    assert SGD(0.1).apply_gradients(g, model) is model
    np.testing.assert_allclose(model.get_parameters(), original - 0.1 * g, atol=1e-15)
    SGD(0.2).apply_gradients(original, g, model)
    np.testing.assert_allclose(model.get_parameters(), original - 0.2 * g, atol=1e-15)


def test_names_come_from_the_model():
    options = {"*.bias": {"frozen": True}, "linear1.weight": {"learning_rate_scale": 0}}
    rule = SGD(0.1, clip_global_norm=1.0, parameter_options=options)
    model, g = mlp(), np.full(21, 7.0)
    before = model.get_parameters()
    moved = rule.apply_gradients(g, model).get_parameters() != before
    assert moved.tolist() == [True] * 12 + [False] * 9
    # Frozen gradients count for no norm: 16 elements of weights are trained.
    np.testing.assert_allclose((before - model.get_parameters())[:12], 0.1 / 4, atol=1e-15)
    rule.reset()
    rule.set_model(mlp())
    assert (rule.update_parameters(before, g) == model.get_parameters()).all()
    with pytest.raises(ValueError, match="none of the model's parameters: parameters"):
        rule.update_parameters(numbers(0), numbers(1))


def test_a_model_that_is_set_is_trained():
    rule, model = SGD(0.1), mlp()
    data = ms.OptimizationInputData(x_train=X, y_train=Y, progress=False)
    with pytest.raises(TypeError, match="needs a model"):
        rule.optimize(data)
    rule.set_model(model)
    before = model.get_parameters()
    assert rule.optimize(data).model is model
    assert (model.get_parameters() != before).any()


@by_rule
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_reversal(rule, dtype):
    p = numbers(0, (3, 5), dtype)
    for step in range(3):
        before, g = p, numbers(step + 1, (3, 5), dtype)
        p = rule.update_parameters(p, g)
    again = rule.reverse_update(p, g)
    assert again.dtype == dtype
    bound = 1e-12 if dtype == np.float64 else 3e-6
    assert np.abs(p - before).max() > 1e-3
    np.testing.assert_allclose(again, before, rtol=0, atol=bound)
    assert rule.get_current_learning_rate() == rule.learning_rate(2)
    assert (rule.update_parameters(before, g) == p).all()  # the state had gone back, too


def test_updates_that_cannot_be_reversed():
    rule, p, g = SGD(1.0, weight_decay=1.0), numbers(0), numbers(1)
    with pytest.raises(RuntimeError, match="no update to reverse"):
        rule.reverse_update(p, g)
    p = rule.update_parameters(p, g)  # which forgets where it came from
    with pytest.raises(ValueError, match="gradients of the last update"):
        rule.reverse_update(p, g + 1)
    with pytest.raises(RuntimeError, match="cannot be reversed"):
        rule.reverse_update(p + 1, g)
    rule = SGD(0.1)
    p = rule.update_parameters(p, g)
    rule.reverse_update(p, g)
    with pytest.raises(RuntimeError, match="only the last one"):
        rule.reverse_update(p, g)


def test_a_reversal_that_fails_changes_nothing():
    rule, p, g = SGD(0.1), numbers(0), numbers(1)
    p = rule.update_parameters(p, g)
    before = rule.serialize()

    def broken(step):
        raise ArithmeticError("no rate")

    rule.learning_rate = broken
    with pytest.raises(ArithmeticError, match="no rate"):
        rule.reverse_update(p, g)
    rule.learning_rate = 0.1
    assert rule.serialize() == before


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda r: r.update_parameters(numbers(0), numbers(0, (6,))), ValueError, "shape"),
        (lambda r: r.update_parameters(numbers(0, (0,)), numbers(0, (0,))), ValueError, "elements"),
        (lambda r: r.update_parameters([numbers(0)], []), ValueError, "1 arrays"),
        (lambda r: r.update_parameters([], []), ValueError, "not none"),
        (lambda r: r.update_parameters(numbers(0), np.ones(7, "f4")), TypeError, "one float dtype"),
        (lambda r: r.update_parameters(np.ones(7, "i8"), np.ones(7, "i8")), TypeError, "int64"),
        (lambda r: r.apply_gradients(numbers(0)), TypeError, "got 1 arguments"),
        (lambda r: r.apply_gradients(numbers(0), numbers(1)), TypeError, "needs a model last"),
        (lambda r: r.apply_gradients(numbers(0), mlp()), ValueError, "21"),
        (lambda r: r.set_model(None), TypeError, "needs a model"),
    ],
)
def test_mistakes_change_nothing(act, error, message):
    rule = Adam()
    with pytest.raises(error, match=message):
        act(rule)
    assert rule.last_computed_gradients is None
    assert rule.serialize() == Adam().serialize()


def test_one_model_until_reset():
    rule = Adam()
    rule.update_parameters(numbers(0), numbers(1))
    with pytest.raises(ValueError, match="state of other parameters than these 8 of float64"):
        rule.update_parameters(numbers(0, (8,)), numbers(1, (8,)))
    rule.reset()
    rule.update_parameters(numbers(0, (8,)), numbers(1, (8,)))


def test_a_step_that_is_not_finite():
    rule, model = Adam(), mlp()
    before = model.get_parameters()
    with pytest.raises(NonFiniteLossError, match="step 1: the loss is nan"):
        rule.step(model, X * math.nan, Y)
    assert (model.get_parameters() == before).all()
    assert rule.last_computed_gradients is None


def test_a_model_that_computes_only_gradients():
    class Bare:
        theta = np.ones(3)

        def get_parameters(self):
            return self.theta

        def set_parameters(self, theta):
            self.theta = theta

        def compute_gradients(self, x, y):
            return np.full(3, 2.0)

    model = Bare()
    assert math.isnan(SGD(0.25).step(model, X, Y))
    assert model.theta.tolist() == [0.5] * 3


def dropout(seed=3):
    nn = ms.nn
    chain = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    return nn.Model(chain, nn.MSE(), input_shape=(3,), seed=seed, dtype="float64")


def test_masks_change_from_step_to_step_as_those_of_the_engine():
    def sharded(backend):
        model = ms.as_distributed(dropout(), backend, "ddp")
        optimizer = ms.as_distributed(SGD(0.05, 0.5), backend, "ddp")
        return [optimizer.step(model, X, Y) for _ in range(4)], model.get_parameters()

    ((losses, expected),) = ms.run_in_threads(1, sharded)
    model, rule = dropout(), SGD(0.05, 0.5)
    np.testing.assert_allclose([rule.step(model, X, Y) for _ in range(4)], losses, atol=1e-12)
    np.testing.assert_allclose(model.get_parameters(), expected, rtol=0, atol=1e-12)
    rule.reverse_update(model.get_parameters(), rule.last_computed_gradients)
    model.set_parameters(expected)
    again = dropout()
    again.set_parameters(expected)  # the step that was taken back is step 3 again
    assert rule.step(model, X, Y) == again.compute_loss_and_gradients(X, Y, step=3)[0]


def function(gradient, parameters):
    return ms.FunctionModel(lambda theta, x, y: (1.0, gradient), parameters)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int64])
def test_gradients_of_another_dtype_are_converted(dtype):
    gradient = np.array([1, -2, 4], dtype)
    model = function(gradient, np.ones(3, np.float32))
    rule = SGD(0.25, 0.5)
    rule.step(model, X, Y)
    assert model.get_parameters().dtype == rule.last_computed_gradients.dtype == np.float32
    assert model.get_parameters().tolist() == [0.75, 1.5, 0.0]


def test_gradients_that_cannot_be_converted():
    theta = np.ones(3, np.float32)
    with pytest.raises(NonFiniteLossError, match="not finite"):
        SGD().step(function(np.full(3, 1e300), theta), X, Y)
    with pytest.raises(TypeError, match="parameters of float32 cannot be complex128"):
        SGD().step(function(np.ones(3, complex), theta), X, Y)


@by_rule
def test_a_second_model_is_refused_until_reset(rule):
    first, second, g = mlp(), mlp(1), numbers(1, (21,))
    before = second.get_parameters()
    rule.step(first, X, Y)
    rule.apply_gradients(g, first)
    for call in (
        lambda: rule.step(second, X, Y),
        lambda: rule.apply_gradients(g, second),
        lambda: rule.apply_gradients(before, g, second),
    ):
        with pytest.raises(ShardingError, match=r"state of another model; .*reset\(\)"):
            call()
    assert (second.get_parameters() == before).all()
    rule.step(first, X, Y)
    rule.deserialize(rule.serialize())  # state that was read may be that of any model
    rule.step(second, X, Y)
    rule.reset()
    rule.step(first, X, Y)


def test_a_rule_that_was_not_wrapped_refuses_a_sharded_model():
    def body(backend):
        model = ms.as_distributed(ms.nn.MLP([3, 2, 1], seed=0), backend)
        data = ms.OptimizationInputData(model=model, x_train=X, y_train=Y, progress=False)
        for train in (lambda: SGD(0.1).step(model, X, Y), lambda: SGD(0.1).optimize(data)):
            with pytest.raises(TypeError, match=r"a FSDPModel: wrap the rule too, .*\(SGD\("):
                train()

    ms.run_in_threads(2, body)
