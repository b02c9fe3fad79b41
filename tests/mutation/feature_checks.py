"""Checks of single features: late and stale gradients, replicas of ranks, errors of one rank."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from registry import PATHS, SECONDS, STEPS, as_in_one_process, check, is_late, of
from worlds import close, refused, run

import mpishard as ms
from mpishard import nn
from mpishard.base import Device
from mpishard.callbacks.preemption import Preemption
from mpishard.communication import InMemoryCommunicationBackend
from mpishard.errors import CheckpointError, ShardingError

# ------------------------------------------------------------------------ memory


@check
def generate_with_unequal_memory(problems: Any) -> None:
    """One rank has too little memory to keep the gathered parameters: then none keeps them."""
    mine = threading.local()

    def body(backend: Any) -> Any:
        sizes = {"vocabulary_size": 16, "context_length": 8, "width": 8, "heads": 2, "layers": 1}
        gpt = nn.GPT(**sizes, seed=1)
        mine.free = 10 if backend.rank == 1 else None
        return of(backend, gpt, "fsdp")[0].generate([3, 1], 4, 0).tolist()

    # All ranks patch at once, from outside: threads that leave a patch one by one would leave it.
    with mock.patch.object(Device, "free_bytes", property(lambda _: mine.free)):
        (expected, *others) = run(body, "messages")
    assert all(other == expected for other in others)


# ------------------------------------------------------------------------ late and stale gradients


class WithheldWork:
    """An all-reduce whose ``out`` has no result until a caller waits for it."""

    def __init__(self, work: Any, out: Any) -> None:
        self._work, self._out = work, out

    def wait(self) -> Any:
        if self._work is not None:
            self._out[...], self._work = self._work.wait(), None
        return self._out

    wait_until_over = wait


@contextlib.contextmanager
def withheld() -> Iterator[None]:
    """In the block sums are missing until a caller waits, as the contract of `Work` allows.

    Threads complete what they issued earlier in every later collective, which hides that.
    """
    original = InMemoryCommunicationBackend.all_reduce_async

    def issue(self: Any, array: Any, *arguments: Any, out: Any = None, subject: int = 0) -> Any:
        work = original(self, array.copy(), *arguments, subject=subject)
        out = array if out is None else out
        out[...] = np.nan
        return WithheldWork(work, out)

    with mock.patch.object(InMemoryCommunicationBackend, "all_reduce_async", issue):
        yield


def delayed(backend: Any) -> tuple[Any, Any]:
    """Return a model, and an optimizer whose gradients come one step later."""
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    model = ms.DDPModel(nn.MLP([5, 7, 2], seed=1), config)
    return model, ms.optimizers.AsyncSGDOptimizer(ms.optimizers.SGD(0.05), config, 1)


@check
def late_gradients(problems: Any) -> None:
    def body(backend: Any) -> Any:
        model, optimizer = delayed(backend)
        for step in range(STEPS):
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        return [model.get_parameters()]

    as_in_one_process(body)
    with withheld():
        as_in_one_process(body)


@check
def late_gradients_that_one_rank_has_dropped(problems: Any) -> None:
    def body(backend: Any) -> None:
        model, optimizer = delayed(backend)
        optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
        if backend.rank == 1:
            model.engine.passes.abandon()
        refused(ShardingError, "other gradients under way", optimizer.apply_pending_gradients)

    run(body)


class Linear:
    """A loss whose gradient is the same everywhere: updates in any order end alike."""

    default_loss_function = None

    def __init__(self) -> None:
        self.theta = np.zeros(7)

    def get_parameters(self) -> Any:
        return self.theta

    def set_parameters(self, theta: Any) -> None:
        self.theta = theta

    def compute_loss_and_gradients(self, x: Any, y: Any) -> tuple[float, Any]:
        return float(x.mean(0) @ self.theta), x.mean(0)


# ------------------------------------------------------------------------------ replicas and meshes


def replicas(problems: Any, backend: Any, size: int, strategy: str, period: int) -> list[Any]:
    """Train replicas of ``size`` ranks; return the parameters before and after each step."""
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1, replica_size=size)
    model = ms.as_distributed(nn.MLP([5, 7, 2], seed=1 + backend.rank), config, strategy)
    optimizer = ms.optimizers.LocalSGDOptimizer(
        ms.optimizers.SGD(0.05), config, period, strategy=strategy
    )
    found = [model.get_parameters()]
    for step in range(STEPS):
        optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        found.append(model.get_parameters())
    return found


@check
def one_replica_of_all_ranks_and_one_of_each(problems: Any) -> None:
    for size, strategy in ((1, "zero1"), (3, "fsdp")):

        def body(backend: Any, size: int = size, strategy: str = strategy) -> Any:
            return replicas(problems, backend, min(size, backend.world_size), strategy, 1)

        as_in_one_process(body)


@check
def replicas_of_two_ranks(problems: Any) -> None:
    """Each trains alone for two steps, from rank 0's values; then all have the mean."""
    plain = nn.MLP([5, 7, 2], seed=1)
    thetas, weights = [plain.get_parameters()] * 2, np.zeros(2)
    expected = [thetas]
    for step in range(STEPS):
        x, y = problems.batch("mlp", step)
        parts = [problems.part(len(x), step, rank, 4) for rank in range(4)]
        thetas = list(thetas)
        for replica in range(2):
            mine = np.r_[tuple(np.arange(len(x))[part] for part in parts[2 * replica :][:2])]
            if len(mine):
                of_replica = plain.with_parameters(thetas[replica])
                thetas[replica] = thetas[replica] - 0.05 * of_replica.compute_gradients(
                    x[mine], y[mine]
                )
            weights[replica] += len(mine)
        if step % 2:
            thetas, weights = [weights @ thetas / weights.sum()] * 2, np.zeros(2)
        expected.append(thetas)

    def body(backend: Any, strategy: str) -> None:
        found = replicas(problems, backend, 2, strategy, 2)
        close(found, [thetas[backend.rank // 2] for thetas in expected])

    for strategy in ("ddp", "zero1", "fsdp"):
        for path in PATHS:
            for manner in (nullcontext, is_late):
                with manner():
                    run(functools.partial(body, strategy=strategy), path, 4)


@check
def a_late_rank_when_replicas_settle(problems: Any) -> None:
    """One rank still reads values that its replica is about to change."""
    x = problems.batch("mlp", 0)[0]

    def body(backend: Any) -> None:
        config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1, replica_size=2)
        model = ms.as_distributed(nn.MLP([5, 7, 2], seed=1), config, "zero1")
        optimizer = ms.optimizers.LocalSGDOptimizer(
            ms.optimizers.SGD(0.05), config, 5, strategy="zero1"
        )
        for step in range(4):
            optimizer.step(model, *problems.local_batch(backend, "mlp", step))
        if backend.rank == 1:
            time.sleep(10 * SECONDS["late"])
        predicted = model.predict(x)
        optimizer.settle()
        everyone = backend.all_gather(predicted[None])
        close(everyone[0], everyone[1])
        close(everyone[2], everyone[3])

    run(body, "arena", 4)


@check
def state_of_a_mesh_that_is_repaired(problems: Any) -> None:
    def body(backend: Any) -> None:
        model = ms.as_distributed(nn.MLP([5, 4, 2], seed=1), backend, "tensor")
        optimizer = ms.as_distributed(ms.optimizers.Adam(0.01), backend, "tensor")
        optimizer.step(model, *problems.batch("mlp", 0))
        optimizer._state.steps += backend.rank
        optimizer.synchronize_optimizer_state()
        assert optimizer.steps == 1

    run(body)


# ------------------------------------------------------------------------------ one rank of several


@check
def an_order_to_end_on_one_rank(problems: Any) -> None:
    def body(backend: Any) -> None:
        with Preemption(backend) as preemption:
            assert preemption.is_asked_or(False, backend.rank == 1) == [False, False, True]

    run(body)


@check
def a_shard_of_another_length_on_one_rank(problems: Any) -> None:
    def body(backend: Any) -> None:
        model, _ = of(backend, nn.MLP([5, 4, 2], seed=1), "fsdp")
        given = model._local_shard[backend.rank == 1 :]
        refused(
            ValueError,
            "_local_shard: expected a vector",
            lambda: setattr(model, "_local_shard", given),
        )

    run(body)


class Own:
    """A black box with bytes of its own, which one rank cannot read."""

    def __init__(self, rank: int) -> None:
        self.theta, self.rank = np.arange(4.0), rank

    def get_parameters(self) -> Any:
        return self.theta

    def set_parameters(self, theta: Any) -> None:
        self.theta = theta

    def compute_gradients(self, x: Any, y: Any) -> Any:
        return np.ones(4)

    def serialize(self) -> bytes:
        return b"own"

    def deserialize(self, data: bytes) -> None:
        if self.rank == 1:
            raise ValueError("these are not my bytes")


@check
def a_checkpoint_that_one_rank_cannot_take(problems: Any) -> None:
    def body(backend: Any, folder: Path) -> None:
        model, _ = of(backend, Own(backend.rank), "ddp")
        model.save_model(folder / "model")
        refused(CheckpointError, "not my bytes", lambda: model.load_model(folder / "model"))
        _, optimizer = of(backend, nn.MLP([5, 4, 2]), "fsdp")
        optimizer.save_model(folder / "rule")
        wrong = folder / ("none" if backend.rank == 1 else "rule")
        refused(FileNotFoundError, "none", lambda: optimizer.load_model(wrong))

    with tempfile.TemporaryDirectory() as folder:
        run(functools.partial(body, folder=Path(folder)))
