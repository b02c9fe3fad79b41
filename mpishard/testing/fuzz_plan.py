"""Random sequences of collectives as data, the same on every rank that draws them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mpishard.base import DType
from mpishard.communication import DTYPES, ReductionOperation
from mpishard.testing.reductions import even_sizes, operations

# Room for a few steps of the longest arrays; later steps of the group use no arena.
ARENA_LENGTH = 1 << 16
"""Elements of a rank in the arena of one group, which its steps divide among themselves."""

_METHODS = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "scatter", "gather", "all_to_all",
    "barrier",
)  # fmt: skip
_REDUCTIONS = ("all_reduce", "reduce_scatter")
IN_ARENAS = ("reduce_into", "reduce_in_place", "gather_in_place")
"""The collectives of arenas."""


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One call of the ranks of one group.

    Parameters
    ----------
    number : int
        Index of the step in the sequence.
    method : str
        A collective, ``split``, ``allocate_arena``, or ``message`` from one rank to another.
    group : int
        The calling group: 0 is the world, others are made by splits.
    dtype : dtype
        Dtype of the arrays.
    rows : tuple of int
        Rows of each rank's array.
    trailing : tuple of int
        The other dims.
    operation : ReductionOperation
        Operation of a reduction.
    root : int
        Root of a collective, or sender of a message.
    counts : tuple of int
        Rows of each rank's piece.
    is_twin : bool
        Whether the call is issued now and waited for later.
    has_out : bool
        Whether the result goes into a given array; for a message, whether the receive is issued
        now and waited for later.
    is_adversarial : bool
        Whether the result of a sum depends on its order.
    at : int
        Element of an arena's vectors at which the part begins.
    is_common : bool
        Whether an arena has one vector for each node.
    target, tag : int
        Target and tag of a message.
    colors, keys, children
        For a split: color and key of each rank, and the number of the group of each color.
    """

    number: int
    method: str
    group: int = 0
    dtype: DType = field(default_factory=lambda: np.dtype(np.float64))
    rows: tuple[int, ...] = ()
    trailing: tuple[int, ...] = ()
    operation: ReductionOperation = ReductionOperation.SUM
    root: int = 0
    counts: tuple[int, ...] = ()
    is_twin: bool = False
    has_out: bool = False
    is_adversarial: bool = False
    at: int = 0
    is_common: bool = False
    target: int = 0
    tag: int = 0
    colors: tuple[int | None, ...] = ()
    keys: tuple[int, ...] = ()
    children: dict[int, int] = field(default_factory=dict)

    @property
    def part(self) -> slice:
        """The part of an arena's vectors."""
        return slice(self.at, self.at + self.rows[0])

    def __str__(self) -> str:
        words = [
            f"step {self.number}: {self.method}{'_async' if self.is_twin else ''}",
            f"group {self.group}", self.dtype.name, f"rows {list(self.rows)} of {self.trailing}",
            self.operation.name, f"root {self.root}", f"counts {list(self.counts)}",
        ]  # fmt: skip
        if self.has_out:
            words.append("with an array for the result")
        if self.method in IN_ARENAS:
            words.append(f"in an arena from element {self.at}")
        return ", ".join(words)


class _Drawing:
    """A sequence under construction."""

    def __init__(self, seed: int, world_size: int) -> None:
        self.generator = np.random.default_rng([seed, world_size])
        self.sizes = {0: world_size}
        self.steps: list[SequenceStep] = []
        # Of each group's arena: its dtype, its next free element, whether a node has one vector.
        self.arenas: dict[int, tuple[DType, int, bool]] = {}
        # Drawn once, so that some sequences only block and some have nearly everything under way.
        self.twins = self.generator.choice([0.0, 0.4, 0.9])
        # The lengths decide how data travel: in headers, at once, or in several rounds.
        self.longest = int(self.generator.choice([6, 40, 3000, 9000]))

    def chance(self, probability: float) -> bool:
        return bool(self.generator.random() < probability)

    def below(self, bound: int) -> int:
        return int(self.generator.integers(bound))

    def add(self, method: str, group: int, **values: Any) -> None:
        self.steps.append(SequenceStep(len(self.steps), method, group, **values))

    def split(self) -> None:
        # Also a group that was split off earlier: in a group of a group ranks are translated twice.
        group = self.below(len(self.sizes))
        size = self.sizes[group]
        colors = [None if self.chance(0.1) else self.below(2) for _ in range(size)]
        keys = [self.below(size) for _ in range(size)]
        children = {}
        for color in sorted({color for color in colors if color is not None}):
            children[color] = len(self.sizes)
            self.sizes[len(self.sizes)] = colors.count(color)
        self.add("split", group, colors=tuple(colors), keys=tuple(keys), children=children)

    def share(self, group: int) -> None:
        if group not in self.arenas:
            dtype, is_common = DTYPES[self.below(len(DTYPES))], self.chance(0.3)
            self.arenas[group] = dtype, 0, is_common
            self.add("allocate_arena", group, dtype=dtype, is_common=is_common)

    def in_arena(self, group: int) -> bool:
        """Add a collective in the arena of ``group``; return whether there was one with room."""
        if group not in self.arenas:
            return False
        dtype, start, is_common = self.arenas[group]
        rows = self.below(self.longest)
        method = "gather_in_place" if is_common else IN_ARENAS[self.below(len(IN_ARENAS))]
        if start + rows > ARENA_LENGTH:
            return False
        # Parts that no other step uses: its peers may read them while the next step is begun.
        self.arenas[group] = dtype, start + rows, is_common
        self.add(
            method,
            group,
            dtype=dtype,
            rows=(rows,) * self.sizes[group],
            at=start,
            is_twin=self.chance(self.twins),
            is_adversarial=self.chance(0.3),
        )
        return True

    def message(self, group: int) -> None:
        size = self.sizes[group]
        source = self.below(size)
        rows = self.below(self.longest)
        self.add(
            "message",
            group,
            dtype=DTYPES[self.below(len(DTYPES))],
            rows=(rows,) * size,
            root=source,
            target=(source + 1 + self.below(size - 1)) % size,
            tag=self.below(3),
            is_twin=self.chance(0.5),
            has_out=self.chance(0.5),
        )

    def collective(self, group: int) -> None:
        size = self.sizes[group]
        method = _METHODS[self.below(len(_METHODS))]
        dtype = DTYPES[self.below(len(DTYPES))]
        rows = [self.below(self.longest)] * size
        # The other collectives need the same rows on all ranks.
        if method in ("all_gather", "gather", "all_to_all") and self.chance(0.7):
            rows = [self.below(self.longest) for _ in range(size)]
        # Only operations with a meaning, because a wrong one is refused by each rank alone.
        known = operations(dtype)
        step = SequenceStep(
            len(self.steps),
            method,
            group,
            dtype,
            tuple(rows),
            (3,) * self.below(2),
            known[self.below(len(known))] if method in _REDUCTIONS else ReductionOperation.SUM,
            self.below(size),
            self._counts(rows[0], size),
            is_twin=self.chance(self.twins),
            has_out=self.chance(0.4),
            is_adversarial=self.chance(0.3),
        )
        self.steps.append(step)

    def _counts(self, rows: int, size: int) -> tuple[int, ...]:
        if self.chance(0.6):
            return tuple(even_sizes(rows, size))
        # Any cuts, so that some pieces are empty.
        cuts = sorted(self.below(rows + 1) for _ in range(size - 1))
        return tuple(int(n) for n in np.diff([0, *cuts, rows]))


