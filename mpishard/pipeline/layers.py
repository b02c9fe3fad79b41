"""Stages of a pipeline: cuts of a flat vector or of a chain of layers, even or by cost.

The costs of layers are measured or estimated; the best cut has the least cost of the most expensive
stage.
"""

from __future__ import annotations

import bisect
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpishard.base import (
    Array,
    MissingLossError,
    ShardLayout,
    array_namespace,
    as_amount,
    as_count,
    as_integer,
    require_type,
    synchronize,
)
from mpishard.contracts import LayerInfo
from mpishard.data import map_arrays
from mpishard.nn import Context, Model


def balanced_cuts(
    costs: Sequence[float], num_runs: int, allowed: Sequence[int] | None = None
) -> list[int]:
    """Return the cuts of ``costs`` that make the largest sum of a run as small as possible.

    By dynamic programming: the best cut of the first n costs into k runs is one of the best cuts
    of fewer costs into k - 1 runs, and a last run. Of equally good last cuts the earliest is
    taken, so that of equal stages the last are the longer ones. Time and memory grow as the
    number of costs times that of runs.

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
        Indices of the costs before which the cuts are, increasing. No run is empty.
    """
    positions = np.arange(1, len(costs)) if allowed is None else np.asarray(allowed, np.int64)
    # Fewer positions than cuts: the last runs do not exist.
    num_cuts = min(num_runs - 1, len(positions))
    # Nodes: the beginning, the positions of cuts, the end. sums[j] is the cost of all before it.
    nodes = np.concatenate([[0], positions, [len(costs)]])
    sums = np.concatenate([[0.0], np.cumsum(costs)])[nodes]
    # best[k][j] is the smallest possible largest run if k + 1 runs end at node j, which is more
    # than k. It grows with j, and the sum from node i to node j shrinks as i grows.
    best = [sums]
    for num_before in range(1, num_cuts + 1):
        before, ends = best[-1], np.arange(num_before + 1, len(nodes))
        # The first last cut whose runs before it are not cheaper than the last run.
        low, high = np.full_like(ends, num_before), ends.copy()
        # A binary search for all ends at once, in NumPy: thousands of layers take milliseconds.
        while (low < high).any():
            middle = (low + high) // 2
            is_found = before[middle] >= sums[ends] - sums[middle]
            low, high = np.where(is_found, low, middle + 1), np.where(is_found, middle, high)
        # The cut before the crossing has the cheaper runs before it, and may still be the better
        # one.
        last_run = np.where(low > num_before, sums[ends] - sums[low - 1], np.inf)
        best.append(np.concatenate([sums[: num_before + 1], np.minimum(before[low], last_run)]))
    cuts: list[int] = []
    end = len(nodes) - 1
    for num_before in range(num_cuts, 0, -1):
        # Back from the end: the earliest cut whose last run is not above the optimum.
        largest, total = best[num_before][end], sums[end]
        end = num_before + bisect.bisect_left(
            sums[num_before:end], True, key=lambda start: bool(total - start <= largest)
        )
        cuts.append(int(nodes[end]))
    return cuts[::-1]


class IPipelinePartitionStrategy(ABC):
    """A rule for the range of the flat vector that each stage of a pipeline has."""

    @abstractmethod
    def compute_partition(self, total_parameters: int, num_stages: int) -> list[tuple[int, int]]:
        """Return start and size of each stage's range, in order and without gaps.

        Raises
        ------
        ValueError
            For fewer than one parameter or stage.
        """


def stage_ranges(
    strategy: IPipelinePartitionStrategy, total_parameters: int, num_stages: int
) -> list[tuple[int, int]]:
    """Return start and size of each stage's range, as the strategy gives them.

    Raises
    ------
    TypeError
        If the strategy gives something else than pairs of integers.
    ValueError
        If the ranges are not the vector, each element once and in order.
    """
    name = type(strategy).__name__
    # A user's class may return anything.
    given: Any = strategy.compute_partition(total_parameters, num_stages)
    try:
        ranges = [(as_integer("start", start), as_integer("size", size)) for start, size in given]
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must give a pair of integers (start, size) for each of {num_stages} stages, "
            f"got {given!r}"
        ) from None
    # Ranges without gaps begin where the sizes before them end.
    edges = [*itertools.accumulate((size for _, size in ranges), initial=0)]
    starts = [start for start, _ in ranges]
    if len(ranges) != num_stages or [*starts, total_parameters] != edges or edges != sorted(edges):
        raise ValueError(
            f"{name} assigns {total_parameters} parameters to {num_stages} stages as (start, size) "
            f"{ranges}; it must assign each parameter once, in order"
        )
    return ranges


