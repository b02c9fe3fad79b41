"""The training loop's place in a sharded optimizer."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from mpishard.arrays import Array
from mpishard.checkpoint.format.consensus import together
from mpishard.communication import ReductionOperation
from mpishard.errors import CommunicationError, NonFiniteLossError, NoSampleError, ShardingError
from mpishard.models import ShardedModelBase
from mpishard.models.engine.update import StepReport
from mpishard.optimizers.loop.agreement import refuse_early
from mpishard.optimizers.loop.data import OptimizationInputData
from mpishard.optimizers.loop.loop import TrainingRun
from mpishard.optimizers.loop.result import OptimizationResult
from mpishard.optimizers.sharded.files import ShardedOptimizerFiles
from mpishard.sharding import ShardingConfiguration

__all__ = ["ShardedTraining"]


class ShardedTraining(ShardedOptimizerFiles):
    """`optimize`, with plain and with sharded models, and what ends it early."""

    model_class: ClassVar[type[ShardedModelBase]]

    _config: ShardingConfiguration
    _given_model: Any
    _model_options: dict[str, Any]

    @property
    @abstractmethod
    def steps(self) -> int:
        """Updates made so far."""

    @abstractmethod
    def get_current_learning_rate(self) -> float:
        """The rate of the next update."""

    @abstractmethod
    def step_report(
        self, model: ShardedModelBase, x: Array, y: Array, *, sample_start: int | None = None
    ) -> StepReport:
        """One synchronised update. Collective."""

    @abstractmethod
    def _forget_model(self) -> None:
        """Forget the bound model, its state and the step count."""

    @abstractmethod
    def _check_rule(self, model: ShardedModelBase) -> None:
        """Refuse a rule that does not fit the model. Communicates nothing."""

    @property
    def model(self) -> ShardedModelBase | None:
        """The wrapper whose state this optimizer holds; None before the first step."""
        return self._model

    @property
    def _data_size(self) -> int:
        """Among how many ranks, or groups of ranks, a model that is wrapped here deals batches."""
        return self._config.communication_backend.world_size

    def set_model(self, model: Any) -> None:
        """Name the model, plain or sharded, that `optimize` trains where its data has none.

        Raises
        ------
        TypeError
            For None.
        """
        if model is None:
            raise TypeError("set_model needs a model, got None")
        self._given_model = model

    def should_early_stop(self) -> bool:
        """Whether any rank wants training to end now. Collective.

        Each rank asks its ``wrapped_optimizer.should_early_stop()``, which a subclass of a rule
        may override; where one says yes, all stop. `optimize` asks at every evaluation.
        """
        mine = np.array([int(bool(self._optimizer.should_early_stop()))])
        return bool(self.backend.all_reduce(mine, ReductionOperation.MAX)[0])

    def optimize(self, input_data: OptimizationInputData) -> OptimizationResult:
        """Train: epochs of shuffled global batches dealt over the ranks. Collective.

        Validation, history, progress on rank 0, checkpoints and resume as ``input_data`` says.
        A rule made ``from_options`` brings an end of training with it.

        A plain model is wrapped in this optimizer's strategy: ``result.model`` is the wrapper, and
        holds the parameters. The same plain model, passed again, goes on with its wrapper. Where
        training is refused before the first update the plain model has its parameters back; where
        one rank alone fails, as in a loss of the user's, `model` is the wrapper that holds them.

        Raises
        ------
        TypeError, ValueError
            For input that cannot be trained, before anything is communicated or written.
        ShardingError
            For a second model, or one of another strategy or backend; inside ``accumulate()``,
            and before the step that ends its round.
        """
        data = self._checked(input_data)
        bound = self._model
        if bound is not None and data.model is bound.wrapped_model:
            data = replace(data, model=bound)
        if not isinstance(data.model, ShardedModelBase):
            return self._optimize_plain(data)
        model = data.model
        if model.engine.round.accumulates:
            raise ShardingError(
                "optimize inside accumulate() would add to a round and update nothing; call it "
                "after the with block, and after the step that ends the round"
            )
        model.engine.round.require_none("optimize")
        self.bind(model)
        lengths = refuse_early(model, self._config, data, model.data_size)
        return TrainingRun(self, model, data, lengths).run()

    def _checked(self, data: OptimizationInputData) -> OptimizationInputData:
        if not isinstance(data, OptimizationInputData):
            raise TypeError(f"optimize needs an OptimizationInputData, got {type(data).__name__}")
        if data.model is None:
            data = replace(data, model=self._given_model)
        data = data.checked()
        config = (
            data.model.sharding_configuration
            if isinstance(data.model, ShardedModelBase)
            else self._config
        )
        if not config.auto_sync_gradients:
            raise ValueError(
                "optimize reports one loss and one solution, and with auto_sync_gradients=False "
                "each rank has its own: call step() in a loop, and synchronize_gradients() on the "
                "model, or set auto_sync_gradients=True"
            )
        options = self._optimizer.algorithm_options
        return data if options is None else options.applied(data)

    def _optimize_plain(self, data: OptimizationInputData) -> OptimizationResult:
        """Train a plain model in a wrapper, which ends here where no update was made."""
        self._refuse_second_model()
        self.backend.initialize()
        lengths = refuse_early(data.model, self._config, data, self._data_size)
        model = self.model_class(data.model, self._config, **self._model_options)
        awaiting = self._awaiting
        run = None
        # What every rank raises, where one does: giving parameters back needs them all.
        common: tuple[type[Exception], ...] = (Exception,)
        try:
            with together(self.backend):
                self._check_rule(model)
            common = (ValueError,)
            self.bind(model)
            common = (Exception,)
            run = TrainingRun(self, model, data, lengths)
            common = (NonFiniteLossError, NoSampleError, ShardingError)
            return run.run()
        except CommunicationError:  # the parameters cannot be gathered any more
            raise
        except Exception as error:
            if isinstance(error, common) and (run is None or not run.has_updated):
                self._forget_model()
                self._awaiting = awaiting
                model.release()
            elif self._model is not None:
                error.add_note(
                    "The plain model's parameters are held by its wrapper, which is the "
                    "optimizer's `model`: where every rank calls optimizer.model.release(), the "
                    "plain model has them back"
                )
            raise

    def _refuse_second_model(self) -> None:
        if self._model is not None:
            raise ShardingError(
                "this optimizer holds the state of another model; use an optimizer per model, or "
                "reset() to forget the state"
            )

    # ------------------------------------------------------------------ members of the plain ones

    def update_parameters(self, parameters: Any, gradients: Any) -> Any:
        """Nothing: the state belongs to a model's shards, so there is none for a vector.

        Raises
        ------
        NotImplementedError
            Always, naming what does it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} keeps its state for the pieces of a sharded model, not for "
            "vectors: use apply_gradients(gradients, model), or "
            "wrapped_optimizer.update_parameters, whose state is its own"
        )

    def reverse_update(self, updated: Array, gradients: Array) -> Array:
        """Nothing: no rank keeps the state from before an update.

        Raises
        ------
        NotImplementedError
            Always, naming what does it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} keeps no copy of the state from before an update: save a "
            "checkpoint before it, or use wrapped_optimizer.reverse_update, whose state is its own"
        )
