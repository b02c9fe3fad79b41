"""Bytes of a rank: the ledger has those of the ZeRO formulae, tracemalloc those of the ledger."""

from __future__ import annotations

import tracemalloc
from typing import Any, Self

import numpy as np
import pytest

from mpishard import nn
from mpishard.base.arrays import reuse_freed_memory
from mpishard.base.layout import ShardLayout
from mpishard.communication import CommunicationBackend, run_in_threads
from mpishard.models import FSDPModel
from mpishard.observe.ledger import MemoryCategory, MemoryLedger
from mpishard.optimizers import AdamW, FSDPOptimizer
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

pytestmark = pytest.mark.usefixtures("messages_only")  # test_arena.py: what else is done

PARAMETERS = MemoryCategory.PARAMETERS
GRADIENTS = MemoryCategory.GRADIENTS
STATE = MemoryCategory.OPTIMIZER_STATE
GATHERED = MemoryCategory.GATHERED
FULL_GRADIENTS = MemoryCategory.FULL_GRADIENTS

by_kind = pytest.mark.parametrize("kind", ["mlp", "gpt", "tied"])
by_unit_size = pytest.mark.parametrize("unit_size", [1, 60, 10**6])


def shard_bytes(model: Any) -> int:
    """This rank's part of each unit, from the definition of a layout."""
    lengths = (ShardLayout(unit.length, model.world_size).size(model.rank) for unit in model.units)
    return sum(lengths) * model.dtype.itemsize


def unit_bytes(model: Any, kind: str) -> tuple[int, int, int]:
    """Bytes of the kept units, of the largest passing one, and of the largest of all."""
    first = model.parameter_entries[0].start
    kept = {
        unit.index
        for unit in model.units
        if unit is model.units[-1] or (kind == "tied" and unit.start <= first < unit.stop)
    }
    width = model.dtype.itemsize
    return (
        sum(unit.length for unit in model.units if unit.index in kept) * width,
        max((u.length for u in model.units if u.index not in kept), default=0) * width,
        max(unit.length for unit in model.units) * width,
    )


def steps(
    backend: CommunicationBackend, problems: Any, model: Any, optimizer: Any, kind: str
) -> None:
    for step in range(3):
        optimizer.step(model, *problems.local_batch(backend, kind, step))


@by_kind
@by_unit_size
@in_worlds(1, 2, 3, 5, 8)
def test_full_sharding_holds_its_shard_and_the_units_in_use(
    backend: Any, problems: Any, kind: str, unit_size: int
) -> None:
    model, optimizer = problems.build(backend, kind, "fsdp", "adamw", unit_size)
    memory, shard = model.memory, shard_bytes(model)
    assert memory.as_dict() == ({"parameters": shard} if shard else {})
    assert memory.peak(GATHERED) == memory.peak(FULL_GRADIENTS) == 0
    steps(backend, problems, model, optimizer, kind)
    kept, passing, largest = unit_bytes(model, kind)
    for category, copies in ((PARAMETERS, 1), (GRADIENTS, 1), (STATE, 2)):
        assert memory.held(category) == memory.peak(category) == copies * shard
    assert memory.peak(GATHERED) <= kept + 2 * passing
    assert memory.peak(FULL_GRADIENTS) <= 2 * largest
    assert memory.held(MemoryCategory.SCRATCH) == 0


@by_kind
@in_worlds(1, 3)
def test_data_parallelism_holds_everything_once(backend: Any, problems: Any, kind: str) -> None:
    model, optimizer = problems.build(backend, kind, "ddp", "adamw", 1)
    whole = model.parameter_count * model.dtype.itemsize
    assert model.memory.as_dict() == {"parameters": whole}
    steps(backend, problems, model, optimizer, kind)
    expected = {"parameters": whole, "gradients": whole, "optimizer_state": 2 * whole}
    assert model.memory.as_dict() == expected


# Rajbhandari et al., SC 2020, figure 1 and section 5: what each stage holds whole.
STAGES = {
    "ddp": ("parameters", "gradients", "optimizer_state"),
    "zero1": ("parameters", "gradients"),
    "zero2": ("parameters",),
    "fsdp": (),
}


