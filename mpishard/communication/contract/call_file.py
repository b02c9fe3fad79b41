"""What a rank says of itself in a root world: one memory-mapped file, read without its help.

It holds who the rank is (process, host), how it stands (running, left, reported a failure), what it
waits for, and its last `settings.CALL_LOG_LENGTH` collectives with the lines that called them. The
pages belong to the system: what a rank wrote stays readable after SIGKILL, by the ranks of its node
and by the program that started the job.

A writer stores a row's number last. A reader takes a row only where its number is the expected
one before and after it was copied.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Self

from mpishard import settings
from mpishard.communication.contract.call import HEADER_BYTES, Call
from mpishard.communication.contract.naming import GROUP_BYTES

__all__ = [
    "PLACE_BYTES",
    "CallFile",
    "LoggedCall",
    "MessageWait",
    "RankState",
    "call_files",
    "decode_place",
    "encode_place",
    "own_file",
]

_MAGIC = b"mpishard"
_FORMAT = 2
_ROWS = settings.CALL_LOG_LENGTH
# Fields of the first page, as offsets; text is UTF-8, padded with zero bytes.
# Magic, format, rank, world size, process, its start, launched rank, world number, host.
_STATIC = struct.Struct("=8sqqqqqqq64s")
_STATE, _COUNT, _WAITS, _WAITS_SINCE, _CODE = 128, 136, 144, 152, 160
_MESSAGE_AT, _MESSAGE = 168, struct.Struct(f"=qqq{GROUP_BYTES}s")  # peer, tag, is sent, group
_EXIT_AT, _EXIT_BYTES = 256, 256
_NUMBER, _SECONDS = struct.Struct("=q"), struct.Struct("=d")
_MEMORY_AT, _MEMORY_BYTES = 512, 3576
_SAVES = 4088
_FIRST_ROW = 4096
_PLACE = struct.Struct(f"={GROUP_BYTES}s48sq168s")  # group, method, line, file
_ROW = struct.Struct(f"=q{HEADER_BYTES - 8}sd{_PLACE.size}sq")  # call, time, place, number
_ROW_BYTES = _ROW.size
_FILE_BYTES = _FIRST_ROW + _ROWS * _ROW_BYTES
_ANEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | os.O_CLOEXEC
PLACE_BYTES = _PLACE.size
"""Number of bytes of `encode_place`."""


class RankState(IntEnum):
    """How a rank stands."""

    STARTED = 0
    """In ``init``: the world is not complete yet."""
    RUNNING = 1
    LEFT = 2
    """It left every world in good order."""
    REPORTED = 3
    """It said on stderr why the job ends."""
    LEAVING = 4
    """It calls no more collectives, and waits until the others have left, or were told."""


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One collective of a rank's log.

    ``number`` counts the collectives of the rank, in all its worlds, from 1; ``group`` is the name
    of the world it was called on; ``time`` is that of the call, in seconds since the epoch.
    """

    number: int
    call: Call
    group: str
    time: float


@dataclass(frozen=True, slots=True)
class MessageWait:
    """A message that a rank waits for, or waits for another to take.

    ``peer`` is the other rank, by its number in the root world; ``group`` the name of the world
    that the message belongs to.
    """

    peer: int
    tag: int
    is_send: bool
    group: str

    def __str__(self) -> str:
        if self.is_send:
            text = f"for rank {self.peer} to take a message with tag {self.tag}"
        else:
            text = f"for a message with tag {self.tag} from rank {self.peer}"
        return text + (f" in {self.group}" if self.group else "")


def encode_place(call: Call, group: str) -> bytes:
    """Where ``call`` was made, as `CallFile.record` takes it: worth keeping for the next time."""
    return _PLACE.pack(
        _tail(group, 64), _tail(call.method, 48), call.line, _tail(call.filename, 168)
    )


def decode_place(place: bytes, call: Call) -> str:
    """Give ``call`` the place that `encode_place` wrote down; return the group."""
    group, method, call.line, filename = _PLACE.unpack(place)
    call.filename, call.method = _text(filename), _text(method)
    return _text(group)


def _tail(text: str, size: int) -> bytes:
    # The end of a path says more than its beginning. Half a character is no character.
    data = text.encode(errors="replace")[-size:]
    return data.decode(errors="ignore").encode()


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


