"""Replicas of several ranks, sharded inside, that train alone for H steps."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from computed_once import computed_once
from textbook_steps import steps_for

import mpishard as ms
from mpishard import nn
from mpishard.errors import NonFiniteLossError, PeerError
from mpishard.observe import merge_traces, open_trace, trace
from mpishard.optimizers import LAMB, SGD, Adam, LocalSGDOptimizer
from mpishard.testing.worlds import in_worlds

STRATEGIES = ["ddp", "zero1", "zero2", "fsdp"]
generator = np.random.default_rng(5)
X = generator.standard_normal((29, 6))
Y = np.sin(X[:, :3])


def plain(seed=2):
    return nn.MLP([6, 8, 3], activation="tanh", seed=seed)


def build(backend, strategy, rule, period, *, size=2, outer=None):
    config = ms.ShardingConfiguration(
        backend, minimum_parameter_group_size=1, replica_size=min(size, backend.world_size)
    )
    model = ms.as_distributed(plain(), config, strategy)
    return model, LocalSGDOptimizer(rule, config, period, outer, strategy=strategy)


def share(step, rank, size):
    """Return uneven batches, other ones in each step; in each fifth the last rank has none."""
    cuts = [k * 29 // size + (0 < k < size) for k in range(size + 1)]
    rows = np.random.default_rng(step).permutation(29)[cuts[rank] : cuts[rank + 1]]
    if step % 5 == 3 and rank == size - 1 > 0:
        rows = rows[:0]
    return X[rows], Y[rows]


@computed_once
def textbook(size, world, steps, period, outer):
    """Return the parameters of all replicas: momentum in each, Nesterov outside."""
    model = plain()
    start = model.get_parameters()
    count = world // size
    thetas, velocities = ([v.copy() for _ in range(count)] for v in (start, 0 * start))
    weights, outer_velocity = np.zeros(count), 0 * start
    for step in range(steps):
        for replica in range(count):
            parts = [share(step, replica * size + k, world) for k in range(size)]
            x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            if len(x):
                gradient = model.with_parameters(thetas[replica]).compute_loss_and_gradients(x, y)
                velocities[replica] = 0.9 * velocities[replica] + gradient[1]
                thetas[replica] = thetas[replica] - 1e-3 * velocities[replica]
            weights[replica] += len(x)
        if (step + 1) % period == 0:
            mean = sum(w * t for w, t in zip(weights, thetas, strict=True)) / weights.sum()
            if outer:
                outer_velocity = 0.9 * outer_velocity + start - mean
                mean = start - 0.7 * (start - mean + 0.9 * outer_velocity)
            start, weights = mean, np.zeros(count)
            thetas = [mean.copy() for _ in range(count)]
    return thetas


@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(2, 4, 6)
def test_many_steps_are_the_textbooks(backend, strategy):
    outer = SGD(0.7, momentum=0.9, nesterov=True) if strategy != "zero1" else None
    size = 3 if backend.world_size == 6 else 2
    model, optimizer = build(backend, strategy, SGD(1e-3, momentum=0.9), 4, size=size, outer=outer)
    steps = steps_for(backend.world_size)
    for step in range(steps):
        optimizer.step(model, *share(step, backend.rank, backend.world_size))
    expected = textbook(size, backend.world_size, steps, 4, outer)
    mine = model.get_parameters()
    np.testing.assert_allclose(mine, expected[backend.rank // size], rtol=0, atol=1e-12)
    optimizer.settle()
    settled = model.get_parameters()
    assert (backend.all_gather(settled[None]) == settled).all()
    assert (model.check_replicas() > 0) == (backend.world_size > size)


@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(1, 2, 4)
def test_a_period_of_one_with_descent_is_ddp(backend, strategy):
    model, optimizer = build(backend, strategy, SGD(0.05), 1)
    config = ms.ShardingConfiguration(backend)
    other, exact = ms.DDPModel(plain(), config), ms.DDPOptimizer(SGD(0.05), config)
    for step in range(20):
        batch = share(step, backend.rank, backend.world_size)
        losses = optimizer.step(model, *batch), exact.step(other, *batch)
        np.testing.assert_allclose(*losses, rtol=1e-12)
    np.testing.assert_allclose(model.get_parameters(), other.get_parameters(), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("messages_only")
@pytest.mark.parametrize("sizes", [None, (1, 1, 2), (1, 2, 1)])
@in_worlds(4)
def test_every_replica_begins_with_the_first_ones_values(backend, sizes):
    config = ms.ShardingConfiguration(backend, replica_size=2)
    mine = plain(backend.rank)
    model = ms.HybridShardedModel(mine, config, *sizes) if sizes else ms.FSDPModel(mine, config)
    assert (model.get_parameters() == plain(0).get_parameters()).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nodes_are_replicas(monkeypatch, strategy):
    monkeypatch.setenv("MPISHARD_VIRTUAL_NODES", "2")

    def main(backend):
        config = ms.ShardingConfiguration(
            backend, replica_size="node", minimum_parameter_group_size=1
        )
        assert config.replica_size == 2
        model = ms.as_distributed(plain(), config, strategy)
        optimizer = LocalSGDOptimizer(SGD(1e-3, momentum=0.9), config, 4, strategy=strategy)
        for step in range(9):
            optimizer.step(model, *share(step, backend.rank, 4))
        return model.get_parameters()

    expected = textbook(2, 4, 9, 4, None)
    for rank, found in enumerate(ms.run_in_threads(4, main)):
        np.testing.assert_allclose(found, expected[rank // 2], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("strategy", "nodes", "size"), [
    ("ddp", 2, 2), ("fsdp", 2, 2), ("ddp", 1, None), ("ddp", 4, None),
])  # fmt: skip
def test_several_nodes_are_the_replicas_by_default(monkeypatch, strategy, nodes, size):
    monkeypatch.setenv("MPISHARD_VIRTUAL_NODES", str(nodes))

    def main(backend):
        config = ms.ShardingConfiguration(backend)
        optimizer = LocalSGDOptimizer(SGD(1e-3), config, 2, strategy=strategy)
        assert config.replica_size is None
        assert optimizer.sharding_configuration.replica_size == size
        optimizer.optimize(ms.OptimizationInputData(
            model=plain(), x_train=X, y_train=Y, max_steps=3, progress=False
        ))  # fmt: skip
        replica = optimizer.model.engine.replica
        assert replica.data.world_size == (size or 4)
        if size:
            assert (replica.data.axis, replica.across.axis) == ("data", "replica")

    ms.run_in_threads(4, main)


def test_settle_waits_for_ranks_of_the_node_that_read():
    def main(backend):
        config = ms.ShardingConfiguration(backend, replica_size=2)
        model = ms.FSDPModel(plain(), config)
        optimizer = LocalSGDOptimizer(SGD(0.1), config, 4, SGD(0.5), strategy="fsdp")
        for step in range(3):
            optimizer.step(model, *share(step, backend.rank, 2))
        before = model.predict(X)
        if backend.rank == 1:
            time.sleep(0.1)
        assert (model.predict(X) == before).all()
        optimizer.settle()
        assert (model.predict(X) != before).any()

    ms.run_in_threads(2, main)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(2, 4)
def test_optimize_divides_samples_saves_and_resumes(backend, shared_path, strategy):
    def run(limit, folder):
        config = ms.ShardingConfiguration(backend, replica_size=2)
        outer = SGD(0.7, momentum=0.9, nesterov=True)
        optimizer = LocalSGDOptimizer(Adam(1e-3), config, 3, outer, strategy=strategy)
        return optimizer.optimize(ms.OptimizationInputData(
            model=plain(), x_train=X, y_train=Y, x_validation=X, y_validation=Y, batch_size=8,
            validate_every=4, max_steps=limit, progress=False, checkpoint=shared_path / folder,
            checkpoint_every=5, keep_best=True,
        ))  # fmt: skip

    whole = run(12, "whole")
    run(10, "parts")
    rest = run(12, "parts")
    assert whole.weight == 3 * 29
    assert rest.loss_history == whole.loss_history[10:]
    assert rest.validation_history == whole.validation_history
    result = whole.model.get_parameters()
    assert (backend.all_gather(result[None]) == result).all()


def test_another_number_of_replicas_of_another_size_goes_on(tmp_path):
    def run(backend, strategy, size, first, last):
        model, optimizer = build(backend, strategy, Adam(1e-3), 2, size=size)
        optimizer.bind(model)
        if first:
            ms.checkpoint.load(tmp_path / "run", model, optimizer)
        else:
            for step in range(last):
                optimizer.step(model, *share(step, backend.rank, backend.world_size))
            ms.checkpoint.save(tmp_path / "run", model, optimizer)
        moment = optimizer.state["first_moment"]
        if strategy == "ddp":
            return backend.rank // size, moment.copy()
        group = model.engine.backend.all_gather
        return backend.rank // size, np.sort(group(moment.copy()))

    written = dict(ms.run_in_threads(4, run, "fsdp", 2, 0, 4))
    for size, strategy, world in ((2, "fsdp", 4), (1, "ddp", 2), (2, "ddp", 4), (3, "zero1", 6)):
        for replica, moment in ms.run_in_threads(world, run, strategy, size, 4, 4):
            np.testing.assert_array_equal(np.sort(moment), written[replica])


@in_worlds(2, 4)
def test_a_value_that_is_not_finite_stops_all_replicas(backend):
    model, optimizer = build(backend, "fsdp", SGD(0.01), 3)
    optimizer.step(model, *share(0, backend.rank, backend.world_size))
    before = model.get_parameters()
    x, y = share(1, backend.rank, backend.world_size)
    bad = np.full_like(x, np.nan) if backend.rank == 1 else x
    with pytest.raises(NonFiniteLossError, match=r"the loss of ranks \[1\]"):
        optimizer.step(model, bad, y)
    assert (model.get_parameters() == before).all()
    optimizer.step(model, x, y)


@in_worlds(2)
def test_other_optimizers_than_local_sgd_are_refused(backend):
    config = ms.ShardingConfiguration(backend, replica_size=1)
    model = ms.FSDPModel(plain(), config)
    for call in (
        lambda: ms.FSDPOptimizer(SGD(), config).step(model, X, Y),
        lambda: model.train(X, Y),
        model.synchronize_gradients,
    ):
        with pytest.raises((ValueError, RuntimeError), match=r"replica_size|before"):
            call()
    for size, error in ((3, ValueError), (0, ValueError), ("rack", TypeError)):
        with pytest.raises(error, match="replica_size"):
            ms.ShardingConfiguration(backend, replica_size=size)
    with pytest.raises(TypeError, match=r'a number of ranks or "node", got .rack.'):
        ms.ShardingConfiguration(backend, replica_size="rack")
    differing = ms.ShardingConfiguration(backend, replica_size=1 + backend.rank)
    for kind in (ms.FSDPModel, ms.HybridShardedModel):
        with pytest.raises(ValueError, match="replica_size is 1, 2"):
            kind(plain(), differing)
    alone = ms.ShardingConfiguration(backend)
    for strategy, match in (("fsdp", "give Sharding"), ("tensor", "must be one of")):
        with pytest.raises(ValueError, match=match):
            LocalSGDOptimizer(SGD(), alone, strategy=strategy)


@pytest.mark.parametrize(
    "kind", [LocalSGDOptimizer, ms.GradientCompressionOptimizer, ms.AsyncSGDOptimizer]
)
def test_a_model_of_one_replica_is_refused_where_nodes_are_replicas(kind, monkeypatch):
    monkeypatch.setenv("MPISHARD_VIRTUAL_NODES", "2")

    def main(backend):
        config = ms.ShardingConfiguration(backend)
        model = ms.FSDPModel(plain(), config)
        optimizer = kind(SGD(), config, 1, strategy="fsdp")
        sent = dict(backend.traffic.calls)
        with pytest.raises(
            ValueError, match="this FSDPModel, wrapped without replica_size, is one"
        ):
            optimizer.step(model, X, Y)
        assert dict(backend.traffic.calls) == sent

    ms.run_in_threads(4, main)


@in_worlds(2)
def test_replicas_are_made_equal_before_they_are_compared(backend):
    optimizer = LocalSGDOptimizer(SGD(1e-3), ms.ShardingConfiguration(backend), 100)
    found = []

    class Compared:
        def on_step(self, run, record):
            found.append(optimizer.model.engine.replicas.weight > 0)

    optimizer.optimize(
        ms.OptimizationInputData(
            model=plain(),
            x_train=X,
            y_train=Y,
            batch_size=len(X) // 6,
            digest_every=2,
            max_steps=6,
            progress=False,
            callbacks=[Compared()],
        )
    )
    # Replicas differ after each step, and the comparison after every second one finds no damage.
    assert found == [True] * 6


# ---------------------------------------------------------------------------------- on a mesh

NESTEROV = SGD(0.7, momentum=0.9, nesterov=True)
LAST = ("pipeline", "data", "replica", "tensor")
on_meshes = pytest.mark.parametrize(
    ("world_size", "mesh", "inside", "options"),
    [
        (2, (1, 2, 1), "zero1", {}),
        (4, (2, 1, 1), "zero1", {}),
        (4, (1, 1, 2), "fsdp", {"order": ("data", "tensor", "pipeline")}),
        (4, (2, 2, 1), "ddp", {}),
    ],
)
# Two replicas in a world of eight threads.
IN_THREE_AXES = [
    ((1, 2, 2), "fsdp", {}),
    ((2, 1, 2), "fsdp", {"micro_batch_count": 3, "schedule": "1f1b"}),
]


def build_mesh(backend, mesh, rule, period=4, *, outer=None, inside="fsdp", **options):
    """A model and its optimizer, whose replicas have the ranks of ``mesh``."""
    config = ms.ShardingConfiguration(
        backend, minimum_parameter_group_size=1, replica_size=int(np.prod(mesh))
    )
    model = ms.HybridShardedModel(plain(2), config, *mesh, data_parallel_strategy=inside, **options)
    return model, LocalSGDOptimizer(rule, config, period, outer, strategy="hybrid")


def train(model, optimizer, steps):
    for step in steps:
        optimizer.step(model, *share(step, model.data_rank, model.data_size))
    return model.get_parameters()


@pytest.mark.parametrize("outer", [None, NESTEROV])
@in_worlds(4)
def test_copies_in_a_replica_stay_equal_if_changes_travel_as_int8(backend, outer):
    """Ranks of a tensor axis hold copies of some parameters beside slices of others."""
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1000, replica_size=2)
    found = []
    for exchange in (None, "int8"):
        # Slices of unequal size: copies do not begin at one place.
        model = ms.HybridShardedModel(nn.MLP([6, 7, 3], "tanh", seed=2), config, 1, 2)
        first = model.get_parameters()
        optimizer = LocalSGDOptimizer(
            SGD(1e-2), config, 2, outer, strategy="hybrid", exchange=exchange
        )
        found.append(train(model, optimizer, range(4)))
        assert model.check_replicas() > 0
    exact, coded = found
    assert 0 < np.abs(exact - coded).max() < 0.05 * np.abs(exact - first).max()


@in_worlds(4)
def test_a_pipeline_stage_may_be_frozen_as_a_whole(backend):
    rule = SGD(1e-3, parameter_options={"linear0.*": {"frozen": True}})
    model, optimizer = build_mesh(backend, (2, 1, 1), rule, 2, outer=NESTEROV)
    before = model.get_parameters()
    train(model, optimizer, range(3))
    optimizer.settle()
    after = model.get_parameters()
    assert (after != before).tolist() == [False] * (model.parameter_count - 27) + [True] * 27


def many_steps(backend, mesh, inside, options):
    outer = None if inside == "ddp" else NESTEROV
    model, optimizer = build_mesh(
        backend, mesh, SGD(1e-3, momentum=0.9), outer=outer, inside=inside, **options
    )
    replicas = backend.world_size // int(np.prod(mesh))
    assert (model.data_size, model.mesh.replica_count) == (replicas * mesh[2], replicas)
    assert model.data_rank_of(backend.rank) == model.data_rank
    properties = model.get_model_metadata().properties
    place = (replicas, model.mesh.replica_rank) if replicas > 1 else (None, None)
    assert (properties.get("ReplicaCount"), properties.get("ReplicaRank")) == place
    steps = steps_for(backend.world_size)
    mine = train(model, optimizer, range(steps))
    expected = textbook(mesh[2], model.data_size, steps, 4, outer)
    np.testing.assert_allclose(mine, expected[model.mesh.replica_rank], rtol=0, atol=1e-12)
    if inside == "fsdp":  # each replica is sharded over all its ranks
        mesh_ranks = model.mesh.group.all_gather(np.array([model.local_parameter_shard.size]))
        assert max(mesh_ranks) <= 2 * min(mesh_ranks) + 8
        assert max(mesh_ranks) < len(mine)
    optimizer.settle()
    settled = model.get_parameters()
    assert (backend.all_gather(settled[None]) == settled).all()
    assert replicas == 1 or model.check_replicas() > 0


@on_meshes
@in_worlds()
def test_many_steps_of_meshes_are_the_textbooks(backend, mesh, inside, options):
    many_steps(backend, mesh, inside, options)


@pytest.mark.parametrize(("mesh", "inside", "options"), IN_THREE_AXES)
def test_many_steps_of_replicas_with_three_axes_are_the_textbooks(mesh, inside, options):
    ms.run_in_threads(8, many_steps, mesh, inside, options)


def steps_of_one_period(backend, mesh, inside, options):
    model, optimizer = build_mesh(backend, mesh, SGD(0.05), 1, inside=inside, **options)
    alone = ms.ShardingConfiguration(
        backend.split(model.engine.replica.members[model.data_rank].index(backend.rank),
                      model.data_rank)
    )  # fmt: skip
    other, exact = ms.DDPModel(plain(), alone), ms.DDPOptimizer(SGD(0.05), alone)
    found, expected = train(model, optimizer, range(20)), train(other, exact, range(20))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    batch = share(3, model.data_rank, model.data_size)
    (loss, gradient), (known, right) = (m.loss_and_gradients(*batch) for m in (model, other))
    np.testing.assert_allclose(loss, known, rtol=1e-12)
    np.testing.assert_allclose(gradient, right, rtol=0, atol=1e-12)


@on_meshes
@in_worlds()
def test_a_period_of_one_of_meshes_is_ddp(backend, mesh, inside, options):
    steps_of_one_period(backend, mesh, inside, options)


def test_a_period_of_one_of_three_axes_is_ddp():
    ms.run_in_threads(8, steps_of_one_period, (1, 2, 2), "zero2", {"order": LAST})


def saved_and_loaded(backend, shared_path, mesh, inner, outer):
    model, optimizer = build_mesh(backend, mesh, inner, outer=outer)
    train(model, optimizer, range(8))
    optimizer.settle()
    ms.checkpoint.save(shared_path / "run", model, optimizer)
    expected = train(model, optimizer, range(8, 15))
    again, other = build_mesh(backend, mesh, inner, outer=outer)
    ms.checkpoint.load(shared_path / "run", again, other)
    assert train(again, other, range(8, 15)).tobytes() == expected.tobytes()
    # As many replicas, each of the ranks of its data axis.
    place = model.engine.replica.members[model.data_rank].index(backend.rank)
    config = ms.ShardingConfiguration(
        backend.split(place, model.data_rank), replica_size=mesh[2] if mesh[2] > 1 else None
    )
    alone = ms.DDPModel(plain(), config)
    third = LocalSGDOptimizer(inner, config, 4, outer)
    ms.checkpoint.load(shared_path / "run", alone, third)
    np.testing.assert_allclose(train(alone, third, range(8, 15)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("world_size", "mesh", "inner", "outer"),
    [
        (2, (1, 2, 1), Adam(1e-3), NESTEROV), (4, (2, 1, 1), Adam(1e-3), LAMB(0.1)),
        (4, (1, 1, 2), LAMB(1e-3), None),
    ],
)  # fmt: skip
@in_worlds()
def test_a_checkpoint_goes_on_with_the_same_bits_and_without_a_mesh(
    backend, shared_path, inner, outer, mesh
):
    saved_and_loaded(backend, shared_path, mesh, inner, outer)


@pytest.mark.parametrize(
    ("mesh", "inner", "outer"),
    [
        ((1, 2, 2), LAMB(1e-3), LAMB(0.1)),
        ((2, 1, 2), Adam(1e-3, clip_global_norm=0.1), NESTEROV),
    ],
)
def test_a_checkpoint_of_three_axes_goes_on_too(tmp_path, mesh, inner, outer):
    ms.run_in_threads(8, saved_and_loaded, tmp_path, mesh, inner, outer)


def test_another_number_of_replicas_with_other_axes_goes_on(tmp_path):
    def begin(backend):
        model, optimizer = build_mesh(backend, (1, 2, 2), Adam(1e-3), 2, outer=NESTEROV)
        train(model, optimizer, range(4))
        ms.checkpoint.save(tmp_path / "run", model, optimizer)

    def go_on(backend, mesh):
        model, optimizer = build_mesh(backend, mesh, Adam(1e-3), 2, outer=NESTEROV)
        ms.checkpoint.load(tmp_path / "run", model, optimizer)
        return model.mesh.replica_rank, train(model, optimizer, range(4, 7))

    def go_on_without(backend, size):
        model, optimizer = build(backend, "ddp", Adam(1e-3), 2, size=size, outer=NESTEROV)
        ms.checkpoint.load(tmp_path / "run", model, optimizer)
        return train(model, optimizer, range(4, 7))

    ms.run_in_threads(8, begin)
    for world, mesh in ((8, (2, 1, 2)), (4, (2, 2, 1)), (8, (1, 1, 2)), (6, (1, 2, 1))):
        size, found = mesh[2], ms.run_in_threads(world, go_on, mesh)
        expected = ms.run_in_threads(world // mesh[0] // mesh[1], go_on_without, size)
        for replica, parameters in found:
            np.testing.assert_allclose(parameters, expected[replica * size], rtol=0, atol=1e-12)


@in_worlds(4)
def test_the_loop_divides_samples_among_replicas(backend):
    found = []
    for mesh in ((1, 2, 1), (2, 1, 1), (1, 1, 2)):
        model, optimizer = build_mesh(backend, mesh, SGD(0.05), 2 if mesh[2] == 1 else 1)
        result = optimizer.optimize(
            ms.OptimizationInputData(
                model=model, x_train=X, y_train=Y, batch_size=8, epochs=2, progress=False
            )
        )
        found.append((result.loss_history, model.get_parameters()))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-12)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=0, atol=1e-12)


@in_worlds(4)
def test_a_loss_that_is_not_finite_stops_all_replicas(backend):
    model, optimizer = build_mesh(backend, (1, 2, 1), SGD(0.05))
    x = X * np.nan if model.data_rank == 1 else X
    with pytest.raises(NonFiniteLossError):
        optimizer.step(model, x, Y)


@in_worlds(2, 4)
def test_unfit_meshes_are_refused(backend):
    size = backend.world_size
    config = ms.ShardingConfiguration(backend, replica_size=2)
    for sizes, words in (
        ((1, 3), r"pipeline 1 x tensor 3 = 3 does not divide .* of 2 ranks"),
        ((2, 2, 1), r"2 x tensor 2 x data 1 = 4, and .* has 2 ranks"),
    ):
        with pytest.raises(ValueError, match=words):
            ms.HybridShardedModel(plain(), config, *sizes)
    for kind in (ms.TensorParallelModel, ms.PipelineParallelModel) if size > 2 else ():
        with pytest.raises(ValueError, match=r"makes 2 .*use strategy='hybrid' with .* 2 ranks"):
            kind(plain(), config)
    leaves = ms.ShardingConfiguration(backend, replica_size=2, gradient_leaves=4)
    for kind in (ms.FSDPModel, ms.HybridShardedModel):
        with pytest.raises(ValueError, match=r"=4 gives .* and replica_size=2 would"):
            kind(plain(), leaves)
    assert backend.traffic.total_bytes == 0
    model = ms.HybridShardedModel(nn.MLP([6, 8, 3]), config, 1, 2)
    with pytest.raises(ValueError, match=r"replica_size makes .*HybridShardedOptimizer"):
        ms.HybridShardedOptimizer(SGD(), config, 1, 2, 1).step(model, X, Y)
    with pytest.raises(ValueError, match=rf"must be given the same: rank {size - 2}: 29 samples"):
        LocalSGDOptimizer(SGD(), config, strategy="hybrid").step(
            model, X[: 29 - (backend.rank == size - 1)], Y[: 29 - (backend.rank == size - 1)]
        )


def test_a_replica_predicts_without_the_others():
    def main(backend):
        model, optimizer = build_mesh(backend, (1, 2, 2), SGD(0.05))
        train(model, optimizer, range(2))
        if model.mesh.replica_rank == 1:
            model.predict(X)
            model.compute_gradients(X, Y)
        backend.barrier()

    ms.run_in_threads(8, main)


def test_a_report_names_the_axis(tmp_path):
    def main(backend):
        model, optimizer = build_mesh(backend, (1, 2, 2), SGD(0.05), 1)
        with trace(tmp_path, backend):
            train(model, optimizer, range(1))
        if backend.rank != 5:
            model.mesh.replica.barrier()

    with pytest.raises(PeerError, match=r"rank 5 left .* of replica group \d+ \(ranks 1, 5\)"):
        ms.run_in_threads(8, main)
    merge_traces(open_trace(tmp_path), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    axes = {event["args"]["axis"] for event in events if "axis" in event.get("args", {})}
    assert axes >= {"replica", "data", "tensor"}


@pytest.mark.usefixtures("messages_only")
@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 1, 2)])
def test_replicas_exchange_what_they_own_in_their_last_step_alone(mesh):
    def main(backend):
        model, optimizer = build_mesh(backend, mesh, SGD(0.05), 3, outer=NESTEROV)
        across = model.mesh.replica
        across.traffic.reset()
        train(model, optimizer, range(2))
        assert across.traffic.total_bytes == 0
        train(model, optimizer, range(2, 3))
        owned, sent = model.local_parameter_shard.nbytes, across.traffic.total_bytes
        return np.array([owned, sent, model.parameter_count * 8])

    owned, sent, whole = np.sum(ms.run_in_threads(8, main), axis=0)
    assert sent == 2 * owned / 2
    assert whole / 8 <= owned / 2 < 1.3 * whole / 8  # tensor ranks have copies of some biases
