"""The one way in which parameters change."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace
from mpishard.communication import CommunicationBackend
from mpishard.contracts import ILossFunction
from mpishard.errors import NonFiniteLossError, ShardingError
from mpishard.models.gradient_store import GradientStore, ReplicatedGradients, squared_norm
from mpishard.models.holdings import Holdings
from mpishard.models.offload import OffloadedGradients, UpdateStage
from mpishard.models.parameter_store import ParameterStore
from mpishard.models.policy import Policy
from mpishard.models.program import Program
from mpishard.models.replicas import Replicas
from mpishard.models.step import StepReport, Update
from mpishard.nn.layer import Context
from mpishard.sharding import Piece, ShardingConfiguration, pieces_within

__all__ = ["Engine"]

_SETTINGS = 1 << 20  # so that squares of checksums add up exactly in float64, on 8192 ranks

Rule = Callable[[list[Update], StepReport], None]


class Engine:
    """Runs the forward and backward passes of a program, reduces, checks, updates, publishes.

    Parameters
    ----------
    program : Program
        What is computed.
    parameters : ParameterStore
        Who holds parameters.
    make_gradients : callable
        ``make_gradients(holdings)`` makes the store of gradients, anew where units are frozen.
    policy : Policy
        What the strategy shards.
    loss : ILossFunction or None
        What is minimised; None where a black box knows.
    config : ShardingConfiguration
        Choices that may change between steps.
    """

    def __init__(
        self,
        program: Program,
        parameters: ParameterStore,
        make_gradients: Callable[[Holdings], GradientStore],
        stage: UpdateStage,
        policy: Policy,
        loss: ILossFunction | None,
        config: ShardingConfiguration,
    ) -> None:
        self.program = program
        self.parameters = parameters
        self.policy = policy
        self.loss = loss
        self.step_number = 0
        self.version = 0
        self.observer: Callable[[list[Update]], AbstractContextManager[None]] | None = None
        self._config = config
        self._make_gradients = make_gradients
        self.stage = stage
        self.replicas = Replicas(parameters, policy)
        self._samples = 0  # of all ranks, in the round so far; counted where the program is random
        self._accumulates: bool = False
        self._defers: bool = False
        self._local = np.zeros(3)  # of the round so far: loss sum, weight, passes
        self._round_is_open = False
        self.freeze(program.frozen)

    def freeze(self, names: frozenset[str]) -> None:
        """Train what is not among ``names``, which are names of parameters. Collective.

        What is frozen has no optimizer state, counts for no norm, and where a whole unit is, it
        has no gradient and nothing of it is sent but what must be gathered.

        Raises
        ------
        ShardingError
            In the middle of a round of accumulation.
        ValueError
            Where nothing would be left to train.
        """
        self.require_no_round("what is trained cannot change")
        if all(entry.name in names for entry in self.program.entries):
            raise ValueError(
                f"all {len(self.program.entries)} parameters are frozen; leave one to train"
            )
        self.program.freeze(names)
        without_gradient = self.program.frozen_units
        holdings = replace(self.holdings, frozen=without_gradient)
        self.gradients = self._make_gradients(holdings)
        entries = self.program.entries
        own = tuple(p for p in holdings.pieces() if p.unit.index not in without_gradient)
        all_of_all = tuple(
            p for p in holdings.pieces_of_all() if p.unit.index not in without_gradient
        )
        updated = own if self.policy.shards_state else all_of_all
        trained = [(e.start, e.stop) for e in entries if e.name not in names]
        self.published_pieces = own
        self.updated_pieces = pieces_within(updated, trained) if names else updated
        self.own_pieces = pieces_within(own, trained) if names else own

    @property
    def state_pieces_to_write(self) -> tuple[Piece, ...]:
        """The `updated_pieces` whose state this rank writes to a checkpoint: of replicas, a part.

        Together the ranks write each element once.
        """
        own = {(piece.start, piece.stop) for piece in self.own_pieces}
        return tuple(piece for piece in self.updated_pieces if (piece.start, piece.stop) in own)

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
        rule: Rule,
        *,
        sample_start: int | None = None,
        settings: int = 0,
    ) -> StepReport:
        """One synchronised update on this rank's batch; inside `accumulate`, none yet.

        ``sample_start`` is the index of this rank's first sample among those of all ranks and of
        the round; where it is not given and the program is random, the ranks tell each other how
        many samples they have. ``settings`` is a checksum of what the rule depends on, such as its
        rate: replicas that are updated with different rates would drift apart unseen.

        Without ``config.auto_sync_gradients`` the update is this rank's alone, nothing is
        communicated, and the report tells of its batch.

        Nothing has changed where it raises; only an exception of ``rule`` itself may come late.

        Raises
        ------
        ValueError
            For a batch that does not fit the model, before anything is communicated; on every
            rank where no rank has a sample that counts.
        ShardingError
            On every rank, where the ranks accumulated different numbers of batches; where
            replicas have drifted apart and the step is to be synchronised; on every rank, where
            ``settings`` differ.
        NonFiniteLossError
            On every rank, where the loss or the gradient is not finite.
        """
        self.holdings.device.use()  # of the thread that calls
        self.program.check_pair(x, y, self.loss)
        is_local = not self._config.auto_sync_gradients
        if is_local:
            self.replicas.require_drifting()
        else:
            self.replicas.require_equal("a synchronised step")
        try:
            start = self._sample_start(len(x), is_local) if sample_start is None else sample_start
            return self._step(x, y, rule, start, settings % _SETTINGS, is_local=is_local)
        except BaseException:
            self.abandon()
            raise

    def _step(
        self,
        x: Array,
        y: Array,
        rule: Rule,
        sample_start: int,
        settings: int,
        *,
        is_local: bool,
    ) -> StepReport:
        if not self._round_is_open:
            self._local[:] = 0
        loss, weight = self._pass(
            x, y, self.gradients, is_first=not self._round_is_open,
            is_last=not (self._accumulates or is_local), sample_start=sample_start,
        )  # fmt: skip
        self._round_is_open = True
        self._local += np.array([loss, weight, 1.0])
        if is_local:
            return self._local_update(loss, weight, rule)
        if self._accumulates:
            total, total_weight, _ = self._totals(np.array([loss, weight, 0.0]), loss, settings)
            return StepReport(self._mean(total, total_weight), total_weight, None)
        # Of a replicated gradient, too, each rank takes the norm of its piece alone.
        norm_part = squared_norm(self.gradients.owned(self.own_pieces))
        message = np.array([*self._local[:2], norm_part])
        total, total_weight, squared = self._totals(message, loss, settings)
        if total_weight == 0:
            raise ValueError("no rank has a sample that counts in this step; all weights are 0")
        norm = math.sqrt(squared) / total_weight
        report = StepReport(self._mean(total, total_weight), total_weight, norm)
        try:
            self._change(rule, self.gradients.owned(self.updated_pieces), report)
        finally:  # a rule that failed here may still read gradients elsewhere
            self.gradients.finish()
        if self.policy.shards_state:
            self.parameters.publish(self.published_pieces)
        self._end_round()
        return report

    def require_no_round(self, purpose: str) -> None:
        """Refuse what would make gradients stale that wait for their update.

        Raises
        ------
        ShardingError
            After a step inside `accumulate`, until a step has ended the round.
        """
        if self._round_is_open:
            raise ShardingError(
                f"{purpose} in the middle of a round of accumulate(): {self._local[2]:g} batches "
                "of this rank wait for the step that ends it"
            )

    def apply(self, gradient: Array, rule: Rule) -> None:
        """Update with a given gradient of the mean loss instead of computing one.

        ``gradient`` is the full vector, the same on every rank. Collective where state is sharded.

        Raises
        ------
        ShardingError
            Where replicas have drifted apart; in the middle of a round of accumulation.
        NonFiniteLossError
            On every rank, where the gradient is not finite.
        """
        self.replicas.require_equal("apply_gradients")
        self.require_no_round("apply_gradients()")
        trained = [
            gradient[e.start : e.stop] for e in self.program.entries
            if e.name not in self.program.frozen
        ]  # fmt: skip
        norm = math.sqrt(squared_norm(trained))
        if not math.isfinite(norm):
            self._refuse_nonfinite("the given gradient")
        pieces = [gradient[p.start : p.stop] for p in self.updated_pieces]
        self._change(rule, pieces, StepReport(math.nan, 1.0, norm))
        if self.policy.shards_state:
            self.parameters.publish(self.published_pieces)
        self._end_round()

    def _change(self, rule: Rule, gradients: list[Array], report: StepReport) -> None:
        """Let ``rule`` update; a step's observer may look at what it updates before and after."""
        pieces = self.updated_pieces
        parameters = self.parameters.owned(pieces)
        with self.stage.staged(parameters, gradients) as (own, reduced):
            updates = [Update(*given) for given in zip(pieces, own, reduced, strict=True)]
            with contextlib.nullcontext() if self.observer is None else self.observer(updates):
                rule(updates, report)

    def _end_round(self) -> None:
        self.changed()
        self._round_is_open = False
        self._samples = 0
        self.step_number += 1

    def _sample_start(self, samples: int, is_local: bool) -> int:
        """The index of this rank's first sample in the round. Collective where it matters."""
        if not self.program.is_random:
            return 0
        before = self._samples if self._round_is_open else 0
        if is_local or self.backend.world_size == 1:
            self._samples = before + samples
            return before
        counts = self.backend.all_gather(np.array([samples]))
        self._samples = before + int(counts.sum())
        return before + int(counts[: self.backend.rank].sum())

    def _local_update(self, loss: float, weight: float, rule: Rule) -> StepReport:
        """Update this replica with its own gradient; the others are not asked."""
        assert isinstance(self.gradients, ReplicatedGradients | OffloadedGradients)
        if self._accumulates:
            return StepReport(self._mean(loss, weight), weight, None)
        total, total_weight = float(self._local[0]), float(self._local[1])
        if total_weight == 0:
            raise ValueError("this rank has no sample that counts in this step; all weights are 0")
        gradients = self.gradients.local(self.updated_pieces)
        squared = squared_norm(gradients)
        if not (math.isfinite(total) and math.isfinite(squared)):
            self._refuse_nonfinite(f"the loss or the gradient of rank {self.backend.rank}")
        report = StepReport(
            self._mean(total, total_weight), total_weight, math.sqrt(squared) / total_weight
        )
        self._change(rule, gradients, report)
        self.replicas.drift(total_weight)
        self._end_round()
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
        context = Context(seed=self.program.seed, step=self.step_number, sample_start=sample_start)
        total, weight, tape = self.program.forward(
            self.parameters, x, y, loss or self.loss, context
        )
        self.program.backward(self.parameters, gradients, tape)
        gradients.settle()
        return total, weight

    def _totals(
        self, message: np.ndarray[Any, Any], own_loss: float, settings: int
    ) -> tuple[float, float, float]:
        """Sums over ranks of [loss sum, weight, squared norm], in one small all-reduce.

        With them travel two numbers and their squares, which tell whether they are the same on all
        ranks: the passes of the round, and the checksum of the settings.
        """
        own = np.array([self._local[2] + 0.5 * self._accumulates, settings])
        sums = self.backend.all_reduce(np.array([*message, *own, *(own * own)]))
        total, weight, squared, all_passes = (float(v) for v in sums[:4])
        same = sums[3:5] ** 2 == sums[5:] * self.backend.world_size
        if not same[0]:
            raise ShardingError(
                f"the ranks are in different rounds: rank {self.backend.rank} has added "
                f"{self._local[2]:g} batches, all {self.backend.world_size} together "
                f"{int(all_passes)}. One has left accumulate() by an exception that its script "
                "caught, or did not enter it. Nothing was updated, and every rank drops its round"
            )
        if not same[1]:
            ranks = self.backend.all_gather(np.array([settings])).tolist()
            raise ShardingError(
                f"step {self.step_number + 1}: the ranks would update with different settings, "
                f"such as learning rate or clipping (checksums by rank: {ranks}). Nothing was "
                "updated; give every rank the same"
            )
        if not all(math.isfinite(v) for v in (total, weight, squared)):
            losses = []
            if not self._config.allow_nonfinite:
                losses = self.backend.all_gather(np.array([own_loss])).tolist()
            ranks = [rank for rank, value in enumerate(losses) if not math.isfinite(value)]
            what = f"the loss of ranks {ranks}" if ranks else "the gradient, and no rank's loss,"
            self._refuse_nonfinite(what, f" (loss sums by rank: {losses})")
        return total, weight, squared

    def _refuse_nonfinite(self, what: str, details: str = "") -> None:
        if self._config.allow_nonfinite:
            return
        raise NonFiniteLossError(
            f"step {self.step_number + 1}: {what} is not finite{details}. The parameters are those "
            "of before the step. Lower the learning rate, clip_global_norm=1.0, or look at the "
            "data; ShardingConfiguration(allow_nonfinite=True) goes on regardless"
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
        self._samples = 0
        self.gradients.abandon()
        self.parameters.abandon()

    def local_gradient(self, x: Array, y: Array, loss: ILossFunction | None) -> tuple[float, Array]:
        """Mean loss of this rank's batch and its gradient, shape (length,), not reduced."""
        self.holdings.device.use()
        self.program.check_pair(x, y, loss or self.loss)
        holdings = self.gradients.holdings
        sink = ReplicatedGradients(holdings)
        with self._leaving_no_unit():
            total, weight = self._pass(x, y, sink, is_first=True, is_last=False, loss=loss)
        full = sink.vector
        if self.program.frozen:
            ranges = [
                (e.start, e.stop) for e in self.program.entries
                if e.name not in self.program.frozen
            ]  # fmt: skip
            pieces = pieces_within(holdings.pieces(sharded=False), ranges)
            full = array_namespace(full).zeros(self.program.length, full.dtype)
            for piece, values in zip(pieces, sink.local(pieces), strict=True):
                full[piece.start : piece.stop] = values
        if weight:
            full /= weight
            total /= weight
        return total, full

    def predict(self, x: Array) -> Array:
        """Outputs for this rank's inputs. Collective where parameters are sharded."""
        self.holdings.device.use()
        self.program.check(x)
        with self._leaving_no_unit():
            return self.program.predict(self.parameters, x)

    def evaluate(self, x: Array, y: Array) -> tuple[float, float]:
        """Sum and weight of the loss over this rank's batch.

        Without a gradient, but where a black box tells its loss only together with one.
        """
        self.holdings.device.use()
        self.program.check_pair(x, y, self.loss)
        if not self.policy.shards_parameters and len(x) == 0:
            return 0.0, 0.0
        if self.loss is None:
            total, weight, _ = self.program.forward(
                self.parameters, x, y, None, Context(training=False)
            )
            return total, weight
        y = self.program.device.put(y)
        total, weight, _ = self.loss.forward(self.predict(x), y, training=False)
        return total, weight

    def synchronize_replicas(self) -> None:
        """Give every rank the mean of all replicas; a barrier where nothing drifts. Collective."""
        if self.replicas.synchronize():
            self.changed()

    def changed(self) -> None:
        """Hear that parameters have changed."""
        self.version += 1
        self.program.changed(self.parameters)

    def take(self, full: Array) -> None:
        """Take parameters from the full vector, which is the same on every rank."""
        self.holdings.device.use()
        self.parameters.take(full)
        self.replicas.are_equal()
        self.changed()

    def read(self) -> None:
        """Hear that every rank has written what it holds, as from a file. Collective."""
        self.parameters.refresh()
        self.replicas.are_equal()
        self.changed()

    def continue_as(self, other: Engine) -> None:
        """Be at the step of ``other``, whose parameters this one has a copy of."""
        self.step_number = other.step_number
        self.replicas.drift_as(other.replicas)

    def gather(self) -> Array:
        """All parameters in layer order, a new array on every rank. Collective."""
        self.holdings.device.use()
        full = self.holdings.device.namespace.empty(self.program.length, self.program.dtype)
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
