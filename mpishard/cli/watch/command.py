"""``mpishard watch``: serve the page of a run on this machine."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import typer

from mpishard.arguments import nearest
from mpishard.cli.watch.state import RunState
from mpishard.cli.wording import refuse

__all__ = ["watch"]

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
            help="Folder of `mpishard run --log-dir`, which tells about the ranks. Default: RUN.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")
    ] = _PORT,
) -> None:
    """Show a run on a local page, live: losses, throughput, memory, and the state of each rank.

    The run writes its losses with metrics=RUN/metrics.jsonl, and `mpishard run --log-dir RUN`
    starts it, so that the ranks can be seen. The page also shows a run that has ended, and why.
    It is served to this machine only, and loads nothing from elsewhere. Ctrl-C ends it.
    """
    folder = logs or (run.parent if run.is_file() or run.suffix == ".jsonl" else run)
    if logs is not None and not logs.is_dir():
        refuse("watch", f"--logs {logs} is no folder")
    state = RunState(run, folder)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Page, state, Lock()))
    except OSError as error:
        refuse("watch", f"port {port} of 127.0.0.1: {error.strerror}; choose another --port, or 0")
    server.daemon_threads = True
    if not run.exists():
        there = [p.name for p in run.parent.iterdir()] if run.parent.is_dir() else []
        typer.echo(
            f"mpishard watch: there is no {run} yet, and the page waits for it"
            f"{nearest(run.name, there)}",
            err=True,
        )
    typer.echo(f"{run}: http://127.0.0.1:{server.server_port} (Ctrl-C ends it)")
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("")


class _Page(BaseHTTPRequestHandler):
    """Answers with the page, or with the state that it shows."""

    def __init__(self, state: RunState, lock: Lock, *arguments: Any) -> None:
        self._state = state
        self._lock = lock
        super().__init__(*arguments)

    def handle(self) -> None:
        """Answer, unless the browser has left meanwhile."""
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        """Answer a browser."""
        host = self.headers.get("Host", "").partition(":")[0]  # browsers leave port 80 out
        if host not in ("127.0.0.1", "localhost"):  # a page from elsewhere under a name of its own
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._send("text/html; charset=utf-8", (files(__package__) / "page.html").read_bytes())
        elif self.path == "/state":
            with self._lock:
                state = self._state.now()
            self._send("application/json", json.dumps(state).encode())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        # A browser that goes back to the page would show the state of that time.
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing: a page asks each second."""
