"""Training on a mesh is single-process training, to 1e-12 in float64, on every rank.

Every mesh of up to 8 ranks, every schedule, both halves of backward, recomputation, micro-batches
that do not divide the batch: what runs is a sample of all pairs, and with ``scripts/test.sh
--full`` one of all pairs in every world, and every mesh with every schedule, model, rule and
recomputation. docs/proof.md has the figures.
"""

from __future__ import annotations

import functools
import os
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from mpishard import nn
from mpishard.base.arrays import to_host
from mpishard.communication import CommunicationBackend
from mpishard.models import HybridShardedModel
from mpishard.optimizers import HybridShardedOptimizer
from mpishard.pipeline import ActivationCheckpointConfig, RecomputeStrategy
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

WORLDS = (1, 2, 3, 4, 5, 6, 7, 8)
RECOMPUTE = {
    "off": None,
    "full": ActivationCheckpointConfig(
        enabled=True, checkpoint_every_n_layers=2, recompute_strategy=RecomputeStrategy.FULL
    ),
    "selective": ActivationCheckpointConfig(
        enabled=True, recompute_strategy=RecomputeStrategy.SELECTIVE
    ),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "schedule": ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v"),
    "kind": ("mlp", "gpt", "tied", "dropout", "conv"),
    "data": ("ddp", "zero1", "zero2", "fsdp"),
    "rule": ("sgd", "adam", "adamw", "lamb"),
    "micro_batches": (1, 3, 4),
    "recompute": tuple(RECOMPUTE),
    "sequence": (False, True),
    "path": ("arena", "messages", "two nodes"),
    "accumulation": ("off", "on", "deferred"),
}
is_full = bool(os.environ.get("MPISHARD_TEST_FULL"))


def meshes(world_size: int) -> list[tuple[int, int, int]]:
    """All (pipeline, tensor, data) that make up a world."""
    sizes = range(1, world_size + 1)
    return [m for m in product(sizes, repeat=3) if np.prod(m) == world_size]


AXES = ("pipeline", "tensor", "replicas")
NAMES = (*AXES, "divided", *FACTORS)
# What the size of an axis decides most, and which axes are divided at all: they meet these.
DECIDES = {
    "pipeline": ("tensor", "schedule"),
    "tensor": ("replicas", "kind", "sequence"),
    "replicas": ("pipeline", "data", "rule"),
}
MESHES_OF_A_WORLD = [(a, names[0]) for a, names in DECIDES.items()]
OF_A_WORLD = [(a, b) for a, names in DECIDES.items() for b in names]
OF_ALL_WORLDS = [
    *(("divided", name) for name in ("schedule", "kind", "data")),
    *((a, b) for a, b in OF_A_WORLD if b in FACTORS),
    *combinations(FACTORS, 2),
]


def pair_numbers(rows: Any, names: list[tuple[str, str]]) -> Any:
    """A number for each pair of values in each row; 0 where a value does nothing in its row."""
    column = dict(zip(NAMES, rows.T, strict=True))
    of_tokens = np.isin(column["kind"], [FACTORS["kind"].index(kind) for kind in ("gpt", "tied")])
    cuts_sequences = (column["tensor"] > 1) & (6 % column["tensor"] == 0) & of_tokens
    idle = {
        # One rank has nobody to wait for, and one replica has nothing to share.
        "schedule": column["pipeline"] == 1,
        "data": column["replicas"] == 1,
        "sequence": (column["sequence"] == 1) & ~cuts_sequences,
    }
    numbers = []
    for a, b in names:
        number = 0
        for value in (NAMES.index(a), NAMES.index(b), column[a], column[b]):
            number = 16 * number + value
        numbers.append(np.where(idle.get(a, False) | idle.get(b, False), 0, number))
    return np.array(numbers).T


def candidates(world_size: int) -> Any:
    """Rows drawn with the world's number as seed: sizes of the axes, and places in FACTORS."""
    generator = np.random.default_rng(world_size)
    drawn = [generator.integers(len(values), size=1000) for values in FACTORS.values()]
    mesh = generator.choice(meshes(world_size), 1000)
    divided = (mesh > 1) @ (1, 2, 4)
    return np.column_stack([mesh, divided, *drawn])


def costs(rows: Any) -> Any:
    """Estimate the processor time of each row, in multiples of the cheapest row of one rank."""
    column = dict(zip(NAMES, rows.T, strict=True))
    of_tokens = np.isin(column["kind"], [FACTORS["kind"].index(kind) for kind in ("gpt", "tied")])
    batches = np.where(column["accumulation"] == 0, 1, 2)  # three, each a third as large
    micro_batches = np.array(FACTORS["micro_batches"])[column["micro_batches"]] ** 0.4
    ranks = column["pipeline"] * column["tensor"] * column["replicas"]
    return ranks * (1 + of_tokens) * batches * micro_batches * (1 + 0.5 * (column["tensor"] > 1))


