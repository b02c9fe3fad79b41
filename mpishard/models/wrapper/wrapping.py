"""The steps from a plain model to a sharded one: checks, stores, engine, ownership."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.base import (
    BFLOAT16,
    HOST,
    ShardingError,
    float32_products,
    library,
    numba_module,
    reason_for_none,
    reuse_freed_memory,
)
from mpishard.communication import differences
from mpishard.contracts import ILayeredModel
from mpishard.models.engine.engine import Engine
from mpishard.models.engine.leaves import GradientLeaves, LeafGradients, LeafPasses
from mpishard.models.engine.passes import Passes
from mpishard.models.engine.update import Policy
from mpishard.models.programs.layered_program import LayeredProgram
from mpishard.models.programs.opaque_program import OpaqueProgram
from mpishard.models.programs.placed_program import OWN_DTYPE, IPlaceableModel, PlacedProgram
from mpishard.models.programs.program import Program
from mpishard.models.stores.gradient_store import GradientStore
from mpishard.models.stores.offload import OffloadedGradients, OffloadedParameters
from mpishard.models.stores.parameter_store import (
    MixedParameters,
    NodeParameters,
    ParameterStore,
    ReplicatedParameters,
    ShardedParameters,
)
from mpishard.models.stores.replicated_gradients import (
    NodeGradients,
    ReplicatedGradients,
    ScatteredGradients,
)
from mpishard.models.stores.sharded_gradients import ShardedGradients
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.nn import Layer, products_per_second
from mpishard.observe import MemoryLedger
from mpishard.sharding import ShardingConfiguration, first_names, refuse_for_model, shared_choices

if TYPE_CHECKING:
    from mpishard.models.wrapper.base import ShardedModelBase

_log = logging.getLogger("mpishard")
_owners_lock = threading.Lock()
# Wrapper of each wrapped object, by the object's id: the object lives as long as its wrapper.
# Thread-ranks share this on purpose, so that wrapping one object from two of them is detected.
_owners: weakref.WeakValueDictionary[int, ShardedModelBase] = weakref.WeakValueDictionary()


def program_of(model: object, config: ShardingConfiguration) -> Program:
    """Return the program of ``model``: of layers, of placed parameters, or of a black box.

    Raises
    ------
    StructureOnlyError
        If another wrapper has taken the model's parameters.
    MissingMemberError, ValueError
        For a black box that lacks a member, or whose parameters are not a floating vector.
    """
    if isinstance(model, ILayeredModel | IPlaceableModel):
        model.fill_parameters(0, np.empty(0, model.dtype))  # raises if they are taken
    if config.precision is not None:
        require_precision(model, config.precision)
    if isinstance(model, ILayeredModel):
        return LayeredProgram(model, config)
    if isinstance(model, IPlaceableModel):
        return PlacedProgram(model, config)
    return OpaqueProgram(model, config.communication_backend)


def require_precision(model: object, precision: str) -> None:
    """Refuse a model that cannot be computed in a precision. Communicates nothing.

    Raises
    ------
    ValueError
        For a model that computes in a dtype of its own; for a model whose own parameters are not
        float32; on the host for "tf32", and for layers without bfloat16, naming them.
    """
    if obstacle := _obstacle(model, precision):
        refuse_for_model(f'precision="{precision}"', type(model).__name__, obstacle)


def _obstacle(model: object, precision: str) -> str | None:
    if not isinstance(model, ILayeredModel | IPlaceableModel):
        return OWN_DTYPE
    if isinstance(model, IPlaceableModel) and (obstacle := model.obstacle_to_bfloat16()):
        return obstacle
    if model.dtype != np.float32:
        return (
            f"has {model.dtype} parameters, but their owners store float32: build it with "
            "dtype=numpy.float32"
        )
    if getattr(model, "device", HOST).is_gpu:
        return None  # Only the operands of products are rounded, whatever the layers are.
    if precision == "tf32":
        return (
            "is on the host: only GPUs have TF32. Leave precision=None for products of float32, or "
            'take "bfloat16"'
        )
    layers = model.layers if isinstance(model, ILayeredModel) else ()
    without = sorted({type(leaf).__name__ for one in layers for leaf in _without(one)})
    if not without:
        return None
    return (
        f"has layers that do not support bfloat16: {', '.join(without)}. If a layer of your own "
        "computes as docs/mixed-precision.md requires, set its computes_bfloat16 = True; otherwise "
        "leave precision=None"
    )


def _without(layer: Layer) -> list[Layer]:
    """The layer, or layers inside it, that do not compute in bfloat16."""
    if not layer.computes_bfloat16:
        return [layer]
    return [leaf for child in layer.children.values() for leaf in _without(child)]


def warn_of_slow_products(config: ShardingConfiguration, program: Program) -> None:
    """Warn on rank 0 if bfloat16 products are computed as float32, with both speeds."""
    backend, is_ours = config.communication_backend, isinstance(program, LayeredProgram)
    is_slow = config.precision is not None and is_ours and not program.device.is_gpu
    if not is_slow or backend.rank != 0 or library() is not None:
        return
    # Measured, because the loss of speed depends on the processor.
    speeds = [products_per_second(dtype) / 1e9 for dtype in (np.float32, BFLOAT16)]
    _log.warning(
        'precision="bfloat16": products are computed in float32 of rounded operands, because %s: '
        "%.0f GFLOP/s of bfloat16 operands here, %.0f of float32",
        reason_for_none(),
        speeds[1],
        speeds[0],
    )


def take_ownership(model: object, wrapper: ShardedModelBase) -> None:
    """Refuse an object that is wrapped already, by another thread-rank or another wrapper.

    Two ranks that set parameters on one object would overwrite each other's.

    Raises
    ------
    ShardingError
        Naming the rank that has wrapped it.
    """
    thing = _owned_object(model)
    # By identity, because a user's model may define its own equality, or have no hash.
    with _owners_lock:
        owner = _owners.setdefault(id(thing), wrapper)
    if owner is not wrapper:
        raise ShardingError(
            f"this {type(thing).__name__} object is wrapped already, by rank {owner.rank}; "
            "each rank wraps an object of its own: build the model inside main(backend)"
        )


def is_owned_by(model: object, wrapper: ShardedModelBase) -> bool:
    """True if this wrapper holds the object, and not the wrapper that it is a copy of."""
    with _owners_lock:
        return _owners.get(id(_owned_object(model))) is wrapper


def give_up_ownership(model: object, wrapper: ShardedModelBase) -> None:
    """Let others wrap the object again.

    Raises
    ------
    ShardingError
        If another wrapper owns the object.
    """
    thing = _owned_object(model)
    with _owners_lock:
        if _owners.get(id(thing)) is not wrapper:
            raise ShardingError(
                f"this wrapper does not own its {type(thing).__name__}: it is a copy of the "
                "wrapper that does, or has released it"
            )
        del _owners[id(thing)]


def _owned_object(model: object) -> Any:
    """The object that holds the parameters: behind an adapter, the user's own."""
    return model.placed_object if isinstance(model, IPlaceableModel) else model


