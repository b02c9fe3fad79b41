"""Memory that the ranks of a node share: where it comes from, and which arrays lie in it.

Ranks that are processes get it from the first of these that all of them can reach:

``memfd``   an anonymous file in memory that the node's first rank makes and the others open through
            ``/proc``: it has no name that a killed job could leave behind, and no limit but memory
``file``    a file in ``/dev/shm``, whose name is gone as soon as all have mapped it
``window``  an MPI-3 shared window, which lasts until MPI ends
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets
import tempfile
import time
import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.contract.backoff import yield_processor

__all__ = [
    "PRIVATE",
    "Place",
    "Regions",
    "anonymous_memory",
    "at_once",
    "number_nodes",
    "share_memory",
    "synchronize_windows",
]

Place = tuple[int, int]
"""A region of shared memory, by number, and a byte in it."""

PRIVATE: Place = (-1, -1)
"""Where an array lies that others cannot read."""

_FOLDER = Path("/dev/shm")  # noqa: S108 - memory, and not a place for temporary files
_PREFIX = "mpishard-arena-"
_NONCE_BYTES = 16
_STALE_SECONDS = 60
_PATH_BYTES = 112

_log = logging.getLogger("mpishard")


class Regions:
    """The stretches of shared memory of one backend, numbered alike on all its ranks.

    A region lives as long as an array in it does.
    """

    def __init__(self) -> None:
        self._regions: dict[int, tuple[int, int, weakref.ref[Any]]] = {}
        self._count = 0

    @property
    def ever(self) -> bool:
        """Whether memory was ever shared: the same on all ranks, as garbage is not."""
        return self._count > 0

    def add(self, memory: Array) -> None:
        """Number a region, of shape (bytes,) and dtype uint8. Every rank adds in one order."""
        number = self._count
        self._count += 1
        self._regions[number] = (_address(memory), memory.size, weakref.ref(memory))
        weakref.finalize(memory, self._regions.pop, number, None).atexit = False

    def locate(self, array: Array) -> Place:
        """Number of the region that ``array`` lies in, and the byte where it begins there.

        `PRIVATE` where it lies in none.
        """
        if self._regions and isinstance(array, np.ndarray):
            address = _address(array)
            # A copy, made at once: another thread, or the collector, may let a region go meanwhile.
            for number, (start, size, _) in self._regions.copy().items():
                if start <= address and address + array.nbytes <= start + size:
                    return number, address - start
        return PRIVATE

    def view(self, place: Place, like: Array) -> Array:
        """The array of the shape and dtype of ``like`` that lies at ``place``."""
        number, offset = place
        memory = self._regions[number][2]()
        assert memory is not None
        return memory[offset : offset + like.nbytes].view(like.dtype).reshape(like.shape)


def number_nodes(names: Sequence[Hashable]) -> tuple[int, ...]:
    """A number for the node of each rank, from what ranks of one node call it alone.

    Examples
    --------
    >>> number_nodes(["b", "a", "b"])
    (0, 1, 0)
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def anonymous_memory(nbytes: int) -> Array:
    """Zeroed memory for the threads of this process, of shape (``nbytes``,) and dtype uint8."""
    # From whole pages, so that it begins where vector instructions and caches like it.
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


Requests = Generator[Any, None, Any]
"""Steps that yield the MPI requests to be waited for."""


def share_memory(
    mpi: Any, node: Any, world: Any, nbytes: int, sources: tuple[str, ...]
) -> Requests:
    """Zeroed memory, of shape (``nbytes``,) and dtype uint8, that a node's ranks share.

    Collective over ``world``, of which ``node`` holds this rank's node. Its pages belong to the
    rank that first writes them.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    node, world : mpi4py.MPI.Intracomm
        Ranks that share, and all ranks.
    nbytes : int
        1 or more.
    sources : tuple of str
        What to try, in order.

    Yields
    ------
    mpi4py.MPI.Request
        To be complete before the next step; see `at_once`.

    Returns
    -------
    Array or None
        None, on every rank, where no source serves all nodes, or a rank has no file descriptors or
        no memory left: then the next source would not do either.
    """
    for source in sources:
        memory, error = yield from _SOURCES[source](mpi, node, nbytes)
        verdict = np.array([_verdict(memory, error)], np.int32)
        worst = np.empty_like(verdict)
        yield world.Iallreduce(verdict, worst, op=mpi.MAX)
        if worst[0] == _GOOD:
            if source != "window" and node.Get_rank() == 0:
                memory[:_NONCE_BYTES] = 0
            yield node.Ibarrier()
            return memory
        if worst[0] == _EXHAUSTED:
            if verdict[0] == _EXHAUSTED:
                _log.warning(
                    "ranks share no more memory here and send messages instead: %s (each model "
                    "takes two file descriptors: see ulimit -n)", error,
                )  # fmt: skip
            return None
    return None


