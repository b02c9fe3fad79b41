"""The equality check fails with any one thing broken.

A check that passes with a collective removed is no check. Each mutant below breaks one thing that
training needs, on all ranks alike, so that nothing crashes and only the numbers can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from mpishard.base.layout import ShardLayout
from mpishard.communication import (
    InMemoryCommunicationBackend,
    ReductionOperation,
    run_in_threads,
)
from mpishard.errors import NonFiniteLossError
from mpishard.models.engine.engine import Engine
from mpishard.models.engine.update import Round
from mpishard.models.programs.chain import LayerChain
from mpishard.models.stores.parameter_store import ReplicatedParameters, ShardedParameters
from mpishard.models.stores.replicated_gradients import ScatteredGradients
from mpishard.models.stores.sharded_gradients import ShardedGradients
from mpishard.optimizers.rules.rule import Optimizer

pytestmark = pytest.mark.usefixtures("messages_only")  # test_arena.py: what else is done

Backend = InMemoryCommunicationBackend
Patch = pytest.MonkeyPatch
TOTALS = (7,)  # shape of the small all-reduce of a step, see Round.totals


class Done:
    """The result of a collective that did not run."""

    def wait(self) -> None:
        return None

    wait_until_over = wait


def reduce_scatter_without_reduction(patch: Patch) -> None:
    def mutant(self: Any, array: Any, *_: Any, out: Any, **options: Any) -> Done:
        out[...] = array[ShardLayout(len(array), self.world_size).slice(self.rank)]
        return Done()

    patch.setattr(Backend, "reduce_scatter_async", mutant)


def reduce_scatter_to_the_neighbour(patch: Patch) -> None:
    original = Backend.reduce_scatter_async

    def mutant(self: Any, array: Any, *_: Any, out: Any, **options: Any) -> Any:
        size = ShardLayout(len(array), self.world_size).size(0)
        return original(self, np.roll(array, size), out=out)

    patch.setattr(Backend, "reduce_scatter_async", mutant)


def all_gather_with_two_ranks_swapped(patch: Patch) -> None:
    original = Backend.all_gather_async

    def mutant(self: Any, array: Any, *, out: Any = None, subject: int = 0) -> Any:
        if out is None:  # not a unit
            return original(self, array, subject=subject)
        full = original(self, array).wait()
        layout = ShardLayout(len(full), self.world_size)
        pieces = [full[layout.slice(rank)] for rank in range(self.world_size)]
        pieces[0], pieces[1] = pieces[1], pieces[0]
        out[...] = np.concatenate(pieces)
        return Done()

    patch.setattr(Backend, "all_gather_async", mutant)


def _all_reduce(patch: Patch, is_broken: Callable[[Any], bool], operation: Any) -> None:
    original = Backend.all_reduce_async

    def mutant(self: Any, array: Any, *arguments: Any, **options: Any) -> Any:
        if not is_broken(array):
            return original(self, array, *arguments, **options)
        return Done() if operation is None else original(self, array, operation)

    patch.setattr(Backend, "all_reduce_async", mutant)


def all_reduce_dropped(patch: Patch) -> None:
    _all_reduce(patch, lambda array: array.shape != TOTALS, None)


def all_reduce_averages(patch: Patch) -> None:
    _all_reduce(patch, lambda array: array.shape != TOTALS, ReductionOperation.AVERAGE)


def reduce_scatter_averages(patch: Patch) -> None:
    original = Backend.reduce_scatter_async

    def mutant(self: Any, array: Any, *_: Any, out: Any, **options: Any) -> Any:
        return original(self, array, ReductionOperation.AVERAGE, out=out)

    patch.setattr(Backend, "reduce_scatter_async", mutant)


def broadcast_dropped(patch: Patch) -> None:
    def mutant(self: Any, array: Any, root: int = 0, *, subject: int = 0) -> Any:
        if self.rank != root:  # what lies in memory that nobody has written may be no number
            array.fill(0)
        return array

    patch.setattr(Backend, "broadcast", mutant)


def scatter_deals_in_reverse(patch: Patch) -> None:
    original = Backend.scatter

    def mutant(self: Any, array: Any, root: int = 0, **options: Any) -> Any:
        return original(self, None if array is None else array[::-1].copy(), root, **options)

    patch.setattr(Backend, "scatter", mutant)


def publish_dropped(patch: Patch) -> None:
    patch.setattr(ReplicatedParameters, "publish", lambda self, pieces: None)


def weight_ignored(patch: Patch) -> None:
    """The mean of the ranks' means, as if all batches were alike."""
    original = Engine.run_pass

    def mutant(self: Any, x: Any, y: Any, gradients: Any, **options: Any) -> Any:
        total, _ = original(self, x, y, gradients, **options)
        return total, 3.0

    patch.setattr(Engine, "run_pass", mutant)


