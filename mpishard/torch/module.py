"""A module whose parameters, gradients and optimizer state are divided over the ranks."""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch

from mpishard.adapters.torch import (
    check_module,
    copy_range,
    flat_gradient,
    parameter_table,
    tensor_of,
)
from mpishard.arrays import reuse_freed_memory
from mpishard.communication import CommunicationBackend, ReductionOperation
from mpishard.communication.contract.status import called_as
from mpishard.communication.tracing.recorder import current_recorder
from mpishard.errors import ShardingError
from mpishard.models.engine.update import Policy
from mpishard.models.programs.placed_program import Arrivals, entries_of
from mpishard.models.stores.gradient_store import ReplicatedGradients, ScatteredGradients
from mpishard.models.stores.parameter_store import ShardedParameters
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.models.stores.vector import ModelVector
from mpishard.models.wrapper.digest import compare_replicas
from mpishard.models.wrapper.wrapping import (
    make_gradient_store,
    make_mixed_store,
    make_parameter_store,
)
from mpishard.observe.ledger import MemoryLedger
from mpishard.observe.trace import span, step_span
from mpishard.sharding import Placement, build_units, owned_pieces
from mpishard.torch.bfloat16 import check_precision, compute_in_bfloat16
from mpishard.torch.buffers import Buffers
from mpishard.torch.gathering import GatheredParameter, GatheredUnits, give_whole_tensors
from mpishard.torch.parameters import Part, SharedParameter, native_gradient
from mpishard.torch.world import current_world

__all__ = ["ShardedModule", "check_replicas", "module_of", "no_sync", "part_of", "shard"]

_POLICIES = {
    "ddp": Policy(shards_parameters=False, shards_gradients=False, shards_state=False),
    "zero1": Policy(shards_parameters=False, shards_gradients=False, shards_state=True),
    "zero2": Policy(shards_parameters=False, shards_gradients=True, shards_state=True),
    "fsdp": Policy(shards_parameters=True, shards_gradients=True, shards_state=True),
}

_ATTRIBUTE = "_mpishard"


