"""Groups: the documented chunks, nothing lost, and what validation finds."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpishard as ms
from mpishard.sharding import ParameterAnalyzer, ParameterGroup

lengths = st.integers(0, 400)
minima = st.integers(1, 60)
worlds = st.integers(1, 9)


def shapes(groups):
    return [(g.start_index, g.size, g.is_merged) for g in groups]


@given(lengths, minima)
def test_chunks_of_a_vector(length, minimum):
    analyzer = ParameterAnalyzer(minimum)
    groups = analyzer.analyze_parameters(np.zeros(length))
    assert [g.name for g in groups] == [f"ParameterGroup_{k}" for k in range(len(groups))]
    if not length:
        assert groups == []
        return
    analyzer.validate_grouping(groups, length)
    *chunks, last = groups
    assert all(g.size == minimum and not g.is_merged for g in chunks)
    left = length - minimum * len(chunks)
    assert last.size == left
    assert last.is_merged == (minimum < left < 1.5 * minimum)
    assert left <= minimum or last.is_merged


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (5, [(0, 5, False)]),
        (10, [(0, 10, False)]),
        (11, [(0, 11, True)]),
        (14, [(0, 14, True)]),
        (15, [(0, 10, False), (10, 5, False)]),
        (20, [(0, 10, False), (10, 10, False)]),
        (24, [(0, 10, False), (10, 14, True)]),
    ],
)
def test_chunks_by_example(length, expected):
    assert shapes(ParameterAnalyzer(10).analyze_parameters(np.zeros(length))) == expected


@given(lengths, minima, worlds)
def test_chunks_for_ranks(length, minimum, world_size):
    analyzer = ParameterAnalyzer(minimum, world_size)
    groups = analyzer.analyze_for_distribution(np.zeros(length))
    assert [g.name for g in groups] == [f"DistributedGroup_{k}" for k in range(len(groups))]
    if not length:
        assert groups == []
        return
    analyzer.validate_grouping(groups, length)
    base = max(minimum, length // (world_size * 4)) // world_size * world_size or world_size
    *chunks, last = groups
    assert all(g.size == base and not g.is_merged for g in chunks)
    assert last.is_merged == (last.size > base)
    tail = length - base * (length // base)
    if length >= base and 0 < tail < base // 2:
        assert last.size == base + tail
    else:
        assert last.size == (tail or base)


@pytest.mark.parametrize(
    ("length", "minimum", "world_size", "expected"),
    [
        (100, 10, 1, [(0, 25, False), (25, 25, False), (50, 25, False), (75, 25, False)]),
        (100, 10, 3, [(9 * k, 9, False) for k in range(10)] + [(90, 10, True)]),
        (28, 8, 2, [(0, 8, False), (8, 8, False), (16, 8, False), (24, 4, False)]),
        (27, 8, 2, [(0, 8, False), (8, 8, False), (16, 11, True)]),
        (6, 1, 4, [(0, 4, False), (4, 2, False)]),  # rounded down to 0: a chunk has W elements
    ],
)
def test_chunks_for_ranks_by_example(length, minimum, world_size, expected):
    analyzer = ParameterAnalyzer(minimum, world_size)
    assert shapes(analyzer.analyze_for_distribution(np.zeros(length))) == expected


@given(st.lists(st.integers(1, 99), min_size=1, max_size=20), worlds)
def test_statistics(sizes, world_size):
    groups = [ParameterGroup(0, n, "", n % 3 == 0) for n in sizes]
    stats = ParameterAnalyzer(1, world_size).calculate_distribution_stats(groups)
    assert stats == {
        "TotalGroups": len(sizes),
        "TotalParameters": sum(sizes),
        "AverageGroupSize": pytest.approx(statistics.fmean(sizes)),
        "MinGroupSize": min(sizes),
        "MaxGroupSize": max(sizes),
        "MergedGroups": sum(n % 3 == 0 for n in sizes),
        "GroupsPerProcess": len(sizes) / world_size,
        "GroupSizeVariance": pytest.approx(statistics.pvariance(sizes)),
        "GroupSizeStdDev": pytest.approx(statistics.pstdev(sizes)),
    }


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms())
def test_a_whole_grouping_is_valid_in_any_order(sizes, random):
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    groups = [ParameterGroup(s, n, f"g{s}") for s, n in zip(starts, sizes, strict=True)]
    random.shuffle(groups)
    assert ParameterAnalyzer().validate_grouping(groups, sum(sizes)) is True
    for wrong in (sum(sizes) - 1, sum(sizes) + 1):
        with pytest.raises(RuntimeError, match=f"ends at {sum(sizes)}, and there are {wrong}"):
            ParameterAnalyzer().validate_grouping(groups, wrong)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (None, "no groups for 9"),
        ([], "no groups for 9"),
        ([(1, 8)], "begins at 1 and not at 0"),
        ([(0, 4), (5, 4)], "a gap between 'g0', which ends at 4, and 'g5', which begins at 5"),
        ([(3, 6), (0, 5)], "an overlap between 'g0', which ends at 5, and 'g3'"),
        ([(0, 9), (0, 9)], "an overlap"),
        ([(0, 8)], "ends at 8, and there are 9"),
        ([(0, 5), (5, 6)], "ends at 11, and there are 9"),
        ([(0, -1), (0, 9)], "'g0' has size -1"),
    ],
)
def test_wrong_groupings_are_refused(ranges, message):
    groups = ranges and [ParameterGroup(start, size, f"g{start}") for start, size in ranges]
    with pytest.raises(RuntimeError, match=message):
        ParameterAnalyzer().validate_grouping(groups, 9)


def test_defaults_and_refusals():
    analyzer = ParameterAnalyzer()
    assert (analyzer.minimum_group_size, analyzer.world_size) == (1024, 1)
    assert ParameterGroup() == ParameterGroup(0, 0, "", False)
    assert analyzer.calculate_distribution_stats([]) == {}
    for arguments in ((0,), (-1,), (1, 0), (1, -2)):
        with pytest.raises(ValueError, match="must be 1 or more"):
            ParameterAnalyzer(*arguments)
    for ask in (
        analyzer.analyze_model,
        analyzer.analyze_parameters,
        analyzer.analyze_for_distribution,
        analyzer.calculate_distribution_stats,
    ):
        with pytest.raises(TypeError, match="None"):
            ask(None)


@pytest.mark.parametrize("minimum", [1, 20, 30, 10_000])
def test_the_groups_of_a_layered_model_are_its_units(minimum):
    with ms.InMemoryCommunicationBackend(0, 1, "test_analyzer") as backend:
        config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=minimum)
        plain = ms.nn.MLP([4, 5, 6, 3])  # layers of 25, 0, 36, 0, 21 parameters
        groups = ParameterAnalyzer(minimum).analyze_model(plain)
        sharded = ms.as_distributed(plain, config)
        assert [(g.start_index, g.start_index + g.size) for g in groups] == [
            (u.start, u.stop) for u in sharded.units
        ]
    ParameterAnalyzer().validate_grouping(groups, 82)
    # With 30, what follows the first unit of 61 is too little to stand alone.
    expected = {1: [25, 36, 21], 20: [25, 36, 21], 30: [82], 10_000: [82]}
    assert [g.size for g in groups] == expected[minimum]
    assert [g.is_merged for g in groups] == [len(groups) == 1] * len(groups)


def test_other_models_are_cut_like_their_vector():
    class Box:
        def get_parameters(self):
            return np.zeros(34)

    for model in (Box(), ms.FunctionModel(lambda t, x, y: (0.0, t), np.zeros(34))):
        assert shapes(ParameterAnalyzer(10).analyze_model(model)) == [
            (0, 10, False), (10, 10, False), (20, 14, True),
        ]  # fmt: skip


def test_a_model_without_parameters_has_no_groups():
    model = ms.nn.Model(ms.nn.Sequential(ms.nn.ReLU()), ms.nn.MSE(), input_shape=(3,))
    assert ParameterAnalyzer().analyze_model(model) == []
