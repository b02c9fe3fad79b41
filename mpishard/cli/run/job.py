"""A job that can start: its environment, and the checks before its first start."""

from __future__ import annotations

import difflib
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from mpishard.base import MPIUnavailableError, better_kernel, loaded_kernel, settings
from mpishard.cli.machine import usable_cores
from mpishard.cli.run import rank_agent
from mpishard.cli.run.hostfile import expanded_hosts
from mpishard.cli.run.hosts import VARIABLE as OTHER_HOSTS
from mpishard.cli.run.job_report import Outcome
from mpishard.cli.run.launcher import Host, Launcher, find_launcher, loaded_library, parse_hosts
from mpishard.cli.run.logs import (
    check_log_folder,
    folder_of_start,
    locked_log_folder,
    prepare_log_folder,
)
from mpishard.cli.run.networks import is_known, network_variables
from mpishard.cli.run.rank_processes import can_be_watched
from mpishard.cli.run.restarts import (
    RestartLimits,
    Restarts,
    allocated_hosts,
    find_lost_hosts,
)
from mpishard.cli.run.supervisor import Supervisor
from mpishard.cli.wording import counted, refuse, refusing, say

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_RANKS_PER_CORE = 8  # more are rather a typing error than a test
_OF_ONE_START = ("MPISHARD_JOB_FOLDER", OTHER_HOSTS, "MPISHARD_RESTART", "MPISHARD_MAX_RESTARTS")


def python_arguments(words: Sequence[str], is_module: bool = False) -> list[str]:
    """Return the arguments with which Python runs a script or module.

    A leading ``python`` is left out, and a folder is run if it has a ``__main__.py``.

    Parameters
    ----------
    words : sequence of str
        A script or the name of a module, and its arguments.
    is_module : bool
        Whether the first word names a module.

    Raises
    ------
    ValueError
        If there is no such script or module. The message names one of similar spelling.
    """
    script, *arguments = words
    path = Path(script)
    if is_module:
        name = script.partition(".")[0]
        # Searched and not imported, because an import could start anything. Python itself adds the
        # working directory.
        if not (find_spec(name) or PathFinder.find_spec(name, [str(Path.cwd())])):
            raise ValueError(f"-m {script}: there is no module {name}, here or on Python's path")
        return ["-m", script, *arguments]
    # Users type `mpishard run -n 4 python train.py`, as with mpiexec.
    if re.fullmatch(r"python[\d.]*", path.name) and not path.is_dir():
        if path.parent != Path() and path.parent.absolute() != Path(sys.executable).parent:
            raise ValueError(
                f"ranks run in {sys.executable}, not in {script}: leave it out, or start "
                f"`{script} -m mpishard run`"
            )
        if not arguments:
            raise ValueError(f"there is no script after {script}")
        return arguments if arguments[0].startswith("-") else python_arguments(arguments)
    if path.is_dir() and not (path / "__main__.py").is_file():
        scripts = sorted(path.glob("*.py"))
        raise ValueError(f"{script} is a folder without __main__.py{_did_you_mean(scripts[:3])}")
    if not (path.is_file() or path.is_dir()):
        folder = path.parent if path.parent.is_dir() else Path()
        found = {each.name: each for each in folder.glob("*.py")}
        alike = difflib.get_close_matches(path.name, found, 1)
        raise ValueError(f"there is no script {script}{_did_you_mean([found[n] for n in alike])}")
    return list(words)


def _did_you_mean(paths: Sequence[Path]) -> str:
    return f"; did you mean {' or '.join(map(str, paths))}?" if paths else ""


