"""The state of local steps: this rank's inner state, and the exchanges between replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace, beside, copy_into
from mpishard.bfloat16 import BFLOAT16
from mpishard.checkpoint import Pieces
from mpishard.models import ShardedModelBase
from mpishard.models.engine.update import StepReport, written_here
from mpishard.models.stores.compression import Code, Int8, Rounded
from mpishard.optimizers.rules.ranges import OwnedRange, UpdateContext, segments_of
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.exchange import CodedExchange, Exchange
from mpishard.optimizers.sharded.state import ModelState
from mpishard.sharding import Piece

CODES: dict[str, Code] = {
    "float32": Rounded(np.dtype(np.float32)), "bfloat16": Rounded(BFLOAT16), "int8": Int8(),
}  # fmt: skip
"""The dtypes in which replicas may exchange the changes of their parameters."""


@dataclass(frozen=True)
class LocalSettings:
    """The arguments of `LocalSGDOptimizer` that its state needs."""

    synchronization_period: int
    outer: Optimizer | None
    fragments: int
    overlap: int
    exchange: str | None
    start_step: int
    start_period: int


@dataclass
class _Fragment:
    """Units that are exchanged together, and their position in the cycle of H steps.

    Parameters
    ----------
    due : int
        The step of the cycle after which the exchange begins.
    exchanges : list of Exchange
        One for each unit.
    """

    due: int
    exchanges: list[Exchange] = field(default_factory=list)
    count: int = 0  # steps of the outer rule so far
    used: float = 0.0  # weight of the replica's samples when its last exchange began
    began: int = 0  # number of steps since all replicas were equal, when it began
    is_answered: bool = False

    @property
    def parts(self) -> list[Piece]:
        return [exchange.part for exchange in self.exchanges]


class LocalState(ModelState):
    """The inner rule's state of this rank, and this rank's part of the outer rule's.

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
        self._agreements = -1  # `agreements` of the engine's replicas at the last `begin_step`
        # The ranks that have the same part of the other replicas, and that part.
        self._is_grouped = engine.replica.across is not None
        self._across = engine.replica.across or model.backend
        self._pieces: tuple[Piece, ...] = ()  # the trained pieces that this rank owns
        self._under_way: _Fragment | None = None
        self._fragments = self._make_fragments()
        names = () if self._outer is None else ("anchor", *self._outer.needed_state())
        self._outer_state = {name: engine.zeros_for_state(self._pieces) for name in names}

    def _make_fragments(self) -> list[_Fragment]:
        """Cut the trained units into fragments of about the same length, in order."""
        engine, given = self.engine, self._given
        count, period = given.fragments, given.synchronization_period
        frozen = engine.gradients.layout.frozen
        parts = [part for part in engine.layout.pieces(sharded=self._is_grouped)
                 if part.unit.index not in frozen]  # fmt: skip
        # A pipeline stage may be frozen as a whole: its one fragment is empty.
        if count > max(1, len(parts)):
            raise ValueError(
                f"fragments={count} are more than the model's {len(parts)} units that are trained: "
                "give fewer, or a smaller minimum_parameter_group_size"
            )
        # At even distances; the last one is due at the end of a cycle, which is step 0 of the next.
        fragments = [_Fragment(n * period // count % period) for n in range(1, count + 1)]
        total, before = sum(part.unit.length for part in parts), 0
        dtype, ledger = self.model.dtype, engine.layout.ledger
        for part in parts:
            # The middle of a unit decides, so that fragments are about equally long.
            middle = before + part.unit.length / 2
            before += part.unit.length
            if given.exchange in (None, dtype.name):
                exchange = Exchange(self._across, part, in_place=not given.overlap)
            else:
                exchange = CodedExchange(self._across, part, CODES[given.exchange], dtype, ledger)
            fragments[int(middle * count / total)].exchanges.append(exchange)
        position = 0
        owned = []
        exchanges = {e.part.unit.index: e for each in fragments for e in each.exchanges}
        for exchange in exchanges.values():
            unit, start = exchange.part.unit, exchange.part.start
            piece = Piece(unit, start + exchange.own.start, start + exchange.own.stop, position)
            position += piece.length
            owned.append(piece)
        self._pieces = engine.program.trained(owned)
        for piece in self._pieces:
            exchanges[piece.unit.index].pieces.append(piece)
        return fragments

    # ---------------------------------------------------------------------------------- exchanges

    def step(self, x: Array, y: Array, sample_start: int | None) -> StepReport:
        before = self.steps
        self.begin_step()
        report = self.engine.step(
            x, y, self.update, sample_start=sample_start, settings=self.settings(), apart=True
        )
        if report.gradient_norm is not None:  # otherwise the step added to a round
            self.steps = before + 1  # also of a rank without samples
            self.end_step()
        return report

    def begin_step(self) -> None:
        """Record the parameters, if all replicas were made equal since the last step."""
        agreements = self.engine.replicas.agreements
        if agreements == self._agreements:
            return
        self._agreements, self.since, self._under_way = agreements, 0, None
        for fragment in self._fragments:
            fragment.used = 0.0
            values = self.engine.parameters.owned(fragment.parts)
            for exchange, agreed in zip(fragment.exchanges, values, strict=True):
                exchange.agree(agreed)
            self._take_anchor(fragment, values)

    def _take_anchor(self, fragment: _Fragment, values: Sequence[Array]) -> None:
        """Let the outer rule begin at ``values`` of the fragment's parts."""
        if self._outer is None:
            return
        for exchange, agreed in zip(fragment.exchanges, values, strict=True):
            start = exchange.part.start
            for piece in exchange.pieces:
                own = agreed[piece.start - start : piece.stop - start]
                copy_into(self._outer_state["anchor"][piece.in_shard], own)

    def end_step(self) -> None:
        """Count a step, and do the part of an exchange that is due after it. Collective."""
        self.since += 1
        period, overlap = self._given.synchronization_period, self._given.overlap
        if self.steps <= self._given.start_step:
            if self.since >= self._given.start_period or self.steps == self._given.start_step:
                self.settle()
            return
        if self._given.fragments == 1 and not overlap:
            if self.since == period:
                self.settle()
            return
        if (fragment := self._under_way) is not None:
            self._across.progress()
            age = self.since - fragment.began
            # Half of the steps are for the way to the owners, and half for the way back.
            if age == (overlap + 1) // 2:
                self._answer(fragment)
            if age == overlap:
                self._finish(fragment)
        for fragment in self._fragments:
            if self.since % period == fragment.due and self._begin(fragment) and not overlap:
                self._answer(fragment)
                self._finish(fragment)

    def settle(self) -> None:
        """Make all replicas equal now. Collective."""
        if self._agreements != self.model.engine.replicas.agreements or not self.since:
            return  # they are equal already
        if (fragment := self._under_way) is not None:
            self.model.backend.barrier()  # ranks of a node may still read what is written below
            if not fragment.is_answered:
                self._answer(fragment)
            self._finish(fragment)
        for fragment in self._fragments:
            if self._begin(fragment):
                self._answer(fragment)
                self._finish(fragment)
        self.since = 0
        self.engine.mark_equal()

    def _begin(self, fragment: _Fragment) -> bool:
        """Send this replica's share of the mean, unless no replica has used a sample."""
        engine = self.engine
        used = engine.replicas.weight
        weight, fragment.used = used - fragment.used, used
        # Over all ranks, which is a barrier: ranks of a replica may still read the memory that is
        # changed below. One rank of each replica gives its weight.
        tells = not self._is_grouped or engine.replica.together.rank == 0
        total = float(self.model.backend.all_reduce(np.array([weight * tells]))[0])
        if total == 0:
            return False
        fragment.began, fragment.is_answered = self.since, False
        values = engine.parameters.owned(fragment.parts)
        for exchange, part in zip(fragment.exchanges, values, strict=True):
            exchange.begin(part, weight / total, self.steps)
        self._under_way = fragment
        return True

    def _answer(self, fragment: _Fragment) -> None:
        """Send the mean of this rank's pieces, or the outer rule's step towards it, to all."""
        means = [exchange.mean() for exchange in fragment.exchanges]
        if self._outer is not None and self.steps > self._given.start_step:
            self._step_outer(self._outer, fragment, means)
        for exchange, mean in zip(fragment.exchanges, means, strict=True):
            exchange.answer(mean)
        fragment.is_answered = True

    def _finish(self, fragment: _Fragment) -> None:
        """Take the exchanged parameters; after further steps, the mean with the current ones."""
        engine = self.engine
        mixes = self.since > fragment.began
        found = [exchange.result() for exchange in fragment.exchanges]
        self._take_anchor(fragment, found)
        owned = engine.parameters.owned(fragment.parts)
        for exchange, target, agreed in zip(fragment.exchanges, owned, found, strict=True):
            values = target
            if mixes:
                values += beside(agreed, values)
                values *= 0.5
            elif not exchange.in_place:
                copy_into(values, agreed)
        if self._is_grouped:
            engine.parameters.publish(fragment.parts)
        self._under_way = None
        engine.changed()

    def _step_outer(self, outer: Optimizer, fragment: _Fragment, means: Sequence[Array]) -> None:
        """Update the anchor by the change of the mean, and write it to ``means``. Collective."""
        engine = self.engine
        fragment.count += 1
        ranges, targets = [], []
        for exchange, mean in zip(fragment.exchanges, means, strict=True):
            first = exchange.part.start + exchange.own.start
            for piece in exchange.pieces:
                target = mean[piece.start - first : piece.stop - first]
                state = {name: v[piece.in_shard] for name, v in self._outer_state.items()}
                anchor = state.pop("anchor")
                segments = segments_of(engine.program.entries, piece)
                ranges.append(OwnedRange(anchor, anchor - beside(target, anchor), state, segments))
                targets.append(target)
        names = [entry.name for entry in self.model.parameter_entries]
        outer.update_all(ranges, UpdateContext(
            step=fragment.count, learning_rate=outer.checked_rate(fragment.count - 1),
            gradient_scale=1.0, parameter_names=names,
            sum_over_owners=partial(engine.sum_over_owners, of_all_replicas=True),
        ))  # fmt: skip
        for owned, target in zip(ranges, targets, strict=True):
            copy_into(target, owned.parameters)

    # ------------------------------------------------------------------------------ checkpoints
    # Kinds: "<state name>@<r>" of replica r, and "outer_<state name>".

    def arrays_to_write(self) -> Pieces:
        engine, across = self.engine, self._across
        pieces = engine.pieces
        mine = self._regions(pieces.to_write(engine.program) if self._is_grouped
                             else pieces.updated)  # fmt: skip
        each = {f"{kind}@{r}": regions if r == across.rank else []
                for kind, regions in mine.items() for r in range(across.world_size)}  # fmt: skip
        return {**each, **self._outer_regions(written_here(self._pieces, engine.placement))}

    def expect(self, kinds: Collection[str]) -> None:
        """Read the number of replicas from the kinds of a checkpoint."""
        found = [r for r in range(len(kinds)) for name in self.vectors
                 if f"{self.kind}/{name}@{r}" in kinds]  # fmt: skip
        self._writers = 1 + max(found, default=self._across.world_size - 1)

    def arrays_to_read(self) -> Pieces:
        size, rank = self._across.world_size, self._across.rank
        self._read = []
        found = self._outer_regions(self._pieces)
        for r in range(self._writers):
            pieces: Sequence[Piece] = ()
            vectors = self.vectors
            if r % size == rank if self._writers >= size else r == rank % self._writers:
                pieces = self.engine.pieces.updated
                vectors = {n: array_namespace(v).zeros_like(v) for n, v in vectors.items()}
                self._read.append(vectors)
            regions = self._regions(pieces, vectors)
            found |= {f"{kind}@{r}": part for kind, part in regions.items()}
        return found

    def _outer_regions(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the outer state without the anchor: that is equal to the parameters."""
        outer = {f"outer_{n}": v for n, v in self._outer_state.items() if n != "anchor"}
        return self._regions(pieces, outer)

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        counts = [fragment.count for fragment in self._fragments]
        return {**super().checkpoint_metadata(), "outer": {"steps": counts}}

    def restored(self, metadata: Mapping[str, Any]) -> None:
        super().restored(metadata)
        for name, target in self.vectors.items():
            vector = target
            vector.fill(0)
            for vectors in self._read:
                vector += vectors[name]
            vector /= max(1, len(self._read))
        self._read = []
        counts = [int(n) for n in np.atleast_1d(metadata.get("outer", {}).get("steps", 0))]
        if len(counts) != len(self._fragments):  # written with other fragments
            counts = [max(counts)] * len(self._fragments)
        for fragment, count in zip(self._fragments, counts, strict=True):
            fragment.count = count
        self._agreements = -1
