"""Conclusion of ``mpishard verify``, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.table import Column, Table

from mpishard.arrays import Array
from mpishard.cli.verify.rank import Comparison
from mpishard.cli.wording import counted

__all__ = ["Verdict", "default_tolerance"]


def default_tolerance(dtype: str) -> float:
    """Return the relative error that rounding explains over some steps."""
    return 1e-10 if dtype == "float64" else 1e-4


@dataclass(frozen=True, slots=True)
class Verdict:
    """A comparison, and the error that it may have.

    Parameters
    ----------
    comparison : Comparison
        Errors that the ranks found.
    tolerance : float
        Largest relative error.
    """

    comparison: Comparison
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """Whether everything that was compared is within the tolerance, on every rank."""
        c = self.comparison
        errors = (c.built, c.parameters, c.losses, c.gradients, np.nan_to_num(c.predictions))
        return not c.inputs.any() and all(self._within(e) for e in errors)

    def _within(self, errors: Array) -> bool:
        return bool((errors <= self.tolerance).all())

    def table(self) -> Table:
        """Return each parameter's error, the worst first."""
        figures = [
            Column(name, justify="right") for name in ("error", "on rank", "above from step")
        ]
        texts = [Column(name, overflow="fold") for name in ("parameter", "shape")]
        table = Table(*texts, *figures, box=None, pad_edge=False)
        c = self.comparison
        # Step 0 is before training.
        errors = np.concatenate([c.built[:, None], c.parameters], axis=1)
        worst = errors.max(axis=(0, 1))
        for i in np.argsort(-worst, kind="stable"):
            steps = np.flatnonzero((errors[:, :, i] > self.tolerance).any(axis=0))
            rank, first = errors[:, :, i].max(axis=1).argmax(), f"{steps[0]}" if steps.size else ""
            row = c.names[i], c.shapes[i], f"{worst[i]:.1e}", rank, first
            table.add_row(*map(str, row), style="bold red" if steps.size else None)
        return table

    def lines(self) -> list[str]:
        """Return what else was compared, what it means, and the verdict last."""
        c = self.comparison
        others = [f"losses {c.losses.max():.1e}", f"own gradients {c.gradients.max():.1e}"]
        if not np.isnan(c.predictions).any():
            others.append(f"predictions {c.predictions.max():.1e}")
        lines = [f"worst error of {', '.join(others)}"]
        if c.computed == "repeated":
            lines.append(
                "the computation was not partitioned, because the model is a black box: every rank "
                "computed all of its batch. A model that implements ILayeredModel (mpishard.nn) is "
                "computed in parts"
            )
        errors = np.maximum(c.built, c.parameters.max(axis=1))
        worst, names = f"{self.tolerance:.0e} (worst {errors.max():.1e})", len(c.names)
        if self.is_equal:
            ranks = counted(len(c.built), "rank")
            return [*lines, f"EQUAL: all {names} parameters on {ranks} are within {worst}"]
        above = int((errors > self.tolerance).any(axis=0).sum())
        return [*lines, self._reason(), f"DIFFERENT: {above} of {names} parameters exceed {worst}"]

    def _reason(self) -> str:
        """Return the first thing that differs, and what may cause it."""
        c = self.comparison
        if not self._within(c.built) or c.inputs.any():
            what = "other data" if self._within(c.built) else "other first parameters"
            ranks = c.inputs.any(axis=1) | (c.built > self.tolerance).any(axis=1)
            return (
                f"{_ranks(ranks)} got {what} than a process alone: factory(seed) must depend on "
                "its seed and on nothing else"
            )
        wrong = (c.parameters > self.tolerance).any(axis=(0, 2))
        first_wrong = int(wrong.argmax()) if wrong.any() else len(wrong)
        off = c.gradients > self.tolerance
        first_off = int(off.any(axis=(0, 2)).argmax()) if off.any() else len(wrong) + 1
        if first_off <= first_wrong:
            name = c.names[c.gradients[:, first_off].max(axis=0).argmax()]
            if c.computed == "together":
                return (
                    f"step {first_off + 1}: the gradient of one batch that several ranks compute "
                    f"together is not what a process alone computes of it (worst {name}). Does a "
                    "layer look at the batch as a whole (statistics of it), or depend on its rank? "
                    "If not, the fault is mpishard's"
                )
            return (
                f"step {first_off + 1}: on {_ranks(off[:, first_off].any(axis=1))} the gradient of "
                f"the rank's own samples is not what a process alone computes of them (worst "
                f"{name}). The model depends on its rank, or on something else beside parameters "
                "and data: an environment variable, the process or thread, the time, np.random's "
                "global state, earlier calls"
            )
        if wrong.any():
            return (
                f"step {first_wrong + 1}: each rank's gradient of its own samples is right, and "
                "the update is not. Is the loss a mean over the samples, and is each sample's part "
                "free of the others (no sum, no statistics of the batch)? Then the fault is "
                "mpishard's"
            )
        what = "predictions" if self._within(c.losses) else "losses"
        rows = c.predictions[:, None] if what == "predictions" else c.losses
        ranks = (rows > self.tolerance).any(axis=1)
        return f"the parameters agree, and the {what} of {_ranks(ranks)} differ"


def _ranks(which: Array) -> str:
    ranks = np.flatnonzero(which)
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)
