"""``mpishard resize``: order a running job to go on with another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mpishard.cli.run.resizing import orders_socket
from mpishard.cli.wording import refuse

__all__ = ["resize"]


def resize(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of `mpishard run --log-dir` of the job.")
    ],
    ranks: Annotated[int, typer.Option("-n", "-np", metavar="N", help="Number of ranks.")],
) -> None:
    """Order a running job to go on with N ranks.

    At the next step boundary its ranks save, as when they are preempted, and `mpishard run` starts
    N ranks at once, which go on from there: parameters, optimizer state, position in the data and
    the error feedback of compression are dealt to them. The job must be in an
    optimize(checkpoint=FOLDER), and N within --min-ranks and --max-ranks of `mpishard run` and the
    bounds of an ElasticOptimizer. Otherwise nothing happens to it.

    Waits until the N ranks train. If they fail before that, the job goes back to its number of
    ranks. Exit codes: 0, the job has N ranks; 2, refused; 1, the change failed, or the job ended.
    """
    if ranks < 1:
        refuse("resize", f"a job has at least one rank, got -n {ranks}")
    if not run.is_dir():
        refuse("resize", f"there is no folder {run}")
    text, code = "the job has ended", 1
    try:
        with orders_socket(run) as (connection, address):
            connection.connect(address)
            connection.sendall(f"{ranks}\n".encode())
            for line in connection.makefile():
                text, code = json.loads(line)
                if code is not None:
                    break
                typer.echo(text)
                text, code = "the job has ended", 1
    except (FileNotFoundError, ConnectionRefusedError):
        refuse("resize", f"no `mpishard run --log-dir {run}` runs on this machine")
    except OSError as error:
        refuse("resize", f"{run}: {error}", 1)
    if code:
        refuse("resize", text, code)
    typer.echo(text)
