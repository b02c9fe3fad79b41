"""Ways of making one reduced gradient: passes on a rank's samples, and the sum over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpishard.base import Array, Data, NoSampleError, read_numbers
from mpishard.models.engine.update import StepReport, UpdatePieces
from mpishard.models.stores.gradient_store import BackwardPass, GradientStore
from mpishard.models.stores.norm import squared_norm
from mpishard.models.stores.offload import OffloadedGradients
from mpishard.models.stores.replicated_gradients import ReplicatedGradients
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.sharding import Piece

if TYPE_CHECKING:
    from mpishard.models.engine.engine import Engine
    from mpishard.models.engine.leaves import GradientLeaves


def _nothing() -> None:
    """Do nothing, after an update whose gradients no other rank reads."""


@dataclass(slots=True)
class Reduced:
    """A gradient that was summed over samples and ranks, for `Engine.update`.

    Parameters
    ----------
    gradients : sequence of Array
        The sums for each of `UpdatePieces.updated`. Read-only. Empty if the round goes on.
    report : StepReport
        Loss and weight of all ranks' samples, and the norm of the mean gradient. The norm is None
        if the passes only added to a round.
    applied : StepReport, optional
        The report that the rule gets, if the gradients are sums of fewer samples. Default:
        ``report``.
    finish : callable
        Called when the rule has read the gradients, also if it raised.
    """

    gradients: Sequence[Array]
    report: StepReport
    applied: StepReport | None = None
    finish: Callable[[], None] = _nothing

    @property
    def is_complete(self) -> bool:
        """False if the round goes on, so that there is nothing to update with."""
        return self.report.gradient_norm is not None


class Passes:
    """Passes on each rank's samples, whose gradients are summed over all ranks.

    A subclass sums otherwise: in leaves, over fewer ranks, or with an exchange between replicas. An
    optimizer may give the engine its own (`Engine.use_passes`).

    Parameters
    ----------
    make_store : callable
        ``make_store(layout)`` makes a store of gradients. Collective.

    Attributes
    ----------
    store : GradientStore
        The gradients.
    leaves : GradientLeaves or None
        Leaves of a batch, if its gradient is summed in these.
    user : str or None
        Class of the optimizer that made these passes.
    is_late : bool
        Whether the gradients are those of an earlier step.
    are_exact : bool
        Whether the gradients are the sums of this step's, so that those of parameters that no pass
        has used are 0.
    are_of_replicas : bool
        Whether replicas update by gradients of their own, or exchange them in another form.
    """

    store: GradientStore
    leaves: GradientLeaves | None = None
    user: str | None = None
    is_late = False
    are_exact = True
    are_of_replicas = False

    def __init__(self, make_store: Callable[[StoreLayout], GradientStore]) -> None:
        # Kept, because a change of the frozen parameters needs a store with other units.
        self._make_store = make_store

    def prepare(self, engine: Engine, layout: StoreLayout) -> UpdatePieces:
        """Make the store, and return the pieces of an update, for other frozen units. Collective.

        They are frozen as in ``layout``.
        """
        self.store = self._make_store(layout)
        return UpdatePieces.of(engine.program, layout, engine.policy)

    def require(self, engine: Engine) -> None:
        """Refuse a step before anything is communicated: a sum over replicas that differ."""
        engine.replicas.require_equal("a synchronised step")

    def gradient(
        self,
        engine: Engine,
        x: Data,
        y: Data,
        settings: Mapping[str, object],
        sample_start: int | None,
    ) -> Reduced:
        """Return the gradient of a checked batch: see `Engine.gradient`."""
        round_ = engine.round
        if sample_start is None:
            sample_start = round_.sample_start(len(x)) if engine.program.is_random else 0
        loss, weight = self.run(engine, x, y, sample_start, is_last=not round_.accumulates)
        if not round_.accumulates:
            return self.reduced(engine, loss, settings)
        # Totals also in a pass that only adds: a rank that left accumulate() is found before the
        # next reduction, which it would not join.
        message = [*read_numbers([loss, weight]), 0.0]
        total, total_weight, _ = round_.totals(message, loss, settings, engine.step_number + 1)
        return Reduced((), StepReport(engine.mean(total, total_weight), total_weight, None))

    def run(
        self, engine: Engine, x: Data, y: Data, sample_start: int, *, is_last: bool
    ) -> tuple[float | Array, float | Array]:
        """Run a pass that adds to the round, and in the last one reduces; return loss and weight.

        Collective if it reduces. On a GPU they are arrays of one element, for which nobody waits.
        """
        round_ = engine.round
        compresses = engine.config.enable_gradient_compression
        this = BackwardPass(not round_.is_open, is_last, round_.defers, compresses)
        own = engine.run_pass(x, y, self.store, this=this, sample_start=sample_start)
        round_.add(*own, engine.program.used or ())
        return own

    def reduced(
        self, engine: Engine, loss: float | Array, settings: Mapping[str, object]
    ) -> Reduced:
        """Return the gradients of the store, with the sums over all ranks. Collective.

        ``loss`` is this rank's in the last pass, for the error if it is not finite.
        """
        # Batch statistics, for example, which each rank's passes have changed.
        if engine.program.share_changed_state(engine.backend):
            self.model_changed()
        total, weight, squared = self.totals(engine, loss, settings)
        # The weight is a sum over all ranks, so that every rank raises this or none.
        if weight == 0:
            raise NoSampleError("no rank has a sample that counts in this step; all weights are 0")
        # Views: the rule reads the sums where they were made, and `finish` frees them.
        gradients = self.store.owned(engine.pieces.updated)
        report = engine.report(total, weight, squared)
        # Late or coded sums may have a part for a parameter that no rank has used in this step.
        if self.are_exact:
            report = replace(report, unused=engine.round.unused)
        return Reduced(gradients, report, finish=self.finish)

    def model_changed(self) -> None:
        """Hook: the passes have changed the model's state besides parameters."""

    def totals(
        self, engine: Engine, loss: float | Array, settings: Mapping[str, object]
    ) -> tuple[float, float, float]:
        """Return sums over all ranks: of losses, of weights, and the gradient's squares."""
        round_ = engine.round
        # Each rank adds the squares of its own piece only, even if the gradient is replicated. In
        # one message, because the cost of a small all-reduce is its latency.
        squares = squared_norm(self.store.owned(engine.pieces.counted))
        message = round_.read(squares)  # the one wait for a GPU in a step
        return round_.totals(message, loss, settings, engine.step_number + 1)

    def finish(self) -> None:
        """Let the gradients be overwritten: the rule has read them."""
        self.store.finish()

    def abandon(self) -> None:
        """Drop the gradients of a round, after an error. Communicates nothing."""
        self.store.abandon()


