"""Parameters with shared values, whose gradient is only this rank's part."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from mpishard.communication.contract.status import called_as
from mpishard.errors import ShardingError
from mpishard.layout import ShardLayout
from mpishard.sharding import ParameterEntry, Piece, Unit

native_gradient = torch.Tensor.grad
"""Descriptor of the attribute in which autograd stores a gradient."""


class Uncopied:
    """Base of objects that are None in copies and pickles of the module that refers to them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class Part:
    """A user's parameter, and the part of it that this rank updates.

    Parameters
    ----------
    owner : ShardedModule
        Module of the parameter.
    index : int
        Index of the entry in the flat vector's table.
    entry : ParameterEntry
        Name, shape and start of the parameter.
    unit : Unit
        Unit that contains the parameter.
    parameter : torch.nn.Parameter
        The user's parameter.

    Attributes
    ----------
    start, stop : int
        Flat range that this rank updates. Under DDP it is the whole parameter.
    tensor : torch.nn.Parameter
        Values of the range, in the store's memory, of shape (stop - start,); under DDP of the
        parameter's shape. Optimizers of PyTorch are given this tensor.
    """

    tensor: Any

    def __init__(
        self, owner: Any, index: int, entry: ParameterEntry, unit: Unit, parameter: Any
    ) -> None:
        self.owner = owner
        self.index = index
        self.entry = entry
        self.unit = unit
        self.parameter = parameter
        self.start, self.stop = entry.start, entry.stop
        if owner.shards_state:
            backend = owner.backend
            mine = ShardLayout(unit.length, backend.world_size).slice(backend.rank)
            # If this rank owns nothing of the parameter, the range is empty, and still inside it.
            self.start = min(max(entry.start, unit.start + mine.start), entry.stop)
            self.stop = max(min(entry.stop, unit.start + mine.stop), self.start)

    @property
    def piece(self) -> Piece:
        """The flat range as a piece of the unit, for stores."""
        return Piece(self.unit, self.start, self.stop, self.start)

    def as_gradient(self, values: Any) -> Any:
        """Return a new tensor in the same memory, to be the ``grad`` of `tensor`.

        If it is only a part of a gradient, it refuses norms until an optimizer reads it.
        """
        return values.as_subclass(GradientPiece if self.owner.shards_state else torch.Tensor)

    @property
    def in_parameter(self) -> slice:
        """Slice of the flattened parameter that the range covers."""
        return slice(self.start - self.entry.start, self.stop - self.entry.start)


class ChangedOnce:
    """A tensor whose memory the ranks of a node may share; they change it in place together.

    Every rank calls the method, such as ``mul_``, and the tensor is changed once.
    """

    _owner: Any
    """The ShardedModule."""


# Methods that change more than a tensor's values.
_OTHER_CHANGES = frozenset(
    [
        "as_strided_", "detach_", "rename_", "requires_grad_", "resize_", "resize_as_",
        "resize_as_sparse_", "set_", "share_memory_", "sparse_resize_", "sparse_resize_and_clear_",
        "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_",
    ]
)  # fmt: skip
REPEATABLE = frozenset(["clamp_", "clamp_max_", "clamp_min_", "clip_", "fill_", "zero_"])
"""Methods that give the same values however often they run, so that ranks need not wait."""

_OPERATORS = ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow")


def _once(name: str) -> Callable[..., Any]:
    """A method that changes a tensor in place, for `ChangedOnce`."""
    method = getattr(torch.Tensor, name)

    @called_as("a change of a parameter in place")
    @functools.wraps(method)
    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._owner.change(self, method, args, kwargs)

    return change


for _name in [
    *(n for n in dir(torch.Tensor) if n[0] != "_" and n[-1] == "_" and n not in _OTHER_CHANGES),
    *(f"__{operator}__" for operator in _OPERATORS),
]:
    setattr(ChangedOnce, _name, _once(_name))


class SharedValues(ChangedOnce, torch.Tensor):  # type: ignore[misc]
    """The ``.data`` of a parameter; copies are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = self.detach().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)


def _form(tensor: Any) -> Any:
    return tensor.shape, tensor.dtype, tensor.device


class SharedParameter(ChangedOnce, torch.nn.Parameter):  # type: ignore[misc]
    """A parameter of a sharded module, in the memory where the module's owner put it.

    ``.grad`` is this rank's part of the reduced gradient, as a flat tensor; under DDP it is the
    whole gradient. It may be set to None, replaced by a tensor of its shape, or changed in place.
    """

    _part: Part

    @property
    def data(self) -> Any:
        values = torch.Tensor.data.__get__(self)
        # PyTorch's compiler looks at the type, which has to be one that it knows.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if type(values) is torch.Tensor and not caller.startswith("torch."):
            values = values.as_subclass(SharedValues)
            values._owner = self._owner
        return values

    @data.setter
    def data(self, values: Any) -> None:
        # The parameter stays in the ranks' memory if the values fit there.
        if not isinstance(values, torch.Tensor) or _form(values) != _form(self):
            torch.Tensor.data.__set__(self, values)
        elif (values.data_ptr(), values.stride()) != (self.data_ptr(), self.stride()):
            self.data.copy_(values.detach())

    # Copies and pickles are plain parameters of PyTorch. A view would be saved with all of its
    # memory, which is a whole unit.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        copied = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied.__reduce_ex__(protocol)

    @property
    def grad(self) -> Any:
        # torch.compile copies gradients while it traces, and expects the parameter's shape.
        if torch._guards.TracingContext.try_get() is not None:
            return None
        part = self._part
        gradient = part.tensor.grad
        if gradient is None or not part.owner.shards_state:
            return gradient
        return gradient.as_subclass(GradientPiece)

    @grad.setter
    def grad(self, value: Any) -> None:
        part = self._part
        if value is not None and value.shape != part.tensor.shape:
            raise ShardingError(
                f"the gradient of {part.entry.name!r} on this rank is its part of shape "
                f"{tuple(part.tensor.shape)}; got a tensor of shape {tuple(value.shape)}"
            )
        part.tensor.grad = None if value is None else part.as_gradient(value)

    @grad.deleter
    def grad(self) -> None:
        self._part.tensor.grad = None


class GradientPiece(torch.Tensor):  # type: ignore[misc]
    """Part of a gradient that this rank owns. It refuses norms, which would be of the part only."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "norm" in getattr(function, "__name__", ""):
            raise ShardingError(
                f"{function.__name__} of a gradient would be that of this rank's part alone; "
                "mpishard.torch.clip_grad_norm_(model, max_norm) clips by the norm over all ranks "
                "and returns it (with max_norm=inf it changes nothing); "
                "p.grad.as_subclass(torch.Tensor) is the part as a plain tensor"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if function == torch.Tensor.data.__set__:
                # ``p.grad.data = x``: p.grad is a temporary object here, and the optimizer reads
                # the memory. The values are therefore copied there.
                return args[0].detach().copy_(args[1])
            result = function(*args, **(kwargs or {}))
            # Results with the same values also refuse norms, as loops use p.grad.data, too.
            if function in _SAME_VALUES:
                return result.as_subclass(cls)
            return result


_SAME_VALUES = (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.data.__get__)