def require_same_on_all_ranks(
    program: Program, strategy: str, config: ShardingConfiguration, choices: Mapping[str, object]
) -> None:
    """Refuse models, or choices about them, that differ between ranks. Collective.

    Raises
    ------
    ValueError
        On every rank, with the choices and parts that differ, and their values by rank. If layers
        compute in float32, some ranks with numba and some without it are refused, too. If they
        compute in bfloat16, ranks with different libraries for its products are.
    """
    mine = {
        "strategy": strategy,
        **choices,
        "dtype": program.dtype.name,
        "device": program.device.kind,
        "number of parameters": program.vector.placement.length,
        **program.structure(),
        **shared_choices(config),
    }
    refusal: ValueError | None = None
    has_loops = program.dtype == np.float32 and not program.device.is_gpu
    if isinstance(program, LayeredProgram) and has_loops:
        # The two round differently: layers that tensor ranks replicate would differ.
        mine["passes of layers"] = "NumPy" if numba_module() is None else "numba"
        try:
            mine["products of float32"] = float32_products()
        except ValueError as error:  # It may be of this rank's host alone.
            refusal, mine["products of float32"] = error, str(error)
        if config.precision is not None:
            found = library()
            mine["products of bfloat16"] = f"oneDNN {found.version}" if found else "float32"
    differing = differences(config.communication_backend, mine)
    if differing:
        raise ValueError(
            "every rank must wrap the same model in the same strategy, with the same options and "
            f"the same ShardingConfiguration; by rank, {differing}"
        )
    if refusal is not None:
        raise refusal


