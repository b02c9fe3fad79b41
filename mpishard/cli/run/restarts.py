"""``mpishard run --max-restarts``: a job that fails is started again, on what hosts are left."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from mpishard import settings
from mpishard.cli.run.hosts import Host
from mpishard.cli.run.job_report import Outcome
from mpishard.cli.wording import counted

__all__ = ["Restarts"]

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0

_SOON_SECONDS = 60.0
"""A start that lasted less has hardly made progress, and the next pause is twice as long."""

_GLANCE_SECONDS = 0.1

_USAGE = 2


@dataclass(slots=True)
class Restarts:
    """Starts a job, and starts it again where it fails.

    A failure is any exit code but 0, `settings.EXIT_PREEMPTED` and `settings.EXIT_INTERRUPT`; also
    not 2 where no rank has entered a world with others, as of a script that does not like its
    arguments. A signal that is to end the job ends it for good, also between two starts.

    Before a restart it pauses for 1 second; for 2, 4, 8, 16 and 30 where starts in a row have
    lasted less than a minute.

    Parameters
    ----------
    start : callable
        Starts the job, to its end, given the number of restarts so far, the number of ranks, and
        the hosts.
    say : callable
        Tells the user a line.
    ranks : int
        Number of ranks of the first start, and the most of a later one.
    hosts : sequence of Host
        Machines that may be lost; empty where the job runs on this one alone.
    find_lost : callable
        The names of those that cannot be reached now.
    most : int
        Restarts at most.
    min_ranks : int, optional
        Ranks at least, where hosts are lost; None: as many as in the first start.
    received : list of Signals
        The signals that are to end the job, as they come.
    """

    start: Callable[[int, int, Sequence[Host]], Outcome]
    say: Callable[[str], None]
    ranks: int
    hosts: Sequence[Host] = ()
    find_lost: Callable[[], Sequence[str]] = tuple
    most: int = 0
    min_ranks: int | None = None
    received: list[signal.Signals] = field(default_factory=list)

    def run(self) -> int:
        """Start the job until it does not fail or may not start again; the last exit code."""
        ranks, hosts = self.ranks, self.hosts
        failures: list[Outcome] = []
        pause = 0.0
        for number in count(1):
            outcome = self.start(number - 1, ranks, hosts)
            lines = outcome.verdict.lines
            if not self._is_failure(outcome):
                self._say_all(lines)
                if failures and not outcome.verdict.code:
                    self.say(f"the job ended well after {counted(len(failures), 'restart')}")
                return outcome.verdict.code
            failures.append(outcome)
            if number > self.most:
                self._say_all(lines)
                break
            self._say_all(lines[:-1])
            lost = self.find_lost()
            hosts = [host for host in self.hosts if host.name not in lost]
            ranks = self._ranks_on(hosts)
            if self.received:
                self.say(outcome.cause)
                return self._interrupted()
            if ranks < self._least:
                self.say(f"{outcome.cause}; no restart: {self._too_few(lost, ranks)}")
                break
            hosts = hosts[:ranks]
            pause = self._pause_after(outcome, pause)
            place = f" on {', '.join(h.name for h in hosts)} without {_names(lost)}" if lost else ""
            self.say(
                f"{outcome.cause}; restart {number} of {self.most} with {counted(ranks, 'rank')}"
                f"{place} in {pause:g} s"
            )
            self._wait(pause)
            if self.received:
                return self._interrupted()
        if len(failures) > 1:
            first = failures[0]
            logs = "" if first.logs is None else f" (logs: {first.logs})"
            self.say(
                f"the job failed for good, after {counted(len(failures) - 1, 'restart')}; root "
                f"cause, in the first start: {first.cause}{logs}"
            )
        return failures[-1].verdict.code

    def _is_failure(self, outcome: Outcome) -> bool:
        code = outcome.verdict.code
        if self.received or code in (0, settings.EXIT_PREEMPTED, settings.EXIT_INTERRUPT):
            return False
        return code != _USAGE or outcome.called_init

    @property
    def _least(self) -> int:
        return self.ranks if self.min_ranks is None else self.min_ranks

    def _ranks_on(self, hosts: Sequence[Host]) -> int:
        if not self.hosts:
            return self.ranks
        return min(self.ranks, sum(host.slots for host in hosts))

    def _too_few(self, lost: Sequence[str], ranks: int) -> str:
        room = (
            f"the other hosts take {counted(ranks, 'rank')}" if ranks else "no other host is left"
        )
        need = f"--min-ranks is {self.min_ranks}"
        if self.min_ranks is None:
            need = f"without --min-ranks it keeps its {self.ranks}"
        return f"{_names(lost)} cannot be reached, {room}, and {need}"

    @staticmethod
    def _pause_after(outcome: Outcome, pause: float) -> float:
        if not pause or outcome.seconds >= _SOON_SECONDS:
            return _FIRST_PAUSE_SECONDS
        return min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _wait(self, seconds: float) -> None:
        """Wait, or until a signal comes."""
        end = time.monotonic() + seconds
        while not self.received and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _GLANCE_SECONDS))

    def _interrupted(self) -> int:
        number = self.received[0]
        self.say(f"{number.name}: no restart")
        return 128 + number.value

    def _say_all(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.say(line)


def _names(hosts: Sequence[str]) -> str:
    return ", ".join(hosts)
