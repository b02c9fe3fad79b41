"""Documented members of sharded models: what they say and do beside training."""

from __future__ import annotations

import copy
import json
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

from mpishard.base import (
    Array,
    Document,
    MissingInterfaceError,
    MissingMemberError,
    ShardingError,
    as_number,
    copy_into,
)
from mpishard.contracts import DynamicShapeInfo, ILossFunction, ModelMetadata, PathLike, UserModel
from mpishard.mirror.interfaces import IFeatureImportance, IShardedModel

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from mpishard.communication import CommunicationBackend
    from mpishard.models import Engine, LocalShard, ModelFiles, ShardedModelBase
    from mpishard.sharding import ShardingConfiguration

    class _DocumentedModel(IShardedModel):
        """What type checkers see: the interface, and the native members that these use."""

        strategy: ClassVar[str]
        engine: Engine
        _wrapped_model: UserModel
        _config: ShardingConfiguration
        _remembered: tuple[weakref.ref[Any], int] | None

        @property
        def owned_ranges(self) -> tuple[tuple[int, int], ...]: ...
        @property
        def _shard(self) -> LocalShard: ...
        def checkpointed(self) -> ModelFiles: ...
        def _properties(self) -> Document: ...
        def unsharded(self, root: int | None = None) -> AbstractContextManager[Any]: ...

else:
    _DocumentedModel = object

__all__ = ["ShardedModelMembers"]

Answer = TypeVar("Answer")


def _from_range(name: str, read: Callable[[int, int], int]) -> Any:
    """Make a property that `read` computes from a rank's only range, and that cannot be changed."""

    def get(model: ShardedModelMembers) -> int:
        ranges = model.owned_ranges
        if len(ranges) > 1:
            raise ShardingError(
                f"this rank owns a piece of each of {len(ranges)} units, which have no one start "
                "and size: owned_ranges lists them"
            )
        # A rank owns no range if there are more ranks than parameters.
        return read(*(ranges[0] if ranges else (0, 0)))

    def set_(model: ShardedModelMembers, given: int) -> None:
        # The collectives of all ranks use the ranges that the strategy has chosen.
        if given != get(model):
            raise ShardingError(
                f"{name} is {get(model)}, as {model.strategy} divides the parameters, and cannot "
                f"be set to {given}: for other ranges derive from another strategy"
            )

    return property(get, set_)


