"""The flight recorder: one memory-mapped status page per rank and root world.

A page holds the identity of the rank (process, host), its state, and the collective or message for
which it waits. It has the last `settings.CALL_LOG_LENGTH` collectives, with the lines that called
them.
`RankRecord` is its content at one moment. `StatusPage` writes the page of this rank. `StatusReader`
reads the pages of all ranks that can be read from here. It needs no help of these ranks, which may
compute, sleep or be stuck. The kernel keeps the pages, so the ranks of the node and `mpishard run`
can read them after SIGKILL.

A writer stores the number of a row last. A reader takes a row only if its number is the expected
one both before and after the row was copied.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import re
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeVar

from mpishard.base import settings
from mpishard.communication.contract.call import GROUP_BYTES, HEADER_BYTES, Call, MessageWait

_Function = TypeVar("_Function", bound=Callable[..., object])

_MAGIC = b"mpishard"
_FORMAT = 5
_ROWS = settings.CALL_LOG_LENGTH
# Fields of the first 4096 bytes, as offsets; text is UTF-8, padded with zero bytes.
# Magic, format, rank, world size, launched rank, world number, process, its start, host.
_IDENTITY = struct.Struct("=8sqqqqqqq64s")
_COUNT, _CODE, _STATE, _SEEN_AT, _WAIT_AT = 128, 136, 144, 152, 160
# Time, number of the collective or -1 for a message: its peer, tag, is sent, group. 0: no wait.
_WAIT = struct.Struct(f"=dqqqq{GROUP_BYTES}s")
_WAITS = _WAIT_AT + 8
_SAVES = struct.Struct("=qqq")  # whether the rank saves; fewest and most ranks that may go on
_SAVES_AT = 504
_MEMORY_AT, _MEMORY_BYTES = 528, 3568
_FIRST_ROW = 4096
_NUMBER = struct.Struct("=q")
_PLACE = struct.Struct(f"={GROUP_BYTES}s48sq168s")  # group, method, line, file
PLACE_BYTES = _PLACE.size
"""Number of bytes of `encode_place`."""
# Sequence number and description of the call, time, place, number of the row.
_ROW = struct.Struct(f"=q{HEADER_BYTES - 8}sd{PLACE_BYTES}sq")
PAGE_BYTES = _FIRST_ROW + _ROWS * _ROW.size
"""Size of the file of a status page."""
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | os.O_CLOEXEC

WANTED = "wanted"
"""File in a job's folder by which a rank asks for the pages of other hosts."""
_REFRESH_SECONDS, _GLANCE_SECONDS = 3.0, 0.02
_PLACES_KEPT = 1024  # in the cache of `StatusPage.record`, which is cleared when it is full
PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
"""The folder of this package, with a separator at its end."""
# The user's line is not in files with these paths: contextlib, because of this package's context
# managers, and frameworks that call this package back.
_not_of_users: tuple[str, ...] = (contextlib.contextmanager.__code__.co_filename,)
_called_as: dict[CodeType, str] = {}

_world_numbers = itertools.count()
"""Counts the root worlds of this process."""

_logger = logging.getLogger("mpishard")


