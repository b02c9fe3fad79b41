"""An optimizer whose number of ranks changes: its bounds, and the same training on other ranks."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.errors import ShardingError
from mpishard.optimizers import SGD, Adam, ElasticOptimizer
from mpishard.testing.worlds import in_worlds

generator = np.random.default_rng(5)
X = generator.standard_normal((32, 6))
Y = np.sin(X[:, :3])


def plain():
    return nn.MLP([6, 8, 3], activation="tanh", seed=2)


def train(backend, folder, strategy, limit, bounds=(1, 4), x=X, leaves=None):
    config = ms.ShardingConfiguration(backend, gradient_leaves=leaves)
    optimizer = ElasticOptimizer(Adam(1e-3), config, *bounds, strategy=strategy)
    return optimizer.optimize(
        ms.OptimizationInputData(
            model=plain(),
            x_train=x,
            y_train=Y,
            batch_size=8,
            max_steps=limit,
            progress=False,
            checkpoint=folder,
            checkpoint_every=3,
        )
    ).model.get_parameters()


def textbook(steps):
    """Adam on the batches of the sampler, in one process."""
    model = plain()
    sampler = ms.data.GlobalBatchSampler(32, 8, seed=0)
    theta = model.get_parameters()
    first, second = 0 * theta, 0 * theta
    for step in range(steps):
        rows = sampler.local(*divmod(step, 4), 0, 1)[0]
        gradient = model.with_parameters(theta).compute_loss_and_gradients(X[rows], Y[rows])[1]
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        mean = first / (1 - 0.9 ** (step + 1))
        theta = theta - 1e-3 * mean / (np.sqrt(second / (1 - 0.999 ** (step + 1))) + 1e-8)
    return theta


def test_a_job_that_shrinks_and_grows_is_one_process_training(tmp_path):
    for size, strategy, limit in ((3, "ddp", 7), (2, "fsdp", 17), (4, "zero1", 33), (1, "ddp", 50)):
        found = ms.run_in_threads(size, train, tmp_path / "run", strategy, limit)[0]
    np.testing.assert_allclose(found, textbook(50), rtol=0, atol=1e-12)


def test_an_elastic_run_with_leaves_has_the_same_bits(tmp_path):
    for size, limit in ((4, 6), (2, 12)):
        found = ms.run_in_threads(size, train, tmp_path / "a", "fsdp", limit, leaves=4)[0]
    whole = ms.run_in_threads(1, train, tmp_path / "b", "ddp", 12, leaves=4)[0]
    assert found.tobytes() == whole.tobytes()


class Lost:
    """Samples whose read number ``at`` raises an error."""

    def __init__(self, at):
        self.at, self.read = at, 0

    def __len__(self):
        return len(X)

    def __getitem__(self, rows):
        self.read += 1
        if self.read == self.at:
            raise MemoryError("this rank is lost")
        return X[rows]


@pytest.mark.parametrize("least", [2, 3])
def test_survivors_go_on_within_the_bounds(tmp_path, least, caplog):
    own = threading.local()

    def main(backend):
        if not hasattr(own, "x"):
            own.x = Lost(9 if backend.rank == 1 else None)
        return train(backend, tmp_path / "run", "fsdp", 12, (least, 3), own.x), backend.world_size

    if least == 3:
        with pytest.raises(MemoryError):  # the root cause
            ms.launch(main, backend="memory", world_size=3, on_failure="shrink")
        assert "ElasticOptimizer allows 3 to 3 ranks, but the job has 2" in caplog.text
        return
    parameters, size = ms.launch(main, backend="memory", world_size=3, on_failure="shrink")
    assert size == 2
    np.testing.assert_allclose(parameters, textbook(12), rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(1, 2, 3)
def test_bytes_fit_another_number_of_ranks_and_no_other_bounds(backend, strategy):
    config = ms.ShardingConfiguration(backend)
    model = ms.as_distributed(plain(), config, strategy)
    optimizer = ElasticOptimizer(Adam(1e-3), config, 1, 8, strategy=strategy)
    optimizer.step(model, X, Y)
    data = optimizer.serialize()

    def take(alone):
        config = ms.ShardingConfiguration(alone)
        other = ElasticOptimizer(Adam(1e-3), config, 1, 8)
        other.deserialize(data)
        other.bind(ms.DDPModel(plain(), config))
        with pytest.raises(ShardingError, match="with max_workers 8, here 9"):
            ElasticOptimizer(Adam(1e-3), config, 1, 9).deserialize(data)
        return other.serialize()

    assert ms.run_in_threads(1, take) == [data]


@in_worlds(1, 2)
def test_arguments_and_members(backend):
    config = ms.ShardingConfiguration(backend)
    size = backend.world_size
    optimizer = ElasticOptimizer(SGD(), config)
    assert (optimizer.min_workers, optimizer.max_workers) == (1, 1024)
    assert optimizer.current_workers == size
    assert optimizer.can_scale_up
    assert optimizer.can_scale_down == (size > 1)
    assert not ElasticOptimizer(SGD(), config, 1, size).can_scale_up
    for bounds, error, match in (
        ((0, 2), ValueError, "min_workers must be 1 or more"),
        ((3, 2), ValueError, "max_workers must be min_workers, 3, or more"),
        ((1.5, 2), TypeError, "min_workers must be an integer"),
        ((size + 1, 9), RuntimeError, f"allows {size + 1} to 9 ranks, but the job has {size}:"),
    ):
        with pytest.raises(error, match=match):
            ElasticOptimizer(SGD(), config, *bounds)
    with pytest.raises(ValueError, match="strategy must be one of ddp"):
        ElasticOptimizer(SGD(), config, strategy="tensor")
    with pytest.raises(NotImplementedError):
        optimizer.synchronize_optimizer_state()
    with pytest.raises(ShardingError, match="ElasticOptimizer updates DDPModel"):
        optimizer.step(ms.FSDPModel(plain(), config), X, Y)
    if size > 1:
        with pytest.raises(ValueError, match="max_workers is 8, 9"):
            ElasticOptimizer(SGD(), config, 1, 8 + backend.rank).bind(ms.DDPModel(plain(), config))