def weight_of_this_rank_only(patch: Patch) -> None:
    original = Round.totals

    def mutant(self: Any, message: Any, *rest: Any) -> Any:
        weight = max(float(message[1]), 1.0) * self._backend.world_size
        total, _, squared = original(self, message, *rest)
        return total, weight, squared

    patch.setattr(Round, "totals", mutant)


def norm_of_this_rank_only(patch: Patch) -> None:
    original = Round.totals

    def mutant(self: Any, message: Any, *rest: Any) -> Any:
        squared = float(message[2])
        total, weight, _ = original(self, message, *rest)
        return total, weight, squared

    patch.setattr(Round, "totals", mutant)


def clipping_dropped(patch: Patch) -> None:
    patch.setattr(Optimizer, "clip_factor", lambda self, norm: 1.0)


def stale_units(patch: Patch) -> None:
    """A gathered unit is never released."""
    patch.setattr(ShardedParameters, "reshard", lambda self, unit: None)
    patch.setattr(ShardedParameters, "publish", lambda self, pieces: None)


def gradients_not_cleared(patch: Patch) -> None:
    """Old values of a pooled buffer are added to the next unit's gradient."""

    original = ShardedGradients.target

    def mutant(self: Any, unit: Any) -> Any:
        array, is_empty = original(self, unit)
        seen = self.__dict__.setdefault("_seen", set())
        if is_empty and array.ctypes.data not in seen:
            array.fill(0)
            seen.add(array.ctypes.data)
        return array, False

    patch.setattr(ShardedGradients, "target", mutant)


def scattered_to_the_neighbour(patch: Patch) -> None:
    """ZeRO-1 updates its pieces with the gradient of the next rank's."""
    original = ScatteredGradients.owned

    def mutant(self: Any, pieces: Any) -> Any:
        return [np.roll(array, 1) for array in original(self, pieces)]

    patch.setattr(ScatteredGradients, "owned", mutant)


def publish_of_one_unit_alone(patch: Patch) -> None:
    original = ReplicatedParameters.publish
    patch.setattr(ReplicatedParameters, "publish", lambda self, pieces: original(self, pieces[:1]))


def gradients_of_the_first_pass_alone(patch: Patch) -> None:
    """Gradients of a unit's later uses are overwritten; a tied weight has two uses."""
    original = LayerChain._targets

    def mutant(self: Any, group: Any, gradients: Any, unwritten: set[str]) -> Any:
        found = original(self, group, gradients, unwritten)
        unwritten.update(entry.name for entry in group.ranges)
        return found

    patch.setattr(LayerChain, "_targets", mutant)