class UniformPartitionStrategy(IPipelinePartitionStrategy):
    """Equal numbers of parameters for the stages; the remainder goes to the first ones.

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
    Of equally good cuts the earliest is taken.

    Parameters
    ----------
    layer_boundaries : sequence of int, optional
        Start of each layer in the flat vector: 0 first, increasing.
    cost_estimator : callable, optional
        ``cost_estimator(parameter_count)`` is the cost of a layer; default ``count ** 1.5``. Use
        `partition_layers` if layers are known by more than their parameters.
    estimated_layer_size : int, optional
        Approximate number of parameters of a layer, in place of boundaries. The vector then counts
        as ``max(1, total // size)`` layers of even size.

    Raises
    ------
    TypeError
        For a boundary or size that is not an integer, and a ``cost_estimator`` that is not
        callable.
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
            boundaries = [as_integer("layer_boundaries", each) for each in layer_boundaries]
            if not boundaries or boundaries[0] != 0:
                raise ValueError(f"layer_boundaries must begin with 0, got {boundaries}")
            for before, after in itertools.pairwise(boundaries):
                if after <= before:
                    raise ValueError(f"layer_boundaries must increase, got {after} after {before}")
            self._boundaries = boundaries
        if estimated_layer_size is not None:
            estimated_layer_size = as_count("estimated_layer_size", estimated_layer_size)
        self._size = estimated_layer_size
        if cost_estimator is not None and not callable(cost_estimator):
            raise TypeError(
                "cost_estimator must be a function of a number of parameters, got "
                f"{type(cost_estimator).__name__}"
            )
        self._cost = cost_estimator or (lambda count: count**1.5)

    def compute_partition(self, total_parameters: int, num_stages: int) -> list[tuple[int, int]]:
        total, count = _checked(total_parameters, num_stages)
        if self._boundaries is None:
            assert self._size is not None
            layout = ShardLayout(total, max(1, total // self._size))
            begins = [layout.start(layer) for layer in range(layout.world_size)]
        elif self._boundaries[-1] > total:
            raise ValueError(
                f"layer_boundaries end with {self._boundaries[-1]}, behind the last of {total} "
                "parameters"
            )
        else:
            begins = self._boundaries
        ends = [*begins[1:], total]
        costs = [
            as_amount(f"the cost of a layer of {end - begin} parameters", self._cost(end - begin))
            for begin, end in zip(begins, ends, strict=True)
        ]
        cuts = [0, *balanced_cuts(costs, count), len(costs)]
        stages = [
            (begins[first], ends[last - 1] - begins[first])
            for first, last in itertools.pairwise(cuts)
        ]
        # More stages than layers: the last ones have no parameters.
        return stages + [(total, 0)] * (count - len(stages))


def _checked(total_parameters: int, num_stages: int) -> tuple[int, int]:
    return as_count("total_parameters", total_parameters), as_count("num_stages", num_stages)


def nearest_cuts(
    boundaries: Sequence[int], positions: Sequence[int], allowed: Sequence[int]
) -> list[int]:
    """Return cuts between layers, each nearest to one of the positions of a flat vector.

    Parameters
    ----------
    boundaries : sequence of int
        Start of each layer in the flat vector.
    positions : sequence of int
        Positions at which the flat vector is to be cut, in order.
    allowed : sequence of int
        Layers before which a cut may be, in order; at least as many as positions.

    Returns
    -------
    list of int
        Layers before which the cuts are: one for each position, increasing. Of two equally near
        layers the earlier one is taken.
    """
    cuts: list[int] = []
    for number, position in enumerate(positions):
        first = bisect.bisect_right(allowed, cuts[-1]) if cuts else 0
        last = len(allowed) - (len(positions) - number - 1)  # leave some for later positions
        cuts.append(min(allowed[first:last], key=lambda layer: abs(boundaries[layer] - position)))
    return cuts


def measured_layer_costs(model: Model, x: Array, y: Array, *, repeats: int = 5) -> list[float]:
    """Measure the seconds of forward and backward of each top-level layer, for `partition_layers`.

    The time of the loss is added to the last layer's. A first run does not count, and of the others
    the median is taken. The model's parameters are read and not changed. Measure on one rank, and
    broadcast the result: ranks that measure separately get different times, and would assign layers
    differently.

    Parameters
    ----------
    model : Model
        A plain model of `mpishard.nn` with a default loss.
    x, y : Array
        A batch; times are those of micro-batches of its size.
    repeats : int
        Number of repeats, 1 or more.

    Returns
    -------
    list of float
        One for each of ``model.layers``.

    Raises
    ------
    TypeError
        If ``model`` is not a `Model`, or ``repeats`` not an integer.
    ValueError
        For fewer than one repeat, and for inputs or targets that the model cannot take.
    MissingLossError
        If the model has no loss.

    Examples
    --------
    >>> import numpy as np
    >>> import mpishard as ms
    >>> from mpishard.pipeline import measured_layer_costs, partition_layers
    >>> model = ms.nn.MLP([8, 32, 32, 4])
    >>> seconds = measured_layer_costs(model, np.ones((16, 8)), np.ones((16, 4)))
    >>> stages = partition_layers(model.get_all_layer_info(), 2, costs=seconds)
    """
    require_type("model", model, Model)
    as_count("repeats", repeats)
    loss = model.default_loss_function
    if loss is None:
        raise MissingLossError(f"this {type(model).__name__} has no default loss for backward")
    x = model.as_input(x)
    loss.check_target((*x.shape[:1], *model.chain.output_shape(x.shape[1:])), y)
    # Copies to the device are made once, and are no part of a layer's time.
    y = map_arrays(model.device.put, y)
    table = model.parameter_table
    vector = model.get_parameters()
    views = table.nested_views(vector)
    # Real gradients are written, because their memory traffic is a part of backward.
    gradients = table.nested_views(array_namespace(vector).zeros_like(vector))
    seconds = np.zeros((repeats + 1, len(model.layers)))
    for row in seconds:
        _measure(model, views, gradients, x, y, row)
    # Without the first pass, which compiles loops and allocates memory.
    return [float(s) for s in np.median(seconds[1:], axis=0)]


def _measure(model: Model, views: Any, gradients: Any, x: Array, y: Array, seconds: Array) -> None:
    """Run one forward and backward pass, and add its times to ``seconds``."""
    # A new one for each pass, as a step has.
    context = Context(seed=model.seed)
    saved = []
    for index, (name, layer) in enumerate(model.chain.children.items()):
        start = time.perf_counter()
        x, layer_saved = layer.forward(views.get(name, {}), x, context.enter(name, layer))
        # A GPU computes asynchronously: without this the time would be counted for the next layer.
        synchronize(x)
        seconds[index] += time.perf_counter() - start
        saved.append(layer_saved)
    loss = model.default_loss_function
    assert loss is not None
    start = time.perf_counter()
    dy = loss.backward(loss.forward(x, y)[2])
    synchronize(dy)
    seconds[-1] += time.perf_counter() - start  # the last stage computes it
    for index, (name, layer) in reversed(list(enumerate(model.chain.children.items()))):
        start = time.perf_counter()
        dx = layer.backward(
            views.get(name, {}),
            saved.pop(),
            dy,
            gradients.get(name, {}),
            needs_input_gradient=index > 0,
        )
        if dx is not None:
            dy = dx
            synchronize(dy)
        seconds[index] += time.perf_counter() - start


Costs = Callable[[LayerInfo], float] | Sequence[float]


def partition_layers(
    infos: Sequence[LayerInfo],
    num_stages: int,
    strategy: IPipelinePartitionStrategy | None = None,
    *,
    costs: Costs | None = None,
    can_cut: Callable[[int], bool] | None = None,
) -> list[tuple[int, int]]:
    """Return the layers of each stage.

    Every stage has a layer if there are enough layers, and enough allowed cuts between them;
    otherwise the last stages have none. The largest cost of a stage is as small as possible,
    and of equally good cuts the earliest is taken.

    Parameters
    ----------
    infos : sequence of LayerInfo
        The layers, in order, as ``model.get_all_layer_info()`` gives them.
    num_stages : int
        Global stages: P ranks times V virtual stages.
    strategy : IPipelinePartitionStrategy, optional
        Cuts the flat vector. Each of its cuts is moved to the nearest layer, by the start of its
        parameters, before which the model may be cut, so that every stage has a layer.
    costs : callable or sequence of float, optional
        ``costs(info)``, or one number for each layer, as of `measured_layer_costs`. Default:
        ``estimated_flops``; if no layer has any, all cost the same. Backward costs about twice
        as much as forward in every layer, and need not be counted.
    can_cut : callable, optional
        ``can_cut(after)`` returns whether the model may be cut after layer ``after``, as
        ``model.validate_partition_point`` does; default everywhere.

    Returns
    -------
    list of (int, int)
        First layer, and the one after the last, of each of ``num_stages`` stages.

    Raises
    ------
    TypeError
        For a strategy of another type, and for a cost that is no number, naming its layer.
    ValueError
        Without layers, for fewer than one stage, for costs of another number than the layers,
        negative or not finite, and if both a strategy and costs are given. If the strategy's ranges
        are not the vector, each element once and in order.

    Examples
    --------
    >>> import mpishard as ms
    >>> from mpishard.pipeline import partition_layers
    >>> model = ms.nn.MLP([8, 32, 32, 4])
    >>> [(info.name, info.estimated_flops) for info in model.get_all_layer_info()]
    [('linear0', 512), ('relu0', 32), ('linear1', 2048), ('relu1', 32), ('linear2', 256)]
    >>> partition_layers(model.get_all_layer_info(), 2)
    [(0, 2), (2, 5)]
    """
    if not infos:
        raise ValueError("there are no layers to assign to stages")
    as_count("num_stages", num_stages)
    if strategy is not None:
        require_type("strategy", strategy, IPipelinePartitionStrategy)
    if strategy is not None and costs is not None:
        raise ValueError("a strategy has costs of its own: give either strategy or costs")
    allowed = [i for i in range(1, len(infos)) if can_cut is None or can_cut(i - 1)]
    if strategy is None:
        cuts = balanced_cuts(_costs(infos, costs), num_stages, allowed)
    else:
        total = infos[-1].parameter_offset + infos[-1].parameter_count
        ranges = stage_ranges(strategy, total, num_stages)
        # A strategy cuts the flat vector anywhere, and a model only between its layers.
        positions = [start for start, _ in ranges[1:]][: len(allowed)]
        cuts = nearest_cuts([info.parameter_offset for info in infos], positions, allowed)
    edges = [0, *cuts, len(infos)]
    stages = list(itertools.pairwise(edges))
    return stages + [(len(infos), len(infos))] * (num_stages - len(stages))


def _costs(infos: Sequence[LayerInfo], given: Costs | None) -> list[float]:
    if given is None:
        flops = [float(info.estimated_flops) for info in infos]
        # Without any FLOPs, as of tables that only copy, all layers count alike.
        return flops if any(flops) else [1.0] * len(infos)
    # Costs of the user's function, which are checked below.
    found: list[Any] = list(map(given, infos) if callable(given) else given)
    if len(found) != len(infos):
        raise ValueError(f"costs must be one for each of {len(infos)} layers, got {len(found)}")
    origin = "that costs or partition_strategy gives"
    return [
        as_amount(f"the cost of layer {info.index}, {info.name!r}, {origin}", cost)
        for info, cost in zip(infos, found, strict=True)
    ]
