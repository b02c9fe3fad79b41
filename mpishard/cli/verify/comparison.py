"""Errors of training on ranks against training alone: their table, their cause, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from rich.table import Column, Table

from mpishard.base import Array, Scalar
from mpishard.cli.wording import counted
from mpishard.communication import who


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
        # Stable, so that parameters with equal errors keep the order of the model.
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
        # Only a factory's comparison has these; a script's has its gradients in the table.
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
        """Return the step and the kind of the first error above its limit, which causes others.

        Losses and predictions cause nothing: theirs is returned if there is no other.
        """
        steps = self._shown().shape[2]
        found = (
            (step, kind)
            for step, kind in product(range(steps), self.errors)
            if (self.errors[kind][:, step] > self.limits[kind]).any()
        )
        return min(found, key=lambda each: (each[1] in ("losses", "predictions"), each[0]))


def relative_error(actual: Scalar, expected: Scalar, floor: float = 1.0) -> float:
    """Return the largest difference, relative to the largest expected element or ``floor``.

    Infinite if the shapes differ, or one is not finite.
    """
    if np.shape(actual) != np.shape(expected):
        return np.inf
    if np.size(expected) == 0:
        return 0.0
    # In float64, so that the comparison adds no rounding of its own.
    difference = np.max(np.abs(np.subtract(actual, expected, dtype=np.float64)))
    # A gradient may be 0, and its floor with it.
    scale = max(floor, float(np.max(np.abs(expected)))) or 1.0
    return float(difference / scale) if np.isfinite(difference) else np.inf


def default_tolerance(dtype: str) -> float:
    """Return the largest relative error that roundings explain after a few steps."""
    return 1e-10 if dtype == "float64" else 1e-4


# ------------------------------------------------------------------------------ steps of a script

_SUM = (
    "step {step}, rank {rank}: the gradient is 1/{ranks} of that of one rank, in every parameter. "
    "So the loss is a sum over samples: pass loss_is_sum=True to mst.shard"
)
_OWN_SAMPLES = (
    "step {step}, rank {rank}: batch normalisation {layers} uses each rank's own samples, and one "
    "rank all, so that the gradients must differ: call mst.convert_sync_batchnorm(model) before "
    "mst.shard(), or compare with DDP of PyTorch"
)
_CAUSES = {
    "gradients": "step {step}, rank {rank}: the mean gradient of the ranks is not that of one "
    "rank. Does each rank get its part of the batch of one process, and all equally many samples "
    "(mst.DataLoader; or a batch size divided by mst.world_size())? Is the loss a mean over "
    "samples? Dropout must be off, and no other random numbers may be drawn after mst.shard(), "
    "which gives each rank its own seed. If all of that holds, the fault is mpishard's",
    "parameters": "step {step}, rank {rank}: the gradients agree, and the update does not. Does a "
    "learning rate or another setting depend on the number of ranks? If not, the fault is "
    "mpishard's",
}


@dataclass(frozen=True, slots=True)
class Recording:
    """The steps of one job: each rank's pieces of gradients and of parameters.

    Parameters
    ----------
    folder : Path
        The folder to which `mpishard.torch` has written them.
    ranks : int
        Number of ranks.
    """

    folder: Path
    ranks: int

    @property
    def steps(self) -> int:
        """Number of steps that rank 0 completed."""
        return sum(1 for _ in self.folder.glob("parameters-*-0.npz"))

    def layers_of_own_samples(self) -> str:
        """Return the names of batch normalisation of each rank's own samples."""
        file = self.folder / "own_samples.txt"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def pieces(self, kind: str, step: int, rank: int = 0) -> list[tuple[str, slice, Array]]:
        """Return name, flat range and values of each piece of a rank."""
        with np.load(self.folder / f"{kind}-{step}-{rank}.npz") as found:
            keys = [key.rsplit("/", 2) for key in found]
            return [(n, slice(int(i), int(j)), found[f"{n}/{i}/{j}"]) for n, i, j in keys]


def compare_steps(alone: Recording, on_ranks: Recording, tolerance: float | None) -> Comparison:
    """Compare all ranks' pieces in the steps that both jobs made.

    Errors of gradients are relative to the largest element of the step's whole gradient, those of
    parameters to their own largest element, or to 1. An element of a gradient below 10 times the
    tolerance, relative to the largest, is rounding noise. Adam and similar rules turn it into an
    update of full size: from then on that element of the parameter is left out.

    Raises
    ------
    ValueError
        If they made different numbers of steps, or have different parameters.
    """
    first = alone.pieces("parameters", 1)
    # By name, because each world cuts the parameters into other pieces.
    names, others = ({name for name, _, _ in p} for p in (first, on_ranks.pieces("parameters", 1)))
    steps = alone.steps
    if on_ranks.steps != steps or others != names:
        raise ValueError(
            f"one rank made {counted(steps, 'step')} and {on_ranks.ranks} ranks made "
            f"{on_ranks.steps}, of {len(names)} and {len(others)} parameters"
        )
    dtype = first[0][2].dtype.name
    limit = tolerance or default_tolerance(dtype)
    numbers = {name: i for i, (name, _, _) in enumerate(first)}
    errors = {kind: np.zeros((on_ranks.ranks, steps + 1, len(numbers))) for kind in _CAUSES}
    is_signal = [np.ones(whole.shape, bool) for _, _, whole in first]
    is_part = True  # of a gradient: all of it over the number of ranks, as of a loss that is a sum
    for step in range(1, steps + 1):
        # One step at a time, because all steps of a large model would not fit into memory.
        whole = {kind: [piece for _, _, piece in alone.pieces(kind, step)] for kind in _CAUSES}
        largest = max(float(np.abs(g).max(initial=0)) for g in whole["gradients"])
        for signal, gradient in zip(is_signal, whole["gradients"], strict=True):
            if gradient.size:
                # For good, because all later values of the element have this noise in them.
                signal[...] &= np.abs(gradient) >= 10 * limit * largest
        for kind, rank in product(_CAUSES, range(on_ranks.ranks)):
            for name, own, piece in on_ranks.pieces(kind, step, rank):
                i, at = numbers[name], errors[kind][rank, step]
                expected, keep = whole[kind][i][own], is_signal[i][own]
                if kind == "gradients":
                    error = relative_error(piece, expected, largest)
                    multiple = np.multiply(piece, on_ranks.ranks)
                    is_part &= step > 1 or relative_error(multiple, expected, largest) <= limit
                else:
                    error = relative_error(piece[keep], expected[keep])
                # A rank may have several pieces of one parameter.
                at[i] = max(at[i], error)
    causes = _CAUSES
    if is_part and on_ranks.ranks > 1:
        causes = causes | {"gradients": _SUM.replace("{ranks}", str(on_ranks.ranks))}
    elif layers := on_ranks.layers_of_own_samples():
        causes = causes | {"gradients": _OWN_SAMPLES.replace("{layers}", layers)}
    return Comparison(
        # Names of further models in one optimizer keep a number.
        labels=[(name.removeprefix("0/"),) for name in numbers],
        errors=errors,
        limits=dict.fromkeys(_CAUSES, limit),
        columns={"gradient": "gradients", "value": "parameters"},
        causes=causes,
        dtype=dtype,
    )