# What is broken, and where training must notice.
MUTANTS: list[tuple[Callable[[Patch], None], str, str]] = [
    (reduce_scatter_without_reduction, "fsdp", "mlp"),
    (reduce_scatter_without_reduction, "fsdp", "tied"),
    (reduce_scatter_without_reduction, "fsdp", "function"),
    (reduce_scatter_to_the_neighbour, "fsdp", "mlp"),
    (reduce_scatter_averages, "fsdp", "gpt"),
    (all_gather_with_two_ranks_swapped, "fsdp", "mlp"),
    (all_gather_with_two_ranks_swapped, "fsdp", "gpt"),
    (all_gather_with_two_ranks_swapped, "fsdp", "function"),
    (all_reduce_dropped, "ddp", "mlp"),
    (all_reduce_dropped, "ddp", "function"),
    (all_reduce_averages, "ddp", "gpt"),
    (broadcast_dropped, "ddp", "mlp"),
    (broadcast_dropped, "fsdp", "function"),
    (scatter_deals_in_reverse, "fsdp", "mlp"),
    (publish_dropped, "fsdp", "function"),
    (weight_ignored, "ddp", "mlp"),
    (weight_ignored, "fsdp", "gpt"),
    (weight_of_this_rank_only, "fsdp", "mlp"),
    (stale_units, "fsdp", "mlp"),
    (gradients_not_cleared, "fsdp", "mlp"),
    (gradients_not_cleared, "zero2", "mlp"),
    (gradients_of_the_first_pass_alone, "zero2", "tied"),
    (reduce_scatter_without_reduction, "zero1", "mlp"),
    (reduce_scatter_without_reduction, "zero2", "tied"),
    (reduce_scatter_to_the_neighbour, "zero1", "gpt"),
    (reduce_scatter_to_the_neighbour, "zero2", "function"),
    (reduce_scatter_averages, "zero1", "function"),
    (reduce_scatter_averages, "zero2", "mlp"),
    (scattered_to_the_neighbour, "zero1", "mlp"),
    (all_gather_with_two_ranks_swapped, "zero1", "mlp"),
    (all_gather_with_two_ranks_swapped, "zero2", "gpt"),
    (publish_dropped, "zero1", "mlp"),
    (publish_dropped, "zero2", "mlp"),
    (publish_of_one_unit_alone, "zero2", "gpt"),
    (broadcast_dropped, "zero1", "gpt"),
    (weight_ignored, "zero1", "mlp"),
    (weight_of_this_rank_only, "zero2", "function"),
]
CLIPPING_MUTANTS: list[tuple[Callable[[Patch], None], str, str]] = [
    (norm_of_this_rank_only, "fsdp", "mlp"),
    (norm_of_this_rank_only, "fsdp", "function"),
    (clipping_dropped, "ddp", "mlp"),
    (clipping_dropped, "fsdp", "gpt"),
    (norm_of_this_rank_only, "zero1", "mlp"),
    (norm_of_this_rank_only, "zero2", "gpt"),
    (clipping_dropped, "zero2", "function"),
]
LIMIT = 0.05  # so low that every step is clipped


def clipped(g: Any) -> Any:
    return g * min(1.0, LIMIT / np.linalg.norm(g))


def kills(
    problems: Any,
    patch: Patch,
    mutant: Callable[[Patch], None],
    strategy: str,
    kind: str,
    rule: str,
    *,
    clips: bool = False,
) -> None:
    """Whether the check that passes as the code stands fails with the mutant, by its numbers."""
    transform, options = (clipped, {"clip_global_norm": LIMIT}) if clips else (np.asarray, {})
    expected = problems.train_sequentially(
        kind, problems.TEXTBOOK[rule], steps=3, transform=transform
    )

    def check(backend: Any) -> None:
        actual = problems.train_sharded(backend, kind, strategy, rule, 1, 3, options)
        problems.assert_equal(actual, expected)

    run_in_threads(3, check)
    mutant(patch)
    # What is not cleared holds whatever was in that memory: it may be more than a square can be.
    with pytest.raises(
        (AssertionError, RuntimeWarning, NonFiniteLossError),
        match=r"Not equal to tolerance|overflow|invalid value|^step",
    ):
        run_in_threads(3, check)


def rows(table: list[Any]) -> list[Any]:
    """The mutants with a rule, another one in each other row."""
    return [
        pytest.param(*row, rule, id="-".join([row[0].__name__, *row[1:], rule]))
        for row, rule in zip(table, cycle(("sgd", "adamw")), strict=False)
    ]


@pytest.mark.parametrize(("mutant", "strategy", "kind", "rule"), rows(MUTANTS))
def test_the_equality_check_finds_each_fault(
    problems: Any, monkeypatch: Patch, mutant: Any, strategy: str, kind: str, rule: str
) -> None:
    kills(problems, monkeypatch, mutant, strategy, kind, rule)


@pytest.mark.parametrize(
    ("mutant", "strategy", "kind"),
    CLIPPING_MUTANTS,
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_clipping_check_finds_each_fault(
    problems: Any, monkeypatch: Patch, mutant: Any, strategy: str, kind: str
) -> None:
    # Plain clipped descent cannot see the scale of a gradient, so it is no substitute for the
    # check above: there, gradients that are all too large by one factor must be noticed.
    kills(problems, monkeypatch, mutant, strategy, kind, "sgd", clips=True)