@IShardedModel.register
class ShardedModelMembers(_DocumentedModel):
    """What the documented hierarchy has of a sharded model."""

    # -------------------------------------------------------------------------------- description

    def get_model_metadata(self) -> ModelMetadata:
        """Return the wrapped model's metadata with its sharding and figures of its training.

        ``Steps``, ``Samples``, ``TrainingSeconds``, ``LastLoss``, ``BestLoss`` (the lowest loss of
        a step) and ``ValidationScore`` include the earlier jobs that the model's checkpoints come
        from. Figures that are not known are left out, and all of them before the first step.
        ``training_date`` is the time of the last step. Collective for a linear model of
        `mpishard.nn`, whose feature importance needs all coefficients; otherwise nothing is
        communicated.
        """
        from mpishard.nn import LinearModel

        kind = type(self._wrapped_model).__name__
        own: ModelMetadata | None = self._ask("get_model_metadata", None)
        metadata = own or ModelMetadata(kind, model_type=kind)
        metadata.complexity = self.parameter_count
        metadata.properties |= self._properties()
        record = self.engine.record
        if record.trained_at is not None:
            metadata.training_date = datetime.fromtimestamp(record.trained_at, UTC)
            metadata.properties |= {"Steps": self.engine.step_number, **record.properties()}
        if isinstance(self._wrapped_model, LinearModel):
            metadata.feature_importance = self.get_feature_importance()
        return metadata

    @property
    def default_loss_function(self) -> ILossFunction | None:
        """The wrapped model's loss, which is used if none is given; None if it has none."""
        return getattr(self._wrapped_model, "default_loss_function", None)

    def sanitize_parameters(self, parameters: Array) -> Array:
        """Return ``parameters`` in the form that the wrapped model needs."""
        sanitize = getattr(self._wrapped_model, "sanitize_parameters", None)
        return parameters if sanitize is None else sanitize(parameters)

    def get_input_shape(self) -> list[int]:
        """Return the shape of one sample; [] if the wrapped model does not know it."""
        return self._ask("get_input_shape", list[int]())

    def get_output_shape(self) -> list[int]:
        """Return the shape of one sample's prediction; [] if it is not known."""
        return self._ask("get_output_shape", list[int]())

    def get_dynamic_shape_info(self) -> DynamicShapeInfo:
        """Return the dims of these shapes that may differ from batch to batch."""
        return self._ask("get_dynamic_shape_info", DynamicShapeInfo())

    def _ask(self, name: str, otherwise: Answer) -> Answer:
        member = getattr(self._wrapped_model, name, None)
        answer: Answer = otherwise if member is None else member()
        return answer

    def get_active_feature_indices(self) -> Iterable[int]:
        """Return the features in use; `MissingInterfaceError` if they are not known."""
        indices: Iterable[int]
        indices = _feature_member(self._wrapped_model, "get_active_feature_indices")()
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
        _use_features(self._wrapped_model, indices, self.engine.world)

    def is_feature_used(self, index: int) -> bool:
        """Return whether the feature is in use; `MissingInterfaceError` if that is not known."""
        return bool(_feature_member(self._wrapped_model, "is_feature_used")(index))

    def get_feature_importance(self) -> dict[str, float]:
        """Importance by feature name. Collective."""
        _feature_member(self._wrapped_model, "get_feature_importance", "IFeatureImportance")
        with self.unsharded() as model:
            importance: dict[str, float] = model.get_feature_importance()
        return importance

    @property
    def supports_jit_compilation(self) -> bool:
        """Whether `export_computation_graph` is implemented by the wrapped model."""
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

    # --------------------------------------------------------------------- gradients and parameters

    def with_parameters(self, parameters: Array) -> Self:
        """Return a copy with these parameters. Collective; errors as of `set_parameters`."""
        from mpishard.models import agreed_vector

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
        from mpishard.models import local_gradient

        return local_gradient(self.engine, x, y, loss_function)

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
        from mpishard.models import agreed_vector, descent

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
        from mpishard.models import synchronize_gradient

        found = synchronize_gradient(self.engine)
        averaged = None if found is None else found[2]
        if averaged is None and self.engine.step_number == 0:
            raise ShardingError("synchronize_gradients() before any gradient was computed")
        if averaged is None or not self._config.auto_sync_gradients:
            self.engine.synchronize_replicas()
        return averaged

    @property
    def local_parameter_shard(self) -> Array:
        """A copy of this rank's pieces, end to end; of all parameters if they are replicated.

        In mixed precision these are the float32 parameters, which the rank updates.
        """
        return self._shard.values()

    def get_parameters(self) -> Array:
        """As `gather_full_parameters`. Collective."""
        return self.gather_full_parameters()

    def get_parameter_chunks(self) -> Iterator[Array]:
        """Yield the parameters unit by unit, so that only one unit is gathered. Collective.

        On a mesh all parameters come in one chunk, because the units of its ranks differ.
        """
        return self.engine.gather_chunks()

    set_parameter_chunks = IShardedModel.set_parameter_chunks
    supports_parameter_initialization = IShardedModel.supports_parameter_initialization

    def clone(self) -> Self:
        """Return a shallow copy, which shares parameters. Communicates nothing."""
        return copy.copy(self)

    # ---------------------------------------------------------------------------- files and bytes

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
        # All is checked before parameters change: after an error the model is as it was.
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
        from mpishard import checkpoint

        self.engine.replicas.require_equal("save_model()")
        checkpoint.save(path, cast("ShardedModelBase", self))

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
        from mpishard import checkpoint

        checkpoint.load(path, cast("ShardedModelBase", self))

    save_state = IShardedModel.save_state
    load_state = IShardedModel.load_state

    # --------------------------- the names by which subclasses know a rank's shard and its model

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
        _write_shard(self._shard, values)

    _shard_start_index: int = _from_range("_shard_start_index", lambda start, stop: start)
    _shard_size: int = _from_range("_shard_size", lambda start, stop: stop - start)

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


def _write_shard(shard: LocalShard, values: Array) -> None:
    """Replace the values that a rank holds by a vector of as many. Collective.

    Raises
    ------
    ValueError
        On every rank, if one rank's vector has another shape.
    ShardingError
        On every rank, in the middle of a round of accumulation.
    """
    from mpishard.communication import same_outcome

    engine = shard.engine
    # `together` is a barrier as well: no rank writes while another still reads its values.
    with same_outcome(engine.world, engine.layout.subject):
        if getattr(values, "shape", None) != (shard.length,):
            raise ValueError(
                f"_local_shard: expected a vector of shape ({shard.length},), got "
                f"{getattr(values, 'shape', type(values).__name__)}"
            )
        engine.round.require_none("an assignment to _local_shard")
    start = 0
    for target in engine.parameters.owned(shard.pieces):
        stop = start + int(target.size)
        copy_into(target, values[start:stop])
        start = stop
    engine.read()


def _feature_member(model: object, name: str, interface: str = "IFeatureAware") -> Any:
    """Return a member of ``interface``.

    Raises
    ------
    MissingInterfaceError
        If the model does not implement it.
    """
    member = getattr(model, name, None)
    # A class that only inherits the interface's method does not implement it, and would raise only
    # when called: after the parameters have been gathered for the call.
    given = getattr(type(model), name, None)
    if member is None or given is IFeatureImportance.__dict__.get(name, member):
        raise MissingInterfaceError(f"{type(model).__name__} does not implement {interface}")
    return member


def _use_features(model: object, indices: Iterable[int], world: CommunicationBackend) -> None:
    """Use these features and no others; refuse choices that differ between ranks. Collective."""
    from mpishard.communication import gather_texts, share_text

    set_indices = _feature_member(model, "set_active_feature_indices")
    get_indices = _feature_member(model, "get_active_feature_indices")
    # Set first and compared afterwards: only the model knows which indices it accepts.
    before = list(get_indices())
    set_indices(indices)
    # Sorted, because the order in which a user names features has no effect.
    texts = gather_texts(world, json.dumps(sorted(int(index) for index in get_indices())))
    differs = any(text != texts[0] for text in texts)
    found = share_text(world, "; ".join(texts) if differs else "")
    if found:
        set_indices(before)
        raise ValueError(f"every rank must name the same features; by rank, {found}")
