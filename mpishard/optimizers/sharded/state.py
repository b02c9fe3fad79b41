"""A rule's state for one sharded model: this rank's part of it, and the update."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, TypedDict

import numpy as np

from mpishard.base import Array, Data, Metadata, NonFiniteLossError, array_namespace
from mpishard.checkpoint import CheckpointState, Pieces, require_form
from mpishard.models import Engine, Passes, Reduced, ShardedModelBase, StepReport, Update
from mpishard.optimizers.rules.lbfgs import LBFGS
from mpishard.optimizers.rules.pieces import (
    FixedSegments,
    Numbers,
    PieceViews,
    UpdateContext,
    count_missed,
    segments_of,
)
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.state_bytes import STATE_FORM, StateBytes
from mpishard.sharding import ParameterEntry, Piece, Region, refuse_line_search

_log = logging.getLogger("mpishard")


class _Owners(TypedDict):
    """The arguments of `UpdateContext` that stay the same in all updates."""

    sum_over_owners: Callable[[Array], Array]
    parameter_names: Sequence[str]


class ModelState(CheckpointState):
    """State vectors for the parameters that this rank updates, and the number of updates.

    It is also the `mpishard.checkpoint` view of the state: the rule's name is part of the kinds,
    so that another rule's state is refused unread.

    Parameters
    ----------
    rule : Optimizer
        The rule, the same on every rank.
    model : ShardedModelBase
        The model. Its parameters in ``frozen`` are frozen here.
    frozen : frozenset of str
        Names of the parameters that are not trained, from `untrained` of the options.

    Attributes
    ----------
    kind : str
        First part of the kinds of its arrays in a checkpoint, which names the rule.
    pieces : tuple of Piece
        The pieces that this rank updates.
    views : list of (tuple of Segment, dict of str to Array)
        For each piece the parameters that it cuts through, and its views of the vectors.
    vectors : mapping of str to Array
        This rank's state by name.
    steps : int
        Number of updates.
    numbers : dict
        The rule's numbers besides the vectors: see `UpdateContext`.
    last_gradient : (float, (int, int)) or None
        Weight of the last step's gradient, which the model's store holds as a sum, and the engine's
        ``gradient_identity`` after that step; None without one.
    """

    keeps_gradients: ClassVar[bool] = False
    """Whether this state has lent the model's engine a way of making gradients."""
    passes: Passes | None = None
    """Another way of making the gradients of a step than that of the engine."""

    def __init__(self, rule: Optimizer, model: ShardedModelBase, frozen: frozenset[str]) -> None:
        self.rule = rule
        self.model = model
        self.frozen = frozen
        self.kind = f"optimizer/{type(rule).__name__}"
        self.steps = 0
        self.numbers: Numbers = {}
        self.last_gradient: tuple[float, tuple[int, int]] | None = None
        # Setting options makes a new object, so that a step compares identities only.
        self._options = rule.parameter_options
        self._described = rule.checked_options.description  # the options of `frozen`
        engine = model.engine
        # Before the vectors are made, because frozen parameters have no memory in them.
        if engine.program.frozen != frozen:
            engine.freeze(frozen)
        self.pieces = pieces = engine.pieces.updated
        segments = tuple(segments_of(engine.program.entries, piece) for piece in pieces)

        # Looked up in each call: a reference to the engine would keep the memory of a closed model.
        def sum_over_owners(rows: Array) -> Array:
            return model.engine.sum_over_owners(rows)

        self._owners: _Owners = {
            "sum_over_owners": sum_over_owners,
            "parameter_names": [entry.name for entry in model.parameter_entries],
        }
        if model.gradient_leaves is not None:
            # Norms of parameters are summed by segments that every world has, so that their bits
            # do not depend on the pieces that the ranks own.
            fixed = FixedSegments(model.parameter_entries, model.units, model.gradient_leaves)
            segments = tuple(
                fixed.cut(found, piece) for found, piece in zip(segments, pieces, strict=True)
            )
            self._owners = {
                "sum_over_owners": lambda rows: fixed.totals(sum_over_owners(rows)),
                "parameter_names": fixed.names,
            }
        self.vectors: Mapping[str, Array] = {
            name: engine.zeros_for_state(pieces) for name in rule.needed_state()
        }
        self.views = [
            (found, {name: vector[piece.in_shard] for name, vector in self.vectors.items()})
            for found, piece in zip(segments, pieces, strict=True)
        ]

    @property
    def engine(self) -> Engine:
        """The model's engine, which refuses every use after ``model.close()``."""
        return self.model.engine

    def require_same_frozen(self) -> None:
        """Refuse options set since the last step that the state does not fit.

        If another optimizer has trained the model meanwhile, its frozen parameters are frozen
        again.
        """
        options = self.rule.parameter_options
        if options is not self._options:
            description = self.rule.checked_options.description
            if description != self._described:
                frozen = self.rule.checked_options.untrained(self.model.parameter_entries)
                if frozen != self.frozen:
                    raise ValueError(
                        f"parameter_options would freeze {sorted(frozen)}, and this optimizer's "
                        f"state was made with {sorted(self.frozen)} frozen; call reset() to begin "
                        "with new state, or give the options to an optimizer of their own"
                    )
            self._options, self._described = options, description
        engine = self.model.engine  # refuses a model that is closed
        if engine.program.frozen != self.frozen:
            engine.freeze(self.frozen)

    # -------------------------------------------------------------------------------------- updates

    def step(self, x: Data, y: Data, sample_start: int | None) -> StepReport:
        """Make the step of a checked batch. Collective."""
        if self.rule.searches:
            return search_step(self, x, y, sample_start)
        return self.engine.step(
            x, y, self.update, self.settings(), sample_start=sample_start, passes=self.passes
        )

    def settle(self) -> None:
        """Make all replicas equal: they are, unless a subclass lets them differ. Collective."""

    def settings(self, update: int | None = None) -> dict[str, object]:
        """Return the settings that may change between steps, which the ranks compare.

        ``update`` is the number, from 0, of the update with these settings, by default the next.

        Raises
        ------
        TypeError, ValueError
            As `Optimizer.checked_rate`: before anything is computed.
        """
        rule = self.rule
        return {
            "learning_rate": rule.checked_rate(self.steps if update is None else update),
            "clip_global_norm": rule.clip_global_norm,
            "clip_value": rule.clip_value,
            "weight_decay": rule.weight_decay,
            # As text, because each rank has objects of its own.
            "parameter_options": self._described,
            # Bias corrections and schedules depend on it.
            "number of updates": self.steps,
        }

    def update(self, updates: list[Update], report: StepReport) -> None:
        """Update the parameters that this rank updates: the rule of an engine's step."""
        self.run(self.rule.update_all, updates, report)
        if not self.rule.updates_unused:
            count_missed(report.unused, self.numbers)
        # The trials of a line search are evaluations of one update.
        self.steps += not (self.rule.searches and self.is_searching)

    @property
    def is_searching(self) -> bool:
        """True if the update under way needs another evaluation: see `LBFGS`."""
        return bool(self.numbers.get("pending"))

    def run(
        self,
        function: Callable[[Sequence[PieceViews], UpdateContext], None],
        updates: list[Update],
        report: StepReport,
    ) -> None:
        """Run a function of the rule on the parameters that this rank updates."""
        assert report.gradient_norm is not None
        rule = self.rule
        pieces = [
            PieceViews(update.parameters, update.gradients, views, segments)
            for update, (segments, views) in zip(updates, self.views, strict=True)
        ]
        # As in a PyTorch loop: parameters that no rank has used keep their values and state.
        if not rule.updates_unused:
            pieces = [p for all_of in pieces for p in all_of.without(report.unused, self.numbers)]
        context = UpdateContext(
            step=self.steps + 1,
            # A schedule is asked for the number of updates so far, which counts from 0.
            learning_rate=rule.checked_rate(self.steps),
            # Gradients are sums over samples: the rule multiplies once, by the mean's and
            # clipping's factor together.
            gradient_scale=rule.clip_factor(report.gradient_norm) / report.divisor,
            loss=report.loss,
            numbers=self.numbers,
            **self._owners,
        )
        function(pieces, context)

    def mean_gradient(self) -> Array | None:
        """Return the rank's part of the last step's mean gradient; None if it is gone."""
        engine = self.model.engine
        divisor, gradient = self.last_gradient or (0.0, None)
        # Numbers of the gradient: the store may have been written, or summed again, since.
        if gradient != engine.gradient_identity:
            return None
        gradients = engine.gradients.owned(engine.pieces.owned)
        if not gradients:
            return np.zeros(0, self.model.dtype)
        return array_namespace(gradients[0]).concatenate(gradients) / divisor

    # ------------------------------------------------------------------------ bytes and checkpoints

    def synchronize(self) -> None:
        """Take the state of the ranks that write a checkpoint, and rank 0's steps. Collective."""
        self.take(self.gathered())
        # Bias corrections and schedules depend on it, so that it must be equal, too.
        self.steps = int(self.model.backend.broadcast(np.array([self.steps]))[0])

    def gathered(self) -> StateBytes:
        """Return the whole state, the same on every rank. Collective."""
        model = self.model
        return StateBytes.gather(
            model.backend,
            self.arrays_to_write(),
            self.checkpoint_metadata(),
            self._trained_entries,
            model.dtype,
            model.engine.layout.subject,
        )

    def require_fit(self, saved: StateBytes) -> None:
        """Refuse a state that `take` cannot use. Communicates nothing.

        Raises
        ------
        ValueError
            If it is that of another model, or of other kinds.
        """
        saved.require_fit(self._trained_entries, self.model.dtype)
        # A wrapper numbers its kinds by replicas, and the saved state determines their number.
        self.expect(saved.arrays)
        wanted = self.arrays_to_read().keys()
        if not (saved.is_of(self.rule) or saved.arrays.keys() == wanted):
            found, needed = (
                sorted(kind.rpartition("/")[2] for kind in kinds)
                for kinds in (saved.arrays, wanted)
            )
            raise ValueError(f"these bytes hold the state {found}, and this optimizer has {needed}")

    def take(self, saved: StateBytes) -> None:
        """Take a saved state that fits. Communicates nothing.

        It may be the rule's own state. What a wrapper has besides it then stays as it is.
        """
        self.expect(saved.arrays)
        whole = self.arrays_to_read()
        # Otherwise it is the state of the rule alone, and a wrapper's own arrays stay.
        if saved.is_fresh or saved.arrays.keys() == whole.keys():
            saved.fill(whole, self._trained_entries)
            self.restored(saved.metadata)
        else:
            saved.fill(ModelState.arrays_to_read(self), self._trained_entries)
            ModelState.restored(self, saved.metadata)

    @property
    def _trained_entries(self) -> list[ParameterEntry]:
        return [e for e in self.model.parameter_entries if e.name not in self.frozen]

    def expect(self, kinds: Collection[str]) -> None:
        """Prepare `arrays_to_read` for a saved state of these kinds."""

    def arrays_to_write(self) -> Pieces:
        """Return the pieces that this rank writes: its own, and of replicas a part."""
        return self._regions(self._written_pieces)

    def arrays_to_read(self) -> Pieces:
        """Return all pieces that this rank updates."""
        return self._regions(self.pieces)

    @property
    def _written_pieces(self) -> tuple[Piece, ...]:
        engine = self.engine
        return engine.pieces.to_write(engine.program) if engine.replica.is_writer else ()

    def _regions(
        self, pieces: Sequence[Piece], vectors: Mapping[str, Array] | None = None
    ) -> dict[str, Sequence[tuple[Region, Array]]]:
        """Return the pieces of the state's vectors, or of others as long, by kind."""
        cut = self.engine.placement.cut
        return {
            f"{self.kind}/{name}": cut((p.start, vector[p.in_shard]) for p in pieces)
            for name, vector in (self.vectors if vectors is None else vectors).items()
        }

    def checkpoint_metadata(self) -> Metadata:
        """Return settings, step count and the rule's numbers."""
        numbers = {"numbers": self.numbers} if self.numbers else {}
        return {"settings": self.rule.fingerprint(), "optimizer_steps": self.steps, **numbers}

    def restored(self, metadata: Metadata) -> None:
        """Continue from the saved step."""
        require_form(metadata, STATE_FORM, "metadata.optimizer")
        settings = metadata["settings"]
        changed = [
            f"{name} was {settings.get(name)} and is {value}"
            for name, value in self.rule.fingerprint().items()
            if settings.get(name) != value
        ]
        # Logged and not refused: a resumed run may be given another rate.
        if changed and self.model.rank == 0:
            _log.warning("the optimizer continues with other settings: %s", "; ".join(changed))
        self.steps = steps = metadata["optimizer_steps"]
        self.numbers = dict(metadata.get("numbers", {}))
        # Another optimizer may have made some of the model's steps.
        self.engine.step_number = max(self.engine.step_number, steps)


