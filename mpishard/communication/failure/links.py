"""Connections between the nodes of a job, by which ranks see that a process elsewhere is gone.

The ranks of a node read each other's status pages. Between nodes `mpishard run` has agents; a job
that srun or mpiexec started itself has these connections: one from the first rank of each node to
rank 0. The system closes the connections of a process that ends, however it ends.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
import time
from contextlib import suppress

Offer = tuple[list[str], int, str]
"""Names and addresses of rank 0's machine, its port, and a word that only ranks of the job know."""

LEFT, REPORTED = b"L", b"R"
"""Last bytes of a rank that has left in good order, and of one that has said why the job ends."""

_CONNECT_SECONDS = 3.0
_REPORTED_SECONDS = 5.0  # for the launcher to end all ranks after a report
_WORD_BYTES = 16
_RANK_BYTES = 4


class NodeLinks:
    """The connections of one rank. `dead_rank` never waits."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._word = ""
        self._arriving: list[socket.socket] = []
        self._peers: dict[int, socket.socket] = {}
        self._reported: dict[int, float] = {}
        # The watchdog's thread asks for dead ranks while the rank's own one may close connections:
        # one that is closed meanwhile would be taken for that of a dead rank.
        self._lock = threading.RLock()
        # A process that a rank forked would keep the connections open.
        os.register_at_fork(after_in_child=self._close_in_child)

    def offer(self) -> Offer:
        """Listen for the other nodes' ranks; return what they need to connect."""
        self._listener = listener = socket.create_server(("", 0), backlog=1024)
        listener.setblocking(False)
        self._word = secrets.token_hex(_WORD_BYTES)
        name = socket.gethostname()
        with suppress(OSError):
            found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
            return [name, *(str(each[4][0]) for each in found)], self._port(), self._word
        return [name], self._port(), self._word

    def connect(self, rank: int, offer: Offer) -> bool:
        """Connect this rank to rank 0; return whether that was possible."""
        names, port, word = offer
        for name in names:
            with suppress(OSError):
                link = socket.create_connection((name, port), timeout=_CONNECT_SECONDS)
                link.sendall(bytes.fromhex(word) + rank.to_bytes(_RANK_BYTES, "big"))
                link.setblocking(False)
                self._peers[0] = link
                return True
        return False

    def dead_rank(self) -> int | None:
        """Return a rank elsewhere whose process is gone though it has not left, or None."""
        with self._lock:
            return self._dead_rank()

    def _dead_rank(self) -> int | None:
        self._accept()
        for rank, link in tuple(self._peers.items()):
            try:
                last = link.recv(1)
            except BlockingIOError:
                continue
            except OSError:  # reset
                last = b""
            if last == REPORTED:  # that rank ends the job, and this one waits for its end
                self._reported[rank] = time.monotonic()
            if last:
                del self._peers[rank]
                link.close()
            else:
                return rank
        late = time.monotonic() - _REPORTED_SECONDS
        return next((rank for rank, when in self._reported.items() if when < late), None)

    def end(self, last: bytes) -> None:
        """Tell the other ends how this rank ends: `LEFT` or `REPORTED`. Idempotent."""
        with self._lock:
            self._accept()  # those that have never been asked for
            for link in self._peers.values():
                with suppress(OSError):
                    link.send(last)
            self._close()

    def _port(self) -> int:
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        if self._listener is not None:
            with suppress(BlockingIOError):
                while True:
                    link, _ = self._listener.accept()
                    link.setblocking(False)
                    self._arriving.append(link)
        for link in tuple(self._arriving):
            try:
                words = link.recv(_WORD_BYTES + _RANK_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                words = b""
            self._arriving.remove(link)
            if hmac.compare_digest(words[:_WORD_BYTES], bytes.fromhex(self._word)):
                self._peers[int.from_bytes(words[_WORD_BYTES:], "big")] = link
            else:
                link.close()  # a stranger

    def _close_in_child(self) -> None:
        self._lock = threading.RLock()  # A thread that the child has not may hold the other one.
        self._close()

    def _close(self) -> None:
        for link in (*self._arriving, *self._peers.values()):
            link.close()
        if self._listener is not None:
            self._listener.close()
        self._listener = None
        self._arriving.clear()
        self._peers.clear()
        self._reported.clear()
