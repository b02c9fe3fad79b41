"""The one way in which parameters change."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import starmap
from typing import Any

import numpy as np

from mpishard.arrays import Array, beside
from mpishard.contracts import ILossFunction
from mpishard.errors import NoSampleError
from mpishard.models.engine.replicas import Replicas
from mpishard.models.engine.update import (
    Policy,
    Round,
    Rule,
    StepReport,
    TrainingRecord,
    Update,
    UpdatePieces,
    dealt,
)
from mpishard.models.programs.leaves import GradientLeaves
from mpishard.models.programs.program import Batch, Program
from mpishard.models.stores.gradient_store import (
    BackwardPass,
    GradientStore,
    ReplicatedGradients,
    squared_norm,
)
from mpishard.models.stores.offload import OffloadedGradients, UpdateStage
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.nn.layers.cache import KeyValueCache
from mpishard.nn.layers.layer import Context
from mpishard.observe import span, step_span
from mpishard.observe.ledger import MemoryCategory
from mpishard.sharding import Piece, ShardingConfiguration

Part = tuple[Any, Any, int]  # inputs, targets, and the first sample's place among all ranks'


class Engine:
    """Runs the forward and backward passes of a program, reduces, checks, updates, publishes.

    Parameters
    ----------
    program : Program
        The computation.
    parameters : ParameterStore
        Store of parameters.
    make_gradients : callable
        ``make_gradients(layout)`` makes a store of gradients. It is called again when other
        parameters are frozen.
    state_layout : StoreLayout
        Layout of the optimizer's state.
    policy : Policy
        Vectors that the strategy shards.
    config : ShardingConfiguration
        Choices that may change between steps.

    Attributes
    ----------
    loss : ILossFunction or None
        Loss to minimise; None if a black box has its own.
    layout : StoreLayout
        Units, ranks, and the ledger in which memory is booked.
    own_pieces : tuple of Piece
        The pieces of the parameters that this rank owns.
    backend : CommunicationBackend
        The ranks that hold the same part of the model, and compute other samples.
    world : CommunicationBackend
        All ranks.
    step_number, version : int
        Steps made, and changes of the parameters.
    record : TrainingRecord
        Figures of the training so far.
    observer : callable, optional
        Returns a context manager around each update, to compare parameters before and after it.
    computed : tuple, optional
        Gradient, sum and weight of the loss that `evaluation.local_gradient` found last, until the
        next step.
    """

    def __init__(
        self, program: Program, parameters: ParameterStore,
        make_gradients: Callable[[StoreLayout], GradientStore], state_layout: StoreLayout,
        policy: Policy, config: ShardingConfiguration,
    ) -> None:  # fmt: skip
        self.program = program
        self.parameters = parameters
        self.policy = policy
        self.loss = program.default_loss
        self.step_number = 0
        self.version = 0
        self._gradient = 0  # number of the gradient in the store: see `held_gradient`
        self.record = TrainingRecord()
        self.has_said_what_is_not_saved = False  # a black box's first checkpoint warns once
        self.computed: tuple[Array, float, float] | None = None
        self.observer: Callable[[list[Update]], AbstractContextManager[None]] | None = None
        self.layout = parameters.layout
        self.own_pieces = parameters.layout.pieces()
        self._is_on_gpu = parameters.layout.device.is_gpu
        self.backend = parameters.backend
        self.world = config.communication_backend
        self._config = config
        # The first one is kept: `lend_gradients` returns to it.
        self._make_gradients = self._first_gradients = make_gradients
        self.gradients_user: str | None = None  # the class of an optimizer with a store of its own
        self.state_layout = state_layout
        # Copies parameters and gradients to the device of the state, and parameters back.
        self._stage = UpdateStage(state_layout) if self._is_on_gpu else None
        self.replica = program.replica
        self.placement = program.vector.placement
        self.replicas = Replicas(parameters, policy, program.replica)
        self.round = Round(config, program.replica, self.layout.subject)
        self.leaves: GradientLeaves | None = None
        if config.gradient_leaves is not None:
            self.leaves = GradientLeaves(config, parameters.backend, program.dtype)
        self.freeze(program.frozen)

    def freeze(self, names: frozenset[str]) -> None:
        """Train all parameters but those called ``names``. Collective.

        Frozen parameters have no optimizer state and add to no norm. A unit without a trained
        parameter has no gradient, and is sent only when it is gathered.

        Raises
        ------
        ShardingError
            In the middle of a round of accumulation.
        ValueError
            If nothing would be left to train.
        """
        self.round.require_none("a change of the trained parameters")
        whole = self.placement.entries
        # A step without a gradient would have no norm, and an optimizer no state.
        if all(entry.name in names for entry in whole):
            raise ValueError(f"all {len(whole)} parameters are frozen; leave one to train")
        self.program.freeze(names)
        # A new store of gradients, because frozen units have no memory in it.
        self._gradient += 1
        layout = replace(self.layout, frozen=self.program.frozen_units)
        self.gradients = self._make_gradients(layout)
        self.pieces = UpdatePieces.of(self.program, layout, self.policy, self.leaves)

    def deal(self, fill: Callable[[int, Array], None]) -> None:
        """Distribute rank 0's values, which ``fill(start, out)`` writes on rank 0. Collective."""
        self.program.vector.deal(self.parameters, self.world, fill)

    @property
    def is_writer(self) -> bool:
        """True if this rank writes its pieces to checkpoints: only the first replica's ranks do."""
        across = self.replica.across
        return across is None or across.rank == 0

    def lend_gradients(
        self, user: str | None, make_gradients: Callable[[StoreLayout], GradientStore] | None = None
    ) -> None:
        """Put gradients into a store of ``user``, or with None into the first. Collective."""
        self._make_gradients = make_gradients or self._first_gradients
        self.gradients_user = user
        self.freeze(self.program.frozen)

    def sum_over_owners(self, vector: Array, *, of_all_replicas: bool = False) -> Array:
        """Return the sum over ranks of a vector, or rows, with one place per parameter. Collective.

        Each rank contributes its sums over the elements that it updates. An element with copies on
        several ranks counts once. With ``of_all_replicas`` the sum is over all ranks of the world,
        which update different elements.
        """
        placement = self.placement
        # Ranks of a tensor axis hold copies of some parameters; one of them counts each.
        if not placement.is_whole:
            counted = {held.entry.name for held in placement.slices if held.is_counted}
            for place, entry in enumerate(placement.entries):
                if entry.name not in counted:
                    vector[place] = 0
        owners = self.replica.owners(shards_state=self.policy.shards_state)
        owners = self.world if of_all_replicas else owners
        return vector if owners is None else owners.all_reduce(vector, subject=self.layout.subject)

    def step(
        self, x: Array, y: Array, rule: Rule, *, sample_start: int | None = None,
        settings: Mapping[str, Any] | None = None, apart: bool = False,
    ) -> StepReport:  # fmt: skip
        """Make one synchronised update on this rank's batch; inside `accumulate` only add to it.

        ``sample_start`` is the index of this rank's first sample among those of all ranks and of
        the round. If it is not given and the program is random, the ranks exchange their numbers of
        samples; with gradient leaves they always do. ``settings`` maps names to the values that the
        rule depends on, such as its rate. The ranks compare them, because replicas that are updated
        with different rates would drift apart unnoticed.

        Without ``config.auto_sync_gradients`` this rank updates with its own gradient, nothing is
        communicated, and the report is about its batch alone.

        With ``apart`` each rank updates its replica with its own gradient, too. But all ranks agree
        on losses, settings and errors, and the report is about all ranks' samples. A rank without
        samples updates nothing. If groups of ranks hold replicas, each group updates its own.

        An error leaves the parameters unchanged, unless ``rule`` itself raises it.

        Raises
        ------
        ValueError
            For a batch that does not fit the model, before anything is communicated; on every
            rank, if no rank has a sample that counts, or if ranks of a mesh that compute one
            batch together were given different ones.
        ShardingError
            On every rank, if the ranks accumulated different numbers of batches, or if
            ``settings`` differ; if replicas have drifted apart and the step is to be synchronised.
        NonFiniteLossError
            On every rank, if the loss or the gradient is not finite.
        """
        if self._is_on_gpu:
            self.layout.device.use()  # CUDA has a current device for each thread
        # A gradient from before the step does not belong to the parameters after it.
        self.computed = None
        self._gradient += 1
        # Before the first collective: a rank that refuses its batch leaves no other rank waiting.
        inputs, targets = self.program.check_pair(x, y, self.loss)
        is_local = not self._config.auto_sync_gradients
        # A sum of gradients has no meaning if the replicas differ.
        if is_local or apart:
            self.replicas.require_drifting()
        elif self.replicas.weight:
            self.replicas.require_equal("a synchronised step")
        if self.leaves is not None:
            self.leaves.require(self._config)
        try:
            if self.replica.is_on_mesh:
                self.replica.require_one_batch("step", x, y, everywhere=True)
            batches = self._batches(inputs, targets, sample_start, is_local=is_local)
            began = time.perf_counter()
            with step_span(self.step_number + 1):
                report = self._step(batches, rule, settings or {}, is_local=is_local, apart=apart)
        # After an error the round cannot be continued: its gradient may be half reduced.
        except BaseException:
            self.abandon()
            raise
        if report.gradient_norm is not None:  # an update was made
            self.record.add(report, time.perf_counter() - began)
        return report

    def _batches(
        self, x: Array, y: Array, sample_start: int | None, *, is_local: bool
    ) -> list[Part]:
        """Return the parts of a batch that this rank computes. Collective if it needs counts."""
        if self.leaves is not None:
            return self.leaves.cut(x, y, sample_start)
        if sample_start is None:
            asks = self.program.is_random
            sample_start = self.round.sample_start(len(x), is_local=is_local) if asks else 0
        return [(x, y, sample_start)]

    def _step(
        self, batches: Sequence[Part], rule: Rule, settings: Mapping[str, Any], *, is_local: bool,
        apart: bool,
    ) -> StepReport:  # fmt: skip
        round_ = self.round
        is_whole = apart and self.replica.across is None  # this rank is a replica
        # Replicated and deferred gradients are reduced in a round's last pass alone, and sharded
        # ones in each pass. A gradient that stays on this rank has no last pass.
        ends = not (round_.accumulates or is_local or is_whole)
        loss = weight = 0.0
        for number, (x, y, sample_start) in enumerate(batches, start=1):
            own_loss, own_weight = self.run_pass(
                x, y, self.gradients, is_first=not round_.is_open,
                is_last=ends and number == len(batches), sample_start=sample_start,
            )  # fmt: skip
            round_.add(own_loss, own_weight)
            loss, weight = loss + own_loss, weight + own_weight
        if is_local:
            return self._local_update(loss, weight, rule)
        step = self.step_number + 1
        if round_.accumulates:
            total, total_weight, _ = round_.totals([loss, weight, 0.0], loss, settings, step)
            return StepReport(self.mean(total, total_weight), total_weight, None)
        if apart:
            return self._step_apart(rule, loss, settings, step)
        # Each rank adds the squares of its own piece only, even if the gradient is replicated.
        counted = self.gradients.owned(self._counted())
        if self.leaves is None:
            # In one message, because the cost of a small all-reduce is its latency.
            message = [round_.loss, round_.weight, squared_norm(counted)]
            total, total_weight, squared = round_.totals(message, loss, settings, step)
        else:
            message = self.leaves.message(round_.parts, counted)
            total, total_weight, squared = round_.totals(
                message, round_.loss, settings, step, self.leaves.fold
            )
        # The weight is a sum over all ranks, so that every rank raises this or none.
        if total_weight == 0:
            raise NoSampleError("no rank has a sample that counts in this step; all weights are 0")
        report = self._report(total, total_weight, squared)
        self._update(rule, report)
        return report

    def _report(self, total: float, weight: float, squared: float) -> StepReport:
        """Make a report from summed losses and weights, and the summed gradient's squared norm."""
        # The norm of the mean gradient is reported and clipped, not that of the sum.
        norm = math.sqrt(squared) / weight if weight else 0.0
        return StepReport(self.mean(total, weight), weight, norm)

    def _counted(self) -> Sequence[Piece]:
        """Return this rank's pieces in a norm over all ranks, which count each element once."""
        counted, across = self.pieces.counted, self.replica.across
        return counted if across is None else dealt(counted, across.world_size, across.rank)

    def _update(self, rule: Rule, report: StepReport) -> None:
        """Update with the reduced gradients in the store. Collective."""
        try:
            self._change(rule, report)
        finally:  # a rule that failed here may still read gradients elsewhere
            self.gradients.finish()
        self.parameters.publish(self.pieces.published)
        self._end_round()

    def update_again(self, rule: Rule, weight: float) -> None:
        """Make one more update, with sums that were written to the store since. Collective.

        ``weight`` is the total weight of their samples.

        Raises
        ------
        NonFiniteLossError
            On every rank, if they are not finite.
        """
        squared = np.array([squared_norm(self.gradients.owned(self._counted()))])
        total = self.world.all_reduce(squared, subject=self.layout.subject)
        norm = math.sqrt(float(total[0])) / weight
        if not math.isfinite(norm):
            self.round.refuse_nonfinite("the gradient is not finite", self.step_number + 1)
        self._update(rule, StepReport(math.nan, weight, norm))

    def _step_apart(
        self, rule: Rule, loss: float, settings: Mapping[str, Any], step: int
    ) -> StepReport:
        """Update this replica with its own gradient, if all ranks have finite ones. Collective."""
        own = np.array([self.round.loss, self.round.weight, 0.0])
        if self.replica.across is None:
            assert isinstance(self.gradients, ReplicatedGradients | OffloadedGradients)
            gradients = self.gradients.local(self.pieces.updated)
            own[2] = squared_norm(gradients)
            replica = own
        else:
            gradients = self.gradients.owned(self.pieces.updated)
            own[2] = squared_norm(self.gradients.owned(self.pieces.counted))
            replica = self.replica.together.all_reduce(own.copy())
        total, weight, _ = self.round.totals(own, loss, settings, step)
        if weight == 0:
            raise NoSampleError("no rank has a sample that counts in this step; all weights are 0")
        mine = self._report(*map(float, replica))
        try:
            if mine.weight:
                self._change(rule, mine, gradients)
                self.replicas.drift(mine.weight)
        finally:
            if self.replica.across is not None:
                self.gradients.finish()
        self.parameters.publish(self.pieces.published)
        self._end_round()
        return StepReport(self.mean(total, weight), weight, mine.gradient_norm)

    def apply(self, gradient: Array, rule: Rule) -> None:
        """Update with a given gradient of the mean loss instead of computing one.

        ``gradient`` is the full vector, the same on every rank. Collective if state is sharded.

        Raises
        ------
        ShardingError
            If replicas have drifted apart; in the middle of a round of accumulation.
        NonFiniteLossError
            On every rank, if the gradient is not finite.
        """
        self.replicas.require_equal("apply_gradients")
        self.round.require_none("apply_gradients()")
        placement = self.placement
        trained = [
            gradient[e.start : e.stop] for e in placement.entries
            if e.name not in self.program.frozen
        ]  # fmt: skip
        norm = math.sqrt(squared_norm(trained))
        if not math.isfinite(norm):
            self.round.refuse_nonfinite("the given gradient is not finite", self.step_number + 1)
        pieces = [placement.part(gradient, p.start, p.stop) for p in self.pieces.updated]
        # It is the gradient of a mean already: with a weight of 1 the rule does not divide it.
        self._change(rule, StepReport(math.nan, 1.0, norm), pieces)
        self.parameters.publish(self.pieces.published)
        self._end_round()

    def move(self, rule: Rule) -> None:
        """Let ``rule`` change the parameters without a gradient. Collective.

        Its updates have no gradient, and its report has no loss.
        """
        # Such a rule reads no gradient. The parameters take its place, so that none is allocated.
        unused = self.parameters.owned(self.pieces.updated)
        self._change(rule, StepReport(math.nan, 1.0, 0.0), unused)
        self.parameters.publish(self.pieces.published)
        self.changed()

    def _change(self, rule: Rule, report: StepReport, gradients: list[Array] | None = None) -> None:
        """Run ``rule`` with ``gradients``, or the reduced ones in the store.

        An observer sees the parameters before and after it.
        """
        pieces = self.pieces.updated
        reduced = self.gradients.owned(pieces) if gradients is None else gradients
        owned = self.parameters.owned(pieces), reduced
        stage = self._stage
        # An offloaded state is updated in host memory: gradients are copied there, and the new
        # parameters back.
        with nullcontext(owned) if stage is None else stage.staged(*owned) as (own, reduced):
            updates = list(starmap(Update, zip(pieces, own, reduced, strict=True)))
            watched = nullcontext() if self.observer is None else self.observer(updates)
            with watched, span("update"):
                rule(updates, report)

    def descend(self, gradient: Array, rate: float) -> None:
        """Subtract ``rate * gradient``, a full vector, the same on every rank. Collective."""
        pieces = self.pieces.updated
        # In place: the arrays are views of the store.
        for piece, owned in zip(pieces, self.parameters.owned(pieces), strict=True):
            target = owned
            part = self.placement.part(gradient, piece.start, piece.stop)
            target -= rate * beside(part, target)
        self.parameters.publish(self.pieces.published)
        self.changed()

    def zeros_for_state(self, pieces: Sequence[Piece]) -> Array:
        """Return zeros for an optimizer's state: one for each element of ``pieces``."""
        length = sum(piece.length for piece in pieces)
        # In the layout of the state: with offloading it lies in host memory, and the parameters on
        # a GPU.
        vector = self.state_layout.allocate(MemoryCategory.OPTIMIZER_STATE, length)
        vector.fill(0)
        return vector

    def _end_round(self) -> None:
        self.changed()
        self.round.end()
        self.step_number += 1

    def _local_update(self, loss: float, weight: float, rule: Rule) -> StepReport:
        """Update this rank's replica with its own gradient. Communicates nothing."""
        assert isinstance(self.gradients, ReplicatedGradients | OffloadedGradients)
        if self.round.accumulates:
            return StepReport(self.mean(loss, weight), weight, None)
        total, total_weight = self.round.loss, self.round.weight
        if total_weight == 0:
            raise ValueError("this rank has no sample that counts in this step; all weights are 0")
        gradients = self.gradients.local(self.pieces.updated)
        squared = squared_norm(gradients)
        if not (math.isfinite(total) and math.isfinite(squared)):
            what = f"the loss or the gradient of rank {self.backend.rank} is not finite"
            self.round.refuse_nonfinite(what, self.step_number + 1)
        report = self._report(total, total_weight, squared)
        self._change(rule, report, gradients)
        # `synchronize_replicas` weighs each replica by the samples that it has used.
        self.replicas.drift(total_weight)
        self._end_round()
        return report

    def run_pass(
        self, x: Array, y: Array, gradients: GradientStore, *, is_first: bool, is_last: bool,
        sample_start: int = 0, loss: ILossFunction | None = None,
    ) -> tuple[float, float]:  # fmt: skip
        """Run one forward and backward pass; return this rank's loss sum and weight."""
        # Another store is for a caller's own gradient, which a pass never sends.
        compresses = gradients is self.gradients and self._config.enable_gradient_compression
        gradients.begin(BackwardPass(is_first, is_last, self.round.defers, compresses))
        context = Context(seed=self.program.seed, step=self.step_number, sample_start=sample_start)
        batch = Batch(x, y, loss or self.loss, context)
        total, weight = self.program.train(self.parameters, gradients, batch)
        gradients.settle()
        # Only models that are computed whole have state that a pass changes.
        settles = is_last and self.program.needs_whole_parameters
        if settles and self.program.settle(self.backend) and self.leaves is not None:
            self.leaves.refuse_changes()
        return total, weight

    @property
    def knows_loss(self) -> bool:
        """True if steps compute a loss; a black box may compute only its gradient."""
        return self.loss is not None or self.program.has_own_loss

    def mean(self, total: float, weight: float) -> float:
        """Return the mean loss; NaN if a black box computes no loss, or all weights are 0."""
        return total / weight if self.knows_loss and weight > 0 else math.nan

    @contextmanager
    def accumulate(self, *, defer: bool = False) -> Iterator[None]:
        """Let `step` add to the round, and not end it, in the block: see `ShardedModelBase`."""
        if self.round.accumulates:
            raise RuntimeError("accumulate() cannot be nested")
        self.round.accumulates, self.round.defers = True, defer
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self.round.accumulates = False

    def abandon(self) -> None:
        """Drop an unfinished round, and the units in use. Communicates nothing."""
        self.round.end()
        self.gradients.abandon()
        self.parameters.abandon()

    def predict(self, x: Array) -> Array:
        """Return outputs for this rank's inputs. Collective if parameters are sharded."""
        self.layout.device.use()
        inputs = self.program.check(x)
        self.replica.require_one_batch("predict", x, everywhere=self.policy.shards_parameters)
        with self.leaving_no_unit():
            return self.program.predict(self.parameters, inputs)

    def predict_next(self, x: Array, cache: KeyValueCache) -> Array:
        """Return outputs for the last of new tokens: see `Program.predict_next`. Collective."""
        self.layout.device.use()
        x = self.program.check_next(x)
        with self.leaving_no_unit():
            return self.program.predict_next(self.parameters, x, cache)

    def synchronize_replicas(self) -> None:
        """Give every rank the mean of all replicas; a barrier if nothing drifts. Collective."""
        if self.replicas.synchronize():
            self.program.settle(self.world)
            self.changed()

    def mark_equal(self) -> None:
        """Restart with replicas that have the same parameters. Collective."""
        self.replicas.mark_equal()
        self.program.settle(self.world)

    @property
    def held_gradient(self) -> tuple[int, int]:
        """Identity of the gradient in the store, as two counters.

        The first grows when the gradient is overwritten, the second when parameters change.
        """
        return self._gradient, self.version

    def changed(self) -> None:
        """Record a change of the parameters, and notify the program."""
        # A cache of gathered parameters compares this number before it is used again.
        self.version += 1
        self.parameters.changed()
        # Other programs compute with the store's own arrays.
        if self.program.needs_whole_parameters:
            self.program.changed(self.parameters)

    def take(self, full: Array) -> None:
        """Take parameters from the full vector, which is the same on every rank."""
        self.layout.device.use()
        placement = self.placement
        self.parameters.take(lambda start, out: placement.take(full, start, out))
        self.replicas.mark_equal()
        self.changed()

    def read(self) -> None:
        """Continue with the values that every rank has written, as from a file. Collective."""
        self.parameters.refresh()
        self.replicas.mark_equal()
        self.changed()

    def continue_as(self, other: Engine) -> None:
        """Take the step, the record and the drift of ``other``, whose parameters were copied."""
        self.step_number, self.record = other.step_number, replace(other.record)
        self.replicas.weight = other.replicas.weight

    def gather(self) -> Array:
        """Return all parameters in layer order, a new array on every rank. Collective."""
        self.layout.device.use()
        with self.leaving_no_unit():
            return self.program.vector.gather(self.parameters)

    def gather_on(self, root: int) -> Array | None:
        """Return all parameters in layer order on world rank ``root``, else None. Collective."""
        self.layout.device.use()
        with self.leaving_no_unit():
            return self.program.vector.gather_on(
                self.parameters, self.world, root, is_sharded=self.policy.shards_parameters
            )

    def gather_chunks(self) -> Iterator[Array]:
        """Yield all parameters unit by unit; in one chunk on a mesh, whose ranks' units differ."""
        if self.replica.is_on_mesh:
            yield self.gather()
            return
        for unit in self.program.units:
            chunk = self.layout.device.namespace.empty(unit.length, self.layout.dtype)
            self.parameters.read(unit, chunk)
            yield chunk

    @contextmanager
    def leaving_no_unit(self) -> Iterator[None]:
        """Reshard all units after an error: a unit left unsharded would be out of date later."""
        try:
            yield
        except BaseException:
            self.parameters.abandon()
            raise
