"""Every member of a sharded model, on every rank, under every strategy."""

from __future__ import annotations

import contextlib
import gc
import io
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.communication import run_in_threads
from mpishard.errors import MissingInterfaceError, ShardingError, StructureOnlyError
from mpishard.models import DDPModel, FSDPModel
from mpishard.observe.ledger import MemoryCategory
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
by_kind = pytest.mark.parametrize("kind", ["mlp", "tied", "function"])


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def first_values(problems: Any, kind: str) -> Any:
    return problems.MODELS[kind](0).get_parameters()


# ------------------------------------------------------------------------------------ accumulate


@by_kind
@by_strategy
@pytest.mark.parametrize("defers", [(False,), (True,), (False, True), (True, False)])
@in_worlds(1, 3)
def test_accumulated_steps_equal_one_on_the_union(
    backend: Any, problems: Any, kind: str, strategy: str, defers: tuple[bool, ...]
) -> None:
    model, optimizer = problems.build(backend, kind, strategy, "adamw", 60)
    plain = problems.MODELS[kind](0)
    theta, state = plain.get_parameters(), {}
    for round_number in range(2):
        steps = iter(range(10 * round_number, 10 * round_number + 10))
        batches = []
        for defer in defers:
            before = model.gather_full_parameters()
            with model.accumulate(defer=defer):
                for step in (next(steps), next(steps)):
                    optimizer.step(model, *problems.local_batch(backend, kind, step))
                    batches.append(problems.batch(kind, step))
            assert model.gather_full_parameters().tobytes() == before.tobytes()
        step = next(steps)
        batches.append(problems.batch(kind, step))
        loss = optimizer.step(model, *problems.local_batch(backend, kind, step))
        x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        plain.set_parameters(theta)
        expected, gradient = plain.compute_loss_and_gradients(x, y)
        theta = problems.TEXTBOOK["adamw"](theta, gradient, state, round_number + 1)
        close(loss, expected)
        close(model.gather_full_parameters(), theta)


@by_strategy
@pytest.mark.parametrize("defer", [False, True])
@in_worlds(1, 3)
def test_an_exception_discards_what_was_added(
    backend: Any, problems: Any, strategy: str, defer: bool
) -> None:
    expected = problems.train_sequentially("mlp", problems.TEXTBOOK["sgd"], 2)
    model, optimizer = problems.build(backend, "mlp", strategy)
    for step, theta in enumerate(expected.parameters):
        with contextlib.suppress(KeyError), model.accumulate(defer=defer):
            optimizer.step(model, *problems.local_batch(backend, "mlp", 7))
            raise KeyError
        optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        close(model.gather_full_parameters(), theta)


@in_worlds(2)
def test_rounds_cannot_be_nested(backend: Any, problems: Any) -> None:
    model, optimizer = problems.build(backend, "mlp", "fsdp")
    with pytest.raises(RuntimeError, match="nested"), model.accumulate(), model.accumulate():
        pass
    optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
    expected = problems.train_sequentially("mlp", problems.TEXTBOOK["sgd"], 1)
    close(model.gather_full_parameters(), expected.parameters[0])


# ------------------------------------------------------------------------------------ parameters


@by_kind
@by_strategy
@in_worlds(1, 2, 3)
def test_every_rank_gets_the_plain_model(
    backend: Any, problems: Any, kind: str, strategy: str
) -> None:
    model, _ = problems.build(backend, kind, strategy)
    expected = first_values(problems, kind)
    with model.unsharded() as plain:
        assert plain.get_parameters().tobytes() == expected.tobytes()
        plain.set_parameters(0 * expected)  # not taken back
    with model.unsharded(root=backend.world_size - 1) as plain:
        assert (plain is None) == (backend.rank != backend.world_size - 1)
        if plain is not None:
            assert plain.get_parameters().tobytes() == expected.tobytes()
    if plain is not None and kind != "function":
        with pytest.raises(StructureOnlyError, match="after unsharded"):
            plain.get_parameters()
    assert model.get_parameters().tobytes() == expected.tobytes()
    with pytest.raises(ValueError, match="root 9"), model.unsharded(root=9):
        pass


