"""Training equals training in one process, on every path of messages and with late ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from cupy_stand_in import installed
from cupy_stand_in.kernels import compiler
from registry import CHECKS, PATHS, STEPS, STRATEGIES, as_in_one_process, check, is_late, of
from worlds import agree, close, idle, refused, run

import mpishard as ms
from mpishard import nn
from mpishard.adapters import AutogradModel
from mpishard.observe.ledger import MemoryCategory

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
    """Steps only, so that no other collective replaces a fence."""
    expected = problems.train_sequentially(kind, problems.TEXTBOOK["sgd"], steps=STEPS)

    def body(backend: Any) -> None:
        actual = problems.train_sharded(backend, kind, strategy, "sgd", 1, STEPS, watch=False)
        problems.assert_equal(actual, expected)

    with manner():
        run(body, path)


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
                    model, _ = of(backend, plain, strategy, enable_gradient_compression=compress)
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
        chain = nn.Sequential(
            {
                "a": nn.Linear(5, 8),
                "drop": nn.Dropout(0.5),
                "b": nn.Linear(8, 2),
            }
        )
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


@check
def lbfgs(problems: Any) -> None:
    def body(backend: Any) -> Any:
        config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
        found = []
        for strategy in ("zero1", "fsdp"):
            plain = nn.MLP([5, 7, 2], seed=1)
            model = ms.as_distributed(plain, config, strategy)
            optimizer = ms.as_distributed(ms.optimizers.LBFGS(memory=2), config, strategy)
            x, y = problems.local_batch(backend, "mlp", 0)
            for _ in range(STEPS + 2):
                optimizer.step(model, x, y)
            found.append(model.get_parameters())
        return found

    as_in_one_process(body)


@check
def minimize(problems: Any) -> None:
    def body(backend: Any) -> Any:
        x = np.linspace(-1, 2, 35).reshape(7, 5)
        box = [(-0.2, 0.3)] * 5

        def fun(theta: Any, x: Any) -> Any:
            error = x @ theta - np.cos(x[:, 0])
            return np.mean(error**2), 2 * x.T @ error / len(x)

        def stop(theta: Any) -> None:
            if backend.rank == backend.world_size - 1:
                raise StopIteration

        found = [
            ms.minimize(fun, np.zeros(5), (x,), backend=backend, bounds=bounds, callback=f)
            for bounds, f in ((None, None), (box, None), (None, stop))
        ]
        return [x @ result.x for result in found] + [result.jac for result in found]

    as_in_one_process(body)


@check
def compression_with_errors(problems: Any) -> None:
    def body(backend: Any) -> Any:
        config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
        model = ms.DDPModel(nn.MLP([5, 7, 2], seed=1), config)
        optimizer = ms.optimizers.GradientCompressionOptimizer(
            ms.optimizers.SGD(0.05, 0.9), config, 1.0, method="top-k"
        )
        for step in range(STEPS):
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        return [model.get_parameters()]

    as_in_one_process(body)


@check
def exchanged_codes(problems: Any) -> None:
    """Rounding to float32 leaves 1e-9."""

    def body(backend: Any) -> Any:
        config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
        model = ms.DDPModel(nn.MLP([5, 7, 2], seed=1), config)
        inner = ms.optimizers.SGD(0.05)
        optimizer = ms.optimizers.LocalSGDOptimizer(inner, config, 1, exchange="float32")
        for step in range(STEPS):
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        return model.get_parameters()

    (expected,) = run(body, size=1)
    for mine in run(body, "messages"):
        close(mine, expected, 1e-6)


@check
def local_steps(problems: Any) -> None:
    def body(backend: Any) -> Any:
        found = []
        for outer in (None, ms.optimizers.LAMB(0.1)):
            config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
            model = ms.DDPModel(nn.MLP([5, 7, 2], seed=1), config)
            inner = ms.optimizers.SGD(0.05)  # with a period of 1, and uneven batches, as one rank
            optimizer = ms.optimizers.LocalSGDOptimizer(inner, config, 1, outer)
            for step in range(STEPS):
                optimizer.step(model, *problems.local_batch(backend, "mlp", step))
            found.append(model.get_parameters())
        return found

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

    def distribute_state(self, world: Any, ranks: Any) -> None:
        self.shift = world.broadcast(self.shift.copy(), root=0)


class Drifting(Shifted):
    """A model whose number is rank 0's after each step, although each pass changes it."""

    computes_together = True

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.pace = 0.1 + seed

    def share_changed_state(self, ranks: Any) -> bool:
        self.shift = ranks.broadcast(self.shift.copy(), root=0)
        return True

    def forward_pass(self, x: Any, y: Any, loss: Any, context: Any) -> Any:
        found = super().forward_pass(x, y, loss, context) if len(x) else (0.0, 0.0, None)
        self.shift = self.shift + self.pace  # the backward pass reads the array of this pass
        return found


