"""The tensors of a module besides the divided parameters: rank 0's on every rank."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpishard.communication import CommunicationBackend, ReductionOperation

__all__ = ["Buffers", "from_text", "to_text"]


class Buffers:
    """The buffers of a module, and the parameters that no vector holds.

    After `deal` they are rank 0's on every rank. Buffers that any rank changes in a forward pass,
    such as running means, are sent again when the backward pass ends: before the next forward pass,
    as PyTorch's DDP does.

    Parameters
    ----------
    module : torch.nn.Module
        The user's.
    placed : set of int
        Ids of the parameters that stand elsewhere.
    """

    def __init__(self, module: Any, placed: set[int]) -> None:
        self._module = module
        self._slots = [
            (inner, name)
            for inner in module.modules()
            for name, buffer in inner._buffers.items()
            if buffer is not None
        ]
        self._parameters = [p for p in module.parameters() if id(p) not in placed]
        self._note_versions()

    def deal(self, backend: CommunicationBackend) -> None:
        """Give every rank all tensors of rank 0. Collective."""
        _send([p.data for p in self._parameters], backend)
        self.broadcast(backend)

    def _tensors(self) -> list[Any]:
        return [inner._buffers[name] for inner, name in self._slots]

    def _note_versions(self) -> None:
        self._versions = [(tensor, tensor._version) for tensor in self._tensors()]

    def have_changed(self) -> bool:
        """Whether a buffer has changed on this rank since the last broadcast."""
        return any(
            tensor is not known or tensor._version != version
            for tensor, (known, version) in zip(self._tensors(), self._versions, strict=True)
        )

    def broadcast(self, backend: CommunicationBackend) -> None:
        """Give every rank the buffers of rank 0. Collective."""
        _send(self._tensors(), backend)
        self._note_versions()

    def settle(self, backend: CommunicationBackend) -> bool:
        """Give every rank the buffers of rank 0 if any has changed. Collective.

        Returns
        -------
        bool
            Whether one has, on any rank.
        """
        if not self._slots:
            return False
        flag = np.array([self.have_changed()], np.uint8)
        has_changed = bool(backend.all_reduce(flag, ReductionOperation.MAX)[0])
        if has_changed:
            self.broadcast(backend)
        return has_changed

    def saved(self, *, with_parameters: bool) -> dict[str, Any]:
        """Copies of the buffers in a state dict, and of the parameters, by name."""
        found = self._in_state(with_parameters=with_parameters)
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def _in_state(self, *, with_parameters: bool = True) -> dict[str, Any]:
        own = {id(t) for t in [*self._tensors(), *(self._parameters if with_parameters else ())]}
        state = self._module.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in state.items() if id(tensor) in own}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse tensors that this module has not.

        Raises
        ------
        ValueError
            Naming one.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in self._in_state().items()}
        for name, tensor in saved.items():
            if shapes.get(name) != tuple(tensor.shape):
                raise ValueError(
                    f"the checkpoint has {name!r} of shape {tuple(tensor.shape)}, "
                    f"and this module has {shapes.get(name, 'none')}"
                )

    def take(self, saved: Mapping[str, Any]) -> None:
        """Take the tensors of `saved`, which may be fewer."""
        present = self._in_state()
        with torch.no_grad():
            for name, tensor in saved.items():
                present[name].copy_(tensor)


def _send(tensors: Sequence[Any], backend: CommunicationBackend) -> None:
    if not tensors or backend.world_size == 1:
        return
    # Bytes in logical order: of a contiguous tensor, its memory.
    raw = [tensor.detach().reshape(-1).view(torch.uint8).numpy() for tensor in tensors]
    packed = backend.broadcast(np.concatenate(raw), root=0)
    if backend.rank == 0:
        return
    position = 0
    for tensor, old in zip(tensors, raw, strict=True):
        new = packed[position : position + old.size]
        position += old.size
        if not np.array_equal(old, new):  # else it may be a view, or read-only
            with torch.no_grad():
                tensor.copy_(torch.from_numpy(new.copy()).view(tensor.dtype).view(tensor.shape))


def to_text(values: Mapping[str, Any]) -> str:
    """Return tensors and plain values as text for a checkpoint's metadata."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def from_text(text: str) -> dict[str, Any]:
    """Return the values of `to_text`."""
    raw = io.BytesIO(base64.b64decode(text))
    return torch.load(raw, weights_only=True)  # type: ignore[no-any-return]
