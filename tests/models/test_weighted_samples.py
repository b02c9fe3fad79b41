"""Training with weighted samples equals that of one process, in every strategy and axis."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard as ms
from mpishard.data import Samples
from mpishard.errors import NoSampleError
from mpishard.testing.worlds import in_worlds

GENERATOR = np.random.default_rng(5)
X = GENERATOR.standard_normal((23, 4))
LABELS = GENERATOR.integers(0, 7, 23)
# The weights depend on the sample, and so does their sum on the rank.
WEIGHTS = np.where(np.arange(23) % 5 == 1, 0.0, 0.1 + np.arange(23) ** 1.5)
OF_CLASS = (0.5, 1, 2, 0.25, 1, 3, 1)
TOKENS = GENERATOR.integers(0, 9, (8, 5))


def mlp(loss):
    return ms.nn.MLP([4, 6, 5, 7], "tanh", loss=loss, seed=3)


def gpt():
    return ms.nn.GPT(
        vocabulary_size=9, context_length=5, layers=2, heads=4, width=8, seed=3, dtype="float64"
    )


def trained_alone(model, x, y, epochs, batch):
    """Plain SGD with momentum on one process; return losses and parameters."""
    parameters = model.get_parameters().copy()
    velocity, losses = np.zeros_like(parameters), []
    for start in list(range(0, len(x), batch)) * epochs:
        model.set_parameters(parameters)
        rows = slice(start, start + batch)
        loss, gradient = model.compute_loss_and_gradients(x[rows], y[rows])
        velocity = 0.9 * velocity + gradient
        parameters = parameters - 0.05 * velocity
        losses.append(loss)
    return losses, parameters


def check(backend, make, strategy, x, y, batch=10, **options):
    model = ms.as_distributed(make(), backend, strategy, **options)
    rule = ms.as_distributed(ms.optimizers.SGD(0.05, momentum=0.9), backend, strategy, **options)
    result = rule.optimize(
        ms.OptimizationInputData(
            model=model,
            x_train=x,
            y_train=y,
            epochs=2,
            batch_size=batch,
            shuffle=False,
            progress=False,
        )
    )
    losses, parameters = trained_alone(make(), x, y, 2, batch)
    np.testing.assert_allclose(result.loss_history, losses, rtol=1e-12)
    found = result.model.gather_full_parameters()
    np.testing.assert_allclose(found, parameters, rtol=0, atol=1e-12)
    everyone = backend.all_gather(found[None])
    assert (everyone == everyone[0]).all()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline"])
@pytest.mark.parametrize("of_class", [None, OF_CLASS])
@in_worlds(1, 2, 3, 4)
def test_every_strategy_trains_as_one_process(backend, strategy, of_class):
    loss = ms.nn.CrossEntropy(class_weight=of_class)
    micro = {"micro_batch_count": 3} if strategy == "pipeline" else {}
    check(backend, lambda: mlp(loss), strategy, X, Samples((LABELS, WEIGHTS)), **micro)


@pytest.mark.parametrize("weights", [(8,), (8, 5)])
@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "pipeline"])
@in_worlds(2, 4)
def test_sequences_and_tokens_have_weights(backend, strategy, weights):
    given = np.random.default_rng(0).random(weights)
    check(backend, gpt, strategy, TOKENS, Samples((TOKENS[:, ::-1].copy(), given)), batch=4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
@in_worlds(2, 3)
def test_whole_weights_are_repetitions(backend, strategy):
    """Zero weights, too: the reference has no weights at all, and leaves these samples out."""
    counts = np.arange(23) % 4
    model = ms.as_distributed(mlp(ms.nn.CrossEntropy()), backend, strategy)
    rule = ms.as_distributed(ms.optimizers.SGD(0.05, momentum=0.9), backend, strategy)
    data = ms.OptimizationInputData(
        model=model, x_train=X, y_train=Samples((LABELS, counts)), epochs=3, batch_size=23,
        shuffle=False, progress=False,
    )  # fmt: skip
    found = rule.optimize(data).model.gather_full_parameters()
    x, y = X.repeat(counts, 0), LABELS.repeat(counts)
    _, expected = trained_alone(mlp(ms.nn.CrossEntropy()), x, y, 3, len(x))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@in_worlds(1, 2, 3)
def test_figures_of_data_sets_count_the_weights(backend):
    counts = np.arange(23) % 4
    y = np.stack([X @ [1.0, -2, 0.5, 0], X[:, 0] ** 2], axis=1)
    y[counts == 0] = np.nan  # a sample of weight 0 needs no target

    def measured(loss, x, targets):
        model = ms.as_distributed(ms.nn.MLP([4, 5, loss[1]], loss=loss[0], seed=1), backend)
        data = ms.OptimizationInputData(
            model=model,
            x_train=X[:4],
            y_train=targets[:4],
            epochs=1,
            batch_size=4,
            x_test=x,
            y_test=targets,
            progress=False,
        )
        return ms.as_distributed(ms.optimizers.SGD(1e-9), backend).optimize(data).test_result.stats

    for loss, targets in [
        ((ms.nn.MSE(), 2), y),
        ((ms.nn.CrossEntropy(), 7), LABELS),
        ((ms.nn.BinaryCrossEntropy(), 1), (LABELS > 3)[:, None]),
    ]:
        weighted = measured(loss, X, Samples((targets, counts)))
        repeated = measured(loss, X.repeat(counts, 0), targets.repeat(counts, 0))
        assert weighted == pytest.approx(repeated, rel=1e-7)


@pytest.mark.parametrize("strategy", ["ddp", "tensor"])
@in_worlds(2)
def test_wrong_weights_are_refused_and_nothing_changes(backend, strategy):
    model = ms.as_distributed(mlp(ms.nn.CrossEntropy()), backend, strategy)
    rule = ms.as_distributed(ms.optimizers.SGD(0.05), backend, strategy)
    before = model.gather_full_parameters()
    for wrong, error, words in [
        (np.full(3, -1.0), ValueError, "0 or more and finite, got -1"),
        (np.full(3, np.nan), ValueError, "0 or more and finite, got nan"),
        (np.ones((3, 2)), ValueError, r"weights must have shape \(3,\)"),
        (np.zeros(3), NoSampleError, "all weights are 0"),
    ]:
        with pytest.raises(error, match=words):
            rule.step(model, X[:3], Samples((LABELS[:3], wrong)))
    assert (model.gather_full_parameters() == before).all()


@in_worlds(2)
def test_ranks_of_one_batch_need_the_same_weights(backend):
    model = ms.as_distributed(mlp(ms.nn.CrossEntropy()), backend, "tensor")
    rule = ms.as_distributed(ms.optimizers.SGD(0.05), backend, "tensor")
    with pytest.raises(ValueError, match="must be given the same: rank 0: 3 samples"):
        rule.step(model, X[:3], Samples((LABELS[:3], np.ones(3) + backend.rank)))


@in_worlds(2)
def test_ranks_need_the_same_weights_of_classes(backend):
    of_class = OF_CLASS if backend.rank else OF_CLASS[::-1]
    with pytest.raises(ValueError, match=r"by rank, loss.class_weight is"):
        ms.as_distributed(mlp(ms.nn.CrossEntropy(class_weight=of_class)), backend)


class Pairs(ms.nn.Loss):
    """A user's loss, whose targets are several arrays by name."""

    def check_target(self, prediction_shape, target):
        assert target.tree["y"].shape == prediction_shape

    def forward(self, prediction, target, training=True):
        return ms.nn.MSE().forward(prediction, target.tree["y"] + target.tree["far"], training)

    def backward(self, saved):
        return saved


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
@in_worlds(1, 2, 3)
def test_a_users_loss_gets_all_arrays_of_the_targets(backend, strategy):
    def trained(loss, y):
        plain = ms.nn.MLP([4, 5, 6, 2], loss=loss, seed=1)
        data = ms.OptimizationInputData(
            model=ms.as_distributed(plain, backend, strategy), x_train=X, y_train=y, epochs=2,
            batch_size=8, x_test=X[:9], y_test=y[:9], progress=False,
        )  # fmt: skip
        result = ms.as_distributed(ms.optimizers.SGD(0.1), backend, strategy).optimize(data)
        return [*result.loss_history, result.test_loss]

    y, far = X[:, :2], X[:, 2:]
    assert trained(Pairs(), Samples({"y": y, "far": far})) == trained(ms.nn.MSE(), y + far)
