"""The channel of GPU data by NCCL: grouped sends and receives, and NCCL's own sums on request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpishard.base import (
    Array,
    DType,
    address,
    array_namespace,
    copy_into,
    is_device_array,
    load_cupy,
    load_nccl,
)
from mpishard.communication.contract.reduction import ReductionOperation, TreeReducer
from mpishard.communication.contract.work import Steps
from mpishard.communication.mpi.group import Group
from mpishard.communication.mpi.messages import MessageChannel
from mpishard.communication.nccl.communicator import Communicator, NCCLHandle

SMALL_BYTES = 1 << 16
"""Most bytes of GPU data that travel through the host, because NCCL takes longer to begin."""

# The other dtypes, and MIN and MAX, are combined in the tree: NCCL adds 16-bit floats in 16 bits,
# may lose NaN in a minimum, and has no integers of 16 bits and no product of complex numbers.
_NUMBERS = {
    "int8": ("NCCL_INT8", 1), "uint8": ("NCCL_UINT8", 1), "int32": ("NCCL_INT32", 1),
    "uint32": ("NCCL_UINT32", 1), "int64": ("NCCL_INT64", 1), "uint64": ("NCCL_UINT64", 1),
    "float32": ("NCCL_FLOAT32", 1), "float64": ("NCCL_FLOAT64", 1),
    "complex64": ("NCCL_FLOAT32", 2), "complex128": ("NCCL_FLOAT64", 2),
}  # fmt: skip
_OPERATIONS = {
    ReductionOperation.SUM: "NCCL_SUM",
    ReductionOperation.AVERAGE: "NCCL_SUM",
    ReductionOperation.PRODUCT: "NCCL_PROD",
}


class NCCLChannel(MessageChannel):
    """The channel of one group's GPU data; `MessageChannel` describes its methods.

    Data move as bytes, so that NCCL needs to know no dtype. `reduce` is that of `MessageChannel`:
    each rank receives all parts of its piece and combines them in the one tree.

    Parameters
    ----------
    group : Group
        The ranks, whose own channel carries small data.
    communicator : Communicator
        Their communicator of NCCL.
    reducer : TreeReducer
        Combines contributions.
    is_fast : bool
        Whether NCCL combines contributions itself if it can: see `combines`.
    """

    ROUND_BYTES = 1 << 28

    def __init__(
        self, group: Group, communicator: Communicator, reducer: TreeReducer, *, is_fast: bool
    ) -> None:
        super().__init__(group.mpi, group.data, group.in_flight, reducer)
        self._host, self._communicator, self._is_fast = group.channel, communicator, is_fast

    def move(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> Steps:
        sends = [(rank, part) for rank, part in enumerate(outgoing) if rank != self._rank]
        receives = [(rank, part) for rank, part in enumerate(incoming) if rank != self._rank]
        yield from self.exchange(sends, receives)

    def exchange(
        self, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]
    ) -> Steps:
        """Send and receive arrays, each with the rank of its receiver or sender, in one group."""
        nccl = load_nccl()

        def post(made: NCCLHandle, stream: int) -> None:
            nccl.groupStart()
            for rank, part in sends:
                if part.size:
                    made.send(address(part), part.nbytes, nccl.NCCL_UINT8, rank, stream)
            for rank, part in receives:
                if part.size:
                    made.recv(address(part), part.nbytes, nccl.NCCL_UINT8, rank, stream)
            nccl.groupEnd()

        yield from self._communicator.run(post, sends, receives)

    def spread(self, parts: Sequence[Array]) -> Steps:
        # The sum over all ranks, which is the same on each: all must choose the same way.
        if sum(part.nbytes for part in parts) <= SMALL_BYTES:
            hosts = [np.empty(part.size, part.dtype) for part in parts]
            copy_into(hosts[self._rank], parts[self._rank])
            yield from self._host.spread(hosts)
            for rank, host in enumerate(hosts):
                if rank != self._rank:
                    copy_into(parts[rank], host)
            return
        near = [_on_device(part) for part in parts]
        if not _is_even(near):
            yield from self.move([near[self._rank]] * self._world_size, near)
        else:
            nccl, own = load_nccl(), near[self._rank]

            def post(made: NCCLHandle, stream: int) -> None:
                made.allGather(address(own), address(near[0]), own.nbytes, nccl.NCCL_UINT8, stream)

            yield from self._communicator.run(post, near)
        for part, moved in zip(parts, near, strict=True):
            if moved is not part:
                copy_into(part, moved)

    def broadcast(self, array: Array, root: int) -> Steps:
        nccl, near = load_nccl(), _on_device(array)

        def post(made: NCCLHandle, stream: int) -> None:
            made.broadcast(address(near), address(near), near.nbytes, nccl.NCCL_UINT8, root, stream)

        yield from self._communicator.run(post, near)
        if near is not array:
            copy_into(array, near)

    # ------------------------------------------------------------------------- NCCL's own sums

    def combines(self, dtype: DType, operation: ReductionOperation) -> bool:
        """Return whether NCCL itself combines numbers of ``dtype``, in an order of its own."""
        is_product = operation is ReductionOperation.PRODUCT
        return (
            self._is_fast
            and operation in _OPERATIONS
            and dtype.name in _NUMBERS
            and not (is_product and dtype.kind == "c")
        )

    def combine(
        self,
        array: Array,
        sizes: tuple[int, ...],
        operation: ReductionOperation,
        piece: Array,
        whole: Array | None,
    ) -> Steps:
        """Combine ``array`` of all ranks into ``whole``, or if that is None this rank's ``piece``.

        ``sizes`` are the elements of the ranks' pieces.
        """
        nccl = load_nccl()
        name, width = _NUMBERS[array.dtype.name]
        kind, how = getattr(nccl, name), getattr(nccl, _OPERATIONS[operation])
        starts = np.cumsum((0, *sizes)).tolist()
        parts = [array[low : low + size] for low, size in zip(starts, sizes, strict=False)]
        result = piece if whole is None else whole

        def post(made: NCCLHandle, stream: int) -> None:
            if whole is not None:
                made.allReduce(
                    address(array), address(whole), array.size * width, kind, how, stream
                )
            elif len(set(sizes)) == 1:
                made.reduceScatter(
                    address(array), address(piece), piece.size * width, kind, how, stream
                )
            else:
                nccl.groupStart()
                for rank, part in enumerate(parts):
                    if part.size:
                        into = piece if rank == self._rank else part  # written on ``rank`` alone
                        made.reduce(
                            address(part), address(into), part.size * width, kind, how, rank, stream
                        )
                nccl.groupEnd()

        yield from self._communicator.run(post, array, piece, whole)
        if operation is ReductionOperation.AVERAGE:
            array_namespace(result).divide(result, self._world_size, out=result)


def _on_device(array: Array) -> Array:
    """Return ``array``, or new memory on the GPU with its values."""
    if is_device_array(array):
        return array
    near = load_cupy().empty(array.shape, array.dtype)
    copy_into(near, array)
    return near


def _is_even(parts: Sequence[Array]) -> bool:
    """Return whether parts have one size and lie end to end."""
    start, nbytes = address(parts[0]), parts[0].nbytes
    return all(
        part.nbytes == nbytes and address(part) == start + rank * nbytes
        for rank, part in enumerate(parts)
    )
