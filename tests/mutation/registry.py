"""The table of checks, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from worlds import close, late, run

import mpishard as ms

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
PATHS = ("messages", "arena", "two nodes")
STEPS = 3
SECONDS = {"late": 0.005}
"""How late a late rank is. Whoever finds that nothing fails may try again with more."""

CHECKS: dict[str, Callable[[Any], None]] = {}


def check(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


def of(backend: Any, plain: Any, strategy: str, rule: Any = None, **options: Any) -> Any:
    """Model and optimizer."""
    config = ms.ShardingConfiguration(backend, 0.1, minimum_parameter_group_size=1, **options)
    rule = ms.optimizers.SGD(0.05, 0.9) if rule is None else rule
    return ms.as_distributed(plain, config, strategy), ms.as_distributed(rule, config, strategy)


def as_in_one_process(body: Callable[[Any], Any], *paths: str) -> None:
    """Check that three ranks give the result of one."""
    (expected,) = run(body, size=1)
    for path in paths or ("messages",):
        for given in run(body, path):
            for mine, wanted in zip(given, expected, strict=True):
                close(mine, wanted, 1e-10)


def is_late() -> Any:
    return late(SECONDS["late"])
