"""The process on another host that tells `mpishard run` about the ranks of that host.

The first rank agent of a host starts ``host_agent.py FOLDER``. FOLDER holds the status pages of the
host's ranks, and the notes of their agents. This process connects to `mpishard run`, with the port
and the token of the variable MPISHARD_RUN. Each message is a line of JSON, in both directions:

- Notes of the rank agents: a rank was started, has ended, or was killed with its agent.
- Each second the heads of the status pages, as a sign of life, too. The whole pages after the end
  of a rank, if it stands still, and if `mpishard run` asks for them.
- A rank that needs the pages of the other hosts makes the file ``wanted`` here. `mpishard run`
  sends these pages, and this process writes them to FOLDER and removes the file.
- `mpishard run` asks for signals to ranks, and says when the job has ended.

If the connection is lost, or nothing arrives at the other end for MPISHARD_HOST_TIMEOUT, this
process kills the ranks, their agents and the launcher's process, which would wait for ever. At the
end it removes the files that the job has left on this host.

It is in a session of its own, so that it outlives the launcher's processes, and imports only the
standard library.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LOOK_SECONDS = 0.05
_HEARTBEAT_SECONDS = 1.0
_UNANSWERED = 10
"""Messages without an answer after which no more signs of life are sent."""
_HEAD_BYTES = 4096  # of a status page: all but its rows of collectives
_COUNT = slice(128, 136)  # in a status page: the number of collectives
_CONNECT_SECONDS = 2.0
_END_SECONDS = 2.0
"""Time for the launcher's process to end by itself after the job."""

# Not imported, which would load the package and NumPy.
_FILES = runpy.run_path(str(Path(__file__).with_name("shared_memory.py")))


def main() -> None:
    """Serve until the job has ended."""
    folder = Path(sys.argv[1])
    _FILES["hold_folder"](folder)
    _FILES["remove_files_of_dead_jobs"]()
    agent = _HostAgent(folder, *os.environ["MPISHARD_RUN"].split("/"))
    if agent.connect():
        agent.serve()
    else:
        agent.outlast()
    agent.end()