class ShardedModule:
    """What holds the parameters of one user's module: units, stores, and the backward passes.

    The parameters stand in memory that the ranks of a node share, whole, so that the module
    computes as before; each rank updates its part. If ranks share no memory, `GatheredUnits` makes
    them whole when they are used. A hook on each parameter takes its gradient
    when autograd has it, and each unit is reduced when it and all later units are complete. What
    is left is reduced when the backward pass ends.

    Parameters
    ----------
    module : torch.nn.Module
        The user's.
    strategy : str
        A key of the policies above.
    backend : CommunicationBackend
        The ranks.
    minimum_unit_size : int
        See `mpishard.sharding.build_units`.
    precision : str, optional
        See `shard`.

    Attributes
    ----------
    placed : list of torch.nn.Parameter
        The parameters of the vector, one for each of ``entries``.
    parts : list of Part
        The trained ones, in order.
    shards_state : bool
        Whether each rank updates only a part.
    syncs : bool
        Whether backward passes reduce; False inside `no_sync`.
    ledger : MemoryLedger
        Bytes that this rank holds, its share of shared memory among them.
    """

    def __init__(
        self,
        module: Any,
        strategy: str,
        backend: CommunicationBackend,
        minimum_unit_size: int,
        precision: str | None,
    ) -> None:
        self.module = module
        self.strategy = strategy
        self.backend = backend
        policy = _POLICIES[strategy]
        self.shards_state = policy.shards_state
        self.syncs = True
        self._has_local = False  # gradients that are not reduced yet
        self._is_reduced = False
        self._arrivals: Arrivals | None = None
        self._views: dict[int, Any] = {}
        check_module(module)
        places, entries = parameter_table(module, with_frozen=True)
        held = [inner._parameters[name] for inner, name in places]
        self.placed = held
        self.entries = tuple(entries)
        self.placement = Placement.whole(self.entries)
        layers = groupby(self.entries, lambda entry: entry.name.rpartition(".")[0])
        self.units = build_units(
            [sum(entry.size for entry in layer) for _, layer in layers], minimum_unit_size
        )
        frozen = frozenset(
            unit.index
            for unit in self.units
            if not any(entry.trainable for entry in entries_of(unit, self.entries))
        )
        self._require_same_on_all_ranks(held, precision)
        reuse_freed_memory()
        self.ledger = MemoryLedger()
        dtype = np.dtype(str(held[0].dtype).removeprefix("torch."))
        self.layout = StoreLayout(
            self.units, frozenset(), dtype, backend, self.ledger, frozen=frozen
        )
        # Alone a rank has all parameters. Ranks of several nodes gather them, each for itself.
        gathers = policy.shards_parameters and backend.world_size > 1
        make = make_parameter_store if precision is None else make_mixed_store
        self.parameters = make(
            replace(self.layout, arena=not gathers or backend.node_count == 1),
            replace(policy, shards_parameters=gathers),
        )
        self.gathered: GatheredUnits | None = None
        if isinstance(self.parameters.computed, ShardedParameters):
            names = [entries_of(unit, self.entries)[0].name for unit in self.units]
            self.gathered = GatheredUnits(self.parameters.computed, names)
            for inner in module.modules():
                inner.register_state_dict_post_hook(give_whole_tensors)
        if precision is not None:
            compute_in_bfloat16(module)
        if policy.shards_state:
            self.gradients = make_gradient_store(self.layout, policy)
        else:  # a parameter's gradient is one array, which DDP's user may read and change
            length = ReplicatedGradients.length_for(self.layout)
            slots = self.layout.allocate_slots(length, 1)
            self.gradients = ReplicatedGradients(self.layout, slots[0] if slots else None)
        ModelVector(self.placement).deal(
            self.parameters, backend, functools.partial(copy_range, self.entries, held)
        )
        self.parts: list[Part] = []
        self._places: list[tuple[Any, str]] = []
        self._place(held, places)
        self.buffers = Buffers(module, backend, {id(parameter) for parameter in held})
        self._flags = np.zeros(len(self.parts) + 1, np.uint8)
        # What a trace shows: forward, backward and update, and the step that contains them.
        self.part_of_step, self._step, self._updates = ExitStack(), ExitStack(), 0
        if current_recorder.get() is not None:
            module.register_forward_pre_hook(_forward_begins)
            module.register_forward_hook(_forward_ends, always_call=True)

    # A copy of a sharded module, or what pickle makes of it, is a plain module.

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    def _require_same_on_all_ranks(self, held: Sequence[Any], precision: str | None) -> None:
        structure = f"{self.strategy} {precision} {held[0].dtype} {self.units} {self.entries}"
        mine = [len(held), self.entries[-1].stop, zlib.crc32(structure.encode())]
        everyone = self.backend.all_gather(np.array([mine]))
        if (everyone != everyone[0]).any():
            rows = "; ".join(f"rank {r}: {n} parameters of {size} elements"
                             for r, (n, size, _) in enumerate(everyone))  # fmt: skip
            raise ValueError(
                f"every rank must shard the same module with the same strategy: {rows} (names, "
                "shapes, dtype, what requires a gradient, strategy, precision or minimum_unit_size "
                "differ)"
            )

    def _place(self, held: Sequence[Any], places: Sequence[tuple[Any, str]]) -> None:
        """Let the parameters be views of the store, or of what is gathered from it."""
        gathered = self.gathered
        whole = owned_pieces(self.units, 1, 0)
        vectors = [] if gathered is not None else self.parameters.computed.owned(whole)
        numbered = iter(range(len(self.entries)))
        for unit in self.units:
            full = gathered.tensor(unit.index) if gathered else tensor_of(vectors[unit.index])
            for entry, index in zip(entries_of(unit, self.entries), numbered, strict=False):
                parameter = held[index]
                flat = full[entry.start - unit.start : entry.stop - unit.start]
                parameter.data = flat.view(entry.shape)
                if gathered is not None:
                    parameter.__class__ = GatheredParameter
                    parameter._units = gathered, unit.index
                elif entry.trainable:
                    parameter.__class__ = SharedParameter
                else:
                    continue
                parameter._part = part = Part(self, index, entry, unit, parameter)
                (own,) = self.parameters.owned([part.piece])
                shape = entry.shape if not self.shards_state else own.shape
                part.tensor = torch.nn.Parameter(torch.from_numpy(own).view(shape), entry.trainable)
                if not entry.trainable:
                    continue
                native_gradient.__set__(parameter, None)
                place = len(self.parts)
                parameter.register_post_accumulate_grad_hook(
                    functools.partial(_receive, weakref.ref(self), place)
                )
                self.parts.append(part)
                self._places.append(places[index])
        if gathered is not None:
            gathered.forget()

    # ----------------------------------------------------------------------------- backward passes

    def receive(self, place: int, parameter: Any) -> None:
        """Take the gradient of a parameter, which autograd has."""
        gradient = native_gradient.__get__(parameter)
        native_gradient.__set__(parameter, None)
        if self._arrivals is None:
            self._begin()
        assert self._arrivals is not None
        self._flags[place] = 1
        self._arrivals.receive(self.parts[place].index, flat_gradient(gradient))

    def _begin(self) -> None:
        """Open a backward pass, of which the first gradient is here."""
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self.part_of_step.enter_context(span("backward"))
        live = [part.tensor.grad is not None for part in self.parts]
        is_first = not any(live)
        if is_first and self._has_local:
            self.gradients.abandon()  # what no_sync has added was cleared before it was reduced
            self._views.clear()
        self.gradients.begin(is_first=is_first, is_last=self.syncs, defer=not self.syncs)
        if not is_first:
            self._go_on(live)
        self._flags[:-1] = live
        scale = 1 / self.backend.world_size
        self._arrivals = Arrivals(
            self.units, self.entries, self.gradients, self.layout.frozen, scale
        )

    def _go_on(self, live: Sequence[bool]) -> None:
        """Let gradients be added to what the passes before have left.

        The sum over ranks must count what is reduced already once.
        """
        gradients = self.gradients
        if self._is_reduced and isinstance(gradients, ReplicatedGradients):
            if isinstance(gradients, ScatteredGradients):
                for piece in self._trained_pieces():
                    full = gradients.gradient(piece.unit)
                    full[: piece.start - piece.unit.start] = 0
                    full[piece.stop - piece.unit.start :] = 0
            else:
                gradients.vector[...] *= 1 / self.backend.world_size
        self._is_reduced = False
        for part, is_live in zip(self.parts, live, strict=True):
            if not is_live:
                self._clear(part)

    def _clear(self, part: Part) -> None:
        """Zero what the round's earlier passes have left of a gradient that was set to None."""
        gradients, unit = self.gradients, part.unit
        if isinstance(gradients, ReplicatedGradients) or self._has_local:
            full = gradients.gradient(unit)
            full[part.entry.start - unit.start : part.entry.stop - unit.start] = 0
        if not isinstance(gradients, ReplicatedGradients):
            (owned,) = gradients.owned([part.piece])
            owned[...] = 0

    def _trained_pieces(self) -> list[Any]:
        return [p for p in self.layout.pieces() if p.unit.index not in self.layout.frozen]

    @called_as("backward()")
    def _end(self) -> None:
        """Callback: the backward pass has ended on this rank."""
        assert self._arrivals is not None
        self._arrivals.finish()
        self._arrivals = None
        self.gradients.settle()
        self._has_local = not self.syncs
        self._is_reduced = self.syncs
        if self.syncs:
            self._flags[-1] = self.buffers.have_changed()
            # A parameter that any rank used has a gradient on all. This is also the fence after
            # which no rank reads another's gradients.
            self.backend.all_reduce(self._flags, ReductionOperation.MAX)
            if self._flags[-1]:
                self.buffers.broadcast()
        self.let_go()
        for place, part in enumerate(self.parts):
            part.tensor.grad = self._view(part) if self._flags[place] else None
        self.part_of_step.close()

    def _view(self, part: Part) -> Any:
        """The gradient of a part, in the store's memory."""
        if self._has_local and not isinstance(self.gradients, ReplicatedGradients):
            unit = part.unit
            full = self.gradients.gradient(unit)
            return torch.from_numpy(full[part.start - unit.start : part.stop - unit.start])
        view = self._views.get(part.index)
        if view is None:
            (array,) = self.gradients.owned([part.piece])
            view = self._views[part.index] = torch.from_numpy(array).view(part.tensor.shape)
        return view

    # -------------------------------------------------------------------------------------- update

    def require_reduced(self, purpose: str) -> None:
        """Refuse what needs gradients that all ranks have reduced.

        Raises
        ------
        ShardingError
            In or after a backward pass that has not reduced them.
        """
        if self._arrivals is not None:
            raise ShardingError(
                f"{purpose} needs a backward pass that has ended, and the last one of this "
                f"{type(self.module).__name__} has not: it raised, or is under way"
            )
        if self._has_local and any(part.tensor.grad is not None for part in self.parts):
            raise ShardingError(
                f"{purpose} needs gradients of all ranks, and the last backward() was inside "
                "no_sync(): leave it before the last backward() of a step"
            )

    def require_placed(self) -> None:
        """Refuse to go on with a module whose parameters are no longer those that were sharded.

        Raises
        ------
        ShardingError
            Naming one.
        """
        for part, (module, name) in zip(self.parts, self._places, strict=True):
            parameter = part.parameter
            is_here = parameter.untyped_storage()._cdata == part.storage
            if module._parameters.get(name) is parameter and is_here:
                continue
            raise ShardingError(
                f"parameter {part.entry.name!r} is no longer in the memory where mpishard.torch."
                "shard() put it: call module.to(), .half(), load_state_dict(assign=True) and the "
                "like before shard()"
            )

    def check_replicas(self) -> int:
        """See `check_replicas`. Collective."""
        self.let_go()
        return compare_replicas(self.parameters, self.placement, self.backend, self._updates)

    def let_go(self) -> None:
        """Hold no more than this rank's parts of the parameters, if they are gathered."""
        if self.gathered is not None:
            self.gathered.release()

    def publish(self) -> None:
        """Let all ranks read what each has updated. Collective."""
        if self.shards_state:
            self.parameters.publish(self._trained_pieces())
        else:
            self.parameters.changed()
        self.gradients.finish()
        self.part_of_step.close()
        self._step.close()
        self._updates += 1
        self._step.enter_context(step_span(self._updates))


