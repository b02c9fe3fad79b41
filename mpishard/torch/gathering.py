"""FSDP for ranks that share no memory: units are gathered when an operation needs them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch._C._functorch import (
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_current_level,
)
from torch._functorch import eager_transforms, vmap
from torch.utils._pytree import tree_iter, tree_map_only

from mpishard.base import BFLOAT16, Array, CollectiveMismatchError, ShardingError
from mpishard.communication import Work, called_as
from mpishard.models import ShardedParameters
from mpishard.observe import MemoryCategory
from mpishard.torch.gradients import GradientPart, checksum
from mpishard.torch.parameters import (
    RANDOM,
    ChangedOnce,
    SharedParameter,
    StateDict,
    require_equal,
    set_differently,
)
from mpishard.torch.placed import tensor_of

# Number of units in memory: the unit in use, and the one before, as modules often alternate.
_RESIDENT = 2
# Methods that need no values, and attributes that need them, among them views such as T.
_FREE_METHODS = frozenset(
    [
        "__hash__", "__len__", "__set__", "dim", "element_size", "get_device", "is_complex",
        "is_contiguous", "is_floating_point", "ndimension", "nelement", "numel", "register_hook",
        "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size",
        "storage_offset", "stride", "untyped_storage",
    ]
)  # fmt: skip
_VALUES = frozenset(["data", "T", "H", "mT", "mH", "real", "imag"])
# Functions of torch.nn.init have these names, too.
_RANDOM = RANDOM | {"kaiming_uniform_"}


class GatheredUnits:
    """Full parameters of a module's units, only a few of which are in memory at a time.

    Each unit has one tensor for good, because autograd keeps views of it from forward to backward.
    Its memory is allocated when an operation needs one of its parameters, in forward or backward,
    and freed when other units are needed. At most `_RESIDENT` units are in memory or being
    gathered, unless one operation needs more. PyTorch itself raises a RuntimeError for an operation
    on memory that was freed.

    In training, a unit is gathered ahead while another computes, and replaces the unit before. It
    is the unit that followed the last two units in the first step. If another one is needed, that
    is gathered when it is needed, and nothing is gathered ahead after these two again.

    Parameters
    ----------
    store : ShardedParameters
        Store with this rank's pieces.

    Attributes
    ----------
    units : dict of int to int
        Address of a tensor's storage -> number of its unit.
    """

    def __init__(self, store: ShardedParameters) -> None:
        self._store = store
        dtype = tensor_of(np.empty(0, store.layout.dtype)).dtype
        self._tensors = [torch.empty(unit.length, dtype=dtype) for unit in store.layout.units]
        self.units = {t.untyped_storage()._cdata: i for i, t in enumerate(self._tensors)}
        self._resident: dict[int, Array] = {}  # In order of use, the least recent first.
        self._coming: tuple[int, Array, Work] | None = None
        # Prefetch predictor. It maps the last two units that a step gathered to the unit that
        # followed them in the first step, or to None if none followed, or different ones did. All
        # ranks gather the same units in the same order, and therefore predict the same.
        self._last_two: tuple[int | None, int | None] = (None, None)
        self._predicted: dict[tuple[int | None, int | None], int | None] = {}

    def tensor(self, unit: int) -> torch.Tensor:
        """Return the tensor of a unit's full parameters, which has memory only while gathered."""
        return self._tensors[unit]

    def use(self, units: Sequence[int], *, is_training: bool) -> None:
        """Make units readable until others are needed. Collective if one is not in memory."""
        missing = [unit for unit in units if unit not in self._resident]
        for unit in units:
            if unit in self._resident:
                self._resident[unit] = self._resident.pop(unit)
        if missing:
            self._arrive()
        for unit in missing:
            if is_training:
                # The unit that first follows these two is predicted until another one follows.
                if self._predicted.setdefault(self._last_two, unit) != unit:
                    self._predicted[self._last_two] = None
                self._last_two = self._last_two[1], unit
            if unit not in self._resident:
                self._make_room(units)
                self._begin(unit)
                self._arrive()
        ahead = self._predicted.get(self._last_two) if missing and is_training else None
        if ahead is not None and ahead not in self._resident:
            self._make_room(units)
            if len(self._resident) < _RESIDENT:
                self._begin(ahead)

    def _make_room(self, needed: Sequence[int]) -> None:
        """Free the least recently used units, except needed ones, to make room for one more.

        A transformation of torch.func, such as grad or vmap, keeps all units until it ends.
        """
        if maybe_current_level() is not None:
            return
        others = [unit for unit in self._resident if unit not in needed]
        self._free(others[: max(0, len(self._resident) + 1 - _RESIDENT)])

    def _begin(self, unit: int) -> None:
        """Allocate a unit's memory, and begin to gather it. Collective."""
        layout = self._store.layout
        storage = self._tensors[unit].untyped_storage()
        storage.resize_(layout.units[unit].length * layout.dtype.itemsize)
        # PyTorch does not resize a storage after tensor.numpy(), so that the array is made from the
        # address.
        memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
        # The array keeps the storage alive. An exception in forward may free the model during the
        # gather.
        memory.owner = storage
        full = np.frombuffer(memory, layout.dtype)
        layout.ledger.book(MemoryCategory.GATHERED, full, full.nbytes)
        (own,) = self._store.owned([self._store.local_pieces[unit]])
        subject = layout.subjects[unit]
        gather = layout.backend.all_gather_async(own, out=full, subject=subject)
        self._coming = unit, full, gather

    def _arrive(self) -> None:
        """Wait for the unit that is being gathered, if there is one."""
        if self._coming is None:
            return
        unit, full, work = self._coming
        try:
            work.wait()
        except CollectiveMismatchError as error:
            error.add_note(
                "While parameters are gathered, every rank must use the same ones in the same "
                'order, also after an exception that only some of them caught. Strategies "ddp", '
                '"zero1" and "zero2" let ranks take branches of their own'
            )
            raise
        self._resident[unit], self._coming = full, None

    def release(self) -> None:
        """Free all units, because the step no longer needs parameters."""
        self._arrive()
        self._free(list(self._resident))
        self._predicted[self._last_two] = None
        self._last_two = (None, None)

    def require_exact(self, change: str) -> None:
        """Refuse a change of rounded copies, as `ShardedModule.change` does."""
        if self._store.layout.dtype == BFLOAT16:
            raise ShardingError(
                f'{change}() of a view of a parameter with precision="bfloat16" would change the '
                "rounded copies, and not the float32 parameters of their owners: change "
                "parameters before shard()"
            )

    def require_equal(self, unit: int, view: torch.Tensor, name: str) -> None:
        """Refuse a change of a parameter or its view that differs between ranks. Collective."""
        layout = self._store.layout
        # Of a copy, because PyTorch does not resize a storage after tensor.numpy().
        found = checksum(view.detach().clone())
        require_equal(found, layout.backend, layout.subjects[unit], set_differently(name))

    def broadcast(self, view: torch.Tensor) -> None:
        """Give every rank rank 0's values of a view, which each rank has drawn. Collective."""
        backend = self._store.layout.backend
        view.copy_(
            torch.from_numpy(
                backend.broadcast(
                    view.clone().contiguous().numpy(), subject=self._store.layout.subject
                )
            )
        )

    def forget(self) -> None:
        """Free all units and discard changes in them, because the rank's pieces are newer."""
        self._arrive()
        self._resident.clear()
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)

    def _free(self, units: Iterable[int]) -> None:
        for unit in units:
            full, held = self._resident.pop(unit), self._store.local_pieces[unit]
            # User code may have changed the full tensor, alike on every rank: for instance an
            # initialisation. This rank's piece takes the change.
            (own,) = self._store.owned([held])
            own[...] = full[held.start - held.unit.start : held.stop - held.unit.start]
            del full
            self._tensors[unit].untyped_storage().resize_(0)


