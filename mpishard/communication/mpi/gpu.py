"""GPU arrays under MPI: through pinned host buffers, or by their device pointers.

Most MPI libraries, those of the wheels among them, cannot read GPU memory. Arrays that lie there
are then copied to host buffers, which travel, and back; the buffers are page-locked, so that the
GPU copies at full speed, and kept for the next collective. Where the library is built for CUDA
and ``MPISHARD_CUDA_AWARE=1`` says so, reductions, all_gather and broadcast of more than a few
bytes hand it device pointers.

No GPU has run this yet: it was tested with `mpishard.testing`'s stand-in for CuPy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from mpishard import settings
from mpishard.arrays import Array, array_namespace, copy_into, is_device_array, synchronize
from mpishard.communication.contract.call import Call
from mpishard.communication.contract.work import Steps
from mpishard.communication.mpi.collectives import MPICollectives
from mpishard.communication.mpi.headers import INLINE_BYTES
from mpishard.communication.mpi.lanes import ScratchPool
from mpishard.devices import Device

__all__ = ["StagedCollectives"]

_log = logging.getLogger("mpishard")


class StagedCollectives(MPICollectives):
    """The part of the MPI backend that knows of GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self._pinned = ScratchPool(lambda n: Device("cuda").pinned(n, np.dtype(np.uint8)))
        self._has_said_so = False

    @property
    def scratch_bytes(self) -> int:
        return super().scratch_bytes + self._pinned.nbytes

    def _steps_all_reduce(self, call: Call, array: Array, out: Array) -> Steps:
        if not self._is_staged(array):
            return (yield from super()._steps_all_reduce(call, array, out))
        buffer, host = self._bring(array)
        yield from super()._steps_all_reduce(call, host, host)
        return self._take_back(buffer, host, out)

    def _steps_reduce_scatter(
        self, call: Call, array: Array, counts: tuple[int, ...], out: Array
    ) -> Steps:
        if not self._is_staged(array):
            return (yield from super()._steps_reduce_scatter(call, array, counts, out))
        buffer, host = self._bring(array)
        # The piece comes to lie where this rank's own contribution to it is.
        start = sum(counts[: self.rank])
        piece = host[start : start + counts[self.rank]]
        yield from super()._steps_reduce_scatter(call, host, counts, piece)
        return self._take_back(buffer, piece, out)

    def _steps_all_gather(self, call: Call, array: Array, out: Array | None) -> Steps:
        if not self._is_staged(array):
            return (yield from super()._steps_all_gather(call, array, out))
        buffer, host = self._bring(array)
        whole, into = (None, None) if out is None else self._buffer(out.shape, out.dtype)
        gathered = yield from super()._steps_all_gather(call, host, into)
        self._pinned.give(buffer)
        if out is None:
            out = array_namespace(array).empty(gathered.shape, gathered.dtype)
        return self._take_back(whole, gathered, out)

    def _steps_broadcast(self, call: Call, array: Array | None, root: int) -> Steps:
        if array is None or not self._is_staged(array):
            return (yield from super()._steps_broadcast(call, array, root))
        buffer, host = self._bring(array)
        yield from super()._steps_broadcast(call, host, root)
        if self.rank != root:
            return self._take_back(buffer, host, array)
        self._pinned.give(buffer)
        return array

    def _steps_scatter(
        self, call: Call, array: Array | None, counts: tuple[int, ...] | None, root: int
    ) -> Steps:
        if array is None or not is_device_array(array):
            return (yield from super()._steps_scatter(call, array, counts, root))
        buffer, host = self._bring(array)
        piece = yield from super()._steps_scatter(call, host, counts, root)
        self._pinned.give(buffer)
        return Device("cuda").put(piece)

    def _steps_gather(self, call: Call, array: Array, root: int) -> Steps:
        if not is_device_array(array):
            return (yield from super()._steps_gather(call, array, root))
        buffer, host = self._bring(array)
        whole = yield from super()._steps_gather(call, host, root)
        self._pinned.give(buffer)
        return None if whole is None else Device("cuda").put(whole)

    def _steps_all_to_all(self, call: Call, parts: Sequence[Array]) -> Steps:
        if not is_device_array(parts[0]):
            return (yield from super()._steps_all_to_all(call, parts))
        brought = [self._bring(part) for part in parts]
        received = yield from super()._steps_all_to_all(call, [host for _, host in brought])
        for buffer, _ in brought:
            self._pinned.give(buffer)
        return [Device("cuda").put(array) for array in received]

    # ------------------------------------------------------------------------------------ buffers

    def _is_staged(self, array: Array) -> bool:
        """Whether ``array`` goes through the host. Ranks may differ in it: the bytes are alike."""
        if not is_device_array(array):
            return False
        if array.nbytes > INLINE_BYTES and settings.cuda_aware():
            synchronize(array)  # the library knows nothing of streams
            return False
        return True

    def _buffer(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
        """A pinned buffer, and an array of ``shape`` in it."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        buffer = self._pinned.take(nbytes)
        return buffer, buffer[:nbytes].view(dtype).reshape(shape)

    def _bring(self, array: Array) -> tuple[Array, Array]:
        """A pinned buffer, and the copy of ``array`` in it.

        It is given back where the collective succeeds: after an error MPI may still use it.
        """
        self._say_so()
        buffer, host = self._buffer(array.shape, array.dtype)
        copy_into(host, array)
        return buffer, host

    def _take_back(self, buffer: Array | None, host: Array, out: Array) -> Array:
        copy_into(out, host)
        if buffer is not None:
            synchronize(out)  # the GPU reads the buffer until then
            self._pinned.give(buffer)
        return out

    def _say_so(self) -> None:
        if self._has_said_so:
            return
        self._has_said_so = True
        if self.rank == 0 and self._is_root:
            hint = settings.cuda_aware_hint()
            _log.info(
                "GPU arrays travel through pinned host buffers; MPISHARD_CUDA_AWARE=1 hands them "
                "to MPI as they are, where the library is built for CUDA%s",
                f" ({hint} suggests that it is)" if hint else "",
            )
