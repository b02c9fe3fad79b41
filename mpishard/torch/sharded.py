"""`shard`, and the stores, parameters and backward passes that it makes for a user's module."""

from __future__ import annotations

import functools
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch

from mpishard.base import ShardingError, as_count, return_freed_memory, reuse_freed_memory
from mpishard.communication import CommunicationBackend, current_recorder, differences
from mpishard.models import (
    ModelVector,
    Policy,
    ReplicatedGradients,
    ShardedParameters,
    StoreLayout,
    compare_replicas,
    make_gradient_store,
    make_mixed_store,
    make_parameter_store,
    units_of_modules,
    views_of_entries,
)
from mpishard.observe import MemoryLedger, span, step_span
from mpishard.sharding import Placement, first_names, owned_pieces
from mpishard.torch.backward import BackwardPasses
from mpishard.torch.buffers import form_of
from mpishard.torch.gathering import GatheredParameter, GatheredUnits, give_whole_tensors
from mpishard.torch.parameters import (
    Changes,
    OwnedParameter,
    OwnedTensor,
    SharedParameter,
    Uncopied,
    native_gradient,
)
from mpishard.torch.placed import PlacedModule, note_wide_buffers, rounded, tensor_of
from mpishard.torch.world import current_world

POLICIES = {
    "ddp": Policy(shards_parameters=False, shards_gradients=False, shards_state=False),
    "zero1": Policy(shards_parameters=False, shards_gradients=False, shards_state=True),
    "zero2": Policy(shards_parameters=False, shards_gradients=True, shards_state=True),
    "fsdp": Policy(shards_parameters=True, shards_gradients=True, shards_state=True),
}
POLICIES["zero3"] = POLICIES["fsdp"]


