"""Training on a mesh, of layers and of black boxes, equals training in one process."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from registry import STEPS, check
from training_checks import Shifted
from worlds import close, refused, run

import mpishard as ms
from mpishard.models import HybridShardedModel
from mpishard.optimizers import HybridShardedOptimizer

X = np.random.default_rng(0).standard_normal((12, 5))
Y = np.sin(X[:, :2])


def on_meshes(body: Any, *meshes: tuple[int, int, int]) -> None:
    """Call ``body(backend, mesh)`` on the ranks of each mesh."""
    for mesh in meshes:
        run(functools.partial(body, mesh=mesh), size=int(np.prod(mesh)))


def wrap(backend: Any, plain: Any, mesh: tuple[int, int, int], **options: Any) -> tuple[Any, Any]:
    config = ms.ShardingConfiguration(backend, 0.1, minimum_parameter_group_size=1)
    rule = ms.optimizers.LAMB(0.01, weight_decay=0.1, clip_global_norm=0.05)
    return (
        HybridShardedModel(plain, config, *mesh, **options),
        HybridShardedOptimizer(rule, config, *mesh),
    )


def share(model: Any, length: int = len(X)) -> slice:
    return ms.ShardLayout(length, model.data_size).slice(model.data_rank)


def trained(make: Any, backend: Any, mesh: Any, data: Any, **options: Any) -> tuple[Any, Any]:
    """Losses, own gradients and parameters after each step; and the model."""
    model, optimizer = wrap(backend, make(backend.rank), mesh, **options)
    found = [model.get_parameters()]
    for step in range(STEPS):
        x, y = (part[step : step + 8] for part in data)
        mine = share(model, 8)
        found += [optimizer.step(model, x[mine], y[mine]), model.get_parameters()]
    return found, model


def equal(make: Any, data: Any, *meshes: tuple[int, int, int], **options: Any) -> None:
    """Check that every mesh trains as one process, however ranks get parameters."""
    (expected,) = run(lambda b: trained(make, b, (1, 1, 1), data)[0], size=1)
    (own,) = run(
        lambda b: [
            wrap(b, make(0), (1, 1, 1))[0].compute_gradients(*(p[part] for p in data))
            for part in (slice(0, 4), slice(4, 8))
        ],
        size=1,
    )
    theta = expected[0]

    def body(backend: Any, mesh: tuple[int, int, int]) -> None:
        found, model = trained(make, backend, mesh, data, **options)
        for actual, wanted in zip(found, expected, strict=True):
            close(actual, wanted, 1e-10)
        model.set_parameters(theta)
        close(model.get_parameters(), theta)
        for root in range(backend.world_size):
            with model.unsharded(root) as plain:
                assert (plain is not None) == (backend.rank == root)
                if plain is not None:
                    close(plain.get_parameters(), theta)
        part = model.data_rank % 2
        mine = [given[4 * part : 4 * part + 4] for given in data]
        close(model.compute_gradients(*mine), own[part])
        if model.mesh.model_size > 1:
            wrong = [given[: 4 + (model.mesh.model.rank == 1)] for given in data]
            refused(ValueError, "Divide samples by data_rank", lambda: model.train(*wrong))

    on_meshes(body, *meshes)


@check
def a_black_box_on_a_mesh(problems: Any) -> None:
    make = problems.MODELS["function"]
    for strategy in ("ddp", "zero1", "fsdp"):
        equal(make, (X, Y), (3, 1, 1), (1, 2, 2), data_parallel_strategy=strategy)


@check
def a_placed_model_on_a_mesh(problems: Any) -> None:
    equal(Shifted, (X, Y), (1, 3, 1), (2, 1, 2))


@check
def layers_on_a_mesh(problems: Any) -> None:
    """A GPT with tied embeddings, over all axes; and its outputs on every rank."""
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, 11, (12, 6)), generator.integers(-1, 11, (12, 6))
    make = problems.MODELS["tied"]
    equal(make, tokens, (3, 1, 1), (1, 2, 2), (2, 1, 2), micro_batch_count=2, schedule="1f1b")
    expected = make(0).predict(tokens[0][:5])

    def predicts(backend: Any, mesh: tuple[int, int, int]) -> None:
        model, _ = wrap(backend, make(backend.rank), mesh)
        close(model.predict(tokens[0][:5]), expected)

    on_meshes(predicts, (2, 1, 1), (1, 2, 1), (3, 1, 1))


@check
def choices_of_a_mesh(problems: Any) -> None:
    """All ranks use rank 0's stages; other differences are refused on every rank."""
    make = problems.MODELS["mlp"]

    def body(backend: Any, mesh: tuple[int, int, int]) -> None:
        costs = [1.0, 1, 1, 1, 9] if backend.rank == 0 else [9.0, 1, 1, 1, 1]
        model, _ = wrap(backend, make(0), mesh, partition_strategy=costs)
        assert model.stage_layers == ((0, 4), (4, 5))
        count = 1 + (backend.rank == 1)
        refused(
            ValueError,
            "micro_batch_count is 1, 2",
            lambda: wrap(backend, make(0), mesh, micro_batch_count=count),
        )

    on_meshes(body, (2, 1, 1))
