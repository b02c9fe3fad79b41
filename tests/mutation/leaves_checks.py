"""Gradient leaves: four ranks have the bits of one, with and without shared memory."""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext
from typing import Any

import numpy as np
from registry import CHECKS, STEPS, check, is_late, of
from worlds import idle, refused, run

import mpishard as ms
from mpishard import nn
from mpishard.models.engine import leaves

SAMPLES = 13
X = np.random.default_rng(0).standard_normal((SAMPLES, 5))
Y = np.sin(X[:, :2])


def pair(backend: Any, strategy: str) -> tuple[Any, Any]:
    rule = ms.optimizers.SGD(0.05, 0.9, clip_global_norm=0.02)
    plain = nn.MLP([5, 7, 6, 2], "tanh", seed=0)
    return of(backend, plain, strategy, rule, gradient_leaves=8)


def walks(problems: Any, strategy: str, path: str, manner: Any) -> None:
    def body(backend: Any) -> tuple[list[float], bytes]:
        model, optimizer = pair(backend, strategy)
        mine = model.batch_indices(SAMPLES)
        losses = [optimizer.step(model, X[mine], Y[mine]) for _ in range(STEPS)]
        return losses, model.gather_full_parameters().tobytes()

    (expected,) = run(body, size=1)
    with manner():
        assert run(body, path, size=4) == [expected] * 4


for _strategy, _path in (
    ("ddp", "arena"),
    ("ddp", "messages"),
    ("zero1", "messages"),
    ("fsdp", "two nodes"),
):
    for _name, _manner in (("", nullcontext), (", idle works", idle), (", a late rank", is_late)):
        CHECKS[f"leaves: {_strategy}, {_path}{_name}"] = functools.partial(
            walks, strategy=_strategy, path=_path, manner=_manner
        )


@check
def leaves_evaluate(problems: Any) -> None:
    def body(backend: Any) -> float:
        model, optimizer = pair(backend, "fsdp")
        data = ms.OptimizationInputData(
            model=model,
            x_train=X,
            y_train=Y,
            x_validation=X,
            y_validation=Y,
            batch_size=SAMPLES,
            progress=False,
        )
        (found,) = optimizer.optimize(data).validation_history
        return float(found[1])

    (expected,) = run(body, size=1)
    assert run(body, size=4) == [expected] * 4


@check
def leaves_of_other_batches(problems: Any) -> None:
    def body(backend: Any) -> None:
        model, optimizer = pair(backend, "fsdp")
        count = 5 if backend.rank == 1 else 8
        refused(ValueError, "ranks pass", lambda: optimizer.step(model, X[:count], Y[:count]))

    run(body, size=2)


@check
def leaves_of_other_kernels(problems: Any) -> None:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("mpishard")
    level = log.level
    kernels = iter("ab")
    original = leaves.numerics_fingerprint
    leaves.numerics_fingerprint = lambda: {"blas_threads": "1", "blas_kernel": next(kernels)}
    try:
        log.addHandler(handler)
        log.setLevel(logging.WARNING)
        run(lambda backend: pair(backend, "ddp") and None, size=2)
    finally:
        leaves.numerics_fingerprint = original
        log.removeHandler(handler)
        log.setLevel(level)
    assert len(heard) == 1, heard
