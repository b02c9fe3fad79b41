"""The gradient of a sharded parameter, of which each rank owns a part."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from mpishard.base import ShardingError
from mpishard.communication import called_as
from mpishard.torch.complex_parameters import real_numbers

# Functions that compute each element of their result from the same element of each argument. Of
# others, such as sums, the results are right, too, but they need the whole gradient.
_ELEMENTWISE = frozenset(
    [
        "abs", "absolute", "add", "addcdiv", "addcmul", "ceil", "clamp", "clamp_max", "clamp_min",
        "clip", "clone", "contiguous", "copy", "copysign", "cpu", "detach", "div", "divide",
        "double", "empty_like", "eq", "exp", "expm1", "fill", "float", "float_power", "floor",
        "floor_divide", "floordiv", "fmax", "fmin", "fmod", "frac", "full_like", "ge", "greater",
        "greater_equal", "gt", "heaviside", "hypot", "isfinite", "isinf", "isnan", "le", "lerp",
        "less", "less_equal", "log", "log10", "log1p", "log2", "logical_and", "logical_not",
        "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum", "mod", "mul",
        "multiply", "nan_to_num", "ne", "neg", "negative", "not_equal", "ones_like", "positive",
        "pow", "rand_like", "randn_like", "rdiv", "reciprocal", "relu", "remainder", "rfloordiv",
        "rmod", "round", "rpow", "rsqrt", "rsub", "sgn", "sigmoid", "sign", "sqrt", "square",
        "sub", "subtract", "tanh", "to", "true_divide", "trunc", "where", "xlogy", "zero",
        "zeros_like",
    ]
)  # fmt: skip
# What needs no values of other ranks: of the part as it is, and of the whole gradient's form.
_OF_PART = frozenset(
    [
        "__hash__", "as_subclass", "data_ptr", "get_device", "requires_grad_",
        "untyped_storage",
    ]
)  # fmt: skip
_OF_FORM = frozenset(
    [
        "__len__", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point",
        "ndimension", "nelement", "numel", "size", "stride",
    ]
)  # fmt: skip
_FORM_ATTRIBUTES = frozenset(["shape", "ndim", "nbytes", "dtype", "itemsize"])
_VALUE_ATTRIBUTES = frozenset(["T", "H", "mT", "mH", "real", "imag"])
_NO_CHANGES = frozenset(["__index__", "__init__", "__int__", "__invert__"])


def _changes(name: str) -> bool:
    """Return True if a function of this name changes its first argument."""
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NO_CHANGES)
    return name.endswith("_")


class GradientPart(torch.Tensor):  # type: ignore[misc]
    """Part of a gradient that this rank owns, which stands for the whole gradient.

    Its shape is the parameter's. Operations on each element alone, such as ``p.grad.mul_(2)`` or
    ``2 * p.grad``, change or return this rank's part, and send nothing. All others, such as sums,
    norms, indices and updates of parameters, gather the whole gradient: every rank calls them, and
    gets the result that one process has. So do all operations on the gradient of a complex
    parameter, of which a part has real numbers.
    """

    # A weak reference, because the parameter's tensor has the part as its ``grad``, and the garbage
    # collector cannot see that.
    _reference: weakref.ref[Any]
    _is_local: bool
    # A checksum of the calls that have changed or made the values, with their arguments. Tensors in
    # the same memory, such as p.grad.data, have the same list.
    _changes: list[int]

    @classmethod
    def of(cls, owned: Any, values: torch.Tensor, *, is_local: bool = False) -> GradientPart:
        """Return the values of a flat tensor as a part, in the same memory.

        Parameters
        ----------
        owned : OwnedParameter
            The parameter.
        values : torch.Tensor
            This rank's elements.
        is_local : bool
            True if they are not reduced over the ranks, inside of `no_sync`.
        """
        part: GradientPart = values.as_subclass(cls)
        part._reference, part._is_local, part._changes = weakref.ref(owned), is_local, [0]
        return part

    @property
    def _owned(self) -> Any:
        owned = self._reference()
        if owned is None:
            raise ShardingError(
                "the module of this gradient is gone, and with it the parts of other ranks: keep "
                "p.grad.full_tensor() instead"
            )
        return owned

    def to_local(self) -> torch.Tensor:
        """Return this rank's elements as a plain tensor in the same memory.

        It is flat, except if this rank has the whole gradient. If the parameter is complex, it has
        real numbers, which are parts of pairs.
        """
        return plain(self)

    @called_as("an operation on a gradient")
    def full_tensor(self) -> torch.Tensor:
        """Return the whole gradient as a plain tensor, on every rank. Collective."""
        self._require_reduced()
        owned = self._owned
        # An inference tensor has no count of changes.
        with torch.inference_mode(False), torch.no_grad():
            own = self.to_local().detach().contiguous()
            if not owned.owner.shards_state:  # Each rank has the whole gradient.
                return owned.whole(own.clone())
            subject = owned.owner.layout.subjects[owned.unit.index]
            whole = owned.owner.backend.all_gather(own.numpy(), subject=subject)
            return owned.whole(torch.from_numpy(np.asarray(whole)))

    def _require_reduced(self) -> None:
        if self._is_local:
            raise ShardingError(
                f"the gradient of {self._owned.entry.name!r} is not reduced over the ranks yet, "
                "because its backward() was inside no_sync(): use the gradient of the first "
                "backward() after it, or make it 0 by zero_()"
            )

    def __repr__(self, **_: object) -> str:
        owned, place = self._owned, self._owned.in_parameter
        return (
            f"elements {place.start} to {place.stop} of the gradient of {owned.entry.name!r}, of "
            f"shape {owned.shape}: {self.to_local()!r}"
        )

    def __format__(self, specification: str) -> str:
        return format(self.full_tensor(), specification) if specification else repr(self)

    def __iter__(self) -> Any:
        return iter(self.unbind())

    @classmethod
    @called_as("an operation on a gradient")
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        first = args[0] if args else None
        if name in ("__get__", "__set__") and isinstance(first, cls):
            return _attribute(function, name, *args)
        if name == "detach_":
            return first  # It has no graph.
        if name in _OF_PART:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if name in _OF_FORM:
            return function(_form(first), *args[1:], **kwargs)
        parts = [x for x in tree_iter((args, kwargs)) if isinstance(x, cls)]
        if name in ("zero_", "_foreach_zero_"):  # zero_grad(set_to_none=False) calls these.
            local = {id(part): part for part in parts if part._is_local}
            for part in local.values():
                part._owned.clear_local(part)
            if local:
                for other in tree_iter(args):
                    if id(other) not in local:
                        other.zero_()
                return first if name == "zero_" else None
        for part in parts:
            part._require_reduced()
        if _is_elementwise(name, parts, args, kwargs):
            return _on_part(parts[0], function, args, kwargs)
        return _on_whole(function, args, kwargs)


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """Return a tensor or the elements of a `GradientPart` as a plain tensor in the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.as_subclass(torch.Tensor)


