"""The gradient checks find what they are there to find."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard.nn import CausalAttention, Linear, Tanh
from mpishard.testing.gradients import (
    GradientMismatchError,
    check_gradients,
    check_layer_gradients,
)

X = np.random.default_rng(0).standard_normal((4, 3))


class ScaledBias(Linear):
    """The bias's gradient is off by one part in a thousand."""

    def backward_weight(self, pending, g):
        before = g["bias"].copy()
        super().backward_weight(pending, g)
        g["bias"][...] = before + 1.001 * (g["bias"] - before)


class Overwriting(Linear):
    """Gradients replace what was there."""

    def backward_weight(self, pending, g):
        g["weight"][...] = 0
        super().backward_weight(pending, g)


class Sharing(Tanh):
    """Saves without training."""

    def forward(self, p, x, context):
        y = np.tanh(x)
        return y, y


class InPlace(Tanh):
    """Changes its input."""

    def forward(self, p, x, context):
        return super().forward(p, np.tanh(x, out=x), context)


class Forgetful(Linear):
    """Where the input's gradient is not asked for, the weight gets none either."""

    def backward(self, p, saved, dy, g, *, needs_input_gradient=True):
        return super().backward(p, saved, dy, g) if needs_input_gradient else None


class Pending(Linear):
    """What is pending shares memory with what is returned."""

    def backward_input(self, p, saved, dy):
        dy[...] = dy @ p["weight"]
        return dy, (saved, dy)


def test_right_layers_pass_and_report_each_array():
    errors = check_layer_gradients(Linear(3, 2), X)
    assert set(errors) == {"input", "weight", "bias"}
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    assert max(errors.values()) < 1e-8
    check_layer_gradients(CausalAttention(1), np.ones((1, 3, 6)), samples=5)


def test_the_wrong_gradient_is_named_worst_first():
    with pytest.raises(GradientMismatchError, match=r"1 of 3 .*\n  bias: 0\.000999") as caught:
        check_layer_gradients(ScaledBias(3, 2), X)
    assert next(iter(caught.value.errors)) == "bias"
    check_layer_gradients(ScaledBias(3, 2), X, tolerance=2e-3)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Overwriting(3, 2), "weight was not added"),
        (Sharing(), "without training"),
        (Pending(3, 3), "shares memory"),
        (Forgetful(3, 2), "gradient of weight depends on whether"),
    ],
)
def test_broken_promises_are_found(layer, message):
    with pytest.raises(AssertionError, match=message):
        check_layer_gradients(layer, X)


def test_a_changed_input_is_found():
    with pytest.raises(ValueError, match="read-only"):
        check_layer_gradients(InPlace(), X)


class Quadratic:
    """A black box: loss = mean over samples of sum(scale * theta^2 * x)."""

    def __init__(self, scale=1.0, dtype="float64"):
        self.theta = np.linspace(-1, 2, 3).astype(dtype)
        self.scale = scale

    def get_parameters(self):
        return self.theta.copy()

    def set_parameters(self, parameters):
        self.theta = parameters.copy()

    def predict(self, x):
        return x @ self.theta**2

    def compute_gradients(self, x, y):
        return (self.scale * 2 * self.theta * x.mean(axis=0)).astype(self.theta.dtype)


def mean(prediction, target):
    return prediction.mean()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_black_boxes_are_checked_and_restored(dtype):
    model = Quadratic(dtype=dtype)
    before = model.get_parameters()
    errors = check_gradients(model, X, None, mean)
    assert list(errors) == ["parameters"]
    np.testing.assert_array_equal(model.get_parameters(), before)
    assert model.get_parameters().dtype == dtype


def test_a_wrong_black_box_is_found():
    with pytest.raises(GradientMismatchError, match=r"parameters: 0\.0909"):
        check_gradients(Quadratic(1.1), X, None, mean)
    with pytest.raises(GradientMismatchError, match="nan"):
        check_gradients(Quadratic(np.nan), X, None, mean)


def test_a_model_without_a_loss_is_refused():
    with pytest.raises(TypeError, match="Quadratic has no compute_loss_and_gradients"):
        check_gradients(Quadratic(), X, None)


def test_a_model_that_changes_its_parameters_is_found():
    class Drifting(Quadratic):
        def compute_gradients(self, x, y):
            self.theta += 1e-3
            return super().compute_gradients(x, y)

    with pytest.raises(AssertionError, match="changed the parameters"):
        check_gradients(Drifting(), X, None, mean)
