"""A job that can start: all that could be refused has been looked at."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import typer

from mpishard import settings
from mpishard.cli.machine import usable_cores
from mpishard.cli.run.hosts import Host, parse_hosts
from mpishard.cli.run.job import Job
from mpishard.cli.run.job_report import Outcome
from mpishard.cli.run.launcher import find_launcher, loaded_library
from mpishard.cli.run.log_folder import check_log_folder, held_log_folder, prepare_log_folder
from mpishard.cli.run.lost_hosts import allocated_hosts, find_lost_hosts
from mpishard.cli.run.program import python_arguments
from mpishard.cli.run.rank_environment import RankEnvironment, parse_variables, variables_for_ranks
from mpishard.cli.run.restarts import Restarts
from mpishard.cli.wording import counted
from mpishard.communication.failure.report import check_on_failure
from mpishard.errors import MPIUnavailableError

__all__ = ["PreparedJob", "own_log_folder", "prepare_job"]

_RANKS_PER_CORE = 8  # more are a slip of the finger rather than a test


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job, the machines that it asks for, and how often it may start again.

    Parameters
    ----------
    job : Job
        What all its starts have in common.
    ranks : int
        Number of ranks of the first start.
    hosts : sequence of Host
        The machines that the user named; empty for this one, or what SLURM has allocated.
    max_restarts : int
        Starts after the first, at most.
    min_ranks : int, optional
        Ranks at least, if hosts are lost; None: as many as in the first start.
    announcement : str
        What the user is told before the first start.
    """

    job: Job
    ranks: int
    hosts: Sequence[Host]
    max_restarts: int
    min_ranks: int | None
    announcement: str

    def run(self) -> int:
        """Run it to its end, with all its restarts; the exit code.

        Raises
        ------
        typer.Exit
            With code 2 if the log folder is another job's, or cannot be written.
        """
        job = self.job
        job.say(self.announcement)
        may_lose = self.hosts
        if self.max_restarts and job.launcher.is_slurm and not self.hosts:
            may_lose = allocated_hosts(self.ranks)

        def start(restart_count: int, ranks: int, hosts: Sequence[Host]) -> Outcome:
            # On all that SLURM has allocated, the launcher needs no list of them.
            return job.start(ranks, self.hosts if hosts == may_lose else hosts, restart_count)

        restarts = Restarts(
            start,
            job.say,
            self.ranks,
            may_lose,
            lambda: find_lost_hosts(job.launcher, may_lose, job.received),
            self.max_restarts,
            self.min_ranks,
            job.received,
        )
        with nullcontext() if job.log_folder is None else own_log_folder(job.name, job.log_folder):
            return restarts.run()


def prepare_job(
    name: str,
    words: Sequence[str],
    ranks: int | None,
    hosts: str,
    variables: Mapping[str, str] | None = None,
    *,
    is_module: bool = False,
    may_oversubscribe: bool = False,
    user_variables: Sequence[str] = (),
    log_folder: Path | None = None,
    max_restarts: int = 0,
    min_ranks: int | None = None,
    on_failure: str = "abort",
) -> PreparedJob:
    """Check all that a command asks of a job, and start nothing.

    ``words`` are a script and its arguments; see `python_arguments`. The ranks find ``variables``
    in their environment, and ``user_variables``, each a name or ``NAME=VALUE``. Each rank's output
    and call log are kept in ``log_folder``. If the job fails it is started again, ``max_restarts``
    times at most, on ``min_ranks`` or more. With ``on_failure="shrink"`` ranks may outlive each
    other.

    Raises
    ------
    typer.Exit
        With code 2 if it cannot start, after printing the reason.
    """
    folder = None if log_folder is None else log_folder.absolute()
    try:
        ranks = _checked_ranks(ranks, words)
        program = python_arguments(words, is_module)
        check_on_failure(on_failure)
        settings.check()
        machines = parse_hosts(hosts, ranks)
        _check_restarts(max_restarts, min_ranks, ranks, bool(machines))
        chosen = parse_variables(user_variables)
        if folder is not None:
            check_log_folder(folder)
        launcher = find_launcher(loaded_library())
        if not (may_oversubscribe or machines or launcher.is_slurm):
            _check_cores(ranks)
        added = variables_for_ranks(launcher, max((h.slots for h in machines), default=ranks))
        environment = RankEnvironment({**added, **(variables or {})}, chosen)
        job = Job(
            f"mpishard {name}",
            launcher,
            [sys.executable, "-u", *program],
            environment.variables(),
            environment.passed_on(to_other_machines=bool(machines)),
            folder,
            survives=on_failure == "shrink",
        )
        job.command(ranks, machines, 0)  # which some launchers have none for
    except (MPIUnavailableError, ValueError) as error:
        typer.echo(f"mpishard {name}: {error}", err=True)
        raise typer.Exit(2) from None
    whom = f"{counted(ranks, 'rank')} of {launcher.library}"
    said = [whom, f"started by {launcher.program}", *environment.describe()]
    return PreparedJob(job, ranks, machines, max_restarts, min_ranks, ", ".join(said))


def _checked_ranks(ranks: int | None, words: Sequence[str]) -> int:
    if ranks is None:
        misplaced = {"-n", "-np"}.intersection(words)
        where = f"{min(misplaced)} stands behind the script, which gets it" if misplaced else ""
        example = "give the number of ranks before the script: -n 4 SCRIPT"
        raise ValueError(f"{where}: {example}" if where else example)
    if ranks < 1:
        raise ValueError(f"a job has at least one rank, got -n {ranks}")
    return ranks


def _check_cores(ranks: int) -> None:
    cores = usable_cores()
    if ranks > _RANKS_PER_CORE * cores:
        raise ValueError(
            f"-n {ranks} is more than {_RANKS_PER_CORE} ranks for each of "
            f"{counted(cores, 'usable core')}: --oversubscribe allows that"
        )


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


@contextmanager
def own_log_folder(name: str, folder: Path) -> Iterator[None]:
    """A context in which ``folder`` is the job's alone, and holds nothing of an earlier one.

    Raises
    ------
    typer.Exit
        With code 2, before the block; the command ``name`` has said why.
    """
    with ExitStack() as held:
        try:
            held.enter_context(held_log_folder(folder))
            aside = prepare_log_folder(folder)
        except OSError as error:
            typer.echo(f"{name}: --log-dir: {error}", err=True)
            raise typer.Exit(2) from None
        except ValueError as error:
            typer.echo(f"{name}: {error}", err=True)
            raise typer.Exit(2) from None
        if aside is not None:
            typer.echo(f"{name}: moved the logs of an earlier job to {aside}", err=True)
        yield
