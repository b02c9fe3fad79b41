"""Learning rates as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

__all__ = ["Constant", "Cosine", "Schedule", "WarmUp", "as_schedule"]

Schedule = Callable[[int], float]
"""``schedule(step) -> learning rate``; the first update is step 0."""


@dataclass(frozen=True, slots=True)
class Constant:
    """The same rate at every step."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate)

    def __call__(self, step: int) -> float:
        """The rate."""
        return self.rate


@dataclass(frozen=True, slots=True)
class Cosine:
    """From ``peak`` down to ``minimum`` over ``steps`` steps, along half a cosine; then constant.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017,
    equation 5, one period.
    """

    peak: float
    steps: int
    minimum: float = 0.0

    def __post_init__(self) -> None:
        _check_rate("peak", self.peak)
        if self.steps < 1:
            raise ValueError(f"steps must be 1 or more, got {self.steps}")
        if not 0 <= self.minimum <= self.peak:
            raise ValueError(f"minimum must be in [0, peak={self.peak}], got {self.minimum}")

    def __call__(self, step: int) -> float:
        """The rate at ``step``."""
        done = min(step / self.steps, 1.0)
        return self.minimum + 0.5 * (self.peak - self.minimum) * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Rises linearly for ``steps`` steps to where ``then`` begins, and goes on with it.

    Step k < steps uses the rate (k + 1) / steps of ``then(0)``; ``then`` counts from the end of
    the rise. Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.2.
    """

    steps: int
    then: Schedule

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps must be 0 or more, got {self.steps}")

    def __call__(self, step: int) -> float:
        """The rate at ``step``."""
        if step < self.steps:
            return self.then(0) * (step + 1) / self.steps
        return self.then(step - self.steps)


def as_schedule(rate: float | Schedule) -> Schedule:
    """A schedule as it is; a number as a constant one."""
    if callable(rate):
        return rate
    _check_rate("learning_rate", rate)
    return Constant(float(rate))


def as_number(name: str, value: object) -> float:
    """``value`` as a float.

    Raises
    ------
    TypeError
        Naming the argument, where it is no number.
    """
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def _check_rate(name: str, value: float) -> None:
    if not 0 < as_number(name, value) < float("inf"):
        raise ValueError(f"{name} must be above 0 and finite, got {value}")
