"""Buffers of a module, and other tensors outside of the flat vector, which are rank 0's."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpishard.base import Array, ShardingError
from mpishard.communication import CommunicationBackend, ReductionOperation, differences


class Buffers:
    """Buffers of a module, and its parameters outside of the flat vector.

    After `deal` every rank has the values of rank 0. If a rank changes buffers in a forward pass,
    such as running means, they are sent again at the end of the backward pass. Like with PyTorch's
    DDP, all ranks therefore have equal buffers at the next forward pass. A pass may also replace a
    buffer or a submodule with buffers, set it to None, delete it or add another one, if it does so
    on every rank.

    Parameters
    ----------
    module : torch.nn.Module
        The user's module.
    placed : set of int
        Ids of the parameters that are in the flat vector.
    """

    def __init__(self, module: torch.nn.Module, placed: set[int]) -> None:
        self._module = module
        others = {n: p for n, p in module.named_parameters() if id(p) not in placed}
        self._parameters = {name: others[name] for name in sorted(others)}
        self._known = self._checksum()

    def distribute(self, backend: CommunicationBackend) -> None:
        """Send all tensors of rank 0 to every rank. Collective.

        Raises
        ------
        ValueError
            On every rank, if names, shapes or dtypes differ between ranks. The message names the
            tensors, and nothing has changed.
        """
        # Names, shapes and dtypes must be equal first: `_send` sends the bytes of all tensors at
        # once.
        forms = {f"parameter {name!r}": form_of(p) for name, p in self._parameters.items()}
        if differing := differences(backend, forms | self._forms()):
            raise ValueError(f"every rank must have the same module; by rank, {differing}")
        _send([*self._parameters.values()], backend)
        self._take_rank_zeros(backend)

    def _tensors(self) -> dict[str, torch.Tensor | None]:
        """Return the buffers that the module has now, by name; some may be None."""
        # Names are made only if there are buffers: this is called in each step.
        if not any(module._buffers for module in modules_of(self._module)):
            return {}
        found = {
            f"{prefix}.{name}" if prefix else name: tensor
            for prefix, holder in self._module.named_modules()
            for name, tensor in holder._buffers.items()
        }
        # Ranks may have registered them in another order.
        return {name: found[name] for name in sorted(found)}

    def _present(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self._tensors().items() if tensor is not None}

    def _forms(self) -> dict[str, str]:
        return {f"buffer {name!r}": form_of(tensor) for name, tensor in self._tensors().items()}

    def _checksum(self) -> int:
        # Of the values, because PyTorch does not count changes of ``buffer.data``.
        tensors = self._tensors()
        forms = {f"buffer {name!r}": form_of(tensor) for name, tensor in tensors.items()}
        checksum = zlib.crc32(repr(forms).encode())
        for tensor in tensors.values():
            if tensor is not None and _is_sendable(tensor):
                checksum = zlib.crc32(_bytes_of(tensor).data, checksum)
        return checksum

    def have_changed(self) -> bool:
        """Return True if a buffer has changed on this rank since the last broadcast."""
        return self._checksum() != self._known

    def broadcast(self, backend: CommunicationBackend) -> None:
        """Send the buffers of rank 0 to every rank. Collective.

        Raises
        ------
        ShardingError
            On every rank, if names, shapes or dtypes differ between ranks, or if a buffer is no
            plain strided tensor any more. The message names the buffers, and none has changed.
        """
        if differing := differences(backend, self._forms()):
            raise ShardingError(
                "the ranks' buffers differ, so that not all ranks can have rank 0's values: by "
                f"rank, {differing}. Give each buffer one shape and dtype on all ranks, such as "
                f"that of the longest; {_OWN}"
            )
        odd = [name for name, tensor in self._present().items() if not _is_sendable(tensor)]
        if odd:
            raise ShardingError(
                f"buffer {some(odd)} has become a tensor that mpishard cannot send to all ranks, "
                f"which is no plain strided tensor on the CPU; {_OWN}"
            )
        self._take_rank_zeros(backend)

    def _take_rank_zeros(self, backend: CommunicationBackend) -> None:
        _send([*self._present().values()], backend)
        self._known = self._checksum()

    def copies(self) -> list[Any]:
        """Return the buffers, and copies of their values, for `restore`."""
        return [
            (holder, name, tensor, None if tensor is None else tensor.detach().clone())
            for holder in modules_of(self._module)
            for name, tensor in holder._buffers.items()
        ]

    def restore(self, copies: list[Any]) -> None:
        """Give modules the buffers of `copies`, and these the values that they had."""
        for holder, name, tensor, values in copies:
            if name not in holder._buffers or holder._buffers[name] is not tensor:
                holder._buffers[name] = tensor
            if tensor is not None:
                write(tensor, values)

    def share_changed_state(self, backend: CommunicationBackend) -> bool:
        """Send the buffers of rank 0 to every rank if any rank's have changed. Collective.

        Returns
        -------
        bool
            True if a buffer has changed on any rank.

        Raises
        ------
        ShardingError
            As for `broadcast`.
        """
        if not self._tensors():
            return False
        flag = np.array([self.have_changed()], np.uint8)
        has_changed = bool(backend.all_reduce(flag, ReductionOperation.MAX)[0])
        if has_changed:
            self.broadcast(backend)
        return has_changed


def modules_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the module and all modules in it, in any order, in less time than PyTorch's."""
    found, waiting = {id(module): module}, [module]
    while waiting:
        for inner in waiting.pop()._modules.values():
            if inner is not None and id(inner) not in found:
                found[id(inner)] = inner
                if inner._modules:
                    waiting.append(inner)
    return list(found.values())