class RankState(IntEnum):
    """The state of a rank that it has written to its page."""

    STARTED = 0
    """In ``init``: the world is not complete yet."""
    RUNNING = 1
    LEFT = 2
    """It left every world in good order."""
    REPORTED = 3
    """It has reported on stderr why the job ends."""
    LEAVING = 4
    """It calls no more collectives, and waits until the others have left or were notified."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The content of one rank's status page at one moment.

    Parameters
    ----------
    rank : int
        Its number in the root world.
    state : RankState, optional
        None if the rank has not called ``init``, or if ``is_known`` is False.
    is_known : bool
        Whether its page can be read from here.
    is_alive : bool
        Whether its process runs, as far as is known: True for a process of another host.
    is_stopped : bool
        Whether its process is stopped, by SIGSTOP, Ctrl-Z or a debugger.
    calls : tuple of Call
        Its last collectives in all its worlds, newest last.
    waits : Call or MessageWait, optional
        The collective or message for which it waits; None if it waits for nothing, or for a
        collective that its log does not hold any more.
    waited : float
        Seconds since it began to wait; 0 if it does not wait.
    world_size, launched_rank, world_number : int
        Size of the root world; number of the process among those of the launcher; number of root
        worlds that the process entered before this one.
    pid, host : int, str
        The process of the rank.
    count : int
        Number of collectives that it has called, in all its worlds.
    code : int
        The exit code of the job in the rank's report; 0 if the rank does not know it.
    is_saving : bool
        Whether it saves a checkpoint, and ends, on a preemption notice.
    shared_memory : tuple of str
        Files in shared memory that it had mapped.
    resumable_by : tuple of int
        The fewest and the most ranks that can resume from its checkpoint; (0, 0) if not known.
    """

    rank: int
    state: RankState | None = None
    is_known: bool = True
    is_alive: bool = True
    is_stopped: bool = False
    calls: tuple[Call, ...] = ()
    waits: Call | MessageWait | None = None
    waited: float = 0.0
    world_size: int = 0
    launched_rank: int = 0
    world_number: int = 0
    pid: int = 0
    host: str = ""
    count: int = 0
    code: int = 0
    is_saving: bool = False
    shared_memory: tuple[str, ...] = ()
    resumable_by: tuple[int, int] = (0, 0)

    @property
    def last(self) -> Call | None:
        """Its last collective in any world; None if it has called none."""
        return self.calls[-1] if self.calls else None

    @property
    def has_left(self) -> bool:
        """Whether it calls no collective any more, in good order."""
        return self.state in (RankState.LEFT, RankState.LEAVING)

    def calls_of(self, group: str) -> list[Call]:
        """Return its last collectives in the world with the label ``group``."""
        return [call for call in self.calls if call.group == group]

    def last_of(self, group: str) -> int:
        """Return the number of its last collective in the world ``group``; 0 if none is known."""
        return max((call.sequence for call in self.calls_of(group)), default=0)