@called_as("backward()")
def _receive(owner: weakref.ref[ShardedModule], place: int, parameter: Any) -> None:
    """Hook of a parameter. PyTorch hides it from the garbage collector, so it owns nothing."""
    sharded = owner()
    assert sharded is not None
    sharded.receive(place, parameter)


def _forward_begins(module: Any, _inputs: Any) -> None:
    """Hook of a module in a run that is traced."""
    owner = vars(module)[_ATTRIBUTE]
    if owner is not None:  # else the module is a copy
        owner.part_of_step.enter_context(span("forward"))


def _forward_ends(module: Any, *_: Any) -> None:
    owner = vars(module)[_ATTRIBUTE]
    if owner is not None:
        owner.part_of_step.close()


def shard(
    module: Any,
    strategy: Literal["ddp", "zero1", "zero2", "fsdp"] = "fsdp",
    *,
    minimum_unit_size: int = 1 << 16,
    precision: Literal["bfloat16"] | None = None,
) -> Any:
    """Shard a module in place: the training loop around it stays as it is. Collective.

    Every rank builds the same module and gets rank 0's values. Afterwards the trained parameters
    stand in memory that the ranks of a node share (under DDP in each rank's own), the module
    computes with them as before, and ``backward()`` reduces gradients: the mean over the ranks,
    each of which has its own samples. ``.grad`` is this rank's part of it.

    Parameters
    ----------
    module : torch.nn.Module
        On the CPU; its trained parameters are all float32, or all float64.
    strategy : {"ddp", "zero1", "zero2", "fsdp"}
        What is divided over the ranks: nothing; the optimizer's state; gradients too; parameters
        too. On one node fsdp, as zero1 and zero2, has one copy of the parameters.
    minimum_unit_size : int
        Elements below which no unit is closed: units are reduced as one.
    precision : {"bfloat16"}, optional
        Compute with parameters that are rounded to bfloat16, of which a node has one copy (each
        rank under DDP). Their owners keep float32, which optimizers and `save` see. Gradients are
        reduced, and floating inputs rounded, as FSDP2's mixed precision does; outputs are
        bfloat16.

    Returns
    -------
    torch.nn.Module
        ``module``.

    Raises
    ------
    NotInitializedError
        Before `init`.
    TypeError, ValueError
        For another module or strategy; on every rank if the ranks' modules differ. Nothing has
        changed then.
    ShardingError
        If it, or a part of it, is sharded already.

    Notes
    -----
    With fsdp on several nodes, or where the ranks of a node share no memory
    (``MPISHARD_ARENA=off``), each rank holds its parts: an operation that needs a parameter gathers
    its unit, in forward and backward, and two units stay. All ranks then use parameters in the same
    order, ``state_dict()`` is collective, and ``torch.compile`` is refused. With zero1 and zero2
    every node, or without shared memory every rank, has all parameters.

    Random layers: rank 0 goes on with its
    own generator, and each other rank's PyTorch generator is seeded differently, by rank 0's seed
    and the rank. Thread-ranks share one generator, which is left alone.
    """
    backend = current_world()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if strategy not in _POLICIES:
        raise ValueError(f"strategy must be one of {', '.join(_POLICIES)}, got {strategy!r}")
    taken = [name for name, p in module.named_parameters() if isinstance(p, SharedParameter)]
    if taken:
        raise ShardingError(
            f"parameter {taken[0]!r} is sharded already; shard() a module once, and each part of "
            "two modules by one of them"
        )
    check_precision(module, precision)
    sharded = ShardedModule(module, strategy, backend, minimum_unit_size, precision)
    module.__dict__[_ATTRIBUTE] = sharded
    _seed(backend)
    return module


