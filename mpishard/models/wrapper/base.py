"""The surface that every sharded model shows."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from mpishard import checkpoint
from mpishard.base import (
    Array,
    DType,
    LeafLayout,
    MissingMemberError,
    ShardingError,
    as_flag,
    as_integer,
    as_number,
    require_type,
)
from mpishard.communication import CommunicationBackend, ProcessMesh
from mpishard.contracts import (
    DynamicShapeInfo,
    ILayeredModel,
    ILossFunction,
    IShardedModel,
    ModelMetadata,
    PathLike,
    UserModel,
)
from mpishard.models.engine.engine import Engine
from mpishard.models.engine.evaluation import (
    global_gradient,
    local_gradient,
    mean_loss,
    synchronize_gradient,
)
from mpishard.models.engine.leaves import check_leaves, check_leaves_of, warn_of_other_bits
from mpishard.models.engine.update import Policy, descent
from mpishard.models.programs.program import Program
from mpishard.models.stores.offload import log_ignored_offload
from mpishard.models.wrapper.files import ModelFiles
from mpishard.models.wrapper.local_shard import LocalShard, compare_replicas
from mpishard.models.wrapper.wrapped import (
    agreed_vector,
    feature_member,
    generate_tokens,
    holding,
    use_features,
)
from mpishard.models.wrapper.wrapping import (
    build_engine,
    give_up_ownership,
    is_owned_by,
    program_of,
    require_same_on_all_ranks,
    take_ownership,
    warn_of_slow_products,
)
from mpishard.nn import LinearModel
from mpishard.observe import MemoryLedger
from mpishard.sharding import ParameterEntry, ShardingConfiguration, Unit, refuse_with_leaves

_log = logging.getLogger("mpishard")

Answer = TypeVar("Answer")


class _ClosedEngine:
    """The engine of a closed model: refuses every use, and keeps no memory."""

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        raise ShardingError(f"this {self._owner} is closed")


def _as_dealt(name: str, read: Callable[[int, int], int]) -> Any:
    """Make a property that `read` computes from a rank's only range, and that cannot be changed."""

    def get(model: ShardedModelBase) -> int:
        ranges = model.owned_ranges
        if len(ranges) > 1:
            raise ShardingError(
                f"this rank owns a piece of each of {len(ranges)} units, which have no one start "
                "and size: owned_ranges lists them"
            )
        # A rank owns no range if there are more ranks than parameters.
        return read(*(ranges[0] if ranges else (0, 0)))

    def set_(model: ShardedModelBase, given: int) -> None:
        # The collectives of all ranks use the ranges that the strategy has chosen.
        if given != get(model):
            raise ShardingError(
                f"{name} is {get(model)}, as {model.strategy} divides the parameters, and cannot "
                f"be set to {given}: for other ranges derive from another strategy"
            )

    return property(get, set_)