class OwnPasses(Passes):
    """Passes whose gradient stays on this rank: ``auto_sync_gradients=False``.

    They communicate nothing, and the report is about this rank's samples. They add to the store of
    the engine's passes.
    """

    are_of_replicas = True

    def __init__(self, engine: Engine) -> None:
        # The same memory: a user may switch between synchronised steps and steps alone.
        self.store = engine.gradients

    def require(self, engine: Engine) -> None:
        """Refuse a strategy whose ranks cannot update alone."""
        engine.replicas.require_drifting()
        if engine.leaves is not None:
            engine.passes.require(engine)  # which refuses it

    def gradient(
        self,
        engine: Engine,
        x: Data,
        y: Data,
        settings: Mapping[str, object],
        sample_start: int | None,
    ) -> Reduced:
        round_ = engine.round
        if sample_start is None:
            sample_start = round_.own_sample_start(len(x)) if engine.program.is_random else 0
        loss, weight = self.run(engine, x, y, sample_start, is_last=False)
        if round_.accumulates:
            loss, weight = read_numbers([loss, weight])
            return Reduced((), StepReport(engine.mean(loss, weight), weight, None))
        gradients = local_gradients(self.store, engine.pieces.updated)
        loss, used, squared = round_.read(squared_norm(gradients))
        # This rank alone refuses: the others train replicas of their own, and wait for nobody.
        if used == 0:
            raise ValueError("this rank has no sample that counts in this step; all weights are 0")
        if not (math.isfinite(loss) and math.isfinite(squared)):
            what = f"the loss or the gradient of rank {engine.backend.rank} is not finite"
            round_.refuse_nonfinite(what, engine.step_number + 1)
        report = engine.report(loss, used, squared)
        # `synchronize_replicas` weighs each replica by the samples that it has used.
        return Reduced(gradients, report, finish=lambda: engine.replicas.drift(used))


def local_gradients(store: GradientStore, pieces: Sequence[Piece]) -> list[Array]:
    """Return this rank's own gradients of ``pieces``, of a store that keeps them all."""
    assert isinstance(store, ReplicatedGradients | OffloadedGradients)
    return store.local(pieces)
