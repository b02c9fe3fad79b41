"""Losses of split predictions equal those of whole ones, with the same bits on all ranks."""

import numpy as np
import pytest

from mpishard import nn
from mpishard.data import Samples
from mpishard.tensor import (
    DimSplit,
    GatheredOutputLoss,
    VocabularyParallelCrossEntropy,
    parallel_loss,
)
from mpishard.testing.worlds import in_worlds

LOSSES = {
    "plain": nn.CrossEntropy(),
    "ignored": nn.CrossEntropy(ignore_index=2),
    "smoothed": nn.CrossEntropy(label_smoothing=0.2),
    "z loss": nn.CrossEntropy(z_loss=0.1),
    "all": nn.CrossEntropy(ignore_index=6, label_smoothing=0.1, z_loss=0.01),
}


def logits_and_targets(shape, ignored, scale=3.0, dtype=np.float64):
    generator = np.random.default_rng(11)
    target = generator.integers(0, shape[-1], shape[:-1])
    target.reshape(-1)[::4] = ignored
    return (scale * generator.standard_normal(shape)).astype(dtype), target


def check(backend, loss, whole_loss, prediction, target, tolerance):
    total, weight, saved = whole_loss.forward(prediction, target)
    take = columns_of(backend, prediction.shape[-1])
    own = take(prediction).copy()
    own.flags.writeable = False
    for training in (True, False, True):
        found = loss.forward(own, target, training)
        assert found[1] == weight
        np.testing.assert_allclose(found[0], total, rtol=tolerance, atol=0)
        everywhere = backend.all_gather(np.array(found[:2]))
        assert len(set(everywhere[::2])) == len(set(everywhere[1::2])) == 1
        if training:
            gradient = loss.backward(found[2])
            assert (gradient.shape, gradient.dtype) == (own.shape, own.dtype)
        else:
            assert found[2] is None
    expected = take(whole_loss.backward(saved))
    np.testing.assert_allclose(gradient, expected, rtol=tolerance, atol=tolerance)


def columns_of(backend, classes):
    ((low, high),) = DimSplit(classes, backend.world_size).ranges(backend.rank)
    return lambda array: array[..., low:high]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(6, 7), (3, 4, 9), (0, 7), (1, 5)])
@in_worlds(1, 2, 3, 4)
def test_cross_entropy(backend, name, shape):
    loss = parallel_loss(LOSSES[name], backend, shape[-1])
    assert type(loss) is VocabularyParallelCrossEntropy
    prediction, target = logits_and_targets(shape, LOSSES[name].ignore_index)
    check(backend, loss, LOSSES[name], prediction, target, 1e-14)


@pytest.mark.parametrize("of_class", [None, [0, 1.5, 1, 0.5, 2, 1, 3]])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, (4,), (4, 3)])
@in_worlds(1, 2, 3, 4)
def test_weights_of_samples_and_classes(backend, of_class, smoothing, weights):
    whole = nn.CrossEntropy(
        6, label_smoothing=smoothing, z_loss=0.1 * smoothing, class_weight=of_class
    )
    prediction, target = logits_and_targets((4, 3, 7), 6)
    if weights:
        target = Samples((target, np.random.default_rng(2).integers(0, 3, weights) / 2))
    loss = parallel_loss(whole, backend, 7)
    assert type(loss) is VocabularyParallelCrossEntropy
    check(backend, loss, whole, prediction, target, 1e-14)


@in_worlds(1, 3)
def test_large_logits_in_many_chunks(backend, monkeypatch):
    """Exponentials of these overflow unless each row's largest logit of all ranks is taken off."""
    monkeypatch.setattr("mpishard.base.arrays.chunk_length", lambda array: 8)
    prediction, target = logits_and_targets((9, 7), -1, scale=2000.0)
    loss = VocabularyParallelCrossEntropy(backend, nn.CrossEntropy(), 7)
    check(backend, loss, nn.CrossEntropy(), prediction, target, 1e-14)


@in_worlds(2)
def test_single_precision(backend):
    prediction, target = logits_and_targets((6, 7), 6, dtype=np.float32)
    loss = VocabularyParallelCrossEntropy(backend, LOSSES["all"], 7)
    check(backend, loss, LOSSES["all"], prediction, target, 1e-6)


