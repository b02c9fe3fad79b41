"""A line search that ends at a point which satisfies the strong Wolfe conditions."""

from __future__ import annotations

import math
from dataclasses import dataclass

_LONGER = 1.1, 4.0  # bounds of an extrapolation, in units of the last change
_SHRINKS = 0.66  # a bracket that has not shrunk by this factor in two trials is cut in half
_ACCURACY = 0.1  # relative width of a bracket below which nothing is gained
_BACK = 0.1  # factor of a step whose value is not finite


@dataclass
class StrongWolfe:
    """The search for a step t with f(t) <= f(0) + c1 t f'(0) and abs(f'(t)) <= c2 abs(f'(0)).

    Steps are bracketed and the bracket is zoomed into, as in Nocedal and Wright, "Numerical
    Optimization", 2006, algorithms 3.5 and 3.6. The trial steps are those of Moré and Thuente,
    "Line search algorithms with guaranteed sufficient decrease", ACM TOMS 20, 1994, sections 2 to
    4, which SciPy's L-BFGS-B takes, too. The caller evaluates f: all numbers between two
    evaluations are here, so that a checkpoint can hold them.

    Parameters
    ----------
    value, slope : float
        f(0) and f'(0) < 0.
    step : float
        The first trial, above 0.
    longest : float
        No trial is longer.
    c1, c2 : float
        Constants of the two conditions, 0 < c1 < c2 < 1.

    Attributes
    ----------
    trials : int
        Evaluations so far.
    is_exhausted : bool
        The last trial was an end of the bracket: no other trial can be distinguished from it.
    """

    value: float
    slope: float
    step: float
    longest: float
    c1: float
    c2: float
    trials: int = 0
    is_bracketed: bool = False
    is_exhausted: bool = False
    is_decreasing: bool = False  # a trial had a sufficient decrease and a slope above 0
    # The ends of the bracket: (step, value, slope), of which `best` has the lower value.
    best: tuple[float, float, float] = (0.0, 0.0, 0.0)
    other: tuple[float, float, float] = (0.0, 0.0, 0.0)
    low: float = 0.0
    high: float = 0.0
    width: float = 0.0
    width_before: float = 0.0

    def __post_init__(self) -> None:
        (a, f_a, g_a), (b, f_b, g_b) = self.best, self.other
        self.best, self.other = (a, f_a, g_a), (b, f_b, g_b)  # which are lists if read from JSON
        if self.trials == 0:
            self.best = self.other = 0.0, self.value, self.slope
            self.high = self.step * (1 + _LONGER[1])
            self.width, self.width_before = self.longest, 2 * self.longest

    def judge(self, value: float, slope: float) -> bool:
        """Return whether the search ends with the present ``step``; otherwise choose the next.

        There is no next if ``is_exhausted`` then.

        Parameters
        ----------
        value, slope : float
            f(step) and f'(step). If one of them is not finite the next step is a tenth as long.
        """
        self.trials += 1
        if not (math.isfinite(value) and math.isfinite(slope)):
            # No later trial may be as long as one whose value is not finite.
            self.longest = self.high = self.step
            self.step = self.best[0] + _BACK * (self.step - self.best[0])
            return False
        at = self.step
        test = self.c1 * self.slope
        decreases = value <= self.value + at * test
        if decreases and abs(slope) <= self.c2 * -self.slope:
            return True
        # The search also ends if rounding errors leave nothing to gain, or at the longest step.
        is_narrow = self.is_bracketed and (
            not self.low < at < self.high or self.high - self.low <= _ACCURACY * self.high
        )
        if decreases and (is_narrow or (at == self.longest and slope <= test)):
            return True
        # Interpolation between two equal steps would divide by zero.
        if at in (self.best[0], self.other[0]):
            self.is_exhausted = True
            return False
        self.is_decreasing = self.is_decreasing or (decreases and slope >= 0)
        trial = at, value, slope
        if not self.is_decreasing and not decreases and value <= self.best[1]:
            # The auxiliary function f(t) - t c1 f'(0) has its minimum where f decreases enough.
            self.best, self.other = _tilted(self.best, -test), _tilted(self.other, -test)
            self._choose(_tilted(trial, -test))
            self.best, self.other = _tilted(self.best, test), _tilted(self.other, test)
        else:
            self._choose(trial)
        self._bound()
        return False

    def _bound(self) -> None:
        """Set the bounds of the next trial, and keep it within them."""
        near, far = self.best[0], self.other[0]
        if self.is_bracketed:
            # Interpolation may shrink one end of a bracket only: then it is cut in half.
            if abs(far - near) >= _SHRINKS * self.width_before:
                self.step = near + 0.5 * (far - near)
            self.width_before, self.width = self.width, abs(far - near)
            self.low, self.high = min(near, far), max(near, far)
        else:
            self.low, self.high = (self.step + f * (self.step - near) for f in _LONGER)
        self.step = min(max(self.step, 0.0), self.longest)
        if self.is_bracketed and (
            not self.low < self.step < self.high or self.high - self.low <= _ACCURACY * self.high
        ):
            self.step = near

    def _choose(self, trial: tuple[float, float, float]) -> None:
        """Choose the next step and the new bracket: section 4 of the paper, cases 1 to 4."""
        (a, f_a, g_a), (b, f_b, g_b), (t, f_t, g_t) = self.best, self.other, trial
        turns = g_t * math.copysign(1.0, g_a) < 0
        if f_t > f_a:
            cubic = _cubic(a, f_a, g_a, t, f_t, g_t)
            # Case 1: the value rose, so a minimum lies between. The mean of both is the careful
            # choice.
            quadratic = a + (g_a / ((f_a - f_t) / (t - a) + g_a)) / 2 * (t - a)
            near = abs(cubic - a) < abs(quadratic - a)
            step = cubic if near else cubic + (quadratic - cubic) / 2
            self.is_bracketed = True
        elif turns:
            # Case 2: the slope has changed its sign, which brackets a minimum, too.
            cubic, secant = _cubic(t, f_t, g_t, a, f_a, g_a), t + g_t / (g_t - g_a) * (a - t)
            step = cubic if abs(cubic - t) > abs(secant - t) else secant
            self.is_bracketed = True
        elif abs(g_t) < abs(g_a):
            # Case 3: the slope is flatter. The cubic may have no minimum on this side.
            cubic = _cubic(t, f_t, g_t, a, f_a, g_a, beyond=self.high if t > a else self.low)
            secant = t + g_t / (g_t - g_a) * (a - t)
            is_nearer = abs(cubic - t) < abs(secant - t)
            step = cubic if is_nearer == self.is_bracketed else secant
            if self.is_bracketed:
                limit = t + _SHRINKS * (b - t)
                step = min(limit, step) if t > a else max(limit, step)
            step = min(max(step, self.low), self.high)
        elif self.is_bracketed:
            # Case 4: the slope is as steep as before, so that only the other end helps.
            step = _cubic(t, f_t, g_t, b, f_b, g_b)
        else:
            step = self.high if t > a else self.low
        if f_t > f_a:
            self.other = trial
        else:
            # The old best point stays an end only if a minimum lies between the two.
            if turns:
                self.other = self.best
            self.best = trial
        self.step = step


def _tilted(point: tuple[float, float, float], slope: float) -> tuple[float, float, float]:
    step, value, own = point
    return step, value + step * slope, own + slope


def _cubic(
    a: float,
    f_a: float,
    g_a: float,
    b: float,
    f_b: float,
    g_b: float,
    beyond: float | None = None,
) -> float:
    """Return the minimizer of the cubic through two points with these values and slopes.

    With ``beyond`` it is that number if the cubic has no minimizer on the far side of ``a``.
    """
    theta = 3 * (f_a - f_b) / (b - a) + g_a + g_b
    # Divided by the largest number, so that squares neither overflow nor vanish.
    scale = max(abs(theta), abs(g_a), abs(g_b))
    gamma = scale * math.sqrt(max(0.0, (theta / scale) ** 2 - g_a / scale * (g_b / scale)))
    if b < a:
        gamma = -gamma
    ratio = (gamma - g_a + theta) / (gamma - g_a + gamma + g_b)
    if beyond is not None and not (ratio < 0 and gamma != 0):
        return beyond
    return a + ratio * (b - a)
