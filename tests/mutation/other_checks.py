"""Checks around training: parameters from files and vectors, agreement of ranks, the loop."""

from __future__ import annotations

import functools
import math
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from registry import PATHS, SECONDS, STRATEGIES, as_in_one_process, check, of
from worlds import agree, close, refused, run

import mpishard as ms
from mpishard import nn
from mpishard.errors import NonFiniteLossError, ShardingError
from mpishard.optimizers.sharded.state_bytes import StateBytes
from mpishard.training.run_state import UserState
from mpishard.training.saving import check_position

# ------------------------------------------------------------------------ parameters from elsewhere


@check
def parameters_from_elsewhere(problems: Any) -> None:
    theta = problems.MODELS["mlp"](7).get_parameters()
    gradient = np.linspace(-1, 1, len(theta))

    def body(backend: Any, strategy: str, folder: Path) -> None:
        model, optimizer = problems.build(backend, "mlp", strategy)
        model.set_parameters(theta)
        close(model.get_parameters(), theta)
        model.apply_gradients(gradient, 0.1)
        close(model.get_parameters(), theta - 0.1 * gradient)
        optimizer.apply_gradients(gradient, model)
        after = theta - (0.1 + problems.RATE) * gradient
        close(model.get_parameters(), after)
        model.save_model(folder)
        model.set_parameters(theta)
        model.load_model(folder)
        close(model.get_parameters(), after)
        for root in range(backend.world_size):
            with model.unsharded(root) as plain:
                assert (plain is not None) == (backend.rank == root)
                if plain is not None:
                    close(plain.get_parameters(), after)
        backend.barrier()
        if strategy == "zero2":
            for owned in model.engine.parameters.owned(model.engine.pieces.owned):
                owned[...] = 0.5
            model.all_gather_parameter_shards()
            close(model.get_parameters(), np.full(len(theta), 0.5))

    for path in PATHS:
        for strategy in STRATEGIES:
            with tempfile.TemporaryDirectory() as folder:
                run(functools.partial(body, strategy=strategy, folder=Path(folder) / "c"), path)


@check
def replicas_that_drifted(problems: Any) -> None:
    x, y = problems.batch("mlp", 3)

    def body(backend: Any) -> None:
        model, _ = problems.build(backend, "mlp", "ddp")
        alone = problems.MODELS["mlp"](0)
        model.sharding_configuration.auto_sync_gradients = False
        mine = slice(2 * backend.rank, None if backend.rank == 2 else 2 * backend.rank + 2)
        for _ in range(2):
            model.train(x[mine], y[mine])
            model.synchronize_gradients()
            alone.train(x, y)
            close(model.get_parameters(), alone.get_parameters())

    run(body)


@check
def synchronising_what_is_sharded_is_a_barrier(problems: Any) -> None:
    arrived = threading.Event()

    def body(backend: Any) -> None:
        model, optimizer = problems.build(backend, "mlp", "fsdp")
        optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
        if backend.rank == 1:
            time.sleep(SECONDS["late"])
            arrived.set()
        model.synchronize_gradients()
        assert arrived.is_set()

    run(body)


@check
def a_plain_model_s_mean(problems: Any) -> None:
    def body(backend: Any) -> None:
        _, optimizer = problems.build(backend, "mlp", "ddp")
        plain = problems.MODELS["mlp"](backend.rank)
        mean = np.mean([problems.MODELS["mlp"](rank).get_parameters() for rank in range(3)], 0)
        optimizer._synchronize_parameters(plain)
        close(plain.get_parameters(), mean)

    run(body)


# ------------------------------------------------------------------------------------ agreement


