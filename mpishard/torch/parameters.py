"""Parameters in a store's memory, which ranks may share, and the parts that a rank updates."""

from __future__ import annotations

import functools
import sys
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_map_only

from mpishard.base import Array, ShardingError, ShardLayout
from mpishard.communication import CommunicationBackend, called_as
from mpishard.models import ParameterStore, ShardedParameters
from mpishard.sharding import ParameterEntry, Piece, Unit
from mpishard.torch.complex_parameters import from_real_numbers
from mpishard.torch.gradients import GradientPart, checksum, plain

StateDict: TypeAlias = dict[str, Any]
"""State of a module or an optimizer, as PyTorch's ``state_dict`` returns it."""

native_gradient = torch.Tensor.grad
"""Descriptor of the attribute in which autograd stores a gradient."""


class Uncopied:
    """Base of objects that are None in copies and pickles of the module that refers to them."""

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class StoredParameter:
    """A parameter of a module, and the store whose memory it has.

    Parameters
    ----------
    holder : str
        Name of the wrapper that trains the parameter, for messages.
    store : ParameterStore
        The store. Its ranks change the parameter together.
    index : int
        Index of the entry in the flat vector's table.
    entry : ParameterEntry
        Name, shape and start of the parameter.
    unit : Unit
        Unit that contains the parameter.
    parameter : torch.nn.Parameter
        The user's parameter.
    """

    def __init__(
        self,
        holder: str,
        store: ParameterStore,
        index: int,
        entry: ParameterEntry,
        unit: Unit,
        parameter: torch.Tensor,
    ) -> None:
        self.holder = holder
        self.store = store
        self.index = index
        self.entry = entry
        self.unit = unit
        self.parameter = parameter
        self.unchecked: int | None = None  # A checksum of changes that `Changes` will compare.
        # Views of the parameter's memory that the user may still have, such as p.data, by id.
        self.views: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def part_with_views(self) -> None:
        """Give the user's views memory of their own.

        With ``p.data = values`` PyTorch gives a parameter other memory, and earlier views keep
        their values. Here the parameter stays in its memory, and gets the values.
        """
        views = [*self.views.values()]
        self.views.clear()
        for view in views:
            own = view.detach().clone()  # This gathers a parameter that is not in memory.
            with torch._C.DisableTorchFunctionSubclass():
                torch.Tensor.data.__set__(view, plain(own))
                view.__class__ = torch.Tensor

    def note_version(self) -> None:
        """Remember the parameter's number of changes in place, all of which are counted."""
        self._version = self.parameter._version

    def has_new_version(self) -> bool:
        """Return True if the parameter was changed in place since `note_version`."""
        return self.parameter._version != self._version  # type: ignore[no-any-return]

    def require_counted(self) -> None:
        """Refuse a parameter that was changed in place other than by `ChangedOnce`.

        Raises
        ------
        ShardingError
            If ranks share the parameter's memory, in which each may have made the change.
        """
        if not self.has_new_version() or not self.store.once_per_node:
            return
        if self.store.backend.world_size > self.store.backend.node_count:
            raise ShardingError(
                f"parameter {self.entry.name!r} was changed in place by an operation on a view of "
                "it, by a function such as torch._foreach_mul_, or with out=. Each rank of the "
                "node made this change in the memory that they share, so that the values may be "
                "wrong. Use methods of the parameter or of its data, such as p.mul_(0.9), "
                "p[0] = 0 or p.data[0].mul_(0.9), or change it before the module is sharded"
            )

    def change(
        self, tensor: torch.Tensor, method: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Change the parameter, or its values, by a method that every rank calls.

        Collective if the ranks of a node share the memory: it is changed once there. Also if the
        method draws random numbers: every rank gets rank 0's.

        Raises
        ------
        ShardingError
            If the module has rounded copies of its parameters, or the parameter was changed in a
            way that is not counted.
        """
        store = self.store
        if store.computed is not store:
            raise ShardingError(
                f"{method.__name__}() of parameter {self.entry.name!r} with "
                'precision="bfloat16" would change the rounded copies, and not the float32 '
                "parameters of their owners: change parameters before the module is sharded"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            return method(tensor, *args, **kwargs)  # PyTorch refuses it.
        self.require_counted()
        args, kwargs = tree_map_only(GradientPart, GradientPart.full_tensor, (args, kwargs))
        backend, subject = store.backend, store.layout.subjects[self.unit.index]
        has_copies = not store.once_per_node and not isinstance(store, ShardedParameters)
        if self.unchecked is not None and has_copies:
            # No backward pass has compared the ranks' copies since their last change.
            fault = set_differently(self.entry.name)
            require_equal(checksum(self.parameter), backend, subject, fault)
        if method.__name__ in RANDOM:
            drawn = torch.Tensor.clone(tensor.detach(), memory_format=torch.contiguous_format)
            method(drawn, *args, **kwargs)
            values = torch.from_numpy(backend.broadcast(drawn.numpy(), subject=subject))
            method, args, kwargs = torch.Tensor.copy_, (values,), {}
        if not store.once_per_node or method.__name__ in REPEATABLE:
            result = method(tensor, *args, **kwargs)
            given = [checksum(x) for x in (*args, *kwargs.values())] if store.once_per_node else []
            call = f"{method.__name__} {given}"
            self.unchecked = zlib.crc32(call.encode(), self.unchecked or 0)
        else:
            changed = tensor.detach().clone()
            is_operator = method(changed, *args, **kwargs) is None
            # After it all ranks have read the old values.
            require_equal(checksum(changed), backend, subject, set_differently(self.entry.name))
            if backend.local_rank == 0:
                torch.Tensor.copy_(tensor.detach(), changed)
            else:  # for autograd, which refuses a backward pass through changed values
                torch.autograd.graph.increment_version(tensor)
            backend.barrier(subject=subject)
            result = None if is_operator else tensor
        self.note_version()
        return result

    def refuse_optimizer(self, kind: str) -> None:
        """Refuse an optimizer that is not the holder's, and would update the whole parameter."""
        raise ShardingError(
            f"{kind} would update parameter {self.entry.name!r}, which {self.holder} holds and "
            "updates itself: call step() of the wrapper's optimizer, or release() the module first"
        )


# Modules whose own code reads gradients, such as optimizers and clipping, and keeps none.
_KEEP_NOTHING = ("torch.", "mpishard.")


class OwnedTensor(torch.nn.Parameter):  # type: ignore[misc]
    """What a rank updates of a parameter, as optimizers get it. The user may keep its ``grad``."""

    _owned: OwnedParameter

    @property
    def data(self) -> torch.Tensor:
        # PyTorch counts changes of a detached tensor with those of this one.
        values = self.detach()
        self._owned.views[id(values)] = values
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        # It stays in the ranks' memory.
        if (values.data_ptr(), values.stride()) != (self.data_ptr(), self.stride()):
            self._owned.part_with_views()
            self.detach().copy_(values.detach().view_as(self))

    @property
    def grad(self) -> Any:
        # Optimizers read it four times in a step.
        if sys._getframe(1).f_globals.get("__name__", "").startswith(_KEEP_NOTHING):
            return native_gradient.__get__(self)
        return self._owned.hand_out()

    @grad.setter
    def grad(self, value: Any) -> None:
        native_gradient.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        native_gradient.__set__(self, None)


class OwnedParameter(StoredParameter):
    """A user's parameter, and the part of it that this rank updates.

    Parameters
    ----------
    owner : ShardedModule
        Module of the parameter.
    index, entry, unit, parameter
        As in `StoredParameter`.

    Attributes
    ----------
    start, stop : int
        Flat range that this rank updates. Under DDP it is the whole parameter.
    tensor : torch.nn.Parameter
        Values of the range, in the store's memory, of shape (stop - start,); under DDP of the
        entry's shape. Optimizers of PyTorch are given this tensor.
    shape, is_complex
        Shape of the user's parameter, and True if it has pairs of the range's numbers.
    stored_gradient : torch.Tensor or None
        Gradient in the store's memory, which `tensor` has as ``grad`` until the user reads it.
    """

    tensor: OwnedTensor
    stored_gradient: torch.Tensor | None = None
    # This rank's part of a gradient that the user has assigned whole, the user's tensor, and the
    # number of its changes.
    _assigned: tuple[torch.Tensor, torch.Tensor, int] | None = None
    # The number of changes of `stored_gradient`, and their checksum, if a rank has it whole.
    _noted = 0, 0

    def __init__(
        self, owner: Any, index: int, entry: ParameterEntry, unit: Unit, parameter: torch.Tensor
    ) -> None:
        super().__init__("mpishard.torch", owner.parameters, index, entry, unit, parameter)
        self.owner = owner
        self.shape, self.is_complex = tuple(parameter.shape), parameter.is_complex()
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

    @property
    def in_parameter(self) -> slice:
        """Slice of the flattened parameter that the range covers."""
        return slice(self.start - self.entry.start, self.stop - self.entry.start)

    @property
    def gives_parts(self) -> bool:
        """True if the ``grad`` of `tensor` is a `GradientPart`, unlike the parameter's gradient."""
        return self.owner.shards_state or self.is_complex  # type: ignore[no-any-return]

    def whole(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return all real numbers of the parameter, or of a state, in the parameter's shape."""
        return from_real_numbers(numbers, self.shape, is_complex=self.is_complex)

    def note_update(self) -> None:
        """Remember the changes of `tensor`, all of which other ranks have got."""
        self._updates = self.tensor._version

    def require_updated(self) -> None:
        """Refuse changes of `tensor` outside of an optimizer's step.

        Raises
        ------
        ShardingError
            If this rank has a part of the parameter.
        """
        if self.owner.shards_state and self.tensor._version != self._updates:
            raise ShardingError(
                f"the part of parameter {self.entry.name!r} that this rank updates was changed "
                "after optimizer.step(), through optimizer.param_groups, and other ranks do not "
                "have the change: change the parameters of the model, such as for p in "
                "model.parameters(), or make the change inside step()"
            )

    def present_gradient(self) -> Any:
        """Return the ``grad`` of `tensor`, for a reader who does not keep it.

        Raises
        ------
        ShardingError
            If the user has assigned a tensor, of which this rank has a part, and changed it since.
        """
        gradient = native_gradient.__get__(self.tensor)
        if self._assigned is not None:
            part, value, version = self._assigned
            if part is not gradient:
                self._assigned = None
            elif value._version != version:
                raise ShardingError(
                    f"the tensor that was assigned to the gradient of {self.entry.name!r} was "
                    "changed afterwards, and this rank has a part of its earlier values: change "
                    "p.grad instead, or assign the tensor again"
                )
        return gradient

    def store_gradient(self, view: torch.Tensor, *, is_local: bool) -> None:
        """Let `tensor` have a gradient in the store's memory, ``view``, as its ``grad``.

        If ``is_local`` is True, it is not reduced over the ranks yet.
        """
        stored = self.stored_gradient
        # A tensor is used again, because a new one costs more than the sum of a small gradient.
        is_part = is_local or self.gives_parts
        if stored is None or is_local or vars(stored).get("_is_local"):
            stored = view.as_subclass(torch.Tensor)
            stored = GradientPart.of(self, view, is_local=is_local) if is_part else stored
            self.stored_gradient = stored
        if is_part:
            stored._changes[0] = 0
        self.note_change(stored, 0)
        native_gradient.__set__(self.tensor, stored)

    def note_change(self, gradient: Any, mark: int) -> None:
        """Let ``mark`` be the checksum of the changes of `stored_gradient`, if it is this one."""
        is_stored = gradient is self.stored_gradient
        if is_stored and not self.owner.shards_state:
            with torch._C.DisableTorchFunctionSubclass():
                self._noted = gradient._version, mark

    def hand_out(self) -> Any:
        """Return the ``grad`` of `tensor` to the user, who may keep it, and views of it.

        So it has memory of its own, to which later backward passes add.
        """
        gradient = self.present_gradient()
        if gradient is None or gradient is not self.stored_gradient:
            return gradient
        if vars(gradient).get("_is_local"):
            return gradient  # All its uses are refused.
        values: Any = plain(gradient).clone()
        if self.gives_parts:
            values = GradientPart.of(self, values)
            values.__class__ = type(gradient)  # A plain tensor while an optimizer updates.
        native_gradient.__set__(self.tensor, values)
        return values

    def change_of_gradient(self, *, of_values: bool = False) -> int:
        """Return a checksum of what the user may have changed of the gradient; 0 if nothing.

        If this rank has the whole gradient and ``of_values`` is True, it is one of its values.
        """
        gradient: Any = self.present_gradient()
        if gradient is None or self.owner.backend.world_size == 1:
            return 0
        if self.owner.shards_state:
            return int(vars(gradient).get("_changes", [0])[0])
        is_stored = gradient is self.stored_gradient
        if is_stored and not of_values:
            # PyTorch's own clipping changes it in place.
            with torch._C.DisableTorchFunctionSubclass():
                version, mark = self._noted
                if gradient._version == version:
                    return mark
        return checksum(gradient)

    def clear_local(self, gradient: Any) -> None:
        """Make a gradient of the user's 0 that is not reduced over the ranks yet."""
        self.owner.passes.forget_local(gradient)
        if gradient is self.stored_gradient:  # Its memory is that of the next pass.
            zeros: Any = torch.zeros_like(self.tensor, requires_grad=False)
            zeros = zeros.as_subclass(torch.Tensor)
            zeros = GradientPart.of(self, zeros) if self.gives_parts else zeros
            native_gradient.__set__(self.tensor, zeros)
            return
        self.note_local(gradient, is_local=False)
        plain(gradient).detach().zero_()
        if self._assigned is not None and self._assigned[0] is gradient:
            value = self._assigned[1].detach().zero_()
            self._assigned = gradient, self._assigned[1], value._version

    def note_local(self, gradient: Any, *, is_local: bool) -> None:
        """Let a gradient of the user's refuse its uses while it is not reduced over the ranks."""
        assigned = self._assigned
        # A tensor that the user has assigned, of which `gradient` is a part, is not complete then.
        if assigned is not None and assigned[0] is gradient and assigned[1] is not gradient:
            self.note_local(assigned[1], is_local=is_local)
        if type(gradient) is GradientPart:
            gradient._is_local = is_local
            if vars(gradient).get("_is_whole") and not is_local:
                gradient.__class__ = torch.Tensor
        elif is_local and type(gradient) is torch.Tensor:
            gradient._reference, gradient._is_local = weakref.ref(self), True
            gradient._changes, gradient._is_whole = [0], True
            gradient.__class__ = GradientPart

    def restore_gradient(self) -> None:
        """Make ``grad`` of `tensor`, which an optimizer has read as a plain tensor, a part."""
        gradient = native_gradient.__get__(self.tensor)
        if type(gradient) is torch.Tensor and self.gives_parts:
            if "_reference" in vars(gradient):
                gradient.__class__ = GradientPart
            else:
                native_gradient.__set__(self.tensor, GradientPart.of(self, gradient))

    def assign(self, value: torch.Tensor) -> None:
        """Let the user's tensor be the gradient.

        Collective if it is a whole gradient and this rank owns a part: the ranks' must be equal.

        Raises
        ------
        ShardingError
            If it has not the parameter's shape, or is complex and the parameter is not. On every
            rank, if ranks assign different values.
        """
        entry, owner = self.entry, self.owner
        value = value.to_dense() if value.is_sparse else value
        if value.shape != self.shape or (value.is_complex() and not self.is_complex):
            kind = "a complex tensor" if value.is_complex() else "a tensor"
            raise ShardingError(
                f"the gradient of {entry.name!r} has shape {self.shape}; got {kind} of shape "
                f"{tuple(value.shape)}"
            )
        is_part = isinstance(value, GradientPart) and not vars(value).get("_is_whole")
        if not self.gives_parts or (is_part and value._owned is self):
            native_gradient.__set__(self.tensor, value)
            return
        if isinstance(value, GradientPart):
            value = value.full_tensor()
        elif type(value) is not torch.Tensor or value.requires_grad:
            value = plain(value).detach()
        values = torch.empty(entry.size, dtype=self.tensor.dtype)
        self.whole(values).copy_(value)
        if owner.shards_state:
            require_equal(
                checksum(values), owner.backend, owner.layout.subjects[self.unit.index],
                f"the ranks assign different values to the gradient of {entry.name!r}, of which "
                "each rank updates a part",
            )  # fmt: skip
        part = GradientPart.of(self, values[self.in_parameter].clone().view(self.tensor.shape))
        self._assigned = part, value, value._version
        native_gradient.__set__(self.tensor, part)

    def show_assigned(self, gradient: torch.Tensor) -> None:
        """Write ``gradient`` to the user's tensor if it is one that the user assigned.

        Collective then, because this rank has a part of it.
        """
        if self._assigned is None or self._assigned[0] is not gradient:
            return
        value = self._assigned[1]
        with torch.no_grad():
            value.copy_(self._assigned[0].full_tensor())
        self._assigned = gradient, value, value._version

    def refuse_optimizer(self, kind: str) -> None:
        """Refuse an optimizer of whole parameters if this rank owns only a part."""
        if self.owner.shards_state:
            raise ShardingError(
                f"{kind} would update parameter {self.entry.name!r} whole, and this rank owns a "
                f"part of it; make the optimizer with mpishard.torch.optimizer(torch.optim.{kind}, "
                "model, ...)"
            )


class Changes:
    """Changes of parameters that each rank has made alone; a backward pass compares them.

    Parameters
    ----------
    parameters : sequence of StoredParameter
        All parameters of a module.
    backend : CommunicationBackend
        The ranks.
    subject : int
        The module, as for collectives.
    """

    def __init__(
        self, parameters: Sequence[StoredParameter], backend: CommunicationBackend, subject: int
    ) -> None:
        self._parameters = parameters
        self._backend = backend
        self._subject = subject
        # Ranks that share the memory compare the calls, and other ranks their copies.
        self._has_copies = not any(part.store.once_per_node for part in parameters)

    def flags(self) -> Array:
        """Return 1 for each parameter that this rank has changed since the last comparison."""
        parts = self._parameters
        found = np.array([part.unchecked is not None for part in parts], np.uint8)
        if self._has_copies:
            with torch._C.DisableTorchFunctionSubclass():  # It costs time for each attribute.
                newer = [n for n, part in enumerate(parts) if part.has_new_version()]
            found[newer] = 1
            for place in newer:
                parts[place].note_version()
        return found

    def compare(self, flags: Array) -> None:
        """Refuse parameters that any rank has changed, if the ranks' differ. Collective.

        Raises
        ------
        ShardingError
            On every rank. The message names the first parameter.
        """
        changed = [self._parameters[place] for place in np.flatnonzero(flags).tolist()]
        if not changed or self._backend.world_size == 1:
            return
        mine = [
            checksum(part.parameter) if self._has_copies else part.unchecked or 0
            for part in changed
        ]
        for part in changed:
            part.unchecked = None
        faults = [set_differently(part.entry.name) for part in changed]
        require_equal(mine, self._backend, self._subject, *faults)


def set_differently(name: str) -> str:
    """Return the fault of ranks that set a parameter differently, for `require_equal`."""
    return f"the ranks have set parameter {name!r} to different values"


def require_equal(
    checksums: int | Sequence[int], backend: CommunicationBackend, subject: int, *faults: str
) -> None:
    """Refuse values whose checksums differ between ranks. Collective.

    Raises
    ------
    ShardingError
        On every rank, with the text in ``faults`` of the first such value.
    """
    everyone = backend.all_gather(np.atleast_2d(checksums).astype(np.int64), subject=subject)
    differing = np.flatnonzero((everyone != everyone[0]).any(axis=0))
    if differing.size:
        column = differing[0]
        raise ShardingError(
            f"{faults[column]} (checksums by rank: {everyone[:, column].tolist()}), such as one "
            "from each rank's own samples. Every rank must set the same, such as "
            "p.data = mpishard.torch.mean_over_ranks(values), which is the mean of all ranks'"
        )


class ChangedOnce:
    """A tensor whose memory the ranks of a node may share; they change it in place together.

    Every rank calls the method, such as ``mul_``, and the tensor is changed once.
    """

    _stored: StoredParameter


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

RANDOM = frozenset(
    [
        "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
        "uniform_",
    ]
)  # fmt: skip
"""Methods that draw random numbers, which each rank's generator gives differently."""

_OPERATORS = ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow")


def _once(name: str) -> Callable[..., Any]:
    """A method that changes a tensor in place, for `ChangedOnce`."""
    method = getattr(torch.Tensor, name)

    @called_as("a change of a parameter in place")
    @functools.wraps(method)
    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._stored.change(self, method, args, kwargs)

    return change


for _name in [
    *(n for n in dir(torch.Tensor) if n[0] != "_" and n[-1] == "_" and n not in _OTHER_CHANGES),
    *(f"__{operator}__" for operator in _OPERATORS),
]:
    setattr(ChangedOnce, _name, _once(_name))


class SharedValues(ChangedOnce, torch.Tensor):  # type: ignore[misc]
    """The ``.data`` of a parameter, or a view of it; copies are plain tensors."""

    @classmethod
    def of(cls, part: StoredParameter, tensor: torch.Tensor) -> Any:
        """Return a plain tensor in the parameter's memory as one of this class, others as given."""
        # A graph has plain tensors, whether it is made with gradients or without.
        makes_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if makes_graph or type(tensor) is not torch.Tensor:
            return tensor
        has_memory = tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)
        if has_memory and _memory_of(tensor) == _memory_of(part.parameter):
            tensor = tensor.as_subclass(cls)
            tensor._stored = part
            part.views[id(tensor)] = tensor
        return tensor

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if GradientPart in types:
            return NotImplemented  # It gathers gradients first.
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            if not args or not isinstance(args[0], cls):
                return result
            return tree_map_only(torch.Tensor, functools.partial(cls.of, args[0]._stored), result)

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        copied = memo[id(self)] = self.detach().clone()
        return copied

    def __reduce_ex__(self, protocol: object) -> Any:
        values = self.detach().as_subclass(torch.Tensor).contiguous()
        # Memory of its own length, because all memory of a tensor is saved, and without a copy of
        # the values, because `torch.save` would keep all copies to its end.
        start = values.storage_offset() * values.itemsize
        memory = values.untyped_storage()[start : start + values.nbytes]
        plain = torch.empty(0, dtype=values.dtype)
        plain.set_(memory, 0, values.shape, values.stride())
        return plain.__reduce_ex__(protocol)


def _memory_of(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()._cdata


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


class PlacedParameter(ChangedOnce, torch.nn.Parameter):  # type: ignore[misc]
    """A parameter of a module, in the memory where the module's holder put it."""

    @property
    def data(self) -> torch.Tensor:
        values = torch.Tensor.data.__get__(self)
        # PyTorch's compiler looks at the type, which has to be one that it knows.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not caller.startswith("torch."):
            return SharedValues.of(self._stored, values)
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        # The parameter stays in the ranks' memory if the values fit there.
        if not isinstance(values, torch.Tensor) or _form(values) != _form(self):
            torch.Tensor.data.__set__(self, values)
        elif (values.data_ptr(), values.stride()) != (self.data_ptr(), self.stride()):
            self._stored.part_with_views()
            self.data.copy_(values.detach())

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        # Parametrisations call it if the user assigns a value to the parametrised tensor.
        if len(args) != 1 or kwargs or _form(args[0]) != _form(self):
            return super().set_(*args, **kwargs)
        self.data = args[0]
        return self

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        raise ShardingError(
            f"a hook of parameter {self._stored.entry.name!r} would run before its gradient is "
            "reduced over the ranks, and find none in p.grad: read or change p.grad after "
            "backward(), and let an optimizer update after it"
        )

    def detach(self) -> torch.Tensor:  # `state_dict` calls it.
        return SharedValues.of(self._stored, super().detach())

    def __getitem__(self, key: object) -> Any:
        values = super().__getitem__(key)
        # With gradients PyTorch refuses a change of it.
        return values if torch.is_grad_enabled() else SharedValues.of(self._stored, values)

    # Copies and pickles are plain parameters of PyTorch. A view would be saved with all of its
    # memory, which is a whole unit.

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        copied = memo[id(self)] = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: object) -> Any:
        copied = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied.__reduce_ex__(protocol)


class SharedParameter(PlacedParameter):
    """A parameter of a module in a PyTorch loop.

    ``.grad`` is the reduced gradient. It may be set to None, replaced by a tensor of its shape, or
    changed in place. Except under DDP each rank has a part of it: see `GradientPart`.
    """

    _stored: OwnedParameter

    @property
    def grad(self) -> Any:
        # torch.compile and torch.export copy gradients, and expect the parameter's shape.
        if sys._getframe(1).f_globals.get("__name__") == "torch._subclasses.meta_utils":
            return None
        part = self._stored
        part.restore_gradient()
        if sys._getframe(1).f_globals.get("__name__", "").startswith(_KEEP_NOTHING):
            return part.present_gradient()
        return part.hand_out()

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is None:
            native_gradient.__set__(self._stored.tensor, None)
        else:
            self._stored.assign(value)

    @grad.deleter
    def grad(self) -> None:
        native_gradient.__set__(self._stored.tensor, None)