class _HostAgent:
    def __init__(
        self, folder: Path, _name: str, port: str, token: str, timeout: str, _: str, *addresses: str
    ) -> None:
        self._folder, self._port, self._token = folder, int(port), token
        self._timeout = float(timeout)
        # SLURM tells each step from which node srun was called.
        srun = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
        self._addresses = dict.fromkeys([*addresses, *([srun] if srun else [])])
        self._began = time.time()
        self._notes = folder / f"agents-{os.uname().nodename}"
        self._read = 0
        self._connection = socket.socket()
        self._received = b""
        self._ranks: dict[str, list[int]] = {}  # agent, rank and launcher of each rank that runs
        self._launchers: set[int] = set()
        self._session = 0
        self._sent: dict[str, tuple[str, bytes]] = {}  # what was sent last of each page
        self._unanswered = 0
        self._is_over = False

    def connect(self) -> bool:
        """Connect to `mpishard run`; return whether it answered."""
        proof = hashlib.sha256(self._token.encode()).hexdigest()
        hello = {"token": self._token, "host": os.uname().nodename}
        deadline = time.monotonic() + self._timeout
        why = ""
        while time.monotonic() < deadline:
            for address in self._addresses:
                try:
                    self._connection = socket.create_connection(
                        (address, self._port), _CONNECT_SECONDS
                    )
                    self._connection.sendall(json.dumps(hello).encode() + b"\n")
                    # Another machine may have the same address, as those of Docker.
                    self._received = b""
                    while b"\n" not in self._received and (data := self._connection.recv(4096)):
                        self._received += data
                    answer, _, self._received = self._received.partition(b"\n")
                    if json.loads(answer or b"{}").get("proof") == proof:
                        self._watch_connection()
                        null = os.open(os.devnull, os.O_WRONLY)
                        os.dup2(null, 2)
                        return True
                    why = f"{address}: another program answered"
                except (OSError, ValueError) as error:
                    why = f"{address}: {error}"
            time.sleep(_LOOK_SECONDS)
        with suppress(OSError):
            text = f"{os.uname().nodename} cannot reach port {self._port} of the host of "
            text += f"`mpishard run` ({why}): the ends of its ranks are not reported"
            os.write(2, f"mpishard run: {text}\n".encode())
        return False

    def _watch_connection(self) -> None:
        """Let the system close the connection if nothing arrives at the other end."""
        # Not by messages from `mpishard run`, which the user may suspend.
        for level, name, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._timeout)),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        ):
            self._connection.setsockopt(level, name, value)
        self._connection.settimeout(None)

    # --------------------------------------------------------------------------------- the ranks

    def serve(self) -> None:
        """Report until the job has ended or the connection is lost."""
        beat_at = 0.0
        with suppress(OSError):  # the connection is lost
            while not self._is_over:
                is_readable = select.select([self._connection], [], [], _LOOK_SECONDS)[0]
                if is_readable and not self._receive():
                    return
                notes = self._new_notes()
                now = time.monotonic()
                is_beat = now - beat_at > _HEARTBEAT_SECONDS
                if is_beat:
                    beat_at = now
                    notes += self._vanished()
                wants = (self._folder / "wanted").exists()
                # If `mpishard run` is suspended, messages would fill the connection.
                is_beat = is_beat and self._unanswered < _UNANSWERED
                if notes or is_beat or wants:
                    has_end = any(note[1] != "started" for note in notes)
                    self._send(
                        notes=notes, wants=wants, pages=self._pages() if has_end else self._heads()
                    )

    def outlast(self) -> None:
        """Wait for the end of the ranks, which may do well without a connection."""
        self._is_over = True
        self._new_notes()
        while self._ranks:
            time.sleep(_HEARTBEAT_SECONDS)
            self._new_notes()
            self._vanished()

    def _new_notes(self) -> list[list[str]]:
        notes = []
        with suppress(FileNotFoundError), self._notes.open("rb") as file:
            file.seek(self._read)
            for line in file.read().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                rank, word, *values = line.decode().split()
                if word == "started":
                    agent = int(values[0])
                    self._ranks[rank] = [agent, int(values[1])]
                    self._note_launchers(_parent(agent))
                elif rank in self._ranks:
                    del self._ranks[rank]
                if word in ("ended", "orphaned"):
                    # Clocks differ between hosts, ages do not.
                    values[1] = str(time.monotonic() - float(values[1]))
                notes.append([rank, word, *values])
        return notes

    def _note_launchers(self, process: int) -> None:
        """Note the launcher's processes above an agent, and the session of ssh above them."""
        while _is_launcher(process):
            self._launchers.add(process)
            process = _parent(process)
        if _name(process).startswith("sshd"):
            self._session = process

    def _vanished(self) -> list[list[str]]:
        """Return notes on the ranks that were killed together with their agents."""
        gone = [
            rank
            for rank, processes in self._ranks.items()
            if not any(_letter(process) not in "ZX" for process in processes)
        ]
        if gone and self._notes.stat().st_size > self._read:
            return []  # their agents have written a last line
        for rank in gone:
            del self._ranks[rank]
        return [[rank, "gone"] for rank in gone]

    # --------------------------------------------------------------------------------- the pages

    def _own_pages(self) -> list[tuple[Path, str]]:
        """Return the page of each rank of this host, and the state letter of its process."""
        # "rank-RANK-PROCESS-WORLD.calls"; the letter is added by `mpishard run` to copies.
        own = [path for path in self._folder.glob("rank-*.calls") if path.name not in self._copies]
        return [(path, _letter(int(path.name.split("-")[2]))) for path in own]

    _copies: frozenset[str] = frozenset()

    def _pages(self) -> dict[str, list[str]]:
        return {
            path.name: [letter, _packed(path.read_bytes())] for path, letter in self._own_pages()
        }

    def _heads(self) -> dict[str, list[str]]:
        """Return the heads that have changed, and whole pages of ranks that stand still.

        If these wait because the network fails, nobody can ask for their pages later.
        """
        changed = {}
        for path, letter in self._own_pages():
            page = path.read_bytes()
            before = self._sent.get(path.name, ("", b""))
            stands_still = before[1][_COUNT] == page[_COUNT]
            content = page if stands_still else page[:_HEAD_BYTES]
            if before != (letter, content):
                self._sent[path.name] = (letter, content)
                changed[path.name] = [letter, _packed(content)]
        return changed

    # ------------------------------------------------------------------------------- the messages

    def _send(self, **message: object) -> None:
        self._unanswered += 1
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self) -> bool:
        """Obey the messages that have come; return False at the end of the connection."""
        data = self._connection.recv(1 << 20)
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))
        return bool(data)

    def _obey(self, message: dict[str, Any]) -> None:
        if "signal" in message:
            process, number = message["signal"]
            # Only to ranks of this job.
            if any(process == rank for _, rank in self._ranks.values()) and _receives(
                process, number
            ):
                with suppress(ProcessLookupError):
                    os.kill(process, number)
        if message.get("ask"):
            self._send(notes=self._new_notes(), pages=self._pages(), answers=True)
        if "pages" in message:
            self._copies |= set(message["pages"])
            for name, page in message["pages"].items():
                _write_in_place(self._folder / Path(name).name, _unpacked(page))
            (self._folder / "wanted").unlink(missing_ok=True)
        if "heard" in message:
            self._unanswered -= message["heard"]
        if message.get("end"):
            self._is_over = True

    # ------------------------------------------------------------------------------------ the end

    def end(self) -> None:
        """End all that still runs of the job, and remove its files."""
        self._new_notes()
        for _ in range(2):  # the second time with those that have been started meanwhile
            for agent, rank in self._ranks.values():
                _kill(rank)
                _kill(agent)
            self._new_notes()
        deadline = time.monotonic() + (_END_SECONDS if self._is_over else 0)
        while any(map(_is_launcher, self._launchers)) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        for launcher in filter(_is_launcher, self._launchers):
            _kill(launcher)
        time.sleep(_LOOK_SECONDS)
        with suppress(OSError):
            self._send(notes=[], pages=self._pages(), over=True)
        if not self._is_over:
            self._end_session()
        _FILES["remove_files_of_dead_jobs"](self._began)
        _FILES["remove_folder"](self._folder)
        with suppress(OSError):
            self._connection.close()

    def _end_session(self) -> None:
        """End the session of ssh, which may wait for an answer of the other end for minutes."""
        deadline = time.monotonic() + _END_SECONDS
        while _name(self._session).startswith("sshd"):
            if time.monotonic() > deadline:
                # It may serve other programs of the user as well.
                with suppress(OSError):
                    children = Path(f"/proc/{self._session}/task/{self._session}/children")
                    if not children.read_text():
                        os.kill(self._session, signal.SIGTERM)
                return
            time.sleep(_LOOK_SECONDS)


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def _write_in_place(path: Path, page: bytes) -> None:
    """Write without cutting the file off: a rank that has mapped it would end by SIGBUS."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(handle, page, 0)
    finally:
        os.close(handle)


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def _stat(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def _letter(process: int) -> str:
    return _stat(process)[0]


def _parent(process: int) -> int:
    return int(_stat(process)[1])


def _is_launcher(process: int) -> bool:
    """Return whether the process is one of an MPI launcher, and no other one with its number."""
    name = _name(process)
    return _letter(process) not in "ZX" and name.startswith(("hydra_pmi", "prte", "pmi_proxy"))


def _name(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


def _receives(process: int, number: int) -> bool:
    """Return whether to send it the signal: SIGQUIT only with a handler, as it ends others."""
    if number != signal.SIGQUIT:
        return True
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _kill(process: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