class StatusPage:
    """The status page of one rank in one root world, and in the groups split off it.

    Only its rank writes it. The page is in private memory of this process until `publish`.

    Parameters
    ----------
    rank, world_size : int
        The rank's number in the root world, and the size of that world.
    launched_rank : int, optional
        The number of its process among those of the launcher; default: ``rank``.
    world_number : int
        Root worlds that the process entered before this one.
    """

    def __init__(
        self, rank: int, world_size: int, launched_rank: int | None = None, world_number: int = 0
    ) -> None:
        self.rank = rank
        launched, pid = rank if launched_rank is None else launched_rank, os.getpid()
        # The name has the process id and a number, because a process may enter several root worlds,
        # and may start processes that inherit the job's folder.
        self.name = f"rank-{launched}-{pid}-{world_number}.calls"
        """The name of its file, or of its memory without a file."""
        self.count = 0
        """Number of collectives so far, in all worlds."""
        self.awaited: Call | MessageWait | None = None
        """The collective or message for which the rank waits now."""
        self._memory = mmap.mmap(-1, PAGE_BYTES)
        # By code object, instruction, called function and group: a loop makes the same calls many
        # times.
        self._places: dict[object, tuple[object, str, int, str, bytes]] = {}
        self._calls_read: tuple[Call, ...] = ()
        _IDENTITY.pack_into(
            self._memory,
            0,
            _MAGIC,
            _FORMAT,
            rank,
            world_size,
            launched,
            world_number,
            pid,
            _process(pid)[1],
            socket.gethostname().encode()[:64],
        )

    def publish(self, folder: Path | None) -> Path:
        """Move the page to memory that other processes can open from now on; return its path.

        Parameters
        ----------
        folder : Path, optional
            The folder for a file that outlives the process. Without it the page is in anonymous
            memory, which the system frees when the last process has closed it.

        Raises
        ------
        OSError
            If the memory or the file cannot be created.
        """
        if folder is None:
            handle = os.memfd_create(self.name)
            path = Path(f"/proc/{os.getpid()}/fd/{handle}")
        else:
            path = folder / self.name
            # A file of this name is that of an earlier process with the same id. Or another user
            # has put it there, and the page must not be written through that file or link.
            path.unlink(missing_ok=True)
            handle = os.open(path, _CREATE, 0o600)
        weakref.finalize(self, os.close, handle)
        # Allocated now, so that a full file system fails here and not later by SIGBUS.
        os.posix_fallocate(handle, 0, PAGE_BYTES)
        memory = mmap.mmap(handle, PAGE_BYTES)
        # The magic is written last, because readers take a file with it for a complete page.
        memory[8:] = self._memory[8:]
        memory[:8] = self._memory[:8]
        self._memory = memory
        if folder is not None and folder == settings.job_folder():
            _own[:] = [self]
        return path

    def record(self, call: Call, frame: FrameType | None) -> None:
        """Number ``call``, and record it with the nearest frame of the user's code.

        Parameters
        ----------
        call : Call
            Gets its ``filename``, ``line``, ``number`` and ``method``: the function of this package
            that the user called there, unless that is the collective itself.
        frame : frame, optional
            The innermost frame to look at; with None the place stays as ``call`` has it.
        """
        frame, called = user_frame(frame)
        if frame is None:
            place = encode_place(call)
        else:
            # To compute a line number is slow, so places are cached. The cache holds the code
            # objects, so that no other code gets their ids.
            code = frame.f_code
            inner = None if called is None else called.f_code
            key = id(code), frame.f_lasti, id(inner), call.group
            known = self._places.get(key)
            if known is None:
                if len(self._places) == _PLACES_KEPT:
                    self._places.clear()
                call.filename, call.line = code.co_filename, frame.f_lineno
                call.method = "" if called is None else _method(called)
                place = encode_place(call)
                self._places[key] = (code, inner), call.filename, call.line, call.method, place
            else:
                _, call.filename, call.line, call.method, place = known
        start = _FIRST_ROW + self.count % _ROWS * _ROW.size
        self.count = call.number = number = self.count + 1
        # The row is written before the count, because a reader takes ``count`` rows.
        _ROW.pack_into(
            self._memory, start, call.sequence, call.description, time.time(), place, number
        )
        _NUMBER.pack_into(self._memory, _COUNT, number)

    def wait(self, awaited: Call | MessageWait) -> None:
        """Record the call or message for which the rank waits. Short waits need no record."""
        self.awaited = awaited
        # A message has no row in the call log, so its facts stand in the page itself.
        if isinstance(awaited, MessageWait):
            group = _tail(awaited.group, GROUP_BYTES)
            what = -1, awaited.peer, awaited.tag, awaited.is_send, group
        else:
            what = awaited.number, 0, 0, False, b""
        _WAIT.pack_into(self._memory, _WAIT_AT, time.time(), *what)

    def go_on(self) -> None:
        """Record that the wait is over."""
        self.awaited = None
        # Only the number: a reader that finds 0 does not look at the other fields.
        _NUMBER.pack_into(self._memory, _WAITS, 0)

    def end(self, state: RankState, code: int = 0) -> None:
        """Record the new state of the rank.

        ``code`` is the exit code of the job, if ``state`` is ``REPORTED``. It is 0 if the rank
        reported that another process is gone, whose code it does not know.
        """
        # The code before the state: a reader that sees the state also finds its code.
        _NUMBER.pack_into(self._memory, _CODE, code)
        _NUMBER.pack_into(self._memory, _STATE, state)

    def note_saving(self, saves: bool, ranks: tuple[int, int] = (0, 0)) -> None:
        """Record whether the rank saves a checkpoint, and ends, on a preemption notice.

        ``ranks`` are the fewest and the most ranks that can resume from that checkpoint; (0, 0) if
        they are not known.
        """
        _SAVES.pack_into(self._memory, _SAVES_AT, saves, *ranks)

    def note_shared_memory(self, paths: Sequence[str]) -> None:
        """Record the files in shared memory that the job must remove after the rank."""
        lines = "".join(f"{path}\n" for path in paths).encode()[:_MEMORY_BYTES]
        lines = lines[: lines.rfind(b"\n") + 1]  # without a path that was cut short
        self._memory[_MEMORY_AT:_FIRST_ROW] = lines.ljust(_MEMORY_BYTES, b"\0")

    def read(self) -> RankRecord:
        """Return the content of the page. Thread-ranks also call it on each other's pages."""
        # Calls that were read before are kept: a test suite may read every page hundreds of times.
        self._calls_read = calls = _calls(self._memory, self._calls_read)
        return _read(self._memory, calls)