_ROW = 1 << 15  # Bytes of a row.


def checksum(value: object) -> int:
    """Return a checksum of a tensor's values, or of another argument of a method."""
    if isinstance(value, torch.Tensor):
        value = plain(value) if isinstance(value, GradientPart) else value
        # This gathers a parameter that is not in memory.
        values = plain(torch.Tensor.detach(value).resolve_conj().contiguous().reshape(-1))
        # After numpy() PyTorch could not free the memory of gathered parameters.
        data = np.from_dlpack(values.view(torch.uint8))
        rows = data[: data.size // _ROW * _ROW].view(np.uint64).reshape(-1, _ROW // 8)
        # Sums are computed at the speed of memory, many times that of a checksum.
        start = 0
        for sums in (rows.sum(axis=0), rows.sum(axis=1)) if len(rows) else ():
            start = zlib.crc32(sums.data, start)
        return zlib.crc32(data[rows.nbytes :].data, start)
    return zlib.crc32(repr(value).encode())


def _form(part: Any) -> torch.Tensor:
    """Return a tensor without values of the form of the whole gradient."""
    owned, dtype = part._owned, plain(part).dtype
    dtype = dtype.to_complex() if owned.is_complex else dtype
    return torch.empty(owned.shape, dtype=dtype, device="meta")


def _attribute(function: Any, name: str, part: GradientPart, *value: Any) -> Any:
    """Return or set an attribute of a part, by its descriptor's method."""
    attribute = function.__self__.__name__
    if name == "__get__" and attribute in _FORM_ATTRIBUTES:
        return function(_form(part))
    if name == "__get__" and attribute in _VALUE_ATTRIBUTES:
        return _on_whole(function, (part,), {})
    if name == "__set__" and attribute == "data":
        # The optimizer reads the memory that the part has, so that the values are copied there.
        return part.copy_(value[0])
    if name == "__get__" and attribute == "data":
        return part.detach()  # PyTorch counts changes of it with those of the part.
    with torch._C.DisableTorchFunctionSubclass():
        return function(part, *value)


def _is_elementwise(name: str, parts: Sequence[GradientPart], args: Any, kwargs: Any) -> bool:
    """Return True if a call computes this rank's part of its result from parts."""
    changes = _changes(name)
    known = name.strip("_")
    if changes and name.startswith("__i"):
        known = known[1:]
    if known not in _ELEMENTWISE or name == "__float__" or "out" in kwargs or not parts:
        return False
    if changes and not isinstance(args[0], GradientPart):
        return False
    owned = parts[0]._owned
    if owned.is_complex:  # A rank's part may begin between the two numbers of an element.
        return False
    return all(_fits(x, owned) for x in (*args, *kwargs.values()))


def _fits(value: Any, owned: Any) -> bool:
    """Return True if a function's argument has an element for each one of the gradient."""
    if isinstance(value, GradientPart):
        return value._owned is owned
    if not isinstance(value, torch.Tensor):
        return not isinstance(value, list | tuple)
    if value.requires_grad and torch.is_grad_enabled():
        return False  # PyTorch could not differentiate by parts of other ranks.
    shape, own = owned.entry.shape, tuple(value.shape)
    if len(own) > len(shape) or is_functorch_wrapped_tensor(value):
        return False
    pairs = zip(own[::-1], shape[::-1], strict=False)
    return all(mine in (1, theirs) for mine, theirs in pairs)


def _on_part(part: GradientPart, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call an elementwise function with this rank's elements of each argument."""
    owned = part._owned
    marks = [_mark(x) for x in tree_iter((args, kwargs))]
    mark = zlib.crc32(f"{function.__name__} {marks}".encode())

    def own(value: Any) -> Any:
        if isinstance(value, GradientPart):
            return value.to_local()
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        if value.numel() == 1:
            return value.reshape(1)
        return value.expand(owned.entry.shape).reshape(-1)[owned.in_parameter]

    given = [own(x) for x in args]
    result = function(*given, **{key: own(x) for key, x in kwargs.items()})
    if isinstance(args[0], GradientPart) and result is given[0]:
        args[0]._changes[0] = mark
        owned.show_assigned(args[0])
        return args[0]
    if not isinstance(result, torch.Tensor) or result.shape != (owned.stop - owned.start,):
        return result
    found = GradientPart.of(owned, result)
    if isinstance(args[0], GradientPart) and _memory_of(result) == _memory_of(given[0]):
        found._changes = args[0]._changes
    else:
        found._changes[0] = mark
    return found


def _mark(value: Any) -> Any:
    """Return what must be the same on all ranks of an argument of a change."""
    if isinstance(value, GradientPart):
        return value._changes[0]
    if isinstance(value, torch.Tensor):
        return checksum(value)
    is_value = isinstance(value, bool | int | float | complex | str | np.generic)
    return value if is_value else type(value).__name__


class _Whole:
    """The gathered values of a gradient, changes of which are written to this rank's part.

    Parameters
    ----------
    part : GradientPart
        The part.
    """

    def __init__(self, part: GradientPart) -> None:
        self.part = part
        self.values = part.full_tensor()
        self.memory = _memory_of(self.values)
        self.note_versions()

    def note_versions(self) -> None:
        self._versions = self.values._version, plain(self.part)._version

    def follow(self) -> None:
        """Take the gradient's values anew if it has changed since. Collective then."""
        GradientPart._require_reduced(self.part)
        if plain(self.part)._version != self._versions[1]:
            with torch.no_grad():
                self.values.copy_(GradientPart.full_tensor(self.part))
            self.note_versions()

    def write(self) -> None:
        """Write the values to the part if they have changed.

        Raises
        ------
        ShardingError
            If one call has changed the part, too.
        """
        mine, of_part = self._versions
        if self.values._version == mine:
            return
        own = plain(self.part)
        owned = self.part._owned
        if own._version != of_part:
            raise ShardingError(
                f"one call changed the gradient of {owned.entry.name!r} and a view of it, such as "
                "p.grad.view(-1): change one of them"
            )
        with torch.no_grad():
            own.copy_(real_numbers(self.values)[owned.in_parameter].view(own.shape))
        # With the earlier changes, because of another rank's part they are in the values, too.
        mark = f"{self.part._changes[0]} {checksum(self.values)}"
        self.part._changes[0] = zlib.crc32(mark.encode())
        owned.show_assigned(self.part)
        self.note_versions()

    def show(self, result: Any) -> Any:
        """Return a result as the part, or as a view, if it has the memory of these values."""
        if result is self.values:
            return self.part
        if isinstance(result, np.ndarray):
            result.setflags(write=False)  # NumPy's changes would not be noticed.
        elif isinstance(result, torch.Tensor) and _memory_of(result) == self.memory:
            result = result.as_subclass(_WholeView)
            result._whole = self
        return result


def _on_whole(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with whole gradients in place of parts. Collective."""
    wholes: dict[int, _Whole] = {}

    def gathered(part: GradientPart) -> torch.Tensor:
        if id(part) not in wholes:
            wholes[id(part)] = _Whole(part)
        return wholes[id(part)].values

    args, kwargs = tree_map_only(GradientPart, gathered, (args, kwargs))
    return _write_and_show(wholes.values(), function(*args, **kwargs))


def _write_and_show(wholes: Iterable[_Whole], result: Any) -> Any:
    for whole in wholes:
        whole.write()
        result = tree_map(whole.show, result)
    return result


def _memory_of(tensor: torch.Tensor) -> object:
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided or is_functorch_wrapped_tensor(tensor):
            return None
        return tensor.untyped_storage()._cdata


class _WholeView(torch.Tensor):  # type: ignore[misc]
    """View of a gathered gradient, such as ``p.grad[0]``; changes of either are the other's."""

    _whole: _Whole

    def __repr__(self, **_: object) -> str:
        self._whole.follow()
        return repr(plain(self))

    def __iter__(self) -> Any:
        return iter(self.unbind())

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if GradientPart in types:
            return NotImplemented  # It gathers gradients first.
        if function == torch.Tensor.data.__set__:  # It gives the view memory of its own.
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args)
        wholes = {x._whole: x for x in tree_iter((args, kwargs)) if isinstance(x, cls)}
        for whole in wholes:
            whole.follow()
        args, kwargs = tree_map_only(cls, plain, (args, kwargs or {}))
        return _write_and_show(wholes, function(*args, **kwargs))
