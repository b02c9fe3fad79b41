"""The one way in which parameters change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication import CommunicationBackend
from mpishard.contracts import ILossFunction
from mpishard.errors import NonFiniteLossError, ShardingError
from mpishard.models.gradient_store import GradientStore, ReplicatedGradients, squared_norm
from mpishard.models.holdings import Holdings
from mpishard.models.parameter_store import ParameterStore
from mpishard.models.policy import Policy
from mpishard.models.program import Program
from mpishard.nn.layer import Context
from mpishard.sharding import Piece

__all__ = ["Engine", "StepReport", "Update"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step found, the same on every rank.

    ``loss`` is the mean over all samples of the round, NaN where a black box does not tell it,
    ``weight`` their total weight,
    ``gradient_norm`` the Euclidean norm of the mean gradient before clipping; None for a step
    that only accumulated.
    """

    loss: float
    weight: float
    gradient_norm: float | None


@dataclass(frozen=True, slots=True)
class Update:
    """What an update rule gets for one owned piece.

    ``parameters`` and ``gradients`` are 1-D views of equal length; the gradient is the *sum*
    over samples, to be multiplied by ``1 / report.weight``. It is read-only: other ranks may read
    the same memory.
    """

    piece: Piece
    parameters: Array
    gradients: Array