@by_kind
@pytest.mark.parametrize("strategy", STAGES)
@in_worlds(1, 2, 3, 5)
def test_each_stage_holds_what_the_table_says(
    backend: Any, problems: Any, kind: str, strategy: str
) -> None:
    model, optimizer = problems.build(backend, kind, strategy, "adamw", 1)
    steps(backend, problems, model, optimizer, kind)
    whole, shard = model.parameter_count * model.dtype.itemsize, shard_bytes(model)
    held = model.memory.as_dict()
    for category, copies in (("parameters", 1), ("gradients", 1), ("optimizer_state", 2)):
        of_each = whole if category in STAGES[strategy] else shard
        assert held.pop(category) == copies * of_each
    # Beside the table: units in use, and a unit's gradient before it is reduced.
    assert set(held) <= {"gathered", "full_gradients"}
    assert ("full_gradients" in held) == (strategy in ("zero2", "fsdp"))
    assert ("gathered" in held) == (strategy == "fsdp")


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@in_worlds(2, 3, 4)
def test_each_node_holds_all_parameters_once(
    backend: Any, problems: Any, strategy: str, monkeypatch: Any
) -> None:
    backend.barrier()
    monkeypatch.setenv("MPISHARD_ARENA", "auto")
    monkeypatch.setenv("MPISHARD_VIRTUAL_NODES", "2")
    backend.barrier()

    def train(rank: CommunicationBackend) -> tuple[int, int]:
        model, _ = problems.build(rank, "mlp", strategy, unit_size=1)
        return rank.nodes[rank.rank], model.memory.held(PARAMETERS)

    held = [0, 0]
    for node, nbytes in run_in_threads(backend.world_size, train):
        held[node] += nbytes
    assert held == [8 * problems.MODELS["mlp"](0).parameter_count] * 2
    backend.barrier()


@in_worlds(1, 2, 5)
def test_gradients_and_state_of_a_black_box_are_sharded(backend: Any, problems: Any) -> None:
    model, optimizer = problems.build(backend, "function", "fsdp", "adamw")
    steps(backend, problems, model, optimizer, "function")
    shard = shard_bytes(model)
    assert model.memory.held(PARAMETERS) == model.parameter_count * 8
    assert model.memory.held(GRADIENTS) == shard
    assert model.memory.held(STATE) == 2 * shard


@in_worlds(2, 3)
def test_the_full_gradient_never_exists(backend: Any) -> None:
    config = ShardingConfiguration(backend, minimum_parameter_group_size=1)
    model = FSDPModel(nn.MLP([8] * 13), config)  # 12 units of 72 parameters
    optimizer = FSDPOptimizer(AdamW(), config)
    for _ in range(2):
        optimizer.step(model, np.ones((2, 8)), np.ones((2, 8)))
        with model.accumulate():
            optimizer.step(model, np.ones((2, 8)), np.ones((2, 8)))
    whole, unit = model.parameter_count * 8, 72 * 8
    assert len(model.units) == 12
    assert model.memory.peak(FULL_GRADIENTS) == 2 * unit
    assert model.memory.peak(GATHERED) == (1 + 2) * unit
    held = model.memory.peak(FULL_GRADIENTS) + model.memory.peak(GRADIENTS)
    assert held == 2 * unit + shard_bytes(model) < whole


def test_a_failed_step_leaves_no_more_memory_behind_than_a_good_one(problems: Any) -> None:
    def train(backend: CommunicationBackend) -> None:
        model, optimizer = problems.build(backend, "mlp", "fsdp", "adamw")
        steps(backend, problems, model, optimizer, "mlp")
        good = model.memory.total
        x, y = problems.batch("mlp", 0)
        for _ in range(5):
            with pytest.raises(ArithmeticError):
                optimizer.step(model, x * np.nan, y)
        assert model.memory.total <= good
        steps(backend, problems, model, optimizer, "mlp")
        assert model.memory.total == good

    run_in_threads(2, train)


# ------------------------------------------------------------------------ the ledger tells truth

WIDTH = 256
SIZES = [WIDTH] * 17  # 16 units, each a sixteenth of the model
WHOLE = 16 * (WIDTH * WIDTH + WIDTH) * 8
UNIT = WHOLE // 16


def wrap(backend: CommunicationBackend) -> FSDPModel:
    config = ShardingConfiguration(backend, minimum_parameter_group_size=1)
    return FSDPModel(nn.MLP(SIZES), config)


class Traced:
    """Bytes allocated within the block: at its end, and at most. Of all threads."""

    def __enter__(self) -> Self:
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.held, self.peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()


def test_all_ranks_together_allocate_one_model() -> None:
    # Thread-ranks share a process: with a model on each rank there would be four.
    reuse_freed_memory()  # once in a process: 32 MiB of address space, and no page of it
    with Traced() as construction:
        models = run_in_threads(4, wrap)
    assert sum(model.memory.held(PARAMETERS) for model in models) == WHOLE
    assert WHOLE <= construction.held <= 1.1 * WHOLE
    # One unit of rank 0's values, an initializer's matrix and its temporaries, pieces on the way.
    assert construction.peak <= 1.1 * WHOLE + 5 * UNIT


