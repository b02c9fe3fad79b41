"""Devices, streams and pinned memory of the stand-in."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from numpy.lib.array_utils import byte_bounds

from cupy_stand_in.counts import count
from cupy_stand_in.cublas import CuBLAS

__all__ = ["Cuda", "Memory", "current", "is_pinned", "on_device"]

_PINNED_UNIT = 512


class Stream:
    """The work that one thread has given to one GPU, of which only waiting is told.

    Parameters
    ----------
    thread : object
        Stands for the thread, whose streams do not race with each other.
    """

    def __init__(self, thread: object) -> None:
        self.thread = thread
        self.syncs = 0
        self.is_idle = True
        # Pinned arrays from which the GPU copies, and their values when the copy began.
        self._sources: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def begin_to_read(self, pinned: np.ndarray[Any, Any]) -> None:
        """Begin a copy from pinned memory, for which CUDA does not wait."""
        self._sources.append((pinned, pinned.copy()))

    def synchronize(self) -> None:
        """Wait until all that was begun is done."""
        count("waits")
        self.settle()

    def settle(self) -> None:
        """As `synchronize`, as a part of a copy to the host."""
        self.syncs += 1
        self.is_idle = True
        sources, self._sources = self._sources, []
        for now, then in sources:
            if now.tobytes() != then.tobytes():
                raise AssertionError(
                    "a race: pinned memory was changed after set(), before the stream was "
                    "synchronized; the GPU may still have been reading it"
                )


class _CurrentStream:
    """The null stream, as CuPy gives it: of the device that is current when it is used."""

    ptr = 0

    def synchronize(self) -> None:
        """Wait for this thread's work on the current device."""
        current.stream.synchronize()


class _Thread(threading.local):
    """What CUDA and CuPy keep for each thread: its device, and its stream on each."""

    def __init__(self) -> None:
        self.device = 0
        self._streams: dict[int, Stream] = {}
        self._name = object()

    @property
    def stream(self) -> Stream:
        """The thread's stream on its current device."""
        return self.stream_on(self.device)

    def stream_on(self, device: int) -> Stream:
        """The thread's stream on ``device``."""
        if device not in self._streams:
            self._streams[device] = Stream(self._name)
        return self._streams[device]


current = _Thread()


@contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make ``device`` current inside of the block."""
    before, current.device = current.device, device
    try:
        yield
    finally:
        current.device = before


class Memory:
    """One allocation: the device it lies on, and who is at work on which bytes of it.

    A reader or writer is known by its stream and by how often that had been waited for.
    """

    def __init__(self) -> None:
        self.device = current.device
        self._stream = current.stream  # CuPy gives the memory to this stream's next array
        self._work: set[tuple[Stream, int, int, int, bool]] = set()
        self._lock = threading.RLock()

    def read(self, host: np.ndarray[Any, Any]) -> None:
        """Begin to read ``host`` on this thread's stream, or refuse."""
        self._begin(host, writes=False)

    def write(self, host: np.ndarray[Any, Any]) -> None:
        """Begin to write ``host`` on this thread's stream, or refuse."""
        self._begin(host, writes=True)

    def hand_over(self, host: np.ndarray[Any, Any]) -> None:
        """Let a library read and write ``host`` that knows nothing of streams, or refuse.

        This thread's stream must be idle, even if ``host`` is new: CuPy reuses memory in the
        stream's order, and a kernel that was begun earlier may still use it.
        """
        stream = current.stream_on(self.device)
        if not stream.is_idle:
            raise AssertionError(
                "a race: the address of a device array is given to a library that does not wait "
                "for streams, and this thread has not synchronized its stream since its last work"
            )
        with self._lock:
            self._refuse_races(*byte_bounds(host), stream, writes=True)

    def _begin(self, host: np.ndarray[Any, Any], *, writes: bool) -> None:
        low, high = byte_bounds(host)
        stream = current.stream
        stream.is_idle = False
        with self._lock:  # of two threads that begin at once, each must see the other, or be seen
            self._refuse_races(low, high if host.size else low, stream, writes=writes)
            self._work.add((stream, stream.syncs, low, high, writes))

    def _refuse_races(self, low: int, high: int, stream: Stream, *, writes: bool) -> None:
        self._work = {entry for entry in self._work if entry[0].syncs == entry[1]}
        for other, _, start, stop, other_writes in self._work:
            overlaps = start < high and low < stop
            if other.thread is not stream.thread and overlaps and (writes or other_writes):
                raise AssertionError(
                    f"a race: this array may still be {'written' if other_writes else 'read'} "
                    "by another thread's stream, which that thread has not synchronized since"
                )

    def __del__(self) -> None:
        for stream, syncs, *_ in self._work:
            if stream.thread is not self._stream.thread and stream.syncs == syncs:
                raise AssertionError(
                    "a race: this array's memory is free, and may still be used by another "
                    "thread's stream, which that thread has not synchronized since"
                )


