"""The process between a launcher and a rank: starts the rank, waits for it, notes how it ended.

`mpishard run` lets the launcher start ``rank_agent.py VARIABLE LOGS PROGRAM [ARGUMENTS]...`` for
each rank. The launcher sets the environment variable VARIABLE to the number of the rank. LOGS is
the folder of ``--log-dir``, or empty. The rank is the child of this process, and inherits its
environment and its files, the connection to the launcher included.

- When the rank ends, this process appends one line to the file ``agents-HOST`` of the job's folder,
  and ends with the same exit code or signal. The launcher ends the other ranks only after that:
  the lines are in the order in which the ranks ended.
- Launchers send signals to the process group, which the rank belongs to. A signal that another
  process sends to this one is forwarded to the rank.
- If the launcher's process on this machine is gone, this process kills the rank. If this process is
  killed, the system kills the rank.
- SIGUSR1, the notice of preemption, is blocked in the rank until mpishard is imported there and has
  a handler. A notice that comes earlier stays pending.

With LOGS a further process copies the rank's output to a file and to the launcher. The log has
stdout and stderr in the order in which they were written: each is a pipe that holds one packet at a
time, and epoll returns them in the order of arrival. A write costs some 50 us more.

Only little of the standard library is imported, and nothing else: this process starts in 15 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False  # not imported from typing, which would take a third of the start
if TYPE_CHECKING:
    from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 1.0

_PACKET = 65536  # the largest page of Linux: a packet is a page at most
_LINE_SECONDS = 0.02  # time for the rest of a line to arrive
_FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def main() -> None:
    """Start the rank, and end as it ends."""
    variable, logs, *program = sys.argv[1:]
    _join_host()
    rank = os.environ.get(variable, "0")
    if logs:
        _keep_log(logs, rank)
    if not hasattr(signal, "sigwaitinfo") or not sys.platform.startswith("linux"):
        # Without these calls the rank replaces this process, and nobody notes its end.
        os.execvp(program[0], program)  # noqa: S606
    _Agent(rank, program).run()


def machine() -> str:
    """Return a text that is the same for all processes that see each other's process ids."""
    with open("/proc/sys/kernel/random/boot_id") as file:  # noqa: PTH123
        boot = file.read().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116


def _join_host() -> None:
    """On another host than that of `mpishard run`: use a folder of this host, and its agent."""
    words = os.environ.get("MPISHARD_RUN", "").split("/")
    if len(words) < 5 or words[4] == machine():
        return
    parent = os.environ.get("TMPDIR", "")
    parent = parent if os.path.isdir(parent) else "/tmp"  # noqa: S108, PTH112
    # With the machine, because the folder may be shared between hosts.
    mine = f"{machine().partition('-')[0]}{machine().rpartition(':')[2]}"
    folder = os.path.join(parent, f"{words[0]}-{mine}")  # noqa: PTH118
    os.environ["MPISHARD_JOB_FOLDER"] = folder
    try:
        os.mkdir(folder, 0o700)  # noqa: PTH102
    except FileExistsError:
        return  # another rank's agent of this host was first
    except OSError as error:
        _fail(f"{os.uname().nodename}: {error}")
    # Twice, so that the rank is the only child of this process.
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            _close_all_but({0, 1, 2})
            script = os.path.join(os.path.dirname(__file__), "host_agent.py")  # noqa: PTH118, PTH120
            os.execv(sys.executable, [sys.executable, "-I", "-S", script, folder])  # noqa: S606
        os._exit(0)
    os.waitpid(child, 0)


class _Agent:
    """The rank's parent.

    Parameters
    ----------
    rank : str
        The number of the rank among those of the launcher.
    program : list of str
        The command line of the rank.
    """

    def __init__(self, rank: str, program: list[str]) -> None:
        self.rank = rank
        self.program = program
        self._launcher = os.getppid()
        self._prctl = ctypes.CDLL(None).prctl
        # A real-time signal, which launchers do not send to ranks.
        self._parent_gone = int(signal.SIGRTMIN) + 1
        self._ends = -1
        folder = os.environ.get("MPISHARD_JOB_FOLDER", "")
        # On another machine the folder may not exist. Then only the launcher's exit code is known.
        with suppress(OSError):
            path = os.path.join(folder, f"agents-{os.uname().nodename}")  # noqa: PTH118
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._ends = os.open(path, flags, 0o600) if folder else -1

    def run(self) -> NoReturn:
        """Start the rank, wait for its end, and end alike."""
        forwarded: set[int] = {*_FORWARDED, signal.SIGCONT}
        awaited = forwarded | {signal.SIGCHLD, signal.SIGALRM, self._parent_gone}
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Before the fork, so that no signal gets lost between the fork and the wait.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        self._prctl(_PR_SET_PDEATHSIG, self._parent_gone)
        agent = os.getpid()
        try:
            child = os.fork()
        except OSError as error:
            self._note("failed")
            _fail(
                f"rank {self.rank} cannot be started: {error}. Does `ulimit -u` allow as many "
                "processes, with the threads of each, as the job needs?"
            )
        if child == 0:
            try:
                self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                # The agent has ended before the call of prctl, which sends nothing afterwards.
                if os.getppid() != agent:
                    os._exit(1)
                for number in (signal.SIGPIPE, signal.SIGXFSZ):  # this Python ignores them
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, signal.SIGUSR1})
                os.execvp(self.program[0], self.program)  # noqa: S606
            except OSError as error:
                _fail(f"rank {self.rank}: {self.program[0]}: {error}")
        self._note("started", agent, child)
        status = self._wait(child, awaited, forwarded)
        code = os.waitstatus_to_exitcode(status)
        self._note("ended", code, time.monotonic())
        if code >= 0:
            os._exit(code)
        import resource

        # The rank has dumped its core: this process must not write another one over it.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(agent, -code)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # Only reached if the signal does not end a process by default.
        os._exit(128 - code)

    def _wait(self, child: int, awaited: set[int], forwarded: set[int]) -> int:
        """Forward signals until the rank has ended by itself; return its wait status."""
        # Not sigtimedwait: if this process was suspended, Python's returns an undefined signal,
        # which would be forwarded.
        signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
        while True:
            received = signal.sigwaitinfo(awaited)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, signal.SIG_IGN)  # discards a pending one
                return status
            if os.getppid() != self._launcher:
                noticed_at = time.monotonic()
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                self._note("orphaned", self._launcher, noticed_at)
                if os.getpgrp() == os.getpid():
                    os.killpg(0, signal.SIGKILL)  # the programs that the rank has started
                os._exit(1)
            if (
                received.si_signo in forwarded
                and received.si_code <= 0  # sent by a process
                and received.si_pid != self._launcher
            ):
                os.kill(child, received.si_signo)

    def _note(self, *words: object) -> None:
        if self._ends >= 0:
            with suppress(OSError):  # a full disk: the launcher's exit code must do
                # One write in append mode, so that the lines of several agents do not mix.
                os.write(self._ends, f"{self.rank} {' '.join(map(str, words))}\n".encode())


