"""Each rank has data of its own: batches, ends of epochs, and the same training."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard as ms
from mpishard.data import LocalBatchSampler
from mpishard.testing.worlds import in_worlds

LENGTHS = {1: [11], 2: [11, 4], 3: [7, 0, 4], 5: [3, 1, 0, 9, 2]}
BATCH = 6
EPOCHS = 3
generator = np.random.default_rng(0)
X = generator.standard_normal((20, 5))
Y = np.sin(X[:, :2])


def own(world_size, rank):
    """Return this rank's data, of its own length."""
    start = sum(LENGTHS[world_size][:rank])
    return slice(start, start + LENGTHS[world_size][rank])


def train(backend, strategy="fsdp", reading=lambda array: array, **options):
    mine = own(backend.world_size, backend.rank)
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    model = ms.as_distributed(ms.nn.MLP([5, 7, 2], activation="tanh", seed=1), config, strategy)
    optimizer = ms.as_distributed(ms.optimizers.AdamW(1e-3), config, strategy)
    given = {
        "x_train": reading(X[mine]), "y_train": Y[mine], "local_data": True, "epochs": EPOCHS,
        "batch_size": BATCH, "seed": 3, "progress": False,
    }  # fmt: skip
    result = optimizer.optimize(ms.OptimizationInputData(model=model, **(given | options)))
    return result, model.get_parameters()


def by_hand(world_size):
    """Return losses and parameters of one process that trains on the batches of all ranks."""
    sampler = LocalBatchSampler(LENGTHS[world_size], BATCH, seed=3)
    model, losses = ms.nn.MLP([5, 7, 2], activation="tanh", seed=1), []
    theta = model.get_parameters()
    m, v = 0 * theta, 0 * theta
    for step in range(EPOCHS * sampler.batches_per_epoch):
        parts = []
        for rank in range(world_size):
            indices, start = sampler.local(
                *divmod(step, sampler.batches_per_epoch), rank, world_size
            )
            assert start == sum(len(part) for part in parts)
            parts.append(indices + own(world_size, rank).start)
        batch = np.concatenate(parts)
        loss, g = model.with_parameters(theta).compute_loss_and_gradients(X[batch], Y[batch])
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        move = m / (1 - 0.9 ** (step + 1)) / (np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-8)
        theta = theta - 1e-3 * move
        losses.append(loss)
    return losses, theta


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(1, 2, 3, 5)
def test_trains_as_one_process_on_the_union(backend, strategy):
    result, parameters = train(backend, strategy)
    losses, expected = by_hand(backend.world_size)
    np.testing.assert_allclose(parameters, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.loss_history, losses, rtol=0, atol=1e-12)
    assert result.weight == EPOCHS * sum(LENGTHS[backend.world_size])


@in_worlds(2, 3, 5)
def test_every_sample_of_every_rank_is_read_once_an_epoch(backend):
    class Counting:
        def __init__(self, rows):
            self.rows, self.read = rows, np.zeros(len(rows), int)

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, indices):
            self.read[indices] += 1
            return self.rows[indices]

    counts = []

    def reading(rows):
        counts.append(Counting(rows))
        return counts[0]

    train(backend, reading=reading)
    read = counts[0].read
    # The first sample is also looked at before training, and to make empty batches.
    assert (read[1:] == EPOCHS).all()
    assert (read[:1] > EPOCHS).all()


@in_worlds(2, 3)
def test_validation_and_test_data_are_each_ranks_own_too(backend):
    mine = own(backend.world_size, backend.rank)
    result, parameters = train(
        backend,
        x_validation=X[mine],
        y_validation=Y[mine],
        x_test=X[mine][:3],
        y_test=Y[mine][:3],
        predictions=True,
    )
    plain = ms.nn.MLP([5, 7, 2], activation="tanh").with_parameters(parameters)
    whole = slice(0, sum(LENGTHS[backend.world_size]))
    loss = ms.nn.MSE()(plain.predict(X[whole]), Y[whole])
    assert result.validation_history[-1][1] == pytest.approx(loss, rel=1e-12)
    assert result.validation_result.indices.tolist() == list(range(len(X[mine])))
    predicted = result.validation_result.predictions
    if len(X[mine]):
        np.testing.assert_allclose(predicted, plain.predict(X[mine]), rtol=0, atol=1e-12)
    assert len(result.test_result.indices) == len(X[mine][:3])


@in_worlds(2)
def test_drop_last_ends_where_a_rank_cannot_bring_its_share(backend):
    result, _ = train(backend, drop_last=True)
    assert result.weight == EPOCHS * 1 * BATCH
    assert len(result.loss_history) == EPOCHS


@pytest.mark.parametrize("stop", [1, 4, 6])
def test_interrupted_and_resumed_it_is_the_same_run(tmp_path, stop):
    whole, parameters = ms.run_in_threads(2, train)[0]
    ms.run_in_threads(2, train, "fsdp", max_steps=stop, checkpoint=tmp_path / "run")
    resumed, values = ms.run_in_threads(2, train, "fsdp", resume=tmp_path / "run")[0]
    assert values.tobytes() == parameters.tobytes()
    assert resumed.fitness_history == whole.fitness_history


def test_another_number_of_ranks_cannot_resume_it(tmp_path):
    ms.run_in_threads(3, train, "fsdp", max_steps=2, checkpoint=tmp_path / "run")

    def resume(backend):
        with pytest.raises(ValueError, match=r"by 3 ranks, and there are 2 now.*with 3 ranks"):
            train(backend, resume=tmp_path / "run")

    ms.run_in_threads(2, resume)


def test_other_lengths_or_common_data_cannot_resume_it(tmp_path):
    ms.run_in_threads(2, train, "fsdp", max_steps=2, checkpoint=tmp_path / "run")

    def resume(backend):
        shorter = {"x_train": X[:3], "y_train": Y[:3]}
        with pytest.raises(ValueError, match=r"samples was \[11, 4\] and is \[3, 3\]"):
            train(backend, resume=tmp_path / "run", **shorter)
        with pytest.raises(ValueError, match="local_data was True and is False"):
            train(backend, resume=tmp_path / "run", **shorter, local_data=False)

    ms.run_in_threads(2, resume)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda rank: {"batch_size": 1}, "batch_size 1 is smaller than the number of ranks, 2"),
        (lambda rank: {"x_train": X[:0], "y_train": Y[:0]}, "x_train holds no samples on any"),
        (lambda rank: {"drop_last": True, "batch_size": 18}, "drop_last=True leaves no batch"),
        (lambda rank: {"local_data": rank == 0}, "local_data is True, False"),
        (lambda rank: {"x_train": X[:4, :4]} if rank else {}, "5"),
        (lambda rank: {"x_test": X[:0], "y_test": Y[:0]}, "x_test holds no samples on any of 2"),
    ],
)
@in_worlds(2)
def test_data_that_cannot_be_divided_are_refused_on_all_ranks(backend, options, message):
    with pytest.raises(ValueError, match=message):
        train(backend, **options(backend.rank))
    backend.barrier()  # the ranks are still in step


@in_worlds(2)
def test_without_local_data_empty_data_are_refused(backend):
    with pytest.raises(ValueError, match="x_train holds no samples"):
        train(backend, x_train=X[:0], y_train=Y[:0], local_data=False)