def _user_variables(entries: Sequence[str]) -> dict[str, str]:
    """Return the variables of ``--env``. A name alone takes the value of this process.

    Raises
    ------
    ValueError
        For an invalid name, and for a name alone that is not set.
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


def _thread_variables(launcher: Launcher, ranks: int, hosts: Sequence[Host]) -> dict[str, str]:
    """Return the variable of the BLAS threads, unless the user has set one."""
    # SLURM assigns cores to ranks at the start: init() sets the threads there.
    if settings.blas_threads_are_set() or launcher.is_slurm:
        return {}
    # By default each rank's BLAS starts a thread for each core, and they compete.
    ranks_per_host = max((host.slots for host in hosts), default=ranks)
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks_per_host))}


def _checked_ranks(name: str, words: Sequence[str], ranks: int | None) -> int:
    """Return the number of ranks; refuse a job without one, or without a working directory."""
    # Without it Python's own errors, such as that of a relative path, would name another cause.
    try:
        Path.cwd()
    except FileNotFoundError:
        fix = 'run `cd "$PWD"` if it exists again, or change to another'
        refuse(name, f"the working directory was removed: {fix}")
    if ranks is None:
        misplaced = {"-n", "-np"}.intersection(words)
        where = (
            f"{min(misplaced)} stands after the script, which receives it: " if misplaced else ""
        )
        refuse(name, f"{where}give the number of ranks before the script: -n 4 SCRIPT")
    if ranks < 1:
        refuse(name, f"a job has at least one rank, got -n {ranks}")
    return ranks


class RunJob:
    """A program on ranks, its environment, its machines and its restarts.

    All that a command asks of it is checked when it is made, and nothing is started.

    Parameters
    ----------
    name : str
        The command of mpishard that starts it, such as ``run``.
    words : sequence of str
        A script and its arguments; see `python_arguments`.
    ranks : int or None
        Number of ranks of the first start; None is refused.
    hosts : str
        Machines, as `parse_hosts` reads them, or ``@`` and a file of them; empty for this one, or
        those that SLURM has allocated.
    variables : mapping of str to str, optional
        Variables of the ranks' environment.
    is_module : bool
        Whether the first word names a module.
    may_oversubscribe : bool
        Whether there may be many more ranks than cores.
    user_variables : sequence of str
        Further variables, each a name or ``NAME=VALUE``. They take precedence over all others.
    log_folder : Path, optional
        Folder of the ranks' output and call logs.
    limits : RestartLimits
        How often it may start again, and with how many ranks.
    on_failure : {"abort", "shrink"}
        ``"shrink"``: ranks may outlive each other.

    Raises
    ------
    typer.Exit
        With code 2 if it cannot start, after printing the reason.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        ranks: int | None,
        hosts: str = "",
        variables: Mapping[str, str] | None = None,
        *,
        is_module: bool = False,
        may_oversubscribe: bool = False,
        user_variables: Sequence[str] = (),
        log_folder: Path | None = None,
        limits: RestartLimits | None = None,
        on_failure: str = "abort",
    ) -> None:
        ranks = _checked_ranks(name, words, ranks)
        self.name, self.ranks, self.survives = name, ranks, on_failure == "shrink"
        self.log_folder = None if log_folder is None else log_folder.absolute()
        self.limits = limits or RestartLimits()
        with refusing(name, errors=(MPIUnavailableError, ValueError)):
            # -u: a rank that is killed must not take what it has printed along in a buffer.
            self.program = [sys.executable, "-u", *python_arguments(words, is_module)]
            settings.check()
            self.hosts = parse_hosts(expanded_hosts(hosts), ranks)
            self.limits.check(ranks, self.hosts, may_be_resized=self.log_folder is not None)
            chosen = _user_variables(user_variables)
            if self.log_folder is not None:
                check_log_folder(self.log_folder)
            self.launcher = find_launcher(loaded_library())
            _check_names(self.launcher, self.hosts)
            # The cores of other machines are not known here.
            if not (may_oversubscribe or self.hosts or self.launcher.is_slurm):
                _check_cores(name, ranks, self.limits.max_ranks)
            added = _thread_variables(self.launcher, ranks, self.hosts)
            if (kernel := better_kernel(loaded_kernel())) is not None:  # the user has set none
                added["OPENBLAS_CORETYPE"] = kernel
            # The output of ranks is a pipe, whose width they cannot ask for.
            if sys.stdout.isatty():
                added["MPISHARD_COLUMNS"] = str(shutil.get_terminal_size().columns)
            self.user_variables = {**(variables or {}), **chosen}
            added |= variables or {}
            known = settings.environment() | self.user_variables
            added |= network_variables(self.launcher, [host.name for host in self.hosts], known)
            self.environment = {**settings.environment(), **added}
            elsewhere = settings.forwarded_variables() if self.hosts else ()
            # Names of the variables that ranks on other machines need as well.
            self.passed_on = tuple(dict.fromkeys([*added, *chosen, *_OF_ONE_START, *elsewhere]))
            # The first line names the variables that differ from the user's own environment,
            # except the width of the terminal, which changes no result.
            shown = [f"{k}={v}" for k, v in added.items() if k != "MPISHARD_COLUMNS"]
            slots = sum(host.slots for host in self.hosts)
            if self.hosts and (self.limits.max_ranks or 0) > slots:
                most = self.limits.max_ranks
                shown.append(f"--max-ranks {most} is above the {slots} slots of --hosts")
            whom = f"{counted(ranks, 'rank')} of {self.launcher.library}"
            self.announcement = ", ".join([whom, f"started by {self.launcher.program}", *shown])
            self.command(ranks, self.hosts)  # some launchers have none for these machines

    def run(self) -> int:
        """Run it to its end, with all its restarts; return the exit code.

        Raises
        ------
        typer.Exit
            With code 2 if the log folder is another job's, or cannot be written.
        """
        say(self.name, self.announcement)
        may_lose, folder = self.hosts, self.log_folder
        received: list[signal.Signals] = []
        if self.limits.most and self.launcher.is_slurm and not self.hosts:
            may_lose = allocated_hosts(self.limits.max_ranks or self.ranks)

        def find_lost() -> list[str]:
            return find_lost_hosts(self.launcher, may_lose, received)

        def start(restart_count: int, ranks: int, hosts: Sequence[Host]) -> Outcome:
            # The launcher needs no list of hosts if it uses the whole SLURM allocation.
            hosts = self.hosts if hosts == may_lose else hosts
            logs = folder and folder_of_start(folder, restart_count)
            supervisor = Supervisor(
                self.name,
                self.launcher,
                self.command(ranks, hosts, logs),
                ranks,
                restarts.resizing,
                [host.name for host in hosts],
                logs,
                received,
                self.survives,
            )
            variables = _thread_variables(self.launcher, ranks, hosts) | self.user_variables
            variables["MPISHARD_RESTART"] = f"{restart_count}"
            variables["MPISHARD_MAX_RESTARTS"] = f"{self.limits.most}"
            return supervisor.run({**self.environment, **variables})

        print_line = partial(say, self.name)
        restarts = Restarts(
            start, print_line, self.ranks, may_lose, find_lost, self.limits, received
        )
        with ExitStack() as stack:
            if folder is not None:
                stack.enter_context(own_log_folder(self.name, folder))
                if can_be_watched():
                    with suppress(OSError):  # a file system without sockets
                        stack.enter_context(restarts.resizing.listens(folder))
            return restarts.run()

    def command(self, ranks: int, hosts: Sequence[Host], logs: Path | None = None) -> list[str]:
        """Return the command line of a start."""
        # -I and -S leave out site packages, so that an agent starts in 15 ms.
        agent = [sys.executable, "-I", "-S", str(rank_agent.__file__), self.launcher.rank_variable]
        program = [*agent, str(logs or ""), *self.program]
        return self.launcher.command(
            ranks, program, hosts=hosts, variables=self.passed_on, survives=self.survives
        )


