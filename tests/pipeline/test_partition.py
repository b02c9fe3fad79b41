"""Flat vectors cut into stages: even, or balanced by the best of all cuts."""

import itertools
import tracemalloc

import numpy as np
import pytest

from mpishard.pipeline import LoadBalancedPartitionStrategy, UniformPartitionStrategy
from mpishard.pipeline.layers import balanced_cuts


def is_tiling(stages, total):
    ends = [start + size for start, size in stages]
    return [start for start, _ in stages] == [0, *ends[:-1]] and ends[-1] == total


def best_by_trying_all(costs, count):
    """The least largest sum of ``count`` runs, none of them empty."""
    cuts = itertools.combinations(range(1, len(costs)), count - 1)
    return min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cut, len(costs)])) for cut in cuts
    )


def test_uniform():
    uniform = UniformPartitionStrategy()
    assert uniform.compute_partition(11, 3) == [(0, 4), (4, 4), (8, 3)]
    assert uniform.compute_partition(2, 4) == [(0, 1), (1, 1), (2, 0), (2, 0)]


def test_balanced_is_the_best_of_all_cuts():
    for seed in range(30):
        generator = np.random.default_rng(seed)
        sizes = generator.integers(1, 40, generator.integers(1, 9)).tolist()
        begins = np.cumsum([0, *sizes[:-1]]).tolist()
        for count, cost in itertools.product(
            range(1, len(sizes) + 1), (lambda n: n, lambda n: n**1.5, lambda n: (n % 5) ** 2)
        ):
            strategy = LoadBalancedPartitionStrategy(begins, cost)
            stages = strategy.compute_partition(sum(sizes), count)
            assert is_tiling(stages, sum(sizes))
            assert all(size for _, size in stages)
            assert {start for start, _ in stages} <= set(begins)
            costs = [cost(size) for size in sizes]
            where = [begins.index(start) for start, _ in stages] + [len(sizes)]
            largest = max(sum(costs[a:b]) for a, b in itertools.pairwise(where))
            assert largest == pytest.approx(best_by_trying_all(costs, count))


def test_costs_are_by_default_the_parameters_to_the_power_of_one_and_a_half():
    begins = list(range(11))  # ten layers of 1 parameter, and one of 4, which costs 8
    assert LoadBalancedPartitionStrategy(begins).compute_partition(14, 2) == [(0, 9), (9, 5)]
    by_number = LoadBalancedPartitionStrategy(begins, lambda n: n)
    assert by_number.compute_partition(14, 2) == [(0, 7), (7, 7)]


def test_the_first_of_equally_good_cuts_is_kept():
    seven = LoadBalancedPartitionStrategy(range(7))
    assert seven.compute_partition(7, 3) == [(0, 2), (2, 2), (4, 3)]
    assert seven.compute_partition(7, 2) == [(0, 3), (3, 4)]


def test_more_stages_than_layers():
    three = LoadBalancedPartitionStrategy([0, 5, 6])
    assert three.compute_partition(9, 3) == [(0, 5), (5, 1), (6, 3)]
    assert three.compute_partition(9, 5) == [(0, 5), (5, 1), (6, 3), (9, 0), (9, 0)]


def test_estimated_layer_size():
    four = LoadBalancedPartitionStrategy(estimated_layer_size=3)
    assert four.compute_partition(13, 4) == [(0, 4), (4, 3), (7, 3), (10, 3)]  # 13 // 3 layers
    assert four.compute_partition(13, 2) == [(0, 7), (7, 6)]
    large = LoadBalancedPartitionStrategy(estimated_layer_size=100)
    assert large.compute_partition(13, 2) == [(0, 13), (13, 0)]


@pytest.mark.parametrize(
    "strategy", [UniformPartitionStrategy(), LoadBalancedPartitionStrategy(estimated_layer_size=1)]
)
def test_counts_below_one(strategy):
    with pytest.raises(ValueError, match="total_parameters must be 1 or more, got 0"):
        strategy.compute_partition(0, 2)
    with pytest.raises(ValueError, match="num_stages must be 1 or more, got 0"):
        strategy.compute_partition(2, 0)


def test_bad_layers():
    make = LoadBalancedPartitionStrategy
    for arguments, message in (
        (([],), r"layer_boundaries must begin with 0, got \[\]"),
        (([1, 2],), r"layer_boundaries must begin with 0, got \[1, 2\]"),
        (([0, 2, 2],), "layer_boundaries must increase, got 2 after 2"),
        ((), "either layer_boundaries or estimated_layer_size, got neither"),
    ):
        with pytest.raises(ValueError, match=message):
            make(*arguments)
    with pytest.raises(ValueError, match="got both"):
        make([0], estimated_layer_size=2)
    with pytest.raises(ValueError, match="estimated_layer_size must be 1 or more, got 0"):
        make(estimated_layer_size=0)
    with pytest.raises(ValueError, match="end with 9, behind the last of 8 parameters"):
        make([0, 9]).compute_partition(8, 2)
    with pytest.raises(ValueError, match=r"the cost of a layer of 3 parameters must be .* -1"):
        make([0, 3], lambda n: -1).compute_partition(8, 2)


def earliest_cuts(costs, count, allowed):
    """The cuts of `balanced_cuts` by trying every last cut; and their largest sum."""
    places = [place for place in allowed if place < len(costs)]
    if count == 1 or not places:
        return float(np.cumsum(costs)[-1]), []
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    found = []
    for last in places[max(0, count - 2) :]:
        largest, cuts = earliest_cuts(costs[:last], count - 1, places)
        found.append((max(largest, float(sums[-1] - sums[last])), [*cuts, last]))
    return min(found, key=lambda pair: pair[0])  # the first of equals


def test_of_equally_good_cuts_the_earliest_last_one_is_taken():
    for seed in range(20):
        generator = np.random.default_rng(seed)
        length = int(generator.integers(2, 8))
        places = sorted(generator.choice(np.arange(1, length), length // 2, replace=False).tolist())
        small, rounded = generator.integers(0, 3, length), 0.1 * generator.integers(0, 2, length)
        tiny = 10.0 ** generator.integers(-18, 18, length)
        for costs, allowed in itertools.product((small, rounded, tiny), (range(1, length), places)):
            for count in range(1, len(allowed) + 2):
                expected = earliest_cuts(costs, count, allowed)[1]
                assert balanced_cuts(costs, count, list(allowed)) == expected, seed


def test_memory_does_not_grow_as_the_square_of_the_layers():
    costs = np.random.default_rng(0).random(3000)
    tracemalloc.start()
    try:
        balanced_cuts(costs, 8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 * costs.nbytes  # and not 3000 times


@pytest.mark.parametrize("estimator", [5, "x"])
def test_an_estimator_that_cannot_be_called_is_refused(estimator):
    with pytest.raises(TypeError, match="cost_estimator must be a function of a number of para"):
        LoadBalancedPartitionStrategy([0, 5], estimator)