class StatusReader:
    """The pages of one root world's ranks, as far as they can be read from this rank's node.

    The page of this rank is in the job's folder, if `mpishard run` made one. `mpishard run` reads
    the pages when the job has ended, and removes them. Otherwise, and in a world of one, the page
    is in anonymous memory, so that nothing stays behind however the job ends. If neither can be
    created the job goes on, and only this rank can read its page.

    Parameters
    ----------
    rank, world_size : int
        This rank of the root world, and its size. Nothing is communicated. Other ranks can read a
        page in the job's folder from now on, so also in ``init``.
    launched_ranks : sequence of int, optional
        The number of each rank's process among those of the launcher; default: its rank.
    """

    def __init__(
        self, rank: int, world_size: int, launched_ranks: Sequence[int] | None = None
    ) -> None:
        self._launched = list(launched_ranks or range(world_size))
        self.page = StatusPage(rank, world_size, self._launched[rank], next(_world_numbers))
        """The page of this rank."""
        self._paths: Sequence[Path | str] = ()  # of all ranks, after `share`
        self._pages: dict[int, mmap.mmap] = {}  # of the node's other ranks
        self._calls_read: dict[int, tuple[Call, ...]] = {}
        # The node's other ranks whose process can be seen, beginning after this rank.
        self._ring: list[int] = []
        self._ring_turn = 0
        folder = settings.job_folder()
        # The job's folder may not exist on this node.
        has_folder = folder is not None and folder.is_dir() and world_size > 1
        self._folder = folder if has_folder else None
        self._path: Path | str  # the path of the page, or the reason why it has none
        try:
            self._path = self.page.publish(self._folder)
        except (OSError, AttributeError) as error:  # no memfd_create on this system
            self._path = str(error)

    def share(
        self, exchange: Callable[[Path | str], Sequence[Path | str]], ranks: Sequence[int]
    ) -> None:
        """Open the pages of this node's other ranks. Collective.

        Parameters
        ----------
        exchange : callable
            Gives every rank of the root world the values of all, in rank order.
        ranks : sequence of int
            The world rank of each rank of this node.
        """
        # All ranks exchange, also those of other nodes, because the exchange is collective.
        self._paths = exchange(self._path)
        failed = [(r, path) for r, path in enumerate(self._paths) if isinstance(path, str)]
        if failed and self.page.rank == 0:
            _logger.warning(
                "reports on ranks that fail or wait will be incomplete: rank %d could not share "
                "its status page (%s). Training goes on",
                *failed[0],
            )
        here = {r: path for r in ranks if isinstance(path := self._paths[r], Path)}
        for rank in here.keys() - {self.page.rank}:
            # A container may have process ids of its own: /proc/PID is then another process.
            with contextlib.suppress(OSError, ValueError):
                self._pages[rank] = _open(here[rank], rank)
        # A process that looks dead already is of another container, whose processes cannot be seen.
        seen = [rank for rank, page in self._pages.items() if _read(page, ()).is_alive]
        self._ring = sorted(seen, key=lambda rank: (rank < self.page.rank, rank))

    def refresh(self) -> None:
        """Have the pages of other hosts copied to the job's folder, if `mpishard run` has any."""
        if self._folder is None or not settings.has_other_hosts():
            return
        wanted = self._folder / WANTED
        deadline = time.monotonic() + _REFRESH_SECONDS
        with contextlib.suppress(OSError):
            wanted.touch()
            while wanted.exists() and time.monotonic() < deadline:
                time.sleep(_GLANCE_SECONDS)

    def records(self) -> list[RankRecord]:
        """Return one record of each rank of the root world, in rank order."""
        found: dict[int, RankRecord] = {}
        size = len(self._launched)
        if not self._paths:
            for record in stopped_siblings():
                if record.rank in self._launched:
                    rank = self._launched.index(record.rank)
                    found[rank] = replace(record, rank=rank)
            # The paths are not exchanged yet, so pages are found by world size and process. Records
            # are sorted by world: the newest replaces earlier ones. A page in another state is
            # that of a complete world, which is not the one that this rank waits for.
            states = RankState.STARTED, RankState.REPORTED
            pages = () if self._folder is None else records_in(self._folder)
            for record in pages:
                is_of_such = record.state in states and record.world_size == size
                if is_of_such and self._launched[record.rank] == record.launched_rank:
                    found[record.rank] = record
        for rank, path in enumerate(self._paths):
            with contextlib.suppress(OSError, ValueError):  # of a node without the job's folder
                if rank in self._pages:
                    calls = _calls(self._pages[rank], self._calls_read.get(rank, ()))
                    self._calls_read[rank] = calls
                    found[rank] = _read(self._pages[rank], calls)
                elif isinstance(path, Path) and self._folder is not None:
                    # In this folder, too, are the pages of other hosts, after `refresh`.
                    found[rank] = _read(_open(self._folder / path.name, rank))
        found[self.page.rank] = self.page.read()
        # A rank without a page in the job's folder has not called init.
        is_known = self._folder is not None and not self._paths
        return [found.get(r) or RankRecord(r, is_known=is_known) for r in range(size)]

    def dead_rank(self) -> int | None:
        """Return a rank of this node whose process is gone though it has not left, or None.

        Each rank watches the next one of its node, in a ring, and skips those that have left. A
        stopped rank watches none, so each rank also checks one more rank, another one each time.
        """
        left = RankState.LEFT
        watched = [rank for rank in self._ring if _number(self._pages[rank], _STATE) != left]
        self._ring_turn += 1
        # Two and not all: on a node of many ranks each would otherwise read all pages every half
        # second.
        two = [*watched[:1], *watched[self._ring_turn % max(1, len(watched)) :][:1]]
        return next((rank for rank in two if not _read(self._pages[rank], ()).is_alive), None)

    def claim_report(self, code: int) -> bool:
        """Return whether no rank has reported the end of the job yet; then record that this has.

        ``code`` is the exit code. With a job's folder the pages of all its root worlds count,
        because these end together; without one the pages of this world on the node. Two ranks that
        call it within the same millisecond may both get True.
        """
        records = [self.page.read(), *(_read(page, ()) for page in self._pages.values())]
        if self._folder is not None:
            records += records_in(self._folder, with_calls=False)
        if any(record.state is RankState.REPORTED for record in records):
            return False
        self.page.end(RankState.REPORTED, code)
        return True