@by_kind
@by_strategy
@in_worlds(1, 3)
def test_parameters_can_be_set(backend: Any, problems: Any, kind: str, strategy: str) -> None:
    model, optimizer = problems.build(backend, kind, strategy)
    optimizer.step(model, *problems.local_batch(backend, kind, 0))
    trained = model.get_parameters()
    values = np.sin(np.arange(model.parameter_count))
    other = model.with_parameters(values)
    assert model.get_parameters().tobytes() == trained.tobytes()
    assert other.get_parameters().tobytes() == values.tobytes()
    model.set_parameters(values)
    values[:] = 0  # the caller's again
    assert model.get_parameters().tobytes() == other.get_parameters().tobytes()
    if kind != "function":
        x, _ = problems.local_batch(backend, kind, 0)
        close(model.predict(x), other.predict(x))
    ranges = [model.get_parameters()[start:stop] for start, stop in model.owned_ranges]
    assert np.concatenate(ranges).tobytes() == model.local_parameter_shard.tobytes()


@by_strategy
@pytest.mark.parametrize("member", ["set_parameters", "with_parameters", "apply_gradients"])
@in_worlds(2, 3)
def test_vectors_that_differ_between_ranks_are_refused_on_all(
    backend: Any, problems: Any, strategy: str, member: str
) -> None:
    model, _ = problems.build(backend, "mlp", strategy)
    extra = (0.1,) if member == "apply_gradients" else ()
    before = model.get_parameters()
    different = np.ones(model.parameter_count)
    different[-1] += backend.rank
    with pytest.raises(ValueError, match=f"{member}: the vectors differ"):
        getattr(model, member)(different, *extra)
    assert model.get_parameters().tobytes() == before.tobytes()


@by_kind
@by_strategy
@in_worlds(1, 3)
def test_gradients_without_an_update(backend: Any, problems: Any, kind: str, strategy: str) -> None:
    model, optimizer = problems.build(backend, kind, strategy)
    plain = problems.MODELS[kind](0)
    for step in range(2):
        x, y = problems.batch(kind, step)
        mine = slice(backend.rank, None)  # another batch on every rank, all with samples
        before = model.get_parameters()
        plain.set_parameters(before)
        close(model.compute_gradients(x[mine], y[mine]), plain.compute_gradients(x[mine], y[mine]))
        assert model.get_parameters().tobytes() == before.tobytes()
        gradient = plain.compute_gradients(x, y)
        model.apply_gradients(gradient, 0.1)
        close(model.get_parameters(), before - 0.1 * gradient)
    optimizer.step(model, *problems.local_batch(backend, kind, 0))


@in_worlds(2)
def test_gradients_of_another_loss(backend: Any, problems: Any) -> None:
    class Doubled(nn.MSE):
        def backward(self, saved: Any) -> Any:
            return 2 * super().backward(saved)

    model, _ = problems.build(backend, "mlp", "fsdp")
    x, y = problems.batch("mlp", 0)
    close(model.compute_gradients(x, y, Doubled()), 2 * model.compute_gradients(x, y))


@by_strategy
@in_worlds(1, 3)
def test_train_is_plain_descent(backend: Any, problems: Any, strategy: str) -> None:
    model_class, _ = problems.STRATEGIES[strategy]
    config = ShardingConfiguration(backend, learning_rate=0.05)
    model, plain = model_class(problems.MODELS["mlp"](0), config), problems.MODELS["mlp"](0)
    for step in range(3):
        loss = model.train(*problems.local_batch(backend, "mlp", step))
        close(loss, plain.train(*problems.batch("mlp", step), learning_rate=0.05))
        close(model.get_parameters(), plain.get_parameters())
        config.learning_rate = 0.05


