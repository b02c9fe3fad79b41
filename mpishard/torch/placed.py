"""Module whose parameters are views of a store's memory, and its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpishard.arrays import Array
from mpishard.bfloat16 import is_bfloat16
from mpishard.communication import CommunicationBackend, ReductionOperation
from mpishard.errors import ShardingError
from mpishard.sharding import ParameterEntry
from mpishard.torch.batch_norm import Ranks, SyncBatchNorm
from mpishard.torch.parameters import SharedParameter


class Buffers:
    """Buffers of a module, and its parameters outside of the flat vector.

    After `deal` every rank has the values of rank 0. If a rank changes buffers in a forward pass,
    such as running means, they are sent again at the end of the backward pass. Like with PyTorch's
    DDP, all ranks therefore have equal buffers at the next forward pass.

    Parameters
    ----------
    module : torch.nn.Module
        The user's module.
    placed : set of int
        Ids of the parameters that are in the flat vector.
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
        """Send all tensors of rank 0 to every rank. Collective."""
        _send([p.data for p in self._parameters], backend)
        self.broadcast(backend)

    def _tensors(self) -> list[Any]:
        return [inner._buffers[name] for inner, name in self._slots]

    def _note_versions(self) -> None:
        self._versions = [(tensor, tensor._version) for tensor in self._tensors()]

    def have_changed(self) -> bool:
        """Return True if a buffer has changed on this rank since the last broadcast."""
        return any(
            tensor is not known or tensor._version != version
            for tensor, (known, version) in zip(self._tensors(), self._versions, strict=True)
        )

    def broadcast(self, backend: CommunicationBackend) -> None:
        """Send the buffers of rank 0 to every rank. Collective."""
        _send(self._tensors(), backend)
        self._note_versions()

    def settle(self, backend: CommunicationBackend) -> bool:
        """Send the buffers of rank 0 to every rank if any rank's have changed. Collective.

        Returns
        -------
        bool
            True if a buffer has changed on any rank.
        """
        if not self._slots:
            return False
        flag = np.array([self.have_changed()], np.uint8)
        has_changed = bool(backend.all_reduce(flag, ReductionOperation.MAX)[0])
        if has_changed:
            self.broadcast(backend)
        return has_changed


def _send(tensors: Sequence[Any], backend: CommunicationBackend) -> None:
    if not tensors or backend.world_size == 1:
        return
    # All tensors are sent as bytes in one message, whatever their dtypes and strides.
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8).numpy() for t in tensors]
    packed = backend.broadcast(np.concatenate(raw), root=0)
    if backend.rank == 0:
        return
    position = 0
    for tensor, old in zip(tensors, raw, strict=True):
        new = packed[position : position + old.size]
        position += old.size
        # Equal tensors are not written, because they may be read-only.
        if not np.array_equal(old, new):
            with torch.no_grad():
                tensor.copy_(torch.from_numpy(new.copy()).view(tensor.dtype).view(tensor.shape))


class PlacedModule:
    """Parameters of a module as parts of a flat vector, and its other tensors.

    Parameters
    ----------
    module : torch.nn.Module
        The user's module.
    with_frozen : bool
        True if the vector also has the frozen parameters of its dtype.

    Attributes
    ----------
    entries : tuple of ParameterEntry
        Name, shape and start of each parameter in the vector. A shared parameter has the first of
        its names.
    parameters : list of torch.nn.Parameter
        The parameter of each entry.
    places : list of (torch.nn.Module, str)
        Submodule and name of each parameter.
    dtype : numpy.dtype
        Dtype of the user's trained parameters.
    buffers : Buffers
        The tensors outside of the vector.

    Raises
    ------
    TypeError, ValueError, ShardingError
        If the module cannot be placed, or is sharded already. Nothing has changed then.
    """

    def __init__(self, module: Any, *, with_frozen: bool) -> None:
        _check(module)
        self.module = module
        first = next(p.dtype for p in module.parameters() if p.requires_grad and p.numel())
        entries, start = [], 0
        self.places: list[tuple[Any, str]] = []
        seen = set()
        for prefix, inner in module.named_modules():
            for name, parameter in inner._parameters.items():
                if parameter is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                is_held = parameter.requires_grad or with_frozen
                if not is_held or parameter.dtype != first or not parameter.numel():
                    continue
                full_name, shape = f"{prefix}.{name}" if prefix else name, tuple(parameter.shape)
                entries.append(ParameterEntry(full_name, shape, start, parameter.requires_grad))
                self.places.append((inner, name))
                start += parameter.numel()
        self.entries = tuple(entries)
        self.parameters = [inner._parameters[name] for inner, name in self.places]
        self.dtype = np.dtype(str(first).removeprefix("torch."))
        self.buffers = Buffers(module, {id(parameter) for parameter in self.parameters})
        self._storages = [0] * len(self.parameters)

    def fill(self, start: int, out: Array) -> None:
        """Copy the range of the flat vector that begins at ``start`` to ``out``."""
        stop = start + out.size
        for entry, parameter in zip(self.entries, self.parameters, strict=True):
            first, last = max(start, entry.start), min(stop, entry.stop)
            if first < last:
                values = parameter.detach().reshape(-1).numpy()
                out[first - start : last - start] = values[first - entry.start : last - entry.start]

    def place(self, index: int, flat: Any) -> None:
        """Make a parameter a view of ``flat``, a tensor of shape (size,)."""
        self.parameters[index].data = flat.view(self.entries[index].shape)
        self._storages[index] = _storage_of(self.parameters[index])

    def require_placed(self) -> None:
        """Refuse to train a module whose parameters are not those that were placed.

        Raises
        ------
        ShardingError
            If a parameter was moved, replaced or added, or requires a gradient only now. The
            message names it.
        """
        trained = set()
        for index, (module, name) in enumerate(self.places):
            entry, parameter = self.entries[index], self.parameters[index]
            if not entry.trainable:
                continue
            trained.add(id(parameter))
            held = module._parameters  # In a module of torch.jit it has no get().
            is_here = name in held and held[name] is parameter
            if not is_here or _storage_of(parameter) != self._storages[index]:
                raise ShardingError(
                    f"parameter {entry.name!r} is no longer in the memory where mpishard put it: "
                    "call module.to(), .half(), load_state_dict(assign=True) and the like before "
                    "the module is sharded"
                )
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter.numel() and id(parameter) not in trained:
                raise ShardingError(
                    f"parameter {name!r} was frozen, or not in the module, when mpishard was given "
                    "it, and requires a gradient now: no rank would reduce, update or save it. "
                    "Build the module whole before it is sharded; to freeze a parameter for some "
                    "steps, let it require a gradient until then"
                )

    def deal(self, world: CommunicationBackend, ranks: CommunicationBackend) -> None:
        """Take rank 0's buffers, and seed the generators of ``ranks`` differently. Collective.

        The first of ``ranks`` keeps its generator. Thread-ranks share one generator, which does not
        change.
        """
        self.buffers.deal(world)
        # The factor, 2^64 divided by the golden ratio, makes the ranks' seeds differ in many bits.
        seed = world.broadcast(np.array([torch.initial_seed() & _SEEDS]), root=0)
        if ranks.rank and world._rank_is_process:
            torch.manual_seed((int(seed[0]) + 0x9E3779B97F4A7C15 * ranks.rank) & _SEEDS)

    def normalise_over(self, ranks: CommunicationBackend | None) -> None:
        """Let converted batch normalisation use the samples of ``ranks``; None: of this rank."""
        for part in self._normalisations():
            part.ranks = None if ranks is None else Ranks(ranks)

    @property
    def computes_together(self) -> bool:
        """True if a forward pass communicates, so that every rank must make one."""
        return any(part.training and part.ranks is not None for part in self._normalisations())

    def _normalisations(self) -> list[SyncBatchNorm]:
        return [part for part in self.module.modules() if isinstance(part, SyncBatchNorm)]


