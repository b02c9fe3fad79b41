"""The parameter table: ranges of parameters, views, and ties."""

from dataclasses import dataclass

import numpy as np
import pytest

from mpishard.sharding import (
    ParameterEntry,
    ParameterTable,
    build_units,
    overlapping,
    unit_at,
)


@dataclass
class Spec:
    shape: tuple[int, ...]
    tied_to: str | None = None
    trainable: bool = True


def table() -> ParameterTable:
    return ParameterTable(
        [
            ("embedding.weight", Spec((3, 2))),
            ("block.inner.scale", Spec(())),
            ("block.inner.bias", Spec((0,))),
            ("head.weight", Spec((3, 2), tied_to="embedding.weight")),
            ("head.bias", Spec((3,))),
        ]
    )


def test_order_and_length():
    entries = [(e.name, e.start, e.stop) for e in table().entries]
    assert entries == [
        ("embedding.weight", 0, 6),
        ("block.inner.scale", 6, 7),
        ("block.inner.bias", 7, 7),
        ("head.bias", 7, 10),
    ]
    assert table().length == 10


def test_views_share_memory_and_follow_ties():
    vector = np.arange(10.0)
    views = table().nested_views(vector)
    views["head"]["weight"][0, 0] = -1
    assert vector[0] == views["embedding"]["weight"][0, 0] == -1
    assert views["block"]["inner"]["scale"].shape == ()
    assert views["head"]["bias"].tolist() == [7, 8, 9]


def test_entries_of_a_layer_resolve_ties():
    entries = table().layer_entries("head")
    assert entries["weight"].name == "embedding.weight"
    assert entries["bias"].start == 7


def test_a_layer_does_not_search_the_names_of_all_others():
    searched = []

    class Name(str):
        __slots__ = ()

        def startswith(self, *arguments):
            searched.append(self)
            return super().startswith(*arguments)

    deep = ParameterTable((Name(f"linear{k}.weight"), Spec((1,))) for k in range(100))
    for k in range(100):
        assert deep.layer_entries(f"linear{k}")["weight"].start == k
    assert len(searched) <= 100


def test_parameters_in_a_range_are_found():
    assert [e.name for e in table().overlapping(5, 8)] == [
        "embedding.weight",
        "block.inner.scale",
        "head.bias",
    ]


def test_parameters_in_every_range_are_found():
    sizes = [0, 3, 0, 0, 2, 1, 0, 4, 0]
    entries = ParameterTable((f"p{k}", Spec((size,))) for k, size in enumerate(sizes)).entries
    for start in range(-1, 12):
        for stop in range(-1, 12):
            shared = [e for e in entries if set(range(e.start, e.stop)) & set(range(start, stop))]
            found = ParameterTable((e.name, Spec(e.shape)) for e in entries)
            assert found.overlapping(start, stop) == shared


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([("a", Spec((1,))), ("a", Spec((1,)))], "two parameters named 'a'"),
        ([("a", Spec((1,), "b"))], "tied to 'b', which is not there"),
        ([("b", Spec((2,))), ("a", Spec((1,), "b"))], r"of shape \(1,\) is tied to 'b' of shape"),
    ],
)
def test_mistakes(parameters, message):
    with pytest.raises(ValueError, match=message):
        ParameterTable(parameters)


def test_bisection_finds_the_entries_and_units_of_a_full_search():
    dice = np.random.default_rng(4)
    for _ in range(200):
        sizes = dice.integers(0, 4, dice.integers(1, 9)).tolist()
        if not sum(sizes):
            continue
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        entries = [
            ParameterEntry(f"p{place}", (size,), start)
            for place, (size, start) in enumerate(zip(sizes, starts, strict=True))
        ]
        units = build_units(sizes, int(dice.integers(1, 6)))
        for unit in units:
            inside = [e for e in entries if unit.start <= e.start and e.stop <= unit.stop]
            assert unit.entries_of(entries) == inside
        for index in range(sum(sizes)):
            assert unit_at(units, index).start <= index < unit_at(units, index).stop
        start, stop = sorted(dice.integers(0, sum(sizes) + 1, 2).tolist())
        expected = [e for e in entries if start < stop and e.start < stop and start < e.stop]
        assert [*overlapping(entries, start, stop)] == expected