@pytest.mark.parametrize("kind", ["mlp", "tied"])
@by_strategy
@in_worlds(1, 2, 4)
def test_predicts_any_number_of_rows(backend: Any, problems: Any, kind: str, strategy: str) -> None:
    model, optimizer = problems.build(backend, kind, strategy, unit_size=60)
    x, y = problems.batch(kind, 3)
    for _ in range(2):
        rows = x[: 3 * backend.rank]  # rank 0 has none
        with model.unsharded() as plain:
            expected = plain.predict(rows)
        assert model.predict(rows).shape == expected.shape
        close(model.predict(rows), expected)
        optimizer.step(model, x, y)


# ---------------------------------------------------------------------------- copies, bytes, words


@by_kind
def test_bytes_are_those_of_the_plain_model_everywhere(problems: Any, kind: str) -> None:
    plain = problems.MODELS[kind](0)
    data = plain.serialize()

    def body(backend: Any, strategy: str) -> bytes:
        model, _ = problems.build(backend, kind, strategy)
        serialized = model.serialize()
        model.set_parameters(np.zeros(model.parameter_count))
        model.deserialize(serialized)
        assert model.serialize() == serialized
        stream = io.BytesIO()
        model.save_state(stream)
        stream.seek(0)
        model.load_state(stream)
        with pytest.raises(ValueError, match="do not fit the model"):
            model.deserialize(nn.MLP([1, 1]).serialize())
        return serialized

    for strategy in ("ddp", "fsdp"):
        for world_size in (1, 2, 5):
            assert set(run_in_threads(world_size, body, strategy)) == {data}
    plain.deserialize(data)


@by_kind
@by_strategy
@in_worlds(1, 3)
def test_clones_share_and_deep_copies_do_not(
    backend: Any, problems: Any, kind: str, strategy: str
) -> None:
    model, optimizer = problems.build(backend, kind, strategy)
    before, sequence = model.get_parameters(), backend._sequence
    clone, copy = model.clone(), model.deep_copy()
    assert backend._sequence == sequence
    optimizer.step(model, *problems.local_batch(backend, kind, 0))
    assert clone.get_parameters().tobytes() == model.get_parameters().tobytes()
    assert copy.get_parameters().tobytes() == before.tobytes()
    _, another = problems.build(backend, kind, strategy)
    another.step(copy, *problems.local_batch(backend, kind, 0))
    assert copy.get_parameters().tobytes() == model.get_parameters().tobytes()


@by_kind
@by_strategy
@in_worlds(3)
def test_metadata_name_the_vectors_that_are_sharded(
    backend: Any, problems: Any, kind: str, strategy: str
) -> None:
    model, _ = problems.build(backend, kind, strategy)
    policy = problems.STRATEGIES[strategy][0].policy
    sharded, layered = policy.shards_parameters, kind != "function"
    properties = model.get_model_metadata().properties
    of_plain = problems.MODELS[kind](0).get_model_metadata().properties
    assert properties == of_plain | {
        "IsDistributed": True,
        "Strategy": strategy.upper().replace("ZERO", "ZeRO-"),
        "WorldSize": 3,
        "Rank": backend.rank,
        "ShardSize": model.local_parameter_shard.size,
        "ParametersSharded": sharded and layered,
        "ParametersReplicated": not (sharded and layered),
        "ParametersOncePerNode": policy.shards_state and layered,
        "GradientsSharded": policy.shards_gradients,
        "GradientsReplicated": not policy.shards_gradients,
        "OptimizerStateSharded": policy.shards_state,
    }
    assert model.parameter_count == first_values(problems, kind).size
    assert (model.rank, model.world_size) == (backend.rank, 3)
    with pytest.raises(MissingInterfaceError, match="IFeatureImportance"):
        model.get_feature_importance()


