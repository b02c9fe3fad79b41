"""Replicas that exchange codes: against a textbook version, and by the byte.

The textbook runs all ranks in one process, on whole vectors.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.errors import ShardingError
from mpishard.optimizers import SGD, Adam, LocalSGDOptimizer
from mpishard.testing.worlds import in_worlds

generator = np.random.default_rng(5)
X = generator.standard_normal((29, 6))
Y = np.sin(X[:, :3])
PERIOD = 6
LAYERS = [6, 8, 5, 3]  # a unit each: 56, 45 and 18 elements


def plain(layers=LAYERS):
    return nn.MLP(layers, activation="tanh", seed=2)


def build(backend, *, outer=False, rule=None, size=None, strategy="ddp", **given):
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1, replica_size=size)
    model = ms.as_distributed(plain(), config, strategy)
    rule = SGD(1e-3, momentum=0.9) if rule is None else rule
    nesterov = SGD(0.7, momentum=0.9, nesterov=True) if outer else None
    return model, LocalSGDOptimizer(rule, config, PERIOD, nesterov, strategy=strategy, **given)


def share(step, rank, size):
    """Return uneven batches, other ones in each step; in each fifth the last rank has none."""
    cuts = [k * 29 // size + (0 < k < size) for k in range(size + 1)]
    rows = np.random.default_rng(step).permutation(29)[cuts[rank] : cuts[rank + 1]]
    if step % 5 == 3 and rank == size - 1 > 0:
        rows = rows[:0]
    return X[rows], Y[rows]


def decoded(exchange, values, key):
    """Return ``values`` as they are after encoding and decoding."""
    if exchange is None or not values.size:
        return values
    if exchange != "int8":
        dtype = ml_dtypes.bfloat16 if exchange == "bfloat16" else np.float32
        return values.astype(dtype).astype(float)
    scale = np.abs(values).max() / 127
    drawn = np.random.default_rng(key).random(values.size, np.float32)
    return np.clip(np.floor(values / (scale or 1) + drawn), -127, 127) * scale


class Textbook:
    """All replicas of ``group`` ranks each, one after the other."""

    def __init__(self, units, world, exchange, outer, group=1, start=0):
        size = world // group
        self.units, self.size, self.exchange, self.group = units, size, exchange, group
        self.outer = outer
        self.model = plain()
        self.agreed = self.model.get_parameters()
        self.thetas = [self.agreed.copy() for _ in range(size)]
        self.velocities = [0 * self.agreed for _ in range(size)]
        self.momentum = 0 * self.agreed
        self.used = np.zeros(size)
        self.start = start  # steps; until then all agree every two

    def run(self, steps):
        for step in range(steps):
            for rank in range(self.size):
                ranks = range(rank * self.group, (rank + 1) * self.group)
                each = [share(step, one, self.size * self.group) for one in ranks]
                x, y = (np.concatenate(arrays) for arrays in zip(*each, strict=True))
                if len(x):
                    at = self.model.with_parameters(self.thetas[rank])
                    gradient = at.compute_loss_and_gradients(x, y)[1]
                    self.velocities[rank] = 0.9 * self.velocities[rank] + gradient
                    self.thetas[rank] = self.thetas[rank] - 1e-3 * self.velocities[rank]
                self.used[rank] += len(x)
            starts = step < self.start
            if (
                step % 2 == 1 or step + 1 == self.start
                if starts
                else (step + 1 - self.start) % PERIOD == 0
            ):
                self.exchanged(step + 1, self.outer and not starts)

    def exchanged(self, step, outer):
        weights, self.used = self.used, np.zeros(self.size)
        for unit in self.units:
            layout = ms.ShardLayout(unit.length, self.size)
            for owner in range(self.size):
                start = unit.start + layout.start(owner)
                place = slice(start, start + layout.size(owner))
                key = (step, unit.index, owner)
                old, change = self.agreed[place], 0
                for rank, theta in enumerate(self.thetas):
                    mine = (theta[place] - old) * weights[rank] / weights.sum()
                    change = change + decoded(self.exchange, mine, (*key, 1 + rank))
                if outer:
                    self.momentum[place] = 0.9 * self.momentum[place] - change
                    change = -0.7 * (-change + 0.9 * self.momentum[place])
                values = old + decoded(self.exchange, change, (*key, 0))
                for vector in (self.agreed, *self.thetas):
                    vector[place] = values


WAYS = [  # exchange, outer
    ("int8", False), ("int8", True), ("bfloat16", True), ("float32", False), (None, True),
]  # fmt: skip


@pytest.mark.parametrize(("exchange", "outer"), WAYS)
@in_worlds(2, 3)
def test_many_steps_are_the_textbooks(backend, exchange, outer):
    model, optimizer = build(backend, outer=outer, exchange=exchange)
    for step in range(50):
        optimizer.step(model, *share(step, backend.rank, backend.world_size))
    everyones = backend.all_gather(model.local_parameter_shard[None].copy())
    if backend.rank == 0:
        book = Textbook(model.units, backend.world_size, exchange, outer)
        book.run(50)
        np.testing.assert_allclose(everyones, book.thetas, rtol=0, atol=1e-12)
        assert np.abs(book.agreed - plain().get_parameters()).max() > 1e-3
    optimizer.settle()
    everyones = backend.all_gather(model.local_parameter_shard[None].copy())
    assert (everyones == everyones[0]).all()


@in_worlds(2, 3)
def test_replicas_agree_often_until_the_start_ends(backend, shared_path):
    given = {"exchange": "int8", "outer": True, "start_step": 7, "start_period": 2}

    def steps(model, optimizer, first, last):
        for step in range(first, last):
            optimizer.step(model, *share(step, backend.rank, backend.world_size))

    model, optimizer = build(backend, **given)
    steps(model, optimizer, 0, 4)
    ms.checkpoint.save(shared_path, model, optimizer)
    steps(model, optimizer, 4, 25)
    everyones = backend.all_gather(model.local_parameter_shard[None].copy())
    if backend.rank == 0:
        book = Textbook(model.units, backend.world_size, "int8", outer=True, start=7)
        book.run(25)
        np.testing.assert_allclose(everyones, book.thetas, rtol=0, atol=1e-12)
    again, other = build(backend, **given)
    ms.checkpoint.load(shared_path, again, other)
    steps(again, other, 4, 25)
    assert again.local_parameter_shard.tobytes() == model.local_parameter_shard.tobytes()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(2, 4)
def test_replicas_of_two_ranks_exchange_codes(backend, strategy):
    model, optimizer = build(backend, strategy=strategy, outer=True, exchange="bfloat16", size=2)
    for step in range(20):
        optimizer.step(model, *share(step, backend.rank, backend.world_size))
    book = Textbook(model.units, backend.world_size, "bfloat16", outer=True, group=2)
    book.run(20)
    mine = model.get_parameters()
    np.testing.assert_allclose(mine, book.thetas[backend.rank // 2], rtol=0, atol=1e-12)
    optimizer.settle()
    optimizer.settle()  # nothing is left
    settled = model.get_parameters()
    assert (backend.all_gather(settled[None]) == settled).all()


@pytest.mark.usefixtures("messages_only")
@pytest.mark.parametrize(("exchange", "width"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
@in_worlds(2, 3, 4)
def test_codes_travel_once_a_period(backend, exchange, width):
    model, optimizer = build(backend, exchange=exchange, outer=True)
    optimizer.bind(model)

    def sent(call):
        backend.traffic.reset()
        call()
        total = backend.traffic.total_bytes
        return int(backend.all_reduce(np.array([total]))[0])

    size = backend.world_size
    small = sent(lambda: backend.all_reduce(np.zeros(7)))
    weight = sent(lambda: backend.all_reduce(np.zeros(1)))
    found = [
        sent(lambda: optimizer.step(model, *share(step, backend.rank, size)))  # noqa: B023
        for step in range(2 * PERIOD)
    ]
    scales = 8 * size if exchange == "int8" else 0
    codes = [2 * (size - 1) * (width * unit.length + scales) for unit in model.units]
    expected = [0, 0, 0, 0, 0, sum(codes)] * 2
    assert [bytes_ - small - (weight if bytes_ > small else 0) for bytes_ in found] == expected


@pytest.mark.parametrize("exchange", [None, "int8"])
@in_worlds(1, 2, 3)
def test_a_run_goes_on_after_settling_with_the_same_bits(backend, exchange, shared_path):
    def steps(model, optimizer, first, last):
        for step in range(first, last):
            optimizer.step(model, *share(step, backend.rank, backend.world_size))

    given = {"rule": Adam(1e-3), "outer": True, "exchange": exchange}
    (model, optimizer), (again, other) = (build(backend, **given) for _ in range(2))
    steps(model, optimizer, 0, 5)
    if backend.world_size > 1:
        with pytest.raises(ShardingError, match=r"a checkpoint needs equal replicas"):
            ms.checkpoint.save(shared_path / "no", model, optimizer)
    optimizer.settle()
    ms.checkpoint.save(shared_path / "run", model, optimizer)
    steps(model, optimizer, 5, 16)
    ms.checkpoint.load(shared_path / "run", again, other)
    steps(again, other, 5, 16)
    assert again.local_parameter_shard.tobytes() == model.local_parameter_shard.tobytes()
    whole, third = build(backend, rule=Adam(1e-3), outer=True)
    ms.checkpoint.load(shared_path / "run", whole, third)  # others may be chosen
    steps(whole, third, 5, 12)


@in_worlds(1, 2)
def test_parameters_that_are_set_begin_the_cycle_anew(backend):
    made = [build(backend, rule=SGD(0.01), outer=True) for _ in range(2)]
    (model, optimizer), _ = made
    for step in range(3):
        optimizer.step(model, *share(step, backend.rank, backend.world_size))
    model.set_parameters(plain().get_parameters())
    optimizer.settle()  # nothing is to be done
    for step in range(8):
        for each, owner in made:
            owner.step(each, *share(step, backend.rank, backend.world_size))
    found = [each.get_parameters() for each, _ in made]
    assert (found[0] == found[1]).all()


@in_worlds(1, 2)
def test_arguments(backend):
    config = ms.ShardingConfiguration(backend)
    for given, error, match in (
        ({"exchange": "int4"}, ValueError, "exchange must be one of float32, bfloat16, int8"),
        ({"start_step": -1}, ValueError, "start_step must be 0 or more, got -1"),
        ({"start_period": 11}, ValueError, "start_period must be from 1 to .*, 10, got 11"),
    ):
        with pytest.raises(error, match=match):
            LocalSGDOptimizer(SGD(), config, **given)
