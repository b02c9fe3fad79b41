"""A job that can start: its environment, what its starts share, and the checks before the first."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import typer

from mpishard import settings
from mpishard.blas import better_kernel, loaded_kernel
from mpishard.cli.machine import usable_cores
from mpishard.cli.run import rank_agent
from mpishard.cli.run.arguments import Host, parse_hosts, python_arguments
from mpishard.cli.run.job_report import Outcome
from mpishard.cli.run.launcher import Launcher, find_launcher, loaded_library
from mpishard.cli.run.logs import (
    check_log_folder,
    folder_of_start,
    held_log_folder,
    prepare_log_folder,
)
from mpishard.cli.run.restarts import Restarts, allocated_hosts, find_lost_hosts
from mpishard.cli.run.supervisor import Supervisor
from mpishard.cli.wording import counted
from mpishard.communication.failure.report import check_on_failure
from mpishard.errors import MPIUnavailableError

__all__ = [
    "Job",
    "PreparedJob",
    "RankEnvironment",
    "own_log_folder",
    "parse_variables",
    "prepare_job",
    "variables_for_ranks",
]

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_OF_ONE_START = ("MPISHARD_JOB_FOLDER", "MPISHARD_RESTART")

_NOT_WORTH_A_WORD = ("MPISHARD_COLUMNS",)


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """The environment of the command, and what differs from it for the ranks.

    Parameters
    ----------
    added : mapping of str to str
        What the command sets.
    chosen : mapping of str to str
        What the user asks for, which wins.
    """

    added: Mapping[str, str]
    chosen: Mapping[str, str]

    def variables(self) -> dict[str, str]:
        """All that the launcher, and with it each rank of this machine, is started with."""
        return {**settings.environment(), **self.added, **self.chosen}

    def passed_on(self, *, to_other_machines: bool) -> tuple[str, ...]:
        """The names of those that a launcher must be told of, for ranks elsewhere to have them."""
        names = [*self.added, *self.chosen, *_OF_ONE_START]
        if to_other_machines:
            names += settings.forwarded_variables()
        return tuple(dict.fromkeys(names))

    def describe(self) -> list[str]:
        """``NAME=VALUE`` of what the command sets and the user may wonder at."""
        return [f"{k}={v}" for k, v in self.added.items() if k not in _NOT_WORTH_A_WORD]


def parse_variables(entries: Sequence[str]) -> dict[str, str]:
    """The variables of ``--env``; those without a value have one already.

    Raises
    ------
    ValueError
        For what is no name, and a name alone of which the environment knows nothing.
    """
    chosen = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not _VARIABLE_NAME.fullmatch(name):
            raise ValueError(f"--env takes NAME or NAME=VALUE; got {entry!r}")
        known = value if equals else settings.environment().get(name)
        if known is None:
            raise ValueError(f"--env {name}: there is no such variable; give --env {name}=VALUE")
        chosen[name] = known
    return chosen


def variables_for_ranks(launcher: Launcher, ranks_per_host: int) -> dict[str, str]:
    """What ranks run best with, and the user has not set: BLAS threads and kernels, columns."""
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


@dataclass(frozen=True, slots=True)
class Job:
    """The program and its environment, on any number of ranks and machines.

    Parameters
    ----------
    name : str
        The command that started it, such as ``mpishard run``.
    launcher : Launcher
        The program that starts the ranks.
    program : sequence of str
        The command line of each rank.
    environment : mapping of str to str
        The variables of the launcher.
    passed_on : sequence of str
        Those that ranks on other machines need as well.
    log_folder : Path, optional
        Where the ranks' output and call logs are kept.
    survives : bool
        Whether ranks may outlive each other.
    received : list of Signals
        The signals that are to end the job, as they come.
    """

    name: str
    launcher: Launcher
    program: Sequence[str]
    environment: Mapping[str, str]
    passed_on: Sequence[str]
    log_folder: Path | None
    survives: bool = False
    received: list[signal.Signals] = field(default_factory=list)

    def command(self, ranks: int, hosts: Sequence[Host], restart_count: int) -> list[str]:
        """The command line of the start after so many restarts."""
        logs = "" if self.log_folder is None else folder_of_start(self.log_folder, restart_count)
        agent = [sys.executable, "-I", "-S", str(rank_agent.__file__), self.launcher.rank_variable]
        program = [*agent, str(logs), *self.program]
        return self.launcher.command(
            ranks, program, hosts=hosts, variables=self.passed_on, survives=self.survives
        )

    def start(self, ranks: int, hosts: Sequence[Host], restart_count: int) -> Outcome:
        """Start it, and wait for its end."""
        supervisor = Supervisor(
            self.name,
            self.launcher,
            self.command(ranks, hosts, restart_count),
            ranks,
            len(hosts) or int(self.launcher.is_slurm),
            None if self.log_folder is None else folder_of_start(self.log_folder, restart_count),
            [host.name for host in hosts],
            self.received,
            self.survives,
        )
        return supervisor.run({**self.environment, "MPISHARD_RESTART": f"{restart_count}"})

    def say(self, line: str) -> None:
        """Tell the user."""
        typer.echo(f"{self.name}: {line}", err=True)


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
