"""A job: what all its starts have in common."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import typer

from mpishard.cli.run import rank_agent
from mpishard.cli.run.hosts import Host
from mpishard.cli.run.job_report import Outcome
from mpishard.cli.run.launcher import Launcher
from mpishard.cli.run.log_folder import folder_of_start
from mpishard.cli.run.supervisor import Supervisor

__all__ = ["Job"]


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