@in_worlds(2)
def test_sums_and_gradients_are_zero_if_no_target_counts(backend):
    loss = VocabularyParallelCrossEntropy(backend, nn.CrossEntropy(), 7)
    target = np.full(3, -1)
    own = columns_of(backend, 7)(np.ones((3, 7))).copy()
    total, weight, saved = loss.forward(own, target)
    assert (total, weight) == (0.0, 0.0)
    assert not loss.backward(saved).any()


@pytest.mark.parametrize("whole", [nn.MSE(), nn.Huber(), nn.MAE()])
@pytest.mark.parametrize("shape", [(6, 7), (0, 5), (2, 3, 4)])
@in_worlds(1, 2, 3, 4)
def test_any_other_loss(backend, whole, shape):
    loss = parallel_loss(whole, backend, shape[-1])
    assert type(loss) is GatheredOutputLoss
    prediction, _ = logits_and_targets(shape, 0)
    target = np.random.default_rng(1).standard_normal(shape)
    check(backend, loss, whole, prediction, target, 1e-14)


@in_worlds(2)
def test_a_subclass_of_cross_entropy_gets_whole_predictions(backend):
    class Doubled(nn.CrossEntropy):
        def forward(self, prediction, target, training=True):
            total, weight, saved = super().forward(prediction, target, training)
            return 2 * total, weight, None if saved is None else 2 * saved

    prediction, target = logits_and_targets((6, 7), -1)
    check(backend, parallel_loss(Doubled(), backend, 7), Doubled(), prediction, target, 1e-14)


@pytest.mark.parametrize("name", LOSSES)
@in_worlds(1, 2, 3, 4)
def test_bytes(backend, name, sent_by_all):
    """Two all-reduces, of N and of 2 N numbers, or of 3 N where labels are smoothed."""
    loss, others = parallel_loss(LOSSES[name], backend, 7), backend.world_size - 1
    prediction, target = logits_and_targets((6, 7), LOSSES[name].ignore_index)
    own = columns_of(backend, 7)(prediction).copy()
    with sent_by_all(backend) as sent:
        loss.backward(loss.forward(own, target)[2])
    rows = 1 + (3 if LOSSES[name].label_smoothing else 2)
    assert sent.nbytes == 2 * others * rows * 6 * 8
    assert sent.calls == {"reduce_scatter": 2, "all_gather": 2}  # an all-reduce counts as both


@in_worlds(2)
def test_refusals(backend):
    loss = VocabularyParallelCrossEntropy(backend, nn.CrossEntropy(), 7)
    loss.check_target((3, 7), np.array([0, 6, -1]))
    with pytest.raises(ValueError, match=r"target 7 is neither in \[0, 7\)"):
        loss.check_target((3, 7), np.array([0, 7, -1]))
    with pytest.raises(ValueError, match=r"the shape \(..., 7\) of the whole logits, got \(3, 4\)"):
        loss.check_target((3, 4), np.array([0, 1, -1]))
    with pytest.raises(ValueError, match="logits have shape"):
        loss.forward(np.zeros((3, 7)), np.zeros(3, int))
    with pytest.raises(ValueError, match="1 runs of 1 elements cannot be divided among 2 ranks"):
        VocabularyParallelCrossEntropy(backend, nn.CrossEntropy(), 1)
    with pytest.raises(TypeError, match="MSE"):
        VocabularyParallelCrossEntropy(backend, nn.MSE(), 7)
    with pytest.raises(TypeError, match="function"):
        GatheredOutputLoss(backend, lambda p, y: 0.0, 7)
    with pytest.raises(TypeError, match="NoneType"):
        parallel_loss(nn.MSE(), None, 7)


@pytest.mark.parametrize("number", [1, 2])
@in_worlds(2)
def test_a_missing_reduction_is_detected(backend, number, forgetting):
    loss = VocabularyParallelCrossEntropy(backend, nn.CrossEntropy(), 7)
    prediction, target = logits_and_targets((6, 7), -1)
    own = columns_of(backend, 7)(prediction).copy()
    with forgetting(backend, number):
        found, _, _ = loss.forward(own, target)
    total, _, _ = nn.CrossEntropy().forward(prediction, target)
    assert abs(found - total) > 1e-3
