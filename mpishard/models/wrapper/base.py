"""The surface that every sharded model shows."""

from __future__ import annotations

import contextlib
import copy
import logging
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from mpishard.arguments import as_number
from mpishard.arrays import Array, beside, chunk_length
from mpishard.communication import CommunicationBackend
from mpishard.contracts import (
    ILossFunction,
    IShardedModel,
    ModelMetadata,
)
from mpishard.errors import ShardingError
from mpishard.layout import LeafLayout
from mpishard.models.engine.engine import Engine
from mpishard.models.engine.policy import Policy
from mpishard.models.engine.step import StepReport, Update
from mpishard.models.programs.leaves import check_leaves, check_leaves_of, say_what_may_differ
from mpishard.models.programs.program import Program
from mpishard.models.stores.offload import say_what_is_ignored
from mpishard.models.wrapper.digest import compare_replicas
from mpishard.models.wrapper.files import ShardedModelFiles
from mpishard.models.wrapper.full_vector import agreed_vector
from mpishard.models.wrapper.shards import Shards
from mpishard.models.wrapper.wrapped import WrappedMembers
from mpishard.models.wrapper.wrapping import (
    build_engine,
    give_up_ownership,
    is_owned_by,
    program_of,
    require_same_on_all_ranks,
    take_ownership,
)
from mpishard.observe.ledger import MemoryCategory, MemoryLedger
from mpishard.sharding import ParameterEntry, ShardingConfiguration, Unit

__all__ = ["ShardedModelBase"]

_log = logging.getLogger("mpishard")


