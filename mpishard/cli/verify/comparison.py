"""Errors of training on ranks against training alone: their table, their cause, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from rich.table import Column, Table

from mpishard.arrays import Array
from mpishard.cli.wording import counted
from mpishard.communication.contract.matching import who


@dataclass(frozen=True, slots=True)
class Comparison:
    """Relative errors of every rank; ``inf`` if something is not finite, or has another shape.

    Parameters
    ----------
    labels : sequence of tuple of str
        Name of each parameter, and its shape if it is known.
    errors : mapping of str to Array
        Errors of each kind, shape (ranks, steps + 1, parameters), or (ranks, steps + 1, 1) of a
        kind that is no parameter's. Step 0 is before training. Kinds that explain others come
        first.
    limits : mapping of str to float
        Largest error of each kind that is allowed.
    columns : mapping of str to str
        Columns of the table: the title, and the kind of error.
    causes : mapping of str to str
        Explanation of each kind; ``"start"`` explains wrong parameters in step 0.
    dtype : str
        Name of the dtype of the parameters.
    note : str
        A line about all errors, if there is something to say.
    """

    labels: Sequence[tuple[str, ...]]
    errors: Mapping[str, Array]
    limits: Mapping[str, float]
    columns: Mapping[str, str]
    causes: Mapping[str, str]
    dtype: str
    note: str = ""

    @property
    def tolerance(self) -> float:
        """Largest error of a parameter that is allowed."""
        return self.limits["parameters"]

    @property
    def is_equal(self) -> bool:
        """True if everything that was compared is within its limit, on every rank."""
        return all((errors <= self.limits[kind]).all() for kind, errors in self.errors.items())

    def worst(self, *kinds: str) -> float:
        """Return the largest error of these kinds."""
        return max(float(self.errors[kind].max()) for kind in kinds)

    def table(self) -> Table:
        """Return each parameter's errors, the worst first."""
        heads = ("parameter", "shape")[: len(self.labels[0])]
        texts = [Column(name, overflow="fold") for name in heads]
        titles = (*self.columns, "on rank", "above from step")
        figures = [Column(name, justify="right") for name in titles]
        table = Table(*texts, *figures, box=None, pad_edge=False)
        shown = self._shown()
        for i in np.argsort(-shown.max(axis=(0, 1, 2)), kind="stable"):
            mine = shown[..., i]
            steps = np.flatnonzero((mine > self.tolerance).any(axis=(0, 1)))
            worst = [f"{error:.1e}" for error in mine.max(axis=(1, 2))]
            rank, first = mine.max(axis=(0, 2)).argmax(), f"{steps[0]}" if steps.size else ""
            row = (*self.labels[i], *worst, f"{rank}", first)
            table.add_row(*row, style="bold red" if steps.size else None)
        return table

    def lines(self) -> list[str]:
        """Return the other errors, their cause if there is a difference, and the verdict."""
        others = [
            kind for kind in ("losses", "own gradients", "predictions") if kind in self.errors
        ]
        texts = [f"{kind} {self.worst(kind):.1e}" for kind in others]
        lines = [f"worst error of {', '.join(texts)}"] if texts else []
        lines += [self.note] if self.note else []
        shown, names = self._shown(), len(self.labels)
        _, size, steps, _ = shown.shape
        made = counted(steps - 1, "step")
        within = f"{self.tolerance:.0e} in {made} (worst {shown.max():.1e}), {self.dtype}"
        if self.is_equal:
            are_all = f"all {names} parameters"
            what = are_all if others else f"{names} parameters and gradients"
            return [*lines, f"EQUAL: {what} on {counted(size, 'rank')} are within {within}"]
        # A wrong gradient makes all later parameters wrong, too: the first difference is the cause.
        step, kind = self.first_difference()
        errors = self.errors[kind][:, step]
        ranks = np.flatnonzero((errors > self.limits[kind]).any(axis=1)).tolist()
        cause = self.causes[kind if step else "start"].format(
            step=step,
            rank=ranks[0],
            ranks=who(ranks),
            name=self.labels[errors.max(axis=0).argmax()][0],
            most=errors.max(),
        )
        above = int((shown > self.tolerance).any(axis=(0, 1, 2)).sum())
        return [*lines, cause, f"DIFFERENT: {above} of {names} parameters exceed {within}"]

    def _shown(self) -> Array:
        """Return the errors in the table, shape (columns, ranks, steps + 1, parameters)."""
        return np.stack([self.errors[kind] for kind in self.columns.values()])

    def first_difference(self) -> tuple[int, str]:
        """Return the step and the kind of the first error above its limit, which causes others."""
        steps = self._shown().shape[2]
        return next(
            (step, kind)
            for step, kind in product(range(steps), self.errors)
            if (self.errors[kind][:, step] > self.limits[kind]).any()
        )


def relative_error(actual: Array, expected: Array, floor: float = 1.0) -> float:
    """Return the largest difference, relative to the largest expected element or ``floor``.

    Infinite if the shapes differ, or one is not finite.
    """
    if np.shape(actual) != np.shape(expected):
        return np.inf
    if np.size(expected) == 0:
        return 0.0
    difference = np.max(np.abs(np.subtract(actual, expected, dtype=np.float64)))
    # A gradient may be 0, and its floor with it.
    scale = max(floor, float(np.max(np.abs(expected)))) or 1.0
    return float(difference / scale) if np.isfinite(difference) else np.inf


def default_tolerance(dtype: str) -> float:
    """Return the largest relative error that roundings explain after a few steps."""
    return 1e-10 if dtype == "float64" else 1e-4
