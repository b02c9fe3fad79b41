"""Results of a run: figures of each data set, predictions, kind of fit, copies."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard as ms
from mpishard.errors import MissingMemberError
from mpishard.observe import read_metrics
from mpishard.testing.worlds import in_worlds
from mpishard.training import FitType
from mpishard.training.evaluation import Regression
from mpishard.training.result import FitDetectionResult

generator = np.random.default_rng(0)
X = generator.standard_normal((23, 4))
Y = np.stack([X @ [1.0, -2, 0.5, 0], np.full(23, 2.0)], axis=1) + 1e6
CLASSES = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0)
PARTS = {"x_validation": X[:9], "x_test": X[9:14]}

by_strategy = pytest.mark.parametrize("strategy", ["ddp", "fsdp"])


def train(backend, plain, strategy="fsdp", rule=None, **options):
    model = ms.as_distributed(plain, backend, strategy)
    given = {"x_train": X, "batch_size": 8, "epochs": 2, "progress": False}
    return ms.as_distributed(rule or ms.optimizers.SGD(0.01), backend, strategy).optimize(
        ms.OptimizationInputData(model=model, **(given | options))
    )


def targets(values):
    return {"y_train": values, "y_validation": values[:9], "y_test": values[9:14]}


def every_result(result):
    yield slice(None), result.training_result
    yield slice(0, 9), result.validation_result
    yield slice(9, 14), result.test_result


@by_strategy
@pytest.mark.parametrize("loss", [ms.nn.MSE, ms.nn.MAE, ms.nn.Huber])
@in_worlds(1, 2, 3)
def test_regression_figures_are_those_of_the_whole_data_set(backend, strategy, loss):
    plain = ms.nn.Model(
        ms.nn.Sequential({"linear": ms.nn.Linear(4, 2)}), loss(), input_shape=(4,), seed=2
    )
    result = train(backend, plain, strategy, training_statistics=True, **PARTS, **targets(Y))
    whole = ms.nn.LinearRegression(4, 2).with_parameters(result.model.get_parameters())
    for rows, found in every_result(result):
        x, y = X[rows], Y[rows]
        error = whole.predict(x) - y
        varies = 1 - (error[:, 0] ** 2).sum() / ((y[:, 0] - y[:, 0].mean()) ** 2).sum()
        expected = {
            "loss": loss()(whole.predict(x), y), "mse": (error**2).mean(),
            "mae": np.abs(error).mean(), "r2": (varies + 0) / 2,  # the constant output is missed
        }  # fmt: skip
        assert found.stats == pytest.approx(expected, rel=1e-9)
        np.testing.assert_array_equal(found.x, x)
        assert found.predictions is None
    assert result.test_loss == result.test_result.stats["loss"]


@in_worlds(1, 3)
def test_r2_does_not_suffer_from_a_large_mean(backend):
    """1e8 squared has no digit left for deviations of 1e-3; merged deviations have."""
    y = 1e8 + 1e-3 * np.arange(40.0).reshape(-1, 1)
    statistics = Regression(1)
    for batch in np.array_split(np.array_split(y, backend.world_size)[backend.rank], 3):
        statistics.add(batch + 1e-3, batch)
    errors = (y + 1e-3 - y)[:, 0]
    expected = 1 - (errors**2).sum() / ((y - y.mean()) ** 2).sum()
    assert statistics.total(backend)["r2"] == pytest.approx(expected, rel=1e-6)


def test_regression_figures_at_the_edges():
    def main(backend):
        constant = np.full((4, 1), 3.0)
        exact, wrong, empty = Regression(1), Regression(1), Regression(1)
        exact.add(constant, constant)
        wrong.add(constant + 1, constant)
        assert exact.total(backend) == {"mse": 0, "mae": 0, "r2": 1}
        assert wrong.total(backend) == {"mse": 1, "mae": 1, "r2": 0}
        assert all(np.isnan(value) for value in empty.total(backend).values())

    ms.run_in_threads(2, main)


@by_strategy
@in_worlds(1, 3)
def test_accuracy_of_classes(backend, strategy):
    labels = np.where(np.arange(23) % 5 == 0, -1, CLASSES)  # some count for nothing
    plain = ms.nn.LogisticRegression(4, 3, seed=1)
    result = train(backend, plain, strategy, training_statistics=True, **PARTS, **targets(labels))
    whole = ms.nn.LogisticRegression(4, 3).with_parameters(result.model.get_parameters())
    for rows, found in every_result(result):
        counted = labels[rows] >= 0
        right = whole.predict_classes(X[rows]) == labels[rows]
        assert found.stats["accuracy"] == right[counted].sum() / counted.sum()
        assert found.stats.keys() == {"loss", "accuracy"}


@in_worlds(2)
def test_accuracy_of_yes_or_no(backend, tmp_path):
    labels = (CLASSES > 0)[:, None].astype(float)
    file = tmp_path / "metrics.jsonl"
    result = train(
        backend, ms.nn.LogisticRegression(4), metrics=str(file), **PARTS, **targets(labels)
    )
    if backend.rank == 0:
        rows = [row for row in read_metrics(file) if "validation_loss" in row]
        assert rows[-1]["validation_accuracy"] == result.validation_result.stats["accuracy"]
    whole = ms.nn.LogisticRegression(4).with_parameters(result.model.get_parameters())
    right = whole.predict_classes(X[:9]) == labels[:9, 0]
    assert result.validation_result.stats["accuracy"] == right.mean()


@by_strategy
@in_worlds(1, 2, 3)
def test_predictions_are_each_ranks_own_rows(backend, strategy):
    result = train(
        backend,
        ms.nn.LinearRegression(4, 2),
        strategy,
        predictions=True,
        keep_best=True,
        **PARTS,
        **targets(Y),
    )
    whole = ms.nn.LinearRegression(4, 2).with_parameters(result.model.get_parameters())
    found = result.test_result
    expected = whole.predict(X[9:14])[found.indices]
    np.testing.assert_allclose(found.predictions, expected, rtol=1e-12)
    everyone = np.sort(backend.all_gather(found.indices))
    assert everyone.tolist() == list(range(5))
    assert len(result.validation_result.predictions) == len(result.validation_result.indices)
    assert result.training_result.predictions is None


@in_worlds(2)
def test_results_that_were_not_requested_are_not_computed(backend):
    model = ms.as_distributed(ms.nn.LinearRegression(4, 2), backend)
    seen = []
    predict = model.engine.predict
    model.engine.predict = lambda x: seen.append(len(x)) or predict(x)
    data = ms.OptimizationInputData(
        model=model, x_train=X, y_train=Y, batch_size=8, epochs=2, progress=False
    )
    result = ms.as_distributed(ms.optimizers.SGD(0.01), backend).optimize(data)
    assert seen == []
    assert result.training_result.stats == {}
    assert result.validation_result is result.test_result is result.fit_detection_result is None
    validated = ms.OptimizationInputData(
        model=model,
        x_train=X,
        y_train=Y,
        batch_size=8,
        epochs=2,
        progress=False,
        **PARTS,
        **{k: v for k, v in targets(Y).items() if k != "y_train"},
    )
    ms.as_distributed(ms.optimizers.SGD(0.01), backend).optimize(validated)
    of_validation = {0: 5, 1: 4}[backend.rank]  # 8 and 1 samples of 9, over two ranks: 4 + 1
    assert sum(seen) == 2 * of_validation + {0: 3, 1: 2}[backend.rank]


@in_worlds(2)
def test_black_boxes(backend):
    def squared_error(theta, x, y):
        error = x @ theta[:, None] - y
        return float((error**2).mean()), 2 * (x.T @ error).ravel() / len(x)

    y = X[:, :1]
    plain = ms.FunctionModel(squared_error, np.ones(4))
    result = train(backend, plain, **PARTS, **targets(y), keep_best=True)
    loss, _ = squared_error(result.model.get_parameters(), X[9:14], y[9:14])
    assert result.test_result.stats == pytest.approx({"loss": loss})
    with pytest.raises(MissingMemberError, match="predict"):
        train(
            backend,
            ms.FunctionModel(squared_error, np.ones(4)),
            predictions=True,
            **PARTS,
            **targets(y),
        )
    able = ms.FunctionModel(squared_error, np.ones(4), lambda theta, x: x @ theta)
    found = train(backend, able, predictions=True, **PARTS, **targets(y)).test_result
    np.testing.assert_allclose(
        found.predictions, X[9:14][found.indices] @ able.get_parameters(), rtol=1e-12
    )


# ----------------------------------------------------------------------------------------- features


@by_strategy
@in_worlds(1, 2)
def test_features_and_intercept_of_a_linear_model(backend, strategy):
    plain = ms.nn.LinearRegression(4, 2, feature_names=list("abcd"))
    plain.set_active_feature_indices([3, 0])
    result = train(backend, plain, strategy, y_train=Y)
    assert result.selected_feature_indices == [0, 3]
    assert result.selected_features == ["a", "d"]
    with result.model.unsharded() as whole:
        np.testing.assert_array_equal(result.best_intercept, whole.intercept)
    assert result.best_intercept.any()
    assert result.coefficient_lower_bounds is result.coefficient_upper_bounds is None


@in_worlds(2)
def test_other_models_know_no_features(backend):
    result = train(backend, ms.nn.MLP([4, 2]), y_train=Y)
    assert result.selected_feature_indices is result.selected_features is None
    assert result.best_intercept is None


# --------------------------------------------------------------------------------------- judgement


@pytest.mark.parametrize(
    ("training", "validation", "history", "expected"),
    [
        (1.0, 1.21, [1.1, 1.0], FitType.OVERFIT),
        (1.0, 1.19, [1.04, 1.0], FitType.GOOD),
        (1.0, 1.19, [1.1, 1.0], FitType.UNDERFIT),
        (1.0, 0.5, [1.0], FitType.GOOD),
        (-1.0, -0.7, [-1.0, -1.0], FitType.OVERFIT),  # a likelihood may be negative
        (0.0, 0.0, [0.0, 0.0], FitType.GOOD),
    ],
)
def test_the_rule_of_thumb(training, validation, history, expected):
    found = FitDetectionResult.detect(training, validation, history)
    assert found.fit_type == expected
    assert (found.training_loss, found.validation_loss) == (training, validation)


def test_unknown_losses_are_not_judged():
    assert FitDetectionResult.detect(float("nan"), 1.0, [1.0]) is None


@in_worlds(2)
def test_the_losses_that_are_judged_are_the_solutions(backend):
    y = X[:, :2]
    given = PARTS | targets(y)
    result = train(backend, ms.nn.LinearRegression(4, 2), keep_best=True, **given)
    judged = result.fit_detection_result
    assert judged.validation_loss == result.validation_result.stats["loss"]
    assert judged.training_loss == result.fitness_history[-1]
    assert judged.fit_type == FitType.UNDERFIT  # two epochs of small steps
    measured = train(
        backend, ms.nn.LinearRegression(4, 2), training_statistics=True, **given
    ).fit_detection_result
    assert measured.training_loss < judged.training_loss


# ------------------------------------------------------------------------------------------ copies


@by_strategy
@in_worlds(1, 2)
def test_copies(backend, strategy):
    result = train(
        backend, ms.nn.LinearRegression(4, 2), strategy, predictions=True, **PARTS, **targets(Y)
    )
    parameters = result.model.get_parameters()
    copied = result.deep_copy()
    other = result.with_parameters(parameters + 1)
    for found, expected in ((copied, parameters), (other, parameters + 1)):
        assert found.model is not result.model
        np.testing.assert_array_equal(found.model.get_parameters(), expected)
        assert found.fitness_history == result.fitness_history
        assert found.test_result.x is result.test_result.x
    copied.fitness_history.append(0.0)
    copied.test_result.predictions[...] = 0
    assert len(result.fitness_history) == 2
    assert backend.all_reduce(np.abs(result.test_result.predictions).sum(keepdims=True).ravel())[0]
    assert copied.test_loss == result.test_loss
    # What was measured of other parameters is not carried over.
    assert np.isnan(other.best_fitness_score)
    assert other.test_loss is other.fit_detection_result is other.test_result.predictions is None
    np.testing.assert_array_equal(result.model.get_parameters(), parameters)
    with pytest.raises(ValueError, match=r"shape \(10,\), got \(3,\)"):
        result.with_parameters(np.ones(3))


def test_copies_of_a_plain_models_result():
    model = ms.nn.LinearRegression(4, 2)
    result = ms.optimizers.SGD(0.01).optimize(
        ms.OptimizationInputData(model=model, x_train=X, y_train=Y, progress=False)
    )
    assert result.model is model
    assert result.deep_copy().model is not model
    ones = np.ones(10)
    np.testing.assert_array_equal(result.with_parameters(ones).model.get_parameters(), ones)
