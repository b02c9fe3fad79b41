"""The optimizer whose ranks train alone for some steps, and then agree on their parameters."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mpishard.arguments import as_integer
from mpishard.arrays import Array, array_namespace
from mpishard.checkpoint import Pieces
from mpishard.contracts import IOptimizer
from mpishard.layout import ShardLayout
from mpishard.models import ShardedModelBase
from mpishard.models.engine.update import StepReport
from mpishard.observe.ledger import MemoryCategory
from mpishard.optimizers.rules.ranges import OwnedRange, UpdateContext, segments_of
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.base import ShardedOptimizerBase
from mpishard.optimizers.sharded.state import ModelState
from mpishard.optimizers.sharded.strategies import data_model_class
from mpishard.sharding import Piece, ShardingConfiguration, pieces_within

__all__ = ["LocalSGDOptimizer"]


class LocalSGDOptimizer(ShardedOptimizerBase):
    """Updates each replica of a model alone; every H steps they agree on their parameters.

    A replica is one rank; or a group of ranks, a node for one, if ``config.replica_size`` says so.
    Inside a group the strategy goes on as ever, in shared memory on a node.

    Without ``outer`` they take the mean of their parameters, weighted by the samples that each has
    used (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, algorithm 1). With
    an outer rule the change of that mean is its gradient: theta before the H steps, less the mean
    after them. With Nesterov's SGD of rate 0.7 and momentum 0.9 that is DiLoCo (Douillard et al.,
    arXiv 2311.08105, algorithm 1).

    The ranks of a replica keep the inner rule's state for it, as the strategy says. The outer
    rule's state, and the parameters before the H steps, are sharded over all ranks. Sent every H
    steps, summed over N replicas, for S bytes of trained units: 2 (N - 1) S. In between only the
    small all-reduce of a step travels between them, which tells all ranks the loss, and stops all
    of them if one is not finite. ``optimize`` makes the ranks agree before each evaluation and
    each checkpoint, too.

    A checkpoint has the inner state of each replica. As many replicas go on with the same bits; of
    another number N replica j takes the mean of the states of the replicas i of M before with
    i % N == j, or that of replica j % M if there are fewer. A replica may have other ranks.

    Parameters
    ----------
    wrapped_optimizer : Optimizer
        The inner rule and its settings.
    config : ShardingConfiguration
        Backend and choices.
    synchronization_period : int
        H: 1 or more. With SGD without momentum, 1 is what DDP does.
    outer : Optimizer, optional
        The outer rule: `SGD(0.7, momentum=0.9, nesterov=True)`, for one.
    strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp"}
        Inside each replica; others than "ddp" need ``config.replica_size``.

    Raises
    ------
    TypeError, ValueError
        As `ShardedOptimizerBase`; for a period below 1, an outer rule that clips or freezes, rules
        that search along a line, and another strategy.
    """

    def __init__(
        self,
        wrapped_optimizer: IOptimizer,
        config: ShardingConfiguration,
        synchronization_period: int = 10,
        outer: Optimizer | None = None,
        *,
        strategy: str = "ddp",
    ) -> None:
        super().__init__(wrapped_optimizer, config)
        self.model_class = data_model_class(strategy)
        if strategy != "ddp" and config.replica_size is None:
            raise ValueError(
                f"strategy={strategy!r} shards a replica over its ranks, and here each rank is a "
                'replica: give ShardingConfiguration(replica_size=), a number of ranks or "node"'
            )
        if as_integer("synchronization_period", synchronization_period) < 1:
            raise ValueError(
                f"synchronization_period must be 1 or more, got {synchronization_period}"
            )
        if outer is not None and not isinstance(outer, Optimizer):
            raise TypeError(
                f"outer must be a rule of mpishard.optimizers, or None, got {type(outer).__name__}"
            )
        if outer is not None and (
            outer.clip_global_norm or outer.clip_value or outer.parameter_options
        ):
            raise ValueError("outer must not clip, and has no parameter_options: the inner rule's")
        for rule in (self._rule, outer):
            if rule is not None and rule.searches:
                raise ValueError(
                    f"{type(rule).__name__} searches along one line on all ranks, and here each "
                    "rank trains alone: choose another rule"
                )
        self.synchronization_period = int(synchronization_period)
        self.outer = outer

    def _settings(self) -> dict[str, Any]:
        return {"synchronization_period": self.synchronization_period, "outer": self.outer}

    def _fingerprint(self) -> dict[str, Any]:
        outer = None if self.outer is None else self.outer.fingerprint()
        return {**super()._fingerprint(), "outer": outer}

    def _make_state(self, model: ShardedModelBase, frozen: frozenset[str]) -> ModelState:
        return _LocalState(self._rule, model, frozen, self.outer)

    @property
    def _replicas_differ(self) -> bool:
        return True

    def _require_one_replica(self, model: ShardedModelBase) -> None:
        """Take several."""

    def _require_model_of_this_kind(self, model: ShardedModelBase) -> None:
        super()._require_model_of_this_kind(model)
        config = model.sharding_configuration
        if config.gradient_leaves is not None or not config.auto_sync_gradients:
            raise ValueError(
                f"{type(self).__name__} trains each rank alone and brings the ranks together: "
                "leave out gradient_leaves, and auto_sync_gradients=False"
            )

    def _run_step(
        self, state: ModelState, x: Array, y: Array, sample_start: int | None
    ) -> StepReport:
        assert isinstance(state, _LocalState)
        before = state.steps
        if state.since == 0:  # all ranks have the same parameters, whoever set them
            state.take_anchor()
        report = state.model.engine.step(
            x, y, state.update, sample_start=sample_start, settings=state.settings(), apart=True
        )
        if report.gradient_norm is None:  # the step added to a round
            return report
        state.steps = before + 1  # also of a rank without samples
        state.since += 1
        if state.since >= self.synchronization_period:
            state.synchronize()
        return report

    def settle(self) -> None:
        """Make the ranks agree now, whatever the period. Collective."""
        state = self._state
        if isinstance(state, _LocalState) and state.since:
            state.synchronize()

    def synchronize_optimizer_state(self) -> None:
        """Do nothing: each rank has the inner state of its own replica."""

    def _refusals(self) -> Mapping[str, str]:
        return {
            "last_computed_gradients": "no gradient of all ranks; each replica has its own",
            "apply_gradients": "each replica trains with its own: use step, or DDPOptimizer",
            "serialize": "the inner state is each replica's own, which bytes that are the same on "
            "all ranks cannot hold: use mpishard.checkpoint.save, or save_model",
        }


class _LocalState(ModelState):
    """The inner rule's state of this rank, and this rank's part of the outer rule's."""

    def __init__(
        self,
        rule: Optimizer,
        model: ShardedModelBase,
        frozen: frozenset[str],
        outer: Optimizer | None,
    ) -> None:
        super().__init__(rule, model, frozen)
        self.since = 0  # steps since the ranks agreed
        self._outer = outer
        self._outer_steps = 0
        self._outer_numbers: dict[str, Any] = {}
        self._kind = f"optimizer/{type(rule).__name__}"
        self._writers = 1  # replicas of a checkpoint that is read
        self._read: list[tuple[int, dict[str, Array]]] = []
        engine = model.engine
        # The ranks that have the same part of the other replicas, and that part.
        self._is_grouped = engine.replica.across is not None
        self._across = engine.replica.across or model.backend
        self._parts = [
            piece for piece in engine.layout.pieces(sharded=self._is_grouped)
            if piece.unit.index not in engine.gradients.layout.frozen
        ]  # fmt: skip
        self._pieces = self._own_pieces()
        names = () if outer is None else ("anchor", *outer.needed_state())
        length = sum(piece.length for piece in self._pieces)
        allocate = engine.state_layout.allocate
        self._outer_state = {n: allocate(MemoryCategory.OPTIMIZER_STATE, length) for n in names}
        for vector in self._outer_state.values():
            vector.fill(0)

    def _own_pieces(self) -> tuple[Piece, ...]:
        """Return the trained pieces of this rank's part that it owns among the replicas."""
        program, owned, position = self.model.engine.program, [], 0
        for part in self._parts:
            cut = ShardLayout(part.length, self._across.world_size).slice(self._across.rank)
            start, stop = part.start + cut.start, part.start + cut.stop
            owned.append(Piece(part.unit, start, stop, position))
            position += stop - start
        if not program.frozen:
            return tuple(owned)
        ranges = [(e.start, e.stop) for e in program.entries if e.name not in program.frozen]
        return pieces_within(owned, ranges)

    def take_anchor(self) -> None:
        """Remember the parameters, which are equal on all ranks."""
        if self._outer is not None:
            owned = self.model.engine.parameters.owned(self._pieces)
            for piece, values in zip(self._pieces, owned, strict=True):
                self._outer_state["anchor"][piece.in_shard] = values

    def synchronize(self) -> None:
        """Take the mean of all replicas, or the outer rule's step towards it. Collective."""
        engine, across = self.model.engine, self._across
        weight = engine.replicas.weight
        # Of all ranks: those of a replica may still read, on a node, what is changed below. One
        # rank of each replica tells its weight.
        tells = not self._is_grouped or engine.backend.rank == 0
        total = float(self.model.backend.all_reduce(np.array([weight * tells]))[0])
        self.since = 0
        if total == 0:  # somebody has made the replicas equal meanwhile
            return
        replicas = engine.parameters.owned(self._parts)
        means: dict[int, Array] = {}
        for part, values in zip(self._parts, replicas, strict=True):
            replica = values
            replica *= weight / total  # in place: a reduction needs no other copy
            means[part.unit.index] = across.reduce_scatter(replica)
        if self._outer is not None:
            self._step_outer(self._outer, means)
        for part, values in zip(self._parts, replicas, strict=True):
            across.all_gather(means[part.unit.index], out=values)
        if self._is_grouped:
            engine.parameters.publish(self._parts)
        engine.replicas.are_equal()
        engine.changed()

    def _step_outer(self, outer: Optimizer, means: Mapping[int, Array]) -> None:
        """Update the anchor by the change of the mean, and write it to ``means``. Collective."""
        engine, across = self.model.engine, self._across
        starts = {
            part.unit.index: part.start + ShardLayout(part.length, across.world_size)
            .start(across.rank) for part in self._parts
        }  # fmt: skip
        ranges, targets = [], []
        for piece in self._pieces:
            start = piece.start - starts[piece.unit.index]
            target = means[piece.unit.index][start : start + piece.length]
            anchor = self._outer_state["anchor"][piece.in_shard]
            state = {n: v[piece.in_shard] for n, v in self._outer_state.items() if n != "anchor"}
            segments = segments_of(engine.program.entries, piece)
            ranges.append(OwnedRange(anchor, anchor - target, state, segments))
            targets.append(target)
        names = [entry.name for entry in self.model.parameter_entries]
        outer.update_all(ranges, UpdateContext(
            step=self._outer_steps + 1, learning_rate=outer.checked_rate(self._outer_steps),
            gradient_scale=1.0, sum_over_owners=self.model.backend.all_reduce,
            parameter_names=names, numbers=self._outer_numbers,
        ))  # fmt: skip
        self._outer_steps += 1
        for owned, target in zip(ranges, targets, strict=True):
            target[...] = owned.parameters

    # ------------------------------------------------------------------------------ checkpoints
    # Kinds: "<state name>@<r>" of replica r, and "outer_<state name>".

    def arrays_to_write(self) -> Pieces:
        engine, across = self.model.engine, self._across
        pieces = engine.pieces
        mine = self._regions(pieces.to_write(engine.program) if self._is_grouped
                             else pieces.updated)  # fmt: skip
        each = {f"{kind}@{r}": regions if r == across.rank else []
                for kind, regions in mine.items() for r in range(across.world_size)}  # fmt: skip
        return {**each, **self._outer_regions()}

    def expect(self, kinds: Collection[str]) -> None:
        """Learn from the kinds of a checkpoint how many replicas it has."""
        pattern = re.compile(re.escape(self._kind) + r"/\w+@(\d+)")
        found = [int(match[1]) for kind in kinds if (match := pattern.fullmatch(kind))]
        self._writers = 1 + max(found, default=self._across.world_size - 1)

    def arrays_to_read(self) -> Pieces:
        pieces = self.model.engine.pieces.updated
        size, rank = self._across.world_size, self._across.rank
        self._read = []
        found: dict[str, Any] = {}
        for r in range(self._writers):
            mine = r % size == rank if self._writers >= size else r == rank % self._writers
            vectors = {}
            for name, vector in self.vectors.items():
                regions: Any = []
                if mine:
                    vectors[name] = array_namespace(vector).zeros_like(vector)
                    placement = self.model.engine.placement
                    regions = placement.cut((p.start, vectors[name][p.in_shard]) for p in pieces)
                found[f"{self._kind}/{name}@{r}"] = regions
            if mine:
                self._read.append((r, vectors))
        return {**found, **self._outer_regions()}

    def _outer_regions(self) -> dict[str, Any]:
        """Return the outer state but for the anchor, which are the parameters."""
        return {
            f"{self._kind}/outer_{name}": self.model.engine.placement.cut(
                (p.start, vector[p.in_shard]) for p in self._pieces
            )
            for name, vector in self._outer_state.items()
            if name != "anchor"
        }

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        numbers = {"steps": self._outer_steps, "numbers": self._outer_numbers}
        return {**super().checkpoint_metadata(), "outer": numbers}

    def restored(self, metadata: Mapping[str, Any]) -> None:
        super().restored(metadata)
        for name, target in self.vectors.items():
            vector = target
            vector.fill(0)
            for _, vectors in self._read:
                vector += vectors[name]
            vector /= max(1, len(self._read))
        self._read = []
        outer = metadata.get("outer", {"steps": 0, "numbers": {}})
        self._outer_steps, self._outer_numbers = int(outer["steps"]), dict(outer["numbers"])
        self.since = 0
