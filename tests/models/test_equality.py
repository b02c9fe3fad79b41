"""Sharded training is single-process training, to 1e-12 in float64, on every rank.

The matrix of all that can be combined is large: what runs is a sample in which, on 3 ranks, all
pairs are met, and in other worlds all but those with a model, and with ``scripts/test.sh --full``
all of it. docs/proof.md has the figures.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from mpishard.communication import CommunicationBackend, run_in_threads
from mpishard.testing.worlds import in_worlds

WORLDS = (1, 2, 3, 4, 5, 8)
FACTORS: dict[str, tuple[Any, ...]] = {
    "strategy": ("ddp", "zero1", "zero2", "fsdp"),
    "rule": ("sgd", "adam", "adamw", "lamb"),
    "kind": (
        "mlp", "gpt", "tied", "conv", "dropout", "function", "black_box", "autograd", "tiny",
        "one_number",
    ),
    # Where memory is shared, where nothing is, and where only some ranks share theirs.
    "path": ("arena", "messages", "two nodes"),
    "accumulation": ("off", "on", "deferred"),
}  # fmt: skip
# Model, strategy, and what of it goes to host memory: for a stand-in a sample.
ALL = ("optimizer", "gradients", "parameters")
ON_A_GPU = [
    *(("gpt", strategy, ()) for strategy in ("ddp", "zero1", "zero2", "fsdp")),
    *(("function", strategy, ALL) for strategy in ("zero1", "zero2")),
    *(("mlp", "ddp", (name,)) for name in ALL),
    ("tied", "fsdp", ALL),
]
is_full = bool(os.environ.get("MPISHARD_TEST_FULL"))


def sample(world_size: int) -> list[tuple[Any, ...]]:
    """Combinations of the factors in which every two values of two factors meet.

    Always the one that has most pairs not yet met; which is first among equals differs from world
    to world, and with it the sample.
    """
    sizes = [len(values) for values in FACTORS.values()]
    choices = np.indices(sizes).reshape(len(sizes), -1).T
    choices = np.roll(choices, 997 * world_size, axis=0)
    pairs = np.stack(
        [  # each pair's number
            np.ravel_multi_index((choices[:, i], choices[:, j]), (sizes[i], sizes[j]))
            + 100 * (i * len(sizes) + j)
            for i, j in combinations(range(len(sizes)), 2)
        ]
    )
    is_new = np.ones(100 * len(sizes) ** 2, bool)
    rows = []
    while is_new[pairs].any():
        best = is_new[pairs].sum(axis=0).argmax()
        is_new[pairs[:, best]] = False
        rows.append([v[i] for v, i in zip(FACTORS.values(), choices[best], strict=True)])
    return [tuple(row) for row in rows]


def of_all_pairs_but_models(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows of a sample in which all pairs without a model meet, and every model occurs.

    For MPI, and for worlds of other sizes than 3.
    """
    chosen, met = [], set()
    for row in rows:
        values = dict(zip(FACTORS, row, strict=True))
        kind = values.pop("kind")
        new = {*combinations(values.items(), 2), kind} - met
        if new:
            chosen.append(row)
        met |= new
    return chosen


def matrix() -> list[Any]:
    def rows_of(world_size: int) -> Iterable[tuple[Any, ...]]:
        if is_full:
            return product(*FACTORS.values())
        rows = sample(world_size)
        return rows if world_size == 3 else of_all_pairs_but_models(rows)

    rows = [(w, *row) for w in WORLDS for row in rows_of(w)]
    if is_full:
        rows += [(w, *row) for w in (6, 7, 9, 16) for row in sample(w)]
    missing = importlib.util.find_spec("autograd") is None
    skipped = pytest.mark.skipif(missing, reason="pip install 'mpishard[autograd]'")
    # Under MPI four ranks, which are slow on fewer cores, run each other row of theirs.
    under_mpi = {
        (w, *row) for w in WORLDS for row in of_all_pairs_but_models(sample(w))[:: 1 + (w == 4)]
    }

    def marks(row: tuple[Any, ...]) -> list[Any]:
        is_left_out = not is_full and row not in under_mpi
        return [skipped] * ("autograd" in row) + [pytest.mark.threads_alone] * is_left_out

    return [pytest.param(*row, marks=marks(row)) for row in rows]


by_path = pytest.mark.parametrize("path", FACTORS["path"], indirect=True)
by_strategy = pytest.mark.parametrize("strategy", FACTORS["strategy"])
by_rule = pytest.mark.parametrize("rule", ["sgd", "adamw"])


def check(
    backend: CommunicationBackend, problems: Any, kind: str, strategy: str, rule: str,
    **options: Any,
) -> float:  # fmt: skip
    """Train twice in one world, which finds stale buffers; the second time without comparing.

    Three steps, and without looking two, which is one more than a buffer needs to be stale; with
    --full five. Returns the largest difference of any parameter.
    """
    expected = problems.train_sequentially(kind, problems.textbook(kind, rule))
    small, large = problems.UNIT_SIZES
    largest = 0.0
    for unit_size, watch in ((small, True), (large, False)):
        steps = 5 if is_full else 3 if watch else 2
        actual = problems.train_sharded(
            backend, kind, strategy, rule, unit_size, steps, watch=watch, **options
        )
        wanted = expected.parameters[:steps][-len(actual.parameters) :]
        problems.assert_equal(actual, problems.Reference(expected.losses[:steps], wanted))
        largest = max(largest, np.abs(np.subtract(actual.parameters, wanted)).max())
    return largest