class ShardedModelBase(IShardedModel):
    """A model whose parameters, gradients and optimizer state live on several ranks.

    Life cycle. Construction is collective: rank 0's initial values are distributed to the ranks
    unit by unit, and a layered model releases its own arrays. A step gathers each unit when it is
    needed, and reduces its gradient as soon as backward has finished with the unit. Then each rank
    updates the pieces that it owns.

    A subclass declares the vectors that are sharded (`policy`) and its name (`strategy`).

    Parameters
    ----------
    wrapped_model : object
        A model of `mpishard.nn`, anything that implements `ILayeredModel`, or a black box with
        ``get_parameters``, ``set_parameters`` and ``compute_gradients``, whose parameters stay
        whole on every rank.
    config : ShardingConfiguration
        Communication backend and options.

    Raises
    ------
    TypeError
        For None, or a configuration of another type.
    ValueError
        If the ranks' models differ in length, units or dtype; on every rank.
    ShardingError
        If another rank of this process, or another wrapper, has wrapped the same object.
    """

    policy: Policy
    strategy: ClassVar[str]
    engine: Engine
    """Changes the parameters, and nothing else does; after `close` every use of it raises."""
    _remembered: tuple[weakref.ref[Any], int] | None = None

    def __init__(self, wrapped_model: UserModel, config: ShardingConfiguration) -> None:
        if wrapped_model is None:
            raise TypeError("wrapped_model must be a model, got None")
        require_type("config", config, ShardingConfiguration)
        if isinstance(wrapped_model, IShardedModel):
            raise TypeError(f"the model is sharded already, as {type(wrapped_model).__name__}")
        self._require("strategy")
        self._wrapped_model = wrapped_model
        self._config = config
        self._has_logged_train = False
        # Here and not at the first step: a wrong launch is refused before parameters are made.
        self.backend.initialize()
        self._check_leaves()
        self._on_before_initialize_sharding()
        self._require("policy")
        try:
            self._initialize_sharding()
        except BaseException:
            # The exception refers to this wrapper, and must not keep the model from others.
            if is_owned_by(wrapped_model, self):
                give_up_ownership(wrapped_model, self)
            raise

    def _require(self, name: str) -> None:
        """Refuse a class that lacks a declaration, before parameters are distributed."""
        if not hasattr(self, name):
            raise TypeError(
                f"{type(self).__name__} declares no {name!r}: use FSDPModel or another strategy, "
                "or derive your class from one"
            )

    def _check_leaves(self) -> None:
        """Refuse ``gradient_leaves`` if worlds could not reproduce. Communicates nothing."""
        check_leaves(self._config, self.world_size)

    def _on_before_initialize_sharding(self) -> None:
        """Hook of subclasses: the backend is ready, and no parameter is distributed yet."""

    def _initialize_sharding(self) -> None:
        """Build the engine, and distribute rank 0's values to the ranks. Collective."""
        program = program_of(self._wrapped_model, self._config)
        check_leaves_of(program, self._config)
        take_ownership(self._wrapped_model, self)
        # Before the first collective whose length depends on the model: it would fail in another
        # way if the ranks' models differed.
        require_same_on_all_ranks(program, self.strategy, self._config, self._shared_choices())
        # Only after the comparison: groups of ranks are made by collectives.
        program = self._divided(program)
        if self._config.replica_size is not None:
            program.replica.train_apart(self._replicas(self._config.replica_size))
        self.engine = self._build_engine(program)
        log_ignored_offload(self._config, program.device)
        warn_of_slow_products(self._config, program)
        if self.gradient_leaves is not None:
            warn_of_other_bits(self._config, program.dtype)
        program.vector.distribute(self.engine.parameters, self.backend, program.fill)
        # Seeds and buffers: a unit's values are not all that rank 0 decides.
        program.distribute_constants(self.backend)
        store = self.engine.parameters
        reason = program.take_over(store, f"a {type(self).__name__}")
        self._is_once_per_node = store.once_per_node and reason is None
        if reason is not None and self.policy.shards_parameters and self.rank == 0:
            _log.warning(
                "%s: gradients and optimizer state are sharded; the parameters of %s stay whole on "
                "every rank, %s",
                type(self).__name__,
                type(self._wrapped_model).__name__,
                reason,
            )

    def _shared_choices(self) -> dict[str, object]:
        """Choices besides the configuration that must be the same on all ranks, for JSON."""
        return {}

    def _divided(self, program: Program) -> Program:
        """Return this rank's part of the model's program. Collective. Here it is all of it."""
        return program

    def _replicas(self, size: int) -> ProcessMesh:
        """Make a mesh of replicas of ``size`` ranks, which are trained apart. Collective."""
        return ProcessMesh(self.backend, replica=self.world_size // size)

    def _build_engine(self, program: Program, *, arena: bool = True) -> Engine:
        name = type(self._wrapped_model).__name__
        return build_engine(program, self.policy, self._config, name, arena=arena)

    def __repr__(self) -> str:
        wrapped = type(self._wrapped_model).__name__
        return f"{type(self).__name__}({wrapped}, {self._described_ranks()})"

    def _described_ranks(self) -> str:
        return f"{self.world_size} rank{'s' * (self.world_size != 1)}"

    # -------------------------------------------------------------------------------- properties

    @property
    def backend(self) -> CommunicationBackend:
        """The communication backend of all ranks."""
        return self._config.communication_backend

    @property
    def wrapped_model(self) -> UserModel:
        return self._wrapped_model

    @property
    def sharding_configuration(self) -> ShardingConfiguration:
        return self._config

    @property
    def rank(self) -> int:
        return self.backend.rank

    @property
    def world_size(self) -> int:
        return self.backend.world_size

    @property
    def data_rank(self) -> int:
        """Index of the part of a batch that this rank computes, from 0 to `data_size` - 1."""
        return self.engine.replica.sample_group.rank

    @property
    def data_size(self) -> int:
        """Number of ranks, or groups of ranks, that divide the samples of a batch."""
        return self.engine.replica.sample_group.world_size

    @property
    def gradient_leaves(self) -> int | None:
        """The ``gradient_leaves`` of the configuration when the model was wrapped."""
        leaves = self.engine.leaves
        return None if leaves is None else leaves.count

    def batch_indices(self, samples: int) -> npt.NDArray[np.int64]:
        """Return the indices in a global batch of the samples that this rank passes to a step.

        They are consecutive, or with ``gradient_leaves`` those of the rank's leaves, end to end.

        Parameters
        ----------
        samples : int
            Number of samples in the global batch.

        Returns
        -------
        array of int64
            Indices in the global batch, increasing.
        """
        leaves = self.gradient_leaves or self.data_size
        slices = LeafLayout(samples, leaves, self.data_size).slices(self.data_rank)
        return np.concatenate([np.arange(part.start, part.stop) for part in slices])

    def data_rank_of(self, rank: int) -> int:
        """The `data_rank` of another rank."""
        return rank

    @property
    def memory(self) -> MemoryLedger:
        """Bytes that this rank holds for this model, by category."""
        return self.engine.layout.ledger

    @property
    def units(self) -> tuple[Unit, ...]:
        """The ranges of parameters, each of which is gathered and reduced as a whole."""
        return self.engine.program.units

    @property
    def parameter_entries(self) -> tuple[ParameterEntry, ...]:
        """Name, shape and start of each parameter.

        A black box without a ``parameter_table`` has one entry, named "parameters".
        """
        return self.engine.placement.entries

    @property
    def dtype(self) -> DType:
        """The dtype of the flat vector."""
        return self.engine.layout.dtype

    @property
    def parameter_count(self) -> int:
        return self.engine.placement.length

    def get_model_metadata(self) -> ModelMetadata:
        """Return the wrapped model's metadata with its sharding and figures of its training.

        ``Steps``, ``Samples``, ``TrainingSeconds``, ``LastLoss``, ``BestLoss`` (the lowest loss of
        a step) and ``ValidationScore`` include the earlier jobs that the model's checkpoints come
        from. Figures that are not known are left out, and all of them before the first step.
        ``training_date`` is the time of the last step. Collective for a linear model of
        `mpishard.nn`, whose feature importance needs all coefficients; otherwise nothing is
        communicated.
        """
        kind = type(self._wrapped_model).__name__
        own: ModelMetadata | None = self._ask("get_model_metadata", None)
        metadata = own or ModelMetadata(kind, model_type=kind)
        metadata.complexity = self.parameter_count
        metadata.properties |= {
            "IsDistributed": True,
            "Strategy": self.strategy,
            "WorldSize": self.world_size,
            "Rank": self.rank,
            **self._shard.properties(),
            "ParametersOncePerNode": self._is_once_per_node,
        }
        record = self.engine.record
        if record.trained_at is not None:
            metadata.training_date = datetime.fromtimestamp(record.trained_at, UTC)
            metadata.properties |= {"Steps": self.engine.step_number, **record.properties()}
        if isinstance(self._wrapped_model, LinearModel):
            metadata.feature_importance = self.get_feature_importance()
        return metadata

    # ------------------------------------------------------------------- computing, collectively

    def predict(self, x: Array) -> Array:
        """Return outputs for this rank's inputs; the number of rows may differ between ranks.

        Collective if parameters are sharded: every rank calls it, if necessary with 0 rows.
        """
        return self.engine.predict(x)

    def train(self, x: Array, y: Array) -> float:
        """Make one step of plain gradient descent on this rank's batch. Collective.

        The step size is ``config.learning_rate``. Optimizers do better: see
        `mpishard.optimizers`.

        Returns
        -------
        float
            The mean loss over all ranks' samples, before the update.

        Raises
        ------
        ShardingError
            If an optimizer has not yet applied all gradients of this model, or if groups of ranks
            hold replicas of their own (``replica_size``).
        """
        self.engine.replicas.require_one("train()")
        if self.engine.passes.is_late:
            raise ShardingError(
                f"{self.engine.passes.user} has not yet applied all gradients of this model: "
                "train with its step(), or call its reset() first"
            )
        rate = self._config.learning_rate
        if not self._has_logged_train and self.rank == 0:
            _log.info("train: plain gradient descent with learning rate %g", rate)
            self._has_logged_train = True

        return self.engine.step(x, y, descent(rate), {"learning_rate": rate}).loss

    @contextlib.contextmanager
    def accumulate(self, *, defer: bool = False) -> Iterator[None]:
        """Add up the gradients of the steps in the block; the first step after it updates.

        The update equals that of one step on all the batches together. Collective: all ranks enter
        and leave the block together. An exception discards the gradients that were added.

        Parameters
        ----------
        defer : bool
            Keep full gradients on this rank until the update. No gradients are sent before, and
            the rank needs memory as large as the parameters. Otherwise sharded gradients are
            reduced in each step.

        Raises
        ------
        ValueError
            With ``gradient_leaves``.
        """
        if self.gradient_leaves is not None:
            refuse_with_leaves(
                self.gradient_leaves,
                "accumulate()",
                "pass the larger batch to one step. If a leaf then needs too much memory, use a "
                "larger gradient_leaves",
            )
        with self.engine.accumulate(defer=as_flag("defer", defer)):
            yield

    def set_parameters(self, parameters: Array) -> None:
        """Take parameters from a full vector, the same on every rank. Collective.

        Raises
        ------
        TypeError
            For anything but an array of real numbers, before anything is communicated.
        ValueError
            For another length, before anything is communicated; for vectors that differ between
            ranks, on every rank.
        """
        self.engine.round.require_none("set_parameters()")
        self.engine.take(agreed_vector(self.engine, parameters, "set_parameters"))

    def with_parameters(self, parameters: Array) -> Self:
        """Return a copy with these parameters. Collective; errors as of `set_parameters`."""
        vector = agreed_vector(self.engine, parameters, "with_parameters")
        model = self.deep_copy()
        model.engine.take(vector)
        return model

    def compute_gradients(
        self, x: Array, y: Array, loss_function: ILossFunction | None = None
    ) -> Array:
        """Return the gradient of the mean loss of *this rank's* batch, full length, not reduced.

        This is the one exception to sharding: every rank keeps a full vector until the next step,
        or until `synchronize_gradients` has averaged it over the ranks. Collective if parameters
        are sharded.
        """
        return local_gradient(self.engine, x, y, loss_function)

    def loss_and_gradients(self, x: Array, y: Array) -> tuple[float, Array]:
        """Return the mean loss over the samples of all ranks, and its gradient. Collective.

        For optimizers of your own, such as ``scipy.optimize.minimize(jac=True)``: every rank gets
        the same bits, so that the same optimizer on every rank takes the same steps. Parameters
        stay as they are; `set_parameters` changes them. A loss that is not finite is returned,
        because a line search may step too far.

        Parameters
        ----------
        x, y : Array
            This rank's inputs and targets, shape (B, ...); B may be 0 and may differ between ranks.

        Returns
        -------
        loss : float
            The mean; NaN if a black box computes no loss.
        gradient : Array
            Shape (parameter_count,), zeros for frozen parameters. Every rank holds all of it.

        Raises
        ------
        NoSampleError
            If no rank has a sample that counts, on every rank.
        ShardingError
            If replicas differ; in the middle of a round of `accumulate`.
        """
        return global_gradient(self.engine, x, y)

    def evaluate(self, x: Array, y: Array) -> tuple[float, float]:
        """Return the mean loss over the samples of all ranks, without dropout. Collective.

        Parameters
        ----------
        x, y : Array
            This rank's inputs and targets, shape (B, ...); B may be 0 and may differ between ranks.

        Returns
        -------
        loss : float
            The mean; NaN without samples, or if a black box computes no loss.
        weight : float
            Number of samples, or of targets that the loss counts; the same on every rank.

        Raises
        ------
        ShardingError
            If replicas differ.
        """
        return mean_loss(self.engine, x, y)

    def apply_gradients(self, gradients: Array, learning_rate: float) -> None:
        """``theta -= learning_rate * gradients`` for a full vector, the same on every rank.

        Collective. Each rank updates what it owns.

        Raises
        ------
        TypeError, ValueError
            As `set_parameters`; TypeError for a rate that is not a number, ValueError for one that
            is not finite, and for rates that differ between ranks.
        ShardingError
            If replicas differ; in the middle of a round of `accumulate`.
        """
        rate = as_number("learning_rate", learning_rate)
        if not math.isfinite(rate):
            raise ValueError(f"learning_rate must be finite, got {rate}")
        self.engine.replicas.require_equal("apply_gradients")
        self.engine.round.require_none("apply_gradients()")
        vector = agreed_vector(self.engine, gradients, "apply_gradients", rate)
        # `change` and no `update`: a gradient given by the user counts as no step.
        self.engine.change(descent(rate), self.engine.given(vector))

    def synchronize_gradients(self) -> Array | None:
        """Average the gradients, or the replicas, that ranks have computed alone. Collective.

        After `compute_gradients` its gradient is replaced, in place, by the mean over the batches
        of all ranks, weighted as the loss weighs them: `apply_gradients` may follow. After steps
        with ``auto_sync_gradients=False`` replicas differ: every rank gets their mean,
        weighted by the samples that each has used since they were equal. After one step of
        `train` the result is that of one step with the averaged gradient. Otherwise every step has
        reduced its gradients already, and this is a barrier.

        Returns
        -------
        Array or None
            The averaged gradient, shape (parameter_count,), the same on every rank; None unless
            `compute_gradients` was called after the last step.

        Raises
        ------
        ShardingError
            Before any gradient was computed.
        """
        found = synchronize_gradient(self.engine)
        averaged = None if found is None else found[2]
        if averaged is None and self.engine.step_number == 0:
            raise ShardingError("synchronize_gradients() before any gradient was computed")
        if averaged is None or not self._config.auto_sync_gradients:
            self.engine.synchronize_replicas()
        return averaged

    def check_replicas(self) -> int:
        """Compare the ranks' copies of the same parameters, bit by bit. Collective.

        It detects failing memory, and changes that a script makes on some ranks alone: one small
        all-gather compares checksums. With DDP and ZeRO-1/2 every parameter has replicas; on a
        mesh only the parameters that several tensor or data ranks hold. Sharded parameters have
        none. Ranks of a node that share one copy in memory are compared with other nodes only.

        Returns
        -------
        int
            Number of parameters, or parts of them, compared; 0 if nothing is replicated.

        Raises
        ------
        ReplicaError
            On every rank, naming the parameters and the ranks that differ.
        ShardingError
            If ranks have made updates of their own (``auto_sync_gradients=False``).
        """
        self.engine.replicas.require_equal("check_replicas")
        engine = self.engine
        return compare_replicas(
            engine.parameters,
            engine.placement,
            self.backend,
            engine.step_number,
            is_on_mesh=engine.replica.is_on_mesh or engine.replica.is_grouped,
        )

    # ------------------------------------------------------------------ shards and full parameters

    @property
    def local_parameter_shard(self) -> Array:
        """A copy of this rank's pieces, end to end; of all parameters if they are replicated.

        In mixed precision these are the float32 parameters, which the rank updates.
        """
        return self._shard.values()

    @property
    def _shard(self) -> LocalShard:
        return LocalShard(self.engine)

    # The names by which subclasses of the mirrored hierarchy know a rank's shard.

    @property
    def _wrapped_model_internal(self) -> UserModel:
        return self._wrapped_model

    @property
    def _num_ops(self) -> Any:
        """NumPy or CuPy: the functions on the model's arrays."""
        return self.engine.layout.device.namespace

    @property
    def _local_shard(self) -> Array:
        """As `local_parameter_shard`; assigning takes other values. Collective then."""
        return self.local_parameter_shard

    @_local_shard.setter
    def _local_shard(self, values: Array) -> None:
        self._shard.write(values)

    _shard_start_index: int = _as_dealt("_shard_start_index", lambda start, stop: start)
    _shard_size: int = _as_dealt("_shard_size", lambda start, stop: stop - start)

    @property
    def _cached_full_parameters(self) -> Array | None:
        """The last gathered vector, if a caller still holds it and parameters are unchanged."""
        full, version = self._remembered or (None, -1)
        return full() if full is not None and version == self.engine.version else None

    @_cached_full_parameters.setter
    def _cached_full_parameters(self, full: Array | None) -> None:
        # Weak, because a cache that kept the full vector alive would undo the sharding.
        self._remembered = None if full is None else (weakref.ref(full), self.engine.version)

    def _invalidate_cache(self) -> None:
        self._remembered = None

    def _update_local_shard_from_full(self, full: Array) -> None:
        """Take this rank's part of ``full``, a vector that is equal on every rank. Collective."""
        self.engine.take(full)

    @property
    def owned_ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges ``(start, stop)`` of the model's flat vector that this rank holds.

        There is one range per unit. On a mesh a slice of a matrix by columns consists of several
        ranges; adjacent ranges are joined.
        """
        return self._shard.ranges()

    @contextlib.contextmanager
    def unsharded(self, root: int | None = None) -> Iterator[Any]:
        """The plain model with all parameters, for sampling, plotting, export. Collective.

        Parameters
        ----------
        root : int, optional
            The only rank that gets it; the others get None. Default: every rank gets one.

        Yields
        ------
        object or None
            A plain model, whose parameters are released on exit. Changes to them are lost.
        """
        if root is not None and not 0 <= as_integer("root", root) < self.world_size:
            raise ValueError(f"root {root} is outside [0, {self.world_size})")
        full = self.engine.gather() if root is None else self.engine.gather_on(root)
        model = None if full is None else holding(self._wrapped_model, full)
        del full
        try:
            yield model
        finally:
            if isinstance(model, ILayeredModel):
                model.release_parameters(f"a {type(self).__name__}, after unsharded() ended")

    def gather_full_parameters(self) -> Array:
        """Return all parameters in layer order, a new vector on every rank. Collective."""
        self._cached_full_parameters = full = self.engine.gather()
        return full

    def get_parameters(self) -> Array:
        """As `gather_full_parameters`. Collective."""
        return self.gather_full_parameters()

    def get_parameter_chunks(self) -> Iterator[Array]:
        """Yield the parameters unit by unit, so that only one unit is gathered. Collective.

        On a mesh all parameters come in one chunk, because the units of its ranks differ.
        """
        return self.engine.gather_chunks()

    # ------------------------------------------------------------------------------------ copies

    def clone(self) -> Self:
        """Return a shallow copy, which shares parameters. Communicates nothing."""
        return copy.copy(self)

    def deep_copy(self) -> Self:
        """Return a copy with parameters of its own, in memory that no other rank shares.

        It is made without communication, and shared memory cannot be. So steps of the copy send
        data that a model made by `as_distributed` reads in place.

        Collectives distinguish copies by the order in which they were made since the last
        collective. So a copy that one rank alone makes should be the last of these, or a
        collective such as ``backend.barrier()`` should follow it.
        """
        model = copy.copy(self)
        program, model._wrapped_model = self.engine.program.copy()
        model._invalidate_cache()
        model.engine = model._build_engine(program, arena=False)
        model.engine.parameters.copy_from(self.engine.parameters)
        model.engine.continue_as(self.engine)
        program.take_over(model.engine.parameters, f"a {type(self).__name__}")
        return model

    def release(self) -> Any:
        """Give the parameters back to the plain model, on every rank, and return it. Collective.

        The object can be used and wrapped again. Do not use this wrapper afterwards.
        """
        model = self._wrapped_model
        give_up_ownership(model, self)
        self.engine.program.give_back(self.engine.gather)
        return model

    def close(self) -> None:
        """Free this rank's part of parameters and gradients. Communicates nothing.

        Gather or save first whatever must be kept: the wrapped model stays without parameters. An
        optimizer keeps its state until its `reset`.
        """
        # A shallow copy shares the parameters, and must not free those of the original.
        if is_owned_by(self._wrapped_model, self):
            self.engine.abandon()
            give_up_ownership(self._wrapped_model, self)
        # Dropping the engine frees its memory, unless a shallow copy shares it.
        self.engine = cast("Engine", _ClosedEngine(type(self).__name__))

    # ---------------------------------------------------------------------------- files and bytes

    def checkpointed(self) -> ModelFiles:
        """Return the model in the form that `mpishard.checkpoint` saves and loads."""
        # A new object for each call: a stored one would keep the parameters alive after close().
        return ModelFiles(self.engine, self._wrapped_model, self.strategy)

    def serialize(self) -> bytes:
        """Return named parameters in safetensors format, equal bytes on all ranks. Collective.

        The bytes also contain the choices of the plain model, such as its active features.
        """
        return self.checkpointed().serialize()

    def deserialize(self, data: bytes) -> None:
        """Take bytes of `serialize` at any world size, or of the plain model. Collective.

        Raises
        ------
        TypeError, ValueError
            For other bytes, or those of another model, before anything is communicated; on every
            rank if the ranks were given different bytes. The model is unchanged then.
        """
        files = self.checkpointed()
        vector, choices = files.unpacked(data)
        self.set_parameters(vector)
        files.take_choices(choices)

    def save_model(self, path: PathLike) -> None:
        """Write the parameters to a checkpoint directory. Collective.

        Raises
        ------
        TypeError, ValueError
            For anything but a path, or a blank path, before anything is communicated.
        ShardingError
            If replicas differ.
        OSError
            On every rank, if the checkpoint cannot be written: a PermissionError if permissions
            are the reason. An earlier checkpoint is unchanged.
        """
        self.engine.replicas.require_equal("save_model()")
        checkpoint.save(path, self)

    def load_model(self, path: PathLike) -> None:
        """Take parameters from a checkpoint of any world size and strategy. Collective.

        Raises
        ------
        TypeError, ValueError
            For anything but a path, or a blank path, before anything is communicated.
        FileNotFoundError
            If there is no checkpoint.
        CheckpointError
            If it is torn or of another model; the model is unchanged then.
        """
        checkpoint.load(path, self)

    # ---------------------------------------------------------------- members of the wrapped model

    @property
    def default_loss_function(self) -> ILossFunction | None:
        return getattr(self._wrapped_model, "default_loss_function", None)

    def sanitize_parameters(self, parameters: Array) -> Array:
        sanitize = getattr(self._wrapped_model, "sanitize_parameters", None)
        return parameters if sanitize is None else sanitize(parameters)

    def get_input_shape(self) -> list[int]:
        return self._ask("get_input_shape", list[int]())

    def get_output_shape(self) -> list[int]:
        return self._ask("get_output_shape", list[int]())

    def get_dynamic_shape_info(self) -> DynamicShapeInfo:
        return self._ask("get_dynamic_shape_info", DynamicShapeInfo())

    def _ask(self, name: str, otherwise: Answer) -> Answer:
        member = getattr(self._wrapped_model, name, None)
        answer: Answer = otherwise if member is None else member()
        return answer

    def get_active_feature_indices(self) -> Iterable[int]:
        indices: Iterable[int]
        indices = feature_member(self._wrapped_model, "get_active_feature_indices")()
        return indices

    def set_active_feature_indices(self, indices: Iterable[int]) -> None:
        """Use these features and no others. Collective.

        Raises
        ------
        MissingInterfaceError
            If the wrapped model is not aware of its features.
        ValueError
            For an index that the model does not have, before anything is communicated; on every
            rank if the ranks name different features. The model is unchanged then.
        """
        use_features(self._wrapped_model, indices, self.engine.world)

    def is_feature_used(self, index: int) -> bool:
        return bool(feature_member(self._wrapped_model, "is_feature_used")(index))

    def get_feature_importance(self) -> dict[str, float]:
        """Importance by feature name. Collective."""
        feature_member(self._wrapped_model, "get_feature_importance", "IFeatureImportance")
        with self.unsharded() as model:
            importance: dict[str, float] = model.get_feature_importance()
        return importance

    def generate(
        self,
        prompt: object,
        length: int,
        temperature: float = 1.0,
        seed: int = 0,
        top_k: int | None = None,
        slide: int = 1,
    ) -> Array:
        """Continue a sequence of tokens, as `mpishard.nn.GPT.generate`. Collective.

        Every rank passes the same arguments and gets the same tokens. Keys and values are kept
        on the ranks that compute them: under tensor parallelism each rank keeps those of its
        heads, in a pipeline those of its layers.

        Raises
        ------
        MissingMemberError
            If the model has no ``generate``.
        ValueError
            As `mpishard.nn.generate`; on every rank if the arguments differ between ranks.
        """
        return generate_tokens(
            self.engine, self._wrapped_model, prompt, length, temperature, seed, top_k, slide
        )

    @property
    def supports_jit_compilation(self) -> bool:
        return bool(getattr(self._wrapped_model, "supports_jit_compilation", False))

    def export_computation_graph(self, input_nodes: list[Any]) -> Any:
        """Return the plain model's graph, with its present parameters in it. Collective."""
        if input_nodes is None:
            raise TypeError("input_nodes must be a list, got None")
        if not self.supports_jit_compilation:
            raise MissingMemberError(
                f"{type(self._wrapped_model).__name__} does not implement IJitCompilable: it has "
                "no computation graph to export"
            )
        with self.unsharded() as model:
            return model.export_computation_graph(input_nodes)
