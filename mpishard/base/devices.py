"""Devices: host memory, or one of the node's GPUs.

Only this module imports CuPy, when a GPU is first asked for.
"""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from mpishard.base.arrays import (
    NAMESPACES,
    Array,
    DType,
    Namespace,
    beside,
    copy_into,
    device_number,
    is_device_array,
    to_host,
)
from mpishard.base.errors import DeviceUnavailableError
from mpishard.base.memory import available_memory

_INSTALL = "pip install 'mpishard[cuda12]', or 'mpishard[cuda13]' for a driver of CUDA 13"


def load_cupy() -> Namespace:
    """Import and return ``cupy``.

    Raises
    ------
    DeviceUnavailableError
        If it is not installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise DeviceUnavailableError(
            f"device='cuda' needs CuPy, which cannot be loaded ({error}). Fix: {_INSTALL}"
        ) from error
    return cupy  # type: ignore[no-any-return]


def load_nccl() -> ModuleType:
    """Import and return ``cupy.cuda.nccl``.

    Raises
    ------
    DeviceUnavailableError
        If CuPy is not installed, or cannot load the NCCL library.
    """
    load_cupy()
    with warnings.catch_warnings(action="ignore"):  # the error below says the same
        nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise DeviceUnavailableError(
            "NCCLCommunicationBackend needs NCCL, which CuPy cannot load. Fix: pip install "
            "nvidia-nccl-cu12, or nvidia-nccl-cu13 for CuPy of CUDA 13"
        )
    return nccl


@dataclass(frozen=True, slots=True)
class Device:
    """Host memory (``"cpu"``), or a GPU: ``"cuda:1"``, or ``"cuda"`` for the thread's own GPU.

    The thread's own GPU is CuPy's current device. A sharded wrapper sets it to GPU number
    ``local_rank % device_count``, so that the ranks of a node share its GPUs evenly.

    Parameters
    ----------
    kind : {"cpu", "cuda"}
        Kind of memory.
    index : int, optional
        Number of the GPU.
    """

    kind: str = "cpu"
    index: int | None = None

    @classmethod
    def parse(cls, text: str | Device) -> Device:
        """Return the device ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; a `Device` is returned as it is.

        Raises
        ------
        ValueError
            For another name, or a GPU that this machine does not have.
        DeviceUnavailableError
            If CuPy is not installed, finds no GPU, or cannot compute on it.
        """
        if isinstance(text, Device):
            return text
        # CuPy is loaded only after the name is known to be one of a GPU.
        match = re.fullmatch(r"cpu|cuda(?::(\d+))?", str(text))
        if match is None:
            raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:<number>', got {text!r}")
        if text == "cpu":
            return HOST
        index = None if match[1] is None else int(match[1])
        cupy = load_cupy()
        count = _device_count(cupy)
        if index is not None and index >= count:
            raise ValueError(
                f"device {text!r} was asked for, and this machine has GPUs 0 to {count - 1}"
            )
        # A process that computes on a GPU takes some of its memory. If there are several GPUs and
        # none is named, a rank has its own when the model is wrapped: see `use`.
        if index is not None or count == 1:
            _try_out(cupy, index or 0)
        return cls("cuda", index)

    @classmethod
    def of(cls, array: Array) -> Device:
        """Return the device of ``array``."""
        return cls("cuda", device_number(array)) if is_device_array(array) else HOST

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.kind == "cuda"

    @property
    def namespace(self) -> Namespace:
        """The module whose functions work on arrays on the device: ``numpy`` or ``cupy``."""
        return load_cupy() if self.is_gpu else NAMESPACES[np.ndarray]

    @property
    def free_bytes(self) -> int | None:
        """Free memory of the device, which its other users share; None if it is not known."""
        if self.is_gpu:
            return int(load_cupy().cuda.runtime.memGetInfo()[0])
        return available_memory()[1]

    def for_rank(self, local_rank: int) -> Device:
        """Return the device with the GPU number for ``local_rank``, unless it has a number."""
        if not self.is_gpu or self.index is not None:
            return self
        # Modulo, because a node may have more ranks than GPUs.
        return Device("cuda", local_rank % _device_count(load_cupy()))

    def use(self) -> None:
        """Make the GPU the calling thread's device, if it has a number; nothing on the host.

        Raises
        ------
        DeviceUnavailableError
            If CuPy cannot compute on the thread's GPU.
        """
        if not self.is_gpu:
            return
        cupy = load_cupy()
        if self.index is not None:
            # Not in a `with` block: the device stays the thread's own for all later steps.
            cupy.cuda.Device(self.index).use()
        _try_out(cupy, cupy.cuda.runtime.getDevice())

    def put(self, array: Array) -> Array:
        """Return ``array``, or a copy of it, on the device."""
        if not self.is_gpu:
            return to_host(array)
        # CuPy allocates on the thread's current device.
        self.use()
        if is_device_array(array):
            # The array itself if it is on this GPU already, otherwise a copy.
            return beside(array, array)
        copy = self.namespace.empty(array.shape, array.dtype)
        copy_into(copy, array)
        return copy

    def pinned(self, length: int, dtype: DType) -> Array:
        """Allocate host memory, shape (length,), that the GPU reads and writes at full speed."""
        if not self.is_gpu:
            return np.empty(length, dtype)
        nbytes, cuda = length * dtype.itemsize, load_cupy().cuda
        # Not from CuPy's pool, which pins up to twice as much: a power of two.
        memory = cuda.PinnedMemoryPointer(cuda.PinnedMemory(max(1, nbytes)), 0)
        return np.frombuffer(memory, np.uint8, nbytes).view(dtype)

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


HOST = Device()


@functools.cache
def _device_count(cupy: ModuleType) -> int:
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceUnavailableError(
            f"device='cuda' was asked for, and CUDA finds no GPU ({error}); nvidia-smi shows what "
            "the driver sees, CUDA_VISIBLE_DEVICES what this process may use"
        ) from error
    if count == 0:
        raise DeviceUnavailableError("device='cuda' was asked for, and this process may use no GPU")
    return count


@functools.cache
def _try_out(cupy: ModuleType, number: int) -> None:
    """Compile and run a kernel and a product: a driver suffices to import CuPy, not for these."""
    try:
        with cupy.cuda.Device(number):
            # The first line needs CUDA's compiler, and the product cuBLAS: either may be missing.
            twos = 2 * cupy.ones((2, 2))
            (twos @ twos).get()
    except Exception as error:  # of the compiler, the loader of libraries, or CUDA itself
        raise DeviceUnavailableError(
            f"device='cuda' was asked for, and CuPy cannot compute on GPU {number} ({error}). CuPy "
            f"needs CUDA's headers and libraries beside the driver. Fix: {_INSTALL}; `mpishard "
            "doctor` tests each GPU"
        ) from error
