"""Sharded training is single-process training, to 1e-12 in float64, on every rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mpishard.communication import CommunicationBackend, run_in_threads
from mpishard.testing.worlds import in_worlds

KINDS = ("mlp", "gpt", "tied", "function")

# Model, strategy, and what of it goes to host memory: for a stand-in a sample.
ALL = ("optimizer", "gradients", "parameters")
ON_A_GPU = [
    *(("gpt", strategy, ()) for strategy in ("ddp", "zero1", "zero2", "fsdp")),
    *(("function", strategy, ALL) for strategy in ("ddp", "zero1", "zero2", "fsdp")),
    *(("mlp", strategy, (name,)) for strategy in ("ddp", "fsdp") for name in ALL),
    ("tied", "fsdp", ALL),
]

# scripts/test.sh --full
MORE_WORLDS = (6, 7, 9, 16) if os.environ.get("MPISHARD_TEST_FULL") else ()

# Where memory is shared, where nothing is, and where only some ranks share theirs.
by_path = pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)
by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
by_rule = pytest.mark.parametrize("rule", ["sgd", "adamw"])


def check(
    backend: CommunicationBackend,
    problems: Any,
    kind: str,
    strategy: str,
    rule: str,
    device: str,
    offload: Sequence[str] = (),
) -> None:
    """Twice in one world, which finds buffers that are stale; the second time without looking."""
    expected = problems.train_sequentially(kind, problems.TEXTBOOK[rule])
    small, large = problems.UNIT_SIZES
    for unit_size, watch in ((small, True), (large, False)):
        actual = problems.train_sharded(
            backend, kind, strategy, rule, unit_size, watch=watch, device=device, offload=offload
        )
        problems.assert_equal(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
@by_rule
@by_strategy
@by_path
@in_worlds(1, 2, 3, 4, 5, 8, *MORE_WORLDS)
def test_equals_sequential_training(
    backend: Any, problems: Any, kind: str, rule: str, strategy: str, path: str, main_device: str
) -> None:
    check(backend, problems, kind, strategy, rule, main_device)


@pytest.mark.parametrize(("kind", "strategy", "offload"), ON_A_GPU)
@in_worlds(3)
def test_on_a_gpu(
    backend: Any, problems: Any, kind: str, strategy: str, offload: Sequence[str], gpu: Any
) -> None:
    check(backend, problems, kind, strategy, "adamw", "cuda", offload)


@pytest.mark.parametrize("kind", ["tiny", "one_number"])
@by_strategy
@by_path
@in_worlds(2, 4, 5)
def test_more_ranks_than_parameters_in_a_unit(
    backend: Any, problems: Any, kind: str, strategy: str, path: str, main_device: str
) -> None:
    check(backend, problems, kind, strategy, "adamw", main_device)


@by_rule
@by_strategy
@in_worlds(1, 3)
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
        backend, "gpt", strategy, rule, 1, rule_options={"clip_global_norm": limit},
        device=main_device,
    )  # fmt: skip
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
        backend, "mlp", strategy, "adamw", 60, rule_options={"parameter_options": options},
        device=main_device,
    )  # fmt: skip
    problems.assert_equal(actual, problems.train_sequentially("mlp", update))


@pytest.mark.parametrize("kind", KINDS)
@by_path
@in_worlds(2, 3, 4)
def test_same_bits_in_every_run_on_every_backend_path_and_strategy(
    backend: Any, problems: Any, kind: str, path: str, monkeypatch: Any
) -> None:
    runs = [
        problems.train_sharded(backend, kind, strategy, "adamw", 60, steps=3)
        for strategy in ("fsdp", "fsdp", "ddp", "zero1", "zero2")
    ]
    others = []
    for name, value in (("VIRTUAL_NODES", "2"), ("VIRTUAL_NODES", "1"), ("ARENA", "off")):
        backend.barrier()  # thread-ranks share the environment
        monkeypatch.setenv(f"MPISHARD_{name}", value)
        backend.barrier()
        others += run_in_threads(
            backend.world_size, problems.train_sharded, kind, "fsdp", "adamw", 60, steps=3
        )
    first = np.array(runs[0].parameters).tobytes()
    for run in (*runs, *others):
        assert np.array(run.parameters).tobytes() == first
        assert run.losses == runs[0].losses


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
