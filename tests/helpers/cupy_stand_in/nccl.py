"""NCCL of the stand-in.

Its ranks are processes or threads of one machine, and their data are files of a folder. Its work is
done late, and reads and writes arrays by their addresses, so that a caller who does not wait gets
wrong values (`streams`). It also refuses

* a call before which its stream has not waited for the caller's stream, by an event;
* calls of ranks that do not match in kind, number, dtype, operation or root, where NCCL would hang;
* ranks that block in different communicators: NCCL blocks in the first call between two ranks;
* a split of a communicator that is not idle, and two ranks on one GPU.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import pickle
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cupy_stand_in.cuda import current
from cupy_stand_in.streams import LIMIT_SECONDS, Event, Stream, begun, streams

__all__ = ["added_to"]

_NAME = "cupy.cuda.nccl"
"""It is no attribute of ``cupy.cuda`` before it is imported."""

_LATE_SECONDS = 3e-4
_DTYPES = {
    "NCCL_INT8": "int8", "NCCL_UINT8": "uint8", "NCCL_INT32": "int32", "NCCL_UINT32": "uint32",
    "NCCL_INT64": "int64", "NCCL_UINT64": "uint64", "NCCL_FLOAT16": "float16",
    "NCCL_FLOAT32": "float32", "NCCL_FLOAT64": "float64",
}  # fmt: skip
_OPERATIONS = {
    "NCCL_SUM": np.add, "NCCL_PROD": np.multiply, "NCCL_MAX": np.fmax, "NCCL_MIN": np.fmin,
}  # fmt: skip

# ------------------------------------------------------------------------------------------- files


class _Mail:
    """Messages between the ranks of one communicator, as files of a folder."""

    def __init__(self, folder: Path, is_over: Callable[[], bool]) -> None:
        self._folder, self._is_over = folder, is_over
        folder.mkdir(parents=True, exist_ok=True)

    def post(self, name: str, content: object) -> None:
        """Write a message, which is seen when it is complete."""
        draft = self._folder / f"{name}.draft"
        draft.write_bytes(pickle.dumps(content))
        draft.rename(self._folder / name)

    def take(self, name: str) -> Any:
        """Wait for a message, and remove it."""
        path, deadline = self._folder / name, time.monotonic() + LIMIT_SECONDS
        while not path.exists():
            if self._is_over():
                raise _AbortedError
            if time.monotonic() > deadline:
                raise AssertionError(f"NCCL would hang: {name} of {self._folder} does not come")
            time.sleep(_LATE_SECONDS)
        content = pickle.loads(path.read_bytes())
        path.unlink()
        return content

    def exchange(self, name: str, rank: int, ranks: int, content: object) -> list[Any]:
        """Give all ranks' messages to each."""
        for other in range(ranks):
            self.post(f"{name}.{rank}.{other}", content)
        return [self.take(f"{name}.{other}.{rank}") for other in range(ranks)]


class _AbortedError(Exception):
    """The communicator was aborted."""


class NcclError(RuntimeError):
    """NCCL's errors."""


# -------------------------------------------------------------------------------------------- NCCL

_Call = tuple[Any, ...]


