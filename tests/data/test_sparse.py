"""Sparse rows train as the dense array does, and only batches of them become dense."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard as ms
from mpishard.data import Samples, check_dataset, take
from mpishard.testing.worlds import in_worlds

sparse = pytest.importorskip("scipy.sparse", reason="pip install scipy")

GENERATOR = np.random.default_rng(0)
X = np.where(GENERATOR.random((23, 6)) < 0.3, GENERATOR.standard_normal((23, 6)), 0)
Y = np.sin(X[:, :2])
KINDS = pytest.mark.parametrize("kind", ["csr_array", "csr_matrix"])


@KINDS
def test_rows_become_dense(kind):
    rows = getattr(sparse, kind)(X)
    assert check_dataset(rows, "x") == 23
    for indices in ([4, 2, 4], [0, 1, 2, 3], []):
        found = take(rows, np.array(indices, np.int64))
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, X[indices])
    assert len(Samples((rows, Y))) == 23


@KINDS
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
@in_worlds(1, 2, 3)
def test_training_on_sparse_rows_is_training_on_dense_ones(backend, strategy, kind):
    def trained(x):
        model = ms.as_distributed(ms.nn.MLP([6, 5, 4, 2], seed=1), backend, strategy)
        data = ms.OptimizationInputData(
            model=model, x_train=x, y_train=Y, x_validation=x, y_validation=Y, epochs=2,
            batch_size=7, progress=False,
        )  # fmt: skip
        result = ms.as_distributed(ms.optimizers.AdamW(0.01), backend, strategy).optimize(data)
        return result.validation_history, result.model.gather_full_parameters()

    history, parameters = trained(getattr(sparse, kind)(X))
    wanted, expected = trained(X)
    assert history == wanted
    assert (parameters == expected).all()


@pytest.mark.parametrize("kind", ["csc_array", "coo_matrix", "lil_array", "dok_array"])
def test_sparse_formats_without_fast_rows_are_refused_with_a_fix(kind):
    with pytest.raises(TypeError, match=rf"got a {kind}; pass x_train.tocsr\(\), whose rows"):
        check_dataset(getattr(sparse, kind)(X), "x_train")


@in_worlds(2)
def test_a_step_and_a_prediction_take_dense_rows(backend):
    model = ms.as_distributed(ms.nn.MLP([6, 2]), backend)
    rule = ms.as_distributed(ms.optimizers.SGD(0.1), backend)
    rows = sparse.csr_array(X)
    words = r"expected a NumPy or CuPy array, got csr_array; pass .*toarray\(\)"
    with pytest.raises(TypeError, match=words):
        rule.step(model, rows, Y)
    with pytest.raises(TypeError, match=words):
        model.predict(rows)
