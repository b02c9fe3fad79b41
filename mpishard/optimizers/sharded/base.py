"""The surface that every sharded optimizer shows."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from mpishard.arrays import Array, array_namespace
from mpishard.communication import ReductionOperation
from mpishard.contracts import (
    IGradientBasedOptimizer,
    IOptimizer,
    IShardedModel,
    IShardedOptimizer,
)
from mpishard.errors import ShardingError
from mpishard.models import ShardedModelBase
from mpishard.models.engine.update import StepReport, Update
from mpishard.models.wrapper.digest import agreed_vector
from mpishard.optimizers.loop.agreement import require_same_rule
from mpishard.optimizers.rules.ranges import (
    OwnedRange,
    ParameterCells,
    Segment,
    UpdateContext,
    segments_of,
)
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.training import ShardedTraining
from mpishard.sharding import ShardingConfiguration

__all__ = ["ShardedOptimizerBase"]


class ShardedOptimizerBase(ShardedTraining):
    """An update rule that runs on what each rank owns, with the state that belongs to it.

    The model wrapper owns the policy and the collectives; this one the rule, its state, the
    schedule, clipping and the training loop. State is made for a model at its first step.

    Parameters
    ----------
    wrapped_optimizer : Optimizer
        The rule and its settings.
    config : ShardingConfiguration
        Backend and choices; the backend must be the model's.

    Raises
    ------
    TypeError
        For None, or arguments of another type.
    ValueError
        For an optimizer that is not gradient based.
    """

    model_class: ClassVar[type[ShardedModelBase]]

    def __init__(self, wrapped_optimizer: IOptimizer, config: ShardingConfiguration) -> None:
        rule = _rule(wrapped_optimizer, type(self).__name__)
        if not isinstance(config, ShardingConfiguration):
            raise TypeError(f"config must be a ShardingConfiguration, got {type(config).__name__}")
        self._optimizer = rule
        self._model_options = {}  # for a plain model that optimize wraps
        self._config = config
        self._awaiting = None
        self._last_gradient: tuple[float, int] | None = None  # its weight; parameters' version
        self._model = None
        self._given_model = None
        self._state = {}
        self._segments: tuple[tuple[Segment, ...], ...] = ()
        self._steps = 0
        self._frozen = frozenset()
        self._options = ""  # those that `_frozen` was found with
        self._owners: dict[str, Any] = {}

    @property
    def wrapped_optimizer(self) -> Optimizer:
        return self._optimizer

    @property
    def sharding_configuration(self) -> ShardingConfiguration:
        return self._config

    @property
    def rank(self) -> int:
        return self._config.communication_backend.rank

    @property
    def world_size(self) -> int:
        return self._config.communication_backend.world_size

    @property
    def steps(self) -> int:
        """Updates made so far."""
        return self._steps

    def get_options(self) -> Mapping[str, Any]:
        return self._optimizer.get_options()

    def get_current_learning_rate(self) -> float:
        """The rate of the next update."""
        return self._optimizer.rate(self._steps)

    def reset(self) -> None:
        """Forget state and step count; the next step starts anew, with any model."""
        self._optimizer.reset()
        self._forget_model()
        self._awaiting = None

    def _forget_model(self) -> None:
        self._model = None
        self._last_gradient = None
        self._state = {}
        self._steps = 0

    # ---------------------------------------------------------------------------------- training

    def step(self, model: ShardedModelBase, x: Array, y: Array) -> float:
        """One synchronised update on this rank's batch. Collective.

        Inside ``model.accumulate()`` it adds to the round and updates nothing.

        Parameters
        ----------
        model : ShardedModelBase
            Wrapped in the same strategy, with the same backend.
        x, y : Array
            This rank's inputs and targets, shape (samples, ...); 0 samples are fine as long as
            another rank has some.

        Returns
        -------
        float
            The mean loss over all ranks' samples, before the update.

        Raises
        ------
        TypeError, ValueError
            For a model or batch that does not fit, before anything is communicated.
        NonFiniteLossError
            On every rank, before the update.
        """
        return self.step_report(model, x, y).loss

    def step_report(
        self, model: ShardedModelBase, x: Array, y: Array, *, sample_start: int | None = None
    ) -> StepReport:
        """As `step`, with the loss's weight and the gradient's norm. Collective.

        ``sample_start`` is the index in the global batch of this rank's first sample; where it is
        not given, models with dropout ask the ranks for it.
        """
        if model is not self._model:  # then the ranks meet in bind, which a bad batch must not do
            self._require_model_of_this_kind(model)
            model.engine.program.check_pair(x, y, model.engine.loss)
        self.bind(model)
        self._last_gradient = None
        report = model.engine.step(
            x, y, self._apply, sample_start=sample_start, settings=self._settings()
        )
        if report.gradient_norm is not None:
            self._last_gradient = report.weight, model.engine.version
        return report

    def _settings(self) -> int:
        """A checksum of what may change from step to step, to be compared between ranks."""
        rule = self._optimizer
        rate = rule.rate(self._steps)
        own = (
            rate, rule.clip_global_norm, rule.clip_value, self._steps,
            rule.weight_decay, rule.checked_options.description,
        )  # fmt: skip
        return zlib.crc32(repr(own).encode())

    def _apply(self, updates: list[Update], report: StepReport) -> None:
        assert report.gradient_norm is not None
        assert self._model is not None
        context = UpdateContext(
            step=self._steps + 1,
            learning_rate=self._optimizer.checked_rate(self._steps),
            gradient_scale=self._optimizer.clip_factor(report.gradient_norm) / report.weight,
            **self._owners,
        )
        ranges = [
            OwnedRange(
                update.parameters, update.gradients,
                {name: vector[update.piece.in_shard] for name, vector in self._state.items()},
                segments,
            )
            for update, segments in zip(updates, self._segments, strict=True)
        ]  # fmt: skip
        self._optimizer.update_all(ranges, context)
        self._steps += 1

    @property
    def last_computed_gradients(self) -> Array:
        """What this rank holds of the last step's gradient, its pieces end to end; a copy.

        The mean over the samples of all ranks, before clipping; the pieces are those that the
        rank owns of each unit, also where parameters are replicated, for nobody else keeps them.
        It is read where the step left it, so it is there until the model computes another
        gradient.

        Raises
        ------
        ShardingError
            Where the last thing that happened to the model was no `step` of this optimizer.
        """
        model = self._model
        weight, version = self._last_gradient or (0.0, -1)
        if model is None or version != model.engine.version:
            raise ShardingError(
                "there is no gradient of a last step: it is there after step, until the model's "
                "parameters change or a round of accumulate() begins"
            )
        gradients = model.engine.gradients.owned(model.engine.pieces.owned)
        if not gradients:
            return np.zeros(0, model.dtype)
        return array_namespace(gradients[0]).concatenate(gradients) / weight

    def apply_gradients(self, gradients: Array, model: ShardedModelBase) -> None:
        """One update with a given gradient of the mean loss. Collective.

        Parameters
        ----------
        gradients : Array
            Shape (parameter_count,), the same on every rank; each takes its pieces.
        model : ShardedModelBase
            As for `step`.

        Raises
        ------
        ValueError
            For another length, or vectors that differ between ranks; on every rank.
        NonFiniteLossError
            On every rank, where the gradient is not finite and that is not allowed.
        """
        self._require_model_of_this_kind(model)
        vector = agreed_vector(model.engine, gradients, "apply_gradients")
        self.bind(model)
        self._last_gradient = None
        model.engine.apply(vector, self._apply)

    def synchronize_optimizer_state(self) -> None:
        """Make the state of all ranks rank 0's. Collective; a repair, for steps keep it so.

        Raises
        ------
        NotImplementedError
            Where state is sharded: each part exists once, so there is nothing to make equal.
        """
        if self.model_class.policy.shards_state:
            raise NotImplementedError(
                f"{type(self).__name__} partitions the optimizer state: each rank holds a part "
                "that nobody else has, so there is nothing to synchronise"
            )
        for vector in self._state.values():
            self.backend.broadcast(vector, root=0)
        self._steps = int(self.backend.broadcast(np.array([self._steps]), root=0)[0])

    def _synchronize_parameters(self, model: Any) -> None:
        """Give a plain model on every rank the mean of all ranks' parameters. Collective.

        Nothing is done for None, and for a sharded model, whose steps keep its parameters.
        """
        if model is None or isinstance(model, IShardedModel):
            return
        parameters = model.get_parameters().copy()
        model.set_parameters(self.backend.all_reduce(parameters, ReductionOperation.AVERAGE))

    def bind(self, model: ShardedModelBase) -> None:
        """Make state for ``model``; one optimizer trains one model until `reset`. Collective.

        Raises
        ------
        TypeError
            For a model that is not sharded.
        ShardingError
            For another strategy or backend than this one's, or a second model.
        ValueError
            For a pattern of ``parameter_options`` that matches nothing, or a configuration that
            the strategy cannot step with; where other parameters than before are to be frozen; on
            every rank, where their rules differ. Nothing has changed then.
        """
        if model is self._model:
            self._check_new_options(model)
            if model.engine.program.frozen != self._frozen:  # another optimizer has trained it
                model.engine.freeze(self._frozen)
            return
        self._require_model_of_this_kind(model)
        frozen = self._frozen_of(model)
        if model.sharding_configuration.auto_sync_gradients:  # elsewhere each goes its own way
            require_same_rule(self.backend, self._optimizer.fingerprint(), frozen)
        self._frozen = frozen
        self._options = self._optimizer.checked_options.description
        if model.engine.program.frozen != self._frozen:
            model.engine.freeze(self._frozen)
        self._owners = {
            "sum_over_owners": model.engine.sum_over_owners,
            "parameter_names": [entry.name for entry in model.parameter_entries],
        }
        held = model.engine.program.entries
        pieces = model.engine.pieces.updated
        self._segments = tuple(segments_of(held, piece) for piece in pieces)
        if model.gradient_leaves is not None:
            self._cut_into_cells(model, model.gradient_leaves)
        self._state = model.optimizer_state(self._optimizer.needed_state())
        self._model = model
        self._take_awaited(model)

    def _cut_into_cells(self, model: ShardedModelBase, leaves: int) -> None:
        """Let norms of parameters be summed so that who owns what changes no bit."""
        engine = model.engine
        cells = ParameterCells(model.parameter_entries, model.units, leaves)
        self._segments = tuple(
            cells.cut(segments, piece)
            for segments, piece in zip(self._segments, engine.pieces.updated, strict=True)
        )
        self._owners = {
            "sum_over_owners": lambda rows: cells.totals(engine.sum_over_owners(rows)),
            "parameter_names": cells.names,
        }

    def _frozen_of(self, model: ShardedModelBase) -> frozenset[str]:
        """What of ``model`` is not trained, or a refusal of options. Communicates nothing."""
        entries = model.parameter_entries
        self._optimizer.checked_options.check_patterns([e.name for e in entries])
        trainable = [e.name for e in entries if e.trainable]
        frozen = self._optimizer.checked_options.frozen_among(trainable) | {
            e.name for e in entries if not e.trainable
        }
        if self._awaiting is not None:
            self._require_fit(self._awaiting, model, frozen)
        return frozen

    def _check_rule(self, model: ShardedModelBase) -> None:
        self._frozen_of(model)
        self._optimizer.fingerprint()  # asks a user's attributes for their names

    def _check_new_options(self, model: ShardedModelBase) -> None:
        """Refuse options set since the last step that the state does not fit."""
        options = self._optimizer.checked_options.description
        if options == self._options:
            return
        frozen = self._frozen_of(model)
        if frozen != self._frozen:
            raise ValueError(
                f"parameter_options would freeze {sorted(frozen)}, and this optimizer's state was "
                f"made with {sorted(self._frozen)} frozen; call reset() to begin with new state, "
                "or give the options to an optimizer of their own"
            )
        self._options = options

    def _require_model_of_this_kind(self, model: ShardedModelBase) -> None:
        """Refuse a model that this optimizer cannot train. Communicates nothing."""
        if model is self._model:
            return
        if not isinstance(model, ShardedModelBase):
            raise TypeError(
                f"step needs a sharded model, got {type(model).__name__}; wrap it with "
                "mpishard.as_distributed(model, backend, strategy)"
            )
        if not isinstance(model, self.model_class):
            raise ShardingError(
                f"{type(self).__name__} updates {self.model_class.__name__}, and the model is a "
                f"{type(model).__name__}; use one strategy for both"
            )
        if model.backend is not self.backend:
            raise ShardingError(
                f"the model's backend, {model.backend.describe()}, is not the optimizer's, "
                f"{self.backend.describe()}; use one for both"
            )
        self._refuse_second_model()
        if not model.sharding_configuration.auto_sync_gradients:
            model.engine.replicas.require_drifting()

    @property
    def state(self) -> Mapping[str, Array]:
        """The rank's state vectors, by name; each as long as what the rank updates."""
        return self._state


def _rule(candidate: object, wrapper: str) -> Optimizer:
    """``candidate`` where a sharded optimizer can run it."""
    kind = type(candidate).__name__
    if isinstance(candidate, IShardedOptimizer):
        raise TypeError(f"wrapped_optimizer is sharded already, as {kind}")
    if isinstance(candidate, IOptimizer) and not isinstance(candidate, IGradientBasedOptimizer):
        raise ValueError(  # noqa: TRY004 - the mirrored hierarchy's
            f"{wrapper} updates by reduced gradients, and {kind} is not gradient based "
            "(IGradientBasedOptimizer): wrap one of mpishard.optimizers"
        )
    if not isinstance(candidate, Optimizer):
        raise TypeError(
            f"wrapped_optimizer must be an optimizer of mpishard.optimizers, got {kind}"
        )
    return candidate
