"""Checks that pass as the engine stands, and one of which fails without any of its collectives.

Each takes `Problems` of ``tests/models/conftest.py`` and raises where something is wrong. They are
the test suite's own, at a size at which hundreds run in a minute.
"""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import autograd.numpy as anp
import numpy as np
from worlds import agree, close, idle, late, refused, run

import mpishard as ms
from mpishard import nn
from mpishard.adapters import AutogradModel
from mpishard.errors import NonFiniteLossError
from mpishard.observe.ledger import MemoryCategory
from mpishard.optimizers.position import check_position
from mpishard.testing.cupy_stand_in import installed

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
PATHS = ("messages", "arena", "two nodes")
STEPS = 3
SECONDS = {"late": 0.01}
"""How late a late rank is. Whoever finds that nothing fails may try again with more."""

CHECKS: dict[str, Callable[[Any], None]] = {}


def check(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


def of(backend: Any, plain: Any, strategy: str, rule: Any = None, **options: Any) -> Any:
    """Model and optimizer."""
    config = ms.ShardingConfiguration(
        backend, 0.1, minimum_parameter_group_size=1, **options
    )
    rule = ms.optimizers.SGD(0.05, 0.9) if rule is None else rule
    return ms.as_distributed(plain, config, strategy), ms.as_distributed(rule, config, strategy)


def as_in_one_process(body: Callable[[Any], Any], *paths: str) -> None:
    """That three ranks give what one gives."""
    (expected,) = run(body, size=1)
    for path in paths or ("messages",):
        for given in run(body, path):
            for mine, wanted in zip(given, expected, strict=True):
                close(mine, wanted, 1e-10)


# ---------------------------------------------------------------------------------------- equality


def trains(problems: Any, kind: str, strategy: str, path: str, rule: str = "sgd") -> None:
    expected = problems.train_sequentially(kind, problems.TEXTBOOK[rule], steps=STEPS)

    def body(backend: Any) -> None:
        actual = problems.train_sharded(backend, kind, strategy, rule, 1, STEPS)
        problems.assert_equal(actual, expected)

    run(body, path)


def trains_unwatched(
    problems: Any, strategy: str, path: str, manner: Callable[[], Any], kind: str = "mlp"
) -> None:
    """Nothing but the steps, so that no other collective makes up for a fence."""
    expected = problems.train_sequentially(kind, problems.TEXTBOOK["sgd"], steps=STEPS)

    def body(backend: Any) -> None:
        actual = problems.train_sharded(
            backend, kind, strategy, "sgd", 1, STEPS, watch=False
        )
        problems.assert_equal(actual, expected)

    with manner():
        run(body, path)


def is_late() -> Any:
    return late(SECONDS["late"])


for _path in PATHS:
    for _strategy in STRATEGIES:
        CHECKS[f"equality: {_strategy}, {_path}"] = functools.partial(
            trains, kind="mlp", strategy=_strategy, path=_path
        )
        for _name, _manner in (("idle works", idle), ("a late rank", is_late)):
            CHECKS[f"{_name}: {_strategy}, {_path}"] = functools.partial(
                trains_unwatched, strategy=_strategy, path=_path, manner=_manner
            )
for _kind in ("tied", "function"):
    CHECKS[f"equality: {_kind}"] = functools.partial(
        trains, kind=_kind, strategy="fsdp", path="messages"
    )


@check
def compression(problems: Any) -> None:
    for path in PATHS:
        for strategy in STRATEGIES:

            def body(backend: Any, strategy: str = strategy) -> None:
                moved = []
                for compress in (False, True):
                    plain = nn.MLP([5, 7, 6, 5, 2], activation="tanh", seed=1)
                    model, _ = of(
                        backend, plain, strategy, enable_gradient_compression=compress
                    )
                    start = model.get_parameters()
                    for _ in range(2):
                        model.set_parameters(start)
                        model.train(*problems.local_batch(backend, "mlp", 1))
                    moved.append(model.get_parameters() - start)
                close(moved[1], moved[0], 0.02 * np.abs(moved[0]).max())

            run(body, path)


@check
def accumulation(problems: Any) -> None:
    expected = problems.train_sequentially("mlp", problems.TEXTBOOK["sgd"], steps=1)
    for path in ("messages", "arena"):
        for strategy in ("ddp", "fsdp"):
            for defer in (False, True):

                def body(backend: Any, strategy: str = strategy, defer: bool = defer) -> None:
                    model, optimizer = problems.build(backend, "mlp", strategy, "sgd", 1)
                    x, y = problems.local_batch(backend, "mlp", 0)
                    with model.accumulate(defer=defer):
                        optimizer.step(model, x[:1], y[:1])
                    optimizer.step(model, x[1:], y[1:])
                    close(model.get_parameters(), expected.parameters[0])

                run(body, path)


@check
def dropout(problems: Any) -> None:
    def body(backend: Any) -> Any:
        chain = nn.Sequential({
            "a": nn.Linear(5, 8), "drop": nn.Dropout(0.5), "b": nn.Linear(8, 2),
        })  # fmt: skip
        plain = nn.Model(chain, nn.MSE(), input_shape=(5,), seed=backend.rank)
        model, optimizer = of(backend, plain, "fsdp")
        losses = [
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
            for step in range(STEPS)
        ]
        return losses, model.get_parameters()

    as_in_one_process(body)


@check
def lamb(problems: Any) -> None:
    def body(backend: Any) -> Any:
        rule = ms.optimizers.LAMB(0.01, weight_decay=0.1, clip_global_norm=0.05)
        model, optimizer = of(backend, nn.MLP([5, 7, 2], seed=1), "zero1", rule)
        for step in range(STEPS):
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        return [model.get_parameters()]

    as_in_one_process(body)


class Shifted(AutogradModel):
    """A placed model with a constant, which is rank 0's on all ranks."""

    def __init__(self, seed: int) -> None:
        self.shift = np.array([1.0 + seed])
        parameters = {"b": np.full(2, 1.0 + seed), "w": np.full((5, 2), 0.1 + seed)}
        super().__init__(
            lambda t, x, y: anp.mean((anp.dot(x, t["w"]) + t["b"] * self.shift - y) ** 2),
            parameters,
        )

    def constants(self) -> Any:
        return iter([self.shift])

    def set_constant(self, index: int, raw: Any) -> None:
        self.shift[...] = raw


@check
def a_placed_model(problems: Any) -> None:
    def body(backend: Any) -> Any:
        model, optimizer = of(backend, Shifted(backend.rank), "fsdp")
        losses = [
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
            for step in range(STEPS)
        ]
        return losses, model.get_parameters()

    as_in_one_process(body, *PATHS)


OFFLOADED = ("optimizer", "gradients", "parameters")


def offloads(problems: Any, *what: str) -> None:
    """On a stand-in for GPUs, which refuses what their streams leave undefined."""
    expected = problems.train_sequentially("mlp", problems.TEXTBOOK["sgd"], steps=STEPS)
    flags = {f"cpu_offload_{name}": True for name in what}

    def body(backend: Any, strategy: str) -> None:
        plain = nn.MLP([5, 7, 6, 2], activation="tanh", seed=backend.rank, device="cuda")
        model, optimizer = of(backend, plain, strategy, problems.RULES["sgd"](), **flags)
        for step in range(STEPS):
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        close(model.get_parameters().get(), expected.parameters[-1])
        model.set_parameters(expected.parameters[0])
        close(model.get_parameters().get(), expected.parameters[0])

    with installed(device_count=2):
        for strategy in STRATEGIES:
            for path in PATHS:
                run(functools.partial(body, strategy=strategy), path)
        with is_late():
            run(functools.partial(body, strategy="ddp"), "arena")


for _what in (*((name,) for name in OFFLOADED), OFFLOADED):
    CHECKS[f"offloading: {', '.join(_what)}"] = functools.partial(
        lambda problems, what: offloads(problems, *what), what=_what
    )


# ------------------------------------------------------------------------------- after a failure


@check
def a_step_after_one_that_failed(problems: Any) -> None:
    """What was under way keeps its memory until it is through."""

    def body(backend: Any, strategy: str, where: str) -> None:
        model, optimizer = problems.build(backend, "mlp", strategy)
        reference, other = problems.build(backend, "mlp", strategy)
        gradients = model.engine.gradients
        original = getattr(gradients, where)

        def fail(unit: Any) -> Any:
            result = original(unit)
            if unit.index == 1:
                raise ArithmeticError("here")
            return result

        setattr(gradients, where, fail)
        for _ in range(2):
            batch = problems.local_batch(backend, "mlp", 0)
            refused(ArithmeticError, "here", lambda batch=batch: optimizer.step(model, *batch))
        setattr(gradients, where, original)
        for step in range(2):
            batch = problems.local_batch(backend, "mlp", step)
            assert optimizer.step(model, *batch) == other.step(reference, *batch)
        agree(backend, model.gather_full_parameters() - reference.gather_full_parameters())

    for path in PATHS:
        for strategy in STRATEGIES:
            for where in ("target", "reduce"):
                with idle():
                    run(functools.partial(body, strategy=strategy, where=where), path)


@check
def a_unit_that_was_not_needed(problems: Any) -> None:
    """It is on its way when it is let go, and its buffer is the next unit's."""

    def body(backend: Any) -> None:
        model, _ = problems.build(backend, "mlp", "fsdp")
        store, units = model.engine.parameters, model.units
        expected = problems.MODELS["mlp"](0).get_parameters()
        for unneeded, needed in (units[:2], units[1::-1]):
            store.prefetch(unneeded)
            store.reshard(unneeded)
            close(store.unshard(needed), expected[needed.start : needed.stop])
            store.reshard(needed)

    with idle():
        run(body)


# ------------------------------------------------------------------------- memory and messages


@check
def two_full_gradients_at_a_time(problems: Any) -> None:
    def body(backend: Any) -> None:
        model, optimizer = of(backend, nn.MLP([5, 7, 6, 5, 4, 2]), "fsdp")
        optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
        largest = max(unit.length for unit in model.units) * 8
        assert model.memory.peak(MemoryCategory.FULL_GRADIENTS) <= 2 * largest

    run(body)


@check
def nothing_is_sent_on_a_node(problems: Any) -> None:
    def body(backend: Any) -> None:
        model, optimizer = problems.build(backend, "mlp", "fsdp", "sgd", 60)
        backend.traffic.reset()
        backend.all_reduce(np.zeros(5))
        totals = backend.traffic.total_bytes
        for step in (0, 1):
            backend.traffic.reset()
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        assert backend.traffic.total_bytes == totals

    run(body, "arena")


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
            for owned in model.engine.parameters.owned(model.engine.own_pieces):
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
        refused(
            ValueError, "same model", lambda: of(backend, nn.MLP([5, 3 + rank % 2, 2]), "fsdp")
        )
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
        refused(
            ValueError, "same features", lambda: linear.set_active_feature_indices([rank % 2])
        )
        linear.set_active_feature_indices([1, 2])

    run(body)


@check
def a_loss_that_is_not_finite(problems: Any) -> None:
    def body(backend: Any) -> None:
        model, optimizer = problems.build(backend, "mlp", "fsdp")
        x, y = problems.batch("mlp", 0)
        x = x * np.nan if backend.rank == 1 else x
        refused(NonFiniteLossError, r"ranks \[1\]", lambda: optimizer.step(model, x, y))

    run(body)


# ------------------------------------------------------------------------------- optimizer and loop


@check
def state_as_bytes(problems: Any) -> None:
    def body(backend: Any) -> Any:
        model, optimizer = problems.build(backend, "mlp", "fsdp", "adamw")
        for step in range(2):
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        tensors = ms.optimizers.state_bytes.StateBytes.from_bytes(optimizer.serialize()).tensors
        return [tensors[name] for name in sorted(tensors)]

    as_in_one_process(body)


@check
def state_that_is_repaired(problems: Any) -> None:
    def body(backend: Any) -> None:
        model, optimizer = problems.build(backend, "mlp", "ddp", "adamw")
        optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
        kept = {name: vector.copy() for name, vector in optimizer.state.items()}
        for vector in optimizer.state.values():
            vector += backend.rank
        optimizer._steps += backend.rank
        optimizer.synchronize_optimizer_state()
        assert optimizer.steps == 1
        for name, vector in optimizer.state.items():
            close(vector, kept[name])

    run(body)


def data(problems: Any, kind: str = "mlp", **options: Any) -> dict[str, Any]:
    x, y = problems.batch(kind, 8)
    return {
        "x_train": x, "y_train": y, "batch_size": 8, "epochs": 6, "progress": False, "seed": 1,
    } | options  # fmt: skip


@check
def evaluation(problems: Any) -> None:
    def body(backend: Any, kind: str) -> Any:
        model, optimizer = problems.build(backend, kind, "fsdp")
        x, y = problems.batch(kind, 5)
        result = optimizer.optimize(ms.OptimizationInputData(
            model=model, x_validation=x, y_validation=y, training_statistics=True,
            **data(problems, kind, epochs=2),
        ))  # fmt: skip
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
        result = optimizer.optimize(ms.OptimizationInputData(
            model=model, x_validation=x, y_validation=-y, patience=2, **data(problems),
        ))  # fmt: skip
        assert result.best_iteration < result.iterations
        return [model.get_parameters()]

    as_in_one_process(body)


class Impatient(ms.optimizers.SGD):
    """One rank has enough at once."""

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
        refused(ValueError, "needs an input whose last dim is 5", lambda: optimize(x_train=x[:, :width]))
        # Each rank has data of its own, and one has none.
        count = (5, 0, 9)[rank]
        uneven = {"x_train": x[:count], "y_train": y[:count], "local_data": True, "epochs": 1}
        result = optimize(checkpoint=folder, **uneven)
        agree(backend, result.loss_history)
        assert result.weight == 14
        where = folder.with_name("nowhere") if rank == 1 else folder
        refused(FileNotFoundError, "nowhere", lambda: check_position(
            where, backend,
            {"local_data": True, "samples": [5, 0, 9], "batch_size": 8, "seed": 1,
             "shuffle": True, "drop_last": False},
        ))  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        run(functools.partial(body, folder=Path(folder) / "c"))