@pytest.mark.parametrize(("world_size", *FACTORS), matrix(), indirect=["path"])
@in_worlds()
def test_equals_sequential_training(
    backend: Any, problems: Any, record_property: Any, main_device: str,
    strategy: str, rule: str, kind: str, path: str, accumulation: str,
) -> None:  # fmt: skip
    largest = check(
        backend, problems, kind, strategy, rule, device=main_device, accumulation=accumulation
    )
    record_property("largest difference of a parameter", float(largest))


@pytest.mark.parametrize(("kind", "strategy", "offload"), ON_A_GPU)
@in_worlds(3)
def test_on_a_gpu(
    backend: Any, problems: Any, kind: str, strategy: str, offload: Sequence[str], gpu: Any
) -> None:
    check(backend, problems, kind, strategy, "adamw", device="cuda", offload=offload)


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_sample_has_every_pair(world_size: int) -> None:
    rows = sample(world_size)
    for i, j in combinations(range(len(FACTORS)), 2):
        values = list(FACTORS.values())
        assert {(row[i], row[j]) for row in rows} == set(product(values[i], values[j]))
    assert len(rows) < 60  # of 1440; no fewer than 40 can have all kinds with all rules
    some = of_all_pairs_but_models(rows)
    assert {row[2] for row in some} == set(FACTORS["kind"])
    for i, j in combinations((0, 1, 3, 4), 2):
        assert {(row[i], row[j]) for row in some} == set(product(values[i], values[j]))
    assert rows == sample(world_size) != sample(world_size + 1)


@by_rule
@by_strategy
@in_worlds(3)
def test_clips_the_norm_of_all_ranks_together(
    backend: Any, problems: Any, rule: str, strategy: str, main_device: str
) -> None:
    limit = 0.05
    factors = []

    def clipped(g: Any) -> Any:
        factors.append(min(1.0, limit / np.linalg.norm(g)))
        return g * factors[-1]

    expected = problems.train_sequentially("gpt", problems.TEXTBOOK[rule], transform=clipped)
    assert max(factors) < 1  # else nothing is clipped, and the test sees nothing
    actual = problems.train_sharded(
        backend,
        "gpt",
        strategy,
        rule,
        1,
        rule_options={"clip_global_norm": limit},
        device=main_device,
    )
    problems.assert_equal(actual, expected)


@by_strategy
@in_worlds(1, 2, 5)
def test_options_follow_the_parameters_wherever_they_are_cut(
    backend: Any, problems: Any, strategy: str, main_device: str
) -> None:
    table = problems.MODELS["mlp"](0).parameter_table
    decay, scale = np.full(table.length, 0.1), np.ones(table.length)
    for entry in table.entries:
        if entry.name.endswith(".bias"):
            decay[entry.start : entry.stop] = 0
        if entry.name.startswith("linear1."):
            scale[entry.start : entry.stop] = 0.25

    def update(theta: Any, g: Any, state: Any, step: int) -> Any:
        moved = problems.adamw(theta, g, state, step, decay=decay)
        return theta + scale * (moved - theta)

    options = {"*.bias": {"weight_decay": 0.0}, "linear1.*": {"learning_rate_scale": 0.25}}
    actual = problems.train_sharded(
        backend,
        "mlp",
        strategy,
        "adamw",
        60,
        rule_options={"parameter_options": options},
        device=main_device,
    )
    problems.assert_equal(actual, problems.train_sequentially("mlp", update))


def bits_of(run: Any) -> Any:
    return np.array(run.parameters).tobytes(), tuple(run.losses)


_bits_on_threads: dict[tuple[str, int], Any] = {}


@pytest.fixture
def bits_on_threads(problems: Any, kind: str, world_size: int, path: str) -> Any:
    """Results on threads, computed by the first path that needs them."""
    if (kind, world_size) not in _bits_on_threads:
        runs = run_in_threads(
            world_size, problems.train_sharded, kind, "fsdp", "adamw", 60, steps=3
        )
        (_bits_on_threads[kind, world_size],) = {bits_of(run) for run in runs}
    return _bits_on_threads[kind, world_size]


@pytest.mark.parametrize("kind", ["mlp", "gpt", "tied", "conv", "dropout", "function"])
@by_path
@in_worlds(2, 3, 4)
def test_same_bits_in_every_run_on_every_backend_path_and_strategy(
    backend: Any, problems: Any, kind: str, path: str, bits_on_threads: Any
) -> None:
    for strategy in ("fsdp", "zero3", "ddp", "zero1", "zero2"):
        run = problems.train_sharded(backend, kind, strategy, "adamw", 60, steps=3)
        assert bits_of(run) == bits_on_threads, strategy


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_thread_ranks_may_share_a_rule(problems: Any, strategy: str) -> None:
    rule = problems.RULES["adamw"]()
    expected = problems.train_sequentially("mlp", problems.TEXTBOOK["adamw"])

    def train(backend: CommunicationBackend) -> None:
        model, _ = problems.build(backend, "mlp", strategy)
        optimizer = problems.STRATEGIES[strategy][1](rule, model.sharding_configuration)
        for step in range(5):
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        gathered = model.gather_full_parameters()
        np.testing.assert_allclose(gathered, expected.parameters[-1], rtol=0, atol=1e-12)

    run_in_threads(4, train)
