"""The optimizer that uses gradients of earlier steps."""

from __future__ import annotations

from mpishard.base import as_count
from mpishard.contracts import IOptimizer
from mpishard.models import ShardedModelBase
from mpishard.optimizers.replicas.delayed_state import DelayedState
from mpishard.optimizers.replicas.wrapper import ReplicasOptimizer
from mpishard.optimizers.sharded.state import ModelState
from mpishard.sharding import ShardingConfiguration, refuse_line_search

MOST_LATE = 1000
"""Most steps that a gradient may be late."""


class AsyncSGDOptimizer(ReplicasOptimizer):
    """Updates with gradients of earlier steps, so that ranks need not wait for their sums.

    With ``allow_staleness=s`` the update of step t uses the gradient of step t - s, summed over all
    ranks (Langford, Smola and Zinkevich, "Slow Learners are Fast", NIPS 2009, algorithm 1). Its
    all-reduce begins at the end of step t - s, and travels while the ranks compute the steps after
    it; the first s steps update nothing. Every run has the same bits. In each step the ranks still
    agree on the loss, in one small all-reduce. Sent: as DDP. Memory: s + 1 gradients on each rank.
    A checkpoint has the gradients under way, so that any number of ranks can continue with them,
    and no other optimizer reads it. After `apply_pending_gradients` it has none, and every
    optimizer reads it. An error drops them: the next s steps update nothing again.

    A replica may be a group of ranks, as with `LocalSGDOptimizer`, and by default a node. Only
    gradients between replicas are late. Each rank sends, and keeps under way, its own part of the
    gradient.

    With ``allow_staleness=0`` each step is DDP's.

    Parameters
    ----------
    wrapped_optimizer : Optimizer
        The rule and its settings.
    config : ShardingConfiguration
        Backend and choices.
    allow_staleness : int
        Steps that each gradient may travel: 0 to 1000.
    strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid"}
        Inside each replica: see `LocalSGDOptimizer`.

    Raises
    ------
    TypeError, ValueError
        As `LocalSGDOptimizer`, and for other numbers.
    """

    _setting_names = ("allow_staleness",)

    def __init__(
        self,
        wrapped_optimizer: IOptimizer,
        config: ShardingConfiguration,
        allow_staleness: int = 0,
        *,
        strategy: str = "ddp",
    ) -> None:
        super().__init__(wrapped_optimizer, config)
        self.allow_staleness = as_count("allow_staleness", allow_staleness, least=0)
        if allow_staleness > MOST_LATE:
            raise ValueError(
                f"allow_staleness must be 0 to {MOST_LATE} steps, got {allow_staleness}: each rank "
                "keeps one more gradient for each"
            )
        # Without a delay it trains as DDP, and refuses nothing.
        if self.allow_staleness:
            # A line search needs the gradient at the point that it tries.
            if self._rule.searches:
                refuse_line_search(type(self._rule).__name__, "gradients come late")
            self._refused = {
                "last_computed_gradients": "the last gradient is still on its way",
                "apply_gradients": "a given gradient would overtake those on their way: use step, "
                "or DDPOptimizer",
            }
        self._choose_replicas(strategy)

    @property
    def max_staleness(self) -> int:
        """s: the given ``allow_staleness``."""
        return self.allow_staleness

    def should_sync(self, iteration: int) -> bool:
        """Return whether ``iteration`` is a multiple of s + 1.

        Raises
        ------
        ValueError
            For a negative iteration.
        """
        return as_count("iteration", iteration, least=0) % (self.max_staleness + 1) == 0

    @property
    def _is_plain(self) -> bool:
        return not self.allow_staleness

    def _make_state(self, model: ShardedModelBase, frozen: frozenset[str]) -> ModelState:
        # No ring of late gradients, and no passes of its own: the engine's are the same.
        if self._is_plain:
            return super()._make_state(model, frozen)
        return DelayedState(self._rule, model, frozen, self.allow_staleness, type(self).__name__)

    def apply_pending_gradients(self) -> int:
        """Update with the gradients that are still under way. Collective.

        Afterwards a checkpoint fits every optimizer with the same rule. If training continues, its
        first s steps update nothing again.

        Returns
        -------
        int
            Number of updates made: at most s.

        Raises
        ------
        ShardingError
            On every rank, if some have dropped gradients after an error of their own.
        NonFiniteLossError
            On every rank, if a gradient is not finite.
        """
        state = self._state
        return state.apply_pending() if isinstance(state, DelayedState) else 0
