"""How the layers of a model are dealt to the stages of a pipeline."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from mpishard.arguments import as_integer
from mpishard.contracts import LayerInfo
from mpishard.pipeline.balance import balanced_cuts
from mpishard.pipeline.partition import IPipelinePartitionStrategy, nearest_cuts

__all__ = ["partition_layers"]

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

    Every stage has a layer where there are as many layers, and places between them that may be
    cut, as stages; where not, the last stages have none. The largest cost of a stage is as small
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
        ``estimated_flops``; where no layer has any, all cost the same. Backward costs about twice
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
        negative or not finite, and where both a strategy and costs are given.

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