def _check_cores(name: str, ranks: int, max_ranks: int | None) -> None:
    # A job that may grow must fit then, too.
    cores, most = usable_cores(), max(ranks, max_ranks or 0)
    if most > _RANKS_PER_CORE * cores:
        option = "-n" if most == ranks else "--max-ranks"
        fix = "give fewer" if name == "verify" else "--oversubscribe allows that"
        raise ValueError(
            f"{option} {most} is more than {_RANKS_PER_CORE} ranks for each of "
            f"{counted(cores, 'usable core')}: {fix}"
        )


def _check_names(launcher: Launcher, hosts: Sequence[Host]) -> None:
    """Refuse a misspelt name, which a launcher reports by several lines about itself."""
    if launcher.is_slurm:
        return
    # Names without an address here may be known to ssh, which costs a connection.
    unknown = find_lost_hosts(launcher, [host for host in hosts if not is_known(host.name)], ())
    if unknown:
        tries = " and ".join(f"`ssh {name} true`" for name in unknown)
        raise ValueError(
            f"--hosts: this machine knows no address of {' and '.join(unknown)}, and {tries} "
            f"{'fails' if len(unknown) == 1 else 'fail'}: is the name right?"
        )


@contextmanager
def own_log_folder(name: str, folder: Path) -> Iterator[None]:
    """Reserve ``folder`` for this job during the block, without files of an earlier one.

    Raises
    ------
    typer.Exit
        With code 2, before the block, after the command ``name`` has printed the reason.
    """
    with ExitStack() as stack:
        with refusing(name), refusing(name, "--log-dir: ", errors=(OSError,)):
            # The lock comes first, so that two jobs do not move the same logs.
            stack.enter_context(locked_log_folder(folder))
            aside = prepare_log_folder(folder)
        if aside is not None:
            say(name, f"moved the logs of an earlier job to {aside}")
        yield
