"""Scripts with a PyTorch loop: compare their steps on one rank with those on several."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import typer
from rich.table import Table

from mpishard.arrays import Array
from mpishard.cli.run.job import prepare_job
from mpishard.cli.tables import errors_table, show
from mpishard.cli.verify.comparison import default_tolerance
from mpishard.cli.verify.job import relative_error
from mpishard.cli.wording import counted, refuse, say

_CAUSES = {
    "gradients": "the mean gradient of the ranks is not that of one rank. Does each rank get its "
    "part of the batch of one process, and all equally many samples (mst.DataLoader; or a batch "
    "size divided by mst.world_size())? Is the loss a mean over samples? Batch normalisation needs "
    "mst.convert_sync_batchnorm. Dropout must be off, and no other random numbers may be drawn "
    "after mst.shard(), which gives each rank its own seed. If all of that holds, the fault is "
    "mpishard's",
    "parameters": "the gradients agree, and the update does not. Does a learning rate or another "
    "setting depend on the number of ranks? If not, the fault is mpishard's",
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


@dataclass(frozen=True, slots=True, order=True)
class Difference:
    """The error of one rank's part of a parameter, or of its gradient, after a step."""

    error: float
    step: int
    rank: int
    kind: str
    name: str


def compare_steps(alone: Recording, together: Recording, tolerance: float) -> list[Difference]:
    """Return the errors of all ranks' parts in the steps that both jobs made, in their order.

    Errors of gradients are relative to the largest element of the step's whole gradient, those of
    parameters to their own largest element, or to 1. An element of a gradient below 10 times the
    tolerance, relative to the largest, is rounding noise. Adam and similar rules turn it into an
    update of full size: from then on that element of the parameter is left out.
    """
    found = []
    is_signal: dict[str, Array] = {}
    for step in range(1, min(alone.steps, together.steps) + 1):
        gradients = {name: whole for name, _, whole in alone.parts("gradients", step)}
        parameters = {name: whole for name, _, whole in alone.parts("parameters", step)}
        largest = max(float(np.abs(g).max(initial=0)) for g in gradients.values())
        for name, gradient in gradients.items():
            size = np.abs(gradient) if gradient.size else np.inf
            before = is_signal.get(name, np.ones(parameters[name].shape, bool))
            is_signal[name] = before & (size >= 10 * tolerance * largest)
        for rank in range(together.ranks):
            for name, own, part in together.parts("gradients", step, rank):
                error = relative_error(part, gradients[name][own], largest)
                found.append(Difference(error, step, rank, "gradients", name))
            for name, own, part in together.parts("parameters", step, rank):
                keep = is_signal[name][own]
                error = relative_error(part[keep], parameters[name][own][keep])
                found.append(Difference(error, step, rank, "parameters", name))
    return found


def _table(found: Sequence[Difference], tolerance: float) -> Table:
    """Return each parameter's worst errors, the worst first."""
    table = errors_table(("parameter",), ("gradient", "value", "above from step"))
    rows: dict[str, list[Difference]] = {}
    for each in found:
        rows.setdefault(each.name, []).append(each)
    for name, errors in sorted(rows.items(), key=lambda row: -max(row[1]).error):
        worst = [max(e.error for e in errors if e.kind == kind) for kind in _CAUSES]
        first = next((str(e.step) for e in errors if e.error > tolerance), "")
        shown = name.removeprefix("0/")  # names of further models in one optimizer keep a number
        style = "bold red" if first else None
        table.add_row(shown, *(f"{error:.1e}" for error in worst), first, style=style)
    return table


def verify_script(
    script: str, arguments: Sequence[str], ranks: int, steps: int, tolerance: float | None
) -> bool:
    """Run a script on one rank and on ``ranks``, print a comparison, and return if they agree.

    Raises
    ------
    typer.Exit
        With code 2 if the script fails on one rank, or makes no step there.
    """
    with tempfile.TemporaryDirectory(prefix="mpishard-verify-") as folder:
        recordings = []
        for name, size in (("alone", 1), ("together", ranks)):
            recording = Recording(Path(folder, name), size)
            recording.folder.mkdir()
            variables = {"MPISHARD_VERIFY": f"{steps}:{recording.folder}"}
            job = prepare_job("verify", [script, *arguments], size, "", variables)
            where, code = f"{script} on {counted(size, 'rank')}", job.run()
            if code and name == "alone":
                refuse("verify", f"{where} ended with exit code {code}: see above")
            if code:
                text = f"on one rank the script trains, and {where} ended with exit code {code}"
                say("verify", f"{text}: see above")
                return False
            if not recording.steps:
                refuse("verify", f"{where} made no step of an optimizer of mpishard.torch; a model "
                       "of mpishard is verified by a factory, as file.py:factory")  # fmt: skip
            recordings.append(recording)
        alone, together = recordings
        first = [recording.parts("parameters", 1) for recording in recordings]
        dtype = first[0][0][2].dtype.name
        limit = tolerance or default_tolerance(dtype)
        names = [{name for name, _, _ in parts} for parts in first]
        # By name, because each world cuts the parameters into other parts.
        if alone.steps != together.steps or names[0] != names[1]:
            typer.echo(
                f"DIFFERENT: one rank made {counted(alone.steps, 'step')} and {ranks} ranks made "
                f"{together.steps}, of {len(names[0])} and {len(names[1])} parameters"
            )
            return False
        found = compare_steps(alone, together, limit)
    show(_table(found, limit))
    wrong = next((each for each in found if each.error > limit), None)
    made = counted(found[-1].step, "step")
    worst = f"{limit:.0e} in {made} (worst {max(found).error:.1e}), {dtype}"
    if wrong is None:
        typer.echo(
            f"EQUAL: {len(names[0])} parameters and gradients on {ranks} ranks are within {worst}"
        )
        return True
    typer.echo(f"step {wrong.step}, rank {wrong.rank}: {_CAUSES[wrong.kind]}")
    above = len({each.name for each in found if each.error > limit})
    typer.echo(f"DIFFERENT: {above} of {len(names[0])} parameters exceed {worst}")
    return False
