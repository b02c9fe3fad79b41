"""``mpishard plot``: draw the losses of one run, or of several runs in the same picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from mpishard.cli.outputs import check_png
from mpishard.cli.wording import refuse, refusing
from mpishard.observe import Curve, Panel, losses_of, moving_mean, plot_loss_curve, plot_panels


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Metrics file of a run, or the folder with its metrics.jsonl."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE.png",
            help="The picture. Default: loss.png beside the metrics of the first run.",
            show_default=False,
        ),
    ] = None,
    unit: Annotated[
        str, typer.Option(metavar="TEXT", help="Unit of the losses, as 'nats per byte'.")
    ] = "",
) -> None:
    """Draw the losses of one run, or of several.

    The runs write them with metrics=FILE, and may still train. With one RUN: training losses, their
    moving average, and validation losses. With several: the moving averages in one panel, and the
    validation losses in another. Runs whose folders have the same name have the same colour.
    """
    first = runs[0] if runs[0].is_dir() else runs[0].parent
    target = first / "loss.png" if output is None else output
    check_png("plot", "--output", target)
    for run in runs:
        if not run.exists():
            refuse("plot", f"there is no file or folder {run}")
        # Refused here, and not by the reader, to name the option that writes such a file.
        file = run / "metrics.jsonl"
        if run.is_dir() and not file.exists():
            refuse("plot", f"there is no {file}; a run writes its losses there with metrics={file}")
    with refusing("plot", errors=(OSError, ValueError, ImportError)):
        if len(runs) == 1:
            plot_loss_curve(target, runs[0], title=_name(runs[0]), unit=unit)
        else:
            plot_panels(target, _panels(runs, unit))
    typer.echo(target)


def _panels(runs: list[Path], unit: str) -> list[Panel]:
    """Return a panel of training losses and one of validation losses, unless it is empty."""
    panels: list[tuple[str, list[Curve]]] = [("training loss", []), ("validation loss", [])]
    for run in runs:
        for (_, curves), points in zip(panels, losses_of(run), strict=True):
            if points:
                steps, losses = np.array(points, np.float64).T
                # Losses of single steps would hide the other runs; validations are few.
                if curves is panels[0][1]:
                    losses = moving_mean(losses, max(1, len(steps) // 50))
                curves.append(Curve(_name(run), steps.tolist(), losses.tolist()))
    return [
        Panel(
            name,
            "step",
            f"loss [{unit}]" if unit else "loss",
            curves,
            # Linear, and close to the values, because runs that are compared differ little.
            logarithmic="",
            close=True,
        )
        for name, curves in panels
        if curves
    ]


def _name(run: Path) -> str:
    """Return the name of a run: that of its folder, or of a file with another name."""
    if run.is_dir() or run.name == "metrics.jsonl":
        return (run if run.is_dir() else run.parent).resolve().name
    return run.stem
