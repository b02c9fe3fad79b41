"""Partitions of a flat vector into stages: evenly, or with the least cost of the dearest stage."""

from __future__ import annotations

import bisect
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from mpishard.arguments import as_integer
from mpishard.layout import ShardLayout

__all__ = [
    "IPipelinePartitionStrategy",
    "LoadBalancedPartitionStrategy",
    "UniformPartitionStrategy",
    "balanced_cuts",
]


def balanced_cuts(
    costs: Sequence[float], num_runs: int, allowed: Sequence[int] | None = None
) -> list[int]:
    """Return the cuts of ``costs`` that make the largest sum of a run as small as possible.

    By dynamic programming: the best cut of the first n costs into k runs is one of the best cuts
    of fewer costs into k - 1 runs, and a last run. Of equally good last cuts the earliest is
    taken, so that of equal stages the last are the longer ones.

    Parameters
    ----------
    costs : sequence of float
        0 or more each; at least one.
    num_runs : int
        Number of runs; with fewer costs or allowed cuts, as many as possible.
    allowed : sequence of int, optional
        Costs before which a cut may be, in order; default: all but the first.

    Returns
    -------
    list of int
        Before which costs the cuts are, increasing. No run is empty.
    """
    places = np.arange(1, len(costs)) if allowed is None else np.asarray(allowed, np.int64)
    num_cuts = min(num_runs - 1, len(places))
    # Nodes: the beginning, the places of cuts, the end. sums[j] is the cost of all before it.
    nodes = np.concatenate([[0], places, [len(costs)]])
    sums = np.concatenate([[0.0], np.cumsum(costs)])[nodes]
    runs = np.where(
        np.arange(len(nodes))[:, None] < np.arange(len(nodes)), sums - sums[:, None], np.inf
    )
    best = runs[0]  # of one run up to each node
    choices = []
    for _ in range(num_cuts):
        dearest = np.maximum(best[:, None], runs)
        choices.append(dearest.argmin(axis=0))
        best = dearest.min(axis=0)
    cuts: list[int] = []
    node = len(nodes) - 1
    for choice in reversed(choices):
        node = int(choice[node])
        cuts.append(int(nodes[node]))
    return cuts[::-1]


class IPipelinePartitionStrategy(ABC):
    """A rule for the range of the flat vector that each stage of a pipeline has."""

    @abstractmethod
    def compute_partition(self, total_parameters: int, num_stages: int) -> list[tuple[int, int]]:
        """Start and size of each stage's range, in order and without gaps.

        Raises
        ------
        ValueError
            For fewer than one parameter or stage.
        """


class UniformPartitionStrategy(IPipelinePartitionStrategy):
    """As many parameters for each stage; the remainder goes to the first ones.

    Examples
    --------
    >>> from mpishard.pipeline import UniformPartitionStrategy
    >>> UniformPartitionStrategy().compute_partition(10, 4)
    [(0, 3), (3, 3), (6, 2), (8, 2)]
    """

    def compute_partition(self, total_parameters: int, num_stages: int) -> list[tuple[int, int]]:
        total, count = _checked(total_parameters, num_stages)
        layout = ShardLayout(total, count)
        return [(layout.start(stage), layout.size(stage)) for stage in range(count)]


