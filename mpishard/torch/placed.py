"""Module whose parameters are views of a store's memory, for loops and for `TorchModel`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from mpishard.base import Array, ShardingError, is_bfloat16
from mpishard.communication import CommunicationBackend, called_as
from mpishard.sharding import ParameterEntry, Unit
from mpishard.torch.batch_norm import Ranks, SyncBatchNorm
from mpishard.torch.buffers import Buffers, is_plain, modules_of, some
from mpishard.torch.complex_parameters import (
    complex_aligned,
    from_real_numbers,
    real_numbers,
    real_shape,
)
from mpishard.torch.parameters import PlacedParameter, StoredParameter, native_gradient


class PlacedModule:
    """Parameters of a module as parts of a flat vector, and its other tensors.

    A PyTorch loop and `mpishard.adapters.TorchModel` have the same vector: the trained parameters,
    and the frozen ones of their dtype.

    Parameters
    ----------
    module : torch.nn.Module
        The user's module.

    Attributes
    ----------
    entries : tuple of ParameterEntry
        Name, shape and start of each parameter in the vector. A shared parameter has the first of
        its names, and a complex one the shape of its pairs of real numbers.
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

    def __init__(self, module: torch.nn.Module) -> None:
        _check(module)
        self.module = module
        trained = next(p for p in module.parameters() if p.requires_grad and p.numel())
        first = trained.dtype.to_real()
        found: dict[str, tuple[torch.nn.Module, str]] = {}
        seen = set()
        for prefix, inner in module.named_modules():
            for name, parameter in inner._parameters.items():
                # A parameter that modules share is in the vector once, under its first name.
                if parameter is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                # The vector has one dtype. Frozen parameters of another one stay outside.
                if parameter.dtype.to_real() != first or not parameter.numel():
                    continue
                found[f"{prefix}.{name}" if prefix else name] = inner, name
        parameters = {full: inner._parameters[name] for full, (inner, name) in found.items()}
        entries, start = [], 0
        for full_name, parameter in complex_aligned(parameters).items():
            shape, is_trained = real_shape(parameter), parameter.requires_grad
            entries.append(ParameterEntry(full_name, shape, start, is_trained))
            start = entries[-1].stop
        self.entries = tuple(entries)
        self.places = [found[entry.name] for entry in entries]
        self.parameters = [parameters[entry.name] for entry in entries]
        self.dtype = np.dtype(str(first).removeprefix("torch."))
        self.buffers = Buffers(module, {id(parameter) for parameter in self.parameters})
        # `place` sets them. A move of the module, such as module.to(), gives a parameter another
        # one.
        self._storages = [0] * len(self.parameters)
        # A parameter of a user's subclass gets its class back when it is placed again.
        self._kinds = [type(parameter) for parameter in self.parameters]

    def fill(self, start: int, out: Array) -> None:
        """Copy the range of the flat vector that begins at ``start`` to ``out``."""
        stop = start + out.size
        for entry, parameter in zip(self.entries, self.parameters, strict=True):
            first, last = max(start, entry.start), min(stop, entry.stop)
            if first < last:
                values = real_numbers(parameter.detach()).numpy()
                out[first - start : last - start] = values[first - entry.start : last - entry.start]

    def place(self, index: int, flat: torch.Tensor) -> None:
        """Make a parameter, which nobody holds then, a view of ``flat``, a tensor of shape (size,).

        The object stays the same and changes its class, because the module and the user refer to
        it.
        """
        parameter = self.parameters[index]
        parameter.__class__ = self._kinds[index]
        vars(parameter).pop("_stored", None)
        is_complex = parameter.is_complex()
        parameter.data = from_real_numbers(flat, parameter.shape, is_complex=is_complex)
        self._storages[index] = _storage_of(parameter)

    def hold(
        self,
        units: Sequence[Unit],
        make_stored: Callable[..., StoredParameter],
        kind: type[PlacedParameter] = PlacedParameter,
    ) -> None:
        """Let ranks change the parameters, which were placed, together, as parameters of ``kind``.

        ``make_stored(index, entry, unit, parameter)`` returns the place of each.
        """
        numbered = iter(range(len(self.entries)))
        for unit in units:
            for entry, index in zip(unit.entries_of(self.entries), numbered, strict=False):
                parameter = self.parameters[index]
                parameter._stored = make_stored(index, entry, unit, parameter)
                parameter.__class__ = kind
                parameter._stored.note_version()

    def hook(
        self, index: int, take: Callable[[torch.Tensor | None], None]
    ) -> torch.utils.hooks.RemovableHandle:
        """Give each gradient of a parameter to ``take``, in place of its ``grad``.

        It is a dense real tensor of 32 bits or more; of a complex parameter it has the pairs.

        Autograd may give none, for instance if an ``autograd.Function`` returns None. The parameter
        then counts as unused by this rank, and ``take`` gets None.

        Returns
        -------
        object
            Handle with a method ``remove``.
        """
        hook = functools.partial(_take_gradient, take)
        return torch.Tensor.register_post_accumulate_grad_hook(self.parameters[index], hook)

    def require_roundable(self) -> None:
        """Refuse a module that cannot compute with parameters rounded to bfloat16.

        Raises
        ------
        ValueError
            If a parameter is complex, or neither float32 nor a frozen one of bfloat16.
        """
        named = dict(self.module.named_parameters())
        kept = (torch.float32, torch.bfloat16)
        odd = [n for n, p in named.items() if p.is_floating_point() and p.dtype not in kept]
        odd = [n for n, p in named.items() if p.is_complex()] or odd
        if odd:
            way = "leave it out" if named[odd[0]].is_complex() else "use module.float()"
            raise ValueError(
                f'precision="bfloat16" rounds float32 parameters, and {odd[0]!r} of this '
                f"{type(self.module).__name__} is {named[odd[0]].dtype}: {way}"
            )

    def require_placed(self) -> None:
        """Refuse to train a module whose parameters are not those that were placed.

        Raises
        ------
        ShardingError
            If a parameter was moved, replaced or added, or requires a gradient only now, or was
            changed in a way that is not counted. The message names it.
        """
        with torch._C.DisableTorchFunctionSubclass():  # It costs time for each attribute.
            self._require_placed()

    def _require_placed(self) -> None:
        trained = set()
        for index, (module, name) in enumerate(self.places):
            entry, parameter = self.entries[index], self.parameters[index]
            if isinstance(parameter, PlacedParameter):
                parameter._stored.require_counted()
            held = module._parameters  # In a module of torch.jit it has no get().
            if name not in held or held[name] is not parameter:
                raise ShardingError(
                    f"parameter {entry.name!r} was replaced or deleted; no rank would reduce or "
                    "save a new one, nor train it. Tie, prune or replace parameters before the "
                    "module is sharded, or set values, such as "
                    f"module.{name}.data = mpishard.torch.mean_over_ranks(values)"
                )
            if not entry.trainable:
                continue
            trained.add(id(parameter))
            if _storage_of(parameter) != self._storages[index]:
                raise ShardingError(
                    f"parameter {entry.name!r} is no longer in the memory where mpishard put it: "
                    "call module.to(), .half(), load_state_dict(assign=True) and the like before "
                    "the module is sharded"
                )
        for parameter in [p for m in modules_of(self.module) for p in m._parameters.values()]:
            if parameter is None or id(parameter) in trained:
                continue
            if parameter.requires_grad and parameter.numel():
                name = next(n for n, p in self.module.named_parameters() if p is parameter)
                raise ShardingError(
                    f"parameter {name!r} was frozen, or not in the module, when mpishard was given "
                    "it, and requires a gradient now: no rank would reduce, update or save it. "
                    "Build the module whole before it is sharded, or change and shard a "
                    "copy.deepcopy() of it; to freeze a parameter for some steps, let it require "
                    "a gradient until then"
                )

    def distribute(self, world: CommunicationBackend, ranks: CommunicationBackend) -> None:
        """Take rank 0's buffers, and seed the generators of ``ranks`` differently. Collective.

        The first of ``ranks`` gets the generator of rank 0. Thread-ranks share one generator, which
        does not change.
        """
        self.buffers.distribute(world)
        state = world.broadcast(torch.get_rng_state().numpy(), root=0)
        if not world._rank_is_process:
            return
        torch.set_rng_state(torch.from_numpy(state))
        if ranks.rank:
            # 2^64 divided by the golden ratio makes the ranks' seeds differ in many bits.
            seed = torch.initial_seed() + 0x9E3779B97F4A7C15 * ranks.rank
            torch.manual_seed(seed & _SEEDS)

    def normalise_over(self, ranks: CommunicationBackend | None) -> None:
        """Let converted batch normalisation use the samples of ``ranks``; None: of this rank."""
        for name, part in self._normalisations().items():
            part.ranks = None
            if ranks is not None:
                layer = f"layer {name!r} of {type(self.module).__name__}"
                part.ranks = Ranks(ranks, ranks.number_model(layer))

    @property
    def computes_together(self) -> bool:
        """True if a forward pass communicates, so that every rank must make one."""
        parts = self._normalisations().values()
        return any(part.training and part.ranks is not None for part in parts)

    def _normalisations(self) -> dict[str, SyncBatchNorm]:
        return {
            n: part for n, part in self.module.named_modules() if isinstance(part, SyncBatchNorm)
        }


