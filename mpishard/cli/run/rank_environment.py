"""The variables that a job's ranks find in their environment."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpishard import settings
from mpishard.blas import better_kernel, loaded_kernel
from mpishard.cli.machine import usable_cores
from mpishard.cli.run.launcher import Launcher

__all__ = ["RankEnvironment", "parse_variables", "variables_for_ranks"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

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
        if not _NAME.fullmatch(name):
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
