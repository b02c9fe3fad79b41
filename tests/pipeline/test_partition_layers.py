"""Layers are assigned to stages by FLOPs, by given or measured costs, or near a strategy's cuts."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import mpishard as ms
from mpishard.errors import MissingLossError, StructureOnlyError
from mpishard.pipeline import (
    IPipelinePartitionStrategy,
    LoadBalancedPartitionStrategy,
    UniformPartitionStrategy,
    measured_layer_costs,
    partition_layers,
)


def infos_of(costs, sizes=None):
    """Layers of these FLOPs and numbers of parameters."""
    first = ms.nn.MLP([2, 2]).get_all_layer_info()[0]
    sizes = sizes or [1] * len(costs)
    offsets = [0, *itertools.accumulate(sizes)]
    return [
        replace(
            first,
            index=i,
            name=f"layer{i}",
            estimated_flops=cost,
            parameter_count=size,
            parameter_offset=offset,
        )
        for i, (cost, size, offset) in enumerate(zip(costs, sizes, offsets, strict=False))
    ]


def is_tiling(stages, count):
    return [a for a, _ in stages] == [0, *(b for _, b in stages[:-1])] and stages[-1][1] == count


def test_no_other_assignment_of_layers_is_better():
    for seed, num_stages in itertools.product(range(30), range(1, 10)):
        generator = np.random.default_rng(seed)
        count = int(generator.integers(2, 9))
        costs = generator.integers(0, 30, count).tolist()
        behind = {i for i in range(count - 1) if generator.random() < 0.7}
        stages = partition_layers(infos_of(costs), num_stages, can_cut=behind.__contains__)
        assert len(stages) == num_stages
        assert is_tiling(stages, count)
        used = [stage for stage in stages if stage[0] < stage[1]]
        assert stages == used + [(count, count)] * (num_stages - len(used))
        assert len(used) == min(num_stages, len(behind) + 1)
        assert {end - 1 for _, end in used[:-1]} <= behind
        if any(costs):
            ways = itertools.combinations([i + 1 for i in sorted(behind)], len(used) - 1)
            best = min(
                max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *way, count]))
                for way in ways
            )
            assert max(sum(costs[a:b]) for a, b in used) == best


def test_ways_to_give_costs():
    infos = infos_of([4, 1, 1, 1, 1], sizes=[1, 1, 1, 1, 4])
    assert partition_layers(infos, 2) == [(0, 1), (1, 5)]
    assert partition_layers(infos, 2, costs=lambda info: info.parameter_count) == [(0, 4), (4, 5)]
    assert partition_layers(infos, 2, costs=[1, 1, 1, 0, 0]) == [(0, 1), (1, 5)]
    assert partition_layers(infos, 2, costs=np.array([0, 0, 1, 1, 2.0])) == [(0, 4), (4, 5)]
    # Without FLOPs or parameters, layers are assigned by number.
    assert partition_layers(infos_of([0] * 6), 3) == [(0, 2), (2, 4), (4, 6)]


def test_cuts_of_a_strategy_move_to_the_nearest_layer():
    infos = infos_of([1] * 4, sizes=[10, 0, 6, 4])
    uniform = UniformPartitionStrategy()
    # Cut at 10: before layer 1, which has no parameters, or 2; the first is taken.
    assert partition_layers(infos, 2, uniform) == [(0, 1), (1, 4)]
    assert partition_layers(infos, 2, uniform, can_cut=lambda i: i != 0) == [(0, 2), (2, 4)]
    # Cuts at 5, 10 and 15 of layers that begin at 0, 10, 10, 16.
    assert partition_layers(infos, 4, uniform) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert partition_layers(infos, 6, uniform)[3:] == [(3, 4), (4, 4), (4, 4)]
    balanced = LoadBalancedPartitionStrategy([0, 10, 16])
    assert partition_layers(infos, 2, balanced) == [(0, 1), (1, 4)]
    # Far to the right, and the later stages must still find a layer.
    infos = infos_of([1] * 4, sizes=[10, 2, 4, 4])
    right = LoadBalancedPartitionStrategy([0, 19], lambda n: 1)
    assert partition_layers(infos, 3, right) == [(0, 2), (2, 3), (3, 4)]
    # Two cuts nearest to one layer: the second takes the next.
    infos = infos_of([1] * 5, sizes=[1, 1, 8, 10, 5])
    close = LoadBalancedPartitionStrategy([0, 10, 11], lambda n: 1)
    assert partition_layers(infos, 3, close) == [(0, 3), (3, 4), (4, 5)]


def test_models_are_cut_only_at_allowed_points():
    model = ms.nn.GPT(vocabulary_size=50, context_length=8, width=16, heads=2, layers=4, seed=0)
    infos = model.get_all_layer_info()
    for num_stages in (1, 2, 3, 4, 8):
        stages = partition_layers(infos, num_stages, can_cut=model.validate_partition_point)
        assert is_tiling(stages, len(infos))
        assert all(a < b for a, b in stages)
        flops = [sum(info.estimated_flops for info in infos[a:b]) for a, b in stages]
        assert max(flops) <= sum(flops) / num_stages + max(i.estimated_flops for i in infos)


def test_bad_arguments():
    infos = infos_of([1, 2])
    for arguments, message in (
        (([], 2), "there are no layers"),
        ((infos, 0), "num_stages must be 1 or more, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            partition_layers(*arguments)
    with pytest.raises(ValueError, match="give either strategy or costs"):
        partition_layers(infos, 2, UniformPartitionStrategy(), costs=[1, 1])
    with pytest.raises(ValueError, match="costs must be one for each of 2 layers, got 3"):
        partition_layers(infos, 2, costs=[1, 1, 1])
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(
            ValueError, match=r"cost of layer 1, 'layer1', that .* must be 0 or more"
        ):
            partition_layers(infos, 2, costs=[1, bad])

    with pytest.raises(TypeError, match="strategy must be an IPipelinePartitionStrategy, got str"):
        partition_layers(infos, 2, "uniform")


class Given(IPipelinePartitionStrategy):
    """A strategy that gives these ranges."""

    def __init__(self, ranges):
        self.ranges = ranges

    def compute_partition(self, total_parameters, num_stages):
        return self.ranges


@pytest.mark.parametrize(
    ("ranges", "error", "message"),
    [
        *[
            (ranges, ValueError, "assigns 3 parameters to 2 stages .*must assign each parameter")
            for ranges in (
                [(0, 3)],
                [(0, 3), (0, 3)],
                [(0, 1), (2, 1)],
                [(0, -1), (-1, 4)],
                [(0, 8), (8, 0)],
                [(0, 1), (1, 1)],
                [(1, 2), (0, 1)],
            )
        ],
        *[
            (ranges, TypeError, r"Given must give a pair of integers \(start, size\) for each of 2")
            for ranges in (None, 5, "ab", [0, 3], [(0, 1.5), (1.5, 1.5)], [(0, 1, 2), (1, 2, 3)])
        ],
    ],
)
def test_ranges_that_are_not_the_vector_are_refused(ranges, error, message):
    with pytest.raises(error, match=message):
        partition_layers(infos_of([1, 2], [1, 2]), 2, Given(ranges))


def test_ranges_of_numpy_integers_are_ranges():
    assert partition_layers(infos_of([1, 2], [1, 2]), 2, Given(np.array([[0, 1], [1, 2]]))) == [
        (0, 1),
        (1, 2),
    ]


def test_measured_costs_are_of_the_layers_and_change_nothing():
    large, small = 160, 2
    model = ms.nn.MLP([small, small, large, large, small], seed=0)
    before = model.get_parameters()
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((2, 256, small))
    seconds = measured_layer_costs(model, x, y, repeats=3)
    assert len(seconds) == len(model.layers)
    assert min(seconds) > 0
    np.testing.assert_array_equal(model.get_parameters(), before)
    assert sum(partition_layers(model.get_all_layer_info(), 2, costs=seconds), ())[0] == 0
    gpt = ms.nn.GPT(
        vocabulary_size=9,
        context_length=4,
        width=8,
        heads=2,
        layers=1,
        seed=0,
        tied_embeddings=True,
        dropout=0.1,
    )
    tokens = generator.integers(0, 9, (2, 4))
    assert len(measured_layer_costs(gpt, tokens, tokens, repeats=1)) == gpt.layer_count


def test_layer_costs_refuse_invalid_arguments():
    model = ms.nn.MLP([2, 2])
    x = np.ones((3, 2))
    with pytest.raises(ValueError, match="repeats must be 1 or more, got 0"):
        measured_layer_costs(model, x, x, repeats=0)
    with pytest.raises(ValueError, match="shape"):
        measured_layer_costs(model, x, np.ones((3, 4)))
    with pytest.raises(MissingLossError, match="no default loss"):
        measured_layer_costs(ms.nn.Model(model.chain, None, input_shape=(2,)), x, x)
    model.release_parameters("another")
    with pytest.raises(StructureOnlyError, match="held by another"):
        measured_layer_costs(model, x, x)