def build_engine(
    program: Program,
    policy: Policy,
    config: ShardingConfiguration,
    name: str,
    *,
    arena: bool = True,
    ledger: MemoryLedger | None = None,
) -> Engine:
    """Make the stores of a policy, and the engine that runs ``program`` with them.

    ``name`` is the model's name in messages; ``ledger`` allocates and counts, by default a new one.
    Every rank makes the engine after the same collective.

    Parameters stay whole, whatever the policy says, if the program needs them whole. With ``arena``
    parameters and gradients lie in memory that a node's ranks share, if they can share any; the
    call is collective then.
    """
    # A black box keeps its whole vector; its gradients and state can be sharded still.
    if program.needs_whole_parameters:
        policy = replace(policy, shards_parameters=False)
    # Before the first large array: a process sets it once.
    reuse_freed_memory()
    device = program.device.for_rank(config.communication_backend.local_rank)
    device.use()
    own = [local.entry for local in program.vector.placement.local_parameters]
    # All ranks make models in one order, so that they get equal numbers without a message.
    subject = config.communication_backend.number_model(name, first_names(program.units, own))
    layout = StoreLayout(
        program.units,
        program.kept,
        program.dtype,
        program.replica.data,
        MemoryLedger() if ledger is None else ledger,
        arena,
        device=device,
        subject=subject,
    )
    on_gpu = device.is_gpu  # otherwise everything is in host memory already

    in_leaves = config.gradient_leaves is not None

    def make_gradients(layout: StoreLayout) -> GradientStore:
        is_offloaded = on_gpu and config.cpu_offload_gradients
        store = make_gradient_store(
            layout.on_host if is_offloaded else layout, policy, in_leaves=in_leaves
        )
        if in_leaves:
            assert isinstance(store, ScatteredGradients | ShardedGradients)
            store = LeafGradients(store)
        return OffloadedGradients(store, layout) if is_offloaded else store

    parameters: ParameterStore
    if config.precision is not None and not on_gpu:
        parameters = make_mixed_store(layout, policy)
    elif on_gpu and config.cpu_offload_parameters:
        parameters = OffloadedParameters(make_parameter_store(layout.on_host, policy), layout)
    else:
        parameters = make_parameter_store(layout, policy)
    state_layout = layout.on_host if on_gpu and config.cpu_offload_optimizer else layout
    passes = Passes(make_gradients)
    if in_leaves:
        leaves = GradientLeaves(config, parameters.backend, program.dtype)
        passes = LeafPasses(make_gradients, leaves)
    return Engine(program, parameters, passes, state_layout, policy, config)


def make_parameter_store(layout: StoreLayout, policy: Policy) -> ParameterStore:
    """Make the store of parameters for ``policy``. Collective."""
    # Every rank updates all parameters, so each needs a copy of its own. A rank that is alone with
    # its GPU holds all in any case, and copies nothing.
    if not policy.shards_state or layout.is_alone_on_gpu:
        return ReplicatedParameters(layout)
    # With several nodes a copy per node would not be sharded: nodes share only gathered units.
    if policy.shards_parameters and layout.backend.node_count > 1:
        return ShardedParameters(layout)
    # On one node the parameters exist once, for all of its ranks, and nothing is gathered.
    arena = layout.allocate_arena(NodeParameters.length_for(layout), once_per_node=True)
    if arena is not None:
        return NodeParameters(layout, arena)
    return ShardedParameters(layout) if policy.shards_parameters else ReplicatedParameters(layout)


def make_mixed_store(layout: StoreLayout, policy: Policy) -> MixedParameters:
    """Make stores of float32 parameters and bfloat16 copies, for ``policy``. Collective."""
    copies = make_parameter_store(replace(layout, dtype=BFLOAT16), policy)
    if not policy.shards_state:
        return MixedParameters(layout, ReplicatedParameters(layout), copies)
    # Float32 parameters are never gathered in a step, only to read the model: no unit is kept.
    private = replace(layout, kept=frozenset(), arena=False)
    return MixedParameters(layout, ShardedParameters(private), copies)


def make_gradient_store(
    layout: StoreLayout, policy: Policy, *, in_leaves: bool = False
) -> GradientStore:
    """Make the store of gradients for ``policy``. Collective."""
    if policy.shards_gradients and not layout.is_alone_on_gpu:
        length = ShardedGradients.slot_length(layout)
        slots = layout.allocate_slots(length, ShardedGradients.SLOTS)
        return ShardedGradients(layout, slots or ())
    # Full gradients that peers read in place: a reduction on a node then copies nothing.
    slots = layout.allocate_slots(ReplicatedGradients.length_for(layout), 1)
    slot = slots[0] if slots else None
    # Every rank updates everything, and reads each sum where its owner has made it.
    if slot is not None and not policy.shards_state and layout.backend.node_count == 1:
        return NodeGradients(layout, slot)
    # With leaves a pass reduces to the owners: only the sum over all leaves goes to every rank.
    if policy.shards_state or in_leaves:
        spreads = not policy.shards_state and layout.backend.world_size > 1
        return ScatteredGradients(layout, slot, spreads=spreads)
    return ReplicatedGradients(layout, slot)