# Seeds are cut to 63 bits, because they are sent as int64.
_SEEDS = (1 << 63) - 1


def _storage_of(parameter: Any) -> int:
    """Return the identity of the memory of a parameter."""
    return parameter.untyped_storage()._cdata  # type: ignore[no-any-return]


def _check(module: Any) -> None:
    """Refuse a module that cannot be placed, before anything is changed."""
    taken = [name for name, p in module.named_parameters() if isinstance(p, SharedParameter)]
    if taken:
        raise ShardingError(
            f"parameter {taken[0]!r} is sharded already; shard() a module once, and each part of "
            "two modules by one of them"
        )
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    rescaled = [
        name for name, m in module.named_modules() if isinstance(m, embeddings) and m.max_norm
    ]
    if rescaled:
        raise ValueError(
            f"{some(rescaled)}: max_norm changes weights in forward, and each rank would change "
            "other rows. Leave it out, and scale the rows that forward has looked up"
        )
    everything = [*module.named_parameters(), *module.named_buffers()]
    odd = [n for n, t in everything if isinstance(t, torch.nn.parameter.UninitializedTensorMixin)]
    if odd:
        raise TypeError(f"{some(odd)} have no shape yet; call the module once on a sample first")
    # The data of a plain parameter have the type Tensor, those of quantised and distributed ones a
    # subclass.
    odd = [n for n, t in everything if type(t.data) is not torch.Tensor or t.is_sparse]
    if odd:
        raise TypeError(
            f"{some(odd)} are not plain strided tensors; give mpishard the module as it was "
            "before another library (FSDP, quantisation) took it over"
        )
    odd = [f"{name} on {t.device}" for name, t in everything if t.device.type != "cpu"]
    if odd:
        raise ValueError(
            f"mpishard computes with PyTorch on the CPU, and {some(odd)}; use module.cpu(), or "
            "for tensors on meta module.to_empty(device='cpu') and reset_parameters()"
        )
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p.numel()]
    if not trainable:
        raise ValueError(f"{type(module).__name__} has no parameter that requires a gradient")
    dtypes: dict[str, list[str]] = {}
    for name, parameter in trainable:
        dtypes.setdefault(str(parameter.dtype).removeprefix("torch."), []).append(name)
    if len(dtypes) > 1 or not dtypes.keys() <= {"float32", "float64"}:
        found = ", ".join(f"{some(names)} are {dtype}" for dtype, names in dtypes.items())
        raise ValueError(
            f"all parameters must be float32, or all float64; {found}; use module.float() or "
            "module.double()"
        )


def some(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of others."""
    rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{rest}"


def tensor_of(array: Array) -> Any:
    """Return a tensor in the memory of an array, which may be of bfloat16."""
    if not is_bfloat16(array):
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def flat_gradient(gradient: Any) -> Array:
    """Return a gradient as a dense vector; a 16-bit gradient is converted to float32."""
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    gradient = gradient.float() if gradient.itemsize == 2 else gradient
    return gradient.detach().reshape(-1).numpy()