class CUDARuntimeError(RuntimeError):
    """What CUDA's runtime answers."""


class _Device:
    """``cupy.cuda.Device``."""

    count = 1

    def __init__(self, device: int | None = None) -> None:
        self.id = current.device if device is None else int(device)
        self._before: list[int] = []

    def use(self) -> None:
        """Make it this thread's device."""
        if not 0 <= self.id < self.count:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        current.device = self.id

    def synchronize(self) -> None:
        """Wait for this thread's work."""
        current.stream.synchronize()

    def __enter__(self) -> Self:
        self._before.append(current.device)
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        current.device = self._before.pop()

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Device) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


class _Runtime:
    """``cupy.cuda.runtime``."""

    CUDARuntimeError = CUDARuntimeError
    CUDA_R_32F, CUDA_R_64F, CUDA_R_16BF = 0, 1, 14
    memory = 8 * 2**30, 8 * 2**30

    def __init__(self, device_count: int) -> None:
        self._count = device_count

    def getDeviceCount(self) -> int:  # noqa: N802 - CUDA's name
        """How many GPUs there are."""
        if self._count == 0:
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return self._count

    def memGetInfo(self) -> tuple[int, int]:  # noqa: N802 - CUDA's name
        """Free bytes, and all bytes, of the memory of the calling thread's device."""
        return self.memory

    def getDevice(self) -> int:  # noqa: N802 - CUDA's name
        """The device of the calling thread."""
        return current.device


class _PinnedBuffer(mmap.mmap):
    """Host memory that pages are not swapped out of."""


def is_pinned(array: np.ndarray[Any, Any]) -> bool:
    """Whether the GPU copies from ``array`` while the host goes on."""
    owner: Any = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return isinstance(owner, _PinnedBuffer)


class Cuda:
    """``cupy.cuda``.

    Parameters
    ----------
    device_count : int
        How many GPUs there seem to be.
    has_headers : bool
        Whether kernels can be compiled.
    """

    def __init__(self, device_count: int, has_headers: bool) -> None:
        self.has_headers = has_headers
        self.runtime = _Runtime(device_count)
        self.Device = type("Device", (_Device,), {"count": device_count})
        self.cublas = CuBLAS()
        self.device = SimpleNamespace(get_cublas_handle=lambda: 1)
        self.pinned_bytes = 0
        """Of all pinned memory that was ever asked for."""
        self.varies: set[str] = set()
        """On what last bits of sums and products depend, as CUDA's do: "sizes", "alignment"."""
        current.device = 0

    def is_available(self) -> bool:
        """Whether there is a GPU."""
        return self.runtime._count > 0

    def get_current_stream(self) -> _CurrentStream:
        """The stream of the calling thread."""
        return _CurrentStream()

    def alloc_pinned_memory(self, size: int) -> Any:
        """Pinned memory of the pool, which rounds ``size`` up to a power of two: a buffer."""
        blocks = max(1, -(-size // _PINNED_UNIT))
        memory = self.PinnedMemory(_PINNED_UNIT << (blocks - 1).bit_length())
        return self.PinnedMemoryPointer(memory, 0)

    def PinnedMemory(self, size: int) -> int:  # noqa: N802 - CuPy's name
        """Pinned memory of exactly ``size`` bytes."""
        self.pinned_bytes += size
        return size

    def PinnedMemoryPointer(self, mem: int, offset: int) -> Any:  # noqa: N802 - CuPy's name
        """A buffer of pinned memory."""
        assert offset == 0
        return _PinnedBuffer(-1, max(1, mem))
