"""Collectives on GPU arrays under MPI: through pinned host buffers.

Most MPI libraries, those of the wheels among them, cannot read GPU memory. So GPU arrays are copied
to host buffers, which MPI sends and receives, and the results are copied back. The buffers are
page-locked, so that the GPU copies at full speed, and are kept for the next collective. If the
library is built for CUDA and ``MPISHARD_CUDA_AWARE=1`` is set, MPI gets device pointers instead for
reductions, all_gather and broadcast of more than 128 bytes.

No GPU has run this yet: it was tested with a stand-in for CuPy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.base import Array, Device, copy_into, is_device_array, settings, synchronize
from mpishard.communication.contract.call import Call, CollectiveKind
from mpishard.communication.contract.work import Steps
from mpishard.communication.mpi.headers import INLINE_BYTES
from mpishard.communication.mpi.messages import Bytes, ScratchPool

_log = logging.getLogger("mpishard")

_BY_POINTER = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.BROADCAST,
)


def needs_staging(call: Call, array: Array) -> bool:
    """Return whether the GPU array ``array`` is copied to the host for the collective ``call``.

    The answer may differ between ranks, because the same bytes travel in both cases.
    """
    is_large = array.nbytes > INLINE_BYTES
    if call.kind not in _BY_POINTER or not is_large or not settings.cuda_aware():
        return True
    synchronize(array)  # MPI does not wait for the work of CUDA streams
    return False


class Staging:
    """The pinned host buffers of one backend, on which collectives on GPU arrays run.

    Parameters
    ----------
    logs : bool
        Whether this rank logs how the arrays travel.
    """

    def __init__(self, *, logs: bool) -> None:
        self._pinned = ScratchPool(lambda n: Device("cuda").pinned(n, np.dtype(np.uint8)))
        if logs:
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

    def run(self, steps: Callable[..., Steps], call: Call, given: Any, *arguments: object) -> Steps:
        """Run the collective ``steps`` of ``call`` on host copies of ``given``, one array or more.

        Arrays among ``arguments`` take the result, so their values are not copied to the host.
        """
        buffers: list[Bytes] = []
        staged: list[tuple[Array, Array]] = []  # GPU arrays, each with its host buffer

        def host_of(array: Any, *, is_read: bool = False) -> Any:
            if not hasattr(array, "dtype") or not is_device_array(array):
                return array
            # ``out`` may be the array itself, and must then get the same buffer.
            for known, host in staged:
                if known is array:
                    return host
            buffers.append(self._pinned.take(array.nbytes))
            host = buffers[-1][: array.nbytes].view(array.dtype).reshape(array.shape)
            staged.append((array, host))
            if is_read:
                copy_into(host, array)
            return host

        def brought_back(result: Any) -> Any:
            for array, host in staged:
                if host is result:
                    copy_into(array, host)
                    synchronize(array)  # the buffer is used again: the GPU must have read it
                    return array
            return None if result is None else Device("cuda").put(result)

        is_one = hasattr(given, "dtype")
        hosts = [host_of(array, is_read=True) for array in ([given] if is_one else given)]
        outs = [host_of(argument) for argument in arguments]
        result = yield from steps(call, hosts[0] if is_one else hosts, *outs)
        result = [*map(brought_back, result)] if isinstance(result, list) else brought_back(result)
        # Not in a finally clause: after an error MPI may still use the buffers.
        for buffer in buffers:
            self._pinned.give(buffer)
        return result
