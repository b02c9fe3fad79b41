"""``mpishard watch``: a local page that shows a run while it trains, and its end.

The command serves ``watch.html`` and a `RunState`, the content of the page: curves from the run's
metrics, and ranks from their status pages.
"""

from __future__ import annotations

import json
import math
import socket
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import numpy as np
import typer

from mpishard.base import Array, Document, nearest
from mpishard.cli.run.logs import CALLS, ENDED, RankLogs, newest_start
from mpishard.cli.wording import refuse, say
from mpishard.communication import Call, RankRecord, pages_beside, records_at, records_in, verdict
from mpishard.observe import parse_metrics, proportional_memory

_PORT = 6280


def watch(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Folder of the run, with its metrics.jsonl; or a metrics file. It need not be "
            "there yet.",
        ),
    ],
    logs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of `mpishard run --log-dir`, with files about the ranks. Default: RUN.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")
    ] = _PORT,
) -> None:
    """Show a run on a local page, live: losses, throughput, memory, and the state of each rank.

    The run writes its losses with metrics=RUN/metrics.jsonl. Start it with `mpishard run --log-dir
    RUN`, so that the page can show its ranks. The page also shows the end of a run, and its reason.
    It is served to this machine only, and loads nothing from elsewhere. Ctrl-C ends the command.
    """
    folder = logs or (run.parent if run.is_file() or run.suffix == ".jsonl" else run)
    if logs is not None and not logs.is_dir():
        refuse("watch", f"--logs {logs} is not a folder")
    state = RunState(run, folder)
    try:
        # The page shows paths and host names, so it is served to this machine alone.
        server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Page, state, Lock()))
    except OSError as error:
        refuse("watch", f"port {port} of 127.0.0.1: {error.strerror}; choose another --port, or 0")
    # Otherwise Ctrl-C would wait for browsers that keep their connections open.
    server.daemon_threads = True
    if not run.exists():
        there = [p.name for p in run.parent.iterdir()] if run.parent.is_dir() else []
        text = f"there is no {run} yet, and the page waits for it"
        say("watch", f"{text}{nearest(run.name, there)}")
    typer.echo(f"{run}: http://127.0.0.1:{server.server_port} (Ctrl-C ends it)")
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("")


