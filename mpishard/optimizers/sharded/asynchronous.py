"""The optimizer whose updates use gradients of earlier steps."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from mpishard.arguments import as_integer
from mpishard.arrays import Array, copy_into
from mpishard.checkpoint import Pieces
from mpishard.contracts import IOptimizer
from mpishard.models import DDPModel, ShardedModelBase
from mpishard.models.engine.update import StepReport, Update
from mpishard.models.stores.delayed_gradients import DelayedGradients
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.base import ShardedOptimizerBase
from mpishard.optimizers.sharded.state import ModelState
from mpishard.sharding import ShardingConfiguration

__all__ = ["AsyncSGDOptimizer"]


class AsyncSGDOptimizer(ShardedOptimizerBase):
    """Updates a `DDPModel` with gradients of earlier steps, so that nobody waits for the network.

    With ``delay=s`` the update of step t uses the gradient of step t - s, summed over all ranks
    (Langford, Smola and Zinkevich, "Slow Learners are Fast", NIPS 2009, algorithm 1). Its
    all-reduce begins in step t - s, and travels while the ranks compute the steps after it; the
    first s steps update nothing. Every run has the same bits. In each step the ranks still agree on
    the loss, in one small all-reduce. Sent: as DDP. Memory: s + 1 gradients on each rank.

    A checkpoint has the gradients under way, so that any number of ranks goes on with them. An
    error drops them: the next s steps update nothing again.

    Parameters
    ----------
    wrapped_optimizer : Optimizer
        The rule and its settings.
    config : ShardingConfiguration
        Backend and choices.
    delay : int
        s: 0 or more. With 0 each step is DDP's.

    Raises
    ------
    TypeError, ValueError
        As `ShardedOptimizerBase`; for a negative delay, and rules that search along a line.
    """

    model_class: ClassVar[type[ShardedModelBase]] = DDPModel

    def __init__(
        self, wrapped_optimizer: IOptimizer, config: ShardingConfiguration, *, delay: int = 0
    ) -> None:
        super().__init__(wrapped_optimizer, config)
        if as_integer("delay", delay) < 0:
            raise ValueError(f"delay must be 0 or more, got {delay}")
        if delay and self._rule.searches:
            raise ValueError(
                f"{type(self._rule).__name__} needs the gradient of now: choose another rule, or "
                "delay=0"
            )
        self.delay = int(delay)

    @property
    def max_staleness(self) -> int:
        """s, the greatest number of steps by which a gradient is late."""
        return self.delay

    def should_sync(self, iteration: int) -> bool:
        """Return whether ``iteration``, counted from 0, is a multiple of s + 1.

        Raises
        ------
        ValueError
            For a negative iteration.
        """
        if as_integer("iteration", iteration) < 0:
            raise ValueError(f"iteration must be 0 or more, got {iteration}")
        return iteration % (self.max_staleness + 1) == 0

    def get_options(self) -> Mapping[str, Any]:
        return {**super().get_options(), "delay": self.delay}

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "delay": self.delay}

    def _refusals(self) -> Mapping[str, str]:
        if not self.delay:
            return {}
        return {
            "last_computed_gradients": "the last gradient is still on its way",
            "apply_gradients": "a given gradient would overtake those on their way: use step, or "
            "DDPOptimizer",
            "serialize": "gradients are on their way, which these bytes do not hold: use "
            "mpishard.checkpoint.save, or save_model",
        }

    def _make_state(self, model: ShardedModelBase, frozen: frozenset[str]) -> ModelState:
        if not self.delay:
            return super()._make_state(model, frozen)
        return _DelayedState(self._rule, model, frozen, self.delay)

    def _require_model_of_this_kind(self, model: ShardedModelBase) -> None:
        super()._require_model_of_this_kind(model)
        if model is self.model or not self.delay:
            return
        config = model.sharding_configuration
        for name in ("enable_gradient_compression", "gradient_leaves"):
            if getattr(config, name):
                raise ValueError(
                    f"{type(self).__name__} keeps several gradients under way, which {name}="
                    f"{getattr(config, name)} does not; leave one of them out"
                )
        if not config.auto_sync_gradients:
            raise ValueError(
                f"{type(self).__name__} brings the ranks together: leave out "
                "auto_sync_gradients=False"
            )

    def _run_step(
        self, state: ModelState, x: Array, y: Array, sample_start: int | None
    ) -> StepReport:
        report = super()._run_step(state, x, y, sample_start)
        if isinstance(state, _DelayedState) and report.gradient_norm is not None:
            return replace(report, gradient_norm=state.norm)
        return report


class _DelayedState(ModelState):
    """The rule's state, and what it needs to know of the gradients under way.

    Attributes
    ----------
    norm : float
        Of the gradient of the last update; 0 if there was none.
    """

    keeps_gradients = True

    def __init__(
        self, rule: Optimizer, model: ShardedModelBase, frozen: frozenset[str], delay: int
    ) -> None:
        super().__init__(rule, model, frozen)
        self.norm = 0.0
        self._delay = delay
        self._weights: list[float] = []  # of the gradients under way, oldest first
        self._kind = f"optimizer/{type(rule).__name__}/delayed"
        self._saved = 0  # gradients in a checkpoint that is read
        self._read: list[list[Array]] = []
        model.engine.lend_gradients(
            "AsyncSGDOptimizer", lambda layout: DelayedGradients(layout, delay)
        )

    @property
    def _store(self) -> DelayedGradients:
        # Looked up: the engine makes it anew if other parameters are frozen.
        store = self.model.engine.gradients
        assert isinstance(store, DelayedGradients)
        return store

    def settings(self) -> dict[str, Any]:
        # A rank whose round failed alone has dropped what the others still have.
        return {**super().settings(), "gradients under way": self._store.pending}

    def update(self, updates: list[Update], report: StepReport) -> None:
        """Update with the gradient that is due, if one is."""
        pending = self._store.pending  # with this step's
        self._weights = [*self._weights, report.weight][-pending:]
        self.norm = 0.0
        if pending > self._delay:
            assert report.gradient_norm is not None
            weight = self._weights[0]
            self.norm = report.gradient_norm * report.weight / weight
            super().update(updates, replace(report, weight=weight, gradient_norm=self.norm))

    # ------------------------------------------------------------------------------- checkpoints

    def arrays_to_write(self) -> Pieces:
        engine = self.model.engine
        pieces = engine.pieces.to_write(engine.program)
        under_way = {
            f"{self._kind}{number}": engine.placement.cut(
                (piece.start, part) for piece, part in zip(pieces, parts, strict=True)
            )
            for number, parts in enumerate(self._store.parts(pieces))
        }
        return {**super().arrays_to_write(), **under_way}

    def expect(self, kinds: Collection[str]) -> None:
        """Learn from the kinds of a checkpoint how many gradients were under way."""
        self._saved = sum(bool(re.fullmatch(re.escape(self._kind) + r"\d+", k)) for k in kinds)

    def arrays_to_read(self) -> Pieces:
        engine = self.model.engine
        pieces = engine.pieces.updated
        self._read = [[np.empty(p.length, self.model.dtype) for p in pieces]
                      for _ in range(self._saved)]  # fmt: skip
        under_way = {
            f"{self._kind}{number}": engine.placement.cut(
                (piece.start, part) for piece, part in zip(pieces, parts, strict=True)
            )
            for number, parts in enumerate(self._read)
        }
        return {**super().arrays_to_read(), **under_way}

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        weights = self._weights[len(self._weights) - self._store.pending :]
        return {**super().checkpoint_metadata(), "delayed_weights": weights}

    def restored(self, metadata: Mapping[str, Any]) -> None:
        """Go on with the saved gradients; of more than ``delay`` with the newest."""
        super().restored(metadata)
        kept = self._read[max(0, len(self._read) - self._delay) :]
        self._weights = [float(w) for w in metadata.get("delayed_weights", ())][-self._delay :]
        self._read = []
        self._store.expect(len(kept))
        for targets, parts in zip(self._store.parts(self.model.engine.pieces.updated), kept,
                                  strict=True):  # fmt: skip
            for target, part in zip(targets, parts, strict=True):
                copy_into(target, part)
