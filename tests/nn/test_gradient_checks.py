"""The gradient checks find wrong gradients and violations of the layer interface."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import mpishard as ms
from mpishard.nn import MSE, CausalAttention, Layer, Linear, Model, ParameterSpec, Sequential, Tanh
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


class Alone(Linear):
    """Forward returns the output alone."""

    def forward(self, p, x, context):
        return super().forward(p, x, context)[0]


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
def test_violations_of_the_layer_interface_are_found(layer, message):
    with pytest.raises(AssertionError, match=message):
        check_layer_gradients(layer, X)


def test_a_forward_pass_that_returns_the_output_alone_is_found():
    with pytest.raises(TypeError, match=r"Alone\.forward must return two values, .* an array of"):
        check_layer_gradients(Alone(3, 2), X)


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


class LearnedReLU(Layer):
    """Adds to its gradient by name, as users write it."""

    @property
    def parameters(self):
        return {"slope": ParameterSpec((1,), lambda _, shape: np.full(shape, 0.25))}

    def output_shape(self, input_shape):
        return input_shape

    def forward(self, p, x, context):
        return np.where(x > 0, x, p["slope"] * x), x if context.training else None

    def backward_input(self, p, x, dy):
        return np.where(x > 0, dy, p["slope"] * dy), (x, dy)

    def backward_weight(self, pending, g):
        x, dy = pending
        g["slope"] += np.sum(dy * x * (x <= 0))


def test_a_gradient_may_be_added_to_by_name():
    check_layer_gradients(LearnedReLU(), X)
    chain = Sequential(Linear(3, 4), LearnedReLU(), Linear(4, 1))

    def build():
        return Model(chain, MSE(), input_shape=(3,), dtype="float64")

    y = X[:, :1]
    check_gradients(build(), X, y)
    alone = build()
    alone.train(X, y, learning_rate=0.1)

    def main(backend):
        config = ms.ShardingConfiguration(backend, learning_rate=0.1)
        sharded = ms.as_distributed(build(), config, "fsdp")
        mine = ms.ShardLayout(len(X), backend.world_size).slice(backend.rank)
        sharded.train(X[mine], y[mine])
        return sharded.gather_full_parameters()

    for got in ms.run_in_threads(2, main):
        np.testing.assert_allclose(got, alone.get_parameters(), rtol=1e-12, atol=1e-12)


def test_the_layer_on_the_page_about_meshes_passes_the_gradient_check():
    page = (Path(__file__).parents[2] / "docs" / "meshes.md").read_text()
    names = {"ms": ms, "np": np}
    exec(re.search(r"^class Swish.*?(?=^def )", page, re.DOTALL | re.MULTILINE)[0], names)
    check_layer_gradients(names["Swish"](), X)