def draw_plan(seed: int, world_size: int, length: int) -> list[SequenceStep]:
    """Return the sequence of ``seed``: ``length`` steps, and the splits and memory for them."""
    drawing = _Drawing(seed, world_size)
    splits = drawing.below(3) if drawing.chance(0.5) else 0
    shares = drawing.chance(0.5)
    for number in range(length):
        # At fixed places, so that most steps can use the groups.
        if splits and number in (0, length // 3):
            splits -= 1
            drawing.split()
        group = drawing.below(len(drawing.sizes)) if drawing.chance(0.5) else 0
        if shares and drawing.chance(0.2):
            drawing.share(group)
        if drawing.sizes[group] > 1 and drawing.chance(0.2):
            drawing.message(group)
        elif not (drawing.chance(0.5) and drawing.in_arena(group)):
            drawing.collective(group)
    return drawing.steps


@dataclass(frozen=True, slots=True)
class Spoiled:
    """The wrong call of one rank of a group, in a step of the others."""

    step: SequenceStep
    rank: int


def spoil(plan: list[SequenceStep], seed: int) -> Spoiled | None:
    """Return a step of ``plan`` made wrong on one rank; None if no step has several ranks."""
    # A generator of its own: the plan is then the same with a mismatch and without.
    generator = np.random.default_rng([seed, len(plan), 2])
    steps = [step for step in plan if step.method in _METHODS and len(step.rows) > 1]
    if not steps:
        return None
    step = steps[generator.integers(len(steps))]
    rank = int(generator.integers(len(step.rows)))
    wrongs = [name for name, methods in _DIFFERENCES.items() if step.method in methods]
    size, known = len(step.rows), operations(step.dtype)
    place = _METHODS.index(step.method)
    # One row more and not fewer, because a step may have none.
    longer = tuple(n + 1 for n in step.rows)
    plain: dict[str, Any] = {"operation": ReductionOperation.SUM, "has_out": False}
    changes: dict[str, dict[str, Any]] = {
        # Arguments that every collective takes, because the new one may be any.
        "method": plain | {
            "method": _METHODS[(place + 1 + sum(step.rows) % (len(_METHODS) - 1)) % len(_METHODS)],
            "rows": (step.rows[0],) * size,
            "counts": tuple(even_sizes(step.rows[0], size)),
        },
        "operation": {"operation": known[(known.index(step.operation) + 1) % len(known)]},
        "dtype": plain | {
            "dtype": DTYPES[(DTYPES.index(step.dtype) + 1) % len(DTYPES)]
        },
        "rows": {
            "rows": longer, "counts": tuple(even_sizes(longer[0], size))
        },
        "dims": {"trailing": (*step.trailing, 2), "has_out": False},
        "root": {"root": (step.root + 1) % size},
    }  # fmt: skip
    return Spoiled(replace(step, **changes[wrongs[generator.integers(len(wrongs))]]), rank)


_DIFFERENCES = {
    "method": _METHODS,
    "operation": _REDUCTIONS,
    "dtype": (*_REDUCTIONS, "all_gather", "gather", "all_to_all"),
    "rows": _REDUCTIONS,
    "dims": (*_REDUCTIONS, "all_gather", "gather"),
    "root": ("broadcast", "scatter", "gather"),
}
"""Each possible difference -> the collectives that must refuse it."""
