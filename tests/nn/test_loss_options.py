"""The losses of regression, binary cross entropy, label smoothing and z-loss, against autograd."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad

from mpishard.nn import MAE, MSE, BinaryCrossEntropy, CrossEntropy, Huber

GENERATOR = np.random.default_rng(0)
SHAPES = [(6,), (6, 1), (5, 3), (2, 3, 4)]


def huber(delta: float) -> Any:
    def of(error: Any) -> Any:
        size = anp.abs(error)
        return anp.where(size <= delta, error**2 / 2, delta * (size - delta / 2))

    return of


ERRORS = {
    "mse": (MSE(), anp.square),
    "mae": (MAE(), anp.abs),
    "huber": (Huber(), huber(1.0)),
    "huber small": (Huber(0.25), huber(0.25)),
}


def binary(z: Any, t: Any) -> Any:
    p = 1 / (1 + anp.exp(-z))
    return -(t * anp.log(p) + (1 - t) * anp.log(1 - p))


def check(loss: Any, mean: Any, prediction: Any, target: Any, weight: float) -> None:
    """Value, weight, gradient of the sum, and nothing written to; differences of both."""
    before = prediction.copy(), target.copy()
    total, counted, saved = loss.forward(prediction, target)
    assert counted == weight
    np.testing.assert_allclose(total / weight, mean(prediction), rtol=1e-13)
    computed = loss.backward(saved)
    np.testing.assert_allclose(computed, weight * grad(mean)(prediction), rtol=1e-11, atol=1e-14)
    assert loss.forward(prediction, target, training=False) == (total, counted, None)
    np.testing.assert_array_equal(prediction, before[0])
    np.testing.assert_array_equal(target, before[1])
    derivative = loss.derivative(prediction, target)
    np.testing.assert_allclose(derivative, computed / weight, rtol=1e-14)
    for place in np.ndindex(*prediction.shape):
        high, low = prediction.copy(), prediction.copy()
        high[place] += 6e-6
        low[place] -= 6e-6
        numeric = (loss(high, target) - loss(low, target)) / 12e-6
        assert abs(numeric - derivative[place]) < 1e-9


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("loss", "formula"), ERRORS.values(), ids=ERRORS.keys())
def test_losses_of_the_error(loss, formula, shape):
    prediction, target = GENERATOR.standard_normal((2, *shape))
    check(loss, lambda p: anp.mean(formula(p - target)), prediction, target, shape[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_binary_cross_entropy(shape):
    prediction, target = 2 * GENERATOR.standard_normal(shape), GENERATOR.random(shape)
    target.reshape(-1)[:2] = 0.0, 1.0
    check(BinaryCrossEntropy(), lambda z: anp.mean(binary(z, target)), prediction, target, shape[0])


def test_binary_cross_entropy_takes_logits_that_overflow_exp():
    logits, target = np.array([1e4, -1e4, 1e4, -1e4]), np.array([1, 1, 0, 0])
    total, _, saved = BinaryCrossEntropy().forward(logits, target)
    assert total == 2e4
    np.testing.assert_array_equal(saved, [0.0, -1.0, 1.0, 0.0])
    assert BinaryCrossEntropy()(np.array([-40.0]), np.array([False])) == np.exp(-40.0)


@pytest.mark.parametrize("loss", [MAE(), Huber(0.5), BinaryCrossEntropy(), MSE()])
def test_chunks_and_float32(loss):
    shape = (300, 601)
    prediction, target = GENERATOR.standard_normal(shape), GENERATOR.random(shape)
    total, _, saved = loss.forward(prediction, target)
    parts = [loss.forward(p[None], t[None])[0] for p, t in zip(prediction, target, strict=True)]
    np.testing.assert_allclose(total, sum(parts), rtol=1e-12)
    single = prediction.astype(np.float32)
    assert isinstance(loss(single, target), float)
    np.testing.assert_allclose(loss(single, target), loss(single.astype(float), target), rtol=1e-6)
    gradient = loss.derivative(single, target)
    assert gradient.dtype == np.float32
    np.testing.assert_allclose(gradient, loss.backward(saved) / 300, rtol=2e-3, atol=1e-8)


def test_the_slope_of_the_absolute_error_at_0_is_0():
    np.testing.assert_array_equal(
        MAE().derivative(np.ones(3), np.array([0.0, 1.0, 2.0])) * 3, [1, 0, -1]
    )


def smoothed(logits: Any, target: Any, smoothing: float, z_loss: float) -> Any:
    """Target by target, with the distribution written out."""
    classes, losses = logits.shape[-1], []
    for z, c in zip(logits, target, strict=True):
        if c != -1:
            log_z = anp.log(anp.sum(anp.exp(z)))
            q = (1 - smoothing) * np.eye(classes)[c] + smoothing / classes
            losses.append(anp.sum(q * (log_z - z)) + z_loss * log_z**2)
    return sum(losses) / len(losses)


@pytest.mark.parametrize("z_loss", [0.0, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_label_smoothing_and_z_loss(smoothing, z_loss):
    logits, target = 2 * GENERATOR.standard_normal((7, 5)), np.array([4, -1, 0, 2, 2, -1, 1])
    loss = CrossEntropy(label_smoothing=smoothing, z_loss=z_loss)
    check(loss, lambda z: smoothed(z, target, smoothing, z_loss), logits, target, 5)
    assert not loss.derivative(logits, target)[1].any()


def test_options_in_chunks_and_float32():
    logits, target = GENERATOR.standard_normal((3000, 101)), GENERATOR.integers(-1, 101, 3000)
    loss = CrossEntropy(label_smoothing=0.1, z_loss=0.01)
    total, _, saved = loss.forward(logits, target)
    parts = [loss.forward(logits[i : i + 7], target[i : i + 7]) for i in range(0, 3000, 7)]
    np.testing.assert_allclose(total, sum(part[0] for part in parts), rtol=1e-12)
    np.testing.assert_allclose(saved, np.concatenate([part[2] for part in parts]), atol=1e-15)
    single = loss.forward(logits.astype(np.float32), target)
    assert single[2].dtype == np.float32
    np.testing.assert_allclose(single[0], total, rtol=1e-6)
    np.testing.assert_allclose(single[2], saved, atol=1e-6)


def test_z_loss_of_large_logits_is_finite():
    loss = CrossEntropy(z_loss=1e-4)
    assert loss(np.array([[1e4, 0.0]]), np.array([0])) == pytest.approx(1e4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Huber(0), "delta must be above 0 and finite, got 0"),
        (lambda: Huber(float("inf")), "got inf"),
        (lambda: CrossEntropy(label_smoothing=1.0), r"\[0, 1\), got 1\.0"),
        (lambda: CrossEntropy(label_smoothing=-0.1), r"got -0\.1"),
        (lambda: CrossEntropy(z_loss=-1e-4), "got -0.0001"),
        (lambda: CrossEntropy(z_loss=float("nan")), "got nan"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), 2])
def test_binary_targets_out_of_range_are_named(value):
    target = np.array([[0.0], [value], [1.0]])
    with pytest.raises(ValueError, match=rf"targets in \[0, 1\], got {float(value)}"):
        BinaryCrossEntropy().check_target((3, 1), target)
    with pytest.raises(ValueError, match=r"targets in \[0, 1\]"):
        BinaryCrossEntropy()(np.zeros((3, 1)), target)


@pytest.mark.parametrize("loss", [MAE(), Huber(), BinaryCrossEntropy()])
def test_targets_of_wrong_shape_or_dtype(loss):
    name = type(loss).__name__
    with pytest.raises(ValueError, match=rf"{name} .*\(4, 1\) and \(4,\); y\[\.\.\., None\]"):
        loss(np.zeros((4, 1)), np.zeros(4))
    with pytest.raises(ValueError, match=r"\(4,\) and \(4, 1\)$"):
        loss.check_target((4,), np.zeros((4, 1)))
    with pytest.raises(TypeError, match=f"{name} takes real targets, got an array of complex128"):
        loss.check_target((4,), np.zeros(4, complex))
    with pytest.raises(TypeError, match="array, got list"):
        loss.check_target((4,), [0.0] * 4)


@pytest.mark.parametrize("shape", [(0, 3), (0,)])
@pytest.mark.parametrize("loss", [MAE(), Huber(), BinaryCrossEntropy()])
def test_no_samples(loss, shape):
    assert loss.forward(np.zeros(shape), np.zeros(shape))[:2] == (0.0, 0.0)
    assert loss(np.zeros(shape), np.zeros(shape)) == 0.0
    assert loss.derivative(np.zeros(shape), np.zeros(shape)).shape == shape
