"""The NCCL communicator of one group of ranks: its start, its stream, its end.

NCCL's calls only put work on a CUDA stream, so each communicator has a stream of its own. The work
waits there, by an event, for the rank's current stream, which has computed the arrays and may still
use memory that CuPy gives out again. A second event tells that the work is done. Meanwhile the rank
computes, and its other collectives go on. Only the start blocks, on a thread of its own.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mpishard.base import CommunicationError, Device, address, load_cupy, load_nccl, settings
from mpishard.communication.contract.matching import grouped, who
from mpishard.communication.contract.work import Steps, Waitable
from mpishard.communication.mpi.group import Group
from mpishard.communication.mpi.messages import Pending

_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
_PLACE_BYTES = 256


class NCCLHandle(Protocol):
    """CuPy's communicator of NCCL, as far as it is used here. The stand-in for CuPy has it, too.

    Arrays are addresses in GPU memory; ``kind`` and ``how`` are NCCL's numbers of a dtype and an
    operation.
    """

    def send(self, sent: int, count: int, kind: int, peer: int, stream: int) -> None: ...
    def recv(self, received: int, count: int, kind: int, peer: int, stream: int) -> None: ...
    def allGather(self, sent: int, received: int, count: int, kind: int, stream: int) -> None: ...  # noqa: N802
    def broadcast(
        self, sent: int, received: int, count: int, kind: int, root: int, stream: int
    ) -> None: ...
    def allReduce(  # noqa: N802
        self, sent: int, received: int, count: int, kind: int, how: int, stream: int
    ) -> None: ...
    def reduceScatter(  # noqa: N802
        self, sent: int, received: int, count: int, kind: int, how: int, stream: int
    ) -> None: ...
    def reduce(
        self, sent: int, received: int, count: int, kind: int, how: int, root: int, stream: int
    ) -> None: ...
    def commSplit(self, color: int, key: int) -> NCCLHandle: ...  # noqa: N802
    def check_async_error(self) -> None: ...
    def destroy(self) -> None: ...
    def abort(self) -> None: ...


Post = Callable[[NCCLHandle, int], None]
"""A function that puts work on a stream, which is given by its address."""


def _machine() -> str:
    """Return a name of this machine that no other one has."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()


