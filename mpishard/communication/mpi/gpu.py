"""Collectives on GPU arrays under MPI: through pinned host buffers.

Most MPI libraries, those of the wheels among them, cannot read GPU memory. Arrays that lie there
are copied to host buffers, which travel, and back; the buffers are page-locked, so that the GPU
copies at full speed, and kept for the next collective. If the library is built for CUDA and
``MPISHARD_CUDA_AWARE=1`` says so, reductions, all_gather and broadcast of more than a few bytes
hand it device pointers instead.

No GPU has run this yet: it was tested with a stand-in for CuPy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from mpishard import settings
from mpishard.arrays import Array, array_namespace, copy_into, is_device_array, synchronize
from mpishard.communication.contract.call import Call
from mpishard.communication.contract.work import Steps
from mpishard.communication.mpi.collectives import Collectives
from mpishard.communication.mpi.headers import INLINE_BYTES
from mpishard.communication.mpi.messages import ScratchPool
from mpishard.devices import Device

__all__ = ["DeviceCollectives"]

_log = logging.getLogger("mpishard")


class DeviceCollectives:
    """The collectives of a group for arrays on a GPU; its methods are those of `Collectives`.

    Parameters
    ----------
    collectives : Collectives
        Those of host arrays, which do the work.
    rank : int
        This rank.
    speaks : bool
        Whether this rank logs how the arrays travel.
    """

    def __init__(self, collectives: Collectives, rank: int, *, speaks: bool) -> None:
        self._host = collectives
        self._rank = rank
        self._pinned = ScratchPool(lambda n: Device("cuda").pinned(n, np.dtype(np.uint8)))
        if speaks:
            hint = settings.cuda_aware_hint()
            _log.info(
                "GPU arrays travel through pinned host buffers; MPISHARD_CUDA_AWARE=1 hands them "
                "to MPI as they are, if the library is built for CUDA%s",
                f" ({hint} suggests that it is)" if hint else "",
            )

    @property
    def scratch_bytes(self) -> int:
        """Bytes of pinned memory kept from one collective to the next."""
        return self._pinned.nbytes

    def all_reduce(self, call: Call, array: Array, out: Array) -> Steps:
        """Combine ``array`` into ``out``."""
        if _goes_as_it_is(array):
            return (yield from self._host.all_reduce(call, array, out))
        buffer, host = self._bring(array)
        yield from self._host.all_reduce(call, host, host)
        return self._take_back(buffer, host, out)

    def reduce_scatter(
        self, call: Call, array: Array, counts: tuple[int, ...], out: Array
    ) -> Steps:
        """Combine into ``out`` this rank's rows."""
        if _goes_as_it_is(array):
            return (yield from self._host.reduce_scatter(call, array, counts, out))
        buffer, host = self._bring(array)
        # The piece comes to lie where this rank's own contribution to it is.
        start = sum(counts[: self._rank])
        piece = host[start : start + counts[self._rank]]
        yield from self._host.reduce_scatter(call, host, counts, piece)
        return self._take_back(buffer, piece, out)

    def all_gather(self, call: Call, array: Array, out: Array | None) -> Steps:
        """All ranks' rows in ``out``, or in a new array."""
        if _goes_as_it_is(array):
            return (yield from self._host.all_gather(call, array, out))
        buffer, host = self._bring(array)
        whole, into = (None, None) if out is None else self._buffer(out.shape, out.dtype)
        gathered = yield from self._host.all_gather(call, host, into)
        self._pinned.give(buffer)
        if out is None:
            out = array_namespace(array).empty(gathered.shape, gathered.dtype)
        return self._take_back(whole, gathered, out)

    def broadcast(self, call: Call, array: Array, root: int) -> Steps:
        """The root's array on all ranks."""
        if _goes_as_it_is(array):
            return (yield from self._host.broadcast(call, array, root))
        buffer, host = self._bring(array)
        yield from self._host.broadcast(call, host, root)
        if self._rank != root:
            return self._take_back(buffer, host, array)
        self._pinned.give(buffer)
        return array

    def scatter(self, call: Call, array: Array, counts: tuple[int, ...] | None, root: int) -> Steps:
        """A new array of this rank's rows of the root's."""
        buffer, host = self._bring(array)
        piece = yield from self._host.scatter(call, host, counts, root)
        self._pinned.give(buffer)
        return Device("cuda").put(piece)

    def gather(self, call: Call, array: Array, root: int) -> Steps:
        """All ranks' rows, a new array, on the root."""
        buffer, host = self._bring(array)
        whole = yield from self._host.gather(call, host, root)
        self._pinned.give(buffer)
        return None if whole is None else Device("cuda").put(whole)

    def all_to_all(self, call: Call, parts: Sequence[Array]) -> Steps:
        """A list of new arrays, one from each rank."""
        brought = [self._bring(part) for part in parts]
        received = yield from self._host.all_to_all(call, [host for _, host in brought])
        for buffer, _ in brought:
            self._pinned.give(buffer)
        return [Device("cuda").put(array) for array in received]

    # ------------------------------------------------------------------------------------ buffers

    def _buffer(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> tuple[Array, Array]:
        """A pinned buffer, and an array of ``shape`` in it."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        buffer = self._pinned.take(nbytes)
        return buffer, buffer[:nbytes].view(dtype).reshape(shape)

    def _bring(self, array: Array) -> tuple[Array, Array]:
        """A pinned buffer, and the copy of ``array`` in it.

        It is given back if the collective succeeds: after an error MPI may still use it.
        """
        buffer, host = self._buffer(array.shape, array.dtype)
        copy_into(host, array)
        return buffer, host

    def _take_back(self, buffer: Array | None, host: Array, out: Array) -> Array:
        copy_into(out, host)
        if buffer is not None:
            synchronize(out)  # the GPU reads the buffer until then
            self._pinned.give(buffer)
        return out


def _goes_as_it_is(array: Array) -> bool:
    """Whether MPI is handed ``array`` itself. Ranks may differ in it: the bytes are alike."""
    if is_device_array(array) and not (array.nbytes > INLINE_BYTES and settings.cuda_aware()):
        return False
    synchronize(array)  # the library knows nothing of streams
    return True
