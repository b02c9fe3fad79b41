"""``mpishard run``: start a script on N ranks, again if it fails, and end as it ends."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

ScriptArgument = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT [ARGS]...", help="Python script, and the arguments that it gets."
    ),
]
# Both spellings of mpiexec. There is no default: a script before -n would take it for its own.
RanksOption = Annotated[
    int | None, typer.Option("-n", "-np", help="Number of ranks.", metavar="N", show_default=False)
]
ModuleOption = Annotated[
    bool, typer.Option("-m", help="SCRIPT is the name of a module, as in python -m.")
]
OversubscribeOption = Annotated[
    bool, typer.Option("--oversubscribe", help="Allow more than 8 ranks for each core.")
]
HostsOption = Annotated[
    str,
    typer.Option(
        help="Machines to run on; SLOTS is the number of ranks of one. @FILE reads a hostfile, of "
        "lines such as node1:4 or node1 slots=4.",
        metavar="HOST[:SLOTS],...|@FILE",
    ),
]


def run(
    context: typer.Context,
    script: ScriptArgument,
    ranks: RanksOption = None,
    module: ModuleOption = False,
    hosts: HostsOption = "",
    oversubscribe: OversubscribeOption = False,
    # Text, because the Path of a blank text would be the working directory.
    log_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Keep each rank's output in DIR/rank-<r>.log, and its call log; those of a "
            "restart in DIR/restart-<k>.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="Set a variable for the ranks on all machines; may be repeated.",
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(metavar="K", help="Restart a job that fails, at most K times.")
    ] = 0,
    # None and not a number, because the default is that of another option.
    min_ranks: Annotated[
        int | None,
        typer.Option(
            metavar="M",
            help="Continue with fewer ranks, M or more, if hosts are lost or `mpishard resize` "
            "asks for it. Default: N.",
            show_default=False,
        ),
    ] = None,
    max_ranks: Annotated[
        int | None,
        typer.Option(
            metavar="M",
            help="Continue with more ranks, M at most, if the hosts have free slots at a restart, "
            "or `mpishard resize` asks for it. Default: N.",
            show_default=False,
        ),
    ] = None,
    on_failure: Annotated[
        Literal["abort", "shrink"],
        typer.Option(
            help="abort: a lost rank ends the job; shrink: the others may continue, under Open MPI "
            'in scripts that ask for on_failure="shrink".',
        ),
    ] = "abort",
) -> None:
    """Run SCRIPT on N MPI ranks.

    Starts the ranks with the mpiexec that belongs to the MPI library that mpi4py loads, or with
    srun inside a SLURM allocation. The exit code is that of the rank that failed first, which is
    named.

    --max-restarts starts a failed job again, after 1 second, and after 2, 4, .. 30 seconds if
    starts in a row lasted less than a minute. optimize(checkpoint=FOLDER) then resumes from the
    last checkpoint; MPISHARD_RESTART is the number of restarts. A job is not restarted after
    Ctrl-C, SIGTERM or SIGHUP to this command, or exit code 130, 75 (preempted), or 2 before init
    (usage). The exit code is that of the last start; the first failure is reported again as the
    root cause.

    `mpishard resize` changes the number of ranks of a job with --log-dir.
    """
    # Here, because they import NumPy and the communication room, and --help needs neither.
    from mpishard.cli.run.job import RunJob
    from mpishard.cli.run.restarts import RestartLimits
    from mpishard.cli.wording import given_path

    job = RunJob(
        "run",
        [script, *context.args],
        ranks,
        hosts,
        is_module=module,
        may_oversubscribe=oversubscribe,
        user_variables=env or (),
        log_folder=None if log_dir is None else given_path("run", "--log-dir", log_dir),
        limits=RestartLimits(max_restarts, min_ranks, max_ranks),
        on_failure=on_failure,
    )
    raise typer.Exit(job.run())
