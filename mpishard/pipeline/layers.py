"""Layers of a model dealt to the stages of a pipeline, by their measured or estimated costs."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpishard.arguments import as_integer
from mpishard.arrays import Array, array_namespace, synchronize
from mpishard.contracts import LayerInfo
from mpishard.errors import MissingLossError
from mpishard.nn import Context, Model
from mpishard.pipeline.partition import IPipelinePartitionStrategy, balanced_cuts, nearest_cuts

__all__ = ["measured_layer_costs", "partition_layers"]


def measured_layer_costs(model: Model, x: Array, y: Array, *, repeats: int = 5) -> list[float]:
    """Seconds of forward and backward of each top-level layer, for `partition_layers`.

    Those of the loss are the last layer's.
    A first run does not count, and of the others the median is taken. The model's parameters are
    read and not changed. Ranks that measure for themselves measure different times, and would
    deal the layers differently: measure on one, and broadcast.

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
    if as_integer("repeats", repeats) < 1:
        raise ValueError(f"repeats must be 1 or more, got {repeats}")
    loss = model.default_loss_function
    if loss is None:
        raise MissingLossError(f"this {type(model).__name__} has no default loss to go back from")
    x = model.as_input(x)
    loss.check_target((*x.shape[:1], *model.chain.output_shape(x.shape[1:])), y)
    y = model.device.put(y)
    table = model.parameter_table
    vector = model.get_parameters()
    views = table.nested_views(vector)
    gradients = table.nested_views(array_namespace(vector).zeros_like(vector))
    seconds = np.zeros((repeats + 1, len(model.layers)))
    for row in seconds:
        _measure(model, views, gradients, x, y, row)
    return [float(s) for s in np.median(seconds[1:], axis=0)]


def _measure(
    model: Model, views: Any, gradients: Any, x: Array, y: Array, seconds: np.ndarray[Any, Any]
) -> None:
    """One forward and backward pass, whose times are added to ``seconds``."""
    context = Context(seed=model.seed)
    saved = []
    for index, (name, layer) in enumerate(model.chain.children.items()):
        start = time.perf_counter()
        x, layer_saved = layer.forward(views.get(name, {}), x, context.enter(name, layer))
        # A GPU computes asynchronously: without this the next layer would be charged.
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
        dy = layer.backward(
            views.get(name, {}),
            saved.pop(),
            dy,
            gradients.get(name, {}),
            needs_input_gradient=index > 0,
        )
        if dy is not None:
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
    """The layers of each stage.

    Every stage has a layer if there are as many layers, and places between them that may be
    cut, as stages; if not, the last stages have none. The largest cost of a stage is as small
    as can be, and of equally good cuts the earliest is taken.

    Parameters
    ----------
    infos : sequence of LayerInfo
        The layers, in order, as ``model.get_all_layer_info()`` gives them.
    num_stages : int
        Global stages: P ranks times V virtual stages.
    strategy : IPipelinePartitionStrategy, optional
        Cuts the flat vector; each of its cuts is moved to the beginning of the nearest layer, as
        its parameters lie, that may be cut before, and leaves every stage a layer.
    costs : callable or sequence of float, optional
        ``costs(info)``, or one number for each layer, as of `measured_layer_costs`. Default:
        ``estimated_flops``; if no layer has any, all cost the same. Backward costs about twice
        as much as forward in every layer, and need not be counted.
    can_cut : callable, optional
        ``can_cut(after)`` says whether the model may be cut behind layer ``after``, as
        ``model.validate_partition_point`` does; default everywhere.

    Returns
    -------
    list of (int, int)
        First layer, and the one behind the last, of each of ``num_stages`` stages.

    Raises
    ------
    TypeError
        For a cost that is no number, naming its layer.
    ValueError
        Without layers, for fewer than one stage, for costs of another number than the layers,
        negative or not finite, and if both a strategy and costs are given.

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
        raise ValueError("there are no layers to deal to stages")
    if as_integer("num_stages", num_stages) < 1:
        raise ValueError(f"num_stages must be 1 or more, got {num_stages}")
    if strategy is not None and costs is not None:
        raise ValueError("a strategy has costs of its own: give either strategy or costs")
    allowed = [i for i in range(1, len(infos)) if can_cut is None or can_cut(i - 1)]
    if strategy is None:
        cuts = balanced_cuts(_costs(infos, costs), num_stages, allowed)
    else:
        cuts = _cuts_of(strategy, infos, num_stages, allowed)
    edges = [0, *cuts, len(infos)]
    stages = list(itertools.pairwise(edges))
    return stages + [(len(infos), len(infos))] * (num_stages - len(stages))


def _costs(infos: Sequence[LayerInfo], given: Costs | None) -> list[float]:
    if given is None:
        flops = [float(info.estimated_flops) for info in infos]
        return flops if any(flops) else [1.0] * len(infos)
    found: list[Any] = list(map(given, infos) if callable(given) else given)
    if len(found) != len(infos):
        raise ValueError(f"costs must be one for each of {len(infos)} layers, got {len(found)}")
    costs = [_number(info, cost) for info, cost in zip(infos, found, strict=True)]
    for info, cost in zip(infos, costs, strict=True):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(
                f"the cost of layer {info.index}, {info.name!r}, must be 0 or more and finite, "
                f"got {cost}"
            )
    return costs


def _number(info: LayerInfo, cost: Any) -> float:
    if not isinstance(cost, str | bytes):  # of which float() would read some
        with contextlib.suppress(TypeError, ValueError):
            return float(cost)
    raise TypeError(
        f"the cost of layer {info.index}, {info.name!r}, that costs or partition_strategy gives "
        f"must be a number, got {cost!r}"
    )


def _cuts_of(
    strategy: IPipelinePartitionStrategy,
    infos: Sequence[LayerInfo],
    num_stages: int,
    allowed: Sequence[int],
) -> list[int]:
    total = infos[-1].parameter_offset + infos[-1].parameter_count
    ranges = strategy.compute_partition(total, num_stages)
    if len(ranges) != num_stages:
        raise ValueError(
            f"{type(strategy).__name__} must give {num_stages} ranges, got {len(ranges)}"
        )
    places = [start for start, _ in ranges[1:]][: len(allowed)]
    return nearest_cuts([info.parameter_offset for info in infos], places, allowed)
