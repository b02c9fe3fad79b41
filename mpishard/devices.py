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
from typing import Any

import numpy as np

from mpishard.arrays import Array, beside, is_device_array, to_host
from mpishard.errors import DeviceUnavailableError


def load_cupy() -> ModuleType:
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
            f"device='cuda' needs CuPy, which cannot be loaded ({error}). Fix: "
            "pip install 'mpishard[cuda12]', or 'mpishard[cuda13]' for a driver of CUDA 13"
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
            If CuPy is not installed, or finds no GPU.
        """
        if isinstance(text, Device):
            return text
        match = re.fullmatch(r"cpu|cuda(?::(\d+))?", str(text))
        if match is None:
            raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:<number>', got {text!r}")
        if text == "cpu":
            return HOST
        index = None if match[1] is None else int(match[1])
        count = _device_count(load_cupy())
        if index is not None and index >= count:
            raise ValueError(f"device {text!r} was asked for, and this machine has GPUs 0 to "
                             f"{count - 1}")  # fmt: skip
        return cls("cuda", index)

    @classmethod
    def of(cls, array: Array) -> Device:
        """Return the device of ``array``."""
        return cls("cuda", int(array.data.device_id)) if is_device_array(array) else HOST

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.kind == "cuda"

    @property
    def namespace(self) -> ModuleType:
        """The module whose functions work on arrays on the device: ``numpy`` or ``cupy``."""
        return load_cupy() if self.is_gpu else np

    def for_rank(self, local_rank: int) -> Device:
        """Return the device with the GPU number for ``local_rank``, unless it has a number."""
        if not self.is_gpu or self.index is not None:
            return self
        return Device("cuda", local_rank % _device_count(load_cupy()))

    def use(self) -> None:
        """Make the GPU the calling thread's device; do nothing without a number or on the host."""
        if self.index is not None:
            load_cupy().cuda.Device(self.index).use()

    def put(self, array: Array) -> Array:
        """Return ``array``, or a copy of it, on the device."""
        if not self.is_gpu:
            return to_host(array)
        self.use()
        if is_device_array(array):
            return beside(array, array)
        copy = self.namespace.empty(array.shape, array.dtype)
        copy.set(np.asarray(array, order="C"))  # CuPy copies only from contiguous memory
        return copy

    def pinned(self, length: int, dtype: np.dtype[Any]) -> Array:
        """Allocate host memory, shape (length,), that the GPU reads and writes at full speed."""
        if not self.is_gpu:
            return np.empty(length, dtype)
        nbytes = length * dtype.itemsize
        memory = load_cupy().cuda.alloc_pinned_memory(max(1, nbytes))
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
