"""PyTorch's collectives over gloo, among the same processes, where PyTorch is installed."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard import settings
from mpishard.communication import CommunicationBackend

__all__ = ["GlooGroup"]


class GlooGroup:
    """The ranks of one node as a process group of ``torch.distributed``."""

    def __init__(self, torch: Any, folder: tempfile.TemporaryDirectory[str] | None) -> None:
        self._torch = torch
        self._folder = folder

    @classmethod
    def join(cls, backend: CommunicationBackend) -> GlooGroup | None:
        """Meet the other ranks; None on all where one has no PyTorch. Collective."""
        here = importlib.util.find_spec("torch") is not None
        if backend.node_count > 1 or backend.all_gather(np.array([here])).min() == 0:
            return None
        import torch
        import torch.distributed

        folder = tempfile.TemporaryDirectory(prefix="mpishard-") if backend.rank == 0 else None
        name = None if folder is None else np.frombuffer(os.fsencode(folder.name), np.uint8)
        place = os.fsdecode(backend.broadcast(name).tobytes())
        settings.write_default("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            "gloo", f"file://{place}/store", rank=backend.rank, world_size=backend.world_size
        )
        return cls(torch, folder)

    def leave(self) -> None:
        """Part from the other ranks."""
        self.barrier()
        self._torch.distributed.destroy_process_group()
        if self._folder is not None:
            self._folder.cleanup()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._torch.distributed.barrier()

    def all_reduce(self, array: np.ndarray[Any, Any]) -> Callable[[], object]:
        """Sum zeros of the array's length and dtype, in place."""
        tensor = self._torch.from_numpy(np.zeros_like(array))
        return lambda: self._torch.distributed.all_reduce(tensor)

    def reduce_scatter(self, array: np.ndarray[Any, Any]) -> Callable[[], object]:
        """Sum the array, and keep this rank's piece."""
        distributed = self._torch.distributed
        # Newer versions have the same under another name, and warn of the old one.
        scatter = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)
        source = self._torch.from_numpy(array)
        out = self._torch.empty(len(array) // distributed.get_world_size(), dtype=source.dtype)
        return lambda: scatter(out, source)

    def all_gather(self, piece: np.ndarray[Any, Any], length: int) -> Callable[[], object]:
        """Put all ranks' pieces end to end."""
        distributed = self._torch.distributed
        gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
        source = self._torch.from_numpy(piece)
        out = self._torch.empty(length, dtype=source.dtype)
        return lambda: gather(out, source)