@in_worlds(1, 3)
def test_zero_3_is_fsdp_under_another_name(backend: Any, problems: Any) -> None:
    plain = problems.MODELS["mlp"](0)
    model = ms.as_distributed(plain, backend, "ZeRO-3")
    assert isinstance(model, ms.FSDPModel)
    properties = model.get_model_metadata().properties
    assert properties["Strategy"] == "ZeRO-3"
    assert properties["EquivalentTo"] == "FSDP"
    optimizer = ms.as_distributed(ms.optimizers.SGD(1e-3), backend, "zero3")
    optimizer.step(model, *problems.local_batch(backend, "mlp", 0))


@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
@in_worlds(1, 3)
def test_zero_2_can_keep_the_change_of_an_update(backend: Any, problems: Any, path: str) -> None:
    model, optimizer = problems.build(backend, "mlp", "zero2")
    optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
    with pytest.raises(ShardingError, match="tracks_parameter_deltas"):
        _ = model.parameter_delta_shard
    model.tracks_parameter_deltas = True
    before = model.get_parameters()
    optimizer.step(model, *problems.local_batch(backend, "mlp", 1))
    added = model.get_parameters() - before
    pieces = model.engine.pieces.updated
    expected = np.concatenate([added[p.start : p.stop] for p in pieces])
    np.testing.assert_allclose(model.parameter_delta_shard, expected, rtol=0, atol=1e-15)
    assert np.abs(expected).max(initial=1.0) > 0
    (mine,) = model.engine.parameters.owned(pieces[:1])
    mine += 1.0
    model.all_gather_parameter_shards()
    unit = model.units[0]
    moved = model.get_parameters()[unit.start : unit.stop] - before[unit.start : unit.stop]
    assert (moved > 0.5).all()


@in_worlds(3)
def test_start_and_size_of_a_shard_of_one_unit(backend: Any) -> None:
    config = ms.ShardingConfiguration(backend)
    model = ms.FSDPModel(nn.MLP([9, 1]), config)  # 10 parameters
    start, size = ((0, 4), (4, 3), (7, 3))[backend.rank]
    assert (model._shard_start_index, model._shard_size) == (start, size)
    assert model._local_shard.size == size
    config.minimum_parameter_group_size = 1
    model = ms.FSDPModel(nn.MLP([3, 2, 1]), config)
    with pytest.raises(ShardingError, match="owned_ranges"):
        _ = model._shard_size


@in_worlds(2)
def test_gathered_parameters_are_cached_while_a_caller_holds_them(backend: Any) -> None:
    model = ms.FSDPModel(nn.MLP([3, 2]), ms.ShardingConfiguration(backend))
    full = model.gather_full_parameters()
    assert model._cached_full_parameters is full
    model.train(np.ones((2, 3)), np.ones((2, 2)))
    assert model._cached_full_parameters is None
    full = model.gather_full_parameters()
    del full
    gc.collect()
    assert model._cached_full_parameters is None


@in_worlds(2)
def test_presets_make_fully_sharded_models(backend: Any, problems: Any) -> None:
    for wrap, size, compresses in (
        (ms.as_distributed_for_high_bandwidth, 512, False),
        (ms.as_distributed_for_low_bandwidth, 4096, True),
    ):
        model = wrap(problems.MODELS["mlp"](0), backend)
        config = model.sharding_configuration
        assert isinstance(model, ms.FSDPModel)
        assert config.minimum_parameter_group_size == size
        assert config.enable_gradient_compression is compresses
        assert isinstance(wrap(ms.optimizers.SGD(0.1), backend), ms.FSDPOptimizer)
        for arguments in ((None, backend), (model, None)):
            with pytest.raises(TypeError):
                wrap(*arguments)


@in_worlds(2)
def test_gradients_are_synchronised_by_every_step(backend: Any, problems: Any) -> None:
    model, optimizer = problems.build(backend, "mlp", "fsdp")
    with pytest.raises(ShardingError, match="before any gradient"):
        model.synchronize_gradients()
    optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
    model.synchronize_gradients()