_OWN = (
    "keep a tensor of which each rank has its own as a plain attribute, without register_buffer()"
)


def form_of(tensor: torch.Tensor) -> str:
    """Return dtype and shape of a tensor, and its kind if it is not plain; or "None"."""
    if tensor is None:
        return "None"
    kind = "" if is_plain(tensor) else f" ({type(tensor).__name__}, {tensor.layout})"
    return f"{tensor.dtype}{list(tensor.shape)}{kind}".replace("torch.", "")


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is strided, neither quantised nor of a subclass (distributed)."""
    # The data of a plain parameter have the type Tensor.
    is_whole = type(tensor.data) is torch.Tensor and tensor.layout is torch.strided
    return is_whole and not tensor.is_quantized


def _is_sendable(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and tensor.device.type == "cpu"


def _bytes_of(tensor: torch.Tensor) -> Array:
    """Return the bytes of a plain tensor, without a copy if it is contiguous."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    memory: Array = values.reshape(-1).view(torch.uint8).numpy()
    return memory


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values to a tensor, which may be expanded, or of PyTorch's inference mode."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    is_expanded = any(size > 1 and not stride for size, stride in strides)
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if is_expanded:  # Several elements have the same memory.
            tensor.data = values.to(tensor.dtype, copy=True)
        else:
            tensor.copy_(values)


def _send(tensors: Sequence[torch.Tensor], backend: CommunicationBackend) -> None:
    if not tensors or backend.world_size == 1:
        return
    # All tensors are sent as bytes in one message, whatever their dtypes and strides.
    raw = [_bytes_of(tensor) for tensor in tensors]
    packed = backend.broadcast(np.concatenate(raw), root=0)
    if backend.rank == 0:
        return
    position = 0
    for tensor, old in zip(tensors, raw, strict=True):
        new = packed[position : position + old.size]
        position += old.size
        # Equal tensors are not written, because they may be read-only.
        if not np.array_equal(old, new):
            values = torch.from_numpy(new.copy()).view(tensor.dtype).view(tensor.shape)
            write(tensor, values)


def some(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of others."""
    rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{rest}"
