"""The other hosts of a job: connections to their agents, their ranks' pages, and lost hosts.

`mpishard run` listens on a port while the job runs. The agent of each other host
(`mpishard.cli.run.host_agent`) connects to it, proves that it knows the job's token, and reports.
The pages that it sends are written to the job's folder, so that `mpishard run` and the ranks of
this host read those of all ranks there.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import select
import signal
import socket
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpishard.cli.run.rank_agent import machine
from mpishard.communication import PAGE_BYTES, shared_page, who

VARIABLE = "MPISHARD_RUN"
"""Environment variable with the name of the job, port, token, timeout, machine and addresses."""

_HELLO_SECONDS = 5.0
_HELLO_BYTES = 1000
_ANSWER_SECONDS = 1.0
_WATCH_SECONDS = 2.0
_CLOSED = "has closed its connection: its processes were killed, or it was shut down"
_ON_HOSTS = (b"hydra_pmi_proxy", b"prted")
_END_SECONDS = 4.0
"""Time for the agents to end what still runs, and to remove files."""


@dataclass(eq=False)
class HostConnection:
    """The connection to the agent of one other host.

    Parameters
    ----------
    connection : socket
        Does not block.
    """

    connection: socket.socket
    name: str = ""
    """The name of the host; empty until its agent has shown the token."""
    ranks: set[int] = field(default_factory=set)
    """The ranks that were started there."""
    running: set[int] = field(default_factory=set)
    """Those that have not ended."""
    heard_at: float = field(default_factory=time.monotonic)
    is_closed: bool = False
    is_over: bool = False
    """Whether its agent has ended in good order."""
    wants: bool = False
    has_answered: bool = True
    received: bytes = b""
    to_send: bytearray = field(default_factory=bytearray)

    @property
    def description(self) -> str:
        """The host, with the ranks that run there, or ran."""
        return f"host {self.name} ({who(sorted(self.running or self.ranks))})"

    def send(self, **message: object) -> None:
        """Send a message, soon: signal handlers call this, too."""
        self.to_send += json.dumps(message).encode() + b"\n"

    def flush(self) -> None:
        """Send as much as the connection takes now."""
        try:
            while self.to_send and not self.is_closed:
                del self.to_send[: self.connection.send(self.to_send)]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.is_closed = True
        self.connection.close()


Note = tuple[HostConnection, list[str]]
"""A host, and a note of a rank's agent there: see `RankProcesses`."""