def _fail(reason: str) -> NoReturn:
    with suppress(OSError):
        os.write(2, f"mpishard run: {reason}\n".encode())
    os._exit(1)


# ---------------------------------------------------------------------------------------- the log


def _keep_log(folder: str, rank: str) -> None:
    """Start the process that copies output, and redirect stdout and stderr to it."""
    import fcntl

    path = os.path.join(folder, f"rank-{rank}.log")  # noqa: PTH118
    try:
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        _fail(f"--log-dir: {error}")
    pipes = []
    for _ in ("stdout", "stderr"):
        ends = os.pipe2(os.O_CLOEXEC | os.O_DIRECT)
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 1)  # the system rounds it up to a page
        pipes.append(ends)
    try:
        child = os.fork()
        if child == 0:
            # A second fork, so that the rank is the only child of this process.
            if os.fork() == 0:
                _copy(file, {pipes[0][0]: 1, pipes[1][0]: 2})
            os._exit(0)
    except OSError as error:
        _fail(f"--log-dir: {error}: `ulimit -u` allows too few processes?")
    os.waitpid(child, 0)
    for target, (read_end, write_end) in enumerate(pipes, start=1):
        os.dup2(write_end, target)
        os.close(read_end)
        os.close(write_end)
    os.close(file)


def _copy(log: int, targets: dict[int, int]) -> None:
    """Copy from each key of ``targets`` to its value and to ``log``, until all are closed."""
    # The launcher signals its ranks' process groups, and waits until their sockets are closed.
    # This process must outlive both: it leaves the group, and closes all other files.
    import select

    os.setsid()
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    _close_all_but({1, 2, log, *targets})
    waiting = select.epoll()
    for source in targets:
        waiting.register(source, select.EPOLLIN | select.EPOLLET)
    outputs = {target: _Output(target) for target in targets.values()}
    to_log = _Output(log)
    while targets:
        is_incomplete = any(output.incomplete for output in outputs.values())
        # One event at a time, because together their order would be that of the descriptors.
        events = waiting.poll(_LINE_SECONDS if is_incomplete else None, maxevents=1)
        for source, event in events:
            output = outputs[targets[source]]
            for other in outputs.values():
                # The incomplete line of the other stream was written before this packet.
                if other is not output:
                    other.flush()
            while data := os.read(source, _PACKET):
                to_log.write(data)
                output.write_lines(data)
                if not event & select.EPOLLHUP:
                    break
            else:
                waiting.unregister(source)
                del targets[source]
        if not events or not targets:
            for output in outputs.values():
                output.flush()
    if to_log.error is not None:
        outputs[2].write(f"mpishard run: --log-dir: a log is cut off: {to_log.error}\n".encode())


class _Output:
    """A file to copy to. After an error, as of a full disk or a closed pipe, it is left out."""

    def __init__(self, handle: int) -> None:
        self.error: OSError | None = None
        self.incomplete = b""
        self._handle = handle

    def write_lines(self, data: bytes) -> None:
        """Write whole lines and keep the rest: launchers mix the output of several ranks."""
        data = self.incomplete + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self.incomplete = data[end:]
        self.write(data[:end])

    def flush(self) -> None:
        """Write the incomplete line."""
        data, self.incomplete = self.incomplete, b""
        self.write(data)

    def write(self, data: bytes) -> None:
        """Write all of it."""
        try:
            while data and self.error is None:
                data = data[os.write(self._handle, data) :]
        except OSError as error:
            self.error = error


def _close_all_but(kept: set[int]) -> None:
    for handle in {int(name) for name in os.listdir("/proc/self/fd")} - kept:  # noqa: PTH208
        with suppress(OSError):  # the handle of listdir itself is closed by now
            os.close(handle)


if __name__ == "__main__":
    main()
