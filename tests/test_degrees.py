"""`as_distributed` with the strategies that divide one replica, and its options for them."""

import numpy as np
import pytest

import mpishard as ms
from mpishard.testing.worlds import in_worlds

X = np.random.default_rng(0).standard_normal((12, 5))
Y = np.sin(X[:, :2])

# Strategy, options, mesh, schedule, micro-batches.
GIVEN = [
    ("tensor", {}, (1, 4, 1), "GPipe", 1),
    ("tensor", {"sequence_parallel": False, "checkpoint_config": None}, (1, 4, 1), "GPipe", 1),
    ("pipeline", {}, (4, 1, 1), "GPipe", 1),
    ("pipeline", {"micro_batch_count": 3, "schedule": "1f1b"}, (4, 1, 1), "1F1B", 3),
    ("PipelineParallel", {"num_micro_batches": 3}, (4, 1, 1), "GPipe", 3),
    ("hybrid", {}, (1, 1, 4), "GPipe", 1),
    ("Hybrid", {"pipeline_parallel_size": 2}, (2, 1, 2), "GPipe", 1),
    ("hybrid",
     {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "data_parallel_size": 1,
      "num_micro_batches": 2, "micro_batch_count": 2, "schedule": ms.pipeline.GPipeSchedule(),
      "data_parallel_strategy": "fsdp", "order": ("data", "pipeline", "tensor"),
      "partition_strategy": ms.pipeline.UniformPartitionStrategy()},
     (2, 2, 1), "GPipe", 2),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "options", "mesh", "schedule", "micro_batches"), GIVEN)
@in_worlds(4)
def test_model_and_optimizer_take_the_same_options(
    backend, strategy, options, mesh, schedule, micro_batches
):
    plain = ms.nn.MLP([5, 7, 6, 5, 2], activation="tanh", seed=0)
    model = ms.as_distributed(plain, backend, strategy, **options)
    optimizer = ms.as_distributed(ms.optimizers.SGD(0.1), backend, strategy, **options)
    assert model.mesh.sizes == mesh
    assert model.schedule.name == schedule
    assert model.micro_batch_count == micro_batches
    mine = ms.ShardLayout(12, model.data_size).slice(model.data_rank)
    optimizer.step(model, X[mine], Y[mine])
    alone = ms.nn.MLP([5, 7, 6, 5, 2], activation="tanh", seed=0)
    expected = alone.get_parameters() - 0.1 * alone.compute_gradients(X, Y)
    np.testing.assert_allclose(model.get_parameters(), expected, rtol=0, atol=1e-12)
    # A plain model is wrapped as the options say.
    other = ms.as_distributed(ms.optimizers.SGD(0.1), backend, strategy, **options)
    result = other.optimize(
        ms.OptimizationInputData(
            model=ms.nn.MLP([5, 7, 6, 5, 2], activation="tanh", seed=0), x_train=X, y_train=Y,
            batch_size=12, progress=False,
        )
    )  # fmt: skip
    assert result.model.mesh.sizes == mesh
    assert (result.model.schedule.name, result.model.micro_batch_count) == (schedule, micro_batches)
    np.testing.assert_allclose(result.model.get_parameters(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "options", "kind", "message"),
    [
        ("fsdp", {"schedule": "1f1b"}, TypeError,
         "strategy 'fsdp' takes no schedule; it takes no options"),
        ("tensor", {"tensor_parallel_size": 1}, TypeError,
         "it takes sequence_parallel, checkpoint_config; strategy 'hybrid' takes all of these"),
        ("pipeline", {"order": ("data",), "degree": 3}, TypeError,
         "takes no order, degree; it takes micro_batch_count, schedule, partition_strategy"),
        ("hybrid", {"degree": 3}, TypeError, "takes no degree; it takes pipeline_parallel_size"),
        ("pipeline", {"num_micro_batches": 3, "micro_batch_count": 2}, ValueError,
         "num_micro_batches 3 and micro_batch_count 2 are two names of one number"),
        ("pipeline", {"num_micro_batches": 0}, ValueError, "must be 1 or more, got 0"),
        ("hybrid", {"pipeline_parallel_size": 2}, ValueError, "does not divide the world of 1"),
        ("threeD", {}, ValueError, "zero3, fsdp, tensor, pipeline, hybrid"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "thing", [lambda: ms.nn.MLP([2, 2]), ms.optimizers.SGD], ids=["model", "optimizer"]
)
def test_options_that_do_not_fit_are_refused(thing, strategy, options, kind, message):
    def body(backend):
        sequence = backend._sequence
        with pytest.raises(kind, match=message):
            ms.as_distributed(thing(), backend, strategy, **options)
        assert backend._sequence == sequence

    ms.run_in_threads(1, body)


def test_different_meshes_and_micro_batches_are_refused():
    def body(backend):
        model = ms.as_distributed(ms.nn.MLP([5, 4, 2]), backend, "hybrid", pipeline_parallel_size=2)
        optimizer = ms.as_distributed(
            ms.optimizers.SGD(), backend, "hybrid", tensor_parallel_size=2
        )
        with pytest.raises(ms.errors.ShardingError, match=r"is 2 x 1 x 1 .* optimizer's 1 x 2 x 1"):
            optimizer.step(model, X, Y)
        model = ms.as_distributed(ms.nn.MLP([5, 4, 2]), backend, "pipeline", micro_batch_count=2)
        optimizer = ms.as_distributed(ms.optimizers.SGD(), backend, "pipeline", num_micro_batches=3)
        with pytest.raises(
            ms.errors.ShardingError, match="micro_batch_count 3, and the model with 2"
        ):
            optimizer.step(model, X, Y)

    ms.run_in_threads(2, body)