class Engine:
    """Runs the forward and backward passes of a program, reduces, checks, updates, publishes.

    Parameters
    ----------
    program : Program
        What is computed.
    parameters, gradients : ParameterStore, GradientStore
        Who holds what.
    policy : Policy
        What the strategy shards.
    loss : ILossFunction or None
        What is minimised; None where a black box knows.
    """

    def __init__(
        self,
        program: Program,
        parameters: ParameterStore,
        gradients: GradientStore,
        policy: Policy,
        loss: ILossFunction | None,
        *,
        allow_nonfinite: Callable[[], bool],
    ) -> None:
        self.program = program
        self.parameters = parameters
        self.gradients = gradients
        self.policy = policy
        self.loss = loss
        self.step_number = 0
        self._allow_nonfinite = allow_nonfinite
        self._accumulates: bool = False
        self._defers: bool = False
        self._local = np.zeros(3)  # of the round so far: loss sum, weight, passes
        self._round_is_open = False
        self.owned_pieces: tuple[Piece, ...] = (
            self.holdings.pieces() if policy.shards_state else self.holdings.pieces_of_all()
        )
        self._norm_pieces = self.holdings.pieces()

    @property
    def holdings(self) -> Holdings:
        """Units, ranks, and where memory is booked."""
        return self.parameters.holdings

    @property
    def backend(self) -> CommunicationBackend:
        """How the ranks talk."""
        return self.parameters.backend

    def step(
        self,
        x: Array,
        y: Array,
        rule: Callable[[list[Update], StepReport], None],
        *,
        sample_start: int = 0,
    ) -> StepReport:
        """One synchronised update on this rank's batch; inside `accumulate`, none yet.

        Nothing has changed where it raises; only an exception of ``rule`` itself may come late.

        Raises
        ------
        ValueError
            For a batch that does not fit the model, before anything is communicated; on every
            rank where no rank has a sample that counts.
        ShardingError
            On every rank, where the ranks accumulated different numbers of batches.
        NonFiniteLossError
            On every rank, where the loss or the gradient is not finite.
        """
        self.program.check_pair(x, y, self.loss)
        try:
            return self._step(x, y, rule, sample_start)
        except BaseException:
            self.abandon()
            raise

    def _step(
        self,
        x: Array,
        y: Array,
        rule: Callable[[list[Update], StepReport], None],
        sample_start: int,
    ) -> StepReport:
        if not self._round_is_open:
            self._local[:] = 0
        loss, weight = self._pass(
            x, y, self.gradients, is_first=not self._round_is_open,
            is_last=not self._accumulates, sample_start=sample_start,
        )  # fmt: skip
        self._round_is_open = True
        self._local += np.array([loss, weight, 1.0])
        if self._accumulates:
            total, total_weight, _ = self._totals(np.array([loss, weight, 0.0]), loss)
            return StepReport(self._mean(total, total_weight), total_weight, None)
        # Of a replicated gradient, too, each rank takes the norm of its piece alone.
        norm_part = squared_norm(self.gradients.owned(self._norm_pieces))
        message = np.array([*self._local[:2], norm_part])
        total, total_weight, squared = self._totals(message, loss)
        if total_weight == 0:
            raise ValueError("no rank has a sample that counts in this step; all weights are 0")
        norm = math.sqrt(squared) / total_weight
        report = StepReport(self._mean(total, total_weight), total_weight, norm)
        updates = [
            Update(*given)
            for given in zip(
                self.owned_pieces,
                self.parameters.owned(self.owned_pieces),
                self.gradients.owned(self.owned_pieces),
                strict=True,
            )
        ]
        try:
            rule(updates, report)
        finally:  # a rule that failed here may still read gradients elsewhere
            self.gradients.finish()
        if self.policy.shards_state:
            self.parameters.publish(self.owned_pieces)
        self.program.changed(self.parameters)
        self._round_is_open = False
        self.step_number += 1
        return report

    def _pass(
        self,
        x: Array,
        y: Array,
        gradients: GradientStore,
        *,
        is_first: bool,
        is_last: bool,
        sample_start: int = 0,
        loss: ILossFunction | None = None,
    ) -> tuple[float, float]:
        """One forward and backward pass; this rank's loss sum and weight."""
        gradients.begin(is_first=is_first, is_last=is_last, defer=self._defers)
        context = Context(step=self.step_number, sample_start=sample_start)
        total, weight, tape = self.program.forward(
            self.parameters, x, y, loss or self.loss, context
        )
        self.program.backward(self.parameters, gradients, tape)
        gradients.settle()
        return total, weight

    def _totals(self, message: np.ndarray[Any, Any], own_loss: float) -> tuple[float, float, float]:
        """Sums over ranks of [loss sum, weight, squared norm], in one small all-reduce.

        With them travel the number of passes in the round and its square, which tell whether it
        is the same on all ranks.
        """
        passes = self._local[2] + 0.5 * self._accumulates
        sums = self.backend.all_reduce(np.array([*message, passes, passes * passes]))
        total, weight, squared, all_passes, squared_passes = (float(v) for v in sums)
        if all_passes * all_passes != squared_passes * self.backend.world_size:
            raise ShardingError(
                f"the ranks are in different rounds: rank {self.backend.rank} has added "
                f"{self._local[2]:g} batches, all {self.backend.world_size} together "
                f"{int(all_passes)}. One has left accumulate() by an exception that its script "
                "caught, or did not enter it. Nothing was updated, and every rank drops its round"
            )
        if all(math.isfinite(v) for v in (total, weight, squared)) or self._allow_nonfinite():
            return total, weight, squared
        losses = self.backend.all_gather(np.array([own_loss]))
        ranks = [rank for rank, value in enumerate(losses) if not math.isfinite(value)]
        what = f"the loss of ranks {ranks}" if ranks else "the gradient, and no rank's loss,"
        raise NonFiniteLossError(
            f"step {self.step_number + 1}: {what} is not finite (loss sums by rank: "
            f"{losses.tolist()}). The parameters are those of before the step. Lower the learning "
            "rate, clip_global_norm=1.0, or look at the data; "
            "ShardingConfiguration(allow_nonfinite=True) goes on regardless"
        )

    def _mean(self, total: float, weight: float) -> float:
        """The mean loss; NaN where a black box does not tell its loss, or nothing was weighed."""
        known = self.program.knows_loss(self.loss) and weight > 0
        return total / weight if known else math.nan

    @contextmanager
    def accumulate(self, *, defer: bool = False) -> Iterator[None]:
        """Inside, `step` adds to the round and does not end it. See `ShardedModelBase`."""
        if self._accumulates:
            raise RuntimeError("accumulate() cannot be nested")
        self._accumulates, self._defers = True, defer
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self._accumulates = False

    def abandon(self) -> None:
        """Drop an unfinished round."""
        self._round_is_open = False
        self.gradients.abandon()
        self.parameters.abandon()

    def local_gradient(self, x: Array, y: Array, loss: ILossFunction | None) -> tuple[float, Array]:
        """Mean loss of this rank's batch and its gradient, shape (length,), not reduced."""
        self.program.check_pair(x, y, loss or self.loss)
        sink = ReplicatedGradients(self.holdings)
        with self._leaving_no_unit():
            total, weight = self._pass(x, y, sink, is_first=True, is_last=False, loss=loss)
        if weight:
            sink.vector[...] /= weight
            total /= weight
        return total, sink.vector

    def predict(self, x: Array) -> Array:
        """Outputs for this rank's inputs. Collective where parameters are sharded."""
        self.program.check(x)
        with self._leaving_no_unit():
            return self.program.predict(self.parameters, x)

    def evaluate(self, x: Array, y: Array) -> tuple[float, float]:
        """Sum and weight of the loss over this rank's batch.

        Without a gradient, but where a black box tells its loss only together with one.
        """
        self.program.check_pair(x, y, self.loss)
        if not self.policy.shards_parameters and len(x) == 0:
            return 0.0, 0.0
        if self.loss is None:
            total, weight, _ = self.program.forward(
                self.parameters, x, y, None, Context(training=False)
            )
            return total, weight
        total, weight, _ = self.loss.forward(self.predict(x), y, training=False)
        return total, weight

    def take(self, full: Array) -> None:
        """Take parameters from the full vector, which is the same on every rank."""
        self.parameters.take(full)
        self.program.changed(self.parameters)

    def gather(self) -> Array:
        """All parameters in layer order, a new array on every rank. Collective."""
        full = np.empty(self.program.length, self.program.dtype)
        with self._leaving_no_unit():
            for unit in self.program.units:
                full[unit.start : unit.stop] = self.parameters.unshard(unit)
                self.parameters.reshard(unit)
        return full

    @contextmanager
    def _leaving_no_unit(self) -> Iterator[None]:
        """After an error no unit stays unsharded, to be taken for current later on."""
        try:
            yield
        except BaseException:
            self.parameters.abandon()
            raise