@check
def disagreement_is_every_rank_s_error(problems: Any) -> None:
    def body(backend: Any) -> None:
        rank = backend.rank
        refused(ValueError, "same model", lambda: of(backend, nn.MLP([5, 3 + rank % 2, 2]), "fsdp"))
        plain, smallest = nn.MLP([5, 3, 2]), 2 + rank % 2
        config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=smallest)
        differs = "minimum_parameter_group_size is 2, 3, 2"
        refused(ValueError, differs, lambda: ms.as_distributed(plain, config, "fsdp"))
        model, optimizer = problems.build(backend, "mlp", "fsdp")
        vector = np.full(model.parameter_count, float(rank))
        refused(ValueError, "differ between ranks", lambda: model.set_parameters(vector))
        optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
        saved = optimizer.serialize()
        optimizer.step(model, *problems.local_batch(backend, "mlp", 1))
        later = optimizer.serialize()
        given = later if rank == 1 else saved
        refused(ValueError, "bytes differ", lambda: optimizer.deserialize(given))
        linear, _ = of(backend, nn.LinearRegression(5), "fsdp")
        refused(ValueError, "same features", lambda: linear.set_active_feature_indices([rank % 2]))
        linear.set_active_feature_indices([1, 2])
        fewer = linear.serialize()
        linear.set_active_feature_indices([1, 2, 3])
        more = linear.serialize()
        chosen = fewer if rank == 1 else more
        differs = "the model's settings in the bytes differ"
        refused(ValueError, differs, lambda: linear.deserialize(chosen))

    run(body)


@check
def a_loss_that_is_not_finite(problems: Any) -> None:
    def body(backend: Any) -> None:
        model, optimizer = problems.build(backend, "mlp", "fsdp")
        x, y = problems.batch("mlp", 0)
        x = x * np.nan if backend.rank == 1 else x
        refused(NonFiniteLossError, r"ranks \[1\]", lambda: optimizer.step(model, x, y))

    run(body)


@check
def settings_that_differ(problems: Any) -> None:
    def body(backend: Any) -> None:
        batch = problems.batch("mlp", 0)
        plain = nn.MLP([5, 4, 2], seed=1)
        rule = ms.optimizers.SGD(0.1 + backend.rank % 2)
        model, optimizer = of(backend, plain, "ddp", rule)
        refused(ValueError, "same optimizer", lambda: optimizer.step(model, *batch))
        model.sharding_configuration.learning_rate = 0.1 + backend.rank % 2
        of_two_ranks = r"learning_rate is 0\.1, 1\.1, 0\.1\. Nothing was updated"
        refused(ShardingError, of_two_ranks, lambda: model.train(*batch))

    run(body)


# ------------------------------------------------------------------------------- optimizer and loop


@check
def state_as_bytes(problems: Any) -> None:
    def body(backend: Any) -> Any:
        model, optimizer = problems.build(backend, "mlp", "fsdp", "adamw")
        for step in range(2):
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        arrays = StateBytes.from_bytes(optimizer.serialize()).arrays
        return [given[name] for _, given in sorted(arrays.items()) for name in sorted(given)]

    as_in_one_process(body)


@check
def state_that_is_repaired(problems: Any) -> None:
    def body(backend: Any) -> None:
        model, optimizer = problems.build(backend, "mlp", "ddp", "adamw")
        optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
        kept = {name: vector.copy() for name, vector in optimizer.state.items()}
        for name in kept:
            optimizer.state[name][...] += backend.rank
        optimizer._state.steps += backend.rank
        optimizer.synchronize_optimizer_state()
        assert optimizer.steps == 1
        for name, vector in optimizer.state.items():
            close(vector, kept[name])

    run(body)


def data(problems: Any, kind: str = "mlp", **options: Any) -> dict[str, Any]:
    x, y = problems.batch(kind, 8)
    return {
        "x_train": x,
        "y_train": y,
        "batch_size": 8,
        "epochs": 6,
        "progress": False,
        "seed": 1,
    } | options


@check
def evaluation(problems: Any) -> None:
    def body(backend: Any, kind: str) -> Any:
        model, optimizer = problems.build(backend, kind, "fsdp")
        x, y = problems.batch(kind, 5)
        result = optimizer.optimize(
            ms.OptimizationInputData(
                model=model,
                x_validation=x,
                y_validation=y,
                training_statistics=True,
                **data(problems, kind, epochs=2),
            )
        )
        found = [result.loss_history, [v for _, v in result.validation_history]]
        for part in (result.training_result, result.validation_result):
            found += [part.stats[name] for name in sorted(part.stats)]
        return found

    for kind in ("mlp", "gpt"):
        as_in_one_process(functools.partial(body, kind=kind))