def require_searchable(model: ShardedModelBase, rule: str) -> None:
    """Refuse a model whose loss depends on more than the parameters: a line search compares losses.

    Raises
    ------
    ValueError
        For a black box that computes no loss, a model with dropout or with a state that its loss
        returns, and replicas that drift apart.
    """
    if not model.engine.knows_loss:
        refuse_line_search(
            rule,
            f"{type(model.wrapped_model).__name__} computes none",
            "give it compute_loss_and_gradients, or a default_loss_function",
        )
    if model.engine.program.is_random:
        refuse_line_search(
            rule,
            "dropout, random keys or a state that the loss returns change it each time",
            "remove the dropout layers, or make the JaxModel without state=",
        )
    if not model.sharding_configuration.auto_sync_gradients:
        refuse_line_search(
            rule, "each rank has a function of its own", "leave out auto_sync_gradients=False"
        )


def search_step(state: ModelState, x: Data, y: Data, sample_start: int | None) -> StepReport:
    """Make one update: evaluate the model until the line search ends. Collective.

    If the loss or the gradient at a trial is not finite, the next trial is shorter. If it is not
    finite at the initial parameters, or not at any trial, the error is raised on every rank, with
    the parameters of before the step.
    """
    engine, rule = state.engine, state.rule
    assert isinstance(rule, LBFGS)
    before: float = state.numbers.get("value", math.nan)

    def move(function: Callable[..., None]) -> None:
        """Let the rule change the parameters without a gradient."""
        # The parameters take its place, so that none is allocated.
        unused = engine.parameters.owned(engine.pieces.updated)
        engine.change(
            lambda updates, report: state.run(function, updates, report),
            Reduced(unused, StepReport(math.nan, 1.0, 0.0)),
        )

    move(rule.begin)
    found: StepReport | None = None
    # Each evaluation is a step of the engine: all ranks see one loss, and choose one trial.
    while state.is_searching:
        is_first = "value" not in state.numbers
        try:
            report = engine.step(x, y, state.update, state.settings(), sample_start=sample_start)
        except NonFiniteLossError as error:
            error.add_note(
                "A line search has no rate to lower, and takes no clipping: begin at other "
                "parameters, or look at the function and the data"
            )
            if is_first:
                # No value of the function is known yet: the next step evaluates it again.
                state.numbers.clear()
                raise
            move(rule.reject)
            # No shorter trial was finite either.
            if "stuck" in state.numbers:
                raise
            continue
        if is_first:
            before = report.loss
        found = report
    if found is None:  # stuck before an evaluation: nothing has changed
        state.steps += 1
        return StepReport(before, 1.0, 0.0)
    return replace(found, loss=before)
