"""Compiled passes: float32 and bfloat16 activations are near what NumPy computes in float64."""

from __future__ import annotations

import importlib.util
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpishard import nn
from mpishard.nn import passes

# Not imported here: that takes each process that collects this file half a second.
if importlib.util.find_spec("numba") is None:
    pytest.skip("without numba NumPy computes", allow_module_level=True)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
both = pytest.mark.parametrize("dtype", ["float32", BFLOAT16], ids=str)
LAYERS = {
    "gelu": (nn.GELU(), (5, 37)),
    "norm": (nn.LayerNorm(37), (5, 37)),
    "attention": (nn.Attention(4, kv_heads=2), (3, 9, 24)),
    "causal": (nn.CausalAttention(2), (2, 150, 12)),
}


def values(shape: tuple[int, ...], seed: int, dtype: Any) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def run(layer: Any, x: Any, dy: Any, dtype: Any) -> tuple[Any, Any, dict[str, Any]]:
    p = {n: values(spec.shape, 5, BFLOAT16).astype(dtype) for n, spec in layer.parameters.items()}
    y, saved = layer.forward(p, x.astype(dtype), nn.Context())
    wide = "float32" if dtype == BFLOAT16 else dtype
    g = {name: np.zeros(value.shape, wide) for name, value in p.items()}
    return y, layer.backward(p, saved, dy.astype(dtype), g), g


@both
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_are_near_float64(kind: str, dtype: Any) -> None:
    layer, shape = LAYERS[kind]
    x = values(shape, 1, BFLOAT16)
    dy = values((shape[0], *layer.output_shape(shape[1:])), 2, BFLOAT16)
    y, dx, g = run(layer, x, dy, dtype)
    exact_y, exact_dx, exact = run(layer, x, dy, "float64")
    bound = 2.0**-6 if dtype == BFLOAT16 else 2e-6
    np.testing.assert_allclose(y.astype("f8"), exact_y, rtol=bound, atol=bound)
    np.testing.assert_allclose(dx.astype("f8"), exact_dx, rtol=bound, atol=2 * bound)
    for name, found in g.items():
        np.testing.assert_allclose(found, exact[name], rtol=bound, atol=4 * bound)


@both
def test_loops_round_to_bfloat16_as_round_into_does(dtype: Any) -> None:
    word = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint64).astype(np.uint32)
    with np.errstate(invalid="ignore"):
        factors = word.view(np.float32).astype(dtype)
    loop = passes.compiled(passes.scale, factors)
    assert loop is not None
    found = np.full(factors.shape, 3.0, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        loop(passes.bits(found), passes.bits(factors))
        expected = (np.float32(3) * factors.astype("f4")).astype(dtype)
    np.testing.assert_array_equal(found.astype("f4"), expected.astype("f4"))


@both
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_infinities_and_nan_are_kept(kind: str, bad: float, dtype: Any) -> None:
    layer, shape = LAYERS[kind]
    x = values(shape, 1, dtype)
    x[0, 0] = bad
    p = {name: np.ones(spec.shape, dtype) for name, spec in layer.parameters.items()}
    with np.errstate(invalid="ignore", over="ignore"):
        y, _ = layer.forward(p, x, nn.Context())
        assert not np.isfinite(y[0, 0].astype("f4")).all()
        assert np.isfinite(y[1].astype("f4")).all()


@both
def test_scores_of_any_size_are_exponentiated(dtype: Any) -> None:
    x = 60 * values((2, 70, 12), 3, dtype)
    layer = nn.CausalAttention(2)
    y, saved = layer.forward({}, x, nn.Context())
    exact, _ = layer.forward({}, x.astype("f8"), nn.Context())
    np.testing.assert_allclose(y.astype("f8"), exact, rtol=0.02, atol=0.5)
    dx, _ = layer.backward_input({}, saved, y.copy())
    assert np.isfinite(dx.astype("f4")).all()


@both
@pytest.mark.parametrize("shape", [(4, 9), (9,), (), (0, 9)])
def test_sums_have_the_bits_of_numpy(dtype: Any, shape: tuple[int, ...], monkeypatch: Any) -> None:
    a, b = values((3, 4, 9), 1, dtype)[:, : 4 if shape != (0, 9) else 0], values(shape, 2, dtype)
    a, b = np.ascontiguousarray(a), b if b.ndim else values(a.shape, 2, dtype)
    a.reshape(-1)[:1] = np.nan
    found, before = passes.added(a, b), a.copy()
    monkeypatch.setattr(passes, "compiled", lambda loop, like: None)
    expected = passes.added(a, b)
    np.testing.assert_array_equal(passes.bits(found), passes.bits(expected))
    np.testing.assert_array_equal(passes.bits(a), passes.bits(before))
    monkeypatch.undo()
    assert passes.added(a, b, out=a) is a
    np.testing.assert_array_equal(passes.bits(a), passes.bits(expected))


def test_float64_and_arrays_with_gaps_are_left_to_numpy() -> None:
    assert passes.compiled(passes.gelu, np.ones(3)) is None
    assert passes.compiled(passes.gelu, np.ones((4, 4), "f4")[:, 0]) is None


@both
def test_without_numba_numpy_computes(dtype: Any, monkeypatch: Any) -> None:
    x, dy = values((2, 9, 24), 1, BFLOAT16), values((2, 9, 8), 2, BFLOAT16)
    compiled = run(nn.CausalAttention(2), x, dy, dtype)
    for name in ("attention", "activations", "normalization"):
        monkeypatch.setattr(f"mpishard.nn.layers.{name}.compiled", lambda loop, like: None)
    by_numpy = run(nn.CausalAttention(2), x, dy, dtype)
    bound = 2.0**-6 if dtype == BFLOAT16 else 1e-5
    for one, other in zip(compiled[:2], by_numpy[:2], strict=True):
        np.testing.assert_allclose(one.astype("f4"), other.astype("f4"), rtol=bound, atol=bound)