class CallFile:
    """One rank's file. The rank itself makes it with `create`; others `open` it, to read.

    Parameters
    ----------
    memory : mmap.mmap
        The file's pages.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        magic, version, *numbers, host = _STATIC.unpack_from(memory, 0)
        if magic != _MAGIC or version != _FORMAT:
            raise ValueError("this is no call log of this version of mpishard")
        rank, world_size, pid, start, launched_rank, world_number = numbers
        self.rank: int = rank
        """Its number in its root world."""
        self.world_size: int = world_size
        self.pid: int = pid
        """Process id of the rank, on `host`."""
        self.launched_rank: int = launched_rank
        """The number of its process among those of the launcher."""
        self.world_number: int = world_number
        """Root worlds that the process entered before this one."""
        self.host: str = _text(host)
        self._start: int = start
        self._is_here = self.host == socket.gethostname() and Path("/proc/self").is_dir()
        self._count = self._read(_COUNT)

    @classmethod
    def create(
        cls,
        path: Path,
        rank: int,
        world_size: int,
        launched_rank: int | None = None,
        world_number: int = 0,
    ) -> Self:
        """The file of this process, which is ``rank``; made anew.

        ``launched_rank`` is its number among those of its launcher, by default ``rank``.

        Raises
        ------
        OSError
            Where ``path`` cannot be written.
        """
        # Who has an earlier file of this name mapped keeps it, and nobody sees half of this one.
        begun = path.with_name(f".{path.name}.{os.getpid()}")
        # What lies there is of an earlier process of this number, or another user's trap.
        begun.unlink(missing_ok=True)
        handle = os.open(begun, _ANEW, 0o600)
        try:
            # Pages that a full file system cannot give are found now, and not by SIGBUS later.
            os.posix_fallocate(handle, 0, _FILE_BYTES)
            memory = mmap.mmap(handle, _FILE_BYTES)
            made = cls._of(memory, rank, world_size, launched_rank, world_number)
            begun.replace(path)
        except OSError:
            begun.unlink()
            raise
        finally:
            os.close(handle)
        if path.parent == settings.job_folder():
            _own.append(made)
        return made

    @classmethod
    def unshared(
        cls, rank: int, world_size: int, launched_rank: int | None = None, world_number: int = 0
    ) -> Self:
        """As `create`, in memory that no other process can read."""
        return cls._of(mmap.mmap(-1, _FILE_BYTES), rank, world_size, launched_rank, world_number)

    @classmethod
    def _of(
        cls,
        memory: mmap.mmap,
        rank: int,
        world_size: int,
        launched_rank: int | None,
        world_number: int,
    ) -> Self:
        pid = os.getpid()
        launched = rank if launched_rank is None else launched_rank
        host = socket.gethostname().encode()[:64]
        numbers = rank, world_size, pid, _start_of(pid) or 0, launched, world_number
        _STATIC.pack_into(memory, 0, _MAGIC, _FORMAT, *numbers, host)
        return cls(memory)

    @classmethod
    def open(cls, path: Path) -> Self:
        """The file of another rank, or of one that is gone.

        Raises
        ------
        OSError
            Where it cannot be read.
        ValueError
            Where it is something else, or not complete yet.
        """
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != _FILE_BYTES:
                raise ValueError(f"{path} is no call log of this version of mpishard")
            return cls(mmap.mmap(file.fileno(), _FILE_BYTES, prot=mmap.PROT_READ))

    # -------------------------------------------------------------------------------- the rank's

    def record(self, sequence: int, description: bytes, place: bytes) -> int:
        """Write down a call: its number on its world, its `Call.description`, `encode_place`.

        Returns its number in the log, from 1.
        """
        start = _FIRST_ROW + self._count % _ROWS * _ROW_BYTES
        self._count = number = self._count + 1
        _ROW.pack_into(self._memory, start, sequence, description, time.time(), place, number)
        _NUMBER.pack_into(self._memory, _COUNT, number)
        return number

    def wait(self, number: int) -> None:
        """Say that the rank waits in the collective ``number`` of its log; 0: for nothing."""
        if number:
            _SECONDS.pack_into(self._memory, _WAITS_SINCE, time.time())
        _NUMBER.pack_into(self._memory, _WAITS, number)

    def wait_for(self, message: MessageWait) -> None:
        """Say that the rank waits for ``message``."""
        group = _tail(message.group, GROUP_BYTES)
        _MESSAGE.pack_into(
            self._memory, _MESSAGE_AT, message.peer, message.tag, message.is_send, group
        )
        self.wait(-1)

    def end(self, state: RankState, code: int = 0) -> None:
        """Say how the rank stands now; with ``REPORTED``, with which code the job ends.

        That is 0 where the rank reported that another one is gone: it does not know how it went.
        """
        _NUMBER.pack_into(self._memory, _CODE, code)
        _NUMBER.pack_into(self._memory, _STATE, state)

    def note_saving(self, saves: bool) -> None:
        """Say whether the rank saves, and ends, when it is told to."""
        _NUMBER.pack_into(self._memory, _SAVES, saves)

    def note_exit(self, call: str) -> None:
        """Say by which ``call`` the rank leaves; empty where it came to its end."""
        data = call.encode(errors="replace")[:_EXIT_BYTES]
        self._memory[_EXIT_AT : _EXIT_AT + _EXIT_BYTES] = data.ljust(_EXIT_BYTES, b"\0")

    def note_shared_memory(self, paths: list[str]) -> None:
        """Say which files in shared memory the rank has mapped: its job's to remove."""
        data = "\n".join(paths).encode()
        if len(data) > _MEMORY_BYTES:
            data = data[:_MEMORY_BYTES].rpartition(b"\n")[0]
        self._memory[_MEMORY_AT : _MEMORY_AT + _MEMORY_BYTES] = data.ljust(_MEMORY_BYTES, b"\0")

    # ------------------------------------------------------------------------------ for all others

    @property
    def state(self) -> RankState:
        """How the rank stood when it last said so."""
        return RankState(self._read(_STATE))

    @property
    def code(self) -> int:
        """The exit code of the job that the rank reported with."""
        return self._read(_CODE)

    @property
    def is_saving(self) -> bool:
        """Whether the rank saves, and ends, when it is told to."""
        return bool(self._read(_SAVES))

    @property
    def exit_call(self) -> str:
        """How the rank left, as ``sys.exit(3)``; empty where it came to its end."""
        return _text(self._memory[_EXIT_AT : _EXIT_AT + _EXIT_BYTES])

    @property
    def count(self) -> int:
        """Number of collectives that the rank has called, in all its worlds."""
        return self._read(_COUNT)

    @property
    def waits(self) -> int:
        """The collective, by its number in the log, that the rank waits in.

        -1 where it waits for a message; 0 where it has not waited for long enough to say so.
        """
        return self._read(_WAITS)

    @property
    def message(self) -> MessageWait:
        """The message that the rank waits for, where `waits` is -1."""
        peer, tag, is_send, group = _MESSAGE.unpack_from(self._memory, _MESSAGE_AT)
        return MessageWait(peer, tag, bool(is_send), _text(group))

    @property
    def waits_since(self) -> float:
        """When the rank began to wait, in seconds since the epoch."""
        seconds: float = _SECONDS.unpack_from(self._memory, _WAITS_SINCE)[0]
        return seconds

    @property
    def shared_memory(self) -> list[str]:
        """Files in shared memory that the rank had mapped."""
        text = _text(self._memory[_MEMORY_AT : _MEMORY_AT + _MEMORY_BYTES])
        return text.split("\n") if text else []

    def calls(self, count: int = _ROWS) -> list[LoggedCall]:
        """The last ``count`` collectives, newest last; not those just being overwritten."""
        last = self.count
        found = (self._call(number) for number in range(max(0, last - min(count, _ROWS)), last))
        return [logged for logged in found if logged is not None]

    def is_alive(self) -> bool:
        """Whether the process of the rank still runs. Asked on its own host; elsewhere True."""
        return not self._is_here or _start_of(self.pid) == self._start

    def _call(self, index: int) -> LoggedCall | None:
        start = _FIRST_ROW + index % _ROWS * _ROW_BYTES
        row = self._memory[start : start + _ROW_BYTES]
        again = self._memory[start + _ROW_BYTES - 8 : start + _ROW_BYTES]
        _, _, seconds, place, number = _ROW.unpack(row)
        if number != index + 1 or _NUMBER.unpack(again)[0] != number:
            return None
        call = Call.decode(bytearray(row))
        return LoggedCall(number, call, decode_place(place, call), seconds)

    def _read(self, field: int) -> int:
        number: int = _NUMBER.unpack_from(self._memory, field)[0]
        return number


def own_file() -> CallFile | None:
    """The newest file of this process in the job's folder; made if there is none yet.

    None if `mpishard run` did not start this process on this machine. A file that is made here is
    of no world: the process is in none that others wait for.
    """
    folder = settings.job_folder()
    if not _own and folder is not None:
        rank, size = settings.launched_rank() or 0, settings.launched_world_size() or 1
        with suppress(
            OSError
        ):  # on another machine; or a full disk, of which the world's will tell
            made = CallFile.create(folder / f"rank-{rank}-{os.getpid()}-0.calls", rank, size)
            made.end(RankState.LEFT)
    return _own[-1] if _own else None


_own: list[CallFile] = []
# A process that a rank forked is no rank.
os.register_at_fork(after_in_child=_own.clear)


def call_files(folder: Path) -> list[CallFile]:
    """The files of a job's ranks in ``folder``; those that cannot be read are left out.

    By the launcher's number of their process, and those of one process by the order of its worlds.
    """
    found = []
    for path in folder.glob("rank-*.calls"):
        try:
            file = CallFile.open(path)
        except (OSError, ValueError):
            continue
        found.append(file)
    return sorted(found, key=lambda file: (file.launched_rank, file.world_number))


def _start_of(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did; None where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
