"""Devices, streams and pinned memory of the stand-in."""

from __future__ import annotations

import mmap
import threading
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from numpy.lib.array_utils import byte_bounds

from cupy_stand_in.counts import count
from cupy_stand_in.cublas import CuBLAS

__all__ = ["Cuda", "Memory", "current"]


class _Thread(threading.local):
    """What CUDA and CuPy keep for each thread: its device, and its stream."""

    def __init__(self) -> None:
        self.device = 0
        self.stream = Stream()


class Stream:
    """The work that one thread has given to the GPU, of which only waiting is told."""

    def __init__(self) -> None:
        self.syncs = 0

    def synchronize(self) -> None:
        """Wait until all that was begun is done."""
        count("waits")
        self.settle()

    def settle(self) -> None:
        """As a read from the host does it, which waits for all that was begun before."""
        self.syncs += 1


current = _Thread()


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

    def _begin(self, host: np.ndarray[Any, Any], *, writes: bool) -> None:
        low, high = byte_bounds(host)
        with self._lock:  # of two threads that begin at once, each must see the other, or be seen
            self._work = {entry for entry in self._work if entry[0].syncs == entry[1]}
            for stream, _, start, stop, other_writes in self._work:
                overlaps = host.size and start < high and low < stop
                if stream is not current.stream and overlaps and (writes or other_writes):
                    raise AssertionError(
                        f"a race: this array may still be {'written' if other_writes else 'read'} "
                        "by another thread's stream, which that thread has not synchronized since"
                    )
            self._work.add((current.stream, current.stream.syncs, low, high, writes))

    def __del__(self) -> None:
        for stream, syncs, *_ in self._work:
            if stream is not self._stream and stream.syncs == syncs:
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
    CUDA_R_32F, CUDA_R_16BF = 0, 14
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


class Cuda:
    """``cupy.cuda``.

    Parameters
    ----------
    device_count : int
        How many GPUs there seem to be.
    """

    def __init__(self, device_count: int) -> None:
        self.runtime = _Runtime(device_count)
        self.Device = type("Device", (_Device,), {"count": device_count})
        self.cublas = CuBLAS()
        self.device = SimpleNamespace(get_cublas_handle=lambda: 1)
        self.pinned_bytes = 0
        """Of all pinned memory that was ever asked for."""
        current.device = 0

    def is_available(self) -> bool:
        """Whether there is a GPU."""
        return self.runtime._count > 0

    def get_current_stream(self) -> Stream:
        """The stream of the calling thread."""
        return current.stream

    def alloc_pinned_memory(self, size: int) -> Any:
        """Host memory of at least ``size`` bytes that pages are not swapped out of: a buffer."""
        self.pinned_bytes += size
        return mmap.mmap(-1, max(1, size))
