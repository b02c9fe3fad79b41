"""Bytes that a step on a mesh sends along each axis, and bytes that each rank holds, exactly."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from mpishard import nn
from mpishard.base.layout import ShardLayout
from mpishard.communication import CommunicationBackend
from mpishard.models import HybridShardedModel
from mpishard.observe.ledger import MemoryCategory
from mpishard.optimizers import AdamW, HybridShardedOptimizer
from mpishard.sharding import ShardingConfiguration
from mpishard.tensor import VocabularyParallelCrossEntropy
from mpishard.testing.worlds import in_worlds

pytestmark = pytest.mark.usefixtures("messages_only")

VOCABULARY, TIME, WIDTH, BLOCKS, BATCH = 12, 6, 8, 3, 5  # the batch of one data rank
ITEM = 8
IS_FULL = bool(os.environ.get("MPISHARD_TEST_FULL"))
AXES = ("pipeline", "tensor", "data")
MESHES = {
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    3: [(3, 1, 1), (1, 3, 1)],
    4: [(2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1), (1, 1, 4)],
    8: [(2, 2, 2)] + [(1, 2, 4), (4, 2, 1)] * IS_FULL,
}
CASES = [(world, mesh) for world, given in MESHES.items() for mesh in given]
# One replica sends nothing along the data axis.
WITH_DATA = [(world, mesh) for world, mesh in CASES if IS_FULL or mesh[2] > 1 or mesh == (2, 2, 1)]


def build(
    backend: CommunicationBackend, mesh: Any, precision: str | None = None, **options: Any
) -> tuple[Any, Any]:
    tied = options.pop("tied", False)
    model = nn.GPT(
        vocabulary_size=VOCABULARY, context_length=TIME, width=WIDTH, heads=4, layers=BLOCKS,
        dtype="float32" if precision else "float64", tied_embeddings=tied,
    )  # fmt: skip
    config = ShardingConfiguration(backend, minimum_parameter_group_size=100, precision=precision)
    sharded = HybridShardedModel(model, config, *mesh, **options)
    optimizer = HybridShardedOptimizer(AdamW(1e-3), config, *mesh)
    optimizer.step(sharded, *batch(sharded))  # compares the ranks' rules, once
    return sharded, optimizer


def batch(model: Any) -> tuple[Any, Any]:
    generator = np.random.default_rng(model.data_rank)
    shape = BATCH, TIME
    return generator.integers(0, VOCABULARY, shape), generator.integers(0, VOCABULARY, shape)


def sent(backend: CommunicationBackend, model: Any, optimizer: Any) -> dict[str, int]:
    """Bytes of a step by axis, over all ranks; the same in each step."""
    found: list[dict[str, int]] = []
    for _ in range(2):
        groups = {axis: getattr(model.mesh, axis) for axis in AXES}
        for group in groups.values():
            group.traffic.reset()
        optimizer.step(model, *batch(model))
        # The small messages of a step are not an axis's own: the totals, and what compares
        # batches. They are measured where one backend serves for both.
        mine = {}
        for axis, group in groups.items():
            mine[axis] = group.traffic.total_bytes
            if group is model.mesh.world:
                mine[axis] -= small(group, np.zeros(7), "all_reduce")
                if model.mesh.model_size > 1:
                    mine[axis] -= small(group, np.zeros((1, 4), np.int64), "all_gather")
        everyone = backend.all_reduce(np.array(list(mine.values())))
        found.append(dict(zip(mine, everyone.tolist(), strict=True)))
    assert found[0] == found[1]
    return found[0]


def small(group: CommunicationBackend, array: Any, name: str) -> int:
    before = group.traffic.total_bytes
    getattr(group, name)(array)
    return group.traffic.total_bytes - before


def cross_entropy_bytes(
    backend: CommunicationBackend, model: Any, micro_batches: int, dtype: str = "float64"
) -> int:
    """Bytes that the split loss sends in all replicas, measured alone."""
    mesh = model.mesh
    loss = VocabularyParallelCrossEntropy(mesh.tensor, nn.CrossEntropy(), VOCABULARY)
    part = ShardLayout(VOCABULARY, mesh.tensor_size).size(mesh.tensor_rank)
    before = mesh.tensor.traffic.total_bytes
    for index in range(micro_batches):
        rows = ShardLayout(BATCH, micro_batches).size(index)
        loss.forward(np.zeros((rows, TIME, part), dtype), np.zeros((rows, TIME), np.int64))
    mine = mesh.tensor.traffic.total_bytes - before if mesh.pipeline_rank == 0 else 0
    return int(backend.all_reduce(np.array([mine]))[0])


@pytest.mark.parametrize(
    ("world_size", "mesh", "micro_batches"),
    [*((*case, 2) for case in CASES), (4, (2, 2, 1), 1)],
)
@in_worlds()
def test_each_axis_sends_what_its_formula_says(backend: Any, mesh: Any, micro_batches: int) -> None:
    model, optimizer = build(
        backend, mesh, micro_batch_count=micro_batches, data_parallel_strategy="zero1"
    )
    found = sent(backend, model, optimizer)
    pipeline, tensor, data = mesh
    activation = BATCH * TIME * WIDTH * ITEM  # of all micro-batches of a replica
    # Outputs forward and their gradients backward, over each cut, on every tensor rank.
    assert found["pipeline"] == 2 * (pipeline - 1) * activation * tensor * data
    # All-reduces: of the embedding's output, of the output of each half of a block and of its
    # input's gradient, of the head's input's gradient; then the small ones of the loss.
    all_reduces = 1 + 4 * BLOCKS + 1
    expected = data * all_reduces * 2 * (tensor - 1) * activation
    expected += cross_entropy_bytes(backend, model, micro_batches)
    assert found["tensor"] == expected
    # Reduce-scatter of gradients, all-gather of parameters: of what each rank holds.
    own = model.engine.layout.length * ITEM
    together = int(backend.all_reduce(np.array([own]))[0]) // data  # of one replica
    assert found["data"] == 2 * (data - 1) * together


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
@pytest.mark.parametrize(("world_size", "mesh"), [(3, (3, 1, 1)), (3, (1, 3, 1)), (8, (2, 2, 2))])
@in_worlds()
def test_bfloat16_halves_what_activations_and_copies_send(
    backend: Any, mesh: Any, strategy: str
) -> None:
    model, optimizer = build(backend, mesh, "bfloat16", data_parallel_strategy=strategy)
    found = sent(backend, model, optimizer)
    pipeline, tensor, data = mesh
    activation = BATCH * TIME * WIDTH * 2
    assert found["pipeline"] == 2 * (pipeline - 1) * activation * tensor * data
    expected = data * (4 * BLOCKS + 2) * 2 * (tensor - 1) * activation
    expected += cross_entropy_bytes(backend, model, 1, "float32")
    assert found["tensor"] == expected
    # Gradients in float32; copies in bfloat16, of FSDP once for forward and once for backward,
    # but for kept units.
    layout, is_sharded = model.engine.layout, strategy == "fsdp"
    kept = sum(unit.length for unit in layout.units if unit.index in layout.kept)
    mine = 4 * layout.length + 2 * layout.length + 2 * (layout.length - kept) * is_sharded
    together = int(backend.all_reduce(np.array([mine]))[0]) // data
    assert found["data"] == (data - 1) * together


@pytest.mark.parametrize(
    ("world_size", "mesh", "micro_batches"),
    [*((*case, 3) for case in WITH_DATA), (4, (2, 1, 2), 1), (4, (1, 2, 2), 1)],
)
@in_worlds()
def test_fully_sharded_data_gathers_for_each_micro_batch(
    backend: Any, mesh: Any, micro_batches: int
) -> None:
    model, optimizer = build(
        backend, mesh, micro_batch_count=micro_batches, data_parallel_strategy="fsdp"
    )
    found = sent(backend, model, optimizer)
    data = mesh[2]
    kept = model.units[-1].length * ITEM if micro_batches == 1 else 0
    own = model.engine.layout.length * ITEM
    own, kept = (backend.all_reduce(np.array([own, kept])) // data).tolist()
    assert found["data"] == micro_batches * (3 * (data - 1) * (own - kept) + 2 * (data - 1) * kept)


@pytest.mark.parametrize(
    ("world_size", "mesh"), [(2, (2, 1, 1)), (3, (3, 1, 1)), (4, (2, 1, 2)), (4, (2, 2, 1))]
)
@in_worlds()
def test_tied_embeddings_add_one_all_reduce_of_their_gradient(backend: Any, mesh: Any) -> None:
    models = [build(backend, mesh, tied=tied, micro_batch_count=2) for tied in (False, True)]
    plain, tied = (sent(backend, *pair) for pair in models)
    model = models[1][0]
    groups = model.engine.program._tie_groups.values()
    # With two stages the pipeline's own ranks add it up, with more a group of two.
    before = sum(group.traffic.total_bytes for group in groups)
    weight = VOCABULARY * WIDTH * ITEM
    pipeline, _, data = mesh
    extra = 2 * weight * data
    if pipeline == 2:
        assert tied["pipeline"] - plain["pipeline"] == extra
    else:
        assert tied["pipeline"] == plain["pipeline"]
        models[1][1].step(model, *batch(model))
        mine = sum(group.traffic.total_bytes for group in groups) - before
        assert int(backend.all_reduce(np.array([mine]))[0]) == extra


STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


@pytest.mark.parametrize(
    ("world_size", "mesh", "strategy"),
    [
        (world, mesh, strategy)
        for place, (world, mesh) in enumerate(CASES)
        # One replica has nothing to shard, whatever the strategy.
        for strategy in (STRATEGIES if mesh[2] > 1 or IS_FULL else STRATEGIES[place % 4 :][:1])
    ],
)
@in_worlds()
def test_each_rank_holds_its_share(backend: Any, mesh: Any, strategy: str) -> None:
    model, _ = build(backend, mesh, data_parallel_strategy=strategy, micro_batch_count=2)
    pipeline, tensor, data = mesh
    own = model.engine.layout.length
    # A replica holds each element once, and what a tensor group does not split once on each.
    whole = model.parameter_count
    split = sum(
        held.entry.size for held in model.engine.placement.local_parameters if held.is_counted
    )
    assert int(backend.all_reduce(np.array([split]))[0]) == whole * data
    shards = sum(ShardLayout(u.length, data).size(model.data_rank) for u in model.units)
    if data == 1:
        strategy = "ddp"
    expected = {
        MemoryCategory.PARAMETERS: shards if strategy == "fsdp" else own,
        MemoryCategory.OPTIMIZER_STATE: 2 * (own if strategy == "ddp" else shards),
    }
    for category, elements in expected.items():
        assert model.memory.held(category) == elements * ITEM
    # Whole on each rank of a tensor group: norms, positions and what row-split layers add.
    names = {held.entry.name for held in model.engine.placement.local_parameters}
    whole_on_all = sum(
        entry.size
        for entry in model.parameter_entries
        if entry.name in names
        and (
            "norm." in entry.name
            or entry.name.startswith("position")
            or entry.name.endswith("projection.bias")
        )
    )
    held_of = sum(entry.size for entry in model.parameter_entries if entry.name in names)
    assert own == whole_on_all + (held_of - whole_on_all) // tensor or tensor == 3
    assert own < whole or (pipeline, tensor) == (1, 1)
