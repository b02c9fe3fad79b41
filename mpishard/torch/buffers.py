"""What a module holds beside the parameters that are divided: rank 0's on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.adapters.torch import bytes_of, take_bytes
from mpishard.communication import CommunicationBackend

__all__ = ["Buffers"]


class Buffers:
    """The buffers of a module, and the parameters that no vector holds. Collective to make.

    They are rank 0's on every rank. Buffers that any rank changes in a forward pass, such as
    running means, are sent again when the backward pass ends: before the next forward pass, as
    PyTorch's DDP does.

    Parameters
    ----------
    module : torch.nn.Module
        The user's.
    backend : CommunicationBackend
        The ranks.
    placed : set of int
        Ids of the parameters that stand elsewhere.
    """

    def __init__(self, module: Any, backend: CommunicationBackend, placed: set[int]) -> None:
        self._backend = backend
        self._slots = [
            (inner, name)
            for inner in module.modules()
            for name, buffer in inner._buffers.items()
            if buffer is not None
        ]
        self._versions: list[tuple[Any, int]] = []
        others = [p.data for p in module.parameters() if id(p) not in placed]
        self._send(others)
        self.broadcast()

    def tensors(self) -> list[Any]:
        """The buffers."""
        return [inner._buffers[name] for inner, name in self._slots]

    def have_changed(self) -> bool:
        """Whether one has changed since the last broadcast."""
        return any(
            tensor is not known or tensor._version != version
            for tensor, (known, version) in zip(self.tensors(), self._versions, strict=True)
        )

    def broadcast(self) -> None:
        """Give every rank the buffers of rank 0. Collective."""
        tensors = self.tensors()
        self._send(tensors)
        self._versions = [(tensor, tensor._version) for tensor in tensors]

    def _send(self, tensors: list[Any]) -> None:
        if not tensors or self._backend.world_size == 1:
            return
        raw = [bytes_of(tensor) for tensor in tensors]
        packed = self._backend.broadcast(np.concatenate(raw), root=0)
        if self._backend.rank == 0:
            return
        position = 0
        for tensor, old in zip(tensors, raw, strict=True):
            take_bytes(tensor, packed[position : position + old.size])
            position += old.size
