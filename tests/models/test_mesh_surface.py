"""Members of models on a mesh: parameters, copies, shards, metadata."""

from __future__ import annotations

import io
import zlib
from typing import Any

import layouts
import numpy as np
import pytest

from mpishard import nn
from mpishard.errors import ShardingError, StructureOnlyError
from mpishard.models import HybridShardedModel
from mpishard.observe.ledger import MemoryCategory
from mpishard.optimizers import HybridShardedOptimizer
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

# With zb-v the first and the last stage, and a tied embedding's two users, are one rank's; over
# eight stages an MLP of five layers has stages without parameters, and without layers at the end.
CASES = [
    (2, (2, 1, 1), "mlp", {"schedule": "1f1b"}),
    (2, (1, 2, 1), "tied", {"sequence_parallel": True}),
    (2, (1, 1, 2), "tied", {"data_parallel_strategy": "fsdp"}),
    (2, (2, 1, 1), "tied", {"schedule": "zb-v"}),
    (3, (3, 1, 1), "tied", {"schedule": "zb-h1"}),
    (3, (1, 3, 1), "tiny", {}),
    (4, (2, 2, 1), "tied", {"schedule": "interleaved"}),
    (4, (2, 1, 2), "tied", {"schedule": "looped-bfs", "data_parallel_strategy": "fsdp"}),
    (4, (1, 2, 2), "conv", {"data_parallel_strategy": "zero2"}),
    (4, (4, 1, 1), "mlp", {"schedule": "zb-v"}),
    (4, (2, 1, 2), "mlp", {"order": ("data", "tensor", "pipeline")}),
    (8, (2, 2, 2), "tied", {"data_parallel_strategy": "fsdp", "schedule": "zb-h2"}),
]  # fmt: skip
by_case = pytest.mark.parametrize(("world_size", "mesh", "kind", "options"), CASES)


def build(
    backend: Any, problems: Any, kind: str, mesh: Any, options: Any, rule: str = "adam",
    **config: Any,
) -> tuple[Any, Any]:  # fmt: skip
    configuration = ShardingConfiguration(backend, minimum_parameter_group_size=40, **config)
    plain = problems.MODELS[kind](backend.rank)
    options = {"micro_batch_count": 3, **options}
    model = HybridShardedModel(plain, configuration, *mesh, **options)
    return model, HybridShardedOptimizer(problems.RULES[rule](), configuration, *mesh)


def local(model: Any, problems: Any, kind: str, step: int = 0) -> tuple[Any, Any]:
    x, y = problems.batch(kind, step)
    mine = problems.part(len(x), step, model.data_rank, model.data_size)
    return x[mine], y[mine]


def close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@by_case
@in_worlds()
def test_parameters_are_set_and_gathered_in_the_models_order(
    backend: Any, problems: Any, mesh: Any, kind: str, options: Any
) -> None:
    model, optimizer = build(backend, problems, kind, mesh, options)
    first = problems.MODELS[kind](0).get_parameters()  # rank 0's values count
    for _ in range(2):
        np.testing.assert_array_equal(model.gather_full_parameters(), first)
    assert model.parameter_count == len(first)
    wanted = first + np.arange(len(first))
    model.set_parameters(wanted)
    gathered = model.get_parameters()
    np.testing.assert_array_equal(gathered, wanted)
    gathered[:] = 0  # the caller's own
    np.testing.assert_array_equal(model.get_parameters(), wanted)
    other = model.with_parameters(first)
    np.testing.assert_array_equal(other.get_parameters(), first)
    np.testing.assert_array_equal(model.get_parameters(), wanted)
    np.testing.assert_array_equal(np.concatenate(list(model.get_parameter_chunks())), wanted)
    model.set_parameter_chunks(first[start : start + 7] for start in range(0, len(first), 7))
    np.testing.assert_array_equal(model.get_parameters(), first)
    loss = optimizer.step(model, *local(model, problems, kind))
    expected = problems.train_sequentially(kind, problems.textbook(kind, "adam"))
    close(loss, expected.losses[0])
    close(model.get_parameters(), expected.parameters[0])