class ShardedModelBase(Shards, ShardedModelFiles, WrappedMembers, IShardedModel):
    """A model whose parameters, gradients and optimizer state live on several ranks.

    Life cycle. Construction is collective: rank 0's first values are dealt to the ranks, unit by
    unit, and a layered model gives its arrays up. A step gathers each unit when it is needed,
    reduces its gradient as soon as backward is through with it, and updates what the rank owns.

    A subclass says what is sharded (`policy`) and what it is called (`strategy`).

    Parameters
    ----------
    wrapped_model : object
        A model of `mpishard.nn`, anything that implements `ILayeredModel`, or a black box with
        ``get_parameters``, ``set_parameters`` and ``compute_gradients``, whose parameters stay
        whole on every rank.
    config : ShardingConfiguration
        Backend and choices.

    Raises
    ------
    TypeError
        For None, or a configuration of another type.
    ValueError
        Where the ranks' models differ in length, units or dtype; on every rank.
    ShardingError
        Where another rank of this process, or another wrapper, has wrapped the same object.
    """

    policy: Policy
    strategy: ClassVar[str]

    def __init__(self, wrapped_model: Any, config: ShardingConfiguration) -> None:
        if wrapped_model is None:
            raise TypeError("wrapped_model must be a model, got None")
        if not isinstance(config, ShardingConfiguration):
            raise TypeError(f"config must be a ShardingConfiguration, got {type(config).__name__}")
        if isinstance(wrapped_model, IShardedModel):
            raise TypeError(f"the model is sharded already, as {type(wrapped_model).__name__}")
        self._wrapped_model = wrapped_model
        self._config = config
        self._said_train = False
        self.backend.initialize()
        self._check_leaves()
        self._on_before_initialize_sharding()
        self._initialize_sharding()

    def _check_leaves(self) -> None:
        """Refuse ``gradient_leaves`` where worlds could not reproduce. Communicates nothing."""
        check_leaves(self._config, self.world_size)

    def _on_before_initialize_sharding(self) -> None:
        """Hook of subclasses: the backend is ready, and nothing is dealt yet."""

    def _initialize_sharding(self) -> None:
        """Deal rank 0's values to the ranks. Collective."""
        program = self._program()
        check_leaves_of(program, self._config)
        take_ownership(self._wrapped_model, self)
        require_same_on_all_ranks(program, self.strategy, self._config)
        self._engine: Engine | None = self._build_engine(program)
        say_what_is_ignored(self._config, program.device)
        if self.gradient_leaves is not None:
            say_what_may_differ(self._config)
        program.vector.deal(self.engine.parameters, self.backend, program.fill)
        program.deal_constants(self.backend)
        self._take_over()

    def _program(self) -> Program:
        """What is computed, and where."""
        return program_of(self._wrapped_model, self._config)

    def _build_engine(self, program: Program, *, arena: bool = True) -> Engine:
        program.default_loss = self.default_loss_function
        return build_engine(program, self.policy, self._config, arena=arena)

    def _take_over(self) -> None:
        """The ranks have the parameters: tell the plain model, or the user why it keeps them."""
        store = self.engine.parameters
        reason = self.engine.program.take_over(store, f"a {type(self).__name__}")
        self._is_once_per_node = store.once_per_node and reason is None
        if reason is not None and self.rank == 0:
            self._say_what_stays_whole(reason)

    def _say_what_stays_whole(self, reason: str) -> None:
        """Warn where the strategy would shard parameters, and does not."""
        if self.policy.shards_parameters:
            _log.warning(
                "%s: gradients and optimizer state are sharded; the parameters of %s stay whole on "
                "every rank, %s", type(self).__name__, type(self._wrapped_model).__name__, reason,
            )  # fmt: skip

    def __repr__(self) -> str:
        wrapped = type(self._wrapped_model).__name__
        return f"{type(self).__name__}({wrapped}, {self._described_ranks()})"

    def _described_ranks(self) -> str:
        return f"{self.world_size} rank{'s' * (self.world_size != 1)}"

    # -------------------------------------------------------------------------------- properties

    @property
    def backend(self) -> CommunicationBackend:
        """How the ranks talk."""
        return self._config.communication_backend

    @property
    def wrapped_model(self) -> Any:
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
        """Which samples are this rank's to compute: the part of this number, of `data_size`."""
        return self.engine.backend.rank

    @property
    def data_size(self) -> int:
        """Among how many ranks, or groups of ranks, the samples of a batch are dealt."""
        return self.engine.backend.world_size

    @property
    def gradient_leaves(self) -> int | None:
        """V, with which the model was wrapped: see `ShardingConfiguration`."""
        leaves = self.engine.leaves
        return None if leaves is None else leaves.count

    def batch_indices(self, samples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Which of a global batch's samples this rank passes to a step.

        Consecutive ones; with ``gradient_leaves`` those of its leaves, end to end.

        Parameters
        ----------
        samples : int
            Of the global batch.

        Returns
        -------
        array of int64
            Places in the global batch, rising.
        """
        leaves = self.gradient_leaves or self.data_size
        slices = LeafLayout(samples, leaves, self.data_size).slices(self.data_rank)
        return np.concatenate([np.arange(part.start, part.stop) for part in slices])

    def data_rank_of(self, rank: int) -> int:
        """The `data_rank` of another rank."""
        return rank

    @property
    def engine(self) -> Engine:
        """The one way in which the parameters change."""
        if self._engine is None:
            raise ShardingError(f"this {type(self).__name__} is closed")
        return self._engine

    @property
    def memory(self) -> MemoryLedger:
        """Bytes that this rank holds for this model, by category."""
        return self.engine.layout.ledger

    @property
    def units(self) -> tuple[Unit, ...]:
        """What is gathered and reduced as one."""
        return self.engine.program.units

    @property
    def parameter_entries(self) -> tuple[ParameterEntry, ...]:
        """Name, shape and start of each parameter; of a black box one, called "parameters"."""
        return self.engine.placement.entries

    @property
    def parameter_count(self) -> int:
        return self.engine.placement.length

    def get_model_metadata(self) -> ModelMetadata:
        """What the wrapped model says, and how it is sharded."""
        policy = self.engine.policy
        metadata = super().get_model_metadata()
        metadata.complexity = self.parameter_count
        metadata.properties |= {
            "IsDistributed": True,
            "Strategy": self.strategy,
            "WorldSize": self.world_size,
            "Rank": self.rank,
            "ShardSize": sum(piece.length for piece in self._held_pieces),
            "ParametersSharded": policy.shards_parameters,
            "ParametersReplicated": not policy.shards_parameters,
            "ParametersOncePerNode": self._is_once_per_node,
            "GradientsSharded": policy.shards_gradients,
            "GradientsReplicated": not policy.shards_gradients,
            "OptimizerStateSharded": policy.shards_state,
        }
        return metadata

    # ------------------------------------------------------------------- computing, collectively

    def predict(self, x: Array) -> Array:
        """Outputs for this rank's inputs; the number of rows may differ between ranks.

        Collective where parameters are sharded: every rank calls it, with 0 rows if need be.
        """
        return self.engine.predict(x)

    def train(self, x: Array, y: Array) -> float:
        """One step of plain gradient descent on this rank's batch. Collective.

        The step size is ``config.learning_rate``. Optimizers do better: see
        `mpishard.optimizers`.

        Returns
        -------
        float
            The mean loss over all ranks' samples, before the update.
        """
        rate = self._config.learning_rate
        if not self._said_train and self.rank == 0:
            _log.info("train: plain gradient descent with learning rate %g", rate)
            self._said_train = True

        def descend(updates: list[Update], report: StepReport) -> None:
            scale = rate / report.weight
            for update in updates:
                parameters, gradients = update.parameters, update.gradients
                length = chunk_length(parameters)
                for start in range(0, update.piece.length, length):
                    parameters[start : start + length] -= scale * gradients[start : start + length]

        settings = zlib.crc32(repr(rate).encode())
        return self.engine.step(x, y, descend, settings=settings).loss

    @contextlib.contextmanager
    def accumulate(self, *, defer: bool = False) -> Iterator[None]:
        """Inside the block steps add up and update nothing; the first step after it does.

        Equal to one step on all the batches together. Collective in that every rank enters and
        leaves together. An exception discards what was added.

        Parameters
        ----------
        defer : bool
            Keep the full gradients local until the update: no messages meanwhile, for memory of
            the size of the parameters. Otherwise sharded gradients are reduced at once.
        """
        with self.engine.accumulate(defer=defer):
            yield

    def set_parameters(self, parameters: Array) -> None:
        """Take parameters from a full vector, the same on every rank. Collective.

        Raises
        ------
        TypeError
            For what is no array of real numbers, before anything is communicated.
        ValueError
            For another length, before anything is communicated; for vectors that differ between
            ranks, on every rank.
        """
        self.engine.round.require_none("set_parameters()")
        self.engine.take(agreed_vector(self.engine, parameters, "set_parameters"))

    def with_parameters(self, parameters: Array) -> Self:
        """A copy with these parameters. Collective; errors are those of `set_parameters`."""
        vector = agreed_vector(self.engine, parameters, "with_parameters")
        model = self.deep_copy()
        model.engine.take(vector)
        return model

    def compute_gradients(
        self, x: Array, y: Array, loss_function: ILossFunction | None = None
    ) -> Array:
        """Gradient of the mean loss of *this rank's* batch, full length, not reduced.

        The one exception to sharding: every rank holds a full vector for it. Collective where
        parameters are sharded.
        """
        return self.engine.local_gradient(x, y, loss_function)[1]

    def apply_gradients(self, gradients: Array, learning_rate: float) -> None:
        """``theta -= learning_rate * gradients`` for a full vector, the same on every rank.

        Collective. Each rank updates what it owns.

        Raises
        ------
        TypeError, ValueError
            As `set_parameters`; TypeError for a rate that is no number, ValueError for rates that
            differ between ranks.
        ShardingError
            Where replicas have drifted apart; in the middle of a round of `accumulate`.
        """
        rate = as_number("learning_rate", learning_rate)
        engine = self.engine
        engine.replicas.require_equal("apply_gradients")
        engine.round.require_none("apply_gradients()")
        vector = agreed_vector(engine, gradients, "apply_gradients", rate)
        pieces = engine.pieces.updated
        for piece, owned in zip(pieces, engine.parameters.owned(pieces), strict=True):
            target = owned
            part = engine.placement.part(vector, piece.start, piece.stop)
            target -= rate * beside(part, target)
        if engine.policy.shards_state:
            engine.parameters.publish(engine.pieces.published)
        engine.changed()

    def synchronize_gradients(self) -> None:
        """Make all ranks agree after steps that were each rank's own. Collective.

        With ``auto_sync_gradients=False`` replicas have drifted apart: every rank gets their mean,
        weighted by the samples that each has used since they were equal. After one step of
        `train` that is what the averaged gradient would have given. Otherwise every step has
        reduced its gradients already, and this is a barrier.

        Raises
        ------
        ShardingError
            Before the first step.
        """
        if self.engine.step_number == 0:
            raise ShardingError("synchronize_gradients() before any gradient was computed")
        self.engine.synchronize_replicas()

    def check_replicas(self) -> int:
        """Compare what several ranks hold of the same parameters, bit by bit. Collective.

        In a run without faults nothing ever differs: this finds memory that fails, and changes
        that a script makes on some ranks alone. Each rank takes a checksum of what it holds, one
        small all-gather compares them. With DDP and ZeRO-1/2 that is every parameter, on a mesh
        what tensor ranks and data ranks hold alike. Sharded parameters have no replicas, and ranks
        of a node that share one copy in memory are compared with other nodes only.

        Returns
        -------
        int
            How many parameters, or parts of them, were compared; 0 where nothing is replicated.

        Raises
        ------
        ReplicaError
            On every rank, naming the parameters and the ranks that differ.
        ShardingError
            Where ranks have made updates of their own (``auto_sync_gradients=False``).
        """
        self.engine.replicas.require_equal("check_replicas")
        return compare_replicas(self.engine, self.backend)

    # ------------------------------------------------------------------------------------ copies

    def clone(self) -> Self:
        """A shallow copy, which shares parameters. Communicates nothing."""
        return copy.copy(self)

    def deep_copy(self) -> Self:
        """A copy with parameters of its own, and without memory that ranks share.

        Communicates nothing, so that its steps send what those of a model made by `as_distributed`
        read in place.
        """
        model = copy.copy(self)
        program, model._wrapped_model = self.engine.program.copy()
        model._invalidate_cache()
        engine = model._engine = model._build_engine(program, arena=False)
        copied = engine.parameters
        for target, values in zip(
            copied.owned(copied.held), self.engine.parameters.owned(copied.held), strict=True
        ):
            target[...] = values
        engine.continue_as(self.engine)
        program.take_over(copied, f"a {type(self).__name__}")
        return model

    def release(self) -> Any:
        """Give the parameters back to the plain model, on every rank, and return it. Collective.

        The object can be used and wrapped again; this wrapper should be used no more.
        """
        model = self._wrapped_model
        give_up_ownership(model, self)
        self.engine.program.give_back(self.engine.gather)
        return model

    def close(self) -> None:
        """Let go of this rank's part of parameters and gradients. Communicates nothing.

        What is to be kept is gathered or saved before; the wrapped model stays structure only.
        """
        if self._engine is not None and is_owned_by(self._wrapped_model, self):
            self.engine.abandon()
            give_up_ownership(self._wrapped_model, self)
        self._engine = None

    def optimizer_state(self, names: Sequence[str]) -> dict[str, Array]:
        """Zeros for an optimizer's state, one vector per name, as long as what is updated."""
        length = sum(piece.length for piece in self.engine.pieces.updated)
        state = {}
        for name in names:
            vector = self.engine.state_layout.allocate(MemoryCategory.OPTIMIZER_STATE, length)
            vector.fill(0)
            state[name] = vector
        return state
