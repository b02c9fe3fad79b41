"""The collectives of MPI ranks, with GPU arrays that travel by NCCL."""

from __future__ import annotations

import math

import numpy as np

from mpishard.base import (
    Array,
    CollectiveMismatchError,
    address,
    array_namespace,
    copy_into,
    is_device_array,
)
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.call import Call, CollectiveKind
from mpishard.communication.contract.matching import who
from mpishard.communication.contract.reduction import ReductionOperation
from mpishard.communication.contract.work import Steps
from mpishard.communication.mpi.collectives import Collectives, split_up
from mpishard.communication.mpi.group import Channel, Group
from mpishard.communication.mpi.headers import INLINE_BYTES, Headers
from mpishard.communication.nccl.channel import SMALL_BYTES, NCCLChannel


def goes_by_host(call: Call, array: Array) -> bool:
    """Return whether the GPU array ``array`` is copied to the host for the collective ``call``.

    The sizes of the other ranks' arrays, which decide how an all_gather or a broadcast travels, are
    known only from the headers.
    """
    if call.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER):
        return int(array.nbytes) <= SMALL_BYTES
    return call.kind not in (CollectiveKind.ALL_GATHER, CollectiveKind.BROADCAST)


class NCCLCollectives(Collectives):
    """The collectives of one group of ranks with a GPU each.

    Parameters
    ----------
    backend, group
        As for `Collectives`.
    channel : NCCLChannel
        The channel of GPU data.
    """

    def __init__(self, backend: CommunicationBackend, group: Group, channel: NCCLChannel) -> None:
        super().__init__(backend, group)
        self._by_pointer = True
        self._channel = channel

    def _device_channel(self, headers: Headers) -> Channel:
        calls = headers.calls
        if sum(call.nbytes for call in calls) > SMALL_BYTES:
            # Smaller arrays came with their headers, wherever they lie.
            large = [rank for rank, call in enumerate(calls) if call.nbytes > INLINE_BYTES]
            self._refuse_mixed(calls[0], {rank: headers.on_device(rank) for rank in large})
        return self._channel

    def _refuse_mixed(self, call: Call, is_on_gpu: dict[int, bool]) -> None:
        """Refuse, on all ranks, arrays of which only some are on a GPU."""
        names = self._backend.world_ranks
        there = [names[rank] for rank, on_gpu in is_on_gpu.items() if on_gpu]
        others = [names[rank] for rank, on_gpu in is_on_gpu.items() if not on_gpu]
        if others:
            raise CollectiveMismatchError(
                f"{call.kind.label}: {who(there)} passed arrays on a GPU and {who(others)} in host "
                f"memory; no data was mixed. NCCL moves more than {SMALL_BYTES} bytes from GPU to "
                "GPU: let every rank pass an array on its GPU, or every rank one on the host"
            )

    def _reduce_by(
        self,
        channel: Channel,
        array: Array,
        sizes: tuple[int, ...],
        operation: ReductionOperation,
        piece: Array,
        whole: Array | None = None,
    ) -> Steps:
        if channel is self._channel and self._channel.combines(array.dtype, operation):
            yield from self._channel.combine(array, sizes, operation, piece, whole)
        else:
            yield from super()._reduce_by(channel, array, sizes, operation, piece, whole)

    def all_gather(self, call: Call, array: Array, out: Array | None) -> Steps:
        if not is_device_array(array):
            return (yield from super().all_gather(call, array, out))
        headers = yield from self.open(call, array)
        sizes = [other.size for other in headers.calls]
        if out is None:
            rows = sum((other.shape or (0,))[0] for other in headers.calls)
            out = array_namespace(array).empty((rows, *array.shape[1:]), array.dtype)
        flat, result = array.reshape(-1), out.reshape(-1)
        if headers.all_inline:
            arrays = [headers.inline(rank) for rank in range(self._world_size)]
            # Headers are in host memory, so that one copy brings all of them to the GPU.
            copy_into(result, np.concatenate(arrays))
            return out
        channel, target = self._group.channel, result
        if headers.flags()[0]:
            channel = self._device_channel(headers)
        else:  # the other ranks' arrays are in host memory, and this one is small
            target = np.empty(result.shape, result.dtype)
        yield from self.turn(call)
        pieces = split_up(target, sizes)
        if address(pieces[self._rank]) != address(flat):
            copy_into(pieces[self._rank], flat)
        step = channel.bytes_all // array.itemsize
        for low in range(0, max(sizes), step):
            yield from channel.spread([piece[low : low + step] for piece in pieces])
        if target is not result:
            copy_into(result, target)
        return out

    def broadcast(self, call: Call, array: Array | None, root: int) -> Steps:
        headers = yield from self.open(call, array if self._rank == root else None)
        sent, on_gpu = headers.calls[root], headers.on_device(root)
        if array is None:  # in host memory, as on every backend
            array = np.empty(sent.shape or (), sent.dtype)
        flat = array.reshape(-1)
        if sent.nbytes <= INLINE_BYTES:
            if self._rank != root:
                copy_into(flat, headers.inline(root))
            return array
        yield from self.turn(call)
        channel, target = self._group.channel, flat
        if on_gpu and sent.nbytes > SMALL_BYTES:
            channel = self._channel
        elif is_device_array(flat):
            target = np.empty(flat.shape, flat.dtype)
            if self._rank == root:
                copy_into(target, flat)
        step = channel.bytes_all // sent.dtype.itemsize
        for low in range(0, math.prod(sent.shape), step):
            yield from channel.broadcast(target[low : low + step], root)
        if target is not flat and self._rank != root:
            copy_into(flat, target)
        return array
