"""scikit-learn's own checks of estimators, and their use in its tools.

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
def test_a_users_model_is_trained(classes):
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


def test_fits_do_not_depend_on_the_number_of_ranks():
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


WEIGHTS = np.where(np.arange(60) % 7 == 2, 0.0, 0.2 + np.arange(60) % 5)
UNBALANCED = np.flatnonzero((LABELS > 0) | (np.arange(60) % 3 == 0))


def targets_for(make):
    return NAMES if make is classifier else X[:, 0] - X[:, 1] ** 2


def difference(one, other):
    return np.abs(one.parameters_ - other.parameters_).max()


@pytest.mark.parametrize("make", [classifier, regressor])
def test_weights_are_repetitions_and_zeros_leave_samples_out(make):
    y, counts = targets_for(make), np.arange(60) % 4
    weighted = make().fit(X, y, sample_weight=counts)
    repeated = make().fit(X.repeat(counts, 0), y.repeat(counts))
    assert difference(weighted, repeated) < 1e-12
    np.testing.assert_allclose(weighted.loss_curve_, repeated.loss_curve_, rtol=1e-12)
    assert difference(weighted, make().fit(X, y)) > 1e-3
    # Without a sample of weight 0, batches have the same samples: the same bits.
    some = {"batch_size": 16}
    kept = WEIGHTS > 0
    found = make(**some).fit(X, y, sample_weight=WEIGHTS)
    assert difference(found, make(**some).fit(X[kept], y[kept], WEIGHTS[kept])) == 0


@pytest.mark.parametrize("make", [classifier, regressor])
def test_weighted_fits_do_not_depend_on_the_world(make):
    y = targets_for(make)
    alone, *others = (
        make(world_size=n, batch_size=16).fit(X, y, sample_weight=WEIGHTS) for n in (1, 2, 3, 4)
    )
    assert all(difference(alone, other) < 1e-12 for other in others)


@pytest.mark.parametrize("make", [classifier, regressor])
def test_a_weighted_score_is_that_of_repeated_samples(make):
    y, counts = targets_for(make), np.arange(60) % 4
    fitted = make(epochs=2).fit(X, y)
    expected = fitted.score(X.repeat(counts, 0), y.repeat(counts))
    assert fitted.score(X, y, sample_weight=counts) == pytest.approx(expected)
    assert fitted.score(X, y) != pytest.approx(expected)


@pytest.mark.parametrize("options", [{}, {"model": linear}])
def test_weights_of_classes_multiply_those_of_samples(options):
    x, y, w = X[UNBALANCED], NAMES[UNBALANCED], WEIGHTS[UNBALANCED]
    of_class = {"a": 3.0, "c": 0.5}  # b weighs 1
    each = np.array([of_class.get(name, 1.0) for name in y])
    found = classifier(class_weight=of_class, **options).fit(x, y, w)
    assert difference(found, classifier(**options).fit(x, y, w * each)) == 0
    alone = classifier(class_weight=of_class, **options).fit(x, y)
    assert difference(alone, classifier(**options).fit(x, y, each)) == 0


def test_balanced_classes_weigh_the_same():
    from sklearn.utils.class_weight import compute_sample_weight

    x, y = X[UNBALANCED], NAMES[UNBALANCED]
    found = classifier(class_weight="balanced").fit(x, y)
    assert difference(found, classifier().fit(x, y, compute_sample_weight("balanced", y))) < 1e-12
    # Classes are balanced as if samples were repeated, or left out: of one here all.
    counts = np.where(y == "b", 0, np.arange(len(y)) % 4)
    weighted = classifier(class_weight="balanced").fit(x, y, counts)
    assert list(weighted.classes_) == ["a", "b", "c"]
    repeated = y.repeat(counts)
    each = compute_sample_weight("balanced", repeated)
    # The label without weight is given once more, so that there are as many outputs.
    expected = classifier().fit(
        np.concatenate([x.repeat(counts, 0), x[:1]]), [*repeated, "b"], [*each, 0]
    )
    assert difference(weighted, expected) < 1e-12


def test_two_classes_with_one_logit_have_weights():
    chosen, one_batch = LABELS < 2, {"model": linear, "batch_size": 1000}
    x, y, counts = X[chosen], NAMES[chosen], np.arange(40) % 3
    found = classifier(class_weight={"b": 4}, **one_batch).fit(x, y, counts)
    counts = counts * np.where(y == "b", 4, 1)
    repeated = classifier(**one_batch).fit(x.repeat(counts, 0), y.repeat(counts))
    assert difference(found, repeated) < 1e-12


@pytest.mark.parametrize("make", [classifier, regressor])
@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (np.full(60, -1.0), r"0 or more, got -1\.0"),
        (-1.0, r"0 or more, got -1\.0"),
        (np.full(60, np.nan), "contains NaN"),
        (np.nan, "must be 0 or more, got nan"),
        (np.full(60, np.inf), "contains infinity"),
        (np.ones(59), r"shape == \(59,\), expected \(60,\)"),
        (np.ones((60, 1)), "must be 1D array or scalar"),
        (np.zeros(60), "at least one"),
    ],
)
def test_wrong_sample_weights_are_refused(make, weights, words):
    with pytest.raises(ValueError, match=words):
        make().fit(X, targets_for(make), sample_weight=weights)


@pytest.mark.parametrize(
    ("of_class", "words"),
    [
        ({"a": -1.0}, r"weights must be 0 or more, got -1\.0"),
        ({"a": np.nan}, "weights must be 0 or more, got nan"),
        ({"z": 2.0}, "are not in class_weight"),
        ("equal", "class_weight"),
        (dict.fromkeys("abc", 0.0), "at least one sample must have a weight above 0"),
    ],
)
def test_wrong_weights_of_classes_are_refused(of_class, words):
    with pytest.raises(ValueError, match=words):
        classifier(class_weight=of_class).fit(X, NAMES)


class Plain(ms.nn.Loss):
    def forward(self, prediction, target, training=True):
        return float(np.square(prediction - target).sum()), float(len(target)), prediction - target

    def backward(self, saved):
        return 2 * saved


def test_a_loss_without_weights_is_refused():
    def model(features, outputs, seed):
        return ms.nn.MLP([features, outputs], seed=seed, loss=Plain())

    regressor(model).fit(X, X[:, 0])
    with pytest.raises(TypeError, match=r"Plain takes an array of targets, .* check_target"):
        regressor(model).fit(X, X[:, 0], sample_weight=np.ones(60))


@pytest.mark.parametrize("make", [classifier, regressor])
def test_sparse_rows_are_fitted_as_dense_ones(make):
    from scipy.sparse import coo_array, csr_matrix

    y, few = targets_for(make), np.where(np.abs(X) > 1, X, 0)
    dense = make(batch_size=16).fit(few, y, WEIGHTS)
    for kind in (csr_matrix, coo_array):
        found = make(batch_size=16).fit(kind(few), y, WEIGHTS)
        assert difference(found, dense) == 0
        np.testing.assert_allclose(
            found.score(kind(few), y), dense.score(few, y), rtol=1e-12, atol=0
        )


@in_worlds(2, 3)
def test_ranks_fit_weighted_samples_together(backend):
    found = classifier(class_weight="balanced").fit(X, NAMES, WEIGHTS)
    everyone = backend.all_gather(found.parameters_[None])
    assert (everyone == everyone[0]).all()
    alone = classifier(class_weight="balanced", world_size=1)
    if backend.rank == 0:
        rows = ms.run_in_threads(1, lambda _: alone.fit(X, NAMES, WEIGHTS).parameters_)
        assert np.abs(rows[0] - found.parameters_).max() < 1e-12
    with pytest.raises(ValueError, match="different data on different ranks"):
        classifier().fit(X, NAMES, WEIGHTS * (1 + backend.rank))
    with pytest.raises(ValueError, match="different data on different ranks"):
        classifier().fit(X, NAMES, None if backend.rank else WEIGHTS)