def at_once(steps: Requests) -> Any:
    """Take all steps, one request after the other, without holding the processor."""
    while True:
        try:
            request = next(steps)
        except StopIteration as stop:
            return stop.value
        while not request.Test():
            yield_processor()


_GOOD, _FAILED, _EXHAUSTED = 0, 1, 2


def _verdict(memory: Array | None, error: OSError | None) -> int:
    if memory is not None:
        return _GOOD
    exhausted = error is not None and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return _EXHAUSTED if exhausted else _FAILED


def _from_memfd(_mpi: Any, node: Any, nbytes: int) -> Requests:
    def create() -> tuple[int, str]:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no memfd")
        handle = os.memfd_create("mpishard-arena")
        os.ftruncate(handle, nbytes)
        return handle, f"/proc/{os.getpid()}/fd/{handle}"

    return _map(node, nbytes, create)


def _from_file(_mpi: Any, node: Any, nbytes: int) -> Requests:
    def create() -> tuple[int, str]:
        import fcntl

        if not _folder_has(nbytes):
            raise OSError(errno.ENOSPC, f"{_FOLDER} is too small")
        _remove_stale_files()
        handle, path = tempfile.mkstemp(prefix=_PREFIX, dir=_FOLDER)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            # Pages that a full file system cannot give are found now, and not by SIGBUS later.
            os.posix_fallocate(handle, 0, nbytes)
        except OSError:
            os.close(handle)
            Path(path).unlink()
            raise
        return handle, path

    return _map(node, nbytes, create)


def _from_window(mpi: Any, node: Any, nbytes: int) -> Requests:
    # MPICH's windows lie in /dev/shm, and die of SIGBUS where it is too small.
    wanted = np.array([_folder_has(nbytes) and len(_windows) < _MOST_WINDOWS])
    yield node.Ibcast(wanted.view(np.uint8), 0)
    if not wanted[0]:
        return None, None
    # A communicator of its own, as long as the window: MPICH hangs in a later one otherwise.
    own = node.Dup()
    window = mpi.Win.Allocate_shared(nbytes if node.Get_rank() == 0 else 0, 1, comm=own)
    window.Lock_all(mpi.MODE_NOCHECK)  # nobody locks for himself alone
    buffer, _ = window.Shared_query(0)
    memory: Array = np.frombuffer(buffer, np.uint8)
    # To free it is collective, and when an array is garbage differs from rank to rank.
    _windows.append((window, own))
    if node.Get_rank() == 0:
        memory[:] = 0
    return memory, None


_windows: list[tuple[Any, Any]] = []
_MOST_WINDOWS = 64


def synchronize_windows() -> None:
    """What MPI asks for around a fence, of memory that comes from its windows."""
    for window, _ in _windows:
        window.Sync()


_SOURCES: dict[str, Callable[[Any, Any, int], Requests]] = {
    "memfd": _from_memfd,
    "file": _from_file,
    "window": _from_window,
}


def _map(node: Any, nbytes: int, create: Callable[[], tuple[int, str]]) -> Requests:
    """Map on all ranks of ``node`` the file that ``create`` makes on its first.

    The file's first bytes say which it is: a path means another file in another container.
    Returns the memory, or None and why.
    """
    handle, memory, error = -1, None, None
    is_first = node.Get_rank() == 0
    letter = np.zeros(_NONCE_BYTES + _PATH_BYTES, np.uint8)
    if is_first:
        try:
            handle, path = create()
            nonce = secrets.token_bytes(_NONCE_BYTES)
            os.pwrite(handle, nonce[:nbytes], 0)
            text = nonce + path.encode()
            letter[: len(text)] = np.frombuffer(text, np.uint8)
        except OSError as reason:
            error = reason
    yield node.Ibcast(letter, 0)
    nonce, text = letter[:_NONCE_BYTES].tobytes(), letter[_NONCE_BYTES:].tobytes()
    path = text.rstrip(b"\0").decode()
    if path:
        try:
            if not is_first:
                handle = os.open(path, os.O_RDWR)
            mapped = mmap.mmap(handle, nbytes)
            if mapped[:_NONCE_BYTES] == nonce[:nbytes]:
                memory = np.frombuffer(mapped, np.uint8)
        except OSError as reason:
            error = reason
        except ValueError:
            pass  # another file, and shorter
    yield node.Ibarrier()
    if handle >= 0:
        os.close(handle)
    if is_first and path.startswith(str(_FOLDER)):
        Path(path).unlink()
    return memory, error


def _folder_has(nbytes: int) -> bool:
    try:
        status = os.statvfs(_FOLDER)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize > nbytes


def _remove_stale_files() -> None:
    """Remove what a job left that was killed before all its ranks had mapped the file."""
    import fcntl

    for path in _FOLDER.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDWR)
            try:
                if time.time() - os.fstat(handle).st_mtime > _STALE_SECONDS:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            finally:
                os.close(handle)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