# ------------------------------------------------------------------------------------ reading pages


def records_in(folder: Path, *, with_calls: bool = True) -> list[RankRecord]:
    """Return the records of the pages of a job in ``folder``: see `records_at`."""
    return records_at(folder.glob("rank-*.calls"), with_calls=with_calls)


def records_at(paths: Iterable[Path], *, with_calls: bool = True) -> list[RankRecord]:
    """Return the records of the pages of a job, without those that cannot be read.

    They are sorted by the launcher's number of the process, and then by the order in which the
    process entered its worlds.
    """
    records = []
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            records.append(_read(_open(path), None if with_calls else ()))
    return sorted(records, key=lambda record: (record.launched_rank, record.world_number))


def shared_page(page: bytes, letter: str = "") -> bytes:
    """Return a page for the ranks of other hosts, with the state of its process.

    Parameters
    ----------
    page : bytes
        Its content, or the first 4096 bytes.
    letter : str
        State of the process as in proc(5), ``X`` if it is gone; "" looks at the process, which must
        be one of this host.
    """
    pid, start = _IDENTITY.unpack_from(page)[6:8]
    found, began = (letter.encode(), start) if letter else _process(pid)
    return page[:_SEEN_AT] + (found if began == start else b"X") + page[_SEEN_AT + 1 :]


def pages_beside(file: Path) -> list[Path]:
    """Return the pages, on this machine, of the jobs that have a process with ``file`` open.

    This finds the ranks that a plain ``mpiexec`` started, whose pages are in no folder. The
    processes of a job on one machine have the same parent.
    """
    name = str(file.resolve())
    pages: dict[str, list[Path]] = {}  # by the parent
    parents = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process is another user's, or has ended
            # The name of the process, in parentheses, may contain spaces and parentheses itself.
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            for path in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # the file was closed meanwhile
                    link = str(path.readlink())
                    if _PAGE_LINK.match(link):
                        pages.setdefault(parent, []).append(path)
                    elif link == name:
                        parents.add(parent)
    return [page for parent in parents for page in pages.get(parent, ())]


