"""``mpishard run --max-restarts``: a failed job starts again, on the hosts that can be reached.

Hosts are tested in the way in which the job's launcher would reach them.
"""

from __future__ import annotations

import re
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from mpishard.base import settings
from mpishard.cli.probe import Answer, ask_all
from mpishard.cli.run.job_report import Outcome
from mpishard.cli.run.launcher import Host, Launcher
from mpishard.cli.run.networks import is_this_machine
from mpishard.cli.run.notice import notice
from mpishard.cli.run.resizing import Resizing
from mpishard.cli.wording import counted

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0

_SOON_SECONDS = 60.0
"""After a shorter start, which hardly made progress, the next pause is twice as long."""

_GLANCE_SECONDS = 0.1

_USAGE = 2
_NO_FAILURES = (0, settings.EXIT_PREEMPTED, settings.EXIT_INTERRUPT)


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How often a job may start again, and with how many ranks.

    Parameters
    ----------
    most : int
        Restarts at most.
    min_ranks : int, optional
        Ranks at least, if hosts are lost; None: as many as in the first start.
    max_ranks : int, optional
        Ranks of a restart at most, if the hosts have free slots; None: as in the first start.
    """

    most: int = 0
    min_ranks: int | None = None
    max_ranks: int | None = None

    def check(self, ranks: int, hosts: Sequence[Host], *, may_be_resized: bool) -> None:
        """Refuse limits that do not fit the job's ranks and machines.

        Raises
        ------
        ValueError
            The message says which options to give instead.
        """
        if self.most < 0:
            raise ValueError(f"--max-restarts must be 0 or more; got {self.most}")
        for option, given in {"--min-ranks": self.min_ranks, "--max-ranks": self.max_ranks}.items():
            if given is None:
                continue
            if not (self.most or may_be_resized):
                raise ValueError(
                    f"{option} {given} is for restarts: give --max-restarts too; or --log-dir, "
                    "which `mpishard resize` needs"
                )
            if option == "--min-ranks" and not 1 <= given <= ranks:
                raise ValueError(f"--min-ranks must be 1 to {ranks}, the job's ranks; got {given}")
            if option == "--max-ranks" and given < ranks:
                raise ValueError(
                    f"--max-ranks must be {ranks}, the job's ranks, or more; got {given}"
                )
            if not (hosts or may_be_resized or settings.is_slurm_allocation()):
                raise ValueError(
                    f"{option} {given} is for jobs whose hosts may be lost: give --hosts, or start "
                    "it inside a SLURM allocation; or give --log-dir, which `mpishard resize` "
                    "needs. Otherwise a job keeps its ranks on one machine"
                )


@dataclass(slots=True)
class Restarts:
    """Starts a job, and starts it again if it fails.

    A failure is any exit code but 0, `settings.EXIT_PREEMPTED` and `settings.EXIT_INTERRUPT`. Exit
    code 2 is no failure if no rank has called ``init``: a script refuses its arguments with it. If
    a signal to end the job comes, it does not start again, even if it comes between two starts.

    Before a restart it pauses for 1 second; for 2, 4, 8, 16 and 30 seconds if starts in a row have
    lasted less than a minute.

    Parameters
    ----------
    start : callable
        Starts the job and waits for its end, given the number of restarts so far, the number of
        ranks, and the hosts.
    say : callable
        Prints a line for the user.
    ranks : int
        Number of ranks of the first start.
    hosts : sequence of Host
        Machines that may be lost; empty if the job runs on this one alone.
    find_lost : callable
        Returns the names of the hosts that cannot be reached now.
    limits : RestartLimits
        Limits of restarts and of their ranks.
    received : list of Signals
        The signals to end the job. It grows when one comes.

    Attributes
    ----------
    resizing : Resizing
        Accepts requests for another number of ranks, which then replaces ``ranks``.
    """

    start: Callable[[int, int, Sequence[Host]], Outcome]
    say: Callable[[str], None]
    ranks: int
    hosts: Sequence[Host] = ()
    find_lost: Callable[[], Sequence[str]] = tuple
    limits: RestartLimits = RestartLimits()
    received: list[signal.Signals] = field(default_factory=list)
    resizing: Resizing = field(init=False)

    def __post_init__(self) -> None:
        least, most = self.limits.min_ranks or self.ranks, self.limits.max_ranks or self.ranks
        self.resizing = Resizing(self.ranks, least, most, self.hosts, self.find_lost)

    def run(self) -> int:
        """Start the job until it ends well or may not start again; return the last exit code."""
        ranks, hosts = self.ranks, self.hosts
        failures: list[Outcome] = []
        failed_first = 0  # number of the start
        pause = 0.0
        for number in count(1):
            # Before a failure no host has been lost.
            slots = sum(host.slots for host in self.hosts) if failures else 0
            most = min(self.limits.max_ranks or self.ranks, slots)
            self.resizing.ranks, self.resizing.wanted = ranks, max(ranks, most)
            outcome = self.start(number - 1, ranks, hosts)
            lines, code = outcome.result.lines, outcome.result.code
            # A change of ranks is no failure: it takes no restart away, and needs no pause.
            if (change := self._change(outcome)) is not None:
                ranks, lost, text = change
                hosts = [host for host in self.hosts if host.name not in lost][:ranks]
                self._say_all([*lines[:-1], text])
                continue
            # argparse ends a script with the code of wrong usage, before init.
            is_usage = code == _USAGE and not outcome.called_init
            if self.received or code in _NO_FAILURES or is_usage:
                self._say_all(lines)
                if failures and not code:
                    self.say(f"the job ended well after {counted(len(failures), 'restart')}")
                return code
            failures.append(outcome)
            failed_first = failed_first or number
            if len(failures) > self.limits.most:
                self._say_all(lines)
                break
            self._say_all(lines[:-1])
            # After the end of the ranks, because the loss of a host may have been its cause.
            lost = self.find_lost()
            hosts = [host for host in self.hosts if host.name not in lost]
            if self.hosts:
                ranks = min(self.limits.max_ranks or self.ranks, sum(host.slots for host in hosts))
            # The search takes seconds, in which a signal may have come.
            if self.received:
                self.say(outcome.cause)
                return self._interrupted()
            if ranks < (self.limits.min_ranks or self.ranks):
                self.say(f"{outcome.cause}; no restart: {self._too_few(lost, ranks)}")
                break
            hosts = hosts[:ranks]
            # After a start that lasted, the failure is a new one: pauses begin anew.
            is_first = not pause or outcome.seconds >= _SOON_SECONDS
            pause = _FIRST_PAUSE_SECONDS if is_first else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            left = ", ".join(host.name for host in hosts)
            place = f" on {left} without {', '.join(lost)}" if lost else ""
            which = f"restart {len(failures)} of {self.limits.most} with"
            self.say(f"{outcome.cause}; {which} {counted(ranks, 'rank')}{place} in {pause:g} s")
            self._wait(pause)
            if self.received:
                return self._interrupted()
        if len(failures) > 1:
            self._say_root_cause(failures, failed_first)
        return failures[-1].result.code

    def _say_root_cause(self, failures: Sequence[Outcome], number: int) -> None:
        """Name the cause of the first failure, in start ``number`` of the job."""
        # Later starts may fail for reasons that follow from the first, such as a lost host.
        first = failures[0]
        which = "the first start" if number == 1 else f"start {number}"
        logs = "" if first.logs is None else f" (logs: {first.logs})"
        text = f"the job failed for good, after {counted(len(failures) - 1, 'restart')}"
        self.say(f"{text}; root cause, in {which}: {first.cause}{logs}")

    def _change(self, outcome: Outcome) -> tuple[int, Sequence[str], str] | None:
        """Return ranks, lost hosts and a message if the job continues with other ranks."""
        resizing, code = self.resizing, outcome.result.code
        request, now, before = resizing.request, resizing.ranks, resizing.before
        if request is None:
            return None
        is_to_end = self.received or notice.is_given
        # The ranks have saved for the request. A notice of preemption would end the job.
        if code == settings.EXIT_PREEMPTED and not (before or is_to_end):
            resizing.before, self.ranks = now, request.ranks
            # The number that was asked for is now the most ranks of later restarts, too.
            self.limits = replace(self.limits, max_ranks=None)
            ranks = counted(request.ranks, "rank")
            text = f"the ranks have saved; the job continues with {ranks} instead of {now}"
            return request.ranks, request.lost, text
        # The new ranks have failed before they trained: back to the number that worked.
        if before and not (self.received or code in _NO_FAILURES):
            self.ranks = before
            ranks = counted(now, "rank")
            text = f"{outcome.cause}, before it trained with {ranks}; it continues with {before}"
            resizing.end(text, 1)
            return before, request.lost, text
        has_changed = before and not code
        resizing.end(f"{'' if has_changed else 'no change: '}{outcome.cause}", int(not has_changed))
        return None

    def _too_few(self, lost: Sequence[str], ranks: int) -> str:
        room = (
            f"the other hosts take {counted(ranks, 'rank')}" if ranks else "no other host is left"
        )
        need = f"--min-ranks is {self.limits.min_ranks}"
        if self.limits.min_ranks is None:
            need = f"without --min-ranks it keeps its {self.ranks}"
        return f"{', '.join(lost)} cannot be reached, {room}, and {need}"

    def _wait(self, seconds: float) -> None:
        """Wait until the time is over or a signal comes."""
        end = time.monotonic() + seconds
        while not self.received and (left := end - time.monotonic()) > 0:
            # In short sleeps, because a sleep goes on after the handler of a signal: PEP 475.
            time.sleep(min(left, _GLANCE_SECONDS))

    def _interrupted(self) -> int:
        number = self.received[0]
        self.say(f"{number.name}: no restart")
        return 128 + number.value

    def _say_all(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.say(line)


_ANSWER_SECONDS = 15.0

_STATE = re.compile(r"([a-z_]+)(\W*)")
# Short states of sinfo(1) of nodes whose jobs run on.
_USABLE = ("alloc", "mix", "idle", "comp", "drng", "plnd", "resv")
_AWAY = "*~#%!"
"""Marks of SLURM behind the state of a node that does not respond, or has no power."""


def find_lost_hosts(
    launcher: Launcher, hosts: Sequence[Host], received: Sequence[signal.Signals]
) -> list[str]:
    """Return the names of the hosts on which ``launcher`` could not start a rank.

    Inside SLURM these are the nodes that ``sinfo`` calls down, failed or not responding, and none
    if it does not answer. Elsewhere they are the hosts on which ``ssh HOST true`` fails, or does
    not end within 15 seconds. This machine needs no ssh.

    Parameters
    ----------
    launcher : Launcher
        The program that starts the ranks.
    hosts : sequence of Host
        The machines.
    received : sequence of Signals
        The search ends early if it holds a signal, even one that comes meanwhile.
    """
    names = [host.name for host in hosts]
    if not names:
        return []
    if launcher.is_slurm:
        command = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "-o", "%N %t"]
        (answer,) = _answers_of([command], received)
        states = dict(line.split(maxsplit=1) for line in answer.out.splitlines() if " " in line)
        # A controller that does not answer says nothing about the nodes.
        if answer.code != 0:
            return []
        found = {name: _STATE.fullmatch(states.get(name, "").strip()) for name in names}
        return [
            name
            for name, state in found.items()
            if state is None or state[1] not in _USABLE or set(state[2]) & set(_AWAY)
        ]
    shell = remote_shell(launcher)
    others = [name for name in names if not is_this_machine(name)]
    answers = _answers_of([[*shell, name, "true"] for name in others], received)
    return [name for name, answer in zip(others, answers, strict=True) if answer.code != 0]


def remote_shell(launcher: Launcher) -> list[str]:
    """Return the command with which ``launcher`` reaches a host; the name of the host comes next.

    It ends within 10 seconds if a host does not answer.
    """
    shell = shlex.split(settings.remote_shell(launcher.is_hydra))
    if Path(shell[0]).name == "ssh":
        # A host that asks for a password cannot start a rank, and nobody would answer it.
        shell += ["-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    return shell


def allocated_hosts(ranks: int) -> list[Host]:
    """Return the nodes of the SLURM allocation, each with its share of ``ranks``."""
    # scontrol expands the ranges of SLURM_JOB_NODELIST, such as n[1-4].
    (answer,) = _answers_of([["scontrol", "show", "hostnames"]], ())
    names = [] if answer.code != 0 else answer.out.split()
    return [Host(name, -(-ranks // len(names))) for name in names]


def _answers_of(
    commands: Sequence[Sequence[str]], received: Sequence[signal.Signals]
) -> list[Answer]:
    """Run all of ``commands`` at once; the code of a missing program is 127."""
    through_shell = [["/bin/sh", "-c", 'exec "$@"', "sh", *command] for command in commands]
    # With all variables, because `scontrol` reads the allocation from them.
    variables = settings.environment()
    return ask_all(through_shell, _ANSWER_SECONDS, variables, lambda: bool(received))
