"""The backend of processes with a GPU each: MPI, and NCCL for arrays on the GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self, get_args

from mpishard.base import Array, Device, is_device_array, load_nccl
from mpishard.communication.contract.call import Call
from mpishard.communication.contract.reduction import Reductions
from mpishard.communication.contract.work import Steps, Work
from mpishard.communication.failure.report import OnFailure
from mpishard.communication.mpi.backend import MPICommunicationBackend
from mpishard.communication.mpi.collectives import Collectives
from mpishard.communication.mpi.group import Group
from mpishard.communication.nccl.channel import NCCLChannel
from mpishard.communication.nccl.collectives import NCCLCollectives, goes_by_host
from mpishard.communication.nccl.communicator import Communicator, NCCLHandle

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

_log = logging.getLogger("mpishard")


class NCCLCommunicationBackend(MPICommunicationBackend):
    """One process with a GPU of its own as one rank of an MPI world.

    It is an `MPICommunicationBackend` whose arrays on GPUs travel by NCCL in reductions, all_gather
    and broadcast, if they are larger than 64 KiB. All else travels by MPI: headers, smaller arrays,
    arrays in host memory, the other collectives and messages. `initialize` makes GPU number
    ``local_rank % device_count`` the thread's device; arrays on other GPUs are refused.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Default: ``COMM_WORLD``.
    reductions : {"exact", "fast"}
        Who adds up arrays on GPUs. With "exact" each rank receives all parts of its piece and adds
        them in the one order of the contract, so that the bits are those of every other backend.
        With "fast" NCCL adds them, in an order of its own, which may differ from run to run. MIN,
        MAX and 16-bit numbers keep the contract's rules and are never left to NCCL.
    on_failure : {"abort", "shrink"}
        As for `MPICommunicationBackend`.

    Raises
    ------
    ValueError
        For another value of ``reductions`` or ``on_failure``.
    DeviceUnavailableError
        If CuPy, a GPU or the NCCL library is missing.
    MPIUnavailableError
        As for `MPICommunicationBackend`.
    """

    def __init__(
        self,
        comm: Comm | None = None,
        *,
        reductions: Reductions = "exact",
        on_failure: OnFailure = "abort",
    ) -> None:
        if reductions not in get_args(Reductions):
            raise ValueError(f"reductions must be 'exact' or 'fast', got {reductions!r}")
        load_nccl()
        super().__init__(comm, on_failure=on_failure)
        self.reductions = reductions
        self._device = Device.parse("cuda")
        self._communicators: list[Communicator] = []  # of this world and all that were split off it
        # The communicator that NCCL has split off for this group.
        self._split_off: NCCLHandle | None = None

    @property
    def _kind(self) -> str:
        return f"nccl, {self.reductions}"

    def _on_initialize(self) -> None:
        super()._on_initialize()
        if self._is_root:
            made = self._communicators  # not self, which the job must not keep
            assert self._job is not None
            self._job.ending.stop = partial(_end, made, in_good_order=False)
            if self.reductions == "fast" and self._rank == 0:
                _log.warning(
                    "reductions='fast': NCCL adds up arrays on GPUs in an order of its own, so "
                    "that the last bits may differ from run to run and from other backends"
                )

    def _make_collectives(self, group: Group) -> Collectives:
        self._device = self._device.for_rank(self.local_rank)
        self._device.use()
        job, ranks = self._job, self.world_ranks
        assert job is not None
        self._communicator = made = Communicator(
            group, ranks, self._device, lambda where: job.wait(lambda: where), self._split_off
        )
        self._communicators.append(made)
        is_fast = self.reductions == "fast"
        channel = NCCLChannel(group, made, self._reducer, is_fast=is_fast)
        return NCCLCollectives(self, group, channel)

    def _on_shutdown(self) -> None:
        # NCCL's communicators of groups end with the root, because a rank of a group may still read
        # the memory of one that has left it.
        super()._on_shutdown()
        if self._is_root:
            _end(self._communicators, in_good_order=self._session.broken is None)

    def _shrink(self) -> Self:
        self._require_survival("shrink()")
        _end(self._communicators, in_good_order=False)  # they wait for the ranks that are lost
        return super()._shrink()

    def _alike(self, comm: Comm, on_failure: OnFailure = "abort") -> Self:
        return type(self)(comm, reductions=self.reductions, on_failure=on_failure)

    # -------------------------------------------------------------------------------- collectives

    def _needs_staging(self, call: Call, array: Array) -> bool:
        return goes_by_host(call, array)

    def _start(self, call: Call, steps: Callable[..., Steps], *arguments: Any) -> Work:
        flat = [one for a in arguments for one in (a if isinstance(a, list | tuple) else [a])]
        arrays = [one for one in flat if hasattr(one, "dtype")]
        if any(map(is_device_array, arrays)):
            self._check_devices(call, arrays)
        return super()._start(call, steps, *arguments)

    def _check_devices(self, call: Call, arrays: list[Array]) -> None:
        """Refuse arrays that are not all on this rank's GPU."""
        found = [Device.of(array) for array in arrays]
        if any(device != self._device for device in found):
            raise ValueError(
                f"{call.kind.label}: rank {self.world_ranks[self._rank]} communicates from "
                f"{self._device}, and got arrays on {', '.join(map(str, found))}: copy them there, "
                "and pass an out on the same device as the array"
            )
        self._device.use()  # new arrays, and sums, belong there

    def _steps_split(self, call: Call, color: int | None, key: int) -> Steps:
        child = yield from super()._steps_split(call, color, key)
        with self._blocked_in(call):
            if child is None:
                self._communicator.split(None, 0)
            else:
                child._communicators = self._communicators
                child._device = self._device
                # A number that only ranks of this group have.
                child._split_off = self._communicator.split(min(child.world_ranks), child.rank)
        return child


def _end(communicators: list[Communicator], *, in_good_order: bool) -> None:
    """End communicators, those of groups first."""
    # In reverse order of their making: a group ends before the world that it was split off.
    while communicators:
        communicators.pop().end(in_good_order=in_good_order)