_PAGE_LINK = re.compile(r"/memfd:rank-\d+-\d+-\d+\.calls ")


def own_page() -> StatusPage | None:
    """Return the newest page of this process in the job's folder; make one if there is none.

    Return None if `mpishard run` did not start this process on this machine. A page that is made
    here belongs to no world. Its state is ``LEFT``, because no rank waits for this one.
    """
    folder = settings.job_folder()
    if not _own and folder is not None:
        page = StatusPage(settings.launched_rank() or 0, settings.launched_world_size() or 1)
        page.end(RankState.LEFT)
        with contextlib.suppress(OSError):  # another machine; or a full disk
            page.publish(folder)
    return _own[-1] if _own else None


_own: list[StatusPage] = []
# A process that a rank forked is no rank, and has no page.
os.register_at_fork(after_in_child=_own.clear)


def stopped_siblings() -> list[RankRecord]:
    """Return records of the stopped processes that this process's launcher started here.

    Ranks in ``init`` need it, because they cannot read each other's pages yet. ``rank`` is the
    number of the process among those of the launcher, and ``is_known`` is False.
    """
    # Under `mpishard run` the parent is this rank's agent, and each agent has noted its rank:
    # "RANK started AGENT PROCESS".
    notes = (settings.job_folder() or Path("/nowhere")) / f"agents-{socket.gethostname()}"
    children = Path(f"/proc/{os.getppid()}/task").glob("*/children")
    found = []
    with contextlib.suppress(OSError):  # a process may end meanwhile
        if notes.is_file():
            pids = re.findall(r"^\S+ started \S+ (\d+)", notes.read_text(), re.MULTILINE)
        else:
            pids = [pid for path in children for pid in path.read_text().split()]
        for pid in map(int, pids):
            if _process(pid)[0] in (b"T", b"t"):
                text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
                rank = settings.launched_rank(dict(re.findall("([^=\0]+)=([^\0]*)", text)))
                if rank is not None:
                    found.append(RankRecord(rank, is_known=False, is_stopped=True, pid=pid))
    return found


def _open(path: Path, rank: int | None = None) -> mmap.mmap:
    # Only a file of the size of a page is opened: to open another process's pipe may block.
    if path.stat().st_size == PAGE_BYTES:
        with path.open("rb") as file:
            page = mmap.mmap(file.fileno(), PAGE_BYTES, prot=mmap.PROT_READ)
        magic, version, found, *_ = _IDENTITY.unpack_from(page)
        if (magic, version) == (_MAGIC, _FORMAT) and rank in (None, found):
            return page
    raise ValueError(f"{path} is no status page of this version of mpishard")


def _read(page: mmap.mmap, calls: tuple[Call, ...] | None = None) -> RankRecord:
    """Return the content of ``page``; the last collectives are read unless they are given."""
    _, _, rank, world_size, launched, world_number, pid, start, host = _IDENTITY.unpack_from(page)
    since, number, peer, tag, is_send, group = _WAIT.unpack_from(page, _WAIT_AT)
    calls = _calls(page) if calls is None else calls
    waits: Call | MessageWait | None
    waits = next((call for call in calls if call.number == number), None)
    if number < 0:
        waits = MessageWait(peer, tag, bool(is_send), _text(group))
    saves, *ranks = _SAVES.unpack_from(page, _SAVES_AT)
    # A process id means nothing on another host: there its agent looks at it.
    seen = page[_SEEN_AT : _SEEN_AT + 1].rstrip(b"\0")
    is_here = not seen and _text(host) == socket.gethostname()
    letter, began = _process(pid) if is_here else (seen or b"R", start)
    # The start time, because the system may have given the process id to another process.
    is_alive = began == start and letter not in (b"Z", b"X")
    return RankRecord(
        rank,
        RankState(_number(page, _STATE)),
        True,
        is_alive,
        is_alive and letter in (b"T", b"t"),
        calls,
        waits,
        max(0.0, time.time() - since) if number else 0.0,
        world_size,
        launched,
        world_number,
        pid,
        _text(host),
        _number(page, _COUNT),
        _number(page, _CODE),
        bool(saves),
        tuple(_text(page[_MEMORY_AT:_FIRST_ROW]).splitlines()),
        (ranks[0], ranks[1]),
    )


