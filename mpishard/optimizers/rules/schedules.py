"""Learning rates as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

from mpishard.base import as_count, as_number, as_positive, take_plain_fields

Schedule = Callable[[int], float]
"""``schedule(step) -> learning rate``; the first update is step 0."""


class _NoNumber:
    """Base of schedules. A rule that multiplies by its own ``learning_rate`` is told the rate."""

    __slots__ = ()
    __array_ufunc__ = None  # NumPy then asks __rmul__, too

    def __mul__(self, other: object) -> NoReturn:
        raise TypeError(
            f"the schedule {self} is no number: in update() of a rule, context.learning_rate is "
            "the rate of this step"
        )

    __rmul__ = __mul__


@dataclass(frozen=True, slots=True)
class Constant(_NoNumber):
    """The same rate at every step."""

    rate: float

    def __post_init__(self) -> None:
        take_plain_fields(self)
        as_positive("rate", self.rate)

    def __call__(self, step: int) -> float:
        """Return the rate."""
        return self.rate


@dataclass(frozen=True, slots=True)
class StepDecay(_NoNumber):
    """``initial * factor**k``, with k the number of whole periods of ``every`` steps so far.

    The schedule of He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section
    4.2, at even distances.
    """

    initial: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        take_plain_fields(self)
        as_positive("initial", self.initial)
        as_count("every", self.every)
        _check_factor(self.factor)

    def __call__(self, step: int) -> float:
        """Return the rate at ``step``."""
        return float(self.initial * self.factor ** (step // self.every))


@dataclass(frozen=True, slots=True)
class Exponential(_NoNumber):
    """``initial * factor**step``, and never less than ``minimum`` nor more than ``maximum``."""

    initial: float
    factor: float
    minimum: float = 0.0
    maximum: float = math.inf

    def __post_init__(self) -> None:
        take_plain_fields(self)
        as_positive("initial", self.initial)
        _check_factor(self.factor)
        if not 0 <= as_number("minimum", self.minimum) <= as_number("maximum", self.maximum):
            raise ValueError(f"minimum must be in [0, maximum={self.maximum}], got {self.minimum}")

    def __call__(self, step: int) -> float:
        """Return the rate at ``step``."""
        return min(max(self.initial * self.factor**step, self.minimum), self.maximum)


@dataclass(frozen=True, slots=True)
class Cosine(_NoNumber):
    """From ``peak`` down to ``minimum`` over ``steps`` steps, along half a cosine; then constant.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017,
    equation 5, one period.
    """

    peak: float
    steps: int
    minimum: float = 0.0

    def __post_init__(self) -> None:
        take_plain_fields(self)
        as_positive("peak", self.peak)
        as_count("steps", self.steps)
        if not 0 <= as_number("minimum", self.minimum) <= self.peak:
            raise ValueError(f"minimum must be in [0, peak={self.peak}], got {self.minimum}")

    def __call__(self, step: int) -> float:
        """Return the rate at ``step``."""
        # The minimum stays after the last step.
        return _cosine(self.peak, self.minimum, min(step / self.steps, 1.0))


@dataclass(frozen=True, slots=True)
class WarmUp(_NoNumber):
    """Rises linearly for ``steps`` steps to the first rate of ``then``, and continues with it.

    Step k < steps uses the rate (k + 1) / steps of ``then(0)``; ``then`` counts from the end of
    the rise. Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.2.
    """

    steps: int
    then: Schedule

    def __post_init__(self) -> None:
        take_plain_fields(self)
        as_count("steps", self.steps, least=0)
        if not callable(self.then):
            raise TypeError(f"then must be a schedule, such as Constant(0.1), got {self.then!r}")

    def __call__(self, step: int) -> float:
        """Return the rate at ``step``."""
        if step < self.steps:
            # The first rate is above 0, because an update at rate 0 would be lost.
            return self.then(0) * (step + 1) / self.steps
        return self.then(step - self.steps)


@dataclass(frozen=True, slots=True)
class OneCycle(_NoNumber):
    """Up from ``peak / start_divisor`` to ``peak``, and down far below the first rate.

    Smith and Topin, "Super-Convergence: Very Fast Training of Neural Networks Using Large
    Learning Rates", 2018 (arXiv:1708.07120), section 3: the rate rises and falls back along
    straight lines, then falls by orders of magnitude. That is ``three_phases=True`` and
    ``shape="linear"``; the defaults are the two phases along half cosines that proved better in
    practice, and are PyTorch's. The rates of both are those of PyTorch's ``OneCycleLR``.

    Parameters
    ----------
    peak : float
        Highest rate.
    steps : int
        Steps of the whole cycle; the last rate stays.
    rise : float
        The part of the steps in which the rate rises, in (0, 1); at most 0.5 with three phases,
        of which the second is as long as the first.
    start_divisor : float
        The first rate is ``peak / start_divisor``; 1 or more.
    end_divisor : float
        The last rate is the first one divided by this; 1 or more.
    shape : {"cosine", "linear"}
        Of each phase.
    three_phases : bool
        Fall back to the first rate, and from there to the last.

    Raises
    ------
    ValueError
        For a number outside its range, or another shape.
    """

    peak: float
    steps: int
    rise: float = 0.3
    start_divisor: float = 25.0
    end_divisor: float = 1e4
    shape: str = "cosine"
    three_phases: bool = False

    def __post_init__(self) -> None:
        take_plain_fields(self)
        as_positive("peak", self.peak)
        as_count("steps", self.steps)
        # With three phases the way down to the first rate is as long as the rise.
        longest = 0.5 if self.three_phases else 1.0
        if not 0 < as_number("rise", self.rise) <= longest or self.rise == 1:
            raise ValueError(
                f"rise must be above 0 and "
                f"{'at most 0.5 with three phases' if self.three_phases else 'below 1'}, "
                f"got {self.rise}"
            )
        for name in ("start_divisor", "end_divisor"):
            if not 1 <= as_number(name, getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.shape not in ("cosine", "linear"):
            raise ValueError(f'shape must be "cosine" or "linear", got {self.shape!r}')

    def __call__(self, step: int) -> float:
        """Return the rate at ``step``."""
        first = self.peak / self.start_divisor
        # Steps count from 0: the last of the rise has the number rise * steps - 1.
        turn = self.rise * self.steps - 1
        corners = [(0.0, first), (turn, self.peak)]
        if self.three_phases:
            corners.append((2 * turn, first))
        corners.append((self.steps - 1, first / self.end_divisor))
        for (start, left), (stop, right) in pairwise(corners):
            if step <= stop:
                # A rise of one step begins at the peak.
                done = (step - start) / (stop - start) if stop > start else 1.0
                return (_cosine if self.shape == "cosine" else _line)(left, right, done)
        return corners[-1][1]


def _cosine(left: float, right: float, done: float) -> float:
    return right + 0.5 * (left - right) * (1 + math.cos(math.pi * done))


def _line(left: float, right: float, done: float) -> float:
    return left + (right - left) * done


def as_schedule(name: str, rate: float | Schedule) -> Schedule:
    """Return a schedule as it is, and a number as a constant one. Errors call it ``name``."""
    if callable(rate):
        return rate
    return Constant(as_positive(name, rate))


def rate_at(schedule: Schedule, step: int, name: str = "the schedule") -> float:
    """Return the rate of ``step`` as a float; schedules may return NumPy scalars and 0-d arrays.

    Raises
    ------
    TypeError
        If the schedule returns no number.
    """
    rate: object = schedule(step)
    # Nothing else is to be checked, in each step of most runs.
    if type(rate) is float:
        return rate
    return as_number(f"what {name} gives for step {step}", rate)


def rates(schedule: Schedule) -> list[float | str | None]:
    """Return a schedule for JSON: its rates at some steps, because it may be any function.

    A step without a rate gives None: a schedule may be a table that ends.
    """
    found: list[float | str | None] = []
    # Powers of ten, because schedules differ early or late.
    for step in (0, 1, 10, 100, 1000, 10000):
        try:
            rate = rate_at(schedule, step)
        except Exception:  # noqa: BLE001 - a run that comes to this step raises it
            found.append(None)
        else:
            found.append(rate if math.isfinite(rate) else str(rate))  # NaN differs from itself
    return found


def _check_factor(value: float) -> None:
    if not 0 < as_number("factor", value) <= 1:
        raise ValueError(f"factor must be in (0, 1], got {value}")