# ------------------------------------------------------------------------------- the plain model


@by_strategy
@in_worlds(1, 2)
def test_a_wrapped_model_is_structure(backend: Any, problems: Any, strategy: str) -> None:
    plain = problems.MODELS["mlp"](0)
    model = problems.STRATEGIES[strategy][0](plain, ShardingConfiguration(backend))
    x, y = problems.batch("mlp", 0)
    for ask in (
        plain.get_parameters,
        lambda: plain.set_parameters(np.ones(plain.parameter_count)),
        lambda: plain.predict(x),
        lambda: plain.train(x, y),
    ):
        with pytest.raises(StructureOnlyError, match=r"gather_full_parameters\(\)"):
            ask()
    assert model.wrapped_model is plain
    fresh = plain.with_parameters(model.get_parameters())
    DDPModel(fresh, ShardingConfiguration(backend))  # an object of its own


@by_strategy
@by_kind
@in_worlds(1, 3)
def test_release_gives_the_parameters_back(
    backend: Any, problems: Any, strategy: str, kind: str
) -> None:
    model, optimizer = problems.build(backend, kind, strategy)
    optimizer.step(model, *problems.local_batch(backend, kind, 0))
    trained = model.get_parameters()
    plain = model.release()
    assert plain is model.wrapped_model
    assert plain.get_parameters().tobytes() == trained.tobytes()
    again = FSDPModel(plain, ShardingConfiguration(backend))
    assert again.get_parameters().tobytes() == trained.tobytes()


# --------------------------------------------------------------- what the wrapped model is asked


@by_kind
@by_strategy
@in_worlds(1, 3)
def test_shapes_chunks_and_metadata_are_the_wrapped_model_s(
    backend: Any, problems: Any, kind: str, strategy: str
) -> None:
    model, _ = problems.build(backend, kind, strategy, unit_size=1)
    plain = problems.MODELS[kind](0)
    assert model.get_input_shape() == plain.get_input_shape()
    assert model.get_output_shape() == plain.get_output_shape()
    assert model.get_dynamic_shape_info() == plain.get_dynamic_shape_info()
    chunks = list(model.get_parameter_chunks())
    assert [chunk.size for chunk in chunks] == [unit.length for unit in model.units]
    assert np.concatenate(chunks).tobytes() == plain.get_parameters().tobytes()
    model.set_parameter_chunks([2 * chunk for chunk in chunks])
    close(model.get_parameters(), 2 * plain.get_parameters())
    assert model.supports_parameter_initialization
    vector = np.ones(3)
    assert model.sanitize_parameters(vector) is vector
    metadata = model.get_model_metadata()
    assert metadata.name == plain.get_model_metadata().name
    assert metadata.complexity == model.parameter_count


@pytest.mark.parametrize("kind", ["mlp", "gpt", "tied"])
@by_strategy
@in_worlds(1, 2)
def test_a_sharded_model_has_the_graph_of_the_plain_one(
    backend: Any, problems: Any, kind: str, strategy: str
) -> None:
    model, optimizer = problems.build(backend, kind, strategy)
    optimizer.step(model, *problems.local_batch(backend, kind, 0))
    x, _ = problems.batch(kind, 1)
    assert model.supports_jit_compilation
    inputs: list[Any] = []
    node = model.export_computation_graph(inputs)
    close(node.evaluate({inputs[0]: x}), model.predict(x))
    with pytest.raises(TypeError):
        model.export_computation_graph(None)


@in_worlds(2)
def test_a_black_box_has_no_graph_and_no_features(backend: Any, problems: Any) -> None:
    model, _ = problems.build(backend, "function", "ddp")
    with pytest.raises(NotImplementedError, match="IJitCompilable"):
        model.export_computation_graph([])
    for call in (
        model.get_active_feature_indices,
        lambda: model.set_active_feature_indices([0]),
        model.get_feature_importance,
        lambda: model.is_feature_used(0),
    ):
        with pytest.raises(RuntimeError, match="IFeature"):
            call()


