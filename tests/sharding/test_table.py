"""The parameter table: where things lie, and what is tied to what."""

from dataclasses import dataclass

import numpy as np
import pytest

from mpishard.sharding import ParameterTable


@dataclass
class Spec:
    shape: tuple[int, ...]
    tied_to: str | None = None
    trainable: bool = True


def table() -> ParameterTable:
    return ParameterTable([
        ("embedding.weight", Spec((3, 2))),
        ("block.inner.scale", Spec(())),
        ("block.inner.bias", Spec((0,))),
        ("head.weight", Spec((3, 2), tied_to="embedding.weight")),
        ("head.bias", Spec((3,))),
    ])  # fmt: skip


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


def test_overlap():
    assert [e.name for e in table().overlapping(5, 8)] == [
        "embedding.weight", "block.inner.scale", "head.bias",
    ]  # fmt: skip


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
