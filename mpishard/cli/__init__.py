"""The command line: ``mpishard run``, ``doctor``, ``verify``, ``plan``, ``bench`` and more."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from mpishard.cli.bench import bench
from mpishard.cli.checkpoint import checkpoint
from mpishard.cli.doctor import doctor
from mpishard.cli.plan import plan
from mpishard.cli.run import run
from mpishard.cli.trace import trace
from mpishard.cli.verify import verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="mpishard",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
)(run)
app.command()(doctor)
app.command()(verify)
app.add_typer(plan, name="plan")
app.add_typer(bench, name="bench")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(trace, name="trace")


def main() -> None:
    """Entry point of the ``mpishard`` script."""
    app(prog_name="mpishard")


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(version("mpishard"))
        except PackageNotFoundError:
            typer.echo("mpishard runs from its source folder and is not installed")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train NumPy and CuPy models, sharded over MPI ranks."""