@by_strategy
@in_worlds(1, 2)
def test_a_closed_model_frees_its_memory(backend: Any, problems: Any, strategy: str) -> None:
    with problems.build(backend, "mlp", strategy, "adamw")[0] as model:
        model.train(*problems.local_batch(backend, "mlp", 0))
        ledger = model.memory
        backend.barrier()
    backend.barrier()
    gc.collect()
    assert ledger.total == 0
    model.close()
    with pytest.raises(ShardingError, match="closed"):
        model.predict(problems.batch("mlp", 0)[0])


@by_strategy
@in_worlds(1, 2)
def test_a_closed_model_frees_its_memory_while_its_optimizer_lives(
    backend: Any, problems: Any, strategy: str
) -> None:
    model, optimizer = problems.build(backend, "mlp", strategy, "adamw")
    optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
    ledger = model.memory
    backend.barrier()
    model.close()
    backend.barrier()
    gc.collect()
    assert ledger.total == ledger.held(MemoryCategory.OPTIMIZER_STATE) > 0
    with pytest.raises(ShardingError, match="is closed"):
        optimizer.step(model, *problems.local_batch(backend, "mlp", 0))


class Layered(ms.contracts.ILayeredModel):
    """A layered model with the members of the interface and no more."""

    def __init__(self) -> None:
        self.inner = nn.MLP([5, 7, 2], seed=1)
        self.default_loss_function = nn.MSE()

    layers = property(lambda self: self.inner.layers)
    parameter_table = property(lambda self: self.inner.parameter_table)
    dtype = property(lambda self: self.inner.dtype)

    def get_layer_info(self, index: int) -> Any:
        return self.inner.get_layer_info(index)

    def fill_parameters(self, start: int, out: Any) -> None:
        self.inner.fill_parameters(start, out)

    def release_parameters(self, holder: str) -> None:
        self.inner.release_parameters(holder)

    def reclaim_parameters(self, parameters: Any) -> None:
        self.inner.reclaim_parameters(parameters)


@by_strategy
@in_worlds(1, 2)
def test_a_minimal_layered_model_can_be_unsharded(backend: Any, strategy: str) -> None:
    model = ms.as_distributed(Layered(), backend, strategy)
    model.train(np.ones((2, 5)), np.ones((2, 2)))
    with model.unsharded() as plain:
        close(plain.inner.get_parameters(), model.get_parameters())
        close(plain.inner.predict(np.ones((1, 5))), model.predict(np.ones((1, 5))))
    copied = model.deep_copy()
    copied.train(np.ones((2, 5)), np.ones((2, 2)))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "tensor"])
@pytest.mark.parametrize("kind", ["mlp", "gpt", "function"])
@in_worlds(1, 2, 3)
def test_a_computed_gradient_is_averaged_and_applied(
    backend: Any, problems: Any, strategy: str, kind: str
) -> None:
    """Compute, synchronize, apply: a step of plain descent on all ranks' batches."""
    models = [ms.as_distributed(problems.MODELS[kind](0), backend, strategy) for _ in range(2)]
    x, y = problems.batch(kind, 0)
    if strategy != "tensor":  # there all ranks compute one batch
        own = problems.part(len(x), 0, backend.rank, backend.world_size)
        x, y = x[own], y[own]
    for _ in range(2):
        models[0].train(x, y)
        computed = models[1].compute_gradients(x, y)
        averaged = models[1].synchronize_gradients()
        assert averaged is computed
        models[1].apply_gradients(averaged, models[1].sharding_configuration.learning_rate)
        expected, found = (model.get_parameters() for model in models)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
    models[0].compute_gradients(x, y)
    models[0].train(x, y)
    assert models[0].synchronize_gradients() is None, "a step forgets it"