_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class ShardedModule(Uncopied):
    """Units, stores and backward passes of a user's module.

    The whole parameters are in memory that the ranks of a node share, so that the module computes
    as before. Each rank updates its part. If ranks share no memory, `GatheredUnits` gathers
    parameters when they are used. A hook on each parameter passes its gradient to `BackwardPasses`.

    A copy or a pickle of a sharded module is a plain module.

    Parameters
    ----------
    module : torch.nn.Module
        The user's module.
    strategy : str
        A key of `POLICIES`.
    backend : CommunicationBackend
        The ranks.
    minimum_unit_size : int
        Minimum number of elements of a unit: see `mpishard.sharding.build_units`.
    precision, loss_is_sum
        As in `shard`.

    Attributes
    ----------
    placed : PlacedModule
        The module's parameters and buffers.
    parts : list of OwnedParameter
        The trained parameters, in order.
    passes : BackwardPasses
        The module's backward passes.
    shards_state : bool
        True if each rank updates only a part of the parameters.
    ledger : MemoryLedger
        Bytes that this rank holds, including its share of shared memory.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        strategy: str,
        backend: CommunicationBackend,
        minimum_unit_size: int,
        precision: str | None,
        *,
        loss_is_sum: bool,
    ) -> None:
        self.module = module
        self.strategy = strategy
        self.backend = backend
        # A single rank holds and updates all, as under DDP.
        policy = POLICIES[strategy if backend.world_size > 1 else "ddp"]
        self.shards_state = policy.shards_state
        self.placed = PlacedModule(module)
        if precision is not None:
            self.placed.require_roundable()
        self.entries = self.placed.entries
        self.placement = Placement.whole(self.entries)
        self.units = units_of_modules(self.entries, minimum_unit_size)
        self._require_same_on_all_ranks(f"{precision} {loss_is_sum}")
        reuse_freed_memory()
        self.ledger = MemoryLedger()
        # No gradient is allocated for a unit that trains nothing, and none is reduced.
        frozen = [
            unit.index
            for unit in self.units
            if not any(entry.trainable for entry in unit.entries_of(self.entries))
        ]
        names = first_names(self.units, self.entries)
        subject = backend.number_model(type(module).__name__, names)
        self.layout = StoreLayout(
            self.units,
            frozenset(),
            self.placed.dtype,
            backend,
            self.ledger,
            frozen=frozenset(frozen),
            subject=subject,
        )
        self._make_parameters(policy, precision)
        if policy.shards_state:
            self.gradients = make_gradient_store(self.layout, policy)
        else:
            # The user may read and change a parameter's whole gradient: it must be one array.
            slots = self.layout.allocate_slots(ReplicatedGradients.length_for(self.layout), 1)
            self.gradients = ReplicatedGradients(self.layout, slots[0] if slots else None)
        # The values are copied before `_place` makes the parameters views of the stores.
        ModelVector(self.placement).distribute(self.parameters, backend, self.placed.fill)
        self.parts: list[OwnedParameter] = []
        self._place()
        return_freed_memory()  # of the parameters that the module had
        self.placed.distribute(backend, backend)
        self.placed.normalise_over(backend)
        # Gathered parameters are compared at each change, as ranks keep only pieces of them.
        stored = [p._stored for p in self.placed.parameters] if self.gathered is None else []
        self.passes = BackwardPasses(
            self.gradients,
            self.entries,
            self.parts,
            self.placed.buffers,
            self.gathered,
            Changes(stored, backend, subject),
            1.0 if loss_is_sum else 1 / backend.world_size,
        )
        # The stack has the open span of the present step, which a trace shows.
        self._step, self._updates = ExitStack(), 0

    def _require_same_on_all_ranks(self, options: str) -> None:
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        beside = {repr(name): form_of(tensor) for name, tensor in tensors}
        structure = f"{self.strategy} {options} {self.units} {self.entries} {beside}"
        # Ranks compare a checksum, because the text has an entry for every parameter.
        mine = [len(self.entries), self.entries[-1].stop, zlib.crc32(structure.encode())]
        everyone = self.backend.all_gather(np.array([mine]))
        if (everyone != everyone[0]).any():
            rows = "; ".join(
                f"rank {r}: {n} parameters of {size} elements"
                for r, (n, size, _) in enumerate(everyone)
            )
            differing = differences(self.backend, beside)
            raise ValueError(
                f"every rank must shard the same module with the same strategy: {rows} (names, "
                "shapes, dtypes, also of buffers, what requires a gradient, strategy, precision, "
                f"loss_is_sum or minimum_unit_size differ){differing and f'; by rank, {differing}'}"
            )

    def _make_parameters(self, policy: Policy, precision: str | None) -> None:
        backend, module = self.backend, self.module
        # If there are several nodes, each rank gathers units in memory of its own.
        has_arena = not policy.shards_parameters or backend.node_count == 1
        make = make_parameter_store if precision is None else make_mixed_store
        self.parameters = make(replace(self.layout, arena=has_arena), policy)
        self.gathered: GatheredUnits | None = None
        if isinstance(self.parameters.computed, ShardedParameters):
            if any(isinstance(inner, torch.jit.ScriptModule) for inner in module.modules()):
                raise ShardingError(
                    'torch.jit needs parameters that stay in memory, and strategy="fsdp" gathers '
                    'them here, because not all ranks share memory; use strategy="zero2"'
                )
            self.gathered = GatheredUnits(self.parameters.computed)
            for inner in module.modules():
                inner.register_state_dict_post_hook(give_whole_tensors)
        if precision is not None:
            # Values that load_state_dict() writes to the rounded copies would not reach the owners'
            # float32 parameters.
            module.register_forward_pre_hook(_round_inputs, with_kwargs=True)
            module.register_forward_hook(_explain, always_call=True)
            for inner in module.modules():
                inner.register_load_state_dict_pre_hook(_refuse_load)

    def _place(self) -> None:
        """Make the parameters views of the store, or of the units that are gathered from it.

        Each also gets this rank's part of it and, if it is trained, a hook for its gradient.
        """
        gathered, placed = self.gathered, self.placed
        if gathered is not None:
            vectors = [gathered.tensor(unit.index) for unit in self.units]
        else:
            whole = owned_pieces(self.units, 1, 0)
            vectors = [tensor_of(vector) for vector in self.parameters.computed.owned(whole)]
        for index, view in enumerate(views_of_entries(self.units, self.entries, vectors)):
            placed.place(index, view)
        kind = SharedParameter if gathered is None else GatheredParameter
        placed.hold(self.units, functools.partial(OwnedParameter, self), kind)
        for parameter in placed.parameters:
            part = parameter._stored
            if gathered is not None:
                parameter._units, parameter._name = (gathered, part.unit.index), part.entry.name
                parameter._views = part.views
            (own,) = self.parameters.owned([part.piece])
            shape = own.shape if self.shards_state else part.entry.shape
            trained = part.entry.trainable
            part.tensor = OwnedTensor(torch.from_numpy(own).view(shape), trained)
            part.tensor._owned = part
            part.note_update()
            if trained:
                native_gradient.__set__(parameter, None)
                take = functools.partial(_receive, weakref.ref(self), len(self.parts))
                placed.hook(part.index, take)
                self.parts.append(part)
        # The parameters are views of units, which need no memory until an operation uses them.
        if gathered is not None:
            gathered.forget()

    def require_reduced(self, purpose: str) -> None:
        """See `BackwardPasses.require_reduced`."""
        self.passes.require_reduced(purpose, type(self.module).__name__)

    def check_replicas(self) -> int:
        """See `mpishard.torch.check_replicas`. Collective."""
        # Gathered parameters may have changes that the compared pieces lack.
        self.free_gathered()
        return compare_replicas(self.parameters, self.placement, self.backend, self._updates)

    def free_gathered(self) -> None:
        """Free gathered parameters, except for this rank's parts."""
        if self.gathered is not None:
            self.gathered.release()

    def publish(self) -> None:
        """Share the parameters at the end of a step. Collective."""
        self.share()
        self.passes.part_of_step.close()
        self._step.close()
        self._updates += 1
        self._step.enter_context(step_span(self._updates))

    def share(self) -> None:
        """Make the parameters that each rank has updated visible to all ranks. Collective."""
        if self.shards_state:
            self.parameters.publish(self.passes.trained_pieces())
        else:
            # With ddp each rank has updated all parameters, and nothing has to be sent.
            self.parameters.changed()
        for part in self.parts if self.shards_state else ():
            part.note_update()
        self.gradients.finish()