@by_case
@in_worlds()
def test_the_ranks_of_a_replica_hold_the_whole_vector(
    backend: Any, problems: Any, mesh: Any, kind: str, options: Any
) -> None:
    model, optimizer = build(backend, problems, kind, mesh, options)
    optimizer.step(model, *local(model, problems, kind))
    full = model.get_parameters()
    ranges, shard = model.owned_ranges, model.local_parameter_shard
    assert all(start < stop for start, stop in ranges)
    mine = np.concatenate([full[start:stop] for start, stop in ranges] or [full[:0]])
    np.testing.assert_array_equal(shard, mine)
    shard[:] = 0  # a copy
    np.testing.assert_array_equal(model.get_parameters(), full)
    covered = np.zeros(len(full))
    for start, stop in ranges:
        assert (covered[start:stop] == 0).all()
        covered[start:stop] = 1
    shards_data = model.engine.policy.shards_parameters
    for_replica = backend.all_gather(covered[None])
    for data in range(model.data_size):
        ranks = [
            r
            for r in range(backend.world_size)
            if shards_data or model.mesh.coordinates_of(r)[2] == data
        ]
        assert for_replica[ranks].any(axis=0).all()
    assert model.get_model_metadata().properties["ShardSize"] == len(mine)
    if len(ranges) > 1:
        with pytest.raises(ShardingError, match="owned_ranges"):
            _ = model._shard_size
    held = model.memory.held(MemoryCategory.PARAMETERS)
    assert held >= mine.nbytes or model.policy.shards_state


@by_case
@in_worlds()
def test_unsharded_yields_a_plain_model_for_its_block(
    backend: Any, problems: Any, mesh: Any, kind: str, options: Any
) -> None:
    model, _ = build(backend, problems, kind, mesh, options)
    expected = problems.MODELS[kind](0)
    x, _ = problems.batch(kind, 0)
    for root in (None, *range(backend.world_size)):
        with model.unsharded(root) as plain:
            assert (plain is None) == (root not in (None, backend.rank))
            if plain is not None:
                assert type(plain) is type(expected)
                np.testing.assert_array_equal(plain.get_parameters(), expected.get_parameters())
                close(plain.predict(x), expected.predict(x))
        if plain is not None:
            with pytest.raises(StructureOnlyError):
                plain.get_parameters()
    with pytest.raises(ValueError, match="root"), model.unsharded(backend.world_size):
        pass
    with pytest.raises(StructureOnlyError, match="gather_full_parameters"):
        model.wrapped_model.get_parameters()
    close(model.predict(x), expected.predict(x))


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("fsdp/2", "mlp"), ("zero1/2", "mlp"), ("2x1", "mlp"), ("fsdp/2", "function"),
     ("1x2", "function")],
)  # fmt: skip
@in_worlds(2, 4)
def test_replicas_begin_with_the_values_of_rank_0_which_any_rank_can_get(
    backend: Any, problems: Any, layout: str, kind: str
) -> None:
    model, _ = layouts.wrap(backend, problems.MODELS[kind](backend.rank), layout)
    expected = problems.MODELS[kind](0).get_parameters()
    np.testing.assert_array_equal(model.gather_full_parameters(), expected)
    for root in range(backend.world_size):
        with model.unsharded(root) as plain:
            assert (plain is None) == (root != backend.rank)
            if plain is not None:
                np.testing.assert_array_equal(plain.get_parameters(), expected)


@by_case
@in_worlds()
def test_a_deep_copy_trains_alone(
    backend: Any, problems: Any, mesh: Any, kind: str, options: Any
) -> None:
    model, optimizer = build(backend, problems, kind, mesh, options)
    optimizer.step(model, *local(model, problems, kind, 0))
    after_one = model.get_parameters()
    calls = traffic(model)
    copied, clone = model.deep_copy(), model.clone()
    assert traffic(model) == calls
    backend.barrier()
    config = model.sharding_configuration
    other = HybridShardedOptimizer(problems.RULES["adam"](), config, *mesh)
    other.deserialize(optimizer.serialize())
    expected = problems.train_sequentially(kind, problems.textbook(kind, "adam"))
    for step in (1, 2):
        loss = other.step(copied, *local(copied, problems, kind, step))
        close(loss, expected.losses[step])
    close(copied.get_parameters(), expected.parameters[2])
    np.testing.assert_array_equal(model.get_parameters(), after_one)
    optimizer.step(model, *local(model, problems, kind, 1))
    close(model.get_parameters(), expected.parameters[1])
    np.testing.assert_array_equal(clone.get_parameters(), model.get_parameters())
    close(copied.get_parameters(), expected.parameters[2])
    with pytest.raises(ShardingError, match="does not own"):
        copied.release()


def traffic(model: Any) -> list[int]:
    mesh = model.mesh
    groups = {id(g): g for g in (mesh.world, mesh.pipeline, mesh.tensor, mesh.data, mesh.model)}
    return [group.traffic.total_bytes for group in groups.values()]


