"""The conformance suite on `NCCLCommunicationBackend`, with arrays on GPUs of the stand-in."""

import sys

import ml_dtypes
import numpy as np
import pytest
from cupy_stand_in import installed
from numpy.lib.array_utils import byte_bounds

from mpishard.base.arrays import copy_into
from mpishard.base.devices import Device, load_cupy
from mpishard.communication import NCCLCommunicationBackend
from mpishard.communication.contract.call import DTYPES
from mpishard.communication.mpi import messages
from mpishard.communication.nccl import channel, collectives
from mpishard.testing.communication import CommunicationConformance

pytestmark = pytest.mark.mpi

ON_GPUS = tuple(dtype for dtype in DTYPES if dtype != ml_dtypes.bfloat16)
# NCCL's own order of sums, its rings and its groups; all other code is that of host arrays.
DEPEND_ON_RANKS = {f"check_{name}" for name in (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "split",
)}  # fmt: skip
SAMPLE = tuple(d for d in ON_GPUS if d.name in ("bool", "float16", "float64", "complex64"))


@pytest.fixture
def cupy(backend):
    with installed(device_count=backend.world_size) as module:
        yield module


@pytest.fixture(autouse=True)
def by_nccl(monkeypatch):
    """Let NCCL carry all that does not fit a header."""
    for module in (channel, collectives):
        monkeypatch.setattr(module, "SMALL_BYTES", 128)


def near(arrays):
    """Copies on the GPU, which overlap as the arrays do."""
    known = {}
    arrays = [a for a in arrays if isinstance(a, np.ndarray)]
    for array in arrays:
        overlapping = [a for a in arrays if a is array or np.may_share_memory(a, array)]
        low = min(byte_bounds(a)[0] for a in overlapping)
        key = tuple(sorted(map(id, overlapping)))
        if key not in known:
            high = max(byte_bounds(a)[1] for a in overlapping)
            known[key] = load_cupy().zeros(max(1, high - low), np.uint8)
        start = array.ctypes.data - low
        part = known[key][start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy_into(part, array)
        yield id(array), part


class OnGPU(NCCLCommunicationBackend):
    """Gives the arrays of each collective to NCCL as arrays on a GPU, and brings results back."""

    def __init__(self, comm, **options):
        super().__init__(comm, **options)
        self._device = Device("cuda", self.rank)  # by number in the world, also on simulated nodes

    def _through_gpu(self, name, call, given, *arguments):
        arrays = dict(near([*(given if isinstance(given, list) else [given]), *arguments]))

        def there(argument):
            if isinstance(argument, list):
                return [there(one) for one in argument]
            return arrays.get(id(argument), argument)

        def back(result):
            if isinstance(result, list):
                return [back(one) for one in result]
            if result is None or isinstance(result, np.ndarray):
                return result
            for argument in (given, *arguments):
                if arrays.get(id(argument)) is result:
                    if argument.flags.writeable:  # else the root's own
                        copy_into(argument, result)
                    return argument
            return result.get()

        steps = getattr(NCCLCommunicationBackend, name)
        result = yield from steps(self, call, there(given), *map(there, arguments))
        return back(result)


def _through_gpu(name):
    return lambda self, *arguments: self._through_gpu(name, *arguments)


for _kind in (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "scatter",
    "gather",
    "all_to_all",
):
    setattr(OnGPU, f"_steps_{_kind}", _through_gpu(f"_steps_{_kind}"))


@pytest.mark.parametrize("name", CommunicationConformance.names())
def test_conformance(backend, cupy, name):
    if backend.world_size > 2 and name not in DEPEND_ON_RANKS:
        pytest.skip("two ranks show it, and the host's conformance suite for more")
    checks = CommunicationConformance(ON_GPUS if backend.world_size == 2 else SAMPLE)
    with OnGPU(backend._comm) as world:
        getattr(checks, name)(world)
        if name in ("check_all_reduce", "check_reduce_scatter", "check_all_gather"):
            assert "init" in [call[0] for call in sys.modules["cupy.cuda.nccl"].calls]
    calls = sys.modules["cupy.cuda.nccl"].calls
    kinds = [call[0] for call in calls]
    assert kinds.count("destroy") == kinds.count("init") + sum(
        call[0] == "commSplit" and call[1] >= 0 for call in calls
    )


@pytest.mark.parametrize(("nodes", "arena"), [("1", "off"), ("2", "auto")])
def test_conformance_without_memory_that_all_ranks_share(backend, cupy, nodes, arena, monkeypatch):
    monkeypatch.setenv("MPISHARD_VIRTUAL_NODES", nodes)
    monkeypatch.setenv("MPISHARD_ARENA", arena)
    checks = CommunicationConformance([np.dtype(np.float32)])
    with OnGPU(backend._comm) as world:
        for name in (
            "all_reduce",
            "reduce_scatter",
            "all_gather",
            "broadcast",
            "split",
            "async_orders",
            "shared_memory",
            "mismatches",
        ):
            getattr(checks, f"check_{name}")(world)


def test_conformance_with_a_low_limit_for_large_arrays(backend, cupy, monkeypatch):
    monkeypatch.setattr(messages, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(channel.NCCLChannel, "ROUND_BYTES", 300)
    checks = CommunicationConformance([np.dtype(np.float32)])
    with OnGPU(backend._comm) as world:
        for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "twins"):
            getattr(checks, f"check_{name}")(world)


@pytest.mark.parametrize("name", ["reduce_scatter", "all_reduce", "twins", "split"])
def test_conformance_of_fast_sums_in_checks_without_an_order(backend, cupy, name):
    checks = CommunicationConformance([np.dtype(np.int32), np.dtype(np.float16)])
    with OnGPU(backend._comm, reductions="fast") as world:
        getattr(checks, f"check_{name}")(world)
