"""The state of late updates: the rule's, and the gradients under way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from mpishard.base import Array, Data, Metadata, ShardingError, copy_into
from mpishard.checkpoint import Pieces
from mpishard.communication import differences
from mpishard.models import ShardedModelBase, StepReport, Update
from mpishard.optimizers.replicas.delayed_sums import DelayedSums
from mpishard.optimizers.replicas.exchanged_passes import ExchangedPasses
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.state import ModelState
from mpishard.sharding import Piece

_Item = TypeVar("_Item")


def _newest(items: Sequence[_Item], count: int) -> Sequence[_Item]:
    # Not items[-count:], which has all items if the count is 0.
    return items[max(0, len(items) - count) :]


class DelayedState(ModelState):
    """The rule's state, and the weights of the gradients under way.

    Parameters
    ----------
    rule, model, frozen
        See `ModelState`.
    delay : int
        0 or more.
    user : str
        Class of the optimizer, for errors.

    Attributes
    ----------
    norm : float
        Norm of the last update's gradient; 0 if the last step updated nothing.
    """

    keeps_gradients = True

    def __init__(
        self,
        rule: Optimizer,
        model: ShardedModelBase,
        frozen: frozenset[str],
        delay: int,
        user: str,
    ) -> None:
        super().__init__(rule, model, frozen)
        self.norm = 0.0
        self._delay = delay
        self._weights: list[float] = []  # of the gradients under way, oldest first
        self._saved = 0  # number of gradients in a checkpoint that is read
        self._read: list[list[Array]] = []
        self._passes = ExchangedPasses(
            user, lambda layout, across, pieces: DelayedSums(across, pieces, layout, delay)
        )
        model.engine.use_passes(self._passes)

    @property
    def sums(self) -> DelayedSums:
        """The gradients under way."""
        exchange = self._passes.exchange
        assert isinstance(exchange, DelayedSums)
        return exchange

    def settings(self, update: int | None = None) -> dict[str, object]:
        # A rank whose round failed alone has dropped gradients that the others still have.
        return {**super().settings(update), "gradients under way": self.sums.pending}

    def step(self, x: Data, y: Data, sample_start: int | None) -> StepReport:
        report = super().step(x, y, sample_start)
        return report if report.gradient_norm is None else replace(report, gradient_norm=self.norm)

    def update(self, updates: list[Update], report: StepReport) -> None:
        """Update with the gradient that is due, if one is."""
        if not self._delay:  # this step's gradient is due, also one given to `apply_gradients`
            assert report.gradient_norm is not None
            self.norm = report.gradient_norm
            super().update(updates, report)
            return
        pending = self.sums.pending  # with this step's
        # Gradients that an error has dropped have no weight any more.
        self._weights = [*self._weights, report.weight][-pending:]
        # Reported as 0 in the first steps, which update nothing.
        self.norm = 0.0
        if pending > self._delay:
            assert report.gradient_norm is not None
            weight = self._weights[0]
            # The engine has divided the norm of the late sums by this step's weight, not by theirs.
            self.norm = report.gradient_norm * report.weight / weight
            super().update(updates, replace(report, weight=weight, gradient_norm=self.norm))

    def apply_pending(self) -> int:
        """Make an update of each gradient under way, oldest first; return how many. Collective."""
        engine, passes = self.model.engine, self._passes
        engine.round.require_none("apply_pending_gradients()")
        pending = self.sums.pending
        # Without gradients there is no update, and the schedule may have ended.
        mine = {"gradients under way": pending, **(self.settings() if pending else {})}
        found = differences(self.model.backend, {name: str(value) for name, value in mine.items()})
        if found:
            raise ShardingError(f"the ranks have other gradients under way; by rank, {found}")
        weights = _newest(self._weights, pending)
        try:
            for weight in weights:
                # Ranks of the node may still read the gradient of the update before.
                passes.store.await_readers()
                self.sums.take_oldest(passes.sums())
                passes.store.spread()
                engine.update(super().update, passes.again(engine, weight))
        except BaseException:
            # Ranks may have stopped at different gradients: none of those left may be used.
            engine.abandon()
            raise
        return len(weights)

    # ------------------------------------------------------------------------------- checkpoints

    @property
    def _own_pieces(self) -> tuple[Piece, ...]:
        """The trained pieces of the gradients under way that this rank has."""
        return self.engine.program.trained([exchanged.piece for exchanged in self.sums.pieces])

    def arrays_to_write(self) -> Pieces:
        # All replicas have the same sums, so that the first one writes them.
        pieces = self._written_pieces
        gradients = self.sums.under_way(pieces)
        return {**super().arrays_to_write(), **self._regions_of(pieces, gradients)}

    def expect(self, kinds: Collection[str]) -> None:
        """Read the number of gradients under way from the kinds of a checkpoint."""
        found = sum(f"{self.kind}/delayed{n}" in kinds for n in range(len(kinds)))
        self._saved = found if self._delay else 0  # without a delay such a checkpoint is refused

    def arrays_to_read(self) -> Pieces:
        pieces = self._own_pieces
        self._read = [
            [np.empty(p.length, self.model.dtype) for p in pieces] for _ in range(self._saved)
        ]
        return {**super().arrays_to_read(), **self._regions_of(pieces, self._read)}

    def _regions_of(self, pieces: Iterable[Piece], gradients: Iterable[list[Array]]) -> Pieces:
        """Return the regions of the gradients under way, by kind."""
        return {
            f"{self.kind}/delayed{number}": self.engine.placement.cut(
                (piece.start, values) for piece, values in zip(pieces, vectors, strict=True)
            )
            for number, vectors in enumerate(gradients)
        }

    def checkpoint_metadata(self) -> Metadata:
        weights = list(_newest(self._weights, self.sums.pending))
        return {**super().checkpoint_metadata(), "delayed_weights": weights}

    def restored(self, metadata: Metadata) -> None:
        """Continue with the saved gradients; if there are more than ``delay``, with the newest."""
        super().restored(metadata)
        kept = _newest(self._read, self._delay)
        weights = _newest(metadata.get("delayed_weights", ()), self._delay)
        self._weights = [float(weight) for weight in weights]
        self._read = []
        # First the ring is emptied: messages under way would overwrite what is copied there.
        self.sums.expect(len(kept))
        for targets, saved in zip(self.sums.under_way(self._own_pieces), kept, strict=True):
            for target, values in zip(targets, saved, strict=True):
                copy_into(target, values)
