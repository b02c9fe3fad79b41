"""The surface that every sharded optimizer shows."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.base import (
    Array,
    CommunicationError,
    Data,
    Document,
    NonFiniteLossError,
    NoSampleError,
    ShardingError,
    check_path,
    require_type,
)
from mpishard.base.mirrored import ShardedOptimizerMembers
from mpishard.checkpoint import load_states, save_states
from mpishard.communication import (
    CommunicationBackend,
    ReductionOperation,
    differences,
    same_outcome,
)
from mpishard.contracts import (
    PathLike,
)
from mpishard.models import Engine, ShardedModelBase, StepReport, agreed_vector
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.state import ModelState, require_searchable
from mpishard.optimizers.sharded.state_bytes import StateBytes
from mpishard.sharding import (
    ShardingConfiguration,
    refuse_line_search,
    refuse_updates_alone,
)

if TYPE_CHECKING:
    from mpishard.training import OptimizationInputData, OptimizationResult


class ShardedOptimizerBase(ShardedOptimizerMembers):
    """An update rule that runs on the parameters of each rank, with the state that belongs to them.

    The model wrapper owns the policy and the collectives. The optimizer owns the rule, its state,
    the schedule, clipping and the training loop. State is made for a model at its first step.

    Every strategy can read, at any world size, the state that another one wrote at another.
    `save_state` and `load_state` do with a stream what `serialize` and `deserialize` do with bytes;
    each rank has a stream of its own.

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
        For an optimizer that does not update by gradients.
    """

    model_class: type[ShardedModelBase]
    _refused: Mapping[str, str] = MappingProxyType({})  # members not offered, and the reasons
    _setting_names: tuple[str, ...] = ()  # those besides the rule's, which all ranks must share
    _lasting_settings: tuple[str, ...] = ()  # those in the bytes of `serialize`, which must fit
    allowed_ranks = 1, sys.maxsize
    """The fewest and the most ranks that may continue a run of `optimize`."""

    def __init__(self, wrapped_optimizer: Optimizer, config: ShardingConfiguration) -> None:
        rule: object = wrapped_optimizer  # users pass other objects, too
        kind = type(rule).__name__
        if isinstance(rule, ShardedOptimizerBase):
            raise TypeError(f"wrapped_optimizer is sharded already, as {kind}")
        if not isinstance(rule, Optimizer):
            if hasattr(rule, "optimize") and not hasattr(rule, "apply_gradients"):
                raise ValueError(
                    f"{type(self).__name__} updates by reduced gradients, and {kind} is not "
                    "gradient based (IGradientBasedOptimizer): wrap one of mpishard.optimizers"
                )
            raise TypeError(
                f"wrapped_optimizer must be an optimizer of mpishard.optimizers, got {kind}"
            )
        require_type("config", config, ShardingConfiguration)
        self._rule = rule
        self._config = config
        self._model_options: dict[str, Any] = {}  # for a plain model that `optimize` wraps
        self._given_model: object = None
        self._state: ModelState | None = None  # None before the first step
        self._awaiting: StateBytes | None = None  # given to `deserialize` before the first step

    def __setattr__(self, name: str, value: object) -> None:
        rule = self.__dict__.get("_rule")
        if rule is not None and name in rule.checks:  # a value set here would never be read
            raise AttributeError(
                f"{type(self).__name__} has no {name} of its own: set that of its rule, "
                f"optimizer.wrapped_optimizer.{name} = {value!r}"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        rate, ranks = self.get_current_learning_rate(), self.world_size
        return (
            f"{type(self).__name__}({type(self._rule).__name__}, learning rate {rate:g}, {ranks} "
            f"rank{'s' * (ranks != 1)}, {self.steps} update{'s' * (self.steps != 1)})"
        )

    @property
    def wrapped_optimizer(self) -> Optimizer:
        """The user's optimizer."""
        return self._rule

    @property
    def sharding_configuration(self) -> ShardingConfiguration:
        """The `ShardingConfiguration` of this optimizer."""
        return self._config

    @property
    def backend(self) -> CommunicationBackend:
        """The communication backend of this rank."""
        return self._config.communication_backend

    @property
    def rank(self) -> int:
        """The rank of this process or thread."""
        return self.backend.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.backend.world_size

    @property
    def steps(self) -> int:
        """Number of updates so far."""
        return 0 if self._state is None else self._state.steps

    @property
    def model(self) -> ShardedModelBase | None:
        """The wrapper whose state this optimizer holds; None before the first step."""
        return None if self._state is None else self._state.model

    @property
    def _subject(self) -> int:
        """The number of `model` in collectives."""
        return 0 if self._state is None else self._state.model.engine.layout.subject

    @property
    def state(self) -> Mapping[str, Array]:
        """The rank's state vectors by name, each as long as the part that the rank updates."""
        return {} if self._state is None else self._state.vectors

    def _settings(self) -> Document:
        return {name: getattr(self, name) for name in self._setting_names}

    def get_current_learning_rate(self) -> float:
        """Return the rate of the next update."""
        return self._rule.rate_of_step(self.steps)

    def set_model(self, model: object) -> None:
        """Name the model, plain or sharded, that `optimize` trains if its data has none.

        Raises
        ------
        TypeError
            For None.
        """
        if model is None:
            raise TypeError("set_model needs a model, got None")
        self._given_model = model

    def reset(self) -> None:
        """Forget state and step count; the next step begins with new state, with any model."""
        # The rule may have trained by itself before it was wrapped.
        self._rule.reset()
        self._forget_model()
        self._awaiting = None

    def _forget_model(self) -> None:
        state, self._state = self._state, None
        # The gradients go back to the store that the model's strategy chose, unless the model is
        # closed and has none.
        if state is not None and state.keeps_gradients and isinstance(state.engine, Engine):
            state.engine.use_passes(None)

    # -------------------------------------------------------------------------------------- steps

    def step(self, model: ShardedModelBase, x: Array, y: Array) -> float:
        """Make one synchronised update on this rank's batch. Collective.

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
        self,
        model: ShardedModelBase,
        x: Data,
        y: Data,
        *,
        sample_start: int | None = None,
    ) -> StepReport:
        """Make a step; return the loss, its weight and the gradient's norm. Collective.

        ``sample_start`` is the index in the global batch of this rank's first sample. Without it
        the ranks of a model with dropout exchange their numbers of samples.
        """
        # `bind` of a new model is collective: a rank refuses its batch before the others wait.
        if model is not self.model:
            self._require_model_of_this_kind(model)
            model.engine.program.check_pair(x, y, model.engine.loss)
        if self._rule.searches and model.engine.round.accumulates:
            refuse_line_search(
                type(self._rule).__name__,
                "accumulate() keeps no batch",
                "give step the whole batch, outside of accumulate()",
            )
        state = self.bind(model)
        # A step that fails has overwritten the gradient of the one before it.
        state.last_gradient = None
        report = state.step(x, y, sample_start)
        if report.gradient_norm is not None:
            state.last_gradient = report.divisor, model.engine.gradient_identity
        return report

    def settle(self) -> None:
        """Make all replicas equal, before the model is evaluated or saved. Collective.

        Steps of most optimizers keep them equal, and then nothing is done.
        """
        if self._state is not None:
            self._state.settle()

    def apply_gradients(self, gradients: Array, model: ShardedModelBase) -> None:
        """Make one update with a given gradient of the mean loss. Collective.

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
            On every rank, if the gradient is not finite and that is not allowed.
        NotImplementedError
            For a rule that searches along a line, and for an optimizer whose ranks have no
            gradient in common, or get it late.
        """
        self._require_offered("apply_gradients")
        self._require_model_of_this_kind(model)
        if self._rule.searches:
            raise NotImplementedError(
                f"{type(self._rule).__name__} needs the loss at several points, not only one "
                "gradient: use step, optimize or mpishard.minimize"
            )
        # Compared between ranks first: each takes its pieces of its own vector.
        vector = agreed_vector(model.engine, gradients, "apply_gradients")
        state = self.bind(model)
        state.last_gradient = None
        model.engine.update(state.update, model.engine.given(vector))

    @property
    def last_computed_gradients(self) -> Array:
        """The rank's part of the last step's gradient, its pieces end to end; a copy.

        It is the mean over the samples of all ranks, before clipping. The pieces are those that
        the rank owns of each unit, even if parameters are replicated. They are read where the step
        left them, so they are available until the model computes another gradient.

        Raises
        ------
        ShardingError
            If another call has changed the parameters or the gradient since this optimizer's last
            `step`, or if there was none.
        NotImplementedError
            For an optimizer whose steps make no such gradient.
        """
        self._require_offered("last_computed_gradients")
        mean = None if self._state is None else self._state.mean_gradient()
        if mean is None:
            raise ShardingError(
                "the gradient of the last step is not available: it exists after step, until any "
                "optimizer begins another step or the model's parameters change"
            )
        return mean

    # -------------------------------------------------------------------------------------- state

    def bind(self, model: ShardedModelBase) -> ModelState:
        """Return the state of ``model``, made at the first call. Collective.

        One optimizer trains one model until `reset`.

        Raises
        ------
        TypeError
            For a model that is not sharded.
        ShardingError
            For another strategy or backend than this one's, or a second model.
        ValueError
            For a pattern of ``parameter_options`` that matches nothing, or a configuration that
            the strategy cannot step with; if other parameters than before are to be frozen; on
            every rank, if their rules differ. Nothing has changed then.
        """
        state = self._state
        if state is not None and model is state.model:
            # In each step, because options may have been set since the last one.
            state.require_same_frozen()
            return state
        self._require_model_of_this_kind(model)
        frozen = self._frozen_of(model)
        # Without it each rank trains a replica of its own, and its rule may differ.
        if model.sharding_configuration.auto_sync_gradients:
            mine = {**self._fingerprint(), "frozen": sorted(frozen)}
            if found := differences(self.backend, mine):
                raise ValueError(f"every rank must train with the same optimizer; by rank, {found}")
        self._state = state = self._make_state(model, frozen)
        if self._awaiting is not None:
            saved, self._awaiting = self._awaiting, None
            state.take(saved)
        return state

    def _require_offered(self, member: str) -> None:
        if reason := self._refused.get(member):
            raise NotImplementedError(f"{type(self).__name__}.{member}: {reason}")

    def _fingerprint(self) -> dict[str, object]:
        """Return the settings that all ranks must share, for JSON."""
        return {**self._rule.fingerprint(), **self._settings()}

    def _make_state(self, model: ShardedModelBase, frozen: frozenset[str]) -> ModelState:
        """Return new state for ``model``."""
        return ModelState(self._rule, model, frozen)

    def _frozen_of(self, model: ShardedModelBase) -> frozenset[str]:
        """Return the frozen parameters, or refuse unfit options. Communicates nothing."""
        frozen = self._rule.checked_options.untrained(model.parameter_entries)
        if self._awaiting is not None:
            trained = [e for e in model.parameter_entries if e.name not in frozen]
            self._awaiting.require_fit(trained, model.dtype)
        return frozen

    def _require_model_of_this_kind(self, model: ShardedModelBase) -> None:
        """Refuse a model that this optimizer cannot train. Communicates nothing."""
        # Checked when it was bound; a step does not do it again.
        if model is self.model:
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
        # The very object: each backend counts its own collectives.
        if model.backend is not self.backend:
            names = [each.describe() for each in (model.backend, self.backend)]
            other = ", another object" if names[0] == names[1] else ""
            raise ShardingError(
                f"the model's backend, {names[0]}, is not the optimizer's, {names[1]}{other}; use "
                "one for both"
            )
        if model.engine.passes.user is not None:
            raise ShardingError(
                f"{model.engine.passes.user} trains this model, and keeps errors or sums of "
                "its gradients; call its reset() first"
            )
        if self._rule.searches:
            require_searchable(model, type(self._rule).__name__)
        self._refuse_second_model()
        self._require_fit(model)
        if not model.sharding_configuration.auto_sync_gradients:
            model.engine.replicas.require_drifting()

    def _require_fit(self, model: ShardedModelBase) -> None:
        """Refuse a model of the right strategy that this optimizer cannot train."""
        model.engine.replicas.require_one(type(self).__name__)

    def _refuse_second_model(self) -> None:
        if self._state is not None:
            raise ShardingError(
                "this optimizer holds the state of another model; use an optimizer per model, or "
                "reset() to forget the state"
            )

    @property
    def _with_equal_state(self) -> CommunicationBackend | None:
        """The ranks that have the same state; None if each has a part of its own."""
        return None if self.model_class.policy.shards_state else self.backend

    def synchronize_optimizer_state(self) -> None:
        """Give every rank rank 0's state. Collective.

        It is a repair: steps keep the states equal.

        Raises
        ------
        NotImplementedError
            If state is sharded: each part exists once, so there is nothing to make equal. Also for
            an `ElasticOptimizer`, which divides the state anew when the number of ranks changes.
        """
        self._require_offered("synchronize_optimizer_state")
        ranks = self._with_equal_state
        if ranks is None:
            raise NotImplementedError(
                f"{type(self).__name__} partitions the optimizer state: each rank holds a part "
                "that no other rank has, so there is nothing to synchronise"
            )
        # In the order in which every rank has made them.
        for vector in self.state.values():
            ranks.broadcast(vector, root=0, subject=self._subject)
        # Adam's bias corrections depend on the number of updates, too.
        own = np.array([self.steps])
        steps = int(self.backend.broadcast(own, root=0, subject=self._subject)[0])
        if self._state is not None:
            self._state.steps = steps

    # ----------------------------------------------------------------------------- bytes and files

    def serialize(self) -> bytes:
        """Return the state as equal bytes on all ranks, with settings and steps. Collective.

        They have what a checkpoint has of the optimizer. Every rank holds the whole state for this;
        `save_model` needs no more than the rank's part. Before the first step there are settings
        alone, or the state that waits for its model.

        Raises
        ------
        ShardingError
            On every rank, for a `LocalSGDOptimizer` whose replicas differ: call `settle` first.
        """
        saved = self._awaiting or StateBytes.fresh(self._rule)
        if self._state is not None:
            # Bound again, which refuses options that were set since and do not fit.
            saved = self.bind(self._state.model).gathered()
        settings = {**saved.metadata["settings"], **self._lasting()}
        return replace(saved, metadata={**saved.metadata, "settings": settings}).to_bytes()

    def _lasting(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self._lasting_settings}

    def deserialize(self, data: bytes) -> None:
        """Take state and step count from bytes of `serialize`, of any layout. Collective.

        Settings stay this optimizer's; if the rule's were others, rank 0 logs it. Before the first
        step the state waits for its model.

        Raises
        ------
        TypeError, ValueError
            For bytes that are not a state, or that of another rule or model, before anything is
            communicated; on every rank if the ranks were given different bytes.
        ShardingError
            For the bytes of an `ElasticOptimizer` with other bounds, if this is one.
        """
        saved = StateBytes.from_bytes(data)
        # Before the first step there is no state of a wrapper that could take more than the rule's.
        saved.require_rule(self._rule, alone=self._state is None)
        settings = saved.metadata["settings"]
        # Settings that the bytes do not have are not compared.
        wrong = [
            f"{name} {settings[name]}, here {value}"
            for name, value in self._lasting().items()
            if settings.get(name, value) != value
        ]
        if wrong:
            raise ShardingError(
                f"{type(self).__name__}: these bytes are of an optimizer with {', '.join(wrong)}; "
                "give both the same"
            )
        if self._state is not None:
            self._state.require_fit(saved)
        # Ranks with different bytes would train different models unnoticed.
        found = differences(self.backend, {"their checksum": zlib.crc32(data)}, self._subject)
        if found:
            raise ValueError(
                f"deserialize: the bytes differ between ranks, {found}; every rank must pass the "
                "same"
            )
        if self._state is None:
            self._awaiting = saved
        else:
            self._state.take(saved)

    def checkpoint_view(self, model: ShardedModelBase) -> ModelState:
        """Return the state of ``model`` in the form that checkpoints read and write."""
        return self.bind(model)

    def save_model(self, path: PathLike) -> None:
        """Write the state alone to a checkpoint directory. Collective; nothing is gathered.

        `mpishard.checkpoint.save` writes model and optimizer together. Before the first step there
        are settings alone.

        Raises
        ------
        ShardingError
            If a state that was loaded still waits for its model: call `bind` first.
        ValueError, CheckpointError
            As `mpishard.checkpoint.save`.
        """
        if self._awaiting is not None:
            raise ShardingError("the loaded state has no model yet: call bind(model) first")
        if self._state is not None:
            model = self._state.model
            save_states(path, model, {"optimizer": self.bind(model)})
            return
        check_path("the path of a checkpoint", path)
        StateBytes.fresh(self._rule).to_checkpoint(path, self.backend)

    def load_model(self, path: PathLike) -> None:
        """Take the state from a checkpoint of any world size and strategy. Collective.

        Before the first step, or `bind`, every rank reads the whole state, which waits for its
        model. State besides the rule's, such as that of replicas, is read after `bind` alone.

        Raises
        ------
        FileNotFoundError
            If there is no checkpoint.
        CheckpointError
            If it is torn, or of another rule or model; nothing has changed then.
        """
        if self._state is not None:
            model = self._state.model
            load_states(path, model, {"optimizer": self.bind(model)})
            return
        check_path("the path of a checkpoint", path)
        # Without a model no rank knows its part yet, so that each reads the whole.
        with same_outcome(self.backend):
            self._awaiting = StateBytes.from_checkpoint(path, self._rule)

    # ------------------------------------------------------------------------------------ training

    @property
    def _data_size(self) -> int:
        """Number of ranks, or groups of ranks, that share a batch of a model wrapped here."""
        return self.world_size

    def should_early_stop(self) -> bool:
        """Return whether any rank asks for training to end now. Collective.

        Each rank asks its ``wrapped_optimizer.should_early_stop()``, which a subclass of a rule
        may override. If one returns True, all stop. They also stop if a line search finds no lower
        value. `optimize` asks at every evaluation.
        """
        is_stuck = self._state is not None and "stuck" in self._state.numbers
        # Asked on every rank, because the answer of a user's rule may differ between ranks.
        asked = getattr(self._rule, "should_early_stop", None)
        mine = np.array([int(is_stuck or bool(asked is not None and asked()))])
        return bool(self.backend.all_reduce(mine, ReductionOperation.MAX)[0])

    def optimize(self, input_data: OptimizationInputData) -> OptimizationResult:
        """Train: epochs of shuffled global batches, divided over the ranks. Collective.

        Validation, history, progress on rank 0, checkpoints and resume are as ``input_data`` says.
        A rule made ``from_options`` brings an end of training with it.

        A plain model is wrapped in this optimizer's strategy: ``result.model`` is the wrapper, and
        holds the parameters. If the same plain model is passed again, training continues with its
        wrapper. If training is refused before the first update, the plain model gets its parameters
        back. If only one rank fails, as in a loss of the user's, they stay in the wrapper, `model`.

        Raises
        ------
        TypeError, ValueError
            For input that cannot be trained, before anything is communicated or written.
        ShardingError
            For a second model, or one of another strategy or backend; inside ``accumulate()``,
            and before the step that ends its round.
        """
        from mpishard import training  # of a room above, which runs any sharded optimizer

        require_type("input_data", input_data, training.OptimizationInputData)
        data, bound = input_data.checked(self._given_model), self.model
        # An earlier call has wrapped the plain model, and the wrapper has its parameters: training
        # continues with the wrapper.
        if bound is not None and data.model is bound.wrapped_model:
            data = replace(data, model=bound)
        model = data.model
        is_wrapped = isinstance(model, ShardedModelBase)
        config = model.sharding_configuration if is_wrapped else self._config
        if not config.auto_sync_gradients:
            refuse_updates_alone(
                "optimize reports one loss and one solution",
                "call step() in a loop, and synchronize_gradients() on the model",
            )
        # Options that the rule was made from bring an end of training with them.
        if self._rule.algorithm_options is not None:
            data = self._rule.algorithm_options.applied(data)
        if not is_wrapped:
            return self._optimize_plain(data)
        if model.engine.round.accumulates:
            raise ShardingError(
                "optimize inside accumulate() would add to a round and update nothing; call it "
                "after the with block, and after the step that ends the round"
            )
        # The first batch of this run would end a round that was begun before.
        model.engine.round.require_none("optimize")
        self.bind(model)
        lengths = training.refuse_early(model, self._config, data, model.data_size)
        return training.TrainingRun(self, model, data, lengths).run()

    def _optimize_plain(self, data: OptimizationInputData) -> OptimizationResult:
        """Train a plain model in a wrapper, which ends here if no update was made."""
        from mpishard import training

        self._refuse_second_model()
        # The ranks refuse together, so that they must be connected before.
        self.backend.initialize()
        lengths = training.refuse_early(data.model, self._config, data, self._data_size)
        model = self.model_class(data.model, self._config, **self._model_options)
        # `bind` uses it up, and a refused run must leave it as it was.
        awaiting = self._awaiting
        run = None
        # The errors that every rank raises if one does: giving parameters back needs them all.
        common: tuple[type[Exception], ...] = (Exception,)
        try:
            with same_outcome(self.backend):
                self._frozen_of(model)
                self._rule.fingerprint()  # asks a user's attributes for their names
            common = (ValueError,)  # of rules that differ between the ranks
            self.bind(model)
            common = (Exception,)
            run = training.TrainingRun(self, model, data, lengths)
            # A user's code may raise any other error in a run, on one rank alone.
            common = (NonFiniteLossError, NoSampleError, ShardingError)
            return run.run()
        except CommunicationError:  # the parameters cannot be gathered any more
            raise
        except Exception as error:
            if isinstance(error, common) and (run is None or not run.result.loss_history):
                self._forget_model()
                self._awaiting = awaiting
                model.release()
            elif self._state is not None:
                error.add_note(
                    "The parameters of the plain model are in its wrapper, `optimizer.model`. To "
                    "get them back, call optimizer.model.release() on every rank"
                )
            raise
