"""A step of a rule with a line search: several evaluations of the model, and one update."""

from __future__ import annotations

import math
from dataclasses import replace

from mpishard.arrays import Array
from mpishard.errors import NonFiniteLossError, ShardingError
from mpishard.models import ShardedModelBase
from mpishard.models.engine.update import StepReport
from mpishard.optimizers.rules.search import SearchRule
from mpishard.optimizers.sharded.state import ModelState

__all__ = ["refuse_unfit", "search_step"]


def refuse_unfit(model: ShardedModelBase, rule: str) -> None:
    """Refuse a model whose loss is no function of its parameters alone. Communicates nothing.

    Raises
    ------
    ValueError
        For a black box that tells no loss, a model with dropout, and replicas that drift apart.
    """
    engine = model.engine
    if not engine.program.knows_loss(engine.loss):
        raise ValueError(
            f"{rule} compares losses, and {type(model.wrapped_model).__name__} tells none: give it "
            "compute_loss_and_gradients, or a default_loss_function"
        )
    if engine.program.is_random:
        raise ValueError(
            f"{rule} evaluates one function at several points, and dropout makes another one of it "
            "each time: leave dropout out"
        )
    if not model.sharding_configuration.auto_sync_gradients:
        raise ValueError(
            f"{rule} searches along one line on all ranks; it needs auto_sync_gradients=True"
        )


def search_step(state: ModelState, x: Array, y: Array, sample_start: int | None) -> StepReport:
    """Make one update: evaluate the model until the line search ends. Collective.

    If the loss or the gradient at a trial is not finite, the next trial is shorter. If it is not
    finite at the initial parameters, or not at any trial, the error is raised on every rank, with
    the parameters of before the step.
    """
    engine, rule = state.model.engine, state.rule
    assert isinstance(rule, SearchRule)
    if engine.round.accumulates:
        raise ShardingError(
            f"{type(rule).__name__} evaluates the whole batch at several points, and accumulate() "
            "keeps no batch: give step the whole batch, outside of accumulate()"
        )
    before: float = state.numbers.get("value", math.nan)
    engine.move(lambda updates, report: state.run(rule.begin, updates, report))
    found: StepReport | None = None
    while state.is_searching:
        is_first = "value" not in state.numbers
        try:
            report = engine.step(
                x, y, state.update, sample_start=sample_start, settings=state.settings()
            )
        except NonFiniteLossError:
            if is_first:
                state.numbers.clear()
                raise
            engine.move(lambda updates, report: state.run(rule.reject, updates, report))
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
