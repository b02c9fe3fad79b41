"""The end of a job by one of its processes: the report, and the exit code."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import stat
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from mpishard.base import PeerError, settings
from mpishard.communication.contract.status import (
    RankRecord,
    RankState,
    StatusReader,
    own_page,
    stopped_siblings,
)
from mpishard.communication.failure.links import REPORTED, NodeLinks
from mpishard.communication.failure.report import failure_report
from mpishard.communication.failure.stall import describe_stall, longest_waiting, rank_table

_REPORT_GRACE_SECONDS = 1.0  # for the rank that reports, which then ends this one
_OUTPUT_SECONDS = 0.25  # for the launcher to read the report
_DEADLINE_SECONDS = 3.0  # for the whole end of a process
_LAUNCHER_SECONDS = 1.5  # between the SIGTERM of a launcher that ends the job and its SIGKILL
_CALLS = 3
"""Number of collectives that the report of a failure shows."""
_CALLS_DESCRIBED = 10
STDOUT, STDERR = 1, 2
"""The descriptors of stdout and stderr, also if the script has replaced ``sys.stderr``."""
UNPRINTED = "unprinted"
"""File in a job's folder with the text that ranks without stderr would have printed."""
_BROKEN = (OSError, ValueError, AttributeError)
"""The errors of a stream that is broken, closed, or a user's object with few methods."""

finalizing = threading.Event()
"""Set when this process calls MPI_Finalize, after which MPI_Abort must not be called."""

_one_thread = threading.Lock()
"""Acquired by the thread that ends this process, and never released."""


@dataclass(frozen=True)
class TimeLimit:
    """The time that a rank waits for others before it ends the job.

    Parameters
    ----------
    variable : str
        The setting.
    seconds : callable
        Returns its value; 0 means no limit.
    is_at_end : bool
        Whether the rank has finished its work and waits for the others to end.
    """

    variable: str
    seconds: Callable[[], float]
    is_at_end: bool = False

    def text(self, name: str, waited: float, where: str, then: str) -> str:
        """Return the report that rank ``name`` has ``waited`` seconds at ``where``.

        ``then`` goes on after "the job ends", such as " after 300 s".
        """
        finished = "finished, and has " if self.is_at_end else ""
        stop = " The job ends" if where.endswith(".") else "; the job ends"
        seconds = int(waited + 1e-3)  # whole seconds that have passed, so that 1.6 s counts as 1
        text = f"mpishard: {name} has {finished}waited {seconds} s {where}"
        return text + (f"{stop}{then} ({self.variable})" if self.seconds() else "")


COLLECTIVE_LIMIT = TimeLimit("MPISHARD_TIMEOUT", settings.collective_timeout)
EXIT_LIMIT = TimeLimit("MPISHARD_EXIT_TIMEOUT", settings.exit_timeout, is_at_end=True)


