"""The state of local steps: this rank's inner state, and the exchanges between replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mpishard.base import (
    BFLOAT16,
    Array,
    Data,
    Metadata,
    NoSampleError,
    ShardingError,
    array_namespace,
    beside,
    copy_into,
)
from mpishard.checkpoint import Pieces
from mpishard.models import (
    Engine,
    Passes,
    Reduced,
    ShardedModelBase,
    StepReport,
    Update,
    local_gradients,
    pieces_to_write,
    squared_norm,
)
from mpishard.optimizers.replicas.codes import Code, Int8, Rounded
from mpishard.optimizers.replicas.exchange import CodedExchange, Exchange
from mpishard.optimizers.replicas.exchanged_passes import exchanged_pieces
from mpishard.optimizers.rules.pieces import PieceViews, UpdateContext, segments_of
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.state import ModelState
from mpishard.sharding import Piece, Region

CODES: dict[str, Code] = {
    "float32": Rounded(np.dtype(np.float32)), "bfloat16": Rounded(BFLOAT16), "int8": Int8(),
}  # fmt: skip
"""The dtypes in which replicas may exchange the changes of their parameters."""


@dataclass(frozen=True)
class LocalSettings:
    """The arguments of `LocalSGDOptimizer` that its state needs."""

    synchronization_period: int
    outer: Optimizer | None
    exchange: str | None
    start_step: int
    start_period: int


class ReplicaPasses(Passes):
    """Passes whose gradient is summed over the ranks of one replica.

    All ranks agree on losses, settings and errors, and the report is about all ranks' samples. They
    add to the store of the engine's passes.
    """

    are_of_replicas = True

    def __init__(self, engine: Engine) -> None:
        # Replicas of one rank reduce nothing.
        self._is_grouped = engine.replica.is_grouped

    def require(self, engine: Engine) -> None:
        engine.replicas.require_drifting()

    def run(
        self, engine: Engine, x: Array, y: Array, sample_start: int, *, is_last: bool
    ) -> tuple[float | Array, float | Array]:
        self.store = engine.gradients
        is_last &= self._is_grouped
        return super().run(engine, x, y, sample_start, is_last=is_last)

    def reduced(
        self, engine: Engine, loss: float | Array, settings: Mapping[str, object]
    ) -> Reduced:
        round_, store, pieces = engine.round, self.store, engine.pieces
        if self._is_grouped:
            engine.program.share_changed_state(engine.backend)
            gradients, counted = store.owned(pieces.updated), store.owned(pieces.counted)
        else:
            gradients = counted = local_gradients(store, pieces.updated)
        # The norm of this replica's gradient alone, because no sum over replicas is made.
        replica = own = np.array(round_.read(squared_norm(counted)))
        if self._is_grouped:
            replica = engine.replica.group.all_reduce(own.copy())
        total, weight, _ = round_.totals(own, loss, settings, engine.step_number + 1)
        if weight == 0:
            raise NoSampleError("no rank has a sample that counts in this step; all weights are 0")
        # Two reports: the caller reads the loss of all ranks, the rule the weight of its replica.
        mine = engine.report(*map(float, replica))
        report = StepReport(engine.mean(total, weight), weight, mine.gradient_norm)

        def finish() -> None:
            if self._is_grouped:
                store.finish()
            engine.replicas.drift(mine.weight)

        return Reduced(gradients, report, mine, finish)


class LocalState(ModelState):
    """The inner rule's state of this rank, and this rank's pieces of the outer rule's.

    Attributes
    ----------
    since : int
        Steps since all replicas were equal.
    """

    def __init__(
        self,
        rule: Optimizer,
        model: ShardedModelBase,
        frozen: frozenset[str],
        settings: LocalSettings,
    ) -> None:
        super().__init__(rule, model, frozen)
        self.since = 0
        self._given = settings
        self._outer = settings.outer
        self._writers = 1  # number of replicas in a checkpoint that is read
        self._read: list[dict[str, Array]] = []  # of each replica in it that this one reads
        engine = model.engine
        self._agreements = -1  # `agreements` of the engine's replicas at the last `_begin_period`
        # The ranks that have the same pieces of the other replicas.
        self._is_grouped = engine.replica.is_grouped
        self._across = engine.replica.across
        self._pieces: tuple[Piece, ...] = ()  # the trained pieces that this rank owns
        self._exchanges = self._make_exchanges()
        self._outer_steps = 0
        self.passes = ReplicaPasses(engine)
        names = () if self._outer is None else ("anchor", *self._outer.needed_state())
        self._outer_state = {name: engine.zeros_for_state(self._pieces) for name in names}

    def _make_exchanges(self) -> list[Exchange]:
        """Return an exchange for each trained unit; two or more if some of it is replicated."""
        engine, name, exchanges, owned = self.engine, self._given.exchange, [], []
        position = 0
        self._trained = [
            piece
            for piece in engine.layout.pieces(sharded=self._is_grouped)
            if piece.unit.index not in engine.program.frozen_units
        ]
        # Ranks of a replica that hold copies of a parameter must get the same bits: their changes
        # travel as they are if codes depend on the other values of a piece.
        alike = engine.program.vector.replicated_ranges() if name == "int8" else []
        for exchanged in exchanged_pieces(self._trained, replicated=alike):
            piece = exchanged.piece
            if name in (None, self.model.dtype.name) or exchanged.is_replicated:
                exchange = Exchange(self._across, piece)
            else:
                exchange = CodedExchange(
                    self._across,
                    piece,
                    CODES[name],
                    self.model.dtype,
                    engine.layout.ledger,
                    exchanged.key,
                )
            exchanges.append(exchange)
            start, stop = piece.start + exchange.own.start, piece.start + exchange.own.stop
            owned.append(Piece(piece.unit, start, stop, position))
            position += stop - start
        self._pieces = engine.program.trained(owned)
        for exchange in exchanges:
            whole = exchange.piece
            exchange.pieces = [
                p
                for p in self._pieces
                if p.unit.index == whole.unit.index and whole.start <= p.start < whole.stop
            ]
        return exchanges

    # ---------------------------------------------------------------------------------- exchanges

    def update(self, updates: list[Update], report: StepReport) -> None:
        """Update this replica, if it has samples."""
        # Without samples there is no mean gradient; the other replicas go on.
        if report.weight:
            super().update(updates, report)

    def step(self, x: Data, y: Data, sample_start: int | None) -> StepReport:
        before = self.steps
        self._begin_period()
        report = super().step(x, y, sample_start)
        if report.gradient_norm is not None:  # otherwise the step added to a round
            self.steps = before + 1  # also of a rank without samples
            self.since += 1
            given = self._given
            starts = self.steps <= given.start_step
            period = given.start_period if starts else given.synchronization_period
            if self.since == period or self.steps == given.start_step:
                self.settle()
        return report

    def _begin_period(self) -> None:
        """Record the parameters, if all replicas were made equal since the last step."""
        agreements = self.engine.replicas.agreements
        if agreements == self._agreements:
            return
        self._agreements, self.since = agreements, 0
        for exchange, values in zip(self._exchanges, self._exchanged(), strict=True):
            exchange.agree(values)
            if self._outer is not None:  # the outer rule begins at these values
                start = exchange.piece.start
                for piece in exchange.pieces:
                    own = values[piece.start - start : piece.stop - start]
                    copy_into(self._outer_state["anchor"][piece.in_shard], own)

    def _exchanged(self) -> list[Array]:
        """Return the parameters that this rank exchanges, piece by piece, as writable views."""
        return self.engine.parameters.owned([exchange.piece for exchange in self._exchanges])

    def settle(self) -> None:
        """Make all replicas equal now. Collective."""
        if self._are_equal:
            return
        engine = self.engine
        weight = engine.replicas.weight
        # Over all ranks, which is a barrier: ranks of a replica may still read the memory that is
        # changed below. One rank of each replica gives its weight.
        counts = not self._is_grouped or engine.replica.group.rank == 0
        mine = np.array([weight * counts])
        total = float(engine.world.all_reduce(mine, subject=engine.layout.subject)[0])
        if total:  # otherwise no replica has used a sample
            self._average(weight / total)
        engine.mark_equal()

    @property
    def _are_equal(self) -> bool:
        return self._agreements != self.engine.replicas.agreements or not self.since

    def _average(self, share: float) -> None:
        """Take the mean of all replicas, or the outer rule's step towards it. Collective."""
        engine, exchanges = self.engine, self._exchanges
        # All exchanges begin before the first is waited for, so that they travel at the same time.
        for exchange, values in zip(exchanges, self._exchanged(), strict=True):
            exchange.begin(values, share, self.steps)
        means = [exchange.mean() for exchange in exchanges]
        if self._outer is not None and self.steps > self._given.start_step:
            self._step_outer(self._outer, means)
        for exchange, mean in zip(exchanges, means, strict=True):
            exchange.answer(mean)
        for exchange in exchanges:
            exchange.finish()
        if self._is_grouped:
            engine.parameters.publish(self._trained)
        engine.changed()

    def _step_outer(self, outer: Optimizer, means: Sequence[Array]) -> None:
        """Update the anchor by the change of the mean, and write it to ``means``. Collective."""
        engine = self.engine
        self._outer_steps += 1
        views, targets = [], []
        for exchange, mean in zip(self._exchanges, means, strict=True):
            first = exchange.piece.start + exchange.own.start
            for piece in exchange.pieces:
                target = mean[piece.start - first : piece.stop - first]
                state = {name: v[piece.in_shard] for name, v in self._outer_state.items()}
                anchor = state.pop("anchor")
                # The change of the mean is the gradient of the outer rule, which subtracts it.
                segments = segments_of(engine.program.entries, piece)
                views.append(PieceViews(anchor, anchor - beside(target, anchor), state, segments))
                targets.append(target)
        names = [entry.name for entry in self.model.parameter_entries]
        outer.update_all(
            views,
            UpdateContext(
                step=self._outer_steps,
                learning_rate=outer.checked_rate(self._outer_steps - 1),
                gradient_scale=1.0,
                parameter_names=names,
                sum_over_owners=partial(engine.sum_over_owners, owners=engine.world),
            ),
        )
        for owned, target in zip(views, targets, strict=True):
            copy_into(target, owned.parameters)

    # ------------------------------------------------------------------------------ checkpoints
    # Kinds: "<state name>@<r>" of replica r, and "outer_<state name>".

    def arrays_to_write(self) -> Pieces:
        if not self._are_equal:
            raise ShardingError(
                "the state of local steps needs equal replicas: call the optimizer's settle() on "
                "all ranks first"
            )
        engine, across = self.engine, self._across
        pieces = engine.pieces
        mine = self._regions(
            pieces.to_write(engine.program) if self._is_grouped else pieces.updated
        )
        each = {
            f"{kind}@{r}": regions if r == across.rank else []
            for kind, regions in mine.items()
            for r in range(across.world_size)
        }
        return {**each, **self._outer_regions(pieces_to_write(self._pieces, engine.placement))}

    def expect(self, kinds: Collection[str]) -> None:
        """Read the number of replicas from the kinds of a checkpoint."""
        found = [
            r
            for r in range(len(kinds))
            for name in self.vectors
            if f"{self.kind}/{name}@{r}" in kinds
        ]
        self._writers = 1 + max(found, default=self._across.world_size - 1)

    def arrays_to_read(self) -> Pieces:
        size, rank = self._across.world_size, self._across.rank
        self._read = []
        found = self._outer_regions(self._pieces)
        for r in range(self._writers):
            # If more replicas were saved, one reads several, for their mean. If fewer, several read
            # one.
            pieces: Sequence[Piece] = ()
            vectors = self.vectors
            if r % size == rank if self._writers >= size else r == rank % self._writers:
                pieces = self.engine.pieces.updated
                vectors = {n: array_namespace(v).zeros_like(v) for n, v in vectors.items()}
                self._read.append(vectors)
            regions = self._regions(pieces, vectors)
            found |= {f"{kind}@{r}": given for kind, given in regions.items()}
        return found

    def _outer_regions(self, pieces: Sequence[Piece]) -> dict[str, Sequence[tuple[Region, Array]]]:
        """Return the outer state without the anchor: that is equal to the parameters."""
        outer = {f"outer_{n}": v for n, v in self._outer_state.items() if n != "anchor"}
        return self._regions(pieces, outer)

    def checkpoint_metadata(self) -> Metadata:
        return {**super().checkpoint_metadata(), "outer": {"steps": [self._outer_steps]}}

    def restored(self, metadata: Metadata) -> None:
        super().restored(metadata)
        for name, target in self.vectors.items():
            vector = target
            vector.fill(0)
            for vectors in self._read:
                vector += vectors[name]
            vector /= max(1, len(self._read))
        self._read = []
        # Every rank reads the count: the largest one is that of a replica that took the step.
        self._outer_steps = int(max(metadata.get("outer", {}).get("steps", [0])))
        # The replicas agree on the loaded parameters, so the next step begins a period.
        self._agreements = -1
