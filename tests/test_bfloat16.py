"""One rounding to bfloat16, and products of bfloat16 with and without oneDNN."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

from mpishard.base import bfloat16, onednn
from mpishard.base.bfloat16 import BFLOAT16, UNIT_ROUNDOFF, round_into, rounded, widened
from mpishard.nn.layers.products import add_column_sums, product


@pytest.fixture(params=["oneDNN", "NumPy"])
def products(request, monkeypatch):
    """Both ways of a product; the first needs the extra bf16 and a processor with the unit."""
    monkeypatch.setenv("MPISHARD_ONEDNN", "off" if request.param == "NumPy" else "auto")
    onednn.library.cache_clear()
    if request.param == "oneDNN" and onednn.library() is None:
        pytest.skip(onednn.reason_for_none())
    yield request.param
    onednn.library.cache_clear()


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return rounded(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("numba", ["auto", "off"])
@pytest.mark.parametrize("stride", [1, 3])
def test_rounds_to_the_nearest_and_ties_to_even(
    monkeypatch, set_numba, numba: str, stride: int
) -> None:
    set_numba(numba)
    monkeypatch.setattr(bfloat16, "_loop", bfloat16._loop.__wrapped__)
    upper = np.arange(2**16, dtype=np.uint32) << 16
    values = np.concatenate([upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    given = np.repeat(values, stride).view(np.float32)[::stride]
    out = np.empty(given.shape, BFLOAT16)
    round_into(out, given)
    with np.errstate(all="ignore"):
        nearest = given.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(out.view(np.uint16), nearest.view(np.uint16))
    down = widened(rounded(np.array([1 + UNIT_ROUNDOFF, 1 + 3 * UNIT_ROUNDOFF], np.float32)))
    assert down.tolist() == [1.0, 1 + 4 * UNIT_ROUNDOFF]


def test_rounds_float64_and_arrays_larger_than_a_chunk() -> None:
    values = np.random.default_rng(1).standard_normal((7, 70_001))
    np.testing.assert_array_equal(rounded(values), values.astype(BFLOAT16))
    assert bfloat16.is_bfloat16(rounded(values))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 1, 1), (33, 64, 17), (4, 0, 3), (0, 4, 3)])
def test_products_are_sums_in_float32(products: str, shape: tuple, wide: bool) -> None:
    n, k, m = shape
    a, w, bias = random(n, k), random(m, k, seed=1), random(m, seed=2)
    exact = widened(a) @ widened(w).T + widened(bias)
    out = np.empty((n, m), np.float32 if wide else BFLOAT16)
    y = product(a, w.T, out, bias=bias)
    assert y is out
    size = np.abs(widened(a)) @ np.abs(widened(w)).T + np.abs(widened(bias))
    bound = size * k * 2.0**-23 + (0 if wide else np.abs(exact) * UNIT_ROUNDOFF * 1.01)
    assert (np.abs(widened(y) - exact) <= bound).all()


def test_products_take_views_and_batches(products: str) -> None:
    x = random(2, 6, 4, 8)  # (B, T, H, K)
    q = x.transpose(0, 2, 1, 3)
    scores = product(q, q.swapaxes(-1, -2), np.empty((2, 4, 6, 6), np.float32))
    np.testing.assert_allclose(scores, widened(q) @ widened(q).swapaxes(-1, -2), rtol=1e-6)
    rows = random(9, 40)[:, 5:21]
    np.testing.assert_array_equal(
        product(rows.T, rows, np.empty((16, 16), np.float32)).diagonal() > 0, np.ones(16, bool)
    )


def test_column_sums_are_float32(products: str) -> None:
    total = np.ones(3, np.float32)
    add_column_sums(total, rounded(np.full((4096, 3), 1.0, np.float32)))
    assert total.tolist() == [4097.0] * 3  # which bfloat16 sums would never reach


def test_threads_multiply_at_the_same_time(products: str) -> None:
    a, b = random(40, 300), random(300, 50, seed=1)
    expected, wrong = product(a, b), []

    def multiply() -> None:
        wrong.extend(n for n in range(30) if not np.array_equal(product(a, b), expected))

    threads = [threading.Thread(target=multiply) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_path_that_is_no_library_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(onednn, "processor_has_unit", lambda: True)
    monkeypatch.setenv("MPISHARD_ONEDNN", str(tmp_path / "nothing.so"))
    onednn.library.cache_clear()
    with pytest.raises(ValueError, match=r"MPISHARD_ONEDNN: .*nothing\.so is no oneDNN library"):
        onednn.library()
    monkeypatch.setenv("MPISHARD_ONEDNN", "off")
    assert onednn.library() is None
    assert onednn.reason_for_none() == "MPISHARD_ONEDNN=off"
    onednn.library.cache_clear()
