"""``mpishard run``: start a script on N ranks, again where it fails, and end as it ends."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from mpishard import settings
from mpishard.blas import better_kernel, loaded_kernel
from mpishard.cli.hosts import Host, parse_hosts
from mpishard.cli.job import Job
from mpishard.cli.job_report import Outcome
from mpishard.cli.launcher import Launcher, find_launcher, loaded_library, usable_cores
from mpishard.cli.log_folder import (
    check_log_folder,
    held_log_folder,
    prepare_log_folder,
)
from mpishard.cli.lost_hosts import allocated_hosts, find_lost_hosts
from mpishard.cli.restarts import Restarts
from mpishard.communication.survival import check_on_failure
from mpishard.errors import MPIUnavailableError

__all__ = ["HostsOption", "RanksOption", "ScriptArgument", "prepare_job", "run"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

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
            help="Restart with fewer ranks, M or more, where hosts cannot be reached any more. "
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
    where starts in a row lasted less than a minute; the script goes on from its checkpoint, as
    optimize(checkpoint=FOLDER) does by itself, and finds the number of restarts in
    MPISHARD_RESTART. Not restarted are: Ctrl-C, SIGTERM or SIGHUP to this command, exit code 130,
    75 (preempted), and 2 before init (usage). The exit code is that of the last start; the
    first failure is reported again as the root cause.
    """
    start = prepare_job(
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
    raise typer.Exit(start())


def prepare_job(
    name: str,
    script: Path,
    arguments: Sequence[str],
    ranks: int,
    hosts: str,
    variables: Mapping[str, str] | None = None,
    *,
    user_variables: Sequence[str] = (),
    log_folder: Path | None = None,
    max_restarts: int = 0,
    min_ranks: int | None = None,
    on_failure: str = "abort",
) -> Callable[[], int]:
    """What runs ``script`` to its end, and returns its exit code.

    The ranks find ``variables`` in their environment, and ``user_variables``, each a name or
    ``NAME=VALUE``. With ``log_folder`` each rank's output and call log are kept there. Where it
    fails it is started again, ``max_restarts`` times at most, on ``min_ranks`` or more. With
    ``on_failure="shrink"`` ranks may outlive each other.

    Raises
    ------
    typer.Exit
        With code 2 where it cannot start; ``mpishard <name>`` has said why.
    """
    folder = None if log_folder is None else log_folder.absolute()
    try:
        _check(script, ranks)
        check_on_failure(on_failure)
        settings.check()
        machines = parse_hosts(hosts, ranks)
        _check_restarts(max_restarts, min_ranks, ranks, bool(machines))
        chosen = _parse_variables(user_variables)
        if folder is not None:
            check_log_folder(folder)
        launcher = find_launcher(loaded_library())
        added = _added_environment(launcher, max((h.slots for h in machines), default=ranks))
        added |= dict(variables or {})
        passed = [*added, *chosen, "MPISHARD_JOB_FOLDER", "MPISHARD_RESTART"]
        if machines:
            passed += settings.forwarded_variables()
        job = Job(
            f"mpishard {name}",
            launcher,
            [sys.executable, "-u", str(script), *arguments],
            os.environ | added | chosen,
            tuple(dict.fromkeys(passed)),
            folder,
            survives=on_failure == "shrink",
        )
        job.command(ranks, machines, 0)
    except (MPIUnavailableError, ValueError) as error:
        typer.echo(f"mpishard {name}: {error}", err=True)
        raise typer.Exit(2) from None

    def start() -> int:
        job.say(_announcement(launcher, ranks, added))
        may_lose: Sequence[Host] = machines
        if max_restarts and launcher.is_slurm and not machines:
            may_lose = allocated_hosts(ranks)

        def start_once(restart_count: int, size: int, hosts: Sequence[Host]) -> Outcome:
            return job.start(size, machines if hosts == may_lose else hosts, restart_count)

        restarts = Restarts(
            start_once,
            job.say,
            ranks,
            may_lose,
            lambda: find_lost_hosts(launcher, may_lose, job.received),
            max_restarts,
            min_ranks,
            job.received,
        )
        with nullcontext() if folder is None else _log_folder(name, folder):
            return restarts.run()

    return start


def _check(script: Path, ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"a job has at least one rank, got -n {ranks}")
    if not script.is_file():
        raise ValueError(f"there is no script {script}")


def _check_restarts(most: int, min_ranks: int | None, ranks: int, has_hosts: bool) -> None:
    if most < 0:
        raise ValueError(f"--max-restarts must be 0 or more; got {most}")
    if min_ranks is None:
        return
    if not most:
        raise ValueError(f"--min-ranks {min_ranks} is for restarts: give --max-restarts too")
    if not 1 <= min_ranks <= ranks:
        raise ValueError(f"--min-ranks must be 1 to {ranks}, the job's ranks; got {min_ranks}")
    if not has_hosts and not settings.is_slurm_allocation():
        raise ValueError(
            f"--min-ranks {min_ranks} is for jobs whose hosts may be lost: give --hosts, or start "
            "it inside a SLURM allocation. On one machine a job keeps its ranks"
        )


def _parse_variables(entries: Sequence[str]) -> dict[str, str]:
    """The variables of ``--env``; those without a value have one already."""
    chosen = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"--env takes NAME or NAME=VALUE; got {entry!r}")
        if not equals and not settings.is_set(name):
            raise ValueError(f"--env {name}: there is no such variable; give --env {name}=VALUE")
        chosen[name] = value if equals else os.environ[name]
    return chosen


@contextmanager
def _log_folder(name: str, folder: Path) -> Iterator[None]:
    """A context in which ``folder`` is this job's alone, and holds nothing of an earlier one."""
    with ExitStack() as held:
        try:
            held.enter_context(held_log_folder(folder))
            aside = prepare_log_folder(folder)
        except OSError as error:
            typer.echo(f"mpishard {name}: --log-dir: {error}", err=True)
            raise typer.Exit(2) from None
        except ValueError as error:
            typer.echo(f"mpishard {name}: {error}", err=True)
            raise typer.Exit(2) from None
        if aside is not None:
            typer.echo(f"mpishard {name}: moved the logs of an earlier job to {aside}", err=True)
        yield


def _added_environment(launcher: Launcher, ranks_per_host: int) -> dict[str, str]:
    """Variables for the ranks that the user has not set."""
    added = {}
    # Under SLURM only the ranks know their cores: init() sets the threads there.
    if not settings.blas_threads_are_set() and not launcher.is_slurm:
        added["OMP_NUM_THREADS"] = str(max(1, usable_cores() // ranks_per_host))
    kernel = better_kernel(loaded_kernel())
    if kernel is not None:
        added["OPENBLAS_CORETYPE"] = kernel
    if sys.stdout.isatty():
        added["MPISHARD_COLUMNS"] = str(shutil.get_terminal_size().columns)
    return added


def _announcement(launcher: Launcher, ranks: int, added: Mapping[str, str]) -> str:
    parts = [f"{ranks} {'rank' if ranks == 1 else 'ranks'} of {launcher.library}"]
    parts.append(f"started by {launcher.program}")
    parts += [f"{key}={value}" for key, value in added.items() if key != "MPISHARD_COLUMNS"]
    return ", ".join(parts)