# Seeds are cut to 63 bits.
_SEEDS = (1 << 63) - 1


def _storage_of(parameter: torch.Tensor) -> int:
    """Return the identity of the memory of a parameter."""
    return parameter.untyped_storage()._cdata  # type: ignore[no-any-return]


def _check(module: torch.nn.Module) -> None:
    """Refuse a module that cannot be placed, before anything is changed."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if hasattr(module, "_orig_mod"):
        raise TypeError(
            "mpishard takes the module itself; call torch.compile() afterwards, or module.compile()"
        )
    # One walk, because a module may have many thousands of parts.
    parameters = [*module.named_parameters()]
    _check_users(parameters)
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    rescaled = [
        name for name, m in module.named_modules() if isinstance(m, embeddings) and m.max_norm
    ]
    if rescaled:
        raise ValueError(
            f"{some(rescaled)}: max_norm changes weights in forward, and each rank would change "
            "other rows. Leave it out, and scale the rows that forward has looked up"
        )
    everything = [*parameters, *module.named_buffers()]
    odd = [n for n, t in everything if isinstance(t, torch.nn.parameter.UninitializedTensorMixin)]
    if odd:
        raise TypeError(f"{some(odd)} have no shape yet; call the module once on a sample first")
    odd = [n for n, t in everything if not is_plain(t)]
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
    trainable = [(n, p) for n, p in parameters if p.requires_grad and p.numel()]
    if not trainable:
        raise ValueError(f"{type(module).__name__} has no parameter that requires a gradient")
    dtypes: dict[torch.dtype, list[str]] = {}
    for name, parameter in trainable:
        dtypes.setdefault(parameter.dtype, []).append(name)
    real = {dtype.to_real() for dtype in dtypes}
    if len(real) > 1 or not real <= {torch.float32, torch.float64}:
        shown = [f"{some(names)} are {dtype}" for dtype, names in dtypes.items()]
        found = ", ".join(shown).replace("torch.", "")
        way = "use module.float() or module.double()"
        if any(dtype.is_complex for dtype in dtypes):
            way += ", and p.data = p.data.to(torch.complex64) or complex128 for a complex p"
        raise ValueError(
            "all parameters must be float32 (complex64), or all float64 (complex128); "
            f"{found}; {way}"
        )


def _check_users(parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuse parameters that another wrapper or a hook of the user uses."""
    taken = [name for name, p in parameters if isinstance(p, PlacedParameter)]
    if taken:
        raise ShardingError(
            f"parameter {taken[0]!r} is sharded already; shard a module once, and each part of "
            "two modules by one of them"
        )
    hooked = [name for name, p in parameters if p._post_accumulate_grad_hooks]
    if hooked:
        raise ValueError(
            f"{some(hooked)}: a hook of register_post_accumulate_grad_hook() would run before the "
            "gradient is reduced over the ranks. Leave it out, and read or change p.grad after "
            "backward()"
        )


