"""The end of a job, explained from its ranks' logs: exit code, and the rank that failed first."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpishard.base import Document, settings
from mpishard.cli.run.logs import RankLogs
from mpishard.cli.run.rank_processes import RankProcess
from mpishard.communication import RankState, who

_HINTS = {
    signal.SIGKILL: "; out of memory?",
    signal.SIGBUS: "; shared memory full?",
}
# Launchers end the other ranks with these signals: they do not show which rank failed first.
_OF_LAUNCHERS = (signal.SIGKILL, signal.SIGTERM)
_BROKEN = (14, 255)
"""Codes of launchers, and of Open MPI's ranks, that have lost a connection. No user knows them."""
_MOST_SHOWN = 4
_SAME_SECONDS = 0.003
"""The order of two ends that are closer together is not certain."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """Exit code of a job, and lines for its user; no lines if the ranks have reported enough."""

    code: int
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of one start of a job.

    Parameters
    ----------
    result : JobResult
        Exit code, and the lines to print.
    cause : str
        The reason in one line, even if the ranks have printed it themselves.
    called_init : bool
        Whether a rank called ``mpishard.init``.
    seconds : float
        Duration in seconds.
    logs : Path, optional
        Folder of its logs.
    """

    result: JobResult
    cause: str
    called_init: bool
    seconds: float
    logs: Path | None = None