class Communicator:
    """The NCCL communicator of one group, which begins at its first use.

    Parameters
    ----------
    group : Group
        The ranks. Their communicator of data carries the unique id.
    world_ranks : sequence of int
        Their numbers in the root world, for errors.
    device : Device
        This rank's GPU.
    wait : callable
        Returns a context in which this rank waits, at a place given as a string, with a time limit.
    made : object, optional
        The communicator that NCCL has split off another one for these ranks.
    """

    def __init__(
        self,
        group: Group,
        world_ranks: Sequence[int],
        device: Device,
        wait: Callable[[str], AbstractContextManager[object]],
        made: NCCLHandle | None = None,
    ) -> None:
        self._group, self._world_ranks, self._device, self._wait = group, world_ranks, device, wait
        self._made = made
        self._cuda = load_cupy().cuda
        self._stream: Any = None
        self._is_connected = self._is_over = False

    def run(self, post: Post, *arrays: object) -> Steps:
        """Put work on the stream, and wait until it is done.

        ``post`` takes the communicator of CuPy and the address of the stream. ``arrays`` are kept
        until the work is done. Every rank of the group calls it in the same order.
        """
        if not self._is_connected:
            yield from self._begin()
        self._require_whole()
        with self._wait("in NCCL for other ranks"), self._cuda.Device(self._device.index):
            done = self._put(post)
        yield _Done(self, done, self._group.in_flight, *arrays)
        self._require_whole()  # work that was aborted ends, too

    def _put(self, post: Post) -> Any:
        """Put work on the stream, after that of the current stream; return the event of its end."""
        # Events without timing are cheaper, and nobody reads their times.
        ready, done = (self._cuda.Event(disable_timing=True) for _ in range(2))
        ready.record()
        self._stream.wait_event(ready)
        assert self._made is not None
        post(self._made, self._stream.ptr)
        done.record(self._stream)
        return done

    def check(self) -> None:
        """Raise if NCCL has failed, here or on another rank."""
        if self._made is not None:
            self._made.check_async_error()

    def split(self, color: int | None, key: int) -> NCCLHandle | None:
        """Split it, after all its work is done; None if it was not made. Collective.

        Ranks of one ``color`` go together, in the order of ``key``; None joins none.
        """
        if self._made is None:
            return None
        with self._cuda.Device(self._device.index):
            if self._stream is not None:
                self._stream.synchronize()  # NCCL splits a communicator only if it is idle
            return self._made.commSplit(-1 if color is None else color, key)

    def end(self, *, in_good_order: bool) -> None:
        """End it. Work that is not done is waited for if ``in_good_order``, and else aborted."""
        made, self._made, self._is_over = self._made, None, True
        if made is not None:
            made.destroy() if in_good_order else made.abort()
        self._stream = None

    def _require_whole(self) -> None:
        if self._is_over:
            raise CommunicationError("NCCL was aborted, because this world or a rank has ended")

    # ---------------------------------------------------------------------------------- the start

    def _begin(self) -> Steps:
        """Enter NCCL with the ranks of the group, and connect to each of them."""
        self._require_whole()
        unique = b""  # not needed for a communicator that was split off another one
        if self._made is None:
            unique = yield from self._exchange_id()
        yield _Entry(lambda: self._enter(unique))
        self._is_connected = True

    def _exchange_id(self) -> Steps:
        """Return the unique id, after an exchange of it and of the ranks' GPUs."""
        group = self._group
        gpu = self._cuda.Device(self._device.index).pci_bus_id
        place = f"GPU {gpu}\n{_machine()}\n{socket.gethostname()}".encode()[:_PLACE_BYTES]
        row = np.zeros(_ID_BYTES + _PLACE_BYTES, np.uint8)
        row[_ID_BYTES : _ID_BYTES + len(place)] = np.frombuffer(place, np.uint8)
        if group.rank == 0:
            row[:_ID_BYTES] = np.frombuffer(load_nccl().get_unique_id(), np.uint8)
        rows = np.empty((group.world_size, row.size), np.uint8)
        # By MPI: NCCL has no way of its own to pass on the unique id.
        yield group.keep(group.data.Iallgather(row, rows), row, rows)
        self._refuse_shared_gpus([r[_ID_BYTES:].tobytes().rstrip(b"\0").decode() for r in rows])
        return rows[0, :_ID_BYTES].tobytes()

    def _enter(self, unique: bytes) -> None:
        """Make the communicator, if there is none, and exchange a byte with each rank."""
        # By default NCCL connects ranks at the first use of each of its algorithms. That use blocks
        # until the other ranks come to it, which may wait for this one in another world.
        settings.write_default("NCCL_RUNTIME_CONNECT", "0")
        nccl, cupy, count = load_nccl(), load_cupy(), self._group.world_size

        def post(made: NCCLHandle, stream: int) -> None:
            nccl.groupStart()
            for rank in range(count):
                made.send(address(sent) + rank, 1, nccl.NCCL_UINT8, rank, stream)
                made.recv(address(received) + rank, 1, nccl.NCCL_UINT8, rank, stream)
            nccl.groupEnd()

        with self._cuda.Device(self._device.index):
            if self._made is None:
                # Before the exchange, in which the watchdog may abort it.
                self._made = nccl.NcclCommunicator(count, unique, self._group.rank)
            self._stream = self._cuda.Stream(non_blocking=True)
            sent, received = cupy.zeros(count, np.uint8), cupy.empty(count, np.uint8)
            self._put(post).synchronize()

    def _refuse_shared_gpus(self, places: Sequence[str]) -> None:
        """Refuse ranks that have one GPU, on all ranks, because NCCL's error names none."""
        # A container may have a host name of its own.
        gpus = grouped(range(len(places)), lambda rank: places[rank].rpartition("\n")[0])
        for gpu, ranks in gpus.items():
            if len(ranks) > 1:
                sharing = who([self._world_ranks[rank] for rank in ranks])
                address, host = gpu.partition("\n")[0], places[ranks[0]].rpartition("\n")[2]
                raise CommunicationError(
                    f"{sharing} have {address} of {host} in common, and NCCL needs a GPU for each "
                    "rank: start at most as many ranks on a node as it has GPUs, and let each see "
                    "one (CUDA_VISIBLE_DEVICES) or all; or use MPICommunicationBackend"
                )


class _Entry(Waitable):
    """The entry into NCCL, on a thread of its own, because it blocks until all ranks have come.

    A rank that blocked itself would let others wait in its other worlds, where they may block, too.
    """

    __slots__ = ("_enter", "_error", "_thread")

    def __init__(self, enter: Callable[[], None]) -> None:
        self._enter = enter
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mpishard-nccl", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._enter()
        except BaseException as error:  # noqa: BLE001 - raised by `test`
            self._error = error

    def test(self) -> bool:
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True


class _Done(Pending):
    """The event after the work of one call, whose arrays are kept until it has happened."""

    __slots__ = ("_event", "_owner")

    def __init__(
        self, owner: Communicator, event: Any, in_flight: set[Pending], *keep: object
    ) -> None:
        super().__init__([], in_flight, *keep)
        self._owner, self._event = owner, event

    def test(self) -> bool:
        if not self._event.done:
            self._owner.check()
            return False
        return super().test()