def test_a_step_allocates_what_the_ledger_says() -> None:
    ranks = 4

    def train(backend: CommunicationBackend) -> tuple[FSDPModel, FSDPOptimizer]:
        model = wrap(backend)
        optimizer = FSDPOptimizer(AdamW(), model.sharding_configuration)
        for _ in range(2):
            optimizer.step(model, np.ones((1, WIDTH)), np.ones((1, WIDTH)))
        backend.barrier()
        if backend.rank == 0:
            nonlocal held, peak
            held, peak = tracemalloc.get_traced_memory()
        backend.barrier()
        return model, optimizer  # what is counted lives until it is compared

    held = peak = 0
    with Traced():
        pairs = run_in_threads(ranks, train)
    counted = sum(model.memory.total for model, _ in pairs)
    assert counted == 4 * WHOLE + ranks * (1 + 2 + 2) * UNIT
    assert counted <= held <= 1.1 * counted
    assert peak <= 1.1 * counted + ranks * UNIT


@pytest.mark.mpi
def test_a_process_allocates_its_shard_and_not_the_model(backend: Any) -> None:
    with Traced() as construction:
        model = wrap(backend)
    shard = shard_bytes(model)
    assert shard <= construction.held <= 1.1 * shard + 0.1 * UNIT
    assert construction.peak <= construction.held + (5 if backend.rank == 0 else 2) * UNIT


def test_the_ledger_counts_arrays_until_they_are_garbage() -> None:
    ledger = MemoryLedger()
    array = ledger.allocate(GATHERED, 10, np.dtype(np.float32))
    view = array[3:]
    del array
    assert ledger.held(GATHERED) == 40  # the view keeps it alive
    del view
    assert ledger.held(GATHERED) == ledger.total == 0
    assert ledger.peak(GATHERED) == 40
    ledger.reset_peaks()
    assert ledger.peak(GATHERED) == 0


# ------------------------------------------------------------------------------- who comes when


class Recorder:
    """Records the calls of a store and of a chain of layers, and passes them on."""

    def __init__(self, model: Any) -> None:
        self.events: list[tuple[str, int]] = []
        self.resident: list[tuple[int, set[int], set[int]]] = []
        self.store = model.engine.parameters
        program = model.engine.program
        for name in ("prefetch", "reshard"):
            self._record(self.store, name)
        self.kept = program.kept
        (chain,) = program.chains
        held = chain._local
        for index, layer in enumerate(held.layers):
            for unit in held.units_of(index):
                if unit.first_layer <= index <= unit.last_layer:
                    self._watch(layer.layer, unit.index)

    def _record(self, store: Any, name: str) -> None:
        original = getattr(store, name)

        def call(unit: Any) -> None:
            if (unit.index in store.resident) != (name == "prefetch"):
                self.events.append((name, unit.index))
            original(unit)

        setattr(store, name, call)

    def _watch(self, layer: Any, unit: int) -> None:
        for name in ("forward", "backward"):
            original = getattr(layer, name)

            def call(*arguments: Any, original: Any = original, **options: Any) -> Any:
                under_way = {i for i, work in self.store.in_flight.items() if work is not None}
                self.resident.append((unit, set(self.store.resident), under_way))
                return original(*arguments, **options)

            setattr(layer, name, call)


@pytest.mark.parametrize("kind", ["mlp", "tied"])
@in_worlds(1, 3)
def test_the_next_unit_is_fetched_before_the_current_one_is_used(
    backend: Any, problems: Any, kind: str
) -> None:
    model, optimizer = problems.build(backend, kind, "fsdp")
    recorder = Recorder(model)
    optimizer.step(model, *problems.local_batch(backend, kind, 0))
    last = len(model.units) - 1
    kept = sorted(recorder.kept)
    assert kept == ([0, last] if kind == "tied" else [last])
    passing = [unit for unit in range(last + 1) if unit not in kept]
    fetched = [unit for name, unit in recorder.events if name == "prefetch"]
    # Forward in order; backward in reverse, without what was kept.
    assert fetched == list(range(last + 1)) + passing[::-1]
    let_go = [unit for name, unit in recorder.events if name == "reshard"]
    assert let_go == passing + list(range(last, -1, -1))
    # Each use finds its unit, and the next one on its way; nothing else but kept units is here.
    uses = recorder.resident
    order = [*range(last + 1), *range(last, -1, -1)]
    assert [unit for unit, _, _ in uses] == order
    for place, (unit, resident, under_way) in enumerate(uses):
        following = set(order[place + 1 : place + 2])
        assert resident - set(kept) <= {unit} | following
        assert {unit} | following <= resident
        assert under_way == following - {unit} - (set(kept) if place > last else set())