@dataclass(frozen=True, slots=True)
class JobEnd:
    """Facts about a job that has ended.

    Parameters
    ----------
    world_size : int
        Number of ranks.
    launcher_code : int
        Exit code of the launcher.
    logs : mapping of int to RankLogs
        The call logs of the ranks, by the launcher's number.
    ended : sequence of RankProcess
        The ranks of this machine in the order in which they ended.
    is_local : bool
        Whether all ranks ran on this machine.
    is_hydra : bool
        Whether the launcher is Hydra: its exit code is the bare number of a signal, that of
        several signals at once, and 0 for ``os._exit(0)``.
    launcher_may_break : bool
        Whether the launcher runs on several hosts: it may lose a connection if a rank is killed.
    stopped_for : RankProcess, optional
        The rank that failed, after which `mpishard run` ended the others.
    orphaned : sequence of RankProcess
        The ranks that were killed because the launcher's process on this machine was gone.
    program : str
        The name of the launcher.
    launcher_pid : int
        Its process id.
    hosts : sequence of str
        The machines that the user named, and that the launcher reaches by ssh.
    survives : bool
        Whether ranks may outlive each other.
    lost : str
        A sentence on the hosts that were gone when the launcher ended; "" if none was.
    """

    world_size: int
    launcher_code: int
    logs: Mapping[int, RankLogs]
    ended: Sequence[RankProcess]
    is_local: bool = True
    is_hydra: bool = False
    launcher_may_break: bool = False
    stopped_for: RankProcess | None = None
    orphaned: Sequence[RankProcess] = ()
    program: str = "mpiexec"
    launcher_pid: int = 0
    hosts: Sequence[str] = ()
    survives: bool = False
    lost: str = ""

    def judge(self) -> JobResult:
        """Return the exit code of the job, and the lines to print."""
        result = self._judge()
        # On several hosts a rank that has not left may have the code from its MPI library.
        alone = not self.launcher_may_break
        own = [p.exit_code for p in self.ended if alone or self._has_left(p.rank)]
        is_broken = result.code in _BROKEN and result.code not in own
        return JobResult(settings.EXIT_FAILURE, result.lines) if is_broken else result

    def _judge(self) -> JobResult:
        """Return the exit code of the job, and the lines to print.

        The first of these rules that applies decides:

        1. `mpishard run` ended the job after a rank failed, or the launcher's process was gone:
           the lines name that rank, or that process.
        2. No rank called ``init``: see `_before_all`.
        3. Ranks may outlive each other, and some left: the launcher's code, and a line for each
           rank that was lost.
        4. Ranks reported that another one is gone, and its end is known: the lines name that one.
        5. A rank reported a failure of its own: the code in its report, and no lines.
        6. A rank ended without leaving: the lines name the first of them.
        7. Otherwise the exit codes decide: see `_by_codes`.
        """
        if self.stopped_for is not None:
            return self._blame(self.stopped_for)
        # The launcher may end before a rank that has left, if another one ended with a code.
        orphaned = [process for process in self.orphaned if not self._has_left(process.rank)]
        first = self._first()
        if first is not None and self._has_crashed_after(first, orphaned):
            return self._of_launcher(orphaned)
        if orphaned and first is None:
            return self._of_launcher(orphaned)
        if not self.called_init:
            return self._before_all()
        is_good = self.launcher_code in (0, settings.EXIT_PREEMPTED)
        # The last world of a survivor has one rank and writes no log. If the rank is killed there,
        # its logs say that it left: only its exit code differs from those of other survivors.
        lost = {process.rank for process in self.ended if (process.exit_code or 0) < 0}
        if self.survives and is_good and any(map(self._has_left, self.logs.keys() - lost)):
            return JobResult(self.launcher_code, self._outlived())
        gone = self._gone()
        if gone is not None:
            return self._blame(gone)
        first = self._first()
        for log in self.logs.values():
            if log.state is not RankState.REPORTED:
                continue
            # A rank that found another one gone ended with 1, and does not know the reason.
            code = log.code or settings.EXIT_FAILURE
            if first is None or first.rank == log.rank or code == self.launcher_code:
                return JobResult(log.code or self.launcher_code or code, self._missing())
        if first is not None:
            return self._blame(first)
        stragglers = [rank for rank in self.logs if not self._has_left(rank)]
        if stragglers and self.launcher_code == 0 and self.world_size > 1:
            # They ran on other machines, where their end is not observed.
            return JobResult(settings.EXIT_FAILURE, (f"{who(stragglers)} ended without leaving",))
        return self._by_codes()

    def _of_launcher(self, orphaned: Sequence[RankProcess]) -> JobResult:
        """Name the launcher's process that was gone first, or what has ended the launcher."""
        # Open MPI's launcher ends by itself, and leaves ranks of this machine behind, if it has
        # lost another one.
        was_killed = self.launcher_code - 128 in signal.valid_signals()
        by_itself = self.launcher_may_break and not was_killed
        causes = [p for p in orphaned if not (by_itself and self._is_of_launcher(p))]
        if self.lost:
            return JobResult(settings.EXIT_FAILURE, (self.lost,))
        if not causes:
            elsewhere = (p for p in self._failed() if p.host is not None)
            dead = next((p for p in elsewhere if (p.exit_code or 0) < 0), None)
            if dead is not None:
                return self._blame(dead)
            line = f"{self.program} ended with code {self.launcher_code}: its messages say why"
            return JobResult(settings.EXIT_FAILURE, (line,))
        gone, host = causes[0].orphaned_by, causes[0].host
        alike = [p.rank for p in causes if (p.orphaned_by, p.host) == (gone, host)]
        # It is named by a log of its ranks, because the one of this machine has no connection.
        logs = [self.logs[rank] for rank in alike if rank in self.logs]
        where = f" on {logs[0].host}" if self.launcher_may_break and logs else ""
        line = (
            f"{who(alike)} {'was' if len(alike) == 1 else 'were'} killed: process {gone} of "
            f"{self.program}{where}, which had started {who(alike)}, is gone (killed, or crashed)"
        )
        return JobResult(settings.EXIT_FAILURE, (line,))

    def _has_crashed_after(self, first: RankProcess, orphaned: Sequence[RankProcess]) -> bool:
        """Return whether a rank has crashed because another host, or its ranks, were lost.

        MPICH's library UCX sometimes crashes in a rank whose connection is lost.
        """
        if not self.launcher_may_break or first.exit_code != -signal.SIGSEGV:
            return False
        elsewhere = [process for process in orphaned if process.host is not first.host]
        if not elsewhere:  # the time at which a host was lost is not known
            return bool(self.lost) and first.host is None
        return elsewhere[0].ended_at < first.ended_at

    def _is_of_launcher(self, process: RankProcess) -> bool:
        """Return whether the launcher itself, on this machine, had started the rank."""
        return process.host is None and process.orphaned_by == self.launcher_pid

    def _by_codes(self) -> JobResult:
        """Judge by exit codes alone: no rank is known to have reported or to have been killed."""
        own = next((p.exit_code for p in self.ended if p.exit_code), None)
        if own is None and self.lost and self.launcher_code:
            return JobResult(settings.EXIT_FAILURE, (self.lost,))
        if own is None and self.is_local and self.launcher_code:
            if self._agrees(signal.SIGKILL):
                line = (
                    "a rank was killed by signal 9 (SIGKILL; out of memory?), and its agent with it"
                )
                return JobResult(settings.EXIT_KILLED, (line,))
            if self.launcher_code in _BROKEN:
                line = f"no rank failed, and {self.program} ended with code {self.launcher_code}"
                return JobResult(self.launcher_code, (f"{line}: its messages say why",))
        # The launcher's code may combine the codes of several ranks.
        code = own if own is not None and own > 0 else self.launcher_code
        return JobResult(code, self._missing())

    def _outlived(self) -> tuple[str, ...]:
        """Return a line for each rank that was lost while the others continued."""
        lines = []
        for process in self.ended:
            log = self.logs.get(process.rank)
            if log is None or log.state is RankState.LEFT:
                continue
            if log.state is RankState.REPORTED:
                how = "failed, as it reported"
            else:
                code = process.exit_code or 0
                how = f"{_how(code)}{self._where(process, code)}"
            lines.append(f"{self._who(process)} {how}; the others continued without it")
        return tuple(lines)

    @property
    def called_init(self) -> bool:
        """True if a rank called ``mpishard.init``."""
        return bool(self.logs)

    def cause(self, result: JobResult) -> str:
        """Return the reason in one line: the last line of `result`, or that a rank reported."""
        if result.lines:
            return result.lines[-1]
        reported = [log for log in self.logs.values() if log.state is RankState.REPORTED]
        # A rank that only found another one gone has no code.
        named = [log.rank for log in reported if log.code] or [log.rank for log in reported]
        if named:
            return f"the job ended with code {result.code}, as {who(named)} reported"
        if result.code == settings.EXIT_PREEMPTED:
            return f"the job saved and ended, as requested (exit code {result.code})"
        first = self._first()
        if first is not None and first.exit_code:
            return f"{self._who(first)} {_how(first.exit_code)}"
        return f"the job ended with code {result.code}"

    def summary(self, result: JobResult) -> Document:
        """Return the end of the job and of each rank, for JSON."""
        codes = {process.rank: process.exit_code for process in self.ended}
        ranks = []
        for rank, log in self.logs.items():
            code = codes.get(rank)
            last = log.newest.last
            ranks.append(
                {
                    "rank": rank,
                    "host": log.host,
                    "pid": log.records[0].pid,
                    "kind": "left" if self._has_left(rank) and not code else "gone",
                    "state": _how(code) if code else log.end,
                    "call": "" if last is None else last.full_text,
                    "count": sum(record.count for record in log.records),
                }
            )
        # The page of a run needs a reason even if the terminal has it from the ranks.
        text = " ".join(result.lines) or self.cause(result)
        return {"code": result.code, "text": text, "time": time.time(), "ranks": ranks}

    def fails(self, process: RankProcess) -> bool:
        """Return True if ``process`` ended without a notice to the other ranks."""
        if self._has_left(process.rank) and self.world_size > 1:
            return (process.exit_code or 0) < 0
        # In a world of one no other rank waits. Ranks that wait in init for one that never came
        # report that themselves.
        return process.exit_code != 0 or (self.world_size > 1 and process.rank in self.logs)

    def _before_all(self) -> JobResult:
        """Judge a job in which no rank has called ``init``, such as a script without mpishard."""
        if self.hosts and not self.ended and self.launcher_code in _BROKEN:
            tries = ", ".join(f"`ssh {host} true`" for host in self.hosts)
            line = (
                f"no rank was started (exit code {self.launcher_code} of {self.program}): can "
                f"{', '.join(self.hosts)} be reached by {tries}?"
            )
            return JobResult(self.launcher_code, (line,))
        first = self._first()
        if first is None and self.launcher_code not in _BROKEN:
            return self._by_codes()
        if first is None or not self.launcher_code or not first.exit_code:
            return JobResult(self.launcher_code)
        return self._blame(first)

    def _gone(self) -> RankProcess | None:
        """Return the rank that others reported as gone, if its end is known."""
        reported = [log for log in self.logs.values() if log.state is RankState.REPORTED]
        if not self.is_local or not reported or any(log.code for log in reported):
            return None
        ranks = [log.rank for log in reported]
        # The first one: the others were ended after it.
        return next((p for p in self._failed() if p.rank not in ranks), None)

    def _failed(self) -> list[RankProcess]:
        """Return the ranks that failed; those that have lost a connection are not the first."""
        failed = [process for process in self.ended if self.fails(process)]
        if self.launcher_may_break:
            failed.sort(key=lambda process: process.exit_code in _BROKEN)
        return failed

    def _first(self) -> RankProcess | None:
        """Return the rank that failed first, if the launcher's exit code agrees."""
        failed = self._failed()
        if not failed:
            return None
        # MPI_Abort ends the other ranks by a signal, perhaps before the rank that called it.
        first, code = failed[0], failed[0].exit_code
        if code is None or code >= 0:
            return first
        if not self._agrees(-code):
            # Hydra ends with 255 if a rank is killed while Hydra answers it, as in init.
            log = self.logs.get(first.rank)
            is_in_init = log is not None and log.state is RankState.STARTED
            if self.is_hydra and self.launcher_code in _BROKEN and is_in_init:
                return first
            return next((p for p in failed if p.exit_code == self.launcher_code), None)
        return first if self.is_local or -code not in _OF_LAUNCHERS else None

    def _agrees(self, number: int) -> bool:
        """Return True if the launcher's exit code fits a rank that signal ``number`` ended."""
        code = self.launcher_code
        # Hydra combines the signal (bitwise or) with the SIGKILL of the ranks that it then ended.
        if self.is_hydra and code in (number, number | signal.SIGKILL):
            return True
        return code in (0, 128 + number) or (self.launcher_may_break and code in _BROKEN)

    def _blame(self, process: RankProcess) -> JobResult:
        code = process.exit_code or 0
        how = f"{_how(code)}{self._where(process, code)}"
        if self.world_size > 1:
            end = process.ended_at
            failed = [other for other in self.ended if self.fails(other)]
            # Two ends within some milliseconds may be noted in another order.
            alike = sorted(o.rank for o in failed if abs(o.ended_at - end) < _SAME_SECONDS)
            if end and len(alike) > 1:
                how += f"; {who(alike)} ended at the same time"
            elif self.launcher_code:
                how += "; the others were ended for it"
        return JobResult(
            128 - code if code < 0 else code or settings.EXIT_FAILURE,
            (f"{self._who(process)} {how}",),
        )

    def _who(self, process: RankProcess) -> str:
        log = self.logs.get(process.rank)
        host = "" if log is None else f" on {log.host}"
        return f"rank {process.rank} (process {process.pid}{host})"

    def _where(self, process: RankProcess, code: int) -> str:
        log = self.logs.get(process.rank)
        if self.world_size == 1:  # a world of one writes no calls
            return ""
        if log is None:
            return " before it called mpishard.init()"
        if log.state is RankState.LEFT:
            return " after it had left all worlds cleanly"
        silently = " without leaving (os._exit, MPI_Abort?)," if code >= 0 else ""
        if log.state is RankState.STARTED:
            return f"{silently} in mpishard.init()"
        return f"{silently} {log.place or 'before any collective'}"

    def _missing(self) -> tuple[str, ...]:
        """Return a line for each rank that the others waited for in ``init`` until they gave up."""
        if self.launcher_code != settings.EXIT_TIMEOUT:
            return ()
        return tuple(
            f"{self._who(process)} ended with code 0 before it called mpishard.init()"
            for process in self.ended
            if process.rank not in self.logs and process.exit_code == 0
        )

    def _has_left(self, rank: int) -> bool:
        return rank in self.logs and self.logs[rank].state is RankState.LEFT


def interrupted(number: signal.Signals, logs: Mapping[int, RankLogs]) -> JobResult:
    """Judge a job that received a signal. Name each rank's last call, unless a rank reported."""
    code = 128 + number.value
    if any(log.state is RankState.REPORTED for log in logs.values()):
        return JobResult(code)
    word = "interrupted (SIGINT)" if number is signal.SIGINT else f"ended by {number.name}"
    # Ranks in the same call share an entry, so that the one in another call is seen at once.
    alike: dict[str, list[int]] = {}
    for log in logs.values():
        if log.place:
            alike.setdefault(log.place, []).append(log.rank)
    stood = [f"{who(ranks)} {text}" for text, ranks in alike.items()]
    if len(stood) > _MOST_SHOWN:
        stood[_MOST_SHOWN:] = [f"and {len(stood) - _MOST_SHOWN} more"]
    return JobResult(code, ("; ".join([f"{word}; the ranks were ended", *stood]),))


def _how(code: int) -> str:
    """Return the end of a process in words."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"was killed by signal {-code}"
    return f"was killed by signal {-code} ({number.name}{_HINTS.get(number, '')})"
