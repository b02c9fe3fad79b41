"""Several arrays as one data set: a dict of inputs trains as the arrays side by side do."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import mpishard as ms
from mpishard.data import Samples, check_dataset, take
from mpishard.testing.worlds import in_worlds


class Pair(NamedTuple):
    a: Any
    b: Any


class FromAFile:
    """A data set that only `take` can read."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Any) -> Any:
        return self.values[rows]


X = np.random.default_rng(0).standard_normal((21, 5))
Y = np.sin(X[:, :2])
TREE = {"left": X[:, :3], "rest": Pair(X[:, 3], [X[:, 4:]])}


def test_rows_of_all_arrays() -> None:
    samples = Samples(TREE)
    assert len(samples) == check_dataset(samples, "x") == 21
    found = take(samples, np.array([4, 2, 4])).tree
    assert np.array_equal(found["left"], X[[4, 2, 4], :3])
    assert type(found["rest"]) is Pair
    assert np.array_equal(samples[3:5].tree["rest"].b[0], X[3:5, 4:])
    assert len(samples[np.zeros(0, np.int64)]) == 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"equal lengths, got {'a': 3, 'b.0': 4}"):
        Samples({"a": np.ones(3), "b": [np.ones(4)]})
    with pytest.raises(TypeError, match=r"a must be an array.*got None"):
        Samples({"a": None})
    with pytest.raises(TypeError, match=r"an array, or several in a dict or a tuple; got {}"):
        Samples({})
    with pytest.raises(TypeError, match=r"or all as mpishard.data.Samples\(x_train\)"):
        check_dataset({"a": np.ones(3)}, "x_train")


def of_arrays(kind: str) -> tuple[Any, Any]:
    """A model of one array, and one of the tree."""
    start = {"w": np.full((5, 2), 0.1), "b": np.zeros(2)}
    if kind == "torch":
        torch = pytest.importorskip("torch", reason="PyTorch is not installed here")

        class Split(torch.nn.Linear):  # type: ignore[misc, name-defined]
            def forward(self, left: Any, rest: Any = None) -> Any:
                parts = [left] if rest is None else [left, rest.a[:, None], *rest.b]
                return super().forward(torch.cat(parts, 1)).tanh()

        def module() -> Any:
            one = Split(5, 2).double()
            with torch.no_grad():
                one.weight.fill_(0.1), one.bias.zero_()
            return one

        loss = torch.nn.functional.mse_loss
        return tuple(ms.adapters.TorchModel(module(), loss) for _ in range(2))
    if kind == "jax":
        jax = pytest.importorskip("jax", reason="JAX is not installed here")
        jax.config.update("jax_enable_x64", True)
        numpy, model = jax.numpy, ms.adapters.JaxModel
    else:
        from autograd import numpy

        model = ms.adapters.AutogradModel

    def predict(p: Any, x: Any) -> Any:
        return numpy.tanh(numpy.dot(x, p["w"]) + p["b"])

    def joined(x: Any) -> Any:
        return numpy.concatenate([x["left"], x["rest"].a[:, None], *x["rest"].b], axis=1)

    def of_array(p: Any, x: Any, y: Any) -> Any:
        return numpy.mean((predict(p, x) - y) ** 2)

    def of_tree(p: Any, x: Any, y: Any) -> Any:
        return of_array(p, joined(x), y)

    return (
        model(of_array, start, predict),
        model(of_tree, start, lambda p, x: predict(p, joined(x))),
    )


@pytest.mark.parametrize("kind", ["autograd", "jax", "torch"])
@in_worlds(2, 3)
def test_a_tree_trains_as_one_array(backend: Any, kind: str) -> None:
    found = []
    trees = [X, Samples(TREE), Samples({**TREE, "left": FromAFile(X[:, :3])})]
    plain, of_tree = of_arrays(kind)
    for x, one in zip(trees, (plain, of_tree, of_tree.deep_copy()), strict=True):
        model = ms.as_distributed(one, backend, "fsdp")
        optimizer = ms.as_distributed(ms.optimizers.SGD(0.1), backend, "fsdp")
        result = optimizer.optimize(
            ms.OptimizationInputData(
                model=model, x_train=x, y_train=Y, x_validation=x, y_validation=Y, batch_size=8,
                epochs=2, seed=1, progress=False,
            )
        )  # fmt: skip
        rows = slice(backend.rank, backend.rank + 4)
        loss = optimizer.step(model, x[rows] if x is not trees[2] else trees[1][rows], Y[rows])
        found.append([*model.gather_full_parameters(), result.validation_history[-1][1], loss])
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found[2], found[1], rtol=0, atol=0)