@check
def the_best_is_put_back(problems: Any) -> None:
    def body(backend: Any) -> Any:
        rule = ms.optimizers.SGD(0.5, 0.9)
        model, optimizer = of(backend, nn.MLP([5, 4, 2], seed=1), "zero1", rule)
        x, y = problems.batch("mlp", 5)
        result = optimizer.optimize(
            ms.OptimizationInputData(
                model=model,
                x_validation=x,
                y_validation=-y,
                patience=2,
                **data(problems),
            )
        )
        assert result.best_iteration < result.iterations
        return [model.get_parameters()]

    as_in_one_process(body)


class Impatient(ms.optimizers.SGD):
    """One rank has converged at once."""

    _rank = 0

    def should_early_stop(self) -> bool:
        return self._rank == 1


@check
def one_rank_stops_all(problems: Any) -> None:
    def body(backend: Any) -> None:
        rule = Impatient(0.05)
        rule._rank = backend.rank
        model, optimizer = of(backend, nn.MLP([5, 4, 2], seed=1), "ddp", rule)
        assert optimizer.should_early_stop()
        result = optimizer.optimize(ms.OptimizationInputData(model=model, **data(problems)))
        assert result.stopped_early

    run(body)


@check
def runs_that_differ(problems: Any) -> None:
    def body(backend: Any, folder: Path) -> None:
        rank = backend.rank
        model, optimizer = problems.build(backend, "mlp", "fsdp")

        def optimize(**options: Any) -> Any:
            given = ms.OptimizationInputData(model=model, **data(problems, **options))
            return optimizer.optimize(given)

        refused(ValueError, "same training", lambda: optimize(patience=1 + rank))
        x, y = problems.batch("mlp", 8)
        width = 4 if rank == 1 else 5
        refused(
            ValueError, "needs an input whose last dim is 5", lambda: optimize(x_train=x[:, :width])
        )
        # Each rank has data of its own, and one has none.
        count = (5, 0, 9)[rank]
        uneven = {"x_train": x[:count], "y_train": y[:count], "local_data": True, "epochs": 1}
        result = optimize(checkpoint=folder, **uneven)
        agree(backend, result.loss_history)
        assert result.weight == 14
        where = folder.with_name("nowhere") if rank == 1 else folder
        (folder.parent / "file").touch()
        refused(OSError, "file", lambda: optimize(metrics=folder.parent / "file" / "metrics"))
        rule = ms.optimizers.SGD(lambda step: math.inf if (rank, step) == (1, 23) else 0.1)
        model, optimizer = of(backend, nn.MLP([5, 4, 2], seed=1), "fsdp", rule)
        refused(ValueError, "learning rate of inf for step 23", lambda: optimize(epochs=8))
        refused(
            FileNotFoundError,
            "nowhere",
            lambda: check_position(
                where,
                backend,
                {
                    "local_data": True,
                    "samples": [5, 0, 9],
                    "batch_size": 8,
                    "seed": 1,
                    "shuffle": True,
                    "drop_last": False,
                },
                UserState({}, backend),
            ),
        )

    with tempfile.TemporaryDirectory() as folder:
        run(functools.partial(body, folder=Path(folder) / "c"))


@check
def one_rank_s_mistyped_pattern(problems: Any) -> None:
    def body(backend: Any) -> None:
        pattern = "linear9.*" if backend.rank == 1 else "linear0.*"
        rule = ms.optimizers.SGD(0.05, parameter_options={pattern: {"weight_decay": 0.1}})
        plain = nn.MLP([5, 4, 2], seed=1)
        optimizer = ms.as_distributed(rule, backend, "fsdp")
        refused(
            ValueError,
            "linear9",
            lambda: optimizer.optimize(ms.OptimizationInputData(model=plain, **data(problems))),
        )
        assert len(plain.get_parameters()) == 34  # every rank has its model back

    run(body)