class _Page(BaseHTTPRequestHandler):
    """Answers with the page, or with its state."""

    def __init__(self, state: RunState, lock: Lock, *arguments: Any) -> None:
        self._state = state
        self._lock = lock
        super().__init__(*arguments)

    def handle(self) -> None:
        """Answer, unless the browser has closed the connection."""
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        """Answer a browser."""
        host = self.headers.get("Host", "").partition(":")[0]  # browsers leave port 80 out
        # Refuses DNS rebinding: a page of another site whose name leads to this machine.
        if host not in ("127.0.0.1", "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._send("text/html; charset=utf-8", (files(__package__) / "watch.html").read_bytes())
        elif self.path == "/state":
            # Each request has a thread of its own, and two must not take the same new lines.
            with self._lock:
                state = self._state.now()
            self._send("application/json", json.dumps(state).encode())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        # A browser that returns to the page would show an old state.
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing, because a page asks each second."""


# -------------------------------------------------------------------------------------- the state

_POINTS = 400
"""Maximum number of points of a curve; with more steps, a point is the mean of several."""

_PART_BYTES = 1 << 20
_OF_STEPS = ("step", "loss", "time", "weight", "memory")
_OF_TESTS = ("step", "validation_loss")

_STALLED_SECONDS = 3.0
_WINDOWS = 120
"""Number of points of the throughput: single steps would show the noise of the machine."""

_WORDS = {
    "runs": "runs",
    "waits": "waits",
    "late": "in no collective",
    "stopped": "stopped (SIGSTOP, Ctrl-Z or a debugger)",
    "left": "left",
    "gone": "its process is gone",
}
_MEMORY_SECONDS = 2.0
_MEMORY_KEPT = 2000


class _Curves:
    """The figures of a growing metrics file. Each look reads the new lines alone.

    Parameters
    ----------
    path : Path
        The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.modified: float | None = None
        """Time of the last line, in seconds since the epoch; None without a file."""
        self._begin((0, 0))

    def _begin(self, file: tuple[int, int]) -> None:
        self._file, self._read = file, 0
        self._last: Document = {}
        # Numbers and not rows, because a long run has millions and a page asks each second.
        self._steps = {name: array("d") for name in _OF_STEPS}
        self._tests = {name: array("d") for name in _OF_TESTS}
        self._figures: Document | None = None

    def look(self) -> None:
        """Read the new lines; all lines if a resumed run has written another file.

        Raises
        ------
        ValueError
            If a line has no metrics.
        """
        try:
            about = self.path.stat()
        except FileNotFoundError:
            about = None
        self.modified = None if about is None else about.st_mtime
        # A resumed run replaces the file by one without the repeated steps: another inode.
        identity = (0, 0) if about is None else (about.st_dev, about.st_ino)
        if about is None or identity != self._file or about.st_size < self._read:
            self._begin(identity)
        if about is None or about.st_size == self._read:
            return
        with self.path.open("rb") as stream:
            stream.seek(self._read)
            # In parts, because the rows of a long run take a hundred times the bytes of the file.
            while part := b"".join(stream.readlines(_PART_BYTES)):
                self._take(part[: part.rfind(b"\n") + 1])
                if not part.endswith(b"\n"):  # this line is being written
                    break
        self._figures = None

    def _take(self, lines: bytes) -> None:
        for row in parse_metrics(lines.decode(errors="replace"), self.path):
            if "loss" in row:
                self._last = row
            for columns, figure in ((self._steps, "loss"), (self._tests, "validation_loss")):
                if figure in row:
                    for name, column in columns.items():
                        # A loss that was not finite is null, and some rows have no memory.
                        value = row.get(name)
                        column.append(value if isinstance(value, int | float) else math.nan)
        self._read += len(lines)

    def figures(self) -> Document:
        """Return the curves as lists of ``[x, y]``, and the figures of the last step."""
        if self._figures is None:
            steps = {name: np.array(column) for name, column in self._steps.items()}
            tests = {name: np.array(column) for name, column in self._tests.items()}
            # Weight per second, over windows of steps.
            is_known = np.isfinite(steps["time"]) & np.isfinite(steps["weight"])
            step, seconds, weight = (steps[name][is_known] for name in ("step", "time", "weight"))
            width = max(1, len(step) // _WINDOWS)
            throughput = []
            for start in range(0, len(step) - width, width):
                end = start + width
                passed = seconds[end] - seconds[start]
                if passed > 0:
                    amount = weight[start + 1 : end + 1].sum()
                    throughput.append([float(step[end]), float(amount / passed)])
            self._figures = {
                "last": self._last,
                "loss": _curve(steps["step"], steps["loss"]),
                "validation": _curve(tests["step"], tests["validation_loss"]),
                "throughput": throughput,
                "memory": _curve(steps["time"], steps["memory"]),
            }
        return self._figures


class RunState:
    """The present metrics and ranks of a run.

    Parameters
    ----------
    run : Path
        Folder with ``metrics.jsonl``, or a metrics file. It need not exist yet.
    logs : Path
        The folder of ``mpishard run --log-dir``.
    """

    def __init__(self, run: Path, logs: Path) -> None:
        is_file = run.is_file() or run.suffix == ".jsonl"
        self.run, self.logs = run, logs
        self._curves = _Curves(run if is_file else run / "metrics.jsonl")
        self._memory: list[tuple[float, int]] = []  # of all ranks here: time, bytes
        self._of_ranks: dict[int, int] = {}  # process -> bytes
        self._measured = -math.inf

    def now(self) -> Document:
        """Return the content of the page, for JSON."""
        error = ""
        try:
            self._curves.look()
        # The page shows the reason. A damaged line must not hide the state of the ranks.
        except (OSError, ValueError) as failure:
            error = str(failure)
        modified = self._curves.modified
        folder = newest_start(self.logs)
        ended: Document | None = None
        with suppress(OSError, ValueError):  # the job runs, or the file is being written
            ended = json.loads((folder / ENDED).read_text(encoding="utf-8"))
        # A job that has ended left this summary, and its status pages are gone.
        records = [] if ended else records_in(folder / CALLS)
        if not ended and not records:
            # Under plain mpiexec there is no --log-dir: the metrics file leads to the pages.
            records = records_at(pages_beside(self._curves.path))
        # A process has a record for each of its worlds; the newest has its present state.
        records = [log.newest for log in RankLogs.of_job(records).values()]
        alive = [r for r in records if r.is_alive and not r.has_left]
        kinds = {_kind(record) for record in records}
        if alive:
            self._measure(alive)
        return {
            "run": str(self.run),
            "logs": str(self.logs),
            "exists": self.run.exists(),
            "error": error,
            "age": None if modified is None else max(0.0, time.time() - modified),
            "ended": ended,
            "is_running": bool(alive),
            "verdict": verdict(records, time.time()) if kinds - {"runs", "left"} else "",
            "ranks": ended["ranks"]
            if ended
            else [self._rank(r, "waits" in kinds) for r in records],
            "processes": _thinned(np.array(self._memory, np.float64).reshape(-1, 2)),
            **self._curves.figures(),
        }

    def _measure(self, alive: Sequence[RankRecord]) -> None:
        """Note the memory of the ranks of this machine, at most every two seconds."""
        now = time.monotonic()
        here = [r.pid for r in alive if r.host == socket.gethostname()]
        if now - self._measured < _MEMORY_SECONDS or not here:
            return
        self._measured = now
        # The kernel walks all pages of a process for this, so not for each request.
        self._of_ranks = {pid: proportional_memory(pid) or 0 for pid in here}
        self._memory = [*self._memory, (time.time(), sum(self._of_ranks.values()))][-_MEMORY_KEPT:]

    def _rank(self, record: RankRecord, others_wait: bool) -> Document:
        kind, last = _kind(record), record.last
        # A rank that computes is worth a word only while others wait for it.
        kind = "late" if others_wait and kind == "runs" else kind
        call = record.waits or last
        state = _WORDS[kind]
        if kind == "waits":
            state += f" {record.waited:.0f} s"
        elif kind == "late" and last is not None:
            state += f" for {time.time() - last.time:.0f} s"
        return {
            "rank": record.launched_rank,
            "host": record.host,
            "pid": record.pid,
            "kind": kind,
            "state": state,
            "call": call.full_text if isinstance(call, Call) else call.where if call else "",
            "count": record.count,
            "memory": self._of_ranks.get(record.pid),
        }


def _kind(record: RankRecord) -> str:
    if record.has_left:
        return "left"
    if not record.is_alive:
        return "gone"
    if record.is_stopped:
        return "stopped"
    return "waits" if record.waited > _STALLED_SECONDS else "runs"


def _curve(x: Array, y: Array) -> list[list[float]]:
    """Return the points whose x and y are finite, reduced to the number that a page shows."""
    is_known = np.isfinite(x) & np.isfinite(y)
    return _thinned(np.column_stack([x[is_known], y[is_known]]))


def _thinned(points: Array) -> list[list[float]]:
    if len(points) > _POINTS:
        # Means, and not every n-th value, which would show noise and lose a rise between.
        buckets = np.array_split(points, _POINTS)
        points = np.array([(bucket[-1, 0], bucket[:, 1].mean()) for bucket in buckets])
    thinned: list[list[float]] = points.tolist()
    return thinned
