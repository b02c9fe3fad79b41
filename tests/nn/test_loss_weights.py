"""Weights of samples and classes in the losses, against single samples and repetitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.data import Samples
from mpishard.nn import MAE, MSE, BinaryCrossEntropy, CrossEntropy, Huber

GENERATOR = np.random.default_rng(3)
WEIGHTS = np.array([0.5, 2.0, 0.0, 1.25, 3.0, 0.7])
REAL = [MSE(), MAE(), Huber(0.5), BinaryCrossEntropy(), BinaryCrossEntropy(class_weight=(1, 2.5))]
OF_CLASSES = [
    CrossEntropy(),
    CrossEntropy(1, label_smoothing=0.2, z_loss=0.1),
    CrossEntropy(class_weight=np.array([0.5, 2.0, 0.0, 1.5])),
    CrossEntropy(label_smoothing=0.3, class_weight=(1, 2, 3, 4)),
]
CASES = [
    *((loss, shape, shape) for loss in REAL for shape in [(6,), (6, 1), (6, 3), (6, 2, 4)]),
    *((loss, (*shape, 4), shape) for loss in OF_CLASSES for shape in [(6,), (6, 5)]),
]


def batch(loss: Any, shape: Any, target_shape: Any) -> tuple[Any, Any]:
    if isinstance(loss, CrossEntropy):
        return GENERATOR.standard_normal(shape), GENERATOR.integers(0, 4, target_shape)
    target = GENERATOR.random(target_shape)
    return 2 * GENERATOR.standard_normal(shape), target.round(GENERATOR.integers(3))


@pytest.mark.parametrize(("loss", "shape", "target_shape"), CASES)
def test_each_sample_counts_as_often_as_it_weighs(loss, shape, target_shape):
    prediction, target = batch(loss, shape, target_shape)
    parts = [loss.forward(p[None], t[None]) for p, t in zip(prediction, target, strict=True)]
    total, weight, saved = loss.forward(prediction, Samples((target, WEIGHTS)))
    rows = list(zip(WEIGHTS, parts, strict=True))
    np.testing.assert_allclose(total, sum(w * part[0] for w, part in rows), rtol=1e-13)
    np.testing.assert_allclose(weight, sum(w * part[1] for w, part in rows), rtol=1e-13)
    expected = np.concatenate([w * loss.backward(part[2]) for w, part in rows])
    np.testing.assert_allclose(loss.backward(saved), expected, rtol=1e-13, atol=1e-15)
    again = loss.forward(prediction, Samples((target, WEIGHTS)), training=False)
    assert again == (total, weight, None)


@pytest.mark.parametrize(("loss", "shape", "target_shape"), CASES)
def test_whole_weights_are_repetitions(loss, shape, target_shape):
    prediction, target = batch(loss, shape, target_shape)
    counts = np.array([1, 2, 0, 3, 1, 1])
    total, weight, _ = loss.forward(prediction, Samples((target, counts)))
    repeated = loss.forward(prediction.repeat(counts, 0), target.repeat(counts, 0))
    np.testing.assert_allclose((total, weight), repeated[:2], rtol=1e-13)


@pytest.mark.parametrize("loss", [MSE(), BinaryCrossEntropy(class_weight=(1, 3)), *OF_CLASSES])
def test_each_target_may_have_its_own_weight(loss):
    shape = (3, 2, 4) if isinstance(loss, CrossEntropy) else (3, 2)
    prediction, target = batch(loss, shape, (3, 2))
    weights = WEIGHTS.reshape(3, 2)
    total, weight, saved = loss.forward(prediction, Samples((target, weights)))
    flat = prediction.reshape(6, *shape[2:]), Samples((target.reshape(6), WEIGHTS))
    one_by_one = loss.forward(*flat)
    outputs = 1 if isinstance(loss, CrossEntropy) else 2
    np.testing.assert_allclose([total, weight], np.divide(one_by_one[:2], outputs), rtol=1e-13)
    np.testing.assert_allclose(
        loss.backward(saved).reshape(flat[0].shape), loss.backward(one_by_one[2]) / outputs,
        rtol=1e-13,
    )  # fmt: skip


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_weight_of_a_class_is_that_of_its_samples(smoothing):
    logits, target = GENERATOR.standard_normal((7, 4)), np.array([0, 1, 2, 3, 1, -1, 0])
    of_class = np.array([0.5, 2.0, 0.0, 1.5])
    weighted = CrossEntropy(label_smoothing=smoothing, class_weight=of_class)
    found = weighted.forward(logits, target)
    plain = CrossEntropy(label_smoothing=smoothing)
    expected = plain.forward(logits, Samples((target, of_class[target])))
    np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-14)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-14)
    assert found[1] == 0.5 + 2 + 0 + 1.5 + 2 + 0.5
    assert not found[2][[2, 5]].any()  # a class without weight, and an ignored target


def test_the_weights_of_no_and_yes():
    logits, target = GENERATOR.standard_normal((5, 2)), GENERATOR.integers(0, 2, (5, 2))
    found = BinaryCrossEntropy(class_weight=(0.25, 3)).forward(logits, target)
    weights = np.where(target, 3, 0.25)
    expected = BinaryCrossEntropy().forward(logits, Samples((target, weights)))
    np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-14)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-14)


def test_a_sample_of_weight_0_may_have_no_target():
    target = np.array([1.0, np.nan, np.inf])
    total, weight, saved = MSE().forward(np.zeros(3), Samples((target, np.array([2, 0, 0]))))
    assert (total, weight) == (2, 2)
    np.testing.assert_array_equal(saved, [-4, 0, 0])


@pytest.mark.parametrize("loss", [*REAL, *OF_CLASSES])
def test_chunks_and_float32(loss):
    of_classes = isinstance(loss, CrossEntropy)
    shape = (40_000, 4)
    prediction, target = batch(loss, shape, shape[:1] if of_classes else shape)
    weights = GENERATOR.random(40_000)
    total, weight, saved = loss.forward(prediction, Samples((target, weights)))
    single = loss.forward(
        prediction.astype(np.float32), Samples((target, weights.astype(np.float32)))
    )
    np.testing.assert_allclose(single[:2], (total, weight), rtol=1e-6)
    assert single[2].dtype == np.float32
    np.testing.assert_allclose(single[2], saved, atol=1e-5)


@pytest.mark.parametrize("as_list", [False, True])
def test_gradients_of_a_model_of_weighted_samples(as_list):
    x, y = GENERATOR.standard_normal((6, 3)), GENERATOR.integers(0, 4, 6)
    model = ms.nn.MLP([3, 5, 4], "tanh", loss=CrossEntropy(), seed=0)
    samples = Samples([y, WEIGHTS] if as_list else (y, WEIGHTS))
    assert max(ms.testing.check_gradients(model, x, samples).values()) < 1e-6


Y = np.zeros((3, 2))


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (Samples((Y, np.array([1, -1, 1]))), ValueError, "0 or more and finite, got -1"),
        (Samples((Y, np.array([1, np.nan, 1]))), ValueError, "0 or more and finite, got nan"),
        (Samples((Y, np.array([1, np.inf, 1]))), ValueError, "0 or more and finite, got inf"),
        (Samples((Y, np.ones((3, 1)))), ValueError, r"shape \(3,\), or .* \(3, 2\); got \(3, 1\)"),
        (Samples((Y, np.array(list("abc")))), TypeError, "weights must be real numbers, .*<U1"),
        (Samples((Y, np.ones(3), np.ones(3))), TypeError, r"takes an array .*Samples\(\(targets"),
        (Samples({"y": Y}), TypeError, r"weights\)\); got Samples\({'y': \(3, 2\)}"),
        (Samples((np.zeros((3, 3)), np.ones(3))), ValueError, r"one shape .*\(3, 2\) and \(3, 3\)"),
    ],
)
def test_wrong_weights_are_refused(target, error, message):
    for loss in (MSE(), BinaryCrossEntropy()):
        with pytest.raises(error, match=message):
            loss.check_target((3, 2), target)
        with pytest.raises(error, match=message):
            loss.forward(np.zeros((3, 2)), target)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: CrossEntropy(class_weight=[1, -2]), ValueError, "0 or more and finite, got -2"),
        (lambda: CrossEntropy(class_weight=[1, np.nan]), ValueError, "finite, got nan"),
        (lambda: CrossEntropy(class_weight=[0, 0]), ValueError, "needs a weight above 0"),
        (lambda: CrossEntropy(class_weight={0: 1}), TypeError, "a weight per class, got {0: 1}"),
        (lambda: CrossEntropy(class_weight="balanced"), TypeError, "per class, got 'balanced'"),
        (lambda: CrossEntropy(class_weight=2.0), TypeError, r"a weight per class, got 2\.0"),
        (lambda: BinaryCrossEntropy(class_weight=[1, 2, 3]), ValueError, "0 and 1, got 3 weights"),
    ],
)
def test_wrong_weights_of_classes_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_each_class_needs_a_weight():
    with pytest.raises(ValueError, match="class_weight has 2 weights for logits of 3 classes"):
        CrossEntropy(class_weight=[1, 2]).check_target((4, 3), np.zeros(4, int))


def test_a_loss_without_weights_refuses_them():
    class Own(ms.nn.Loss):
        def forward(self, prediction, target, training=True):
            return float((prediction - target).sum()), float(len(target)), prediction

        def backward(self, saved):
            return saved

    model = ms.nn.MLP([3, 2], loss=Own())
    with pytest.raises(TypeError, match=r"Own takes an array of targets, .*overrides check_target"):
        model.compute_gradients(np.ones((3, 3)), Samples((Y, np.ones(3))))