def _seed(backend: CommunicationBackend) -> None:
    """Let the ranks draw different random numbers."""
    seed = backend.broadcast(np.array([torch.initial_seed() & ((1 << 63) - 1)]), root=0)
    if backend.rank and backend._rank_is_process:
        torch.manual_seed((int(seed[0]) + 0x9E3779B97F4A7C15 * backend.rank) & ((1 << 63) - 1))


def module_of(module: Any) -> ShardedModule:
    """Return what holds a sharded module.

    Raises
    ------
    TypeError, ShardingError
        For another object, or a module that is not sharded.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(module).__name__}")
    # torch.compile's module holds the user's as _orig_mod.
    sharded = vars(getattr(module, "_orig_mod", module)).get(_ATTRIBUTE)
    if sharded is None:
        raise ShardingError(
            f"this {type(module).__name__} is not sharded; call mpishard.torch.shard(model) first"
        )
    return sharded  # type: ignore[no-any-return]


def part_of(parameter: Any) -> Part:
    """Return the part of a sharded parameter.

    Raises
    ------
    ShardingError
        For another tensor.
    """
    if isinstance(parameter, SharedParameter) and parameter._part.entry.trainable:
        return parameter._part
    raise ShardingError(
        f"a parameter of shape {tuple(parameter.shape)} is no trained parameter of a sharded "
        "module: it was frozen when the module was sharded, or the optimizer's parameters were "
        "collected before shard()"
    )


@contextmanager
def no_sync(*models: Any) -> Iterator[None]:
    """Let backward passes inside only add to this rank's gradients, without any message.

    The first ``backward()`` outside reduces the sum. Meanwhile each rank holds full gradients.

    Parameters
    ----------
    *models : torch.nn.Module
        Sharded modules.
    """
    held = [module_of(model) for model in models]
    before = [sharded.syncs for sharded in held]
    for sharded in held:
        sharded.syncs = False
    try:
        yield
    finally:
        for sharded, value in zip(held, before, strict=True):
            sharded.syncs = value


def check_replicas(*models: Any) -> int:
    """Compare, bit by bit, every copy of every parameter that ranks hold for good. Collective.

    With ddp each rank has a copy. With the other strategies each node has one, and what only one
    rank holds is not compared. Call it every some hundred steps: it costs one checksum of the
    parameters and one small message.

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
        On every rank, naming the ranks and parameters that differ.
    """
    return sum(module_of(model).check_replicas() for model in models)
