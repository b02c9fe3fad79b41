"""The optimizer that uses gradients of earlier steps, and the state of stale updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.arguments import as_count
from mpishard.arrays import Array
from mpishard.checkpoint import Pieces
from mpishard.checkpoint.format.consensus import differences
from mpishard.communication.contract.work import Transfer
from mpishard.contracts import IOptimizer
from mpishard.errors import ShardingError
from mpishard.models import ShardedModelBase
from mpishard.models.engine.update import StepReport, Update
from mpishard.models.stores.gradient_store import ReplicatedGradients
from mpishard.observe.ledger import MemoryCategory
from mpishard.optimizers.rules.lamb import LAMB
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.base import ShardedOptimizerBase
from mpishard.optimizers.sharded.delayed_state import DelayedState
from mpishard.optimizers.sharded.state import ModelState
from mpishard.optimizers.sharded.strategies import model_of_replicas, require_replicas
from mpishard.sharding import Piece, ShardingConfiguration, owned_pieces
from mpishard.sharding.configuration import by_node

MOST_LATE = 1000
"""Most steps that a gradient may be late, or a rank behind."""

_FIGURE_BYTES = 2 * np.dtype(np.float64).itemsize  # of a message: the weight and the clock


class AsyncSGDOptimizer(ShardedOptimizerBase):
    """Updates with gradients of earlier steps, so that ranks need not wait.

    With ``delay=s`` the update of step t uses the gradient of step t - s, summed over all ranks
    (Langford, Smola and Zinkevich, "Slow Learners are Fast", NIPS 2009, algorithm 1). Its
    all-reduce begins at the end of step t - s, and travels while the ranks compute the steps after
    it; the first s steps update nothing. Every run has the same bits. In each step the ranks still
    agree on the loss, in one small all-reduce. Sent: as DDP. Memory: s + 1 gradients on each rank.
    A checkpoint has the gradients under way, so that any number of ranks can continue with them,
    and no other optimizer reads it. After `apply_pending_gradients` it has none, and every
    optimizer reads it. An error drops them: the next s steps update nothing again.

    With ``delay`` a replica may be a group of ranks: the ``replica_size`` of the model's
    configuration. Inside a replica the strategy is unchanged, and only gradients between replicas
    are late. Each rank sends, and keeps under way, its own part of the gradient. If ``optimize``
    wraps a plain model, a replica is a node, as with `LocalSGDOptimizer`.

    With ``allow_staleness=s`` above 0 no rank waits for one that is at most s steps behind, and
    no rank gets further ahead (stale synchronous parallel: Ho et al., NIPS 2013, section 2). Each
    rank owns a piece of the parameters, with the rule's state for it. After its step it sends each
    owner that owner's piece of its gradient, and its own piece of the parameters; then it takes the
    messages that have arrived. An owner makes one update of every N gradients, in the order of
    their arrival, whichever of the N ranks they come from: as many updates as DDP for the same
    samples. Two runs differ. Each step's report is of this rank's samples alone. `settle` waits for
    all ranks, applies the gradients that are left, and gives all ranks the same parameters;
    ``optimize`` calls it before each evaluation and checkpoint. Sent: as DDP, in messages.

    With ``allow_staleness=0`` and ``delay=0`` each step is DDP's.

    Parameters
    ----------
    wrapped_optimizer : Optimizer
        The rule and its settings.
    config : ShardingConfiguration
        Backend and choices.
    allow_staleness : int
        Steps that a rank may be behind before others wait for it: 0 to 1000. An order to save and
        end is obeyed after such a number of steps only.
    delay : int
        Steps that each gradient may travel: 0 to 1000. One of the two must be 0.
    strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid"}
        Inside each replica; others than "ddp" need replicas of several ranks. "hybrid" takes a
        wrapped `HybridShardedModel`, each of whose replicas is a mesh of its own.

    Raises
    ------
    TypeError, ValueError
        As `ShardedOptimizerBase`; for other numbers, both above 0, rules that search along a line,
        another strategy, and one that shards without a ``replica_size``; with
        ``allow_staleness`` for rules that need a norm of all parameters, and for replicas of
        several ranks.
    """

    _setting_names = "allow_staleness", "delay"

    def __init__(
        self,
        wrapped_optimizer: IOptimizer,
        config: ShardingConfiguration,
        allow_staleness: int = 0,
        *,
        delay: int = 0,
        strategy: str = "ddp",
    ) -> None:
        super().__init__(wrapped_optimizer, config)
        self.allow_staleness = as_count("allow_staleness", allow_staleness, least=0)
        self.delay = as_count("delay", delay, least=0)
        for name, steps in (("allow_staleness", allow_staleness), ("delay", delay)):
            if steps > MOST_LATE:
                raise ValueError(
                    f"{name} must be 0 to {MOST_LATE} steps, got {steps}: with delay each rank "
                    "keeps one more gradient for each, and with allow_staleness an order to save "
                    "and end is obeyed once in as many steps"
                )
        if allow_staleness and delay:
            raise ValueError(
                f"allow_staleness={allow_staleness} lets each rank make its own steps, but "
                f"delay={delay} needs all ranks in the same step: give one of them"
            )
        if allow_staleness and (strategy != "ddp" or config.replica_size is not None):
            raise ValueError(
                f"allow_staleness={allow_staleness} lets each rank make its own steps, but with "
                f"strategy={strategy!r} and replica_size={config.replica_size} ranks wait for one "
                "another: use delay, or ddp without replica_size"
            )
        self._replicas_differ = self.allow_staleness > 0
        if self.max_staleness:
            self._refused = {
                "last_computed_gradients": "the last gradient is still on its way",
                "apply_gradients": "a given gradient would overtake those on their way: use step, "
                "or DDPOptimizer",
                "serialize": "gradients are on their way, which these bytes do not hold: use "
                "mpishard.checkpoint.save, or save_model",
            }
        if self.delay:
            self._config = by_node(self._config)
        self.model_class = model_of_replicas(strategy, self._config)
        rule = type(self._rule).__name__
        if (allow_staleness or delay) and self._rule.searches:
            raise ValueError(f"{rule} does not accept late gradients: choose another rule")
        if allow_staleness and (self._rule.clip_global_norm or isinstance(self._rule, LAMB)):
            needs = "clip_global_norm" if self._rule.clip_global_norm else rule
            raise ValueError(
                f"{needs} needs a norm over all parameters, but with allow_staleness no rank has "
                "all of them at the same step: leave it out, or use delay"
            )

    @property
    def max_staleness(self) -> int:
        """s: the given ``allow_staleness`` or ``delay``."""
        return self.allow_staleness or self.delay

    def should_sync(self, iteration: int) -> bool:
        """Return whether ``iteration`` is a multiple of s + 1.

        With ``allow_staleness``, ``optimize`` checks only after such steps whether a rank was
        ordered to end.

        Raises
        ------
        ValueError
            For a negative iteration.
        """
        return as_count("iteration", iteration, least=0) % (self.max_staleness + 1) == 0

    @property
    def clocks(self) -> tuple[int, ...]:
        """Number of steps of each rank since the last synchronization, as received so far.

        With ``allow_staleness`` only; otherwise zeros. A loop that assigns samples to free ranks
        ends when their sum is large enough.
        """
        state = self._state
        return tuple(state.clocks) if isinstance(state, _StaleState) else (0,) * self.world_size

    def _make_state(self, model: ShardedModelBase, frozen: frozenset[str]) -> ModelState:
        if self.delay or model.engine.replica.across is not None:
            return DelayedState(self._rule, model, frozen, self.delay, type(self).__name__)
        if self.allow_staleness:
            return _StaleState(self._rule, model, frozen, self.allow_staleness)
        return super()._make_state(model, frozen)

    def _require_fit(self, model: ShardedModelBase) -> None:
        if self.allow_staleness:
            super()._require_fit(model)
        else:
            require_replicas(model, type(self).__name__)
        if self.max_staleness or model.engine.replica.across is not None:
            self._refuse_other_gradients(model, "keeps several gradients under way")
        if self.allow_staleness and model.engine.layout.device.is_gpu:
            raise NotImplementedError(
                f"{type(self).__name__} sends pieces of host memory with allow_staleness, and the "
                "model is on a GPU: use delay"
            )

    def apply_pending_gradients(self) -> int:
        """Update with the gradients that ``delay`` has left under way. Collective.

        Afterwards a checkpoint fits every optimizer with the same rule, as after `settle` with
        ``allow_staleness``. If training continues, its first s steps update nothing again.

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

    def sum_over_reports(self, sums: Array) -> Array:
        """Return the sum over all ranks' reports. Collective if reports differ between ranks."""
        return self.backend.all_reduce(sums.copy()) if self.allow_staleness else sums