class _Gathered:
    """Tensor in the memory of a unit. An operation on it gathers the unit first."""

    _units: tuple[GatheredUnits, int]
    _name: str = "of a view"
    _views: Any  # Those of `StoredParameter`.

    @classmethod
    @called_as("an operation on a parameter")
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if GradientPart in types:
            return NotImplemented  # It gathers gradients first.
        name = getattr(function, "__name__", "")
        if name == "__get__":  # The function reads an attribute.
            attribute = getattr(function.__self__, "__name__", "")  # type: ignore[attr-defined]
            is_free = attribute not in _VALUES
        else:
            is_free = name in _FREE_METHODS
        if is_free:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        return _compute(function, args, kwargs or {})


class GatheredParameter(_Gathered, SharedParameter):
    """Parameter of a unit, which is gathered when it is needed."""


class _GatheredView(_Gathered, torch.Tensor):  # type: ignore[misc]
    """View of a parameter, such as its transpose."""


def _compute(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function of PyTorch with the units that its arguments need, also in backward."""
    if torch.compiler.is_compiling():
        raise ShardingError(
            'torch.compile needs parameters that stay in memory, and strategy="fsdp" gathers them '
            'here, because not all ranks share memory; use strategy="zero2"'
        )
    name = getattr(function, "__name__", "")
    changes = name in vars(ChangedOnce) and args and isinstance(args[0], _Gathered)
    if changes and isinstance(args[0], _GatheredView):
        args[0]._units[0].require_exact(name)
    needed: dict[GatheredUnits, set[int]] = {}
    for tensor in tree_iter((args, kwargs)):
        if isinstance(tensor, _Gathered):
            source, unit = tensor._units
            needed.setdefault(source, set()).add(unit)
    uses = [functools.partial(source.use, sorted(units)) for source, units in needed.items()]
    for use in uses:
        use(is_training=torch.is_grad_enabled())
    with torch._C.DisableTorchFunctionSubclass():
        result = function(*args, **kwargs)
        # A parameter's own methods do this. torch.nn.init calls those of a view here.
        if name in _RANDOM and isinstance(result, _GatheredView):
            result._units[0].broadcast(result)
        elif changes:
            source, unit = args[0]._units
            source.require_equal(unit, args[0], args[0]._name)
        first = args[0] if args and isinstance(args[0], _Gathered) else None
        follow = functools.partial(_follow, list(needed), uses, first)
        return tree_map_only(torch.Tensor, follow, result)


def _follow(
    sources: Sequence[GatheredUnits],
    uses: Sequence[Callable[..., None]],
    first: _Gathered | None,
    result: Any,
) -> Any:
    """Prepare a result, so that its backward pass, or operations on a view, gather the units.

    ``first`` is the first argument of the operation if it has memory of a unit.
    """
    if isinstance(result, _Gathered) or result.layout is not torch.strided:
        return result
    if is_functorch_wrapped_tensor(result):
        # Each transformation of torch.func has a graph of its own.
        inner = result
        while inner is not None:
            if inner.grad_fn is not None:
                _gather_in_backward(inner.grad_fn, uses)
            inner = get_unwrapped(inner) if is_functorch_wrapped_tensor(inner) else None
        return result
    storage = result.untyped_storage()._cdata
    for source in sources:
        if storage in source.units:
            view = result.as_subclass(_GatheredView)
            view._units = source, source.units[storage]
            if first is not None:
                view._name, view._views = first._name, first._views
                if not view.requires_grad:  # Otherwise it belongs to a graph.
                    view._views[id(view)] = view
            return view
    if result.grad_fn is not None:
        _gather_in_backward(result.grad_fn, uses)
    return result


def _gather_in_backward(node: Any, uses: Sequence[Callable[..., None]]) -> None:
    """Let autograd gather units before it differentiates an operation, ``node`` of its graph."""
    # Number of nodes that this thread has made before the operation is differentiated.
    before = [0]
    node.register_prehook(functools.partial(_before_backward, uses, before))
    node.register_hook(functools.partial(_after_backward, uses, before))


@called_as("backward()")
def _before_backward(
    uses: Sequence[Callable[..., None]], before: list[int], _gradients: object
) -> None:
    """Gather units before autograd differentiates an operation that used them. Collective."""
    for use in uses:
        use(is_training=True)
    before[0] = torch._C._autograd._get_sequence_nr()


def _after_backward(
    uses: Sequence[Callable[..., None]], before: list[int], gradients: Any, _: object
) -> None:
    """Prepare the operations of a derivative with a graph of its own for derivatives of it."""
    if not torch.is_grad_enabled():  # create_graph is False.
        return
    waiting = [gradient.grad_fn for gradient in gradients if gradient is not None]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and node._sequence_nr() >= before[0]:
            seen.add(node)
            waiting += [other for other, _ in node.next_functions]
            if "Accumulate" not in node.name():
                _gather_in_backward(node, uses)


def _gathering_first(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Gather a parameter before ``wrap`` puts it into a tensor of torch.func, which has no hook."""

    @called_as("an operation on a parameter")
    @functools.wraps(wrap)
    def wrapped(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, _Gathered):
            source, unit = tensor._units
            source.use([unit], is_training=torch.is_grad_enabled())
        return wrap(tensor, *args, **kwargs)

    return wrapped


# Names of PyTorch's own modules; if another release has not these, PyTorch raises a RuntimeError
# about a storage of size 0, as for C++ extensions.
for _module, _name in ((eager_transforms, "_wrap_tensor_for_grad"), (vmap, "_add_batch_dim")):
    if hasattr(_module, _name):
        setattr(_module, _name, _gathering_first(getattr(_module, _name)))


def give_whole_tensors(
    _module: torch.nn.Module, state: StateDict, prefix: str, _metadata: object
) -> None:
    """Replace the views in a ``state_dict()``, whose memory is freed later, by copies. Collective.

    Every rank gets all parameters.
    """
    with torch.no_grad():  # With gradients, this would count as training and gather ahead.
        for name, tensor in state.items():
            if name.startswith(prefix) and isinstance(tensor, _GatheredView):
                state[name] = tensor.clone()
