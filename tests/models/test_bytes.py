"""What a step sends is known to the byte, and how often it sends.

The table: all-reduce of S bytes over N ranks sends 2 (N - 1) S in all; full sharding sends
3 (N - 1) (S - K) + 2 (N - 1) K, where K bytes belong to units that are kept from forward to
backward: the last one, and the one whose weight is used again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpishard import nn
from mpishard.communication import CommunicationBackend
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

pytestmark = pytest.mark.usefixtures("messages_only")  # test_arena.py: what else is done

TOTALS = np.zeros(7)  # the one small all-reduce of a step, see Round.totals

by_kind = pytest.mark.parametrize("kind", ["mlp", "gpt", "tied"])
by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
by_unit_size = pytest.mark.parametrize("unit_size", [1, 60, 10**6])


def total(backend: CommunicationBackend, nbytes: int) -> int:
    """Sum over the ranks."""
    return int(backend.all_reduce(np.array([nbytes]))[0])


def bytes_of_totals(backend: CommunicationBackend) -> int:
    """Bytes that this rank sends in the small all-reduce of a step, measured."""
    backend.traffic.reset()
    backend.all_reduce(TOTALS.copy())
    return backend.traffic.total_bytes


def bytes_of_step(
    backend: CommunicationBackend, problems: Any, model: Any, optimizer: Any, kind: str
) -> int:
    """Bytes that this rank sends in the rest of a step; the same in every step."""
    totals = bytes_of_totals(backend)
    optimizer.bind(model)  # compares the ranks' rules, once
    sent = set()
    for step in range(3):
        backend.traffic.reset()
        optimizer.step(model, *problems.local_batch(backend, kind, step))
        sent.add(backend.traffic.total_bytes - totals)
    assert len(sent) == 1
    return sent.pop()


def sizes(model: Any, kind: str) -> tuple[int, int]:
    """S and K: written anew from the table, the last unit's bytes, and the tied embedding's."""
    kept = {model.units[-1]}
    if kind == "tied":
        start = model.parameter_entries[0].start
        kept |= {unit for unit in model.units if unit.start <= start < unit.stop}
    length = sum(unit.length for unit in kept)
    return model.parameter_count * model.dtype.itemsize, length * model.dtype.itemsize


@by_kind
@by_unit_size
@in_worlds(1, 2, 3, 4, 5, 8)
def test_full_sharding_gathers_twice_and_scatters_once(
    backend: Any, problems: Any, kind: str, unit_size: int
) -> None:
    model, optimizer = problems.build(backend, kind, "fsdp", "adamw", unit_size)
    sent = total(backend, bytes_of_step(backend, problems, model, optimizer, kind))
    n, (s, k) = backend.world_size, sizes(model, kind)
    assert sent == 3 * (n - 1) * (s - k) + 2 * (n - 1) * k


@by_kind
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@in_worlds(1, 2, 3, 4, 5, 8)
def test_whole_parameters_take_an_all_reduce_or_its_two_halves(
    backend: Any, problems: Any, kind: str, strategy: str
) -> None:
    model, optimizer = problems.build(backend, kind, strategy, "adamw", 60)
    sent = total(backend, bytes_of_step(backend, problems, model, optimizer, kind))
    assert sent == 2 * (backend.world_size - 1) * sizes(model, kind)[0]


@by_strategy
@in_worlds(1, 2, 3, 5)
def test_a_black_box_sends_as_much_as_data_parallelism(
    backend: Any, problems: Any, strategy: str
) -> None:
    model, optimizer = problems.build(backend, "function", strategy)
    sent = total(backend, bytes_of_step(backend, problems, model, optimizer, "function"))
    assert sent == 2 * (backend.world_size - 1) * sizes(model, "function")[0]


@by_kind
@by_unit_size
@by_strategy
@in_worlds(3)
def test_a_step_makes_no_collective_that_it_does_not_need(
    backend: Any, problems: Any, kind: str, unit_size: int, strategy: str
) -> None:
    model, optimizer = problems.build(backend, kind, strategy, "adamw", unit_size)
    optimizer.bind(model)
    before = backend._sequence
    optimizer.step(model, *problems.local_batch(backend, kind, 0))
    units = len(model.units)
    kept = min(units, 2 if kind == "tied" else 1)
    expected = {
        "ddp": units,  # all-reduces
        "zero1": 2 * units,  # reduce-scatters, and what publishes each unit
        "zero2": 2 * units,
        "fsdp": units + (units - kept) + units,
    }[strategy]
    assert backend._sequence - before == expected + 1


@by_strategy
@in_worlds(2, 4)
def test_ranks_send_equal_numbers_of_bytes_if_sizes_divide(
    backend: Any, problems: Any, strategy: str
) -> None:
    model_class, _ = problems.STRATEGIES[strategy]
    config = ShardingConfiguration(backend, minimum_parameter_group_size=1)
    model = model_class(nn.MLP([7, 8, 4]), config)  # units of 64 and 36 parameters
    totals = bytes_of_totals(backend)
    backend.traffic.reset()
    model.train(np.ones((1, 7)), np.ones((1, 4)))
    sent = backend.traffic.total_bytes - totals
    assert total(backend, sent) == backend.world_size * sent


@pytest.mark.parametrize(
    ("strategy", "defer", "gathers", "scatters"),
    [
        ("ddp", False, 0, 0),
        ("zero1", False, 0, 0),
        ("zero2", False, 0, 1),
        ("zero2", True, 0, 0),
        ("fsdp", True, 1, 0),
        ("fsdp", False, 1, 1),
    ],
)
@in_worlds(3)
def test_accumulation_reduces_at_once_only_what_is_sharded(
    backend: Any, problems: Any, strategy: str, defer: bool, gathers: int, scatters: int
) -> None:
    model, optimizer = problems.build(backend, "mlp", strategy)
    with model.accumulate(defer=defer):
        sent = total(backend, bytes_of_step(backend, problems, model, optimizer, "mlp"))
    s, k = sizes(model, "mlp")
    assert sent == (3 - 1) * (gathers * (2 * (s - k) + k) + scatters * s)
