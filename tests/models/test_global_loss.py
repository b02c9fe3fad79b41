"""`loss_and_gradients` and `evaluate`: means over all ranks' samples, for users' optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy  # loads scipy.optimize in the test that needs it

import mpishard as ms
from mpishard.adapters import AutogradModel
from mpishard.errors import NoSampleError, ShardingError
from mpishard.models import HybridShardedModel
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

KINDS = ["mlp", "gpt", "function", "autograd"]
MESHES = [
    (2, (2, 1, 1), {}),
    (2, (1, 2, 1), {}),
    (3, (1, 1, 3), {"data_parallel_strategy": "zero2"}),
    (4, (2, 1, 2), {"data_parallel_strategy": "fsdp"}),
]


def check(model: Any, problems: Any, kind: str, rank: int, size: int) -> None:
    plain = problems.MODELS[kind](0)
    for step in range(2):
        x, y = problems.batch(kind, step)
        loss, gradient = plain.compute_loss_and_gradients(x, y)
        own = problems.part(len(x), step, rank, size)
        found, full = model.loss_and_gradients(x[own], y[own])
        np.testing.assert_allclose(found, loss, rtol=0, atol=1e-12)
        np.testing.assert_allclose(full, gradient, rtol=0, atol=1e-12)
        told = model.backend.all_gather(np.concatenate([[found], full])[None])
        assert (told == told[0]).all()
        found, weight = model.evaluate(x[own], y[own])
        np.testing.assert_allclose(found, loss, rtol=0, atol=1e-12)
        assert weight == (np.sum(y != -1) if kind == "gpt" else len(x))
    assert np.array_equal(model.get_parameters(), plain.get_parameters())
    with pytest.raises(NoSampleError, match="no rank has a sample"):
        model.loss_and_gradients(x[:0], y[:0])
    assert np.isnan(model.evaluate(x[:0], y[:0])[0])


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
@in_worlds(1, 2, 3)
def test_loss_and_gradient_equal_those_of_one_process(
    backend: Any, problems: Any, strategy: str, kind: str
) -> None:
    model, _ = problems.build(backend, kind, strategy)
    check(model, problems, kind, backend.rank, backend.world_size)


@pytest.mark.parametrize(("world_size", "mesh", "options"), MESHES)
@in_worlds()
def test_loss_and_gradient_on_a_mesh_equal_those_of_one_process(
    backend: Any, problems: Any, mesh: Any, options: Any
) -> None:
    config = ShardingConfiguration(backend, minimum_parameter_group_size=1)
    for kind in ("mlp", "function"):
        model = HybridShardedModel(problems.MODELS[kind](backend.rank), config, *mesh, **options)
        check(model, problems, kind, model.data_rank, model.data_size)


@in_worlds(1, 3)
def test_dropout_masks_depend_on_the_global_sample(backend: Any, problems: Any) -> None:
    model, _ = problems.build(backend, "dropout", "fsdp")
    x, y = problems.batch("dropout", 1)
    own = problems.part(len(x), 1, backend.rank, backend.world_size)
    plain = problems.MODELS["dropout"](0)
    loss, gradient = plain.compute_loss_and_gradients(x, y, step=0, sample_start=0)
    for _ in range(2):
        found, full = model.loss_and_gradients(x[own], y[own])
        np.testing.assert_allclose(found, loss, rtol=0, atol=1e-12)
        np.testing.assert_allclose(full, gradient, rtol=0, atol=1e-12)
    assert model.evaluate(x[own], y[own])[0] != loss


class Remembering(AutogradModel):
    """A model that keeps the inputs of its last pass; all ranks get those of rank 0."""

    last = np.zeros(5)

    def forward_pass(self, x: Any, y: Any, loss: Any, context: Any) -> Any:
        self.last = x.sum(axis=0)
        return super().forward_pass(x, y, loss, context)

    def share_changed_state(self, ranks: Any) -> bool:
        self.last = ranks.broadcast(self.last.copy(), root=0)
        return True


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(1, 2, 3)
def test_state_beside_parameters_is_that_of_rank_0(
    backend: Any, problems: Any, strategy: str
) -> None:
    """Such as the statistics of normalization, which a pass changes on each rank."""
    plain = Remembering(lambda w, x, y: ((x @ w - y) ** 2).mean(), np.ones((5, 2)))
    model = ms.as_distributed(plain, backend, strategy)
    x, y = problems.batch("function", 1)
    own = [problems.part(len(x), 1, rank, backend.world_size) for rank in range(backend.world_size)]
    model.loss_and_gradients(x[own[backend.rank]], y[own[backend.rank]])
    np.testing.assert_array_equal(model.wrapped_model.last, x[own[0]].sum(axis=0))


@in_worlds(1, 2)
def test_an_unknown_loss_and_an_infinite_one(backend: Any, problems: Any) -> None:
    model, _ = problems.build(backend, "black_box", "zero2")
    x, y = problems.batch("black_box", 0)
    loss, gradient = model.loss_and_gradients(x, y)
    assert np.isnan(loss)
    expected = problems.MODELS["black_box"](0).compute_gradients(x, y)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-12)
    model, _ = problems.build(backend, "mlp", "fsdp")
    model.set_parameters(np.full(model.parameter_count, 1e200))
    with np.errstate(all="ignore"):
        assert not np.isfinite(model.loss_and_gradients(x, y)[0])


@in_worlds(1, 2)
def test_loss_and_gradient_leave_a_round_of_accumulation_as_it_is(
    backend: Any, problems: Any
) -> None:
    model, optimizer = problems.build(backend, "mlp", "zero2")
    batch = problems.local_batch(backend, "mlp", 1)
    with model.accumulate():
        optimizer.step(model, *batch)
        model.evaluate(*batch)
        refused = r"loss_and_gradients\(\) is not allowed during accumulation"
        with pytest.raises(ShardingError, match=refused):
            model.loss_and_gradients(*batch)


@in_worlds(1, 2, 3)
def test_scipy_minimizes_on_every_rank(backend: Any, problems: Any) -> None:
    """The ranks take one path: SciPy's in one process, but for rounding."""
    x, y = problems.batch("function", 2)
    own = problems.part(len(x), 2, backend.rank, backend.world_size)
    plain = problems.MODELS["function"](0)
    model = ms.as_distributed(plain, backend, "zero2")
    start = model.get_parameters()

    def fun(theta: Any) -> Any:
        model.set_parameters(theta)
        return model.loss_and_gradients(x[own], y[own])

    def alone(theta: Any) -> Any:
        return (
            problems.MODELS["function"](0).with_parameters(theta).compute_loss_and_gradients(x, y)
        )

    found = scipy.optimize.minimize(fun, start, jac=True, method="BFGS", options={"maxiter": 8})
    expected = scipy.optimize.minimize(
        alone, start, jac=True, method="BFGS", options={"maxiter": 8}
    )
    np.testing.assert_allclose(found.x, expected.x, rtol=0, atol=1e-9)
    told = backend.all_gather(found.x[None])
    assert (told == told[0]).all()
