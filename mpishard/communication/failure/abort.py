"""How a process that a launcher started ends all of its job: what is said, by whom, and how."""

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

from mpishard import settings
from mpishard.communication.contract.status import stopped_siblings
from mpishard.communication.diagnostics.stall import describe_stall
from mpishard.communication.failure.report import failure_report
from mpishard.errors import PeerError

__all__ = [
    "COLLECTIVE_LIMIT",
    "EXIT_LIMIT",
    "Ending",
    "TimeLimit",
    "finalizing",
    "flush_output",
    "launched_ending",
    "say",
]

_REPORT_GRACE_SECONDS = 1.0
_OUTPUT_SECONDS = 0.25
_FUSE_SECONDS = 3.0
_LAUNCHER_SECONDS = 1.5
_STDERR = 2
_BROKEN = (OSError, ValueError, AttributeError)
"""What a stream raises that is broken, closed, or somebody's own and no whole stream."""

finalizing = threading.Event()
"""Set when this process has called MPI_Finalize: MPI_Abort must not be called any more."""

_one_thread = threading.Lock()
"""Taken by the thread that ends this process, and never given back."""


@dataclass(frozen=True)
class TimeLimit:
    """How long a rank waits for others before it ends the job.

    Parameters
    ----------
    variable : str
        The setting.
    seconds : callable
        Its value; 0 is for ever.
    is_at_end : bool
        Whether the rank has done its work, and waits for the others to end.
    """

    variable: str
    seconds: Callable[[], float]
    is_at_end: bool = False

    def text(self, name: str, waited: float, where: str, then: str) -> str:
        """Say that the rank ``name`` has ``waited`` seconds ``where``, and what comes ``then``."""
        finished = "finished, and has " if self.is_at_end else ""
        stop = " The job ends" if where.endswith(".") else "; the job ends"
        text = f"mpishard: {name} has {finished}waited {waited:.0f} s {where}"
        return text + (f"{stop}{then} ({self.variable})" if self.seconds() else "")


COLLECTIVE_LIMIT = TimeLimit("MPISHARD_TIMEOUT", settings.mpi_timeout)
EXIT_LIMIT = TimeLimit("MPISHARD_EXIT_TIMEOUT", settings.exit_timeout, is_at_end=True)