def rounded(tree: Any) -> Any:
    """Return a tree whose floating-point tensors are bfloat16, as PyTorch does not mix dtypes."""

    def rounded_one(x: Any) -> Any:
        return x.bfloat16() if x.is_floating_point() else x

    return tree_map_only(torch.Tensor, rounded_one, tree)


def note_wide_buffers(error: BaseException, module: torch.nn.Module) -> None:
    """Name, in an error of a module with rounded parameters, the buffers that may be the cause."""
    wide = [name for name, t in module.named_buffers() if t.is_floating_point() and t.itemsize != 2]
    if wide:
        error.add_note(
            f'precision="bfloat16" rounds parameters, and no buffers: {some(wide)} may have to be '
            "given in torch.bfloat16 before the module is sharded. Batch normalisation computes "
            "beside float32 statistics after mpishard.torch.convert_sync_batchnorm(module)"
        )


def tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor in the memory of an array, which may be of bfloat16."""
    if not is_bfloat16(array):
        return torch.from_numpy(array)
    # The libraries share no bfloat16, but the memory of 16-bit integers.
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


@called_as("backward()")
def _take_gradient(take: Callable[[torch.Tensor | None], None], parameter: torch.Tensor) -> None:
    """Give a parameter's gradient to ``take``, as its hook."""
    with torch._C.DisableTorchFunctionSubclass():  # It costs time for each attribute.
        gradient = native_gradient.__get__(parameter)
        # The store has the values from now on, so that PyTorch can free its own.
        native_gradient.__set__(parameter, None)
    if gradient is not None:
        # NumPy has no sparse arrays, and sums of 16-bit numbers would lose digits.
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        gradient = gradient.float() if gradient.itemsize == 2 else gradient
        gradient = gradient.detach() if gradient.requires_grad else gradient
        gradient = real_numbers(gradient) if gradient.is_complex() else gradient
    take(gradient)