def _calls(page: mmap.mmap, known: Sequence[Call] = ()) -> tuple[Call, ...]:
    """Return the last collectives, newest last, without those that are just being overwritten.

    Those in ``known`` were read before, and are not read again.
    """
    count = _number(page, _COUNT)
    # Older ones have been overwritten in the page.
    kept = [call for call in known if call.number > count - _ROWS]
    first = kept[-1].number if kept else max(0, count - _ROWS)
    found = (_call_at(page, index) for index in range(first, count))
    return (*kept, *(call for call in found if call is not None))


def _call_at(page: mmap.mmap, index: int) -> Call | None:
    start = _FIRST_ROW + index % _ROWS * _ROW.size
    # Copied in one piece, so that the owner has little time to write in between.
    row = page[start : start + _ROW.size]
    _, _, seconds, place, number = _ROW.unpack(row)
    # The number, last in a row, is read again after the row: the owner may be overwriting it.
    if not number == index + 1 == _number(page, start + _ROW.size - _NUMBER.size):
        return None
    call = Call.decode(row)
    call.number, call.time = number, seconds
    decode_place(place, call)
    return call


def _number(page: mmap.mmap, at: int) -> int:
    number: int = _NUMBER.unpack_from(page, at)[0]
    return number


def encode_place(call: Call) -> bytes:
    """Return the world and the line of ``call`` in `PLACE_BYTES` bytes."""
    group, method = _tail(call.group, GROUP_BYTES), _tail(call.method, 48)
    return _PLACE.pack(group, method, call.line, _tail(call.filename, 168))


def decode_place(place: bytes, call: Call) -> None:
    """Set the world and the line of ``call`` from the bytes of `encode_place`."""
    group, method, call.line, filename = _PLACE.unpack(place)
    call.group, call.method, call.filename = _text(group), _text(method), _text(filename)


def _tail(text: str, size: int) -> bytes:
    # The end is kept, because that of a path says more than its beginning. A cut may leave a part
    # of a character, which is dropped.
    data = text.encode(errors="replace")[-size:]
    return data.decode(errors="ignore").encode()


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


def _process(pid: int) -> tuple[bytes, int]:
    """Return a process's state letter and start in clock ticks since boot; -1 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return b"", -1
    return fields[0], int(fields[19])


def skip_frames_of(framework: str) -> None:
    """Report the user's line, and not the framework's, for calls that a framework makes.

    Parameters
    ----------
    framework : str
        The folder of a package that calls functions of this one, such as PyTorch.
    """
    global _not_of_users  # noqa: PLW0603
    if framework not in _not_of_users:
        _not_of_users = (*_not_of_users, framework)


def user_frame(frame: FrameType | None) -> tuple[FrameType | None, FrameType | None]:
    """Return the nearest frame of the user's code, and the frame of this package that it called.

    ``frame`` is the innermost frame to look at.
    """
    called: FrameType | None = None
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename.startswith(PACKAGE):
            called = frame
        elif not filename.startswith(_not_of_users):
            break
        frame = frame.f_back
    return frame, called


def called_as(name: str) -> Callable[[_Function], _Function]:
    """Return a decorator for a function that a framework calls back; reports call it ``name``."""

    def note(function: _Function) -> _Function:
        _called_as[function.__code__] = name
        return function

    return note


def _method(frame: FrameType) -> str:
    """Return the user's name for the function of ``frame``; empty for a collective itself.

    The class of a method is that of the object, and not the base class that defines the method.
    """
    code = frame.f_code
    if code in _called_as:
        return _called_as[code]
    name = code.co_qualname.partition(".<")[0]
    # Asked first, because `f_locals` makes a dict of all local variables.
    owner = frame.f_locals.get("self") if "self" in code.co_varnames else None
    module = str(frame.f_globals.get("__name__", "")).split(".")
    if isinstance(getattr(owner, "status", None), StatusPage) or "testing" in module[:2]:
        return ""  # of a backend, or of a test suite, which calls collectives as users do
    if owner is not None and "." in name:
        kind, method = type(owner).__name__, name.rpartition(".")[2]
        return kind if method == "__init__" else f"{kind}.{method}"
    room = f"{module[1]}." if len(module) > 2 and "." not in name else ""
    return room + name
