"""``mpishard run``: start a script on N ranks, and end as it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from mpishard import settings
from mpishard.blas import better_kernel, loaded_kernel
from mpishard.cli.launcher import Launcher, find_launcher, loaded_library, usable_cores
from mpishard.errors import MPIUnavailableError

__all__ = ["HostsOption", "RanksOption", "ScriptArgument", "prepare_job", "run"]

_GRACE_SECONDS = 4
"""Between a forwarded signal and SIGKILL: a job ends within 5 seconds of Ctrl-C."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


ScriptArgument = Annotated[
    Path,
    typer.Argument(
        metavar="SCRIPT [ARGS]...", help="Python script; what follows it is the script's own."
    ),
]
RanksOption = Annotated[int, typer.Option("-n", help="Number of ranks.", metavar="N")]
HostsOption = Annotated[
    str, typer.Option(help="Machines to run on, comma-separated.", metavar="HOST,...")
]


def run(
    context: typer.Context, script: ScriptArgument, ranks: RanksOption, hosts: HostsOption = ""
) -> None:
    """Run SCRIPT on N MPI ranks.

    Takes the mpiexec that belongs to the MPI library that mpi4py loads, or srun inside a SLURM
    allocation. Ends with the exit code of the rank that failed first.
    """
    raise typer.Exit(prepare_job("run", script, context.args, ranks, hosts)())


def prepare_job(
    name: str,
    script: Path,
    arguments: Sequence[str],
    ranks: int,
    hosts: str,
    variables: Mapping[str, str] | None = None,
) -> Callable[[], int]:
    """What runs ``script`` to its end, and returns its exit code.

    The ranks find ``variables`` in their environment.

    Raises
    ------
    typer.Exit
        With code 2 where it cannot start; ``mpishard <name>`` has said why.
    """
    names = [host.strip() for host in hosts.split(",")] if hosts else []
    try:
        _check(script, ranks, names)
        launcher = find_launcher(loaded_library())
    except (MPIUnavailableError, ValueError) as error:
        typer.echo(f"mpishard {name}: {error}", err=True)
        raise typer.Exit(2) from None
    added = _added_environment(launcher, -(-ranks // max(1, len(names)))) | dict(variables or {})
    command = launcher.command(
        ranks,
        [sys.executable, "-u", str(script), *arguments],
        hosts=names,
        variables=tuple(added),
    )

    def start() -> int:
        typer.echo(_announcement(name, launcher, ranks, added), err=True)
        return _supervise(command, os.environ | added)

    return start


def _check(script: Path, ranks: int, hosts: Sequence[str]) -> None:
    if ranks < 1:
        raise ValueError(f"a job has at least one rank, got -n {ranks}")
    if not script.is_file():
        raise ValueError(f"there is no script {script}")
    if "" in hosts:
        raise ValueError(f"--hosts has an empty name: {','.join(hosts)!r}")
    if len(hosts) > ranks:
        raise ValueError(f"--hosts names {len(hosts)} machines for {ranks} ranks")


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


def _announcement(name: str, launcher: Launcher, ranks: int, added: Mapping[str, str]) -> str:
    parts = [f"{ranks} {'rank' if ranks == 1 else 'ranks'} of {launcher.library}"]
    parts.append(f"started by {launcher.program}")
    parts += [f"{key}={value}" for key, value in added.items() if key != "MPISHARD_COLUMNS"]
    return f"mpishard {name}: {', '.join(parts)}"


def _supervise(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run ``command`` to its end and return its exit code, or 128 + the signal that ended it.

    The code is that of the rank that aborted the job, as mpishard does when a rank fails. A rank
    that dies without a word, by ``os._exit`` or a signal, Hydra reports by the bare signal number,
    and at times by that of the SIGKILL with which it then ends the others.

    The job is a process group of its own, so that it gets each signal once, from here: Hydra takes
    a second Ctrl-C for an order to drop its ranks. A terminal stays with this process; ranks read
    an empty input instead of being stopped by the first read.
    """
    received: list[signal.Signals] = []
    jobs: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        for started in jobs:
            _signal_group(started, received[-1])
        signal.alarm(_GRACE_SECONDS)

    def kill(_number: int, _frame: FrameType | None) -> None:
        for started in jobs:
            _signal_group(started, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    for number in _FORWARDED:
        # Whoever started us with nohup, or in the background, wants the signal ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    job = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
        process_group=0,
    )
    jobs.append(job)
    if received:  # while it started
        _signal_group(job, received[-1])
    code = job.wait()
    signal.alarm(0)
    if received:
        return 128 + received[0].value
    return 128 - code if code < 0 else code


def _signal_group(job: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.killpg(job.pid, number)