class Hosts:
    """The hosts of one start of a job, but for this one.

    Parameters
    ----------
    name : str
        Name of the job's folder on each host.
    folder : Path
        The folder of the status pages on this host.
    names : sequence of str
        The hosts that the user named; empty if SLURM chooses them.
    timeout : float
        Seconds without a sign of life after which a host is lost.
    is_watched : bool
        Whether others read the pages while the job runs, so that they must not be old.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        names: Sequence[str],
        timeout: float,
        *,
        is_watched: bool = False,
    ) -> None:
        self._folder, self._timeout, self._is_watched = folder, timeout, is_watched
        self._token = secrets.token_hex(16)
        is_dual = socket.has_dualstack_ipv6()
        self._listening = socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if is_dual else socket.AF_INET,
            backlog=128,
            dualstack_ipv6=is_dual,
        )
        self._listening.setblocking(False)
        port = self._listening.getsockname()[1]
        self._hosts: list[HostConnection] = []
        self._origins: dict[str, HostConnection] = {}  # of the copies of pages of other hosts
        self._asked_at = 0.0
        self._is_asking = False
        self.variable = "/".join(
            [name, f"{port}", self._token, f"{timeout:g}", machine(), *_addresses(names)]
        )
        """Value of the variable that leads the agents of other hosts here."""

    @property
    def sockets(self) -> list[socket.socket]:
        """The sockets that become readable when there is something to `receive`."""
        return [self._listening, *(h.connection for h in self._hosts if not h.is_closed)]

    def receive(self) -> list[Note]:
        """Exchange messages with the hosts, without waiting; return the notes that have come."""
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                connection.setblocking(False)
                self._hosts.append(HostConnection(connection))
        notes: list[Note] = []
        now = time.monotonic()
        for host in self._hosts:
            if not host.is_closed:
                notes += self._receive_from(host)
            if not host.name and now - host.heard_at > _HELLO_SECONDS:
                host.close()  # another program
        self._hosts = [host for host in self._hosts if host.name or not host.is_closed]
        self._answer(now)
        for host in self._hosts:
            host.flush()
        return notes

    def lost(self) -> str:
        """Return a sentence on the hosts that are lost while ranks run there; "" if none is."""
        now = time.monotonic()
        texts = []
        for host in self._hosts:
            silent = now - host.heard_at
            if host.running and host.is_closed:
                texts.append(f"{host.description} {_CLOSED}")
            elif host.running and silent > self._timeout:
                texts.append(f"{host.description} has not been heard of for {silent:.0f} s")
        return "; ".join(texts)

    def end(self) -> str:
        """Tell the agents that the job has ended, and wait until they have cleaned up.

        Return a sentence on the hosts whose agents were killed; "" if none was.
        """
        for host in self._hosts:
            host.send(end=True)
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            self.receive()
            now = time.monotonic()
            open_ = [h for h in self._hosts if not h.is_closed and now - h.heard_at < self._timeout]
            if not open_:
                break
            select.select([host.connection for host in open_], [], [], 0.1)
        # One without ranks has connected twice, because the answer came late.
        killed = [
            host for host in self._hosts if host.ranks and host.is_closed and not host.is_over
        ]
        self._listening.close()
        for host in self._hosts:
            host.close()
        self._end_remote_shells()
        return "; ".join(f"{host.description} {_CLOSED}" for host in killed)

    def _end_remote_shells(self) -> None:
        """End the remote shells that the launcher has left: that of a lost host waits for it."""
        mine = f"{VARIABLE}={self.variable}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                # Its command line names the launcher's program on the host; a user's has none.
                line = (process / "cmdline").read_bytes()
                is_of_launcher = any(program in line for program in _ON_HOSTS)
                if is_of_launcher and mine in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)

    def _receive_from(self, host: HostConnection) -> list[Note]:
        try:
            while True:
                data = host.connection.recv(1 << 20)
                host.received += data
                if not data:
                    host.close()
                    break
                if not host.name and len(host.received) > _HELLO_BYTES:
                    break
        except BlockingIOError:
            pass
        except OSError:
            host.close()
        *lines, host.received = host.received.split(b"\n")
        notes: list[Note] = []
        if host.name and lines:
            host.send(heard=len(lines))
        for line in lines:
            try:
                message = json.loads(line)
                if not host.name:
                    self._welcome(host, message)
                else:
                    notes += self._take(host, message)
            except (ValueError, KeyError, TypeError, AttributeError):
                host.close()  # another program
        if not host.name and len(host.received) > _HELLO_BYTES:
            host.close()
        return notes

    def _welcome(self, host: HostConnection, message: dict[str, Any]) -> None:
        if not hmac.compare_digest(str(message["token"]), self._token):
            host.close()
            return
        host.name, host.heard_at = str(message["host"]), time.monotonic()
        host.send(proof=hashlib.sha256(self._token.encode()).hexdigest())

    def _take(self, host: HostConnection, message: dict[str, Any]) -> list[Note]:
        host.heard_at = time.monotonic()
        host.wants |= bool(message.get("wants"))
        for path, (letter, data) in message.get("pages", {}).items():
            name = Path(path).name
            self._origins[name] = host
            self._write(name, shared_page(zlib.decompress(base64.b64decode(data)), letter))
        host.has_answered |= bool(message.get("answers"))
        host.is_over |= bool(message.get("over"))
        notes: list[Note] = [(host, words) for words in message.get("notes", ())]
        for _, words in notes:
            if words[1] == "started":
                host.ranks.add(int(words[0]))
                host.running.add(int(words[0]))
            else:
                host.running.discard(int(words[0]))
            if words[1] in ("ended", "orphaned"):  # its age, because clocks differ between hosts
                words[3] = str(host.heard_at - float(words[3]))
        return notes

    def _write(self, name: str, page: bytes) -> None:
        # In place: the head comes more often than the rows behind it.
        handle = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(handle, page, 0)
            # A head alone: readers expect the size of a page.
            os.truncate(handle, PAGE_BYTES)
        finally:
            os.close(handle)

    # ---------------------------------------------------------------- pages that ranks ask for

    def _answer(self, now: float) -> None:
        """Ask all hosts for their pages if a rank needs them; pass them on when all have come."""
        wanted = self._folder / "wanted"
        open_ = [host for host in self._hosts if host.name and not host.is_closed]
        is_due = self._is_watched and now - self._asked_at > _WATCH_SECONDS
        is_wanted = is_due or wanted.exists() or any(host.wants for host in open_)
        if not self._is_asking and is_wanted:
            self._is_asking, self._asked_at = True, now
            for host in open_:
                host.has_answered = False
                host.send(ask=True)
        if self._is_asking and (
            all(host.has_answered for host in open_) or now - self._asked_at > _ANSWER_SECONDS
        ):
            self._is_asking = False
            wanted.unlink(missing_ok=True)
            for host in open_:
                if host.wants:
                    host.wants = False
                    host.send(pages=self._pages_for(host))

    def _pages_for(self, host: HostConnection) -> dict[str, str]:
        """Return the pages of the ranks of this and all other hosts."""
        pages = {}
        for path in self._folder.glob("rank-*.calls"):
            if self._origins.get(path.name) is not host:
                page = path.read_bytes()
                if path.name not in self._origins:
                    page = shared_page(page)
                pages[path.name] = base64.b64encode(zlib.compress(page, 1)).decode()
        return pages


def _addresses(names: Sequence[str]) -> list[str]:
    """Return the addresses of this machine from which the hosts can be reached."""
    found = []
    for name in names:
        with suppress(OSError):
            for family, kind, protocol, _, address in socket.getaddrinfo(
                name, 1, type=socket.SOCK_DGRAM
            ):
                with suppress(OSError), socket.socket(family, kind, protocol) as end:
                    end.connect(address)  # sends nothing
                    found.append(str(end.getsockname()[0]))
    with suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            found.append(str(address[0]))
    others = [address for address in found if not address.startswith(("127.", "::1"))]
    return list(dict.fromkeys(others))
