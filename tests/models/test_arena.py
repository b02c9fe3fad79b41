"""Training in memory that ranks share: bytes that are sent and held, and waits."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from mpishard import nn
from mpishard.communication import Arena, run_in_threads
from mpishard.communication.contract.reduction import complete_subtrees
from mpishard.models.engine.engine import Engine
from mpishard.models.stores.parameter_store import NodeParameters, ShardedParameters
from mpishard.models.stores.replicated_gradients import NodeGradients
from mpishard.models.stores.sharded_gradients import ShardedGradients
from mpishard.observe.ledger import MemoryCategory
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

by_kind = pytest.mark.parametrize("kind", ["mlp", "gpt", "tied"])
by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])


def traffic_of_step(backend: Any, problems: Any, model: Any, optimizer: Any, kind: str) -> Any:
    """Bytes that all ranks send and read in a step, without the small all-reduce of totals."""
    backend.traffic.reset()
    backend.all_reduce(np.zeros(7))
    totals = backend.traffic.total_bytes
    optimizer.step(model, *problems.local_batch(backend, kind, 0))
    backend.traffic.reset()
    optimizer.step(model, *problems.local_batch(backend, kind, 1))
    read = sum(backend.traffic.bytes_read.values())
    return backend.all_reduce(np.array([backend.traffic.total_bytes - totals, read])).tolist()


@by_kind
@by_strategy
@in_worlds(1, 2, 3, 5)
def test_on_one_node_a_step_sends_nothing(
    backend: Any, problems: Any, kind: str, strategy: str
) -> None:
    # Units of 60 and more: below 128 bytes an array travels with its call.
    model, optimizer = problems.build(backend, kind, strategy, "adamw", 60)
    sent, read = traffic_of_step(backend, problems, model, optimizer, kind)
    assert sent == 0
    assert read == (backend.world_size - 1) * model.parameter_count * 8  # the peers' gradients


@pytest.mark.parametrize("path", ["two nodes"], indirect=True)
@by_kind
@in_worlds(4)
def test_between_nodes_each_piece_travels_once(
    backend: Any, problems: Any, kind: str, path: str
) -> None:
    model, optimizer = problems.build(backend, kind, "fsdp", "adamw", 60)
    sent, read = traffic_of_step(backend, problems, model, optimizer, kind)
    kept = sum(unit.length for unit in model.units if unit.index in model.engine.program.kept)
    length = model.parameter_count
    assert len(complete_subtrees(backend.peers, 4)) == 1
    # Gathered once, or twice, by each of two nodes that has half; reduced to the other node's half.
    assert sent == 8 * (kept + 2 * (length - kept) + length)
    assert read == 8 * length


@by_kind
@in_worlds(1, 3)
def test_full_sharding_holds_its_shard_and_two_gradients(
    backend: Any, problems: Any, kind: str
) -> None:
    model, optimizer = problems.build(backend, kind, "fsdp", "adamw")
    shard = sum(piece.length for piece in model.engine.layout.pieces()) * 8
    assert model.memory.as_dict() == {"parameters": shard}
    for step in range(3):
        optimizer.step(model, *problems.local_batch(backend, kind, step))
    largest = max(unit.length for unit in model.units) * 8
    assert model.memory.as_dict() == {
        "parameters": shard,
        "gradients": shard,
        "full_gradients": 2 * largest,
        "optimizer_state": 2 * shard,
    }
    assert model.memory.peak(MemoryCategory.GATHERED) == 0


@in_worlds(2, 3)
def test_data_parallelism_holds_everything_once(backend: Any, problems: Any) -> None:
    model, optimizer = problems.build(backend, "gpt", "ddp", "adamw")
    whole = model.parameter_count * 8
    for step in range(2):
        optimizer.step(model, *problems.local_batch(backend, "gpt", step))
    expected = {"parameters": whole, "gradients": whole, "optimizer_state": 2 * whole}
    assert model.memory.as_dict() == expected


@in_worlds(1, 2, 3)
def test_a_unit_is_a_view_of_what_the_node_holds(backend: Any, problems: Any) -> None:
    model, optimizer = problems.build(backend, "mlp", "fsdp")
    store = model.engine.parameters
    assert isinstance(store, NodeParameters)
    assert isinstance(model.engine.gradients, ShardedGradients)
    for unit, piece in zip(model.units, store.local_pieces, strict=True):
        view, (owned,) = store.unshard(unit), store.owned([piece])
        assert np.shares_memory(view, owned) or piece.length == 0
        assert not view.flags.writeable
        assert view.ctypes.data % 64 == 0
    optimizer.step(model, *problems.local_batch(backend, "mlp", 0))


@by_strategy
@in_worlds(2, 3)
def test_a_copy_has_memory_of_its_own(backend: Any, problems: Any, strategy: str) -> None:
    model, optimizer = problems.build(backend, "mlp", strategy)
    copied = model.deep_copy()
    before = copied.gather_full_parameters()
    assert before.tobytes() == model.gather_full_parameters().tobytes()
    optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
    assert copied.gather_full_parameters().tobytes() == before.tobytes()
    assert model.gather_full_parameters().tobytes() != before.tobytes()
    copied.train(*problems.local_batch(backend, "mlp", 1))


@by_strategy
@pytest.mark.parametrize("path", ["arena", "two nodes"], indirect=True)
@in_worlds(2, 3)
def test_a_step_that_failed_on_all_ranks_leaves_nothing_behind(
    backend: Any, problems: Any, strategy: str, path: str
) -> None:
    model, optimizer = problems.build(backend, "mlp", strategy)
    reference, other = problems.build(backend, "mlp", strategy)
    gradients = model.engine.gradients
    original = gradients.reduce

    def fail(unit: Any) -> None:
        original(unit)
        if unit.index == 1:
            raise ArithmeticError("here")

    gradients.reduce = fail
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="here"):
            optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
    gradients.reduce = original
    for step in range(2):
        batch = problems.local_batch(backend, "mlp", step)
        assert optimizer.step(model, *batch) == other.step(reference, *batch)
    found, wanted = model.gather_full_parameters(), reference.gather_full_parameters()
    assert found.tobytes() == wanted.tobytes()


@by_strategy
@pytest.mark.mpi
def test_a_step_makes_no_buffer(backend: Any, problems: Any, strategy: str) -> None:
    """Buffers exist before: a step allocates activations only."""
    width = 128
    model_class, optimizer_class = problems.STRATEGIES[strategy]
    config = ShardingConfiguration(backend, minimum_parameter_group_size=1)
    model = model_class(nn.MLP([width] * 9), config)
    optimizer = optimizer_class(problems.RULES["adamw"](), config)
    x = np.ones((1, width))
    unit = max(unit.length for unit in model.units) * 8
    for _ in range(3):
        optimizer.step(model, x, x)
    tracemalloc.start()
    try:
        optimizer.step(model, x, x)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        optimizer.step(model, x, x)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert abs(after - held) < unit / 4  # the call log fills
    assert peak - held < unit  # 131 kB, of 8 units


@in_worlds(2, 3)
def test_after_a_rule_that_failed_nobody_writes_what_others_read(
    backend: Any, problems: Any
) -> None:
    model, optimizer = problems.build(backend, "mlp", "ddp")
    x, y = problems.batch("mlp", 0)
    seen = []

    def failing(updates: Any, report: Any) -> None:
        if backend.rank == 1:
            time.sleep(0.1)
        seen.append(np.concatenate([update.gradients for update in updates]))
        raise ArithmeticError("here")

    for _ in range(2):
        with pytest.raises(ArithmeticError, match="here"):
            model.engine.step(x, y, failing)
    assert seen[0].tobytes() == seen[1].tobytes()
    gathered = backend.all_gather(seen[0][None])
    assert (gathered == gathered[0]).all()
    optimizer.step(model, x, y)


# ------------------------------------------------------------------- the equality check bites here


def slow(patch: Any, of: type, name: str, rank: int) -> None:
    """Delay rank ``rank`` at the end of a method, so that a missing fence shows."""
    original = getattr(of, name)

    def late(self: Any, *arguments: Any, **options: Any) -> Any:
        backend = getattr(self, "backend", None)
        if backend is None or backend.rank == rank:
            time.sleep(0.02)
        return original(self, *arguments, **options)

    patch.setattr(of, name, late)


def publish_without_fence(patch: Any) -> None:
    slow(patch, Optimizer, "update", 1)
    original = Optimizer.update

    def uneven(self: Any, parameters: Any, *rest: Any) -> None:
        if parameters.size and parameters.size % 2:  # some ranks' pieces, and not others'
            time.sleep(0.02)
        original(self, parameters, *rest)

    patch.setattr(Optimizer, "update", uneven)
    patch.setattr(NodeParameters, "publish", lambda self, pieces: None)


def gradients_cleared_while_others_read(patch: Any) -> None:
    original = NodeGradients.owned

    def late(self: Any, pieces: Any) -> Any:
        if self.backend.rank == 1 and len(pieces) > len(self._pieces):
            time.sleep(0.02)
        return original(self, pieces)

    patch.setattr(NodeGradients, "owned", late)
    patch.setattr(NodeGradients, "finish", lambda self: None)


def own_gradient_instead_of_the_owners(patch: Any) -> None:
    patch.setattr(
        NodeGradients, "owned", lambda self, pieces: [self.vector[p.start : p.stop] for p in pieces]
    )


def reduce_scatter_without_reduction(patch: Any) -> None:
    original = Arena.reduce_into

    def mutant(self: Any, out: Any, part: Any, **options: Any) -> Any:
        if self._backend.rank:
            self.mine[part] = 0
        return original(self, out, part, **options)

    patch.setattr(Arena, "reduce_into", mutant)


def first_values_of_this_rank(patch: Any) -> None:
    original = NodeParameters.fill

    def mutant(self: Any, unit: Any, full: Any) -> None:
        original(self, unit, full)
        (mine,) = self.owned([self.local_pieces[unit.index]])
        mine += 0.01 * self.backend.rank

    patch.setattr(NodeParameters, "fill", mutant)


def units_of_another_place(patch: Any) -> None:
    original = NodeParameters.unshard

    def mutant(self: Any, unit: Any) -> Any:
        return np.roll(original(self, unit), 1)

    patch.setattr(NodeParameters, "unshard", mutant)


def no_piece_of_the_other_node(patch: Any) -> None:
    class Done:
        def wait(self) -> None: ...

    patch.setattr(Arena, "gather_in_place", lambda self, piece, part, subject: Done())


def stale_units(patch: Any) -> None:
    patch.setattr(ShardedParameters, "reshard", lambda self, unit: None)
    patch.setattr(ShardedParameters, "publish", lambda self, pieces: None)


@pytest.mark.parametrize(
    ("mutant", "strategy", "path"),
    [
        (publish_without_fence, "fsdp", "arena"),
        (gradients_cleared_while_others_read, "ddp", "arena"),
        (own_gradient_instead_of_the_owners, "ddp", "arena"),
        (reduce_scatter_without_reduction, "fsdp", "arena"),
        (reduce_scatter_without_reduction, "ddp", "arena"),
        (reduce_scatter_without_reduction, "fsdp", "two nodes"),
        (first_values_of_this_rank, "fsdp", "arena"),
        (units_of_another_place, "fsdp", "arena"),
        (no_piece_of_the_other_node, "fsdp", "two nodes"),
        (stale_units, "fsdp", "two nodes"),
    ],
    indirect=["path"],
)
def test_the_equality_check_finds_each_fault(
    problems: Any, monkeypatch: Any, mutant: Any, strategy: str, path: str
) -> None:
    expected = problems.train_sequentially("mlp", problems.TEXTBOOK["adamw"], steps=3)

    def check(backend: Any) -> None:
        actual = problems.train_sharded(backend, "mlp", strategy, "adamw", 1, 3, watch=False)
        problems.assert_equal(actual, expected)

    run_in_threads(3, check)
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run_in_threads(3, check)


def test_updates_cannot_write_to_what_others_read(problems: Any, monkeypatch: Any) -> None:
    original = Engine.update

    def spoil(self: Any, rule: Any, reduced: Any) -> None:
        def writing(updates: Any, report: Any) -> None:
            updates[0].gradients[...] = 0

        original(self, writing, reduced)

    monkeypatch.setattr(Engine, "update", spoil)

    def body(backend: Any) -> None:
        model, optimizer = problems.build(backend, "mlp", "ddp")
        optimizer.step(model, *problems.local_batch(backend, "mlp", 0))

    with pytest.raises(ValueError, match="read-only"):
        run_in_threads(2, body)
