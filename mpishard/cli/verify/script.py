"""The steps that a loop of PyTorch has recorded on one rank and on several, and their errors."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from mpishard.arrays import Array
from mpishard.cli.verify.comparison import Comparison, default_tolerance, relative_error
from mpishard.cli.wording import counted

_CAUSES = {
    "gradients": "step {step}, rank {rank}: the mean gradient of the ranks is not that of one "
    "rank. Does each rank get its part of the batch of one process, and all equally many samples "
    "(mst.DataLoader; or a batch size divided by mst.world_size())? Is the loss a mean over "
    "samples? Batch normalisation needs mst.convert_sync_batchnorm. Dropout must be off, and no "
    "other random numbers may be drawn after mst.shard(), which gives each rank its own seed. If "
    "all of that holds, the fault is mpishard's",
    "parameters": "step {step}, rank {rank}: the gradients agree, and the update does not. Does a "
    "learning rate or another setting depend on the number of ranks? If not, the fault is "
    "mpishard's",
}


@dataclass(frozen=True, slots=True)
class Recording:
    """The steps of one job: each rank's parts of gradients and of parameters.

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

    def parts(self, kind: str, step: int, rank: int = 0) -> list[tuple[str, slice, Array]]:
        """Return name, flat range and values of each part of a rank."""
        with np.load(self.folder / f"{kind}-{step}-{rank}.npz") as found:
            keys = [key.rsplit("/", 2) for key in found]
            return [(n, slice(int(i), int(j)), found[f"{n}/{i}/{j}"]) for n, i, j in keys]


def compare_steps(alone: Recording, together: Recording, tolerance: float | None) -> Comparison:
    """Compare all ranks' parts in the steps that both jobs made.

    Errors of gradients are relative to the largest element of the step's whole gradient, those of
    parameters to their own largest element, or to 1. An element of a gradient below 10 times the
    tolerance, relative to the largest, is rounding noise. Adam and similar rules turn it into an
    update of full size: from then on that element of the parameter is left out.

    Raises
    ------
    ValueError
        If they made different numbers of steps, or have different parameters.
    """
    first = alone.parts("parameters", 1)
    # By name, because each world cuts the parameters into other parts.
    names, others = ({name for name, _, _ in p} for p in (first, together.parts("parameters", 1)))
    steps = alone.steps
    if together.steps != steps or others != names:
        raise ValueError(
            f"one rank made {counted(steps, 'step')} and {together.ranks} ranks made "
            f"{together.steps}, of {len(names)} and {len(others)} parameters"
        )
    dtype = first[0][2].dtype.name
    limit = tolerance or default_tolerance(dtype)
    numbers = {name: i for i, (name, _, _) in enumerate(first)}
    errors = {kind: np.zeros((together.ranks, steps + 1, len(numbers))) for kind in _CAUSES}
    is_signal = [np.ones(whole.shape, bool) for _, _, whole in first]
    for step in range(1, steps + 1):
        whole = {kind: [part for _, _, part in alone.parts(kind, step)] for kind in _CAUSES}
        largest = max(float(np.abs(g).max(initial=0)) for g in whole["gradients"])
        for signal, gradient in zip(is_signal, whole["gradients"], strict=True):
            if gradient.size:
                signal[...] &= np.abs(gradient) >= 10 * limit * largest
        for kind, rank in product(_CAUSES, range(together.ranks)):
            for name, own, part in together.parts(kind, step, rank):
                i, at = numbers[name], errors[kind][rank, step]
                expected, keep = whole[kind][i][own], is_signal[i][own]
                if kind == "gradients":
                    error = relative_error(part, expected, largest)
                else:
                    error = relative_error(part[keep], expected[keep])
                at[i] = max(at[i], error)
    return Comparison(
        # Names of further models in one optimizer keep a number.
        labels=[(name.removeprefix("0/"),) for name in numbers],
        errors=errors,
        limits=dict.fromkeys(_CAUSES, limit),
        columns={"gradient": "gradients", "value": "parameters"},
        causes=_CAUSES,
        dtype=dtype,
    )
