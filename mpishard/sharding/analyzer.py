"""Reports on a grouping of parameters, and on its quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpishard.base import Array, ShardingError, as_count
from mpishard.contracts import ILayeredModel, UserModel
from mpishard.sharding.table import build_units


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Consecutive parameters that are handled as one.

    Parameters
    ----------
    start_index : int
        Flat index of the first.
    size : int
        Number of elements.
    name : str
        Name of the group in reports.
    is_merged : bool
        Whether it includes elements that would have been a group, or a layer, of their own.
    """

    start_index: int = 0
    size: int = 0
    name: str = ""
    is_merged: bool = False


class ParameterAnalyzer:
    """Groups parameters for communication: few long messages instead of many short ones.

    The groups of a layered model are the units that sharding uses. A bare vector has no layers, and
    is cut into chunks: these are only reports, which no strategy uses.

    Parameters
    ----------
    minimum_group_size : int
        Elements that a group should have.
    world_size : int
        Number of ranks for `analyze_for_distribution` and the statistics.

    Raises
    ------
    ValueError
        For either below 1.

    Examples
    --------
    >>> import numpy as np
    >>> groups = ParameterAnalyzer(minimum_group_size=10).analyze_parameters(np.zeros(34))
    >>> [(g.name, g.start_index, g.size, g.is_merged) for g in groups]
    [('ParameterGroup_0', 0, 10, False), ('ParameterGroup_1', 10, 10, False),
     ('ParameterGroup_2', 20, 14, True)]
    """

    def __init__(self, minimum_group_size: int = 1024, world_size: int = 1) -> None:
        self.minimum_group_size = as_count("minimum_group_size", minimum_group_size)
        self.world_size = as_count("world_size", world_size)

    def analyze_model(self, model: UserModel) -> list[ParameterGroup]:
        """Return the groups of a model. No parameter is made or gathered.

        Parameters
        ----------
        model : ILayeredModel or object
            The groups of a layered model are the units of a sharded model whose configuration has
            this ``minimum_parameter_group_size``; one is merged if it holds several layers with
            parameters. The groups of another model are those of `analyze_parameters`: the number of
            parameters is its ``parameter_count``, or the size of its ``get_parameters()``.

        Raises
        ------
        TypeError
            For None.
        """
        if model is None:
            raise TypeError("model must be a model, got None")
        if not isinstance(model, ILayeredModel):
            count = getattr(model, "parameter_count", None)
            return self._chunks(int(model.get_parameters().size if count is None else count))
        sizes = [info.parameter_count for info in model.get_all_layer_info()]
        if not any(sizes):
            return []
        return [
            ParameterGroup(
                unit.start,
                unit.length,
                f"ParameterGroup_{unit.index}",
                sum(1 for size in sizes[unit.first_layer : unit.last_layer + 1] if size) > 1,
            )
            for unit in build_units(sizes, self.minimum_group_size)
        ]

    def analyze_parameters(self, parameters: Array) -> list[ParameterGroup]:
        """Return chunks of ``minimum_group_size`` elements, named ``ParameterGroup_<k>``.

        The last chunk may be shorter. If a remainder is longer than a chunk and shorter than one
        and a half, it is one merged chunk. An empty vector has no groups.

        Parameters
        ----------
        parameters : Array
            Shape (n,). Only n counts.

        Raises
        ------
        TypeError
            For None.
        """
        return self._chunks(_length(parameters))

    def _chunks(self, length: int) -> list[ParameterGroup]:
        minimum = self.minimum_group_size
        # The rest is one chunk if it is longer than a chunk, and shorter than one and a half.
        return _cut(length, minimum, "Parameter", lambda rest: 0 < 2 * rest < minimum)

    def analyze_for_distribution(self, parameters: Array) -> list[ParameterGroup]:
        """Return chunks that the ranks can divide evenly, about four for each rank.

        A chunk has max(``minimum_group_size``, n // (4 W)) elements, rounded down to a multiple of
        the world size W, but no less than W; it is named ``DistributedGroup_<k>``. A tail of less
        than half a chunk is merged into the chunk before it.

        Parameters
        ----------
        parameters : Array
            Shape (n,). Only n counts.

        Raises
        ------
        TypeError
            For None.

        Examples
        --------
        >>> import numpy as np
        >>> groups = ParameterAnalyzer(10, world_size=4).analyze_for_distribution(np.zeros(35))
        >>> [(g.start_index, g.size, g.is_merged) for g in groups]
        [(0, 8, False), (8, 8, False), (16, 8, False), (24, 11, True)]
        """
        length, world = _length(parameters), self.world_size
        base = max(self.minimum_group_size, length // (4 * world))
        base = max(base // world, 1) * world  # each rank then has as much of every chunk
        return _cut(length, base, "Distributed", lambda rest: 0 < rest < base // 2)

    def calculate_distribution_stats(self, groups: Sequence[ParameterGroup]) -> dict[str, float]:
        """Return statistics of a grouping.

        Returns
        -------
        dict of str to float
            TotalGroups, TotalParameters, AverageGroupSize, MinGroupSize, MaxGroupSize,
            MergedGroups, GroupsPerProcess (groups by ``world_size``), GroupSizeVariance (of the
            population) and GroupSizeStdDev; empty if there are no groups.

        Raises
        ------
        TypeError
            For None.
        """
        if groups is None:
            raise TypeError("groups must be a sequence of ParameterGroup, got None")
        if not groups:
            return {}
        sizes = [group.size for group in groups]
        mean = sum(sizes) / len(sizes)
        variance = sum((size - mean) ** 2 for size in sizes) / len(sizes)
        return {
            "TotalGroups": len(sizes),
            "TotalParameters": sum(sizes),
            "AverageGroupSize": mean,
            "MinGroupSize": min(sizes),
            "MaxGroupSize": max(sizes),
            "MergedGroups": sum(1 for group in groups if group.is_merged),
            "GroupsPerProcess": len(sizes) / self.world_size,
            "GroupSizeVariance": variance,
            "GroupSizeStdDev": math.sqrt(variance),
        }

    def validate_grouping(
        self, groups: Sequence[ParameterGroup] | None, total_parameters: int
    ) -> bool:
        """Check that the groups hold each of ``total_parameters`` once; their order is free.

        Returns
        -------
        bool
            True; a wrong grouping raises.

        Raises
        ------
        ShardingError
            A RuntimeError: for no groups, if they do not begin at 0 or end at the total, for a
            gap, and for an overlap, naming the groups and the indices.
        """
        if not groups:
            raise ShardingError(f"there are no groups for {total_parameters} parameters")
        # Empty groups first, so that one at the start of another is no overlap.
        ordered = sorted(groups, key=lambda group: (group.start_index, group.size))
        if ordered[0].start_index != 0:
            raise ShardingError(
                f"the first group, {ordered[0].name!r}, begins at {ordered[0].start_index} and "
                "not at 0"
            )
        stop, before = 0, ""
        for group in ordered:
            if group.size < 0:
                raise ShardingError(f"the group {group.name!r} has size {group.size}")
            if group.start_index != stop:
                what = "a gap" if group.start_index > stop else "an overlap"
                raise ShardingError(
                    f"there is {what} between {before!r}, which ends at {stop}, and "
                    f"{group.name!r}, which begins at {group.start_index}"
                )
            stop, before = stop + group.size, group.name
        if stop != total_parameters:
            raise ShardingError(
                f"the last group, {before!r}, ends at {stop}, and there are {total_parameters} "
                "parameters"
            )
        return True


def _cut(
    length: int, size: int, kind: str, is_too_short: Callable[[int], bool]
) -> list[ParameterGroup]:
    """Cut a vector into chunks of ``size``; a rest that is too short joins the last one."""
    groups: list[ParameterGroup] = []
    start = 0
    while start < length:
        stop = min(start + size, length)
        is_merged = is_too_short(length - stop)
        stop = length if is_merged else stop
        name = f"{kind}Group_{len(groups)}"
        groups.append(ParameterGroup(start, stop - start, name, is_merged))
        start = stop
    return groups


def _length(parameters: Array) -> int:
    if parameters is None:
        raise TypeError("parameters must be a vector, got None")
    return len(parameters)