class Ending:
    """The end of a job, as one of its processes brings it about.

    Parameters
    ----------
    rank : int or None
        This process's rank, where it is known.
    world_size : int
        Number of ranks of the job.
    """

    def __init__(self, rank: int | None, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    @property
    def name(self) -> str:
        """What reports call this rank."""
        return f"{'a rank' if self.rank is None else f'rank {self.rank}'} of {self.world_size}"

    def fail(self, error: BaseException, where: str) -> NoReturn:
        """End the job because ``error`` was raised on this rank and nobody caught it."""
        if isinstance(error, KeyboardInterrupt):
            self.interrupt(where)
        then = "it leaves, and the others may go on" if self.leaves_alone else "the job ends"
        report = failure_report(error, self.name, self.rank, where, then)
        report += _below(self.last_calls())
        if self.leaves_alone:
            self.leave_alone(report, is_echo=isinstance(error, PeerError))
        self.end(report, settings.EXIT_FAILURE)

    @property
    def leaves_alone(self) -> bool:
        """Whether this process ends without the others, where an exception ends it."""
        return False

    def is_last(self) -> bool:
        """Whether no other rank is left that could go on without this one."""
        return True

    def interrupt(self, where: str) -> NoReturn:
        """End the job because of Ctrl-C."""
        self.end(
            f"mpishard: {self.name} was interrupted {where}; the job ends", settings.EXIT_INTERRUPT
        )

    def terminate(self, where: str) -> NoReturn:
        """End the job because this rank was sent SIGTERM.

        A launcher that ends a job of which another rank has failed sends it, too, and SIGKILL soon
        after. That rank has said why.
        """
        time.sleep(_LAUNCHER_SECONDS)
        self.end(
            f"mpishard: {self.name} was sent SIGTERM {where}; the job ends",
            settings.EXIT_TERMINATED,
        )

    def mourn(self, dead: int, where: str) -> NoReturn:
        """End the job because the process of rank ``dead`` is gone, as after SIGKILL."""
        self.end(
            f"mpishard: the process of rank {dead} of {self.world_size} is gone (killed, or out "
            f"of memory?), seen by rank {self.rank} {where}; the job ends",
            settings.EXIT_FAILURE,
            is_own=False,
        )

    def warn(self, waited: float, where: str, limit: TimeLimit) -> None:
        """Say that this rank has waited for long, and the one that has for longest, why."""
        stall = self.describe_stall() if self.speaks_for_all() and not limit.is_at_end else ""
        then = f" after {limit.seconds():g} s"
        say(f"{limit.text(self.name, waited, where, then)}{_below(stall)}")

    def give_up(self, waited: float, where: str, limit: TimeLimit) -> NoReturn:
        """End the job because this rank has waited for too long."""
        stall = "" if limit.is_at_end else self.describe_stall()
        text = limit.text(self.name, waited, where, "")
        self.end(f"{text}{_below(stall)}", settings.EXIT_TIMEOUT)

    def dead_rank(self) -> int | None:
        """A rank of this node whose process is gone, and that had not left; None: none is known."""
        return None

    def describe(self) -> str:
        """What this rank did last; several lines, or nothing."""
        return ""

    def last_calls(self) -> str:
        """The last collectives of this rank; several lines, or nothing."""
        return ""

    def describe_stall(self) -> str:
        """Why the ranks wait, as far as is known; several lines, or nothing."""
        stopped = stopped_siblings()
        return describe_stall(stopped) if stopped else ""

    def speaks_for_all(self) -> bool:
        """Whether no other rank has waited for longer."""
        return True

    def claim_report(self, code: int) -> bool:
        """Whether this process is the first to report the end of the job, with exit code ``code``.

        0 stands for the unknown code of another process, which is gone.

        The first of its launcher's on this node, where no more is known.
        """
        if not sys.platform.startswith("linux"):
            return True
        # A name that the kernel gives to one process, and takes back when that ends. Under
        # `mpishard run` each rank has a parent of its own, and all have the job's folder.
        folder = settings.job_folder()
        job = os.getppid() if folder is None else zlib.crc32(bytes(folder))
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0mpishard-report-{os.getuid()}-{job}")
        except OSError:
            claim.close()
            return False
        _kept.append(claim)
        return True

    def end(self, report: str, code: int, *, is_own: bool = True) -> NoReturn:
        """Print ``report`` unless another rank of this node has printed one, and end all ranks.

        ``is_own`` is false where another process went, of which ``code`` says nothing.
        """
        _begin_to_end(code)
        try:
            self._report(report, code, is_own)
        finally:
            try:
                _abort(code)
            finally:
                # MPICH's may return while the launcher still ends the others.
                os._exit(code)

    def leave_alone(self, report: str, *, is_echo: bool) -> NoReturn:
        """Print ``report``, and end this process by SIGKILL: MPI tells the others of that alone.

        Where no other rank is left the job ends as it does otherwise, with its code. ``is_echo``
        is true for what came of another rank's end, which one rank reports for all.
        """
        code = settings.EXIT_FAILURE
        _begin_to_end(code)
        try:
            self._report(report, code, is_own=not is_echo, is_said=not is_echo)
            if self.is_last():
                _abort(code)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(code)

    def _report(self, report: str, code: int, is_own: bool, *, is_said: bool = False) -> None:
        _light_fuse(code)
        _ignore_further_interrupts()
        flush_output()
        try:
            self.close(report)
        except Exception as error:  # noqa: BLE001 - the end goes on, and says so
            report += f"\n(what was recorded could not be written: {error})"
        if self.claim_report(code if is_own else 0) or is_said:
            say(report)
            # An aborted job's output is lost where the launcher has not read it yet.
            time.sleep(_OUTPUT_SECONDS)
        else:
            # The rank that reports ends this one too.
            time.sleep(_REPORT_GRACE_SECONDS)

    def close(self, report: str) -> None:
        """Write out what this process has recorded, which ends with ``report``."""


_kept: list[socket.socket] = []


def _begin_to_end(code: int) -> None:
    """Return to the first thread that ends this process, and to no other."""
    if not _one_thread.acquire(blocking=False):
        time.sleep(2 * _FUSE_SECONDS)
        os._exit(code)


def _below(text: str) -> str:
    return f"\n{text}" if text else ""


def flush_output() -> None:
    """Write out what was printed: an aborted process does not. A broken stream is left as it is."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(*_BROKEN):
            stream.flush()


def say(text: str) -> None:
    """Print ``text`` to stderr, whatever the script has made of that."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except _BROKEN:
        with suppress(OSError):  # closed: nobody wants to know
            os.write(_STDERR, f"{text}\n".encode(errors="replace"))


def launched_ending() -> Ending:
    """The end of the job of a process that has no world yet."""
    return Ending(settings.launched_rank(), settings.launched_world_size() or 1)


def _light_fuse(code: int) -> None:
    """End this process soon, whatever becomes of the orderly way.

    A write to a pipe that nobody reads, or MPI itself, may hold that up for ever. Where it is held
    up with Python's lock, a thread of C ends the process, and its exit code is 1.
    """
    fuse = threading.Timer(_FUSE_SECONDS, os._exit, (code,))
    fuse.daemon = True
    null = os.open(os.devnull, os.O_WRONLY)
    # Python starts no thread while it ends, and none if the user may have no more of them.
    with suppress(RuntimeError):
        faulthandler.dump_traceback_later(_FUSE_SECONDS + 0.5, exit=True, file=null)
    with suppress(RuntimeError):
        fuse.start()


def _ignore_further_interrupts() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _abort(code: int) -> None:
    """End all processes of the job; may return."""
    mpi = sys.modules.get("mpi4py.MPI")
    can_abort = mpi is not None and mpi.Is_initialized() and not finalizing.is_set()
    if mpi is not None and can_abort and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)
        return
    # Open MPI's launcher ends a job of which a process ends with a code. Hydra waits for the others
    # unless it is told, in the words of PMI-1 that MPI_Abort uses, too.
    descriptor = settings.pmi_descriptor()
    if descriptor is not None and _is_socket(descriptor):
        os.write(descriptor, f"cmd=abort exitcode={code}\n".encode())
        time.sleep(_FUSE_SECONDS)


def _is_socket(descriptor: int) -> bool:
    """Whether it is the launcher's: a process that a rank started has the variable alone."""
    with suppress(OSError):
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    return False
