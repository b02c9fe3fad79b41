"""The one way in which parameters change."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import starmap

from mpishard.base import Array, Data, read_numbers
from mpishard.communication import CommunicationBackend
from mpishard.contracts import ILossFunction
from mpishard.models.engine.passes import OwnPasses, Passes, Reduced
from mpishard.models.engine.replicas import Replicas
from mpishard.models.engine.update import Policy, Round, Rule, StepReport, TrainingRecord, Update
from mpishard.models.programs.program import Batch, Program
from mpishard.models.stores.gradient_store import BackwardPass, GradientStore
from mpishard.models.stores.norm import squared_norm
from mpishard.models.stores.offload import UpdateStage
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.nn import Context, KeyValueCache
from mpishard.observe import MemoryCategory, span, step_span
from mpishard.sharding import Piece, ShardingConfiguration


class Engine:
    """Runs the forward and backward passes of a program, reduces, checks, updates, publishes.

    Parameters
    ----------
    program : Program
        The computation.
    parameters : ParameterStore
        Store of parameters.
    passes : Passes
        The way of making a reduced gradient.
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
    leaves : GradientLeaves or None
        Leaves of a batch, if its gradient is summed in these.
    pieces : UpdatePieces
        The pieces of an update, for the parameters that are trained now.
    layout : StoreLayout
        Units, ranks, and the ledger in which memory is booked.
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
        self,
        program: Program,
        parameters: ParameterStore,
        passes: Passes,
        state_layout: StoreLayout,
        policy: Policy,
        config: ShardingConfiguration,
    ) -> None:
        self.program = program
        self.parameters = parameters
        self.policy = policy
        self.loss = program.default_loss
        self.step_number = 0
        # Counted apart from steps: a load or an assignment changes parameters without one.
        self.version = 0
        self._gradient = 0  # number of the gradient in the store: see `gradient_identity`
        self.record = TrainingRecord()
        self.has_warned_of_unsaved_attributes = False  # a black box's first checkpoint warns once
        self.computed: tuple[Array, float, float, ILossFunction | None] | None = None
        self.observer: Callable[[list[Update]], AbstractContextManager[None]] | None = None
        self.layout = parameters.layout
        self._is_on_gpu = parameters.layout.device.is_gpu
        self.backend = parameters.backend
        self.world = config.communication_backend
        self.config = config
        # The first ones are kept: `use_passes` returns to them.
        self.passes = self._first_passes = passes
        self.leaves = passes.leaves
        # Apart from `layout`: an offloaded state is in host memory while a GPU computes.
        self._state_layout = state_layout
        # Copies parameters and gradients to the device of the state, and parameters back.
        self._stage = UpdateStage(state_layout) if self._is_on_gpu else None
        self.replica = program.replica
        self.placement = program.vector.placement
        self.replicas = Replicas(parameters, policy, program.replica)
        self.round = Round(config, program, self.layout.subject)
        self._state_before: object = None  # of the model, besides parameters, in an open step
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
        # Before the new layout, which asks the program for the units that nothing trains.
        self.program.freeze(names)
        # A new store of gradients, because frozen units have no memory in it.
        self._gradient += 1
        layout = replace(self.layout, frozen=self.program.frozen_units)
        self.pieces = self.passes.prepare(self, layout)

    @property
    def gradients(self) -> GradientStore:
        """The store of the gradients."""
        return self.passes.store

    def use_passes(self, passes: Passes | None) -> None:
        """Make gradients by the passes of an optimizer, or with None by the first. Collective."""
        self.passes = passes or self._first_passes
        self.freeze(self.program.frozen)

    def sum_over_owners(self, vector: Array, owners: CommunicationBackend | None = None) -> Array:
        """Return the sum over ranks of a vector, or rows, with one entry per parameter. Collective.

        Each rank contributes its sums over the elements that it updates. An element with copies on
        several ranks counts once. ``owners`` are the ranks that update different elements, by
        default those of the strategy.
        """
        placement = self.placement
        # Ranks of a tensor axis hold copies of some parameters; one of them counts each.
        if not placement.is_whole:
            counted = {local.entry.name for local in placement.local_parameters if local.is_counted}
            for index, entry in enumerate(placement.entries):
                if entry.name not in counted:
                    vector[index] = 0
        owners = owners or self.replica.owners(shards_state=self.policy.shards_state)
        return vector if owners is None else owners.all_reduce(vector, subject=self.layout.subject)

    def gradient(
        self,
        x: Data,
        y: Data,
        settings: Mapping[str, object] | None = None,
        *,
        sample_start: int | None = None,
        passes: Passes | None = None,
    ) -> Reduced:
        """Return the gradient of this rank's batch and of all others'; change no parameter.

        Collective: it is the sum over all ranks, unless ``config.auto_sync_gradients`` is off. Then
        it is this rank's own, nothing is communicated, and the report is about its batch alone.
        Inside `accumulate` it only adds to the round.

        Parameters
        ----------
        x, y : Array
            Inputs and targets, shape (samples, ...).
        settings : mapping of str to object, optional
            Values that the rule depends on, such as its rate. The ranks compare them, because
            replicas that are updated with different rates would differ unnoticed.
        sample_start : int, optional
            Index of this rank's first sample among those of all ranks and of the round. If it is
            not given and the program is random, the ranks exchange their numbers of samples; with
            gradient leaves they always do.
        passes : Passes, optional
            Another way of making the gradient than that of the strategy.

        Raises
        ------
        ValueError
            For a batch that does not fit the model, before anything is communicated; on every
            rank, if no rank has a sample that counts, or if ranks of a mesh that compute one
            batch together were given different ones.
        ShardingError
            On every rank, if the ranks accumulated different numbers of batches, or if
            ``settings`` differ; if replicas differ and the step is to be synchronised.
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
        if passes is None:
            passes = self.passes if self.config.auto_sync_gradients else OwnPasses(self)
        if not self.round.is_open:
            self._state_before = self.program.kept_state()
        # Outside of the block below: a refused call leaves an open round as it was.
        passes.require(self)
        if passes.are_of_replicas and self.sums_loss:
            raise ValueError(
                "loss_is_sum=True adds the gradients of all ranks, and here each replica updates "
                "with its own or exchanges them: give a loss that is a mean over the rank's batch"
            )
        try:
            if self.replica.is_on_mesh:
                self.replica.require_one_batch(
                    "step", x, y, everywhere=True, subject=self.layout.subject
                )
            return passes.gradient(self, inputs, targets, settings or {}, sample_start)
        # After an error the round cannot be continued: its gradient may be half reduced.
        except BaseException:
            self.abandon()
            raise

    def update(self, rule: Rule, reduced: Reduced) -> None:
        """Run ``rule`` on the pieces that this rank updates, publish, and count the step.

        Collective. An error leaves the parameters unchanged, unless ``rule`` itself raises it.
        """
        try:
            # Counted below, after it: the step number of a failed update would skip dropout masks.
            self.change(rule, reduced)
        except BaseException:
            self.abandon()
            raise
        self.round.end()
        self._state_before = None
        self.step_number += 1

    def step(
        self,
        x: Data,
        y: Data,
        rule: Rule,
        settings: Mapping[str, object] | None = None,
        *,
        sample_start: int | None = None,
        passes: Passes | None = None,
    ) -> StepReport:
        """Update with the `gradient` of a batch; inside `accumulate` only add to the round.

        Collective. Arguments and errors are those of `gradient`.
        """
        began = time.perf_counter()
        with step_span(self.step_number + 1):
            reduced = self.gradient(x, y, settings, sample_start=sample_start, passes=passes)
            # A batch inside accumulate() is no step: it adds to no record, and publishes nothing.
            if not reduced.is_complete:
                return reduced.report
            self.update(rule, reduced)
        self.record.add(reduced.report, time.perf_counter() - began)
        return reduced.report

    def change(self, rule: Rule, reduced: Reduced) -> None:
        """Let ``rule`` change the parameters, and publish them, but count no step. Collective.

        An observer sees the parameters before and after it.
        """
        pieces, stage = self.pieces.updated, self._stage
        owned = self.parameters.owned(pieces), list(reduced.gradients)
        try:
            # An offloaded state is updated in host memory: gradients are copied there, and the new
            # parameters back.
            with nullcontext(owned) if stage is None else stage.staged(*owned) as (own, gradients):
                updates = list(starmap(Update, zip(pieces, own, gradients, strict=True)))
                watched = nullcontext() if self.observer is None else self.observer(updates)
                with watched, span("update"):
                    rule(updates, reduced.applied or reduced.report)
        finally:  # a rule that failed here may still read gradients elsewhere
            reduced.finish()
        self.parameters.publish(self.pieces.published)
        self.changed()

    def given(self, gradient: Array) -> Reduced:
        """Return a given gradient of the mean loss, a full vector, the same on every rank.

        Raises
        ------
        ShardingError
            If replicas differ; in the middle of a round of accumulation.
        NonFiniteLossError
            On every rank, if the gradient is not finite.
        """
        self.replicas.require_equal("apply_gradients")
        self.round.require_none("apply_gradients()")
        placement = self.placement
        # Frozen parameters keep their values: what the vector has for them counts in no norm.
        trained = [
            gradient[e.start : e.stop]
            for e in placement.entries
            if e.name not in self.program.frozen
        ]
        norm = math.sqrt(*read_numbers([squared_norm(trained)]))
        if not math.isfinite(norm):
            self.round.refuse_nonfinite("the given gradient is not finite", self.step_number + 1)
        pieces = [placement.local(gradient, p.start, p.stop) for p in self.pieces.updated]
        # It is the gradient of a mean already: with a weight of 1 the rule does not divide it.
        return Reduced(pieces, StepReport(math.nan, 1.0, norm))

    def report(self, total: float, weight: float, squared: float) -> StepReport:
        """Return the report of summed losses and weights, and the summed gradient's squares."""
        # The norm of the mean gradient is reported and clipped, not that of the sum.
        norm = math.sqrt(squared) / self.divisor(weight) if weight else 0.0
        return StepReport(self.mean(total, weight), weight, norm, is_sum=self.sums_loss)

    def allocate_state(self, pieces: Sequence[Piece]) -> Array:
        """Return memory for a vector of an optimizer's state of ``pieces``."""
        length = sum(piece.length for piece in pieces)
        # In the layout of the state: with offloading it lies in host memory, and the parameters on
        # a GPU.
        return self._state_layout.allocate(MemoryCategory.OPTIMIZER_STATE, length)

    def zeros_for_state(self, pieces: Sequence[Piece]) -> Array:
        """Return zeros for an optimizer's state: one for each element of ``pieces``."""
        vector = self.allocate_state(pieces)
        vector.fill(0)
        return vector

    def run_pass(
        self,
        x: Data,
        y: Data,
        gradients: GradientStore,
        *,
        this: BackwardPass,
        sample_start: int = 0,
        loss: ILossFunction | None = None,
    ) -> tuple[float | Array, float | Array]:
        """Run one forward and backward pass; return this rank's loss sum and weight.

        On a GPU they are arrays of one element, for which nobody has waited.
        """
        # Before forward: it waits for reductions that a failed step left in the same buffers.
        gradients.begin(this)
        context = Context(seed=self.program.seed, step=self.step_number, sample_start=sample_start)
        batch = Batch(x, y, loss or self.loss, context)
        total, weight = self.program.train(self.parameters, gradients, batch)
        # Reductions overlap with backward; the totals after this pass read their results.
        gradients.await_reductions()
        return total, weight

    @property
    def knows_loss(self) -> bool:
        """True if steps compute a loss; a black box may compute only its gradient."""
        return self.loss is not None or self.program.has_own_loss

    @property
    def sums_loss(self) -> bool:
        """True if the loss is a sum over samples, whose gradient is not divided."""
        return self.program.sums(self.loss)

    def divisor(self, weight: float, loss: ILossFunction | None = None) -> float:
        """Return the number by which the sum of a loss and its gradient are divided."""
        return 1.0 if self.program.sums(loss or self.loss) else weight

    def mean(self, total: float, weight: float, loss: ILossFunction | None = None) -> float:
        """Return the mean loss, or the sum if the loss is one.

        NaN if a black box computes no loss, or all weights are 0.
        """
        return total / self.divisor(weight, loss) if self.knows_loss and weight > 0 else math.nan

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
        if self._state_before is not None:
            self.program.restore_state(self._state_before)
            self._state_before = None
        self.passes.abandon()
        self.parameters.abandon()

    def predict(self, x: Array) -> Array:
        """Return outputs for this rank's inputs. Collective if parameters are sharded."""
        self.layout.device.use()
        inputs = self.program.check(x)
        self.replica.require_one_batch(
            "predict", x, everywhere=self.policy.shards_parameters, subject=self.layout.subject
        )
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
            self.program.share_changed_state(self.world)
            self.changed()

    def mark_equal(self) -> None:
        """Restart with replicas that have the same parameters. Collective."""
        self.replicas.mark_equal()
        self.program.share_changed_state(self.world)

    @property
    def gradient_identity(self) -> tuple[int, int]:
        """Identity of the gradient in the store, as two counters.

        The first grows when the gradient is overwritten, the second when parameters change.
        """
        # Both, because the gradient of a step is stale after a load as after another step.
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
        # The record is copied: the next step of either model must not count in the other.
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
            # A new array for each unit, because the caller may keep it.
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
