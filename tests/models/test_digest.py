"""`check_replicas` finds replicas that differ by a bit, with the rank and the parameter."""

import numpy as np
import pytest

import mpishard as ms
from mpishard.errors import ReplicaError, ShardingError
from mpishard.sharding import by_parameter
from mpishard.testing.worlds import in_worlds

X = np.random.default_rng(0).standard_normal((24, 4))
Y = np.tanh(X[:, :2])


def wrap(backend, strategy, **options):
    """Model and optimizer; each rank has a copy of its own where the strategy replicates."""
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    plain = ms.nn.MLP([4, 6, 2], seed=1)
    optimizer = ms.optimizers.AdamW(1e-2)
    return (
        ms.as_distributed(plain, config, strategy, **options),
        ms.as_distributed(optimizer, config, strategy, **options),
    )


def data(model, **options):
    return ms.OptimizationInputData(
        model=model, x_train=X, y_train=Y, batch_size=6, epochs=5, progress=False, **options
    )


def flip(model, name):
    """Flip one bit of this rank's copy of a parameter, in the pieces that it holds."""
    parameters = model.engine.parameters
    for piece, array in zip(
        parameters.local_pieces, parameters.owned(parameters.local_pieces), strict=True
    ):
        placement = model.engine.placement
        for region, values in by_parameter(
            placement.cut([(piece.start, array)]), placement.entries
        ):
            if region.name == name:
                values.view(np.uint8)[3] ^= 16
                return
    raise AssertionError(f"nothing of {name} is held here")


@pytest.fixture(autouse=True)
def no_shared_memory(monkeypatch):
    monkeypatch.setenv("MPISHARD_ARENA", "off")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@in_worlds(2, 3, 4)
def test_names_the_rank_and_the_parameter(backend, strategy):
    model, optimizer = wrap(backend, strategy)
    optimizer.optimize(data(model))
    assert model.check_replicas() == 4  # weight and bias of two layers
    odd = backend.world_size - 1
    if backend.rank == odd:
        flip(model, "linear1.weight")
    others = {2: "rank 0", 3: "ranks 0, 1", 4: "ranks 0-2"}[backend.world_size]
    words = (
        f"after step 20 .*: parameter 'linear1.weight' of rank {odd} differs from that of {others}"
    )
    for _ in range(2):
        with pytest.raises(ReplicaError, match=words):
            model.check_replicas()


@in_worlds(3)
def test_the_loop_compares_every_so_many_steps(backend):
    model, optimizer = wrap(backend, "ddp")

    class Faulty:
        """The inputs; reading those of the sixth step flips a bit of rank 1's parameters."""

        reads = -1  # one for the check of the first sample

        def __len__(self):
            return len(X)

        def __getitem__(self, indices):
            self.reads += 1
            if self.reads == 6 and backend.rank == 1:
                flip(model, "linear0.bias")
            return X[indices]

    with pytest.raises(ReplicaError, match=r"after step 8 .*'linear0.bias' of rank 1 differs from"):
        optimizer.optimize(
            ms.OptimizationInputData(
                model=model,
                x_train=Faulty(),
                y_train=Y,
                batch_size=6,
                epochs=5,
                progress=False,
                digest_every=4,
            )
        )
    assert optimizer.steps == 8


@in_worlds(4)
def test_a_mesh_compares_copies_of_tensor_and_data_ranks(backend):
    model, optimizer = wrap(
        backend, "hybrid", pipeline_parallel_size=1, tensor_parallel_size=2, data_parallel_size=2
    )
    optimizer.optimize(data(model, digest_every=7))
    bias = "linear1.bias"  # whole on every rank
    assert model.check_replicas() > 0
    if backend.rank == 2:
        flip(model, bias)
    with pytest.raises(ReplicaError, match=f"'{bias}' of rank 2 differs from that of rank"):
        model.check_replicas()


@in_worlds(2)
def test_sharded_parameters_have_no_replica(backend, caplog):
    model, optimizer = wrap(backend, "fsdp")
    optimizer.optimize(data(model, digest_every=2))
    assert model.check_replicas() == 0


def test_one_line_is_logged_if_there_is_nothing_to_compare(caplog):
    def main(backend):
        model, optimizer = wrap(backend, "fsdp")
        optimizer.optimize(data(model, digest_every=2))

    ms.run_in_threads(2, main)
    assert caplog.text.count("digest_every has no effect: no parameter has a copy") == 1


def test_nodes_are_compared_and_ranks_that_share_a_copy_are_not(monkeypatch):
    monkeypatch.delenv("MPISHARD_ARENA")

    def main(backend):
        model, optimizer = wrap(backend, "zero1")
        optimizer.optimize(data(model))
        compared = model.check_replicas()
        if backend.rank == 2:
            flip(model, "linear1.weight")
        with pytest.raises(ReplicaError) as differs:
            model.check_replicas()
        return compared, str(differs.value)

    def on_one_node(backend):
        model, optimizer = wrap(backend, "zero1")
        optimizer.optimize(data(model))
        return model.check_replicas()

    assert ms.run_in_threads(2, on_one_node) == [0, 0]
    monkeypatch.setenv("MPISHARD_VIRTUAL_NODES", "2")
    (compared, words), *_ = ms.run_in_threads(4, main)
    assert compared == 4
    assert "of rank 2 differs from that of rank 0. Ranks of a node share one copy" in words


@in_worlds(2)
def test_replicas_that_may_differ_are_not_compared(backend):
    config = ms.ShardingConfiguration(backend, auto_sync_gradients=False)
    model = ms.as_distributed(ms.nn.MLP([4, 6, 2], seed=1), config, "ddp")
    model.train(X[:4], Y[:4])
    with pytest.raises(ShardingError, match="check_replicas needs equal replicas"):
        model.check_replicas()
