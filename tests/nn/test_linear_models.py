"""Linear and logistic regression: fits, probabilities, active features and their importance."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad

from mpishard.errors import StructureOnlyError
from mpishard.nn import FeatureLinear, LinearModel, LinearRegression, LogisticRegression
from mpishard.testing.gradients import check_gradients, check_layer_gradients

GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((40, 3)) * [1.0, 10.0, 0.1]


def with_coefficients(model, coefficients, intercept):
    model.set_parameters(np.concatenate([np.ravel(coefficients), intercept]))
    return model


def test_least_squares_is_where_the_gradient_vanishes():
    y = GENERATOR.standard_normal((40, 2))
    solution = np.linalg.lstsq(np.c_[X, np.ones(40)], y, rcond=None)[0]
    model = with_coefficients(LinearRegression(3, 2), solution[:3].T, solution[3])
    loss, gradient = model.compute_loss_and_gradients(X, y)
    assert np.abs(gradient).max() < 1e-13
    np.testing.assert_allclose(loss, np.mean((np.c_[X, np.ones(40)] @ solution - y) ** 2))
    np.testing.assert_array_equal(model.coefficients, solution[:3].T)
    np.testing.assert_array_equal(model.intercept, solution[3])
    model.coefficients[:] = 0
    model.intercept[:] = 0
    np.testing.assert_array_equal(model.coefficients, solution[:3].T)
    np.testing.assert_array_equal(model.intercept, solution[3])


@pytest.mark.parametrize("active", [[0, 1, 2], [2, 0], []])
@pytest.mark.parametrize("make", [LinearRegression, LogisticRegression])
def test_gradients(make, active):
    model = make(3, seed=1)
    model.set_active_feature_indices(active)
    x, y = X / [1, 10, 0.1], (X[:, :1] > 0).astype(float)
    check_gradients(model, x, y, samples=None)
    mask = np.isin(np.arange(3), active).astype(float)

    def mean_loss(v):
        z = anp.dot(x * mask, v[:3])[:, None] + v[3]
        if make is LinearRegression:
            return anp.mean((z - y) ** 2)
        return anp.mean(anp.log(1 + anp.exp(z)) - y * z)

    loss, gradient = model.compute_loss_and_gradients(x, y)
    np.testing.assert_allclose(loss, mean_loss(model.get_parameters()), rtol=1e-13)
    expected = grad(mean_loss)(model.get_parameters())
    np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-15)


def test_gradients_of_several_classes():
    model = LogisticRegression(3, 4)
    check_gradients(model, X, GENERATOR.integers(0, 4, 40), samples=None)


def test_the_masked_layer():
    layer = FeatureLinear(4, 2)
    layer.active = (3, 1)
    assert layer.active == (1, 3)
    check_layer_gradients(layer, GENERATOR.standard_normal((5, 4)))
    x = GENERATOR.standard_normal((2, 4))
    before = x.copy()
    dx, _ = layer.backward_input({"weight": np.ones((2, 4))}, x, np.ones((2, 2)))
    np.testing.assert_array_equal(dx, [[0, 2, 0, 2]] * 2)
    np.testing.assert_array_equal(x, before)


def test_values_of_an_inactive_feature_do_not_matter():
    model = with_coefficients(LinearRegression(3), [1.0, 2.0, 3.0], [4.0])
    model.set_active_feature_indices(i for i in (2, 0, 2))
    x = np.array([[1.0, np.nan, 1.0], [0.0, 1e300, 0.0]])
    np.testing.assert_array_equal(model.predict(x), [[8.0], [4.0]])
    gradient = model.compute_gradients(x, np.zeros((2, 1)))
    assert gradient[1] == 0.0
    assert np.isfinite(gradient).all()
    assert np.isnan(x[0, 1])


def test_active_features():
    model = LinearRegression(3)
    assert list(model.get_active_feature_indices()) == [0, 1, 2]
    model.set_active_feature_indices(np.array([2, 0]))
    assert list(model.get_active_feature_indices()) == [0, 2]
    assert [model.is_feature_used(i) for i in range(4)] == [True, False, True, False]
    for wrong in ([0, 3], [-1], [1.0], ["1"]):
        with pytest.raises(ValueError, match=r"integers in \[0, 3\), got"):
            model.set_active_feature_indices(wrong)
    assert list(model.get_active_feature_indices()) == [0, 2]


@pytest.mark.parametrize("copied", ["clone", "deep_copy", "with_parameters"])
def test_a_copy_has_its_own_active_features(copied):
    model = with_coefficients(LinearRegression(3), [1.0, 2.0, 3.0], [0.0])
    model.feature_spread = np.array([1.0, 2.0, 3.0])
    model.set_active_feature_indices([0, 1])
    arguments = (model.get_parameters(),) if copied == "with_parameters" else ()
    other = getattr(model, copied)(*arguments)
    assert list(other.get_active_feature_indices()) == [0, 1]
    assert other.get_feature_importance() == model.get_feature_importance()
    other.set_active_feature_indices([2])
    x = np.ones((1, 3))
    assert list(model.get_active_feature_indices()) == [0, 1]
    assert (model.predict(x), other.predict(x)) == (3.0, 3.0)
    assert other.layers[0] is other.get_layer_info(0).layer
    model.set_parameters(np.array([5.0, 5.0, 5.0, 5.0]))
    # Its parameters are the other's only where it is a shallow copy.
    assert other.predict(x) == (10.0 if copied == "clone" else 3.0)
    if copied == "clone":
        model, again = other, other.clone()
        model.apply_gradients(np.ones(4), 1.0)
        assert again.predict(x) == model.predict(x)


def test_importance_is_coefficient_times_spread():
    model = with_coefficients(
        LinearRegression(3, 2, feature_names=["a", "b", "c"]),
        [[1.0, -0.2, 3.0], [-3.0, 0.4, 0.0]],
        [9.0, 9.0],
    )
    assert model.get_feature_importance() == pytest.approx({"a": 2.0, "b": 0.3, "c": 1.5})
    model.feature_spread = X.std(axis=0)
    expected = [2.0, 0.3, 1.5] * X.std(axis=0)
    assert list(model.get_feature_importance().values()) == pytest.approx(expected)
    assert not np.shares_memory(model.feature_spread, model.feature_spread)
    model.set_active_feature_indices([0, 1])
    assert model.get_feature_importance()["c"] == 0.0


def test_importance_is_the_change_of_predictions():
    model = with_coefficients(LinearRegression(3), [1.0, -2.0, 3.0], [9.0])
    model.feature_spread = X.std(axis=0)
    for i, importance in enumerate(model.get_feature_importance().values()):
        only = np.where(np.arange(3) == i, X, 0.0)
        np.testing.assert_allclose(model.predict(only).std(), importance, rtol=1e-12)


def test_a_coefficient_that_all_classes_share_has_no_importance():
    coefficients = np.array([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]])
    model = with_coefficients(LogisticRegression(2, 3), coefficients, np.zeros(3))
    shifted = with_coefficients(
        LogisticRegression(2, 3), coefficients + np.array([5.0, 7.0]), np.zeros(3)
    )
    x = X[:, :2]
    np.testing.assert_allclose(model.predict_probabilities(x), shifted.predict_probabilities(x))
    importance = pytest.approx({"feature0": 2 / 3, "feature1": 0.0})
    assert model.get_feature_importance() == shifted.get_feature_importance() == importance


def test_two_classes_have_one_logit():
    model = with_coefficients(LogisticRegression(3), [1.0, 0.0, 0.0], [0.5])
    logits = model.predict(X)
    assert logits.shape == (40, 1)
    probabilities = model.predict_probabilities(X)
    np.testing.assert_allclose(probabilities[:, 1:], 1 / (1 + np.exp(-logits)), rtol=1e-14)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-14)
    np.testing.assert_array_equal(model.predict_classes(X), (X[:, 0] > -0.5).astype(int))
    np.testing.assert_array_equal(model.probabilities(logits), probabilities)
    far = model.predict_probabilities(np.array([[1e4, 0, 0], [-1e4, 0, 0]]))
    np.testing.assert_array_equal(far, [[0, 1], [1, 0]])


def test_more_classes_have_one_logit_each():
    model = LogisticRegression(3, 4, seed=2)
    logits, probabilities = model.predict(X), model.predict_probabilities(X)
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(probabilities, expected, rtol=1e-12)
    np.testing.assert_array_equal(model.predict_classes(X), logits.argmax(axis=1))


@pytest.mark.parametrize("classes", [2, 3])
def test_separable_classes_are_learned(classes):
    x = X / X.std(axis=0)
    target = x[:, :classes].argmax(axis=1)
    model = LogisticRegression(3, classes, dtype="float32")
    for _ in range(100):
        model.train(x, target[:, None] if classes == 2 else target, learning_rate=2.0)
    assert (model.predict_classes(x) == target).mean() > 0.9
    assert model.predict_probabilities(x).dtype == np.float32


def test_the_error_for_vector_targets_shows_how_to_make_a_column():
    with pytest.raises(ValueError, match=r"\(40, 1\) and \(40,\); y\[\.\.\., None\]"):
        LinearRegression(3).compute_loss_and_gradients(X, X[:, 0])


def test_metadata_has_the_features():
    model = LinearRegression(3, seed=1)
    metadata = model.get_model_metadata()
    assert (metadata.feature_count, metadata.complexity) == (3, 4)
    assert metadata.feature_importance == model.get_feature_importance()
    model.release_parameters("somebody")
    assert not model.get_model_metadata().feature_importance
    with pytest.raises(StructureOnlyError, match="held by somebody"):
        model.get_feature_importance()
    restored = model.with_parameters(np.ones(4))
    assert restored.get_feature_importance() == dict.fromkeys(model.feature_names, 1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearRegression(0), "LinearRegression needs integer sizes >= 1, got features=0"),
        (lambda: LinearRegression(2, 1.0), r"outputs=1\.0"),
        (lambda: LogisticRegression(2, 1), "classes >= 2, got 1"),
        (lambda: LogisticRegression(2, 2.0), r"classes >= 2, got 2\.0"),
        (lambda: LinearRegression(2, feature_names=["a"]), "2 different names, got 1"),
        (lambda: LinearRegression(2, feature_names=["a", "a"]), "of which 1 differ"),
        (lambda: LinearRegression(2, dtype="int32"), "float32 or float64"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("spread", "message"),
    [
        (np.ones(2), r"shape \(3,\), got \(2,\)"),
        (np.array([1.0, -1.0, 1.0]), ">= 0"),
        (np.array([1.0, np.nan, 1.0]), "finite"),
    ],
)
def test_spreads_out_of_range_are_refused(spread, message):
    with pytest.raises(ValueError, match=message):
        LinearRegression(3).feature_spread = spread
    assert issubclass(LinearRegression, LinearModel)