@check
def a_placed_model(problems: Any) -> None:
    def body(backend: Any) -> Any:
        model, optimizer = of(backend, Drifting(backend.rank), "fsdp")
        losses = [
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
            for step in range(STEPS)
        ]
        loss, gradient = model.loss_and_gradients(*problems.local_batch(backend, "mlp", 0))
        again, _ = model.loss_and_gradients(*problems.local_batch(backend, "mlp", 0))
        return losses, model.get_parameters(), [loss, again], gradient

    as_in_one_process(body, *PATHS)


class Partial(Shifted):
    """A model of which only rank 1 uses the first parameter."""

    may_use_some = True

    def backward_pass(self, saved: Any, receive: Any) -> None:
        everything = super().backward_pass
        everything(saved, lambda index, g: receive(index, g) if index or self.shift == 2 else None)

    def distribute_state(self, world: Any, ranks: Any) -> None:
        pass


@check
def a_parameter_that_one_rank_uses(problems: Any) -> None:
    """Every rank updates the parameter that one rank has used."""

    def body(backend: Any) -> None:
        rule = ms.optimizers.SGD(0.05, weight_decay=0.5)
        model, optimizer = of(backend, Partial(backend.rank), "ddp", rule)
        before = model.get_parameters()
        optimizer.step(model, *problems.batch("mlp", 0))
        everyone = backend.all_gather(model.get_parameters()[None])
        close(everyone[1:], everyone[:-1])
        assert (everyone[0] != before).all()

    run(body, "messages")


@check
def replicas_of_a_placed_model(problems: Any) -> None:
    """State that passes change beside parameters is rank 0's again when replicas are equal."""

    def body(backend: Any) -> None:
        batch = problems.local_batch(backend, "mlp", 0)
        model, _ = of(backend, Drifting(backend.rank), "ddp", auto_sync_gradients=False)
        model.train(*problems.batch("mlp", 0))
        model.compute_gradients(*batch)
        model.synchronize_gradients()
        local, _ = of(backend, Drifting(backend.rank), "ddp")
        optimizer = ms.optimizers.LocalSGDOptimizer(
            ms.optimizers.SGD(0.05), local.sharding_configuration, 3
        )
        for _ in range(3):
            optimizer.step(local, *problems.batch("mlp", 0))
        for one in (model, local):
            shifts = backend.all_gather(one.wrapped_model.shift[None])
            close(shifts[1:], shifts[:-1])

    run(body, "messages")


@check
def replicas_of_two_ranks_of_a_placed_model(problems: Any) -> None:
    """State that passes change beside parameters is equal in a replica after each step."""

    def body(backend: Any) -> None:
        model, _ = of(backend, Drifting(backend.rank), "ddp", replica_size=2)
        optimizer = ms.optimizers.LocalSGDOptimizer(
            ms.optimizers.SGD(0.05), model.sharding_configuration, 3
        )
        optimizer.step(model, *problems.batch("mlp", 0))
        shifts = backend.all_gather(model.wrapped_model.shift[None])
        close(shifts[0], shifts[1])
        close(shifts[2], shifts[3])

    run(body, "messages", 4)


OFFLOADED = ("optimizer", "gradients", "parameters")


def clipped(gradient: Any) -> Any:
    return gradient * min(1.0, 0.05 / np.linalg.norm(gradient))


def offloads(problems: Any, *what: str) -> None:
    """On a stand-in for GPUs, which refuses what their streams leave undefined.

    Every gradient is clipped, by a norm that is taken before anything else is waited for.
    """
    expected = problems.train_sequentially(
        "mlp", problems.TEXTBOOK["sgd"], steps=STEPS, transform=clipped
    )
    flags = {f"cpu_offload_{name}": True for name in what}

    def body(backend: Any, strategy: str) -> None:
        plain = nn.MLP([5, 7, 6, 2], activation="tanh", seed=backend.rank, device="cuda")
        model, optimizer = of(
            backend, plain, strategy, problems.RULES["sgd"](clip_global_norm=0.05), **flags
        )
        for step in range(STEPS):
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        close(model.get_parameters().get(), expected.parameters[-1])
        model.set_parameters(expected.parameters[0])
        close(model.get_parameters().get(), expected.parameters[0])

    if compiler() is None:
        pytest.skip("the stand-in compiles kernels, and this machine has no C++ compiler")
    with installed(device_count=2):
        for strategy in STRATEGIES:
            with idle():
                run(functools.partial(body, strategy=strategy))
            for path in ("arena", "two nodes") if what == OFFLOADED else ():
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
    """Memory of a collective under way is kept until it has ended."""

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
    """A unit is released during its gather, and its buffer is the next unit's."""

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
        optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
        backend.traffic.reset()
        optimizer.step(model, *problems.local_batch(backend, "mlp", 1))
        # Some sums, and no part of parameters or gradients.
        assert backend.traffic.total_bytes < 8 * model.parameter_count / backend.world_size

    run(body, "arena")
