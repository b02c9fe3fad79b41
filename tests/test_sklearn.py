"""scikit-learn's own checks of estimators, and what its users do with them.

Tests import scikit-learn themselves, because that takes each process that collects them a second.
"""

import doctest
import importlib.util
import pickle
import threading

import numpy as np
import pytest

import mpishard as ms
from mpishard.testing.worlds import in_worlds

if importlib.util.find_spec("sklearn") is None:
    pytest.skip("scikit-learn is not installed here", allow_module_level=True)

QUICK = {"hidden": (8,), "epochs": 12, "learning_rate": 0.1, "random_state": 0}
LABELS = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], 20))
X = np.array([[1.0, 4.0], [2.0, 1.0], [-1.5, 3.0]])[LABELS]
X += np.random.default_rng(1).standard_normal(X.shape)
NAMES = np.array(["a", "b", "c"])[LABELS]


def classifier(**options):
    from mpishard.sklearn import ShardedClassifier

    return ShardedClassifier(**(QUICK | options))


def regressor(*given, **options):
    from mpishard.sklearn import ShardedRegressor

    return ShardedRegressor(*given, **(QUICK | options))


def test_the_examples_in_the_docstrings():
    import mpishard.sklearn

    assert doctest.testmod(mpishard.sklearn) == (0, 7)


@pytest.mark.parametrize("make", [classifier, regressor])
def test_passes_the_checks_of_scikit_learn(make):
    from sklearn.utils.estimator_checks import check_estimator

    check_estimator(make(), on_skip=None)


def test_labels_pipelines_clones_and_pickles():
    from sklearn.base import clone
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    pipeline = make_pipeline(StandardScaler(), classifier())
    fitted = pipeline.fit(X, NAMES)
    assert fitted.score(X, NAMES) > 0.8
    assert set(fitted.predict(X)) <= {"a", "b", "c"}
    again = clone(pipeline).fit(X, NAMES)  # random_state=0: the same bits
    assert (again[-1].parameters_ == fitted[-1].parameters_).all()
    restored = pickle.loads(pickle.dumps(fitted))
    assert (restored.predict_proba(X) == fitted.predict_proba(X)).all()
    assert not [t for t in threading.enumerate() if "mpishard" in t.name]


def test_a_grid_search_chooses_a_rate():
    from sklearn.model_selection import GridSearchCV

    search = GridSearchCV(classifier(), {"learning_rate": [1e-9, 0.1]}, cv=2).fit(X, LABELS)
    assert search.best_params_ == {"learning_rate": 0.1}


def test_settings_that_change_after_fit_are_for_the_next_one():
    hidden = [8]
    fitted = classifier(hidden=hidden, epochs=1).fit(X, LABELS)
    expected = fitted.predict_proba(X)
    hidden[0] = 9
    fitted.set_params(model=linear)
    assert (fitted.predict_proba(X) == expected).all()
    assert fitted.fit(X, LABELS).parameters_.size == 2 * 3 + 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adam"}, "optimizer must be an update rule, .* got 'adam'"),
        ({"optimizer": ms.optimizers.SGD}, "optimizer must be an update rule, .* got <class"),
        ({"hidden": 8}, "hidden must be a sequence of sizes, got 8"),
        ({"model": ms.nn.MLP([2, 3])}, "model must be a function .* got a MLP"),
    ],
)
def test_settings_of_other_types_are_refused(options, words):
    with pytest.raises(TypeError, match=words):
        classifier(**options).fit(X, LABELS)


def linear(features, outputs, seed):
    return ms.nn.LogisticRegression(features, outputs, seed=seed)


def small(features, outputs, seed):
    return ms.nn.MLP([features, 5, outputs], "tanh", seed=seed, dtype="float32")


@pytest.mark.parametrize("classes", [2, 3])
def test_a_model_of_ones_own_is_trained(classes):
    chosen = np.isin(LABELS, range(classes))
    x, names = X[chosen], NAMES[chosen]
    rule = ms.optimizers.SGD(0.3)
    found = classifier(model=linear, optimizer=rule, epochs=40).fit(x, names)
    assert isinstance(found.model_, ms.nn.LogisticRegression)
    assert found.optimizer is rule
    assert found.loss_curve_[-1] < found.loss_curve_[0]
    probabilities = found.predict_proba(x)
    assert probabilities.shape == (len(x), classes)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    assert found.score(x, names) > 0.85


def test_several_targets_at_once():
    y = np.stack([X[:, 0], -X[:, 1]], axis=1)
    found = regressor(small, epochs=60).fit(X.astype(np.float32), y)
    assert found.predict(X).shape == y.shape
    assert found.score(X, y) > 0.9
    assert found.parameters_.dtype == np.float32


def test_the_world_makes_no_difference():
    one, three = (classifier(world_size=n).fit(X, LABELS).parameters_ for n in (1, 3))
    assert np.abs(one - three).max() < 1e-12
    with pytest.raises(ValueError, match="world_size must be 1 or more, got 0"):
        classifier(world_size=0).fit(X, LABELS)
    with pytest.raises(ValueError, match="strategy"):
        classifier(strategy="nothing").fit(X, LABELS)
    with pytest.raises(TypeError, match=r"must be a function .* that returns a model, got a MLP"):
        classifier(model=ms.nn.MLP([2, 2])).fit(X, LABELS)
    with pytest.raises(ValueError, match=r"shape \(1, 9\) for one sample; 3 classes need \(1, 3\)"):
        classifier(model=nine_logits).fit(X, LABELS)


def nine_logits(features, outputs, seed):
    return ms.nn.MLP([features, 9], seed=seed, loss=ms.nn.CrossEntropy())


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.threads_alone)])
@in_worlds()
def test_ranks_fit_together(backend):
    """Called by ranks: of threads, or under MPI. Each has the estimator, and predicts alone."""
    own = np.random.RandomState(backend.rank)  # the seed of rank 0 holds
    found = classifier(random_state=own).fit(X, NAMES)
    everyone = backend.all_gather(found.parameters_[None])
    assert (everyone == everyone[0]).all()
    if backend.rank == 0:
        assert found.score(X, NAMES) > 0.8
    with pytest.raises(ValueError, match="different data on different ranks"):
        classifier().fit(X + backend.rank, NAMES)
