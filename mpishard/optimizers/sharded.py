"""The surface that every sharded optimizer shows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mpishard.arrays import Array
from mpishard.communication import CommunicationBackend
from mpishard.contracts import IShardedOptimizer
from mpishard.errors import ShardingError
from mpishard.models import ShardedModelBase
from mpishard.models.step import StepReport, Update
from mpishard.optimizers.data import OptimizationInputData, OptimizationResult
from mpishard.optimizers.loop import train
from mpishard.optimizers.optimizer import Optimizer
from mpishard.optimizers.options import Segment, check_patterns, segments_of
from mpishard.optimizers.ranges import OwnedRange, UpdateContext
from mpishard.sharding import ParameterEntry, Piece, ShardingConfiguration

__all__ = ["ShardedOptimizerBase"]

_log = logging.getLogger("mpishard")

_PREFIX = "optimizer/"


class ShardedOptimizerBase(IShardedOptimizer):
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
    """

    model_class: ClassVar[type[ShardedModelBase]]

    def __init__(self, wrapped_optimizer: Optimizer, config: ShardingConfiguration) -> None:
        if not isinstance(wrapped_optimizer, Optimizer):
            raise TypeError(
                "wrapped_optimizer must be an optimizer of mpishard.optimizers, got "
                f"{type(wrapped_optimizer).__name__}"
            )
        if not isinstance(config, ShardingConfiguration):
            raise TypeError(f"config must be a ShardingConfiguration, got {type(config).__name__}")
        self._optimizer = wrapped_optimizer
        self._config = config
        self._model: ShardedModelBase | None = None
        self._state: dict[str, Array] = {}
        self._segments: tuple[tuple[Segment, ...], ...] = ()
        self._steps = 0
        self._owners: dict[str, Callable[[Array], Array]] = {}

    @property
    def wrapped_optimizer(self) -> Optimizer:
        return self._optimizer

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
    def steps(self) -> int:
        """Updates made so far."""
        return self._steps

    def get_options(self) -> Mapping[str, Any]:
        return self._optimizer.get_options()

    def get_current_learning_rate(self) -> float:
        """The rate of the next update."""
        return self._optimizer.learning_rate(self._steps)

    def reset(self) -> None:
        """Forget state and step count; the next step starts anew, with any model."""
        self._model = None
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
        self, model: ShardedModelBase, x: Array, y: Array, *, sample_start: int = 0
    ) -> StepReport:
        """As `step`, with the loss's weight and the gradient's norm. Collective.

        ``sample_start`` is the index in the global batch of this rank's first sample.
        """
        self.bind(model)
        return model.engine.step(x, y, self._apply, sample_start=sample_start)

    def _apply(self, updates: list[Update], report: StepReport) -> None:
        assert report.gradient_norm is not None
        assert self._model is not None
        context = UpdateContext(
            step=self._steps + 1,
            learning_rate=self._optimizer.checked_rate(self._steps),
            gradient_scale=self._optimizer.clip_factor(report.gradient_norm) / report.weight,
            parameter_names=[entry.name for entry in self._model.parameter_entries],
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

    def bind(self, model: ShardedModelBase) -> None:
        """Make state for ``model``; one optimizer trains one model until `reset`.

        Raises
        ------
        TypeError
            For a model that is not sharded.
        ShardingError
            For another strategy or backend than this one's, or a second model.
        """
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
        if self._model is not None:
            raise ShardingError(
                "this optimizer holds the state of another model; use an optimizer per model, or "
                "reset() to forget the state"
            )
        entries = model.parameter_entries
        check_patterns(self._optimizer.parameter_options, [e.name for e in entries])
        if model.engine.policy.shards_state:
            self._owners = {"sum_over_owners": self.backend.all_reduce}
        self._segments = tuple(segments_of(entries, p) for p in model.engine.updated_pieces)
        self._state = model.optimizer_state(self._optimizer.needed_state())
        self._model = model

    def optimize(self, input_data: OptimizationInputData) -> OptimizationResult:
        """Train: epochs of shuffled global batches dealt over the ranks. Collective.

        Validation, history, progress on rank 0, checkpoints and resume as ``input_data`` says.
        A plain model is wrapped in this optimizer's strategy; ``result.model`` is the wrapper.

        Raises
        ------
        TypeError, ValueError
            For input that cannot be trained, before anything is communicated or written.
        """
        if not isinstance(input_data, OptimizationInputData):
            raise TypeError(
                f"optimize needs an OptimizationInputData, got {type(input_data).__name__}"
            )
        input_data.check()
        model = input_data.model
        if not isinstance(model, ShardedModelBase):
            model = self.model_class(model, self._config)
        self.bind(model)
        return train(self, model, input_data)

    # ------------------------------------------------------------------------------- checkpoints

    def checkpoint_view(self, model: ShardedModelBase) -> _StateView:
        """The state of ``model`` in the form that checkpoints read and write."""
        self.bind(model)
        return _StateView(self, model)

    @property
    def state(self) -> Mapping[str, Array]:
        """The rank's state vectors, by name; each as long as what the rank updates."""
        return self._state


@dataclass(frozen=True, slots=True)
class _StateView:
    """A model's optimizer state as a checkpoint sees it: ranges of the flat vector."""

    optimizer: ShardedOptimizerBase
    model: ShardedModelBase

    @property
    def checkpoint_backend(self) -> CommunicationBackend:
        return self.model.backend

    @property
    def checkpoint_dtype(self) -> Any:
        return self.model.dtype

    def checkpoint_parameters(self) -> Sequence[ParameterEntry]:
        return self.model.checkpoint_parameters()

    @property
    def _prefix(self) -> str:
        # The rule's name is part of the kind, so that another rule's state is refused unread.
        return f"{_PREFIX}{type(self.optimizer.wrapped_optimizer).__name__}/"

    def arrays_to_write(self) -> Mapping[str, Sequence[tuple[int, Array]]]:
        return self._ranges(self.model.engine.state_pieces_to_write)

    def arrays_to_read(self) -> Mapping[str, Sequence[tuple[int, Array]]]:
        return self._ranges(self.model.engine.updated_pieces)

    def _ranges(self, pieces: Sequence[Piece]) -> Mapping[str, Sequence[tuple[int, Array]]]:
        return {
            self._prefix + name: [(p.start, vector[p.in_shard]) for p in pieces]
            for name, vector in self.optimizer.state.items()
        }

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        return {
            "settings": self.optimizer.wrapped_optimizer.fingerprint(),
            "optimizer_steps": self.optimizer.steps,
        }

    def restored(self, metadata: Mapping[str, Any]) -> None:
        saved = metadata["settings"]
        changed = [
            f"{name} was {saved.get(name)} and is {value}"
            for name, value in self.optimizer.wrapped_optimizer.fingerprint().items()
            if saved.get(name) != value
        ]
        if changed and self.model.rank == 0:
            _log.warning("the optimizer goes on with other settings: %s", "; ".join(changed))
        self.optimizer._steps = int(metadata["optimizer_steps"])
        self.model.engine.step_number = self.optimizer.steps
