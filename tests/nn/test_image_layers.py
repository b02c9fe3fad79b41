"""Convolution, pooling and flattening against differences, autograd, and loops over windows."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad

from mpishard.nn import (
    Context,
    Conv2D,
    CrossEntropy,
    Flatten,
    Linear,
    MaxPool2D,
    Model,
    ReLU,
    Sequential,
)
from mpishard.nn.layers.initializers import zeros
from mpishard.nn.layers.layer import GradientTargets, ParameterSpec
from mpishard.sharding import ParameterTable
from mpishard.testing.gradients import check_gradients, check_layer_gradients

Pair = tuple[int, int]

CONVOLUTIONS = {
    "plain": (Conv2D(3, 4, 3), (2, 3, 5, 6)),
    "padded": (Conv2D(2, 3, 3, padding=1), (3, 2, 4, 4)),
    "strided": (Conv2D(2, 3, 2, stride=2), (2, 2, 5, 4)),
    "pairs": (Conv2D(2, 3, (3, 2), stride=(2, 1), padding=(2, 1), bias=False), (2, 2, 4, 5)),
    "windows apart": (Conv2D(1, 2, 1, stride=3, padding=1), (2, 1, 5, 5)),
    "one window": (Conv2D(2, 2, (3, 4)), (3, 2, 3, 4)),
    "one by one": (Conv2D(3, 2, 1), (2, 3, 2, 3)),
}
POOLS = {
    "square": (MaxPool2D(2), (2, 3, 4, 6)),
    "rest left over": (MaxPool2D((2, 3)), (2, 2, 5, 7)),
    "overlapping": (MaxPool2D(3, stride=(1, 2)), (2, 2, 5, 6)),
    "windows apart": (MaxPool2D(2, stride=3), (2, 1, 6, 5)),
    "one by one": (MaxPool2D(1), (2, 2, 2, 2)),
}


def cases(table: dict[str, Any]) -> Any:
    return pytest.mark.parametrize(("layer", "shape"), table.values(), ids=table.keys())


def windows(x: Any, kernel: Pair, stride: Pair, counts: Pair) -> list[Any]:
    """Each window of x_BCHW, row by row."""
    return [
        x[
            :,
            :,
            stride[0] * p : stride[0] * p + kernel[0],
            stride[1] * q : stride[1] * q + kernel[1],
        ]
        for p in range(counts[0])
        for q in range(counts[1])
    ]


def convolution(layer: Conv2D, x: Any, weight: Any, bias: Any = None) -> Any:
    """One window after the other."""
    (down, right), counts = layer.windows.padding, layer.output_shape(x.shape[1:])[1:]
    x = anp.pad(x, ((0, 0), (0, 0), (down, down), (right, right)), "constant")
    parts = windows(x, layer.windows.kernel, layer.windows.stride, counts)
    y = anp.stack([anp.einsum("bcij,ocij->bo", part, weight) for part in parts], axis=2)
    y = anp.reshape(y, (len(x), layer.outputs, *counts))
    return y if bias is None else y + bias[:, None, None]


def pooling(layer: MaxPool2D, x: Any) -> Any:
    counts = layer.output_shape(x.shape[1:])[1:]
    parts = windows(x, layer.windows.kernel, layer.windows.stride, counts)
    y = anp.stack([anp.max(part, axis=(2, 3)) for part in parts], axis=2)
    return anp.reshape(y, (*x.shape[:2], *counts))


def draw(layer: Any, shape: tuple[int, ...]) -> tuple[Any, dict[str, Any]]:
    generator = np.random.default_rng(0)
    values = {n: generator.standard_normal(s.shape) for n, s in layer.walk_parameters()}
    return generator.standard_normal(shape), values


@cases(CONVOLUTIONS | POOLS | {"flatten": (Flatten(), (2, 3, 2, 2))})
def test_gradients_are_central_differences(layer: Any, shape: tuple[int, ...]) -> None:
    check_layer_gradients(layer, draw(layer, shape)[0])


@cases(CONVOLUTIONS | POOLS)
def test_values_and_gradients_are_those_of_autograd(layer: Any, shape: tuple[int, ...]) -> None:
    x, values = draw(layer, shape)
    formula = convolution if isinstance(layer, Conv2D) else pooling
    y, saved = layer.forward(values, x, Context())
    assert y.shape == (len(x), *layer.output_shape(shape[1:]))
    np.testing.assert_allclose(y, formula(layer, x, *values.values()), rtol=1e-12, atol=1e-13)
    r = np.random.default_rng(1).standard_normal(y.shape)
    gradients = {name: np.zeros_like(value) for name, value in values.items()}
    dx = layer.backward(values, saved, r.copy(), gradients)
    for position, computed in enumerate([dx, *gradients.values()]):
        expected = grad(lambda *a: anp.sum(r * formula(layer, *a)), position)(x, *values.values())
        np.testing.assert_allclose(computed, expected, rtol=1e-11, atol=1e-12)


@cases(CONVOLUTIONS | POOLS | {"flatten": (Flatten(), (2, 3, 2, 2))})
def test_float32_and_no_samples(layer: Any, shape: tuple[int, ...]) -> None:
    x, values = draw(layer, shape)
    single = {name: value.astype(np.float32) for name, value in values.items()}
    for samples in (len(x), 0):
        y, saved = layer.forward(single, x[:samples].astype(np.float32), Context())
        exact, _ = layer.forward(values, x[:samples], Context(training=False))
        np.testing.assert_allclose(y, exact, rtol=1e-4, atol=1e-4)
        gradients = {name: np.zeros_like(value) for name, value in single.items()}
        dx = layer.backward(single, saved, np.ones_like(y), gradients)
        assert y.dtype == dx.dtype == np.float32
        assert y.shape == (samples, *layer.output_shape(shape[1:]))
        assert dx.shape == (samples, *shape[1:])
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (Conv2D(2, 3, 3, padding=1), (200, 2, 20, 20)),
        (Conv2D(2, 3, (5, 3), stride=2, padding=(0, 1)), (301, 2, 25, 24)),
        (MaxPool2D(2), (100, 3, 30, 31)),
    ],
)
def test_several_chunks_give_what_each_sample_gives_alone(
    layer: Any, shape: tuple[int, ...]
) -> None:
    x, values = draw(layer, shape)
    y, saved = layer.forward(values, x, Context())
    r = np.random.default_rng(1).standard_normal(y.shape)
    gradients = {name: np.zeros_like(value) for name, value in values.items()}
    dx = layer.backward(values, saved, r.copy(), gradients)
    alone = {name: np.zeros_like(value) for name, value in values.items()}
    for i in range(len(x)):
        one = slice(i, i + 1)
        y_one, saved = layer.forward(values, x[one], Context())
        np.testing.assert_allclose(y_one, y[one], rtol=1e-12, atol=1e-13)
        dx_one = layer.backward(values, saved, r[one].copy(), alone)
        np.testing.assert_allclose(dx_one, dx[one], rtol=1e-11, atol=1e-12)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(alone[name], gradient, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("samples", [3, 300])
def test_the_first_weight_gradient_overwrites_old_values(samples: int) -> None:
    layer = Conv2D(1, 2, 3, padding=1)
    x, values = draw(layer, (samples, 1, 20, 20))
    y, saved = layer.forward(values, x, Context())
    expected = {name: np.zeros_like(value) for name, value in values.items()}
    layer.backward(values, saved, np.ones_like(y), expected)
    table = ParameterTable([(n, ParameterSpec(v.shape, zeros())) for n, v in values.items()])
    memory = np.full(table.length, np.nan)
    targets = GradientTargets(
        {name: table[name] for name in values},
        lambda e: memory[e.start : e.stop],
        set(values),
    )
    layer.backward(values, saved, np.ones_like(y), targets, needs_input_gradient=False)
    np.testing.assert_array_equal(memory, np.concatenate([v.ravel() for v in expected.values()]))


def test_the_first_of_equal_elements_gets_the_gradient() -> None:
    x = np.array([[1.0, 2.0, 0.0], [2.0, 2.0, 0.0], [5.0, 5.0, 5.0]])[None, None]
    layer = MaxPool2D(2, stride=1)
    y, saved = layer.forward({}, x, Context())
    np.testing.assert_array_equal(y[0, 0], [[2, 2], [5, 5]])
    dx, _ = layer.backward_input({}, saved, np.ones_like(y))
    np.testing.assert_array_equal(dx[0, 0], [[0, 2, 0], [0, 0, 0], [1, 1, 0]])


@pytest.mark.parametrize("where", [(0, 0), (1, 1)])
def test_pooling_hides_no_nan(where: Pair) -> None:
    x = np.ones((1, 1, 2, 2))
    x[0, 0, *where] = np.nan
    assert np.isnan(MaxPool2D(2).forward({}, x, Context())[0]).all()


def test_positions_in_large_windows_are_distinguished() -> None:
    x = np.zeros((1, 1, 20, 20))
    x[0, 0, 18, 7] = 1.0
    y, saved = MaxPool2D(20).forward({}, x, Context())
    assert MaxPool2D(2).forward({}, x, Context())[1][1].dtype == np.uint8
    dx, _ = MaxPool2D(20).backward_input({}, saved, np.full_like(y, 3.0))
    np.testing.assert_array_equal(dx, 3.0 * x)


def test_flatten_takes_samples_of_any_shape() -> None:
    for shape, length in (((), 1), ((3,), 3), ((2, 3, 4), 24)):
        assert Flatten().output_shape(shape) == (length,)
        assert Flatten().forward({}, np.zeros((5, *shape)), Context())[0].shape == (5, length)


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (Conv2D(3, 8, 3), (1, 8, 8), r"samples of shape \(3, H, W\), got \(1, 8, 8\)"),
        (Conv2D(3, 8, 3), (3, 8), r"got \(3, 8\)"),
        (Conv2D(3, 8, 3), (3, 8, 2), r"kernel of \(3, 3\) does not fit images of \(8, 2\)"),
        (Conv2D(1, 8, 5, padding=(1, 2)), (1, 2, 9), r"\(2, 9\) with padding \(1, 2\)"),
        (MaxPool2D(2), (8, 8), r"samples of shape \(C, H, W\), got \(8, 8\)"),
        (MaxPool2D(3), (1, 2, 3), r"kernel of \(3, 3\) does not fit"),
    ],
)
def test_shapes_that_do_not_fit_are_named(layer: Any, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer.output_shape(shape)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Conv2D(0, 1, 3), "inputs=0"),
        (lambda: Conv2D(1, 1, 0), r"kernel as an integer >= 1 or a pair .*, got 0"),
        (lambda: Conv2D(1, 1, (3, 3, 3)), r"got \(3, 3, 3\)"),
        (lambda: Conv2D(1, 1, 3, stride=0), "stride as an integer >= 1"),
        (lambda: Conv2D(1, 1, 3, padding=-1), "padding as an integer >= 0"),
        (lambda: Conv2D(1, 1, 3, padding=0.5), r"got 0\.5"),
        (lambda: MaxPool2D((2, 0)), r"kernel .*, got \(2, 0\)"),
        (lambda: MaxPool2D(2, stride="2"), "stride .*, got '2'"),
    ],
)
def test_arguments_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_convolutional_classifier() -> None:
    chain = Sequential(
        Conv2D(1, 3, 3, padding=1), ReLU(), MaxPool2D(2), Flatten(), Linear(3 * 2 * 3, 4)
    )  # fmt: skip
    model = Model(chain, CrossEntropy(), input_shape=(1, 4, 6), seed=1)
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((6, 1, 4, 6)), generator.integers(0, 4, 6)
    check_gradients(model, x, y, samples=None)
    before = model.compute_loss_and_gradients(x, y)[0]
    for _ in range(60):
        model.train(x, y, learning_rate=0.2)
    assert model.compute_loss_and_gradients(x, y)[0] < 0.1 * before


def test_kernels_start_with_the_variance_of_their_inputs() -> None:
    weight = Model(
        Sequential(Conv2D(8, 64, 5)), CrossEntropy(), input_shape=(8, 5, 5)
    ).get_parameters()[: 64 * 8 * 25]
    np.testing.assert_allclose(weight.var(), 2 / (8 * 25), rtol=0.05)
