"""What a rank prints, kept in a file of its own, and passed on as before.

Runs as a file, before the rank's program and in its place: ``rank_output.py FOLDER FILE PROGRAM
[ARGUMENTS]...``, with environment variables in FILE filled in. It leaves a process behind that
copies, and becomes the program. So the program keeps the process id, the parent, the signals and
the exit code that it has without a log, and what it says while it dies is not lost.

The log has stdout and stderr in the order in which they were written. Each is a pipe that holds
one packet at a time: of each stream at most one write waits to be copied, and epoll tells which
of two came first. A write costs some 50 us so.

Nothing but the standard library is imported: this starts in 20 ms.
"""

import fcntl
import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

_PACKET = 65536  # longest that a page can be: a packet is a page at most
_LINE_SECONDS = 0.02  # that the rest of a line may take
_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
            signal.SIGUSR2)  # fmt: skip


def main() -> None:
    """Start the copying process, and become the program."""
    folder, name, *program = sys.argv[1:]
    log = Path(folder, os.path.expandvars(name))
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        sys.exit(f"mpishard run: --log-dir: {error}")
    pipes = [_one_packet_pipe() for _ in ("stdout", "stderr")]
    child = os.fork()
    if child == 0:
        # Once more, so that the program has no child that it never started.
        if os.fork() == 0:
            _copy(file, {pipes[0][0]: 1, pipes[1][0]: 2})
        os._exit(0)
    os.waitpid(child, 0)
    for target, (_, write_end) in enumerate(pipes, start=1):
        os.dup2(write_end, target)
    os.execvp(program[0], program)  # noqa: S606


def _one_packet_pipe() -> tuple[int, int]:
    ends = os.pipe2(os.O_CLOEXEC | os.O_DIRECT)
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 1)  # the system makes a page of it
    return ends


def _copy(log: int, targets: dict[int, int]) -> None:
    """Copy what comes from each key of ``targets`` to its value and to ``log``, until all end."""
    # The launcher signals and waits for its ranks' groups and sockets: this is no part of them.
    os.setsid()
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    _close_all_but({1, 2, log, *targets})
    waiting = select.epoll()
    for source in targets:
        waiting.register(source, select.EPOLLIN | select.EPOLLET)
    outputs = {target: _Output(target) for target in targets.values()}
    to_log = _Output(log)
    while targets:
        is_held = any(output.held for output in outputs.values())
        events = waiting.poll(_LINE_SECONDS if is_held else None, maxevents=1)
        for source, event in events:
            output = outputs[targets[source]]
            for other in outputs.values():
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
    """Where to copy to. An output that fails is left out: the disk is full, or nobody reads."""

    def __init__(self, handle: int) -> None:
        self.error: OSError | None = None
        self.held = b""
        self._handle = handle

    def write_lines(self, data: bytes) -> None:
        """Write whole lines, and hold the rest: the launcher mixes the pieces of several ranks."""
        data = self.held + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self.held = data[end:]
        self.write(data[:end])

    def flush(self) -> None:
        """Write what is held."""
        data, self.held = self.held, b""
        self.write(data)

    def write(self, data: bytes) -> None:
        """Write all of it."""
        try:
            while data and self.error is None:
                data = data[os.write(self._handle, data) :]
        except OSError as error:
            self.error = error


def _close_all_but(kept: set[int]) -> None:
    for handle in {int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - kept:
        with suppress(OSError):  # the one that listed them
            os.close(handle)


if __name__ == "__main__":
    main()
