"""``mpishard run``: start a script on N ranks, again if it fails, and end as it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpishard import settings
from mpishard.cli.run.prepared_job import prepare_job

__all__ = ["HostsOption", "RanksOption", "ScriptArgument", "run"]

ScriptArgument = Annotated[
    Path,
    typer.Argument(
        metavar="SCRIPT [ARGS]...", help="Python script; what follows it is the script's own."
    ),
]
RanksOption = Annotated[int, typer.Option("-n", help="Number of ranks.", metavar="N")]
HostsOption = Annotated[
    str,
    typer.Option(
        help="Machines to run on, each with the ranks that it takes if not all alike.",
        metavar="HOST[:SLOTS],...",
    ),
]


def run(
    context: typer.Context,
    script: ScriptArgument,
    ranks: RanksOption,
    hosts: HostsOption = "",
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep what each rank prints in DIR/rank-<r>.log, and its call log; of a restart, "
            "in DIR/restart-<k>.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="A variable for the ranks on all machines; may be repeated.",
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(metavar="K", help="Start a job that fails again, K times at most."),
    ] = 0,
    min_ranks: Annotated[
        int | None,
        typer.Option(
            metavar="M",
            help="Restart with fewer ranks, M or more, if hosts cannot be reached any more. "
            "Default: N.",
            show_default=False,
        ),
    ] = None,
    on_failure: Annotated[
        str,
        typer.Option(
            metavar="abort|shrink",
            help="Whether the job ends with a rank that is lost, or the others may go on without "
            'it: for scripts that ask for on_failure="shrink", under Open MPI.',
        ),
    ] = "abort",
) -> None:
    """Run SCRIPT on N MPI ranks.

    Takes the mpiexec that belongs to the MPI library that mpi4py loads, or srun inside a SLURM
    allocation. Ends with the exit code of the rank that failed first, and names it.

    With --max-restarts a job that fails is started again, after 1 second, and after 2, 4, .. 30
    if starts in a row lasted less than a minute; the script goes on from its checkpoint, as
    optimize(checkpoint=FOLDER) does by itself, and finds the number of restarts in
    MPISHARD_RESTART. Not restarted are: Ctrl-C, SIGTERM or SIGHUP to this command, exit code 130,
    75 (preempted), and 2 before init (usage). The exit code is that of the last start; the
    first failure is reported again as the root cause.
    """
    try:
        job = prepare_job(
            "run",
            script,
            context.args,
            ranks,
            hosts,
            user_variables=env or (),
            log_folder=log_dir,
            max_restarts=max_restarts,
            min_ranks=min_ranks,
            on_failure=on_failure,
        )
        code = job.run()
    except BlockingIOError as error:
        typer.echo(
            f"mpishard run: the system allows no more processes ({error}): raise the limit "
            "(`ulimit -u`), or end other programs",
            err=True,
        )
        code = settings.EXIT_FAILURE
    raise typer.Exit(code)
