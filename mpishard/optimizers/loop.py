"""The training loop: epochs, validation, history, checkpoints, resume."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard import checkpoint
from mpishard.checkpoint.consensus import gather_texts, share_text, together
from mpishard.checkpoint.writer import target_of
from mpishard.data import GlobalBatchSampler, take
from mpishard.models import ShardedModelBase
from mpishard.observe.metrics import MetricsWriter
from mpishard.observe.progress import Progress
from mpishard.optimizers.data import OptimizationInputData, OptimizationResult

if TYPE_CHECKING:
    from mpishard.optimizers.sharded import ShardedOptimizerBase

__all__ = ["train"]

_LOOP = "training_loop"


def train(
    optimizer: ShardedOptimizerBase, model: ShardedModelBase, data: OptimizationInputData
) -> OptimizationResult:
    """Train ``model`` as ``data`` says. Collective; every rank returns the same result."""
    return _Loop(optimizer, model, data).run()


class _Loop:
    """One run: where it stands, and what it has seen."""

    def __init__(
        self,
        optimizer: ShardedOptimizerBase,
        model: ShardedModelBase,
        data: OptimizationInputData,
    ) -> None:
        self.optimizer = optimizer
        self.model = model
        self.data = data
        self.sampler = data.sampler()
        per_epoch = self.sampler.batches_per_epoch
        planned = data.epochs * per_epoch
        self.total = planned if data.max_steps is None else min(planned, data.max_steps)
        self.validate_every = data.validate_every or per_epoch
        self.result = OptimizationResult(model)
        self.step = 0
        self.epoch_sums = np.zeros(2)  # loss sum and weight of the epoch under way

    def run(self) -> OptimizationResult:
        self._refuse_early()
        self._require_agreement()
        if self.data.resume is not None:
            self._resume(Path(self.data.resume))
        is_root = self.model.rank == 0
        started = time.perf_counter()
        with ExitStack() as stack:
            metrics = None
            if is_root and self.data.metrics is not None:
                metrics = stack.enter_context(
                    MetricsWriter(Path(self.data.metrics), resume_step=self.step)
                )
            progress = stack.enter_context(
                Progress(
                    self.total,
                    start=self.step,
                    unit=f"{self.data.throughput_unit}/s",
                    enabled=is_root and self.data.progress,
                )
            )
            while self.step < self.total:
                self._one_step(progress, metrics, started)
        self._finish_epoch(is_partial=True)
        self.result.iterations = self.step
        self.result.seconds = time.perf_counter() - started
        if self.data.x_test is not None:
            self.result.test_loss = self._evaluate(self.data.x_test, self.data.y_test)
        scores = [loss for _, loss in self.result.validation_history] or self.result.fitness_history
        self.result.best_fitness_score = min(scores, default=float("inf"))
        return self.result

    def _refuse_early(self) -> None:
        """What would only fail after hours of training fails now, and on every rank."""
        data, engine = self.data, self.model.engine
        first = np.zeros(1, np.int64)
        with together(self.model.backend):
            for x, y in (
                (data.x_train, data.y_train),
                (data.x_validation, data.y_validation),
                (data.x_test, data.y_test),
            ):
                if x is not None:
                    engine.program.check_pair(take(x, first), take(y, first), engine.loss)
            if data.checkpoint is not None and self.model.rank == 0:
                target_of(data.checkpoint)

    def _require_agreement(self) -> None:
        """Refuse a run whose length, order or rule differs between ranks. Collective."""
        names = ("validate_every", "checkpoint_every", "checkpoint", "resume", "max_steps")
        mine = {
            **self._order(),
            "epochs": self.data.epochs,
            **{name: str(getattr(self.data, name)) for name in names},
            "validation": self.data.x_validation is not None,
            "test": self.data.x_test is not None,
            **self.optimizer.wrapped_optimizer.fingerprint(),
        }
        texts = gather_texts(self.model.backend, json.dumps(mine))  # on rank 0
        everyone = [json.loads(text) for text in texts]
        differing = [
            f"{name} is {', '.join(str(other.get(name)) for other in everyone)}"
            for name in mine
            if any(other.get(name) != everyone[0][name] for other in everyone)
        ]
        message = share_text(self.model.backend, "; ".join(differing))
        if message:
            raise ValueError(f"every rank must ask for the same training; by rank, {message}")

    def _one_step(self, progress: Progress, metrics: MetricsWriter | None, started: float) -> None:
        data, model = self.data, self.model
        epoch, index = divmod(self.step, self.sampler.batches_per_epoch)
        indices, sample_start = self.sampler.local(epoch, index, model.rank, model.world_size)
        rate = self.optimizer.get_current_learning_rate()
        report = self.optimizer.step_report(
            model, take(data.x_train, indices), take(data.y_train, indices),
            sample_start=sample_start,
        )  # fmt: skip
        self.step += 1
        self.result.loss_history.append(report.loss)
        self.result.weight += report.weight
        self.epoch_sums += (report.loss * report.weight, report.weight)
        progress.update(self.step, loss=report.loss, amount=report.weight)
        if metrics is not None:
            metrics.write(
                step=self.step, time=time.perf_counter() - started, epoch=epoch, loss=report.loss,
                learning_rate=rate, gradient_norm=report.gradient_norm, weight=report.weight,
            )  # fmt: skip
        if index + 1 == self.sampler.batches_per_epoch:
            self._finish_epoch()
        is_last = self.step == self.total
        if data.x_validation is not None and (is_last or self.step % self.validate_every == 0):
            loss = self._evaluate(data.x_validation, data.y_validation)
            self.result.validation_history.append((self.step, loss))
            progress.validation(self.step, loss)
            if metrics is not None:
                metrics.write(
                    step=self.step, time=time.perf_counter() - started, validation_loss=loss
                )
        if data.checkpoint is not None and (
            is_last or (data.checkpoint_every and self.step % data.checkpoint_every == 0)
        ):
            checkpoint.save(
                Path(data.checkpoint), model, self.optimizer, metadata={_LOOP: self._position()}
            )

    def _finish_epoch(self, *, is_partial: bool = False) -> None:
        total, weight = self.epoch_sums
        if weight:
            self.result.fitness_history.append(float(total / weight))
            if not is_partial:
                self.epoch_sums[:] = 0

    def _evaluate(self, x: Any, y: Any) -> float:
        """Mean loss over a whole data set, dealt over the ranks. Collective."""
        sampler = GlobalBatchSampler(len(x), self.data.batch_size, shuffle=False)
        sums = np.zeros(2)
        for index in range(sampler.batches_per_epoch):
            indices, _ = sampler.local(0, index, self.model.rank, self.model.world_size)
            sums += self.model.engine.evaluate(take(x, indices), take(y, indices))
        total, weight = self.model.backend.all_reduce(sums)
        return float(total / weight) if weight else 0.0

    def _position(self) -> dict[str, Any]:
        """Where the run stands, and the choices that its order of samples depends on."""
        return {
            "step": self.step,
            "epoch_sums": self.epoch_sums.tolist(),
            "fitness_history": self.result.fitness_history,
            "validation_history": self.result.validation_history,
            "order": self._order(),
        }

    def _order(self) -> dict[str, Any]:
        data = self.data
        return {
            "samples": len(data.x_train),
            "batch_size": data.batch_size,
            "seed": data.seed,
            "shuffle": data.shuffle,
            "drop_last": data.drop_last,
        }

    def _resume(self, path: Path) -> None:
        with together(self.model.backend):  # nothing is loaded where the run could not go on
            self._check_position(checkpoint.CheckpointReader(path).metadata["user"])
        position = checkpoint.load(path, self.model, self.optimizer)[_LOOP]
        self.step = int(position["step"])
        self.epoch_sums[:] = position["epoch_sums"]
        self.result.fitness_history = list(position["fitness_history"])
        self.result.validation_history = [(int(s), float(v)) for s, v in
                                          position["validation_history"]]  # fmt: skip

    def _check_position(self, metadata: Mapping[str, Any]) -> None:
        position = metadata.get(_LOOP)
        if position is None:
            raise ValueError(
                f"{self.data.resume} holds no position of a training loop; load it with "
                "model.load_model, and train without resume"
            )
        differing = [
            f"{name} was {position['order'].get(name)} and is {value}"
            for name, value in self._order().items()
            if position["order"].get(name) != value
        ]
        if differing:
            raise ValueError(
                "the run cannot go on where it was, because the order of samples would differ: "
                + "; ".join(differing)
            )
