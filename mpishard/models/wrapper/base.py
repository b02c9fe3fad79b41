"""The surface that every sharded model shows."""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, ClassVar, Self, cast

import numpy as np
import numpy.typing as npt

from mpishard.base import (
    Array,
    Document,
    DType,
    LeafLayout,
    ShardingError,
    as_flag,
    as_integer,
    require_type,
)
from mpishard.base.mirrored import ShardedModelMembers
from mpishard.communication import CommunicationBackend, ProcessMesh
from mpishard.contracts import (
    ILayeredModel,
    UserModel,
)
from mpishard.models.engine.engine import Engine
from mpishard.models.engine.evaluation import (
    global_gradient,
    mean_loss,
)
from mpishard.models.engine.leaves import check_leaves, check_leaves_of, warn_of_other_bits
from mpishard.models.engine.update import Policy, descent
from mpishard.models.programs.program import Program
from mpishard.models.stores.offload import log_ignored_offload
from mpishard.models.wrapper.files import ModelFiles
from mpishard.models.wrapper.local_shard import LocalShard, compare_replicas
from mpishard.models.wrapper.wrapped import (
    agreed_vector,
    generate_tokens,
    holding,
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
from mpishard.observe import MemoryLedger
from mpishard.sharding import ParameterEntry, ShardingConfiguration, Unit, refuse_with_leaves

_log = logging.getLogger("mpishard")


class _ClosedEngine:
    """The engine of a closed model: refuses every use, and keeps no memory."""

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        raise ShardingError(f"this {self._owner} is closed")


class ShardedModelBase(ShardedModelMembers):
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
        if isinstance(wrapped_model, ShardedModelBase):
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
        """The user's model."""
        return self._wrapped_model

    @property
    def sharding_configuration(self) -> ShardingConfiguration:
        """The `ShardingConfiguration` of this model."""
        return self._config

    @property
    def rank(self) -> int:
        """The rank of this process or thread."""
        return self.backend.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
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
        """Length of the flat vector, frozen parameters included."""
        return self.engine.placement.length

    def _properties(self) -> Document:
        """Return facts about the sharding, by the names that they have in metadata."""
        return {
            "IsDistributed": True,
            "Strategy": self.strategy,
            "WorldSize": self.world_size,
            "Rank": self.rank,
            **self._shard.properties(),
            "ParametersOncePerNode": self._is_once_per_node,
        }

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
    def _shard(self) -> LocalShard:
        return LocalShard(self.engine)

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
        full = self.engine.gather()
        # Weak, because a cache that kept the full vector alive would undo the sharding.
        self._remembered = weakref.ref(full), self.engine.version
        return full

    # ------------------------------------------------------------------------------------ copies

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
        model._remembered = None
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---------------------------------------------------------------------------- files and bytes

    def checkpointed(self) -> ModelFiles:
        """Return the model in the form that `mpishard.checkpoint` saves and loads."""
        # A new object for each call: a stored one would keep the parameters alive after close().
        return ModelFiles(self.engine, self._wrapped_model, self.strategy)

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
        heads, in a pipeline those of its layers. Sharded parameters are gathered once, and kept
        until the end. If they do not fit into half of a node's free memory, each token gathers
        them, and a warning says how many bytes that takes.

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
