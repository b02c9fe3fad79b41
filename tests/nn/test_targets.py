"""`GradientTargets`: gradients are written, added to or cleared in memory with old values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpishard.nn import Context, GradientTargets, Linear, Residual, Sequential, Tanh
from mpishard.nn.layers.initializers import zeros
from mpishard.nn.layers.layer import ParameterSpec, unwritten
from mpishard.sharding import ParameterTable

TABLE = ParameterTable(
    [
        ("first.weight", ParameterSpec((2, 3), zeros())),
        ("block.out.bias", ParameterSpec((4,), zeros())),
        ("head.weight", ParameterSpec((2, 3), zeros(), "first.weight")),
    ]
)
NAMES = ("first.weight", "block.out.bias", "head.weight")


def targets_in(vector: np.ndarray[Any, Any], left: set[str] | None = None) -> GradientTargets:
    if left is None:
        left = {entry.name for entry in TABLE.entries}
    return GradientTargets(
        {name: TABLE[name] for name in NAMES}, lambda e: vector[e.start : e.stop], left
    )


def test_what_is_added_to_is_cleared_once() -> None:
    vector = np.full(10, np.nan)
    targets = targets_in(vector)
    for _ in range(2):
        bias = targets["block"]["out"]["bias"]
        bias += 1.0
    np.testing.assert_array_equal(vector[6:], 2.0)
    assert np.isnan(vector[:6]).all()


def test_what_is_written_is_not_cleared() -> None:
    vector = np.full(10, np.nan)
    head = targets_in(vector)["head"]
    array = unwritten(head, "weight")
    assert array is not None
    assert array.shape == (2, 3)
    assert np.isnan(vector).all()
    array[...] = 3.0
    assert unwritten(head, "weight") is None
    np.testing.assert_array_equal(head["weight"], 3.0)


def test_tied_weights_are_written_once() -> None:
    vector = np.full(10, np.nan)
    targets = targets_in(vector)
    unwritten(targets["head"], "weight")[...] = 3.0
    assert unwritten(targets["first"], "weight") is None
    targets["first"]["weight"][...] += 1.0
    np.testing.assert_array_equal(vector[:6], 4.0)


def test_what_nobody_wrote_is_cleared_at_the_end() -> None:
    vector = np.full(10, np.nan)
    left = {"first.weight", "block.out.bias"}
    targets = targets_in(vector, left)
    unwritten(targets["first"], "weight")[...] = 3.0
    targets.clear_unwritten()
    np.testing.assert_array_equal(vector, [3.0] * 6 + [0.0] * 4)
    assert not left


def test_they_are_a_mapping_nested_by_layer() -> None:
    targets = targets_in(np.zeros(10))
    assert list(targets) == ["first", "block", "head"]
    assert len(targets) == 3
    assert targets.get("relu", "none") == "none"
    assert list(targets["block"]["out"]) == ["bias"]


def test_what_is_added_by_name_is_added_in_place() -> None:
    vector = np.full(10, np.nan)
    inner = targets_in(vector)["block"]["out"]
    for _ in range(2):
        inner["bias"] += 1.5
    inner["bias"] = inner["bias"] + 1.0  # another array, whose values are copied
    np.testing.assert_array_equal(vector[6:], 4.0)
    assert np.isnan(vector[:6]).all()
    head = targets_in(vector)["head"]
    head["weight"] = np.arange(6.0).reshape(2, 3)  # nothing was there to add to
    np.testing.assert_array_equal(vector[:6], np.arange(6.0))
    with pytest.raises(KeyError):
        head["bias"] = 0.0
    with pytest.raises(TypeError, match="cannot be deleted"):
        del head["weight"]


def test_a_plain_mapping_is_added_to() -> None:
    assert unwritten({"weight": np.zeros(3)}, "weight") is None


@pytest.mark.parametrize("samples", [0, 5])
def test_layers_leave_the_gradient_that_they_add_to_zeros(samples: int) -> None:
    layer = Sequential(Linear(3, 4), Residual(Linear(4, 4), Tanh()), Linear(4, 2, bias=False))
    specs = dict(layer.walk_parameters())
    table = ParameterTable(specs.items())
    generator = np.random.default_rng(0)
    p = table.nested_views(generator.standard_normal(table.length))
    x, dy = generator.standard_normal((samples, 3)), generator.standard_normal((samples, 2))
    expected = np.zeros(table.length)
    found = np.full(table.length, np.nan)
    targets = GradientTargets(
        {name: table[name] for name in specs}, lambda e: found[e.start : e.stop], set(specs)
    )
    for g in (table.nested_views(expected), targets, table.nested_views(expected), targets):
        _, saved = layer.forward(p, x, Context())
        layer.backward(p, saved, dy.copy(), g)
    targets.clear_unwritten()
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)