@functools.cache
def sample() -> tuple[list[tuple[Any, ...]], int]:
    """Rows in which all effective pairs meet, and their number in each world alone.

    In each world there is every mesh, and in those that run under MPI too every size of an axis
    meets what it decides. In all worlds together that is so of every size, and of the axes that
    are divided together, and every two values of two factors meet. Greedily: always the candidate
    in which most pairs meet that have not yet met, for its cost.
    """
    drawn = {w: candidates(w) for w in WORLDS}
    cost = {w: costs(rows) for w, rows in drawn.items()}
    shared = {w: pair_numbers(rows, OF_ALL_WORLDS) for w, rows in drawn.items()}
    missing = np.zeros(16**4, bool)
    for w, numbers in shared.items():
        missing[numbers] |= w != 7  # which divides as 5 does
    missing[0] = False
    chosen = []

    def choose(world_size: int, best: int) -> None:
        missing[shared[world_size][best]] = False
        sizes, places = np.split(drawn[world_size][best], [len(AXES) + 1])
        values = [v[place] for v, place in zip(FACTORS.values(), places, strict=True)]
        chosen.append((world_size, tuple(map(int, sizes[:-1])), *values))

    for w, rows in drawn.items():
        own = pair_numbers(rows, OF_A_WORLD if w in (2, 3, 4) else MESHES_OF_A_WORLD)
        missing_here = np.zeros(16**4, bool)
        missing_here[own] = True
        missing_here[0] = False
        while (gain := missing_here[own].sum(axis=1)).any():
            both = np.where(gain, 100 * gain + missing[shared[w]].sum(axis=1), 0)
            best = (both / cost[w]).argmax()
            missing_here[own[best]] = False
            choose(w, best)
    of_each_world = len(chosen)
    # Where it costs least: 4 has most rows of its own, and of more ranks only a third of them run.
    cost |= {w: 3 * cost[w] for w in WORLDS if w > 4}
    while missing.any():
        gains = {w: missing[shared[w]].sum(axis=1) / cost[w] for w in WORLDS if w != 4}
        w = max(gains, key=lambda w: gains[w].max())
        choose(w, gains[w].argmax())
    return chosen, of_each_world


def every_pair(world_size: int) -> list[tuple[Any, ...]]:
    """With --full: rows in which, in every world, all pairs meet, those with a mesh too.

    Greedily, from candidates that are drawn with the world's number as seed.
    """
    values = [meshes(world_size), *FACTORS.values()]
    generator = np.random.default_rng(world_size)
    missing = {
        (i, a, j, b)
        for i, j in combinations(range(len(values)), 2)
        for a in range(len(values[i]))
        for b in range(len(values[j]))
        # One rank has nobody to wait for: there all schedules do the same in another order.
        if not (i == 0 and j == 1 and values[0][a][0] == 1)
        # Worlds that divide in no way of their own: each mesh with what decides most.
        and (world_size not in (1, 5, 7) or j == 1 or (i, j) == (2, 6))
    }
    rows = []
    while missing:
        i, a, j, b = min(missing)
        best: tuple[int, ...] = ()
        gain: set[Any] = set()
        for _ in range(20):
            row = [int(generator.integers(len(v))) for v in values]
            row[i], row[j] = a, b
            met = {(k, row[k], m, row[m]) for k, m in combinations(range(len(row)), 2)} & missing
            if len(met) > len(gain):
                best, gain = tuple(row), met
        missing -= gain
        rows.append(tuple(v[place] for v, place in zip(values, best, strict=True)))
    return rows


# With --full: whatever the others are, which take turns.
WHOLE: dict[str, tuple[Any, ...]] = FACTORS | {
    "kind": ("mlp", "tied"),
    "rule": ("sgd", "adam"),
    "recompute": ("off", "full"),
}
TAKING_TURNS = ("data", "micro_batches", "sequence", "path", "accumulation")