class _StaleState(ModelState):
    """The rule's state for the piece that this rank owns, and the messages between ranks.

    A message of rank r to rank q has, as one array: r's gradient of the piece that q owns, the
    parameters that r owns, the weight of the gradient, and r's clock, which is infinite in the last
    message before `settle`. Weight and clock are the bytes of two float64 numbers: in float16 a
    number above 2048 would not be exact.

    Attributes
    ----------
    clocks : list of int
        Number of steps of each rank since the last synchronization, as received so far.
    """

    def __init__(
        self, rule: Optimizer, model: ShardedModelBase, frozen: frozenset[str], staleness: int
    ) -> None:
        super().__init__(rule, model, frozen)
        engine, backend = model.engine, model.backend
        self._staleness = staleness
        # The pieces that each rank owns of the units that are trained.
        units = [unit for unit in engine.layout.units
                 if unit.index not in engine.program.frozen_units]  # fmt: skip
        size, rank = backend.world_size, backend.rank
        self._owned = [owned_pieces(units, size, owner) for owner in range(size)]
        self._lengths = [sum(piece.length for piece in pieces) for pieces in self._owned]
        self._sum = engine.state_layout.allocate(MemoryCategory.GRADIENTS, self._lengths[rank])
        self._arrived, self._weight = 0, 0.0  # gradients in the sum
        # A communicator of its own, so that messages of the user's code cannot be taken for these.
        self._group = backend
        if size > 1:
            group = backend.split(0)
            assert group is not None
            group._name_group("gradients")
            self._group = group
        self._figures = _FIGURE_BYTES // model.dtype.itemsize  # elements of weight and clock
        self._coming: dict[int, Transfer] = {}
        self._closed = {rank}  # the ranks that send nothing until `settle` has ended
        self._has_taken = False  # parameters were received, and the program is not yet notified
        self.clocks = [0] * size

    def _updated_pieces(self) -> tuple[Piece, ...]:
        return self.engine.pieces.owned

    # ------------------------------------------------------------------------------------- steps

    def step(self, x: Array, y: Array, sample_start: int | None) -> StepReport:
        self.wait_for_slow_ranks()
        start = self.model.rank * len(x) if sample_start is None else sample_start
        return self.engine.step(x, y, self.update, sample_start=start, alone=True)

    def wait_for_slow_ranks(self) -> None:
        """Take all messages that have arrived; wait until no rank is more than s steps behind."""
        self._take_what_has_come()
        mine = self.clocks[self.model.rank]
        for rank in range(self.model.world_size):
            while rank not in self._closed and self.clocks[rank] < mine - self._staleness:
                self._take(rank, self._next_message(rank).wait())
        if self._has_taken:
            self.engine.changed()
            self._has_taken = False

    def update(self, updates: list[Update], report: StepReport) -> None:
        """Send this rank's gradient to the owners, and update the piece that this rank owns."""
        engine, rank = self.engine, self.model.rank
        assert isinstance(engine.gradients, ReplicatedGradients)
        # Replicas differ from now on until `settle`, even if this batch has no samples.
        engine.replicas.drift(1.0)
        self.clocks[rank] += 1
        self._take_what_has_come()
        gradients = [engine.gradients.local(pieces) for pieces in self._owned]
        self._add(_joined(gradients[rank], self.model.dtype), report.weight)
        for other, parts in enumerate(gradients):
            if other != rank:
                self._send(other, _joined(parts, self.model.dtype), report.weight,
                           self.clocks[rank])  # fmt: skip

    def _add(self, gradient: Array, weight: float) -> None:
        """Count a gradient of this rank's piece; update if it is the N-th."""
        if self._arrived == 0:
            self._sum[...] = 0
        self._sum += gradient
        self._weight += weight
        self._arrived += 1
        if self._arrived >= self.model.world_size:
            self._apply()

    def _apply(self) -> None:
        weight, self._arrived, self._weight = self._weight, 0, 0.0
        if not weight:  # without samples it is counted all the same, as by all other owners
            self.steps += 1
            return
        # The sum has the frozen parameters of a unit, too.
        starts = {p.unit.index: p.offset - p.start for p in self._owned[self.model.rank]}
        updates = []
        owned = self.engine.parameters.owned(self.pieces)
        for piece, parameters in zip(self.pieces, owned, strict=True):
            start = starts[piece.unit.index] + piece.start
            updates.append(Update(piece, parameters, self._sum[start : start + piece.length]))
        super().update(updates, StepReport(math.nan, weight, 0.0))

    # ---------------------------------------------------------------------------------- messages

    def _send(self, other: int, gradient: Array, weight: float, clock: float) -> None:
        mine = self.engine.parameters.owned(self._owned[self.model.rank])
        dtype = self.model.dtype
        message = np.concatenate([gradient, *mine, np.array([weight, clock]).view(dtype)])
        self._group.send_async(message, other)  # the backend keeps the message until it is sent

    def _next_message(self, rank: int) -> Transfer:
        """Return the receive of the next message of ``rank``."""
        if rank not in self._coming:
            count = self._lengths[self.model.rank] + self._lengths[rank] + self._figures
            self._coming[rank] = self._group.receive_async(rank, count, dtype=self.model.dtype)
        return self._coming[rank]

    def _take_what_has_come(self) -> None:
        for rank in range(self.model.world_size):
            while rank not in self._closed:
                receive = self._next_message(rank)
                self._group.progress()
                if not receive.done:
                    break
                self._take(rank, receive.wait())

    def _take(self, rank: int, message: Array) -> None:
        """Add a gradient, and copy the parameters that ``rank`` owns."""
        del self._coming[rank]
        self._has_taken = True
        own = self._lengths[self.model.rank]
        pieces = self._owned[rank]
        for piece, values in zip(pieces, self.engine.parameters.owned(pieces), strict=True):
            values[...] = message[own:][piece.in_shard]
        weight, clock = message[-self._figures :].view(np.float64).tolist()
        if math.isinf(clock):
            self._closed.add(rank)
        else:
            self.clocks[rank] = int(clock)
            self._add(message[:own], weight)

    def settle(self) -> None:
        """Wait for all ranks' steps, apply them, and give all the same parameters. Collective."""
        engine, backend = self.model.engine, self.model.backend
        for other in range(backend.world_size):
            if other != backend.rank:
                self._send(other, np.zeros(self._lengths[other], self.model.dtype), 0.0, math.inf)
        for other in range(backend.world_size):
            while other not in self._closed:
                self._take(other, self._next_message(other).wait())
        self._closed = {backend.rank}
        if self._arrived:
            self._apply()
        # The settings of the last update: a schedule may be a table that ends with it.
        settings = self.settings(max(0, self.steps - 1))
        found = differences(backend, {n: str(v) for n, v in settings.items()})
        if found:
            raise ShardingError(f"the ranks have updated with different settings; by rank, {found}")
        whole = [piece for piece in engine.layout.pieces(sharded=False)
                 if piece.unit.index not in engine.program.frozen_units]  # fmt: skip
        mine = engine.parameters.owned(self._owned[backend.rank])
        for own, values in zip(mine, engine.parameters.owned(whole), strict=True):
            backend.all_gather(own.copy(), out=values)
        self.clocks = [0] * backend.world_size
        engine.mark_equal()
        engine.changed()

    # ------------------------------------------------------------------------------- checkpoints

    def arrays_to_write(self) -> Pieces:
        return self._regions(self.pieces)


def _joined(arrays: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)
