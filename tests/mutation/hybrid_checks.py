"""Models on meshes: training equals training in one process; ranks that disagree get errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from registry import CHECKS, PATHS, STEPS, check, is_late
from worlds import close, idle, refused, run

import mpishard as ms
from mpishard.models import HybridShardedModel
from mpishard.optimizers import HybridShardedOptimizer

# Tied embeddings on one rank and on two of three; data axes of both kinds.
MESHES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "2 x 1 x 1": ((2, 1, 1), {"schedule": "zb-v", "micro_batch_count": 2}),
    "3 x 1 x 1": ((3, 1, 1), {"schedule": "zb-h1", "micro_batch_count": 3}),
    "2 x 2 x 1": ((2, 2, 1), {"sequence_parallel": True}),
    "2 x 1 x 2": (
        (2, 1, 2),
        {"schedule": "1f1b", "micro_batch_count": 2, "data_parallel_strategy": "fsdp"},
    ),
    "1 x 2 x 2": ((1, 2, 2), {"data_parallel_strategy": "zero1"}),
}  # fmt: skip


def build(
    backend: Any, problems: Any, name: str, kind: str = "tied", rule: Any = None, **options: Any
) -> tuple[Any, Any]:
    mesh, given = MESHES[name]
    config = ms.ShardingConfiguration(backend, 0.1, minimum_parameter_group_size=1)
    plain = problems.MODELS[kind](backend.rank)
    model = HybridShardedModel(plain, config, *mesh, **(given | options))
    rule = problems.RULES["sgd"]() if rule is None else rule
    return model, HybridShardedOptimizer(rule, config, *mesh)


def local_batch(model: Any, problems: Any, step: int, kind: str = "tied") -> tuple[Any, Any]:
    x, y = problems.batch(kind, step)
    mine = problems.part(len(x), step, model.data_rank, model.data_size)
    return x[mine], y[mine]


def on_ranks(name: str, body: Callable[[Any], Any], path: str = "messages") -> list[Any]:
    return run(body, path, int(np.prod(MESHES[name][0])))


def trains(
    problems: Any,
    name: str,
    path: str,
    kind: str = "tied",
    manner: Callable[[], Any] | None = None,
) -> None:
    """Compare after each step; or only at the end, which shows results that nobody waited for."""
    expected = problems.train_sequentially(kind, problems.TEXTBOOK["sgd"], steps=STEPS)

    def body(backend: Any) -> None:
        model, optimizer = build(backend, problems, name, kind)
        for step in range(STEPS):
            loss = optimizer.step(model, *local_batch(model, problems, step, kind))
            if not np.isnan(expected.losses[step]):
                close(loss, expected.losses[step])
            if manner is None or step == STEPS - 1:
                close(model.get_parameters(), expected.parameters[step])

    if manner is None:
        on_ranks(name, body, path)
    else:
        with manner():
            on_ranks(name, body, path)


for _name in MESHES:
    CHECKS[f"mesh {_name}: equality"] = functools.partial(trains, name=_name, path="messages")
for _path in PATHS:
    for _label, _manner in (("idle works", idle), ("a late rank", is_late)):
        CHECKS[f"mesh 2 x 1 x 2: {_label}, {_path}"] = functools.partial(
            trains, name="2 x 1 x 2", path=_path, manner=_manner
        )


@check
def parameters_of_a_mesh(problems: Any) -> None:
    """Parameters that are set, gathered, on one rank alone; the local gradient; outputs."""

    def body(backend: Any, name: str) -> None:
        theta = problems.MODELS["tied"](7).get_parameters()
        x, y = problems.batch("tied", 0)
        model, _ = build(backend, problems, name)
        close(model.get_parameters(), problems.MODELS["tied"](0).get_parameters())
        model.set_parameters(theta)
        close(model.get_parameters(), theta)
        for root in range(backend.world_size):
            with model.unsharded(root) as given:
                assert (given is not None) == (backend.rank == root)
                if given is not None:
                    close(given.get_parameters(), theta)
        plain = problems.MODELS["tied"](7)
        x, y = x[model.data_rank :], y[model.data_rank :]  # each data rank's own
        close(model.compute_gradients(x, y), plain.compute_gradients(x, y))
        whole = problems.batch("tied", 0)
        loss, gradient = plain.compute_loss_and_gradients(*whole)
        found, full = model.loss_and_gradients(*whole)
        close(found, loss)
        close(full, gradient)
        close(model.evaluate(*whole)[0], loss)
        close(model.predict(x), plain.predict(x))
        close(model.with_parameters(theta + 1).get_parameters(), theta + 1)

    for name in MESHES:
        on_ranks(name, functools.partial(body, name=name))


@check
def rules_on_a_mesh(problems: Any) -> None:
    entries = tuple(problems.MODELS["tied"](0).parameter_table.entries)
    expected = problems.train_sequentially("tied", problems.lamb(entries, 0.01), steps=STEPS)

    def body(backend: Any, name: str) -> None:
        rule = problems.RULES["lamb"]()
        model, optimizer = build(backend, problems, name, rule=rule)
        for step in range(STEPS):
            optimizer.step(model, *local_batch(model, problems, step))
        close(model.get_parameters(), expected.parameters[STEPS - 1])

    for name in ("3 x 1 x 1", "2 x 2 x 1", "1 x 2 x 2"):
        on_ranks(name, functools.partial(body, name=name))


@check
def dropout_on_a_mesh(problems: Any) -> None:
    """Masks depend on the global sample. Each rank has another seed, and rank 0's is used."""
    sgd = problems.TEXTBOOK["sgd"]
    expected = problems.train_sequentially("dropout", sgd, steps=STEPS)

    def body(backend: Any, name: str) -> None:
        model, optimizer = build(backend, problems, name, "dropout", sequence_parallel=False)
        for step in range(STEPS):
            optimizer.step(model, *local_batch(model, problems, step, "dropout"))
        close(model.get_parameters(), expected.parameters[STEPS - 1])

    for name in ("2 x 1 x 2", "2 x 2 x 1"):
        on_ranks(name, functools.partial(body, name=name))


@check
def ranks_of_a_mesh_that_disagree(problems: Any) -> None:
    def body(backend: Any, name: str) -> None:
        rank = backend.rank
        schedule = ("gpipe", "zb-v")[rank % 2]
        refused(
            ValueError,
            "same model in the same strategy",
            lambda: build(backend, problems, name, schedule=schedule),
        )
        model, optimizer = build(backend, problems, name)
        x, y = local_batch(model, problems, 0)
        refused(
            ValueError,
            "must be given the same",
            lambda: optimizer.step(model, (x + (rank == 1)) % 11, y),
        )
        refused(
            ValueError, "arguments differ between ranks", lambda: model.generate([1 + rank % 2], 2)
        )

    for name in MESHES:
        on_ranks(name, functools.partial(body, name=name))