def product_of(world_size: int) -> list[tuple[Any, ...]]:
    """Every mesh with every schedule, with and without recomputation, by model and rule."""
    factors = {name: v for name, v in WHOLE.items() if name not in TAKING_TURNS}
    rows = []
    for number, (mesh, *chosen) in enumerate(product(meshes(world_size), *factors.values())):
        row = dict(zip(factors, chosen, strict=True))
        # Numbers without a common factor, so that all of them meet.
        for stride, name in zip((1, 5, 7, 11, 13), TAKING_TURNS, strict=True):
            row[name] = FACTORS[name][number // stride % len(FACTORS[name])]
        rows.append((mesh, *(row[name] for name in FACTORS)))
    return rows


def matrix() -> list[Any]:
    if is_full:
        return [(w, *row) for w in WORLDS for row in (*every_pair(w), *product_of(w))]
    # Threads run the whole sample; MPI ranks, which may be more than cores, each other row of those
    # that their world has alone.
    rows, of_each_world = sample()
    under_mpi = {
        row for w in (2, 3, 4) for row in [row for row in rows[:of_each_world] if row[0] == w][::2]
    }
    marks = {row: [pytest.mark.threads_alone] for row in rows if row not in under_mpi}
    return [pytest.param(*row, marks=marks.get(row, ())) for row in rows]


def build(
    backend: CommunicationBackend,
    problems: Any,
    kind: str,
    mesh: tuple[int, int, int],
    rule: str = "sgd",
    unit_size: int = 1,
    rule_options: Any = None,
    device: str = "cpu",
    **options: Any,
) -> tuple[Any, Any]:
    config = ShardingConfiguration(backend, minimum_parameter_group_size=unit_size)
    plain = problems.MODELS[kind](backend.rank, device)
    model = HybridShardedModel(plain, config, *mesh, **options)
    optimizer = HybridShardedOptimizer(problems.RULES[rule](**(rule_options or {})), config, *mesh)
    return model, optimizer


def local_batch(
    model: Any, problems: Any, kind: str, step: int, part: int = 0, of: int = 1
) -> tuple[Any, Any]:
    """Samples of the data rank in the global batch, or in a part of it."""
    x, y = problems.batch(kind, step)
    start, stop = (len(x) * index // of for index in (part, part + 1))
    x, y = x[start:stop], y[start:stop]
    mine = problems.part(len(x), of * step + part, model.data_rank, model.data_size)
    return x[mine], y[mine]


def update_once(
    model: Any, optimizer: Any, problems: Any, kind: str, step: int, accumulation: str
) -> float:
    if accumulation == "off":
        return float(optimizer.step(model, *local_batch(model, problems, kind, step)))
    with model.accumulate(defer=accumulation == "deferred"):
        for part in (0, 1):
            optimizer.step(model, *local_batch(model, problems, kind, step, part, 3))
    return float(optimizer.step(model, *local_batch(model, problems, kind, step, 2, 3)))


def check(
    backend: CommunicationBackend,
    problems: Any,
    kind: str,
    mesh: tuple[int, int, int],
    rule: str,
    accumulation: str = "off",
    **options: Any,
) -> float:
    """Train twice in one world, which finds stale buffers; return the largest difference.

    Three steps, with each layer a unit, and five with --full; then two, with large units, and
    nobody looks between them.
    """
    expected = problems.train_sequentially(kind, problems.textbook(kind, rule))
    largest = 0.0
    for unit_size in problems.UNIT_SIZES:
        model, optimizer = build(backend, problems, kind, mesh, rule, unit_size, **options)
        steps = 2 if unit_size > 1 else 5 if is_full else 3
        for step in range(steps):
            loss = update_once(model, optimizer, problems, kind, step, accumulation)
            np.testing.assert_allclose(loss, expected.losses[step], rtol=0, atol=1e-12)
            if unit_size == 1 or step == steps - 1:
                actual = to_host(model.gather_full_parameters())
                np.testing.assert_allclose(actual, expected.parameters[step], rtol=0, atol=1e-12)
                largest = max(largest, np.abs(actual - expected.parameters[step]).max())
    return largest


@pytest.mark.parametrize(("world_size", "mesh", *FACTORS), matrix(), indirect=["path"])
@in_worlds()
def test_equals_sequential_training(
    backend: Any, problems: Any, record_property: Any, mesh: Any, schedule: str, kind: str,
    data: str, rule: str, micro_batches: int, recompute: str, sequence: bool, path: str,
    accumulation: str,
) -> None:  # fmt: skip
    largest = check(
        backend, problems, kind, mesh, rule, accumulation,
        schedule=schedule, micro_batch_count=micro_batches, data_parallel_strategy=data,
        checkpoint_config=RECOMPUTE[recompute],
        # Sequences alone can be cut so, and into equal parts.
        sequence_parallel=sequence and kind in ("gpt", "tied") and 6 % mesh[1] == 0,
    )  # fmt: skip
    record_property("largest difference of a parameter", float(largest))


def test_the_sample_has_every_pair() -> None:
    rows = [dict(zip(("world", "mesh", *FACTORS), row, strict=True)) for row in sample()[0]]
    for a, b in combinations(FACTORS, 2):
        expected = set(product(FACTORS[a], FACTORS[b]))
        if {a, b} == {"kind", "sequence"}:
            expected -= {(kind, True) for kind in ("mlp", "dropout", "conv")}
        does_something = [row for row in rows if not _is_idle(row, a) and not _is_idle(row, b)]
        assert {(row[a], row[b]) for row in does_something} == expected, (a, b)
    for worlds in (*([world] for world in WORLDS), [w for w in WORLDS if w != 7]):
        here = [row for row in rows if row["world"] in worlds]
        expected = {mesh for world in worlds for mesh in meshes(world)}
        assert {row["mesh"] for row in here} == expected
        if worlds in ([1], [5], [6], [7], [8]):
            continue
        for axis, names in enumerate((("schedule",), ("kind",), ("data", "rule"))):
            for name in names:
                met = {(r["mesh"][axis], r[name]) for r in here if not _is_idle(r, name)}
                idle = {1} if name in ("schedule", "data") else set()
                sizes = {mesh[axis] for mesh in expected} - idle
                assert met == set(product(sizes, FACTORS[name])), (worlds, name)


def _is_idle(row: dict[str, Any], name: str) -> bool:
    """Whether a value does nothing in its row: no stages, no replicas, no slices of sequences."""
    pipeline, tensor, replicas = row["mesh"]
    is_cut = row["kind"] in ("gpt", "tied") and tensor > 1 and 6 % tensor == 0
    return {
        "schedule": pipeline == 1,
        "data": replicas == 1,
        "sequence": row["sequence"] and not is_cut,
    }.get(name, False)


@pytest.mark.parametrize(
    ("mesh", "kind", "options"),
    [
        ((2, 2, 1), "tied", {"schedule": "zb-h1", "micro_batch_count": 3}),
        ((1, 2, 2), "gpt", {"sequence_parallel": True, "data_parallel_strategy": "fsdp"}),
        ((2, 1, 2), "dropout", {"schedule": "zb-v", "checkpoint_config": RECOMPUTE["full"]}),
    ],
)
@in_worlds(4)
def test_on_a_gpu(
    backend: Any, problems: Any, mesh: Any, kind: str, options: Any, gpu: Any
) -> None:
    check(backend, problems, kind, mesh, "adamw", device="cuda", **options)


class _Shifted(nn.Layer):
    """A layer that returns tokens, which no message between stages can carry."""

    takes_integers = True

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return input_shape

    def forward(self, p: Any, x: Any, context: Any) -> tuple[Any, Any]:
        return (x + 1) % 7, None

    def backward_input(self, p: Any, saved: Any, dy: Any) -> tuple[Any, Any]:
        return None, None


@in_worlds(2, 3)
def test_no_stage_begins_with_tokens_of_another(backend: Any) -> None:
    def plain() -> nn.Model:
        chain = nn.Sequential(_Shifted(), nn.Embedding(7, 4), nn.Tanh(), nn.Linear(4, 7))
        return nn.Model(chain, nn.CrossEntropy(), input_shape=(3,), seed=1)

    tokens = np.random.default_rng(0).integers(0, 7, (6, 3))
    config = ShardingConfiguration(backend, learning_rate=0.1)
    model = HybridShardedModel(plain(), config, backend.world_size, micro_batch_count=2)
    assert model.stage_layers[1][0] >= 2
    alone = plain()
    for _ in range(3):
        loss = alone.train(tokens, tokens, 0.1)
        assert abs(model.train(tokens, tokens) - loss) < 1e-12
    np.testing.assert_allclose(model.get_parameters(), alone.get_parameters(), rtol=0, atol=1e-12)


class _Sum(nn.Layer):
    """One number for a sample, which has no dim that could be split."""

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return ()

    def forward(self, p: Any, x: Any, context: Any) -> tuple[Any, Any]:
        return x.sum(axis=1), x.shape

    def backward_input(self, p: Any, saved: Any, dy: Any) -> tuple[Any, Any]:
        return np.broadcast_to(dy[:, None], saved).copy(), None


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1)])
@in_worlds(2)
def test_a_sample_may_come_out_as_one_number(backend: Any, mesh: tuple[int, int, int]) -> None:
    def plain() -> nn.Model:
        chain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), _Sum())
        return nn.Model(chain, nn.MSE(), input_shape=(3,), seed=1)

    x = np.random.default_rng(0).standard_normal((6, 3))
    config = ShardingConfiguration(backend, learning_rate=0.1)
    model, alone = HybridShardedModel(plain(), config, *mesh, micro_batch_count=2), plain()
    for _ in range(3):
        assert abs(model.train(x, x[:, 0]) - alone.train(x, x[:, 0], 0.1)) < 1e-12
    np.testing.assert_allclose(model.get_parameters(), alone.get_parameters(), rtol=0, atol=1e-12)