class LoadBalancedPartitionStrategy(IPipelinePartitionStrategy):
    """Whole layers for each stage, with the largest cost of a stage as small as possible.

    With as many stages as layers or more each layer is a stage, and the last stages are empty.
    Of cuts that are as good as each other the earliest is taken.

    Parameters
    ----------
    layer_boundaries : sequence of int, optional
        Start of each layer in the flat vector: 0 first, increasing.
    cost_estimator : callable, optional
        ``cost_estimator(parameter_count)`` is the cost of a layer; default ``count ** 1.5``. Use
        `partition_layers` if layers are known by more than their parameters.
    estimated_layer_size : int, optional
        In place of boundaries: about how many parameters a layer has. The vector is then taken
        for ``max(1, total // size)`` layers of even size.

    Raises
    ------
    ValueError
        For both or neither of boundaries and size, for boundaries that are empty, do not begin
        with 0 or do not increase, and for a size below 1. `compute_partition` raises it for a
        boundary behind the last parameter, too, and for a cost that is negative or not finite.

    Examples
    --------
    >>> from mpishard.pipeline import LoadBalancedPartitionStrategy
    >>> LoadBalancedPartitionStrategy([0, 40, 50, 60]).compute_partition(100, 2)
    [(0, 50), (50, 50)]
    """

    def __init__(
        self,
        layer_boundaries: Sequence[int] | None = None,
        cost_estimator: Callable[[int], float] | None = None,
        *,
        estimated_layer_size: int | None = None,
    ) -> None:
        if (layer_boundaries is None) == (estimated_layer_size is None):
            raise ValueError(
                "give either layer_boundaries or estimated_layer_size, got "
                + ("both" if layer_boundaries is not None else "neither")
            )
        self._boundaries: list[int] | None = None
        if layer_boundaries is not None:
            self._boundaries = _checked_boundaries(layer_boundaries)
        if estimated_layer_size is not None:
            estimated_layer_size = as_integer("estimated_layer_size", estimated_layer_size)
            if estimated_layer_size < 1:
                raise ValueError(
                    f"estimated_layer_size must be 1 or more, got {estimated_layer_size}"
                )
        self._size = estimated_layer_size
        self._cost = cost_estimator or (lambda count: count**1.5)

    def compute_partition(self, total_parameters: int, num_stages: int) -> list[tuple[int, int]]:
        total, count = _checked(total_parameters, num_stages)
        begins = self._begins(total)
        ends = [*begins[1:], total]
        costs = [float(self._cost(end - begin)) for begin, end in zip(begins, ends, strict=True)]
        for begin, end, cost in zip(begins, ends, costs, strict=True):
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(
                    f"the cost of a layer of {end - begin} parameters must be 0 or more and "
                    f"finite, got {cost}"
                )
        cuts = [0, *balanced_cuts(costs, count), len(costs)]
        stages = [
            (begins[first], ends[last - 1] - begins[first])
            for first, last in itertools.pairwise(cuts)
        ]
        return stages + [(total, 0)] * (count - len(stages))

    def _begins(self, total: int) -> list[int]:
        if self._boundaries is None:
            assert self._size is not None
            layout = ShardLayout(total, max(1, total // self._size))
            return [layout.start(layer) for layer in range(layout.world_size)]
        if self._boundaries[-1] > total:
            raise ValueError(
                f"layer_boundaries end with {self._boundaries[-1]}, behind the last of {total} "
                "parameters"
            )
        return self._boundaries


def _checked(total_parameters: int, num_stages: int) -> tuple[int, int]:
    total = as_integer("total_parameters", total_parameters)
    count = as_integer("num_stages", num_stages)
    for value, name in ((total, "total_parameters"), (count, "num_stages")):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    return total, count


def _checked_boundaries(given: Sequence[int]) -> list[int]:
    boundaries = [as_integer("layer_boundaries", boundary) for boundary in given]
    if not boundaries or boundaries[0] != 0:
        raise ValueError(f"layer_boundaries must begin with 0, got {boundaries}")
    for before, after in itertools.pairwise(boundaries):
        if after <= before:
            raise ValueError(f"layer_boundaries must increase, got {after} after {before}")
    return boundaries


def nearest_cuts(
    boundaries: Sequence[int], places: Sequence[int], allowed: Sequence[int]
) -> list[int]:
    """Cuts between layers, each nearest to one of the places of a flat vector.

    Parameters
    ----------
    boundaries : sequence of int
        Start of each layer in the flat vector.
    places : sequence of int
        Positions at which the flat vector is to be cut, in order.
    allowed : sequence of int
        Layers before which a cut may be, in order; at least as many as places.

    Returns
    -------
    list of int
        Layers before which the cuts are: one for each place, increasing; of two as near the
        earlier.
    """
    cuts: list[int] = []
    for number, place in enumerate(places):
        first = bisect.bisect_right(allowed, cuts[-1]) if cuts else 0
        last = len(allowed) - (len(places) - number - 1)  # leave one for each place that follows
        cuts.append(min(allowed[first:last], key=lambda layer: abs(boundaries[layer] - place)))
    return cuts
