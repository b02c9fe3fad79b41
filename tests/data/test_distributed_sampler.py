"""Samplers for other libraries' data loaders: each replica's samples, also if replicas change."""

from __future__ import annotations

from itertools import chain, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.data import DistributedSampler, ElasticDistributedSampler

SAMPLERS = [DistributedSampler, ElasticDistributedSampler]


def divided(kind, length, replicas, epoch=0, **options):
    samplers = [kind(length, replicas, rank, **options) for rank in range(replicas)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    lengths = [len(sampler) for sampler in samplers]
    parts = [list(sampler) for sampler in samplers]
    assert [len(part) for part in parts] == lengths
    return parts


@pytest.mark.parametrize("kind", SAMPLERS)
@given(
    length=st.integers(1, 40),
    replicas=st.integers(1, 9),
    epoch=st.integers(0, 2),
    shuffle=st.booleans(),
)
def test_every_sample_once_and_equal_shares(kind, length, replicas, epoch, shuffle):
    parts = divided(kind, length, replicas, epoch, shuffle=shuffle, seed=3)
    share = -(-length // replicas)
    assert {len(part) for part in parts} == {share}
    if kind is DistributedSampler:
        order = list(chain(*parts))
    else:
        order = list(chain(*zip(*parts, strict=True)))
    assert sorted(order[:length]) == list(range(length))
    assert order == [order[i % length] for i in range(share * replicas)], "padding wraps around"
    if not shuffle:
        assert order[:length] == list(range(length))


@pytest.mark.parametrize("kind", SAMPLERS)
def test_drop_last_repeats_nothing(kind):
    parts = divided(kind, 11, 4, shuffle=True, drop_last=True)
    taken = list(chain(*parts))
    assert [len(part) for part in parts] == [2] * 4
    assert len(set(taken)) == 8
    with pytest.raises(ValueError, match="3 samples are fewer than 4 replicas"):
        kind(3, 4, 0, drop_last=True)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_orders_follow_seed_and_epoch(kind):
    orders = {tuple(kind(20, 1, 0, seed=s)) for s in range(3)}
    orders |= {tuple(*divided(kind, 20, 1, e)) for e in range(1, 3)}
    assert len(orders) == 5
    assert list(kind(20, 1, 0, seed=1)) == list(kind(range(20), 1, 0, seed=1))


def test_pinned_orders():
    """A resumed run must continue in its first order under every version."""
    assert list(DistributedSampler(6, 2, 1, seed=5)) == [4, 2, 1]
    assert list(ElasticDistributedSampler(6, 2, 1, seed=5)) == [5, 4, 1]


@given(
    length=st.integers(1, 60),
    worlds=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 8)), min_size=1, max_size=4),
)
def test_rescaling_divides_the_rest_and_repeats_nothing(length, worlds):
    seen: list[int] = []
    start = 0
    for replicas, steps in worlds:
        samplers = [ElasticDistributedSampler(length, replicas, 0, start=start)]
        samplers[0].rescale(replicas, 0)
        samplers += [
            ElasticDistributedSampler(length, replicas, rank, start=start)
            for rank in range(1, replicas)
        ]
        rows = zip(*(list(islice(sampler, steps)) for sampler in samplers), strict=True)
        seen += [index for row in rows for index in row]
        assert len({sampler.seen for sampler in samplers}) == 1
        start = samplers[0].seen
    last = [ElasticDistributedSampler(length, 3, rank, start=start) for rank in range(3)]
    seen += [index for row in zip(*last, strict=True) for index in row]
    assert sorted(seen[:length]) == list(range(length))


def test_rescale_ends_iterators_and_a_refused_one_changes_nothing():
    sampler = ElasticDistributedSampler(10, 2, 0, shuffle=False, drop_last=True)
    samples = iter(sampler)
    assert [next(samples), next(samples)] == [0, 2]
    with pytest.raises(ValueError, match=r"rank .* is outside \[0, 3\)"):
        sampler.rescale(3, 3)
    with pytest.raises(ValueError, match="6 samples are fewer than 7 replicas"):
        sampler.rescale(7, 0)
    assert next(samples) == 4
    sampler.rescale(1, 0)
    assert list(samples) == []
    assert (len(sampler), list(sampler), len(sampler)) == (4, [6, 7, 8, 9], 0)
    sampler.set_epoch(1)
    assert (sampler.seen, len(sampler)) == (0, 10)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 1, 0), ValueError, "at least one sample"),
        ((5, 0, 0), ValueError, "num_replicas must be 1 or more, got 0"),
        ((5, 2, 2), ValueError, r"rank 2 is outside \[0, 2\)"),
        ((5, 2, -1), ValueError, "rank -1 is outside"),
        ((2.5, 2, 0), TypeError, "got float"),
    ],
)
def test_refusals(kind, arguments, error, message):
    with pytest.raises(error, match=message):
        kind(*arguments)


def test_further_refusals():
    with pytest.raises(ValueError, match="epoch must be 0 or more"):
        DistributedSampler(5, 1, 0).set_epoch(-1)
    with pytest.raises(ValueError, match="start must be from 0 to 5, got 6"):
        ElasticDistributedSampler(5, 1, 0, start=6)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": True}, "data must be a number of samples or have a length, got bool"),
        ({"rank": 0.5}, r"rank must be an integer, got 0\.5"),
        ({"rank": True}, "rank must be an integer, got True"),
        ({"seed": 1.5}, r"seed must be an integer, got 1\.5"),
        ({"shuffle": "no"}, "shuffle must be True or False, got 'no'"),
        ({"drop_last": 1}, "drop_last must be True or False, got 1"),
    ],
)
def test_settings_of_another_type_are_refused(kind, options, message):
    with pytest.raises(TypeError, match=message):
        kind(**({"data": 10, "num_replicas": 2, "rank": 0} | options))


@pytest.mark.parametrize("start", [1.5, True, "x"])
def test_a_start_that_is_no_integer_is_refused(start):
    with pytest.raises(TypeError, match=f"start must be an integer, got {start!r}"):
        ElasticDistributedSampler(10, 2, 0, start=start)