@by_case
@in_worlds()
def test_a_model_is_given_back_or_closed(
    backend: Any, problems: Any, mesh: Any, kind: str, options: Any
) -> None:
    model, optimizer = build(backend, problems, kind, mesh, options)
    optimizer.step(model, *local(model, problems, kind))
    full = model.get_parameters()
    plain = model.release()
    np.testing.assert_array_equal(plain.get_parameters(), full)
    config = model.sharding_configuration
    again = HybridShardedModel(plain, config, *mesh, **options)
    np.testing.assert_array_equal(again.get_parameters(), full)
    again.close()
    again.close()
    with pytest.raises(ShardingError, match="closed"):
        again.predict(problems.batch(kind, 0)[0])
    with pytest.raises(StructureOnlyError):
        plain.get_parameters()


@pytest.mark.parametrize(("world_size", "mesh"), [(2, (2, 1, 1)), (2, (1, 2, 1)), (4, (2, 1, 2))])
@in_worlds()
def test_features_are_chosen_alike_on_all_ranks(backend: Any, problems: Any, mesh: Any) -> None:
    x, y = problems.batch("mlp", 0)
    y = y[:, :1]
    plain = nn.LinearRegression(5)
    config = ShardingConfiguration(backend, learning_rate=0.1)
    model = HybridShardedModel(nn.LinearRegression(5), config, *mesh)
    for chosen in ([0, 2], [1, 2, 4]):
        for each in (plain, model):
            each.set_active_feature_indices(chosen)
        mine = problems.part(len(x), 0, model.data_rank, model.data_size)
        close(model.train(x[mine], y[mine]), plain.train(x, y, 0.1))
        close(model.get_parameters(), plain.get_parameters())
        close(model.predict(x), plain.predict(x))
        importance = plain.get_feature_importance()
        found = model.get_feature_importance()
        assert found.keys() == importance.keys()
        close(list(found.values()), list(importance.values()))
    copied = model.deep_copy()  # whose choice is its own
    copied.set_active_feature_indices([0])
    other = plain.deep_copy()
    other.set_active_feature_indices([0])
    close(copied.predict(x), other.predict(x))
    close(model.predict(x), plain.predict(x))
    with pytest.raises(ValueError, match=r"same features; by rank, \[0\]; \[1\]"):
        model.set_active_feature_indices([backend.rank])
    assert model.get_active_feature_indices() == [1, 2, 4]
    again = nn.LinearRegression(5)
    again.deserialize(model.serialize())
    assert again.get_active_feature_indices() == [1, 2, 4]


@pytest.mark.parametrize(("world_size", "mesh"), [(2, (2, 1, 1)), (4, (1, 2, 2))])
@in_worlds()
def test_streams_and_graphs(backend: Any, problems: Any, mesh: Any) -> None:
    model, optimizer = build(backend, problems, "mlp", mesh, {})
    optimizer.step(model, *local(model, problems, "mlp"))
    full = model.get_parameters()
    stream = io.BytesIO()
    model.save_state(stream)
    optimizer.save_state(stream)
    x, _ = problems.batch("mlp", 0)
    node = nn.ComputationNode("input", (), {"name": "x"}, (None, 5))
    graph = model.export_computation_graph([node])
    close(graph.evaluate({"x": x}), model.predict(x))
    for step in (1, 2):
        optimizer.step(model, *local(model, problems, "mlp", step))
    after = model.get_parameters()
    stream.seek(0)
    model.load_state(stream)
    np.testing.assert_array_equal(model.get_parameters(), full)
    optimizer.load_state(stream)
    for step in (1, 2):
        optimizer.step(model, *local(model, problems, "mlp", step))
    np.testing.assert_array_equal(model.get_parameters(), after)


@in_worlds(4)
def test_bytes_of_one_mesh_are_read_on_another(backend: Any, problems: Any) -> None:
    given = set()
    for mesh, options in [
        ((2, 2, 1), {}),
        ((4, 1, 1), {"schedule": "1f1b"}),
        ((1, 1, 4), {"data_parallel_strategy": "fsdp"}),
        ((2, 1, 2), {"schedule": "zb-v"}),
    ]:
        model, _ = build(backend, problems, "tied", mesh, options)
        data = model.serialize()
        given.add(data)
        other, _ = build(backend, problems, "tied", (1, 4, 1), {})
        other.set_parameters(np.zeros(other.parameter_count))
        other.deserialize(data)
        np.testing.assert_array_equal(other.get_parameters(), model.get_parameters())
        plain = problems.MODELS["tied"](9)
        plain.deserialize(data)
        np.testing.assert_array_equal(plain.get_parameters(), model.get_parameters())
        model.deserialize(problems.MODELS["tied"](9).serialize())
        np.testing.assert_array_equal(
            model.get_parameters(), problems.MODELS["tied"](9).get_parameters()
        )
    assert len(given) == 1
    marks = backend.all_gather(np.array([zlib.crc32(given.pop())]))
    assert (marks == marks[0]).all()