def _receive(owner: weakref.ref[ShardedModule], place: int, gradient: torch.Tensor | None) -> None:
    """Pass a parameter's gradient to the backward passes.

    The garbage collector cannot see references of a PyTorch hook, so that it has only a weak one.
    """
    sharded = owner()
    assert sharded is not None
    sharded.passes.receive(place, gradient)


def _round_inputs(_module: torch.nn.Module, arguments: object, options: object) -> Any:
    """Round floating-point inputs before a forward pass, as the module's hook."""
    return rounded((arguments, options))


def _explain(module: torch.nn.Module, _inputs: object, output: object) -> None:
    """Add a note to PyTorch's error, if the forward pass raised one, as the module's hook."""
    error = sys.exception()
    if output is None and isinstance(error, RuntimeError):
        note_wide_buffers(error, module)


def _refuse_load(module: torch.nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    own = module._parameters.items()
    if any(isinstance(p, SharedParameter) and prefix + name in state_dict for name, p in own):
        raise ShardingError(
            f'load_state_dict() of {type(module).__name__} with precision="bfloat16" would change '
            "the rounded copies, and not the float32 parameters of their owners: call it before "
            "shard(), or load a checkpoint with mpishard.torch.load"
        )


_ATTRIBUTE = "_mpishard"


def _without_optimizer(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Let ``function`` refuse an optimizer, and say how one is made."""

    # Around the function, because Python itself refuses most such calls, without a remedy.
    @functools.wraps(function)
    def checked(*args: _Given.args, **settings: _Given.kwargs) -> _Result:
        for value in (*args, *settings.values()):
            if isinstance(value, torch.optim.Optimizer):
                kind = type(value).__name__
                raise TypeError(
                    f"shard() takes a module and no optimizer, got {kind}: write mst.shard(model, "
                    f'strategy="fsdp"), then optimizer = mst.optimizer({kind}, model, lr=...)'
                )
        return function(*args, **settings)

    return checked


@_without_optimizer
def shard(
    module: torch.nn.Module,
    strategy: Literal["ddp", "zero1", "zero2", "zero3", "fsdp"] = "fsdp",
    *,
    minimum_unit_size: int = 1 << 16,
    precision: Literal["bfloat16"] | None = None,
    loss_is_sum: bool = False,
) -> Any:
    """Shard a module in place, without a change of the training loop around it. Collective.

    Every rank builds the same module and gets rank 0's values. Afterwards the trained parameters
    are in memory that the ranks of a node share (under DDP in each rank's own memory), and the
    module computes with them as before. ``backward()`` reduces gradients to the mean over the
    ranks, each of which has its own samples. ``.grad`` is the mean, of which, except under DDP, a
    rank holds a part.

    Parameters
    ----------
    module : torch.nn.Module
        Module on the CPU, whose trained parameters are all float32 (complex64), or all float64
        (complex128).
    strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp"}
        The arrays that are divided over the ranks: none; the optimizer's state; also gradients;
        also parameters (zero3 is fsdp). On one node fsdp has one copy of the parameters, as zero1
        and zero2 have.
    minimum_unit_size : int
        Minimum number of elements of a unit. The gradients of a unit are reduced together.
    precision : {"bfloat16"}, optional
        Compute with parameters rounded to bfloat16, of which a node has one copy (under DDP each
        rank). Their owners keep float32 values, which optimizers and `save` use. Gradients are
        reduced, and floating-point inputs rounded, as in FSDP2's mixed precision. Outputs are
        bfloat16.
    loss_is_sum : bool
        True if the loss is a sum over this rank's samples, and not their mean. Gradients are then
        added over ranks, and not averaged, so that ranks may have any numbers of samples.

    Returns
    -------
    torch.nn.Module
        ``module``.

    Raises
    ------
    NotInitializedError
        If `init` was not called.
    TypeError, ValueError
        If the module or strategy is not as described, or, on every rank, the ranks' modules differ.
        For an optimizer, which is made of the sharded module: see `optimizer`.
        Nothing has changed then.
    ShardingError
        If the module, or a part of it, is sharded already.

    Notes
    -----
    With fsdp on several nodes, or if the ranks of a node share no memory (``MPISHARD_ARENA=off``),
    each rank holds only its parts. An operation that needs a parameter gathers its unit, in forward
    and backward, and two units stay in memory. All ranks must then use parameters in the same
    order, ``state_dict()`` is collective, and ``torch.compile`` is refused. With zero1 and zero2
    every node, or without shared memory every rank, has all parameters.

    For random layers, each rank except 0 seeds its PyTorch generator with rank 0's seed and the
    rank. Thread-ranks share one generator, which does not change.
    """
    backend = current_world()
    if strategy not in POLICIES:
        raise ValueError(f"strategy must be one of {', '.join(POLICIES)}, got {strategy!r}")
    if precision not in (None, "bfloat16"):
        raise ValueError(f'precision must be None or "bfloat16", got {precision!r}')
    minimum_unit_size = as_count("minimum_unit_size", minimum_unit_size)
    sharded = ShardedModule(
        module, strategy, backend, minimum_unit_size, precision, loss_is_sum=loss_is_sum
    )
    # Not by setattr(), which torch.nn.Module overrides.
    module.__dict__[_ATTRIBUTE] = sharded
    # Only a traced run has these hooks, because they cost time in each forward pass.
    if current_recorder.get() is not None:
        module.register_forward_pre_hook(_forward_begins)
        module.register_forward_hook(_forward_ends, always_call=True)
    return module


def _forward_begins(module: torch.nn.Module, _inputs: object) -> None:
    """Open the span "forward" of a traced run, as the module's hook."""
    owner = vars(module)[_ATTRIBUTE]
    if owner is not None:  # It is None in a copy of the module.
        owner.passes.part_of_step.enter_context(span("forward"))


def _forward_ends(module: torch.nn.Module, *_: object) -> None:
    owner = vars(module)[_ATTRIBUTE]
    if owner is not None:
        owner.passes.part_of_step.close()


def module_of(module: torch.nn.Module) -> ShardedModule:
    """Return the `ShardedModule` of a module that `shard` has sharded.

    Raises
    ------
    TypeError
        If ``module`` is not a torch.nn.Module.
    ShardingError
        If it is not sharded.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(module).__name__}")
    # A module of torch.compile has the user's module as _orig_mod.
    sharded = vars(getattr(module, "_orig_mod", module)).get(_ATTRIBUTE)
    if sharded is None:
        raise ShardingError(
            f"this {type(module).__name__} is not sharded; call mpishard.torch.shard(model) first"
        )
    return sharded  # type: ignore[no-any-return]


def owned_parameter(parameter: torch.Tensor) -> OwnedParameter:
    """Return the part of a sharded parameter.

    Raises
    ------
    TypeError
        If ``parameter`` is not a tensor.
    ShardingError
        If it is not a trained parameter of a sharded module.
    """
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(
            f"parameters must be a sharded module, its parameters or groups of them, got "
            f"{type(parameter).__name__} among them"
        )
    if isinstance(parameter, SharedParameter) and parameter._stored.entry.trainable:
        return parameter._stored
    raise ShardingError(
        f"a parameter of shape {tuple(parameter.shape)} is not a trained parameter of a sharded "
        "module: it was frozen, not there or without elements when the module was sharded, or the "
        "parameters were collected before shard(). Give the module itself, and let a parameter "
        "beside it be one of a module, such as model.scale = torch.nn.Parameter(..), before shard()"
    )


@contextmanager
def no_sync(*models: torch.nn.Module) -> Iterator[None]:
    """Let backward passes in the ``with`` statement add to this rank's gradients, and send nothing.

    The first ``backward()`` after it reduces the sum. Until then each rank holds full gradients.

    Parameters
    ----------
    *models : torch.nn.Module
        Sharded modules.
    """
    sharded_modules = [module_of(model) for model in models]
    before = [sharded.passes.syncs for sharded in sharded_modules]
    for sharded in sharded_modules:
        sharded.passes.syncs = False
    try:
        yield
    finally:
        for sharded, value in zip(sharded_modules, before, strict=True):
            sharded.passes.syncs = value


def check_replicas(*models: torch.nn.Module) -> int:
    """Compare, bit by bit, all copies of parameters that ranks hold permanently. Collective.

    With ddp each rank has a copy. With the other strategies each node has one, and parameters that
    only one rank holds are not compared. The check costs one checksum of the parameters and one
    small message, so that a call every few hundred steps is cheap.

    Parameters
    ----------
    *models : torch.nn.Module
        Sharded modules.

    Returns
    -------
    int
        Number of ranges of parameters that have several copies.

    Raises
    ------
    ReplicaError
        If copies differ. Every rank raises it, and the message names ranks and parameters.
    """
    return sum(module_of(model).check_replicas() for model in models)
