"""The training loop: epochs, evaluations, early stopping, checkpoints, resume."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from mpishard import checkpoint
from mpishard.base import CheckpointError, MissingInterfaceError
from mpishard.callbacks import EarlyStopping, JSONLines, ProgressLine, Record, Run, names_of
from mpishard.communication import same_outcome
from mpishard.data import Batches, RankBatch
from mpishard.models import ShardedModelBase
from mpishard.nn import LinearModel
from mpishard.observe import MetricsWriter
from mpishard.optimizers import ShardedOptimizerBase
from mpishard.sharding import refuse_line_search
from mpishard.training.agreement import require_agreement
from mpishard.training.data import OptimizationInputData
from mpishard.training.evaluation import DatasetResult, evaluate
from mpishard.training.result import FitDetectionResult, OptimizationResult
from mpishard.training.run_state import BestParameters, UserState
from mpishard.training.saving import (
    LOOP,
    RunCheckpoints,
    check_position,
    checkpoint_to_resume,
)

_log = logging.getLogger("mpishard")


class TrainingRun:
    """One run: its position, and its results so far.

    An evaluation is a pass over the validation data or, without such data, the end of an epoch.
    Evaluations at multiples of ``validate_every`` are part of the run and of its checkpoints. One
    more, at the end of a run that stops between them, is not: so a run that continues is the same
    as one that was never interrupted.

    Every rank makes a `TrainingRun`, and nothing is trained until `run`. Both are collective.

    Parameters
    ----------
    optimizer : ShardedOptimizerBase
        The optimizer, bound to the model.
    model : ShardedModelBase
        The model.
    data : OptimizationInputData
        The data and choices, checked.
    lengths : dict of str to list of int
        The result of `refuse_early`.

    Raises
    ------
    TypeError, ValueError, OSError
        On every rank, if the ranks ask for different training, there is nothing to resume from,
        the first or the last update has no learning rate, or the metrics cannot be written.
    """

    def __init__(
        self,
        optimizer: ShardedOptimizerBase,
        model: ShardedModelBase,
        data: OptimizationInputData,
        lengths: dict[str, list[int]],
    ) -> None:
        self.optimizer = optimizer
        self.model = model
        self.data = data
        # By data rank: ranks that compute one batch together count once.
        self.lengths = {
            part: _by_data_rank(model, given, f"x_{part}") for part, given in lengths.items()
        }
        self.sampler = data.sampler(self.lengths["train"], model.gradient_leaves)
        self.order = data.order_of_samples(self.lengths["train"])
        per_epoch = self.sampler.batches_per_epoch
        if optimizer.wrapped_optimizer.searches and per_epoch > 1:
            refuse_line_search(
                type(optimizer.wrapped_optimizer).__name__,
                f"batch_size {data.batch_size} cuts an epoch into {per_epoch}",
                "set batch_size to the number of samples or more",
            )
        epochs = None if data.epochs is None else data.epochs * per_epoch
        self.total = min((n for n in (epochs, data.max_steps) if n is not None), default=per_epoch)
        self.validate_every = data.validate_every or per_epoch
        self.result = OptimizationResult(model)
        self.step = 0
        self.epoch_sums = np.zeros(2)  # loss sum and weight of the epoch under way
        self.stopping = EarlyStopping(data.patience, data.tolerance)
        self.best = BestParameters(model) if data.keeps_best else None
        self.latest: tuple[int, DatasetResult] | None = None  # evaluation of this run
        self.has_found_no_replicas = False
        self.batches: Batches
        self.started = 0.0
        # Before anything is written or resumed: all ranks must refuse a run on which they differ.
        require_agreement(optimizer, model, data, self.order)
        states = {
            f"callback {name}": callback
            for name, callback in zip(names_of(data.callbacks), data.callbacks, strict=True)
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
        }
        # Callbacks with a state are saved and resumed as the user's own objects are.
        self.user_state = UserState({**(data.user_state or {}), **states}, model.backend)
        self.checkpoints = None
        if data.checkpoint is not None:
            self.checkpoints = RunCheckpoints(
                data,
                model.backend,
                optimizer.allowed_ranks,
                lambda folder: self.hooks.call(
                    "on_checkpoint", replace(self.record, step=self.step, checkpoint=folder)
                ),
            )
        own = None if self.checkpoints is None else self.checkpoints.folder
        resumed = checkpoint_to_resume(data, model.backend, own)
        if resumed is not None:
            self._resume(resumed)
        self.record = Record(self.step)
        self.hooks = self._hooks()
        if self.step < self.total:
            with same_outcome(model.backend):  # a schedule may be a table, and too short
                # The last step is checked too, so that a run of days does not fail at its end.
                last = optimizer.steps + self.total - self.step - 1
                for step in (optimizer.steps, last):
                    optimizer.wrapped_optimizer.checked_rate(step)
                if self.checkpoints is not None and not self.stopping.is_exhausted:
                    self.checkpoints.require_access()
        if data.metrics is not None:
            with same_outcome(model.backend):
                if model.rank == 0:
                    MetricsWriter(Path(data.metrics)).close()  # fails here, if at all

    def _hooks(self) -> Run:
        data, model = self.data, self.model
        callbacks = [*data.callbacks, self.stopping]
        if model.rank == 0:  # these come last: they write the values that other callbacks log
            callbacks += [JSONLines(data.metrics)] if data.metrics is not None else []
            callbacks += [ProgressLine()] if data.progress else []
        hooks = Run(
            callbacks,
            model.backend,
            model=model,
            total_steps=self.total,
            unit=data.throughput_unit,
            can_save=data.checkpoint is not None,
        )
        if data.epochs is not None and data.max_steps is not None:
            # Users who give both may confuse them: the log names the one that ends the run.
            per_epoch = self.sampler.batches_per_epoch
            steps = data.epochs * per_epoch
            ends = "max_steps" if data.max_steps < steps else "epochs"
            hooks.announcement = (
                f"training for {self.total} steps: {data.epochs} epoch{'s' * (data.epochs != 1)} "
                f"= {steps} steps, max_steps = {data.max_steps}; {ends} ends first"
            )
        return hooks

    def run(self) -> OptimizationResult:
        """Train; every rank returns the same result. Collective."""
        is_root = self.model.rank == 0
        if is_root and not self.model.engine.knows_loss:
            _log.warning(
                "%s computes no loss, so that all losses of this run are NaN: give it "
                "compute_loss_and_gradients, or a default_loss_function",
                type(self.model.wrapped_model).__name__,
            )
        self.started = time.perf_counter()
        # A run that is resumed after it had stopped early makes no further step.
        ends = self.stopping.is_exhausted
        if self.checkpoints is not None and self.step < self.total and not ends:
            self.checkpoints.reserve(self.model, self.optimizer, keeps_best=self.best is not None)
        hooks, data = self.hooks, self.data
        with ExitStack() as stack:
            hooks.enter(stack)
            if data.callbacks:  # on all ranks
                self.model.engine.round.requests = hooks.requests
                stack.callback(setattr, self.model.engine.round, "requests", None)
            hooks.call("on_start", self.record)
            self.batches = stack.enter_context(
                Batches(
                    data.x_train,
                    data.y_train,
                    self.sampler,
                    self.model.data_rank,
                    self.model.data_size,
                    steps=range(self.step, self.total),
                    # A batch read ahead would draw from the user's generators too early: before the
                    # checkpoint of an earlier step.
                    ahead=not data.user_state,
                )
            )
            following = iter(self.batches)
            with nullcontext() if self.checkpoints is None else self.checkpoints.running():
                while self.step < self.total and not ends:
                    ends = self._one_step(following)
            self.optimizer.settle()
            self._end(stopped=ends and self.step < self.total)
            hooks.call("on_stop", self.record)
        # Without the evaluations of the end, which are no training.
        self.result.seconds = time.perf_counter() - self.started
        self._conclude()
        return self.result

    # ------------------------------------------------------------------------------------- steps

    def _one_step(self, following: Iterator[RankBatch]) -> bool:
        """Make an update and the work due after it; return whether the run stops early."""
        data, model = self.data, self.model
        epoch, index = divmod(self.step, self.sampler.batches_per_epoch)
        began = time.perf_counter()
        batch = next(following)
        # Before the step, which counts itself.
        rate = self.optimizer.get_current_learning_rate()
        report = self.optimizer.step_report(
            model, batch.x, batch.y, sample_start=batch.sample_start
        )
        self.step += 1
        self.result.loss_history.append(report.loss)
        self.result.weight += report.weight
        self.epoch_sums += report.loss * report.weight, report.weight
        stops, saves = self.hooks.requests.take() if data.callbacks else (False, False)
        # Without listeners no record is made: the memory in it is a sum over a ledger.
        if self.hooks.listens_to_steps:
            now = time.perf_counter()
            self.record = Record(
                self.step,
                epoch,
                report.loss,
                report.weight,
                rate,
                report.gradient_norm,
                now - self.started,
                now - began,
                model.memory.total,
            )
            self.hooks.call("on_step", self.record)
        if data.digest_every is not None and self.step % data.digest_every == 0:
            self._compare_replicas()
        score = None
        if index + 1 == self.sampler.batches_per_epoch:
            # Without validation data early stopping judges the training loss of each epoch.
            score = self._finish_epoch()
            self.epoch_sums[:] = 0
        if data.x_validation is not None:
            # With validation data early stopping ignores the training loss.
            score = self._validate() if self.step % self.validate_every == 0 else None
        ends = False
        if score is not None:
            self._report(score)
            asked_to = self.optimizer.should_early_stop()  # collective: every rank must ask
            ends = asked_to or self.stopping.is_exhausted
            if data.callbacks:  # requests of this evaluation are fulfilled before the next step
                requests = self.hooks.requests
                requests.exchanged(model.backend.all_reduce(np.array(requests.own)))
                at_once = requests.take()
                stops, saves = stops or at_once[0], saves or at_once[1]
        if stops and not ends and self.step < self.total:
            self.hooks.stopped(self.step)
        ends = ends or stops
        if self.checkpoints is not None:
            self._save_if_due(self.checkpoints, saves or ends or self.step == self.total)
        return ends

    def _compare_replicas(self) -> None:
        """Compare the copies of each parameter; warn once if there are none. Collective."""
        self.optimizer.settle()
        compared = self.model.check_replicas()
        if not compared and not self.has_found_no_replicas and self.model.rank == 0:
            _log.warning(
                "digest_every has no effect: no parameter has a copy on another rank (each "
                "rank stores its own pieces, or all ranks share the memory of a node)"
            )
        self.has_found_no_replicas = not compared

    def _save_if_due(self, checkpoints: RunCheckpoints, is_asked: bool) -> None:
        is_preempted = checkpoints.is_preempted()
        if is_preempted or checkpoints.is_due(self.step, is_last=is_asked):
            self.optimizer.settle()
            checkpoints.save(
                self.step, self.model, self.optimizer, self.best, {LOOP: self._position()}
            )
        else:
            # The ranks commit a save in the background together: they ask after each step.
            checkpoints.poll()
        if is_preempted:
            checkpoints.finish()
            self.hooks.call("on_stop", self.record)
            checkpoints.leave(self.step, self.total)

    def _finish_epoch(self) -> float | None:
        """Record the mean loss of the present epoch, unless its weight is 0."""
        total, weight = self.epoch_sums
        if not weight:
            return None
        self.result.fitness_history.append(float(total / weight))
        return self.result.fitness_history[-1]

    def _validate(self) -> float:
        self.optimizer.settle()
        found = self._evaluate("validation")
        loss = found.stats["loss"]
        self.latest = self.step, found
        self.model.engine.record.validation_score = loss
        self.result.validation_history.append((self.step, loss))
        return loss

    def _report(self, score: float) -> None:
        """Let the callbacks judge an evaluation, and keep the best parameters."""
        validation = {}
        if self.latest is not None and self.latest[0] == self.step:
            stats = self.latest[1].stats
            validation = {name: stats[name] for name in ("loss", "accuracy") if name in stats}
        # If no callback listens to steps, the record is that of an earlier one.
        self.record = replace(self.record, step=self.step)
        found = replace(self.record, score=score, validation=validation)
        self.hooks.call("on_evaluate", found)
        if self.best is not None and self.stopping.best_step == self.step:
            self.optimizer.settle()
            self.best.keep()

    # --------------------------------------------------------------------------------------- end

    def _end(self, *, stopped: bool) -> None:
        """Make the last evaluation, if the run ends between two of them. Collective."""
        partial = self._finish_epoch()
        history = self.result.validation_history
        has_validation = self.data.x_validation is not None
        if not has_validation:
            if partial is not None:
                self._report(partial)
        elif not history or history[-1][0] != self.step:
            self._report(self._validate())
        self.result.iterations = self.step
        self.result.stopped_early = stopped
        if stopped:
            best, found = self.stopping, ""
            if best.best_step is not None:
                kind = "validation" if has_validation else "training"
                found = f": best {kind} loss {best.best_score:.4f} after step {best.best_step}"
            self.hooks.ending = f"stopped early after step {self.step} of {self.total}{found}"

    def _conclude(self) -> None:
        """Put the best solution back, and measure it. Collective."""
        data, result, stopping = self.data, self.result, self.stopping
        result.best_fitness_score = stopping.best_score
        result.best_iteration = stopping.best_step
        solution_step = self.step
        # After the best step the present parameters are the best ones.
        if self.best is not None and stopping.best_step not in (None, self.step):
            self.best.put_back()
            solution_step = stopping.best_step
        result.training_result = DatasetResult(data.x_train, data.y_train)
        if data.training_statistics:
            result.training_result = self._evaluate("train", at_end=True)
        if data.x_validation is not None:
            # The same parameters are not evaluated twice.
            if data.predictions or self.latest is None or self.latest[0] != solution_step:
                result.validation_result = self._evaluate("validation", at_end=True)
            else:
                result.validation_result = self.latest[1]
        if data.x_test is not None:
            result.test_result = self._evaluate("test", at_end=True)
        if result.validation_result is not None:
            epochs = max(1, -(-solution_step // self.sampler.batches_per_epoch))
            history = result.fitness_history[:epochs]
            training_loss = result.training_result.stats.get("loss")
            if training_loss is None:
                training_loss = history[-1] if history else float("nan")
            result.fit_detection_result = FitDetectionResult.detect(
                training_loss, result.validation_result.stats["loss"], history
            )
        plain = self.model.wrapped_model
        ask = getattr(plain, "get_active_feature_indices", None)
        try:
            indices = None if ask is None else sorted(int(index) for index in ask())
        except MissingInterfaceError:
            indices = None
        if indices is None:
            return  # the model does not know which features it uses
        result.selected_feature_indices = indices
        if isinstance(plain, LinearModel):
            result.selected_features = [plain.feature_names[index] for index in indices]
            with self.model.unsharded() as whole:
                result.best_intercept = whole.intercept

    def _evaluate(self, part: str, *, at_end: bool = False) -> DatasetResult:
        """Measure the model on one of the data sets. Collective."""
        data = self.data
        x, y = getattr(data, f"x_{part}"), getattr(data, f"y_{part}")
        sampler = data.sampler(self.lengths[part], self.model.gradient_leaves, part)
        self.batches.await_read()  # one thread of a rank reads at a time
        return evaluate(
            self.model, x, y, sampler, keep_predictions=at_end and data.predictions, part=part
        )

    # --------------------------------------------------------------------------------- positions

    def _position(self) -> dict[str, object]:
        """Return the run's position, and the choices that determine its order. Collective."""
        return {
            "step": self.step,
            "epoch_sums": self.epoch_sums.tolist(),
            "fitness_history": self.result.fitness_history,
            "validation_history": self.result.validation_history,
            "stopping": self.stopping.state_dict(),
            "order": self.order,
            "user_state": self.user_state.position(),
        }

    def _resume(self, path: Path) -> None:
        holds_best = check_position(path, self.model.backend, self.order, self.user_state)
        kept = self.best if holds_best else None
        try:
            with same_outcome(self.model.backend):  # of an optimizer whose options do not fit
                states = checkpoint.states_of(self.model, self.optimizer, kept)
            position = checkpoint.load_states(path, self.model, states)[LOOP]
        except CheckpointError as error:  # most often after a change of the model
            error.add_note(
                "The run was to continue there. For a new run choose another folder, or pass "
                "resume=False"
            )
            raise
        with same_outcome(self.model.backend):  # the user's own code may fail on one rank alone
            self.user_state.restore(position["user_state"], path)
        self.step = int(position["step"])
        self.epoch_sums[:] = position["epoch_sums"]
        self.result.fitness_history = list(position["fitness_history"])
        self.result.validation_history = [(s, float(v)) for s, v in position["validation_history"]]
        # A best score is of no use without its parameters: without them stopping begins anew.
        if self.best is None or holds_best:
            self.stopping.load_state_dict(position["stopping"])
        if self.model.rank == 0:
            if self.step < self.total:
                _log.info("resuming after step %d of %d from %s", self.step, self.total, path)
            else:
                _log.warning(
                    "%s is the end of a run of %d steps, and this run asks for %d: there is "
                    "nothing to do. For a new run choose another folder, or pass resume=False",
                    path,
                    self.step,
                    self.total,
                )


def _by_data_rank(model: ShardedModelBase, given: Sequence[int], name: str) -> list[int]:
    """Return the number of samples of each data rank, from those of all ranks."""
    found: dict[int, tuple[int, int]] = {}
    for rank, length in enumerate(given):
        first, expected = found.setdefault(model.data_rank_of(rank), (rank, length))
        if length != expected:
            raise ValueError(
                f"ranks {first} and {rank} compute one batch together and need the same data, "
                f"but {name} has {expected} samples on rank {first} and {length} on rank {rank}. "
                "Choose a rank's data by the model's data_rank, not by rank"
            )
    return [found[data][1] for data in range(model.data_size)]
