"""Losses against autograd, and the sums and weights that make averages over ranks exact."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad

from mpishard.base import BFLOAT16, rounded, widened
from mpishard.nn import MAE, MSE, BinaryCrossEntropy, CrossEntropy, Huber


def cross_entropy(logits, target):
    """Mean over the targets that are not -1, one at a time."""
    rows = [(z, c) for z, c in zip(logits, target, strict=True) if c != -1]
    return sum(anp.log(anp.sum(anp.exp(z))) - z[c] for z, c in rows) / len(rows)


@pytest.fixture
def logits():
    return np.random.default_rng(0).standard_normal((7, 5))


@pytest.fixture
def target():
    return np.array([4, -1, 0, 2, 2, -1, 1])


def test_cross_entropy_is_the_formula(logits, target):
    before = logits.copy()
    total, weight, saved = CrossEntropy().forward(logits, target)
    assert weight == 5.0
    assert isinstance(total, float)
    np.testing.assert_allclose(total / weight, cross_entropy(logits, target), rtol=1e-13)
    expected = 5 * grad(cross_entropy)(logits, target)
    np.testing.assert_allclose(CrossEntropy().backward(saved), expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(logits, before)


def test_cross_entropy_of_sequences(logits, target):
    loss, z, c = CrossEntropy(), logits[:6].reshape(2, 3, 5), target[:6].reshape(2, 3)
    assert loss(z, c) == loss(logits[:6], target[:6])
    assert loss.derivative(z, c).shape == z.shape


def test_cross_entropy_by_central_differences(logits, target):
    loss, step = CrossEntropy(), 6e-6
    computed = loss.derivative(logits, target)
    for place in np.ndindex(*logits.shape):
        high, low = logits.copy(), logits.copy()
        high[place] += step
        low[place] -= step
        numeric = (loss(high, target) - loss(low, target)) / (2 * step)
        assert abs(numeric - computed[place]) < 1e-9


def test_cross_entropy_in_chunks():
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((300, 101))
    target = generator.integers(-1, 101, 300)
    total, weight, saved = CrossEntropy().forward(logits, target)
    parts = [CrossEntropy().forward(z[None], c[None]) for z, c in zip(logits, target, strict=True)]
    np.testing.assert_allclose(total, sum(part[0] for part in parts), rtol=1e-12)
    assert weight == sum(part[1] for part in parts)
    np.testing.assert_allclose(saved, np.concatenate([part[2] for part in parts]), atol=1e-15)


def test_cross_entropy_takes_logits_that_overflow_exp():
    logits = np.array([[1e4, 0.0], [-1e4, 0.0]])
    total, _, saved = CrossEntropy().forward(logits, np.array([1, 1]))
    assert total == 1e4
    np.testing.assert_array_equal(saved, [[1.0, -1.0], [0.0, 0.0]])


def test_cross_entropy_with_another_ignored_value(logits, target):
    moved = np.where(target == -1, 255, target).astype(np.uint8)
    loss = CrossEntropy(ignore_index=255)
    assert loss(logits, moved) == CrossEntropy()(logits, target)
    np.testing.assert_array_equal(
        loss.derivative(logits, moved), CrossEntropy().derivative(logits, target)
    )


def test_all_targets_ignored(logits):
    loss, ignored = CrossEntropy(), np.full(7, -1)
    assert loss.forward(logits, ignored)[:2] == (0.0, 0.0)
    assert loss(logits, ignored) == 0.0
    assert not loss.derivative(logits, ignored).any()


@pytest.mark.parametrize(("value", "name"), [(5, "5"), (-2, "-2")])
def test_targets_out_of_range_are_named(logits, target, value, name):
    target[3] = value
    with pytest.raises(ValueError, match=rf"target {name} is neither in \[0, 5\)"):
        CrossEntropy()(logits, target)


def test_targets_of_wrong_shape_or_dtype(logits, target):
    with pytest.raises(ValueError, match=r"\(7, 5\) and \(6,\)"):
        CrossEntropy()(logits, target[:6])
    with pytest.raises(TypeError, match="float64"):
        CrossEntropy()(logits, target.astype(float))


@pytest.mark.parametrize("leading", [(7,), (2, 3), (0,), (0, 3)])
def test_cross_entropy_checks_targets_without_a_prediction(leading):
    check, shape = CrossEntropy().check_target, (*leading, 5)
    for dtype in (np.int64, np.uint8, np.uint64):
        check(shape, np.full(leading, 4, dtype))
    check(shape, np.full(leading, -1))
    with pytest.raises(ValueError, match=r"targets of shape \(\.\.\.\), got"):
        check(shape, np.zeros(shape, int))
    for dtype in (float, bool, complex, object):
        with pytest.raises(TypeError, match="integer targets, got an array of"):
            check(shape, np.zeros(leading, dtype))
    with pytest.raises(TypeError, match="array, got list"):
        check(shape, [1, 2])


@pytest.mark.parametrize("value", [-2, 5])
def test_cross_entropy_checks_values_without_a_prediction(target, value):
    target[3] = value
    with pytest.raises(ValueError, match=rf"target {value} is neither in \[0, 5\) nor"):
        CrossEntropy().check_target((7, 5), target)
    CrossEntropy(ignore_index=value).check_target((7, 5), np.where(target < 0, value, target))


@pytest.mark.parametrize("shape", [(4, 2), (4,), (0, 2)])
def test_mse_checks_targets_without_a_prediction(shape):
    check = MSE().check_target
    for dtype in (np.float32, np.float64, np.int64, bool):
        check(shape, np.zeros(shape, dtype))
    with pytest.raises(ValueError, match="of one shape"):
        check(shape, np.zeros((*shape, 1)))
    for dtype in (complex, object, "U3"):
        with pytest.raises(TypeError, match="real targets, got an array of"):
            check(shape, np.zeros(shape, dtype))
    with pytest.raises(TypeError, match="array, got list"):
        check(shape, [1.0])


@pytest.mark.parametrize("shape", [(6,), (6, 1), (5, 3), (2, 3, 4), (1, 1)])
def test_mse_is_the_formula(shape):
    generator = np.random.default_rng(0)
    prediction, target = generator.standard_normal((2, *shape))
    total, weight, saved = MSE().forward(prediction, target)
    assert weight == shape[0]
    np.testing.assert_allclose(total / weight, np.mean((prediction - target) ** 2), rtol=1e-13)
    expected = shape[0] * grad(lambda p: anp.mean((p - target) ** 2))(prediction)
    np.testing.assert_allclose(MSE().backward(saved), expected, rtol=1e-13)
    np.testing.assert_allclose(MSE().derivative(prediction, target), expected / shape[0])


def test_mse_never_broadcasts():
    with pytest.raises(ValueError, match=r"\(4, 1\) and \(4,\)"):
        MSE()(np.zeros((4, 1)), np.zeros(4))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("loss", "prediction", "target"),
    [
        (MSE(), np.zeros((0, 3)), np.zeros((0, 3))),
        (MSE(), np.zeros(0), np.zeros(0)),
        (CrossEntropy(), np.zeros((0, 3)), np.zeros(0, int)),
        (CrossEntropy(), np.zeros((0, 4, 3)), np.zeros((0, 4), int)),
    ],
)
def test_no_samples(loss, prediction, target, training):
    total, weight, saved = loss.forward(prediction, target, training)
    assert (total, weight) == (0.0, 0.0)
    assert loss(prediction, target) == 0.0
    if training:
        assert loss.backward(saved).shape == prediction.shape
        assert loss.derivative(prediction, target).shape == prediction.shape
    else:
        assert saved is None


@pytest.mark.parametrize("loss", [MSE(), CrossEntropy()])
def test_float32_gradient_and_float64_sum(loss):
    generator = np.random.default_rng(0)
    prediction = generator.standard_normal((20_000, 3)).astype(np.float32)
    if isinstance(loss, MSE):
        target = generator.standard_normal((20_000, 3))
    else:
        target = generator.integers(0, 3, 20_000)
    assert loss.derivative(prediction, target).dtype == np.float32
    exact = loss(prediction.astype(np.float64), target)
    np.testing.assert_allclose(loss(prediction, target), exact, rtol=1e-7)


def test_uneven_parts_average_to_the_whole(logits, target):
    loss = CrossEntropy()
    parts = [loss.forward(logits[part], target[part]) for part in (slice(0, 2), slice(2, 7))]
    mean = sum(part[0] for part in parts) / sum(part[1] for part in parts)
    np.testing.assert_allclose(mean, loss(logits, target), rtol=1e-14)


@pytest.mark.parametrize(("loss", "of_slopes"), [(MAE(), "sign"), (Huber(), "clip")])
def test_evaluation_computes_no_slopes(loss, of_slopes, monkeypatch):
    prediction, target = np.linspace(-2.0, 2.0, 6), np.zeros(6)
    expected = loss.forward(prediction, target)[:2]
    monkeypatch.delattr(np, of_slopes)
    assert loss.forward(prediction, target, training=False) == (*expected, None)


@pytest.mark.parametrize(
    "loss",
    [MSE(), MAE(), Huber(), BinaryCrossEntropy(), CrossEntropy(label_smoothing=0.1, z_loss=1e-3)],
    ids=lambda loss: type(loss).__name__,
)
def test_bfloat16_is_computed_in_float32_and_rounded_once(loss):
    generator = np.random.default_rng(0)
    prediction = rounded(generator.standard_normal((700, 300)).astype(np.float32))
    target = generator.integers(0, 2, (700, 300))
    if isinstance(loss, CrossEntropy):
        target = target[:, 0]
    total, weight, gradient = loss.forward(prediction, target)
    expected = loss.forward(widened(prediction), target)
    assert (total, weight) == expected[:2]
    assert (total, weight, None) == loss.forward(prediction, target, training=False)
    assert gradient.dtype == BFLOAT16
    np.testing.assert_array_equal(gradient.view(np.uint16), rounded(expected[2]).view(np.uint16))


def test_a_loss_of_a_users_own_gets_float32():
    class Doubled(MSE):
        def forward(self, prediction, target, training=True):
            return super().forward(2 * prediction, target, training)

    class Named(MSE):
        pass

    class Beside:
        forward = Doubled.forward

    class Mixed(Beside, MSE):
        pass

    found = [kind.computes_bfloat16 for kind in (Doubled, Named, Mixed)]
    assert found == [False, True, False]