class _Group(threading.local):
    """The calls between ``groupStart`` and ``groupEnd`` of a thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.calls: list[_Call] = []


class Nccl:
    """``cupy.cuda.nccl``."""

    available = True
    NcclError = NcclError

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        """The name of each call of this process, with its arguments except addresses."""
        self.hangs = False
        """Whether work waits until its communicator is aborted."""
        self._group = _Group()
        self._kinds = {}
        for number, (name, dtype) in enumerate(_DTYPES.items()):
            setattr(self, name, number)
            self._kinds[number] = np.dtype(dtype)
        self._functions = {}
        for number, (name, function) in enumerate(_OPERATIONS.items()):
            setattr(self, name, number)
            self._functions[number] = function

    def get_unique_id(self) -> bytes:
        """An id, as CuPy 14 gives it: 128 bytes."""
        folder = tempfile.mkdtemp(prefix="nccl")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.calls.append(("get_unique_id",))
        return folder.encode().ljust(128, b"\0")

    def NcclCommunicator(  # noqa: N802 - CuPy's name
        self,
        ndev: int,
        commId: bytes,
        rank: int,
        config: None = None,
    ) -> Communicator:
        """Enter a communicator, with all its ranks."""
        if not isinstance(commId, bytes) or len(commId) != 128:
            raise TypeError(f"the id is 128 bytes, got {commId!r}")
        self.calls.append(("init", ndev, rank))
        return Communicator(self, Path(commId.rstrip(b"\0").decode()), ndev, rank)

    def groupStart(self) -> None:  # noqa: N802
        """Begin a group."""
        self._group.depth += 1

    def groupEnd(self) -> None:  # noqa: N802
        """Put the calls of the group on the stream, as one work."""
        if self._group.depth == 0:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: no group was begun")
        self._group.depth -= 1
        if self._group.depth == 0:
            calls, self._group.calls = self._group.calls, []
            if calls:
                self._put(calls)

    def add(self, *call: Any) -> None:
        """Take a call into the group, or put it on the stream."""
        self.calls.append(call[3:])
        self._group.calls.append(call)
        if self._group.depth == 0:
            calls, self._group.calls = self._group.calls, []
            self._put(calls)

    def _put(self, calls: list[_Call]) -> None:
        communicators, pointers = {call[0] for call in calls}, {call[1] for call in calls}
        assert len(communicators) == len(pointers) == 1, "a group of several streams"
        (made,), stream = communicators, streams[pointers.pop()]
        made.check()
        assert stream.device == made.device, "the stream is on another GPU than the communicator"
        if stream.seen.get(current.stream, 0) != begun.get(current.stream, 0):
            raise AssertionError(
                "a race: NCCL's stream has not waited for this thread's stream since its last work"
            )
        made.count(len(calls))
        made.connect([call[3:] for call in calls])
        number = stream.add(lambda: made.run([call[2:] for call in calls]))
        for call in calls:
            for address, nbytes, writes in made.ranges(*call[2:]):
                stream.pending.append((address, address + nbytes, writes, number))


class Communicator:
    """``NcclCommunicator``."""

    def __init__(self, nccl: Nccl, folder: Path, ranks: int, rank: int) -> None:
        self._nccl, self._folder, self._ranks, self._rank = nccl, folder, ranks, rank
        self.device = current.device
        self._mail = _Mail(folder, lambda: self._aborted)
        self._aborted = self._ended = False
        self._error: BaseException | None = None
        self._sent: Counter[int] = Counter()
        self._taken: Counter[int] = Counter()
        self._done = itertools.count()
        self._splits = itertools.count()
        self._connected: set[int] = set()
        self._under_way = 0
        self._lock = threading.Lock()
        place = socket.gethostname(), self.device
        places = self._mail.exchange("init", rank, ranks, (ranks, place))
        if any(number != ranks for number, _ in places) or len({p for _, p in places}) < ranks:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage")

    # ---------------------------------------------------------------------------------- CuPy's API

    def rank_id(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks

    def device_id(self) -> int:
        return self.device

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._add(stream, (sendbuf, 0), "send", count, datatype, None, peer)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._add(stream, (0, recvbuf), "recv", count, datatype, None, peer)

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        self._add(stream, (sendbuff, recvbuff), "broadcast", count, datatype, None, root)

    def reduce(
        self,
        sendbuf: int,
        recvbuf: int,
        count: int,
        datatype: int,
        op: int,
        root: int,
        stream: int,
    ) -> None:
        self._add(stream, (sendbuf, recvbuf), "reduce", count, datatype, op, root)

    def allReduce(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        self._add(stream, (sendbuf, recvbuf), "allReduce", count, datatype, op, None)

    def reduceScatter(  # noqa: N802
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        self._add(stream, (sendbuf, recvbuf), "reduceScatter", recvcount, datatype, op, None)

    def allGather(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int
    ) -> None:
        self._add(stream, (sendbuf, recvbuf), "allGather", count, datatype, None, None)

    def commSplit(  # noqa: N802
        self, color: int, key: int, config: None = None
    ) -> Communicator | None:
        self._nccl.calls.append(("commSplit", color, key))
        if self._under_way:
            raise AssertionError("NCCL splits a communicator only if nothing is under way on it")
        number = next(self._splits)
        given = self._mail.exchange(f"split{number}", self._rank, self._ranks, (color, key))
        if color < 0:
            return None
        members = sorted((k, r) for r, (c, k) in enumerate(given) if c == color)
        folder = self._folder / f"{number}.{color}"
        return Communicator(self._nccl, folder, len(members), members.index((key, self._rank)))

    def check_async_error(self) -> None:
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        self._nccl.calls.append(("abort",))
        self._aborted = self._ended = True

    def destroy(self) -> None:
        self._nccl.calls.append(("destroy",))
        assert not self._under_way, "destroyed with work under way"
        self._ended = True

    # ----------------------------------------------------------------------------------- the work

    def check(self) -> None:
        """Refuse a call after the end."""
        if self._ended:
            raise NcclError("NCCL_ERROR_INVALID_ARGUMENT: the communicator has ended")

    def connect(self, calls: list[_Call]) -> None:
        """Block until the other ranks of the first calls are here, too."""
        peers = {call[4] for call in calls if call[0] in ("send", "recv")}
        is_lazy = os.environ.get("NCCL_RUNTIME_CONNECT", "1") != "0"
        if is_lazy and any(call[0] not in ("send", "recv") for call in calls):
            peers |= set(range(self._ranks))
        new = peers - self._connected - {self._rank}
        self._connected |= new
        for peer in new:
            self._mail.post(f"connect.{self._rank}.{peer}", None)
        for peer in new:
            self._mail.take(f"connect.{peer}.{self._rank}")

    def count(self, more: int) -> None:
        """Count calls that have begun, or ended."""
        with self._lock:
            self._under_way += more

    def _add(
        self,
        stream: int,
        buffers: tuple[int, int],
        name: str,
        count: int,
        kind: int,
        operation: int | None,
        peer: int | None,
    ) -> None:
        values = (stream, *buffers, count, kind, operation or 0, peer or 0)
        if any(type(value) is not int for value in values):
            raise TypeError(f"an integer is required: {name}{values}")
        assert kind in self._nccl._kinds
        if peer is not None and not 0 <= peer < self._ranks:
            raise NcclError("NCCL_ERROR_INVALID_ARGUMENT: invalid argument")
        self._nccl.add(self, stream, buffers, name, count, kind, operation, peer)

    def ranges(
        self, buffers: tuple[int, int], name: str, count: int, kind: int, _: object, peer: object
    ) -> list[tuple[int, int, bool]]:
        """Address and length of what a call uses, and whether it writes there."""
        nbytes = count * self._nccl._kinds[kind].itemsize
        reads = nbytes * (self._ranks if name == "reduceScatter" else 1)
        writes = nbytes * (self._ranks if name == "allGather" else 1)
        if name == "broadcast" and peer != self._rank:
            reads = 0
        if name == "reduce" and peer != self._rank:
            writes = 0
        used = [(buffers[0], reads, False), (buffers[1], writes, True)]
        return [(address, length, written) for address, length, written in used if address]

    def run(self, calls: list[_Call]) -> None:
        """Do the work of a group, on the stream's thread."""
        time.sleep(_LATE_SECONDS * (1 + self._rank))
        try:
            while self._nccl.hangs and not self._aborted:
                time.sleep(_LATE_SECONDS)
            if self._aborted:
                return
            for buffers, name, count, kind, _, peer in calls:
                if name == "send":
                    values = self._read(buffers[0], count, kind)
                    self._sent[peer] += 1
                    self._mail.post(f"{self._rank}-{peer}.{self._sent[peer]}", values)
            for buffers, name, count, kind, operation, peer in calls:
                if name == "recv":
                    self._receive(buffers[1], count, kind, peer)
                elif name != "send":
                    self._collective(buffers, name, count, kind, operation, peer)
        except _AbortedError:
            pass
        except BaseException as error:
            self._error = error
            threading.Event().wait()  # as NCCL does, for ever
        finally:
            self.count(-len(calls))

    def _receive(self, buffer: int, count: int, kind: int, peer: int) -> None:
        self._taken[peer] += 1
        values = self._mail.take(f"{peer}-{self._rank}.{self._taken[peer]}")
        if (values.size, values.dtype) != (count, self._nccl._kinds[kind]):
            raise AssertionError(
                f"calls that do not match: rank {peer} sends {values.size} {values.dtype} to rank "
                f"{self._rank}, which receives {count} {self._nccl._kinds[kind]}"
            )
        self._write(buffer, values)

    def _collective(
        self, buffers: tuple[int, int], name: str, count: int, kind: int, operation: Any, root: Any
    ) -> None:
        own, ranks, what = self._rank, self._ranks, (name, count, kind, operation, root)
        given = count * (ranks if name == "reduceScatter" else 1)
        values = self._read(buffers[0], given, kind)
        row = (what, None if name == "broadcast" and own != root else values)
        rows = self._mail.exchange(f"all{next(self._done)}", own, ranks, row)
        if any(other != what for other, _ in rows):
            raise AssertionError(f"calls that do not match: {[other for other, _ in rows]}")
        arrays = [array for _, array in rows]
        if name == "broadcast":
            self._write(buffers[1], arrays[root])
        elif name == "allGather":
            self._write(buffers[1], np.concatenate(arrays))
        elif name != "reduce" or own == root:
            total, combine = arrays[-1], self._nccl._functions[operation]
            with np.errstate(all="ignore"):
                for array in reversed(arrays[:-1]):  # another order than the contract's
                    total = combine(total, array)
            if name == "reduceScatter":
                total = total[own * count : (own + 1) * count]
            self._write(buffers[1], total)

    def _read(self, address: int, count: int, kind: int) -> np.ndarray[Any, Any]:
        dtype = self._nccl._kinds[kind]
        return np.frombuffer(ctypes.string_at(address, count * dtype.itemsize), dtype)

    @staticmethod
    def _write(address: int, values: np.ndarray[Any, Any]) -> None:
        ctypes.memmove(address, values.tobytes(), values.nbytes)


@contextmanager
def added_to(cuda: Any) -> Iterator[None]:
    """Give ``cupy.cuda`` streams and events, and ``import cupy.cuda.nccl`` NCCL."""
    cuda.Stream, cuda.Event = Stream, Event
    cuda.Device.pci_bus_id = property(lambda device: f"0000:{device.id:02x}:00.0")
    before = sys.modules.get(_NAME)
    sys.modules[_NAME] = Nccl()  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[_NAME]
        if before is not None:
            sys.modules[_NAME] = before