class Termination:
    """The end of the whole job by one of its processes, and the reports on it.

    Parameters
    ----------
    rank : int or None
        The rank of this process, if it is known.
    world_size : int
        Number of ranks of the job.
    statuses : StatusReader, optional
        The status pages of the ranks, if this process is in a world of several.
    close : callable, optional
        Writes out the trace of this process, with the given report as the reason of its end.
    """

    def __init__(
        self,
        rank: int | None,
        world_size: int,
        statuses: StatusReader | None = None,
        close: Callable[[str], None] = lambda report: None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.statuses = statuses
        self.leaves_alone = False
        """Whether an exception ends this process alone, without the others."""
        self.overlooked: Callable[[int], bool] = lambda dead: True
        """Whether MPI does not report a dead rank to the others, so that this process must."""
        self.links: NodeLinks | None = None
        """Connections to the ranks of other nodes, if these see the end of a process by them."""
        self.stop: Callable[[], None] = lambda: None
        """Stops work on a GPU that waits for other ranks, before MPI ends the job."""
        self._close = close

    @property
    def name(self) -> str:
        """The name of this rank in reports."""
        return f"{'a rank' if self.rank is None else f'rank {self.rank}'} of {self.world_size}"

    def records(self) -> list[RankRecord]:
        """Return one record of each rank; an empty list if nothing is known."""
        if self.statuses is None:
            return []
        self.statuses.refresh()
        return self.statuses.records()

    # --------------------------------------------------------------------------- reasons to end

    def fail(self, error: BaseException, where: str) -> NoReturn:
        """End the job because of ``error``, which this rank did not catch."""
        if isinstance(error, KeyboardInterrupt):
            self.interrupt(where)
        alone = self.leaves_alone
        then = "it leaves, and the others may go on" if alone else "the job ends"
        report = failure_report(error, self.name, where, then)
        calls = () if self.statuses is None else self.statuses.page.read().calls[-_CALLS:]
        if calls:
            report += f"\n--- last collectives of rank {self.rank} ---"
        report += "".join(f"\n  {c.number}: {c.text}" for c in calls)
        # The lost rank has reported, so that a second report would only repeat its consequence.
        is_echo = alone and isinstance(error, PeerError)
        self.end(report, settings.EXIT_FAILURE, is_own=not is_echo, is_alone=alone)

    def interrupt(self, where: str) -> NoReturn:
        """End the job because of Ctrl-C."""
        self.end(
            f"mpishard: {self.name} was interrupted {where}; the job ends", settings.EXIT_INTERRUPT
        )

    def terminate(self, where: str) -> NoReturn:
        """End the job because this rank was sent SIGTERM.

        A launcher also sends SIGTERM, and soon after SIGKILL, if another rank has failed. That rank
        has reported the reason, so this one waits first.
        """
        # If SIGKILL comes meanwhile nothing is missing: the rank that failed has reported.
        time.sleep(_LAUNCHER_SECONDS)
        text = f"mpishard: {self.name} was sent SIGTERM {where}; the job ends"
        # The main thread may be in MPI, for a rank that is dead, and MPI may crash if this thread
        # calls it meanwhile.
        self.end(text, settings.EXIT_TERMINATED, calls_mpi=False)

    def report_dead_rank(self, dead: int, where: str) -> NoReturn:
        """End the job because the process of rank ``dead`` is gone, as after SIGKILL."""
        text = (
            f"mpishard: the process of rank {dead} of {self.world_size} is gone (killed, or out "
            f"of memory?), seen by rank {self.rank} {where}; the job ends"
        )
        self.end(text, settings.EXIT_FAILURE, is_own=False)

    def report_lost_connection(self, reason: str, where: str) -> NoReturn:
        """End the job because MPI has lost the connection to another rank, which may be gone."""
        text = (
            f"mpishard: {self.name} lost its connection to another rank {where}, which is gone, or "
            f"the network between their hosts is ({reason}); the job ends"
        )
        self.end(text, settings.EXIT_FAILURE, is_own=False)

    def report_lost_launcher(self, parent: int, where: str) -> NoReturn:
        """End the job because the launcher's process ``parent``, which started this one, is gone.

        No process would receive this rank's output or exit code.
        """
        text = (
            f"mpishard: process {parent} of the launcher, which started {self.name}, is gone, seen "
            f"{where}; the job ends"
        )
        self.end(text, settings.EXIT_FAILURE, is_own=False)

    def warn(self, waited: float, where: str, limit: TimeLimit) -> None:
        """Warn of a long wait; the rank that has waited longest also reports the reason."""
        records, stall = self.records(), ""
        if limit.is_at_end:
            if any(r.has_left and r.rank < (self.rank or 0) for r in records):
                return  # the first of the ranks that wait at their end reports for all
        # One rank of all, because each would print the same table.
        elif not records or longest_waiting(records) == self.rank:
            stall = self.describe_stall()
        print_to_stderr(
            limit.text(self.name, waited, where, f" after {limit.seconds():g} s") + stall
        )

    def give_up(self, waited: float, where: str, limit: TimeLimit) -> NoReturn:
        """End the job because this rank has waited for too long."""
        text = limit.text(self.name, waited, where, "")
        if not limit.is_at_end:
            if any(record.waits is None and not record.has_left for record in self.records()):
                text += f". If a rank computes or compiles for so long, raise {limit.variable}"
            text += self.describe_stall()
        self.end(text, settings.EXIT_TIMEOUT)

    # ----------------------------------------------------------------------- activity of ranks

    def dead_rank(self) -> int | None:
        """Return a rank whose process is gone though it has not left, or None.

        It is a rank of this node, or the first rank of another.
        """
        dead = None if self.statuses is None else self.statuses.dead_rank()
        if dead is None and self.links is not None:
            dead = self.links.dead_rank()
        return None if dead is None or not self.overlooked(dead) else dead

    def describe(self) -> str:
        """Return lines on the last collectives of this rank and its present wait; may be empty."""
        if self.statuses is None:
            return ""
        return rank_table([self.statuses.page.read()], time.time(), calls=_CALLS_DESCRIBED)

    def describe_stall(self) -> str:
        """Return lines for a report on the reason why the ranks wait; empty if nothing is known."""
        records = self.records() or stopped_siblings()
        return f"\n{describe_stall(records)}" if records else ""

    # ---------------------------------------------------------------------------------- the end

    def claim_report(self, code: int) -> bool:
        """Return whether this process is the first to report the end of the job.

        ``code`` is the exit code, which is recorded; 0 stands for the unknown code of another
        process, which is gone.
        """
        # Both claims: the socket's name is exact on one node, and the pages also reach other nodes.
        is_first = _claim_node() and (self.statuses is None or self.statuses.claim_report(code))
        if self.statuses is None:  # MPI is starting
            page = own_page() if is_first else None
        else:
            page = self.statuses.page if self.leaves_alone else None
        if page is not None:
            page.end(RankState.REPORTED, code)
        return is_first

    def end(
        self,
        report: str,
        code: int,
        *,
        is_own: bool = True,
        is_alone: bool = False,
        calls_mpi: bool = True,
    ) -> NoReturn:
        """Print ``report`` unless another rank of this node has printed one, and end all ranks.

        Parameters
        ----------
        report : str
            The reason why the job ends.
        code : int
            The exit code of the job.
        is_own : bool
            Whether this process is the cause. If not, ``code`` is not the exit code of the cause.
        is_alone : bool
            End this process only, by SIGKILL, because MPI reports only such an end to the others.
            The job ends with it if no other rank is left that could go on.
        calls_mpi : bool
            Whether MPI ends the others. Without it the launcher does, as for any process that
            fails.
        """
        # Another thread already ends this process: let it, but not for ever.
        if not _one_thread.acquire(blocking=False):
            time.sleep(2 * _DEADLINE_SECONDS)
            os._exit(code)
        try:
            self._report(report, code, is_own=is_own, is_said=is_own and is_alone)
            if self.links is not None:
                self.links.end(REPORTED)
        finally:
            with suppress(Exception):  # the job ends anyway
                # First, because a kernel of NCCL that waits for other ranks does not end by itself.
                self.stop()
            try:
                if not is_alone or self._is_last():
                    _abort(code, calls_mpi=calls_mpi)
            finally:
                if is_alone:
                    os.kill(os.getpid(), signal.SIGKILL)
                # MPICH's abort may return while the launcher still ends the others.
                os._exit(code)

    def _report(self, report: str, code: int, *, is_own: bool, is_said: bool) -> None:
        _set_deadline(code)
        _ignore_further_interrupts()
        flush_output()
        try:
            self._close(report)
        except Exception as error:  # noqa: BLE001 - reported, and the end goes on
            report += f"\n(what was recorded could not be written: {error})"
        if self.claim_report(code if is_own else 0) or is_said:
            print_to_stderr(report)
            # An abort discards the output that the launcher has not read yet.
            time.sleep(_OUTPUT_SECONDS)
        else:
            # The rank that reports ends this one, too, and needs time to write its report.
            time.sleep(_REPORT_GRACE_SECONDS)

    def _is_last(self) -> bool:
        """Return whether no other rank is left that could go on without this one."""
        over = RankState.REPORTED, RankState.LEFT
        others = (record for record in self.records() if record.rank != self.rank)
        return all(not other.is_alive or other.state in over for other in others)


_kept: list[socket.socket] = []


def _claim_node() -> bool:
    """Return whether this process is the first of the job on this node that claims the report."""
    if not sys.platform.startswith("linux"):
        return True
    # The claim is an abstract socket name, which the kernel gives to one process and frees when
    # that ends. It is made of the parent, the launcher, which all ranks share. Under `mpishard run`
    # each rank has a parent of its own, but all have the job's folder.
    folder = settings.job_folder()
    job = os.getppid() if folder is None else zlib.crc32(bytes(folder))
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        # With the user's number, because names of abstract sockets are common to all users.
        claim.bind(f"\0mpishard-report-{os.getuid()}-{job}")
    except OSError:
        claim.close()
        return False
    _kept.append(claim)
    return True


def flush_output() -> None:
    """Flush stdout and stderr, which an abort does not. Ignore a broken stream."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(*_BROKEN):
            stream.flush()


def print_to_stderr(text: str) -> None:
    """Print ``text`` to stderr, even if the script has replaced that.

    If its descriptor is closed, `mpishard run` prints it. Without that it goes to stdout.
    """
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except _BROKEN:
        data = f"{text}\n".encode(errors="replace")
        try:
            os.write(STDERR, data)
        except OSError:
            folder = settings.job_folder()
            if folder is None or not folder.is_dir():  # it may be on another machine
                with suppress(OSError):  # closed, too: there is no other place
                    os.write(STDOUT, data)
                return
            with suppress(OSError), (folder / UNPRINTED).open("ab") as file:
                file.write(data)


def launched_ending() -> Termination:
    """Return the `Termination` of a process that has no world yet."""
    return Termination(settings.launched_rank(), settings.launched_world_size() or 1)


def _set_deadline(code: int) -> None:
    """End this process soon, even if the orderly way blocks.

    A write to a full pipe that nobody reads, or MPI itself, may block for ever. If it blocks while
    it holds Python's lock, faulthandler's C thread ends the process, with exit code 1.
    """
    deadline = threading.Timer(_DEADLINE_SECONDS, os._exit, (code,))
    deadline.daemon = True
    null = os.open(os.devnull, os.O_WRONLY)
    if null <= STDERR:  # closed by the script: the report would go there
        import fcntl  # not on every system that only trains in memory

        lowest, null = null, fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, STDERR + 1)
        os.close(lowest)
    # Python starts no thread while it ends, and none if the user may have no more of them.
    with suppress(RuntimeError):
        faulthandler.dump_traceback_later(_DEADLINE_SECONDS + 0.5, exit=True, file=null)
    with suppress(RuntimeError):
        deadline.start()


def _ignore_further_interrupts() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not cut the report


def _abort(code: int, *, calls_mpi: bool = True) -> None:
    """End all processes of the job; may return."""
    # Not imported here: a process that has not started MPI must not start it to end.
    mpi = sys.modules.get("mpi4py.MPI")
    is_running = mpi and mpi.Is_initialized() and not (finalizing.is_set() or mpi.Is_finalized())
    # MPICH ends the process in its abort. The main thread, which may be in MPI meanwhile, then
    # sometimes crashes.
    is_safe = not launcher_socket() or threading.current_thread() is threading.main_thread()
    if mpi and is_running and calls_mpi and is_safe:
        mpi.COMM_WORLD.Abort(code)
        return
    # Open MPI's launcher ends the job if a process exits with a code other than 0. Hydra waits for
    # the other processes unless it is sent PMI-1's abort command, as MPI_Abort does.
    if launcher_socket():
        os.write(settings.pmi_descriptor() or 0, f"cmd=abort exitcode={code}\n".encode())
        time.sleep(_DEADLINE_SECONDS)


def launcher_socket() -> int:
    """Return the inode number of the connection to Hydra; 0 if this process has none.

    A process that a rank started may inherit the variable without the connection.
    """
    descriptor = settings.pmi_descriptor()
    with suppress(OSError):
        about = None if descriptor is None else os.fstat(descriptor)
        if about is not None and stat.S_ISSOCK(about.st_mode):
            return about.st_ino
    return 0
