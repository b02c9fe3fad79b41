"""Kernels of layers and losses: on a GPU, or on its stand-in, they compute what the host does.

The host's results in float64 are the standard. The widths are those at which a kernel has another
number of threads, or a last round in which not all of them take part.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from cupy_stand_in.counts import Counts, counting

from mpishard import nn
from mpishard.base.arrays import read_numbers, to_host
from mpishard.base.bfloat16 import rounded
from mpishard.data import Samples, map_arrays
from mpishard.nn import device_passes
from mpishard.nn.device_passes.products import rounded_to_bfloat16
from mpishard.nn.layers import attention
from mpishard.nn.layers.dropout import MaskStream
from mpishard.nn.layers.layer import GradientTargets
from mpishard.nn.layers.products import product
from mpishard.sharding import ParameterTable

WIDTHS = [1, 7, 1000, 1024, 1025, 50257]
BOUNDS = {"float64": 1e-12, "float32": 1e-5}
dtypes = pytest.mark.parametrize("dtype", BOUNDS)
widths = pytest.mark.parametrize("width", WIDTHS)


class Converter:
    """Converts host arrays of float64 to one namespace and one dtype."""

    def __init__(self, xp: Any, dtype: str) -> None:
        self.whole, self._dtype = xp.asarray, dtype

    def __call__(self, array: Any) -> Any:
        return self.whole(array.astype(self._dtype) if array.dtype.kind == "f" else array)


def values(shape: tuple[int, ...], seed: int) -> Any:
    """Float32 numbers in float64, so that both dtypes have the same inputs."""
    return np.random.default_rng(seed).standard_normal(shape).astype("f4").astype("f8")


def assert_near(found: Any, expected: Any, dtype: str) -> None:
    """The bound is relative to the largest element, or to 1."""
    if expected is None:
        assert found is None
        return
    found = to_host(found)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    size = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=BOUNDS[dtype] * size)


def run(layer: Any, convert: Converter, x: Any, *, adds: bool = False) -> list[Any]:
    """Output, output without training, input gradient, and gradients written or added to."""
    table = ParameterTable(layer.walk_parameters())
    p = table.nested_views(convert(values((table.length,), 1)))
    y, saved = layer.forward(p, convert(x), nn.Context())
    y = y.copy()  # A backward pass may overwrite what was saved.
    predicted, _ = layer.forward(p, convert(x), nn.Context(training=False))
    flat = convert(values((table.length,), 2))
    targets = GradientTargets(
        {entry.name: entry for entry in table.entries},
        lambda entry: flat[entry.start : entry.stop],
        set() if adds else {entry.name for entry in table.entries},
    )
    dx = layer.backward(p, saved, convert(values(y.shape, 3)), targets)
    targets.clear_unwritten()
    return [y, predicted, dx, flat]


def assert_as_on_the_host(layer: Any, gpu: Any, x: Any, dtype: str, *, adds: bool = False) -> None:
    expected = run(layer, Converter(np, "float64"), x, adds=adds)
    found = run(layer, Converter(gpu, dtype), x, adds=adds)
    for actual, wanted in zip(found, expected, strict=True):
        assert_near(actual, wanted, dtype)


ROW_LAYERS = {"layer norm": nn.LayerNorm, "rms norm": nn.RMSNorm, "softmax": lambda _: nn.Softmax()}


@dtypes
@widths
@pytest.mark.parametrize("rows", [3, 1, 0])
@pytest.mark.parametrize("kind", ROW_LAYERS)
def test_layers_over_rows(kind: str, rows: int, width: int, dtype: str, gpu: Any) -> None:
    # A normalised row of two equal numbers is noise times 1 / epsilon: these are not close.
    x = 3 * values((rows, width), 4) + 1
    assert_as_on_the_host(ROW_LAYERS[kind](width), gpu, x, dtype, adds=rows == 1)


@dtypes
@pytest.mark.parametrize("kind", ["layer norm", "rms norm"])
def test_norms_of_more_rows_than_blocks(kind: str, dtype: str, gpu: Any) -> None:
    assert_as_on_the_host(ROW_LAYERS[kind](37), gpu, values((2, 600, 37), 4), dtype)


ELEMENTWISE = {
    "gelu": nn.GELU(), "silu": nn.SiLU(), "tanh": nn.Tanh(), "sigmoid": nn.Sigmoid(),
    "relu": nn.ReLU(), "swiglu": nn.SwiGLU(),
}  # fmt: skip


@dtypes
@pytest.mark.parametrize("shape", [(3, 1000), (1, 2), (257, 2), (0, 4)])
@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_activations(kind: str, shape: tuple[int, int], dtype: str, gpu: Any) -> None:
    assert_as_on_the_host(ELEMENTWISE[kind], gpu, 4 * values(shape, 4), dtype)


@pytest.mark.parametrize("kind", ["gelu", "silu", "sigmoid", "tanh", "swiglu"])
def test_large_inputs_do_not_overflow(kind: str, gpu: Any) -> None:
    x = np.array([[-1e12, -800.0, -90.0, 90.0, 1e12, 0.0]])
    y, saved = ELEMENTWISE[kind].forward({}, gpu.asarray(x, dtype="f4"), nn.Context())
    dx, _ = ELEMENTWISE[kind].backward_input({}, saved, gpu.ones(y.shape, "f4"))
    assert np.isfinite(to_host(y)).all()
    assert np.isfinite(to_host(dx)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", [*ROW_LAYERS, "gelu", "relu"])
def test_a_nan_affects_only_its_row(kind: str, bad: float, gpu: Any) -> None:
    x = values((3, 40), 4)
    x[1, 7] = bad
    layer = ROW_LAYERS[kind](40) if kind in ROW_LAYERS else ELEMENTWISE[kind]
    y = run(layer, Converter(gpu, "float32"), x)[0]
    assert not np.isfinite(to_host(y)[1]).all()
    assert np.isfinite(to_host(y)[[0, 2]]).all()


@dtypes
@pytest.mark.parametrize("queries", [0, 3])
@widths
def test_masked_softmax(width: int, queries: int, dtype: str, gpu: Any) -> None:
    """Row n of a block of 3 queries sees all keys before the block, and its own up to itself."""
    queries, rows = min(queries, width), 6
    first = width - queries
    convert, scores, d = Converter(gpu, dtype), values((rows, width), 1), values((rows, width), 2)
    seen = first + np.arange(rows) % queries + 1 if queries else np.full(rows, width)
    masked = np.where(np.arange(width) < seen[:, None], 0.3 * scores, -np.inf)
    shift = masked.max(axis=1, keepdims=True)
    logs = shift + np.log(np.exp(masked - shift).sum(axis=1, keepdims=True))
    weights = np.exp(masked - logs)
    gradient = 0.3 * weights * (d - (weights * d).sum(axis=1, keepdims=True))
    out = convert(scores)
    found_logs = device_passes.softmax(out, out, 0.3, first, queries)
    assert_near(out, weights, dtype)
    assert_near(found_logs, logs, dtype)
    again, dscores = convert(scores), convert(d)
    device_passes.softmax_backward(again, dscores, found_logs, 0.3, first, queries)
    assert_near(again, weights, dtype)
    assert_near(dscores, gradient, dtype)


ATTENTION = {
    "causal": (nn.CausalAttention(2), 12),
    "whole": (nn.Attention(2), 12),
    "shared keys": (nn.CausalAttention(4, kv_heads=2), 16),
}


@dtypes
@pytest.mark.parametrize("memory", ["whole", "blocks of 64 queries", "blocks of one matrix"])
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention(kind: str, memory: str, dtype: str, gpu: Any, monkeypatch: Any) -> None:
    """Causal attention of 128 queries and more takes them in two halves, if there is memory."""
    layer, width = ATTENTION[kind]
    scores = {"whole": 1e9, "blocks of 64 queries": 1, "blocks of one matrix": 75 * 150}
    nbytes = scores[memory] * np.dtype(dtype).itemsize / attention._SHARE_OF_DEVICE
    monkeypatch.setattr(attention, "device_bytes", lambda _: nbytes)
    assert_as_on_the_host(layer, gpu, values((2, 150, width), 4), dtype)


@pytest.mark.parametrize(
    ("queries", "causal", "limit", "expected"),
    [
        (127, True, 10**9, [(0, 6, 0, 127)]),
        (128, False, 10**9, [(0, 6, 0, 128)]),
        (129, True, 10**9, [(0, 6, 65, 129), (0, 6, 0, 65)]),
        (128, True, 3 * 2 * 64 * 128, [(m, m + 3, t, t + 64) for m in (0, 3) for t in (64, 0)]),
        (100, False, 1, [(m, m + 1, t, min(t + 64, 100)) for m in range(6) for t in (64, 0)]),
    ],
)  # fmt: skip
def test_blocks_of_scores(queries: int, causal: bool, limit: int, expected: Any) -> None:
    """The last queries of a matrix come first, and causal queries in two halves."""
    blocks = device_passes.blocks_of(6, 2, queries, queries, limit=limit, causal=causal)
    found = [(m.start, m.stop, t.start, t.stop) for m, t in blocks]
    assert found == expected


@pytest.mark.parametrize("length", [1, 7, 1025])
def test_attention_to_many_keys(length: int, gpu: Any) -> None:
    assert_as_on_the_host(nn.CausalAttention(1), gpu, values((1, length, 6), 4), "float32")


LOSSES = {
    "plain": {}, "smooth": {"label_smoothing": 0.1}, "z loss": {"z_loss": 0.01},
    "both": {"label_smoothing": 0.1, "z_loss": 0.01},
}  # fmt: skip


@dtypes
@widths
@pytest.mark.parametrize("rows", [5, 1, 0])
@pytest.mark.parametrize("kind", LOSSES)
def test_cross_entropy(kind: str, rows: int, width: int, dtype: str, gpu: Any) -> None:
    loss, logits = nn.CrossEntropy(**LOSSES[kind]), 5 * values((rows, width), 1)
    target = np.random.default_rng(2).integers(-1, width, rows).astype(np.int32)
    total, weight, saved = loss.forward(logits, target)
    convert = Converter(gpu, dtype)
    found = loss.forward(convert(logits), convert(target))
    assert read_numbers(found[:2]) == pytest.approx([total, weight], rel=BOUNDS[dtype])
    assert_near(loss.backward(found[2]), loss.backward(saved), dtype)
    alone = loss.forward(convert(logits), convert(target), training=False)
    assert read_numbers(alone[:2]) == read_numbers(found[:2])
    assert alone[2] is None


@dtypes
def test_cross_entropy_of_weighted_targets(dtype: str, gpu: Any) -> None:
    loss, logits = nn.CrossEntropy(class_weight=[1, 0, 2, 0.5], z_loss=0.1), values((2, 3, 4), 1)
    target = Samples((np.array([[0, 1, 2], [3, -1, 2]]), np.array([0.5, 2.0])))
    total, weight, saved = loss.forward(logits, target)
    convert = Converter(gpu, dtype)
    found = loss.forward(convert(logits), map_arrays(gpu.asarray, target))
    assert read_numbers(found[:2]) == pytest.approx([total, weight], rel=BOUNDS[dtype])
    assert_near(loss.backward(found[2]), loss.backward(saved), dtype)


def test_a_row_of_weight_0_has_no_effect_whatever_its_logits(gpu: Any) -> None:
    logits = values((3, 4), 1)
    logits[1, 0] = np.inf
    weights = np.array([1.0, 0.0, 2.0])
    target = Samples((gpu.asarray([0, 1, 2]), gpu.asarray(weights)))
    total, weight, saved = nn.CrossEntropy().forward(gpu.asarray(logits), target)
    assert np.isfinite(read_numbers([total]))
    assert read_numbers([weight]) == [3.0]
    np.testing.assert_array_equal(to_host(saved)[1], 0)


@pytest.mark.parametrize("target", [4, -2, 2**40])
def test_a_target_that_is_no_class_is_refused_or_gives_nan(target: int, gpu: Any) -> None:
    targets, loss = gpu.asarray([0, target, -1]), nn.CrossEntropy()
    with pytest.raises(ValueError, match=rf"target {target} is neither in \[0, 4\) nor"):
        loss.check_target((3, 4), targets)
    total, weight, saved = loss.forward(gpu.zeros((3, 4)), targets)
    assert np.isnan(read_numbers([total, weight])).tolist() == [True, False]
    assert np.isfinite(to_host(loss.backward(saved))).all()


@pytest.mark.parametrize("token", [7, -1, 2**40])
def test_a_token_outside_of_the_table_is_refused_or_gives_nan(token: int, gpu: Any) -> None:
    layer, tokens = nn.Embedding(7, 3), gpu.asarray([[2, token, 2]])
    with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary"):
        layer.check_input(tokens)
    y, saved = layer.forward({"weight": gpu.ones((7, 3))}, tokens, nn.Context())
    np.testing.assert_array_equal(np.isnan(to_host(y))[0, :, 0], [False, True, False])
    g = {"weight": gpu.zeros((7, 3))}
    layer.backward_weight((saved, gpu.ones((1, 3, 3))), g)
    np.testing.assert_array_equal(to_host(g["weight"])[:, 0], [0, 0, 2, 0, 0, 0, 0])


def test_tokens_on_another_gpu_are_checked_and_taken(gpu: Any) -> None:
    if gpu.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    model = nn.GPT(vocabulary_size=7, context_length=3, width=4, heads=1, layers=1, device="cuda:0")
    with gpu.cuda.Device(1):
        tokens = gpu.asarray([[1, 2, 3]])
        wrong = gpu.asarray([[1, 7, 3]])
        gpu.cuda.get_current_stream().synchronize()
    gpu.cuda.Device(0).use()
    loss, _ = model.compute_loss_and_gradients(tokens, tokens)
    assert loss == model.compute_loss_and_gradients(to_host(tokens), to_host(tokens))[0]
    with pytest.raises(ValueError, match="token 7 is outside"):
        model.predict(wrong)
    with pytest.raises(ValueError, match="target 7 is neither"):
        model.compute_loss_and_gradients(tokens, wrong)


@dtypes
@pytest.mark.parametrize(("tokens", "width"), [(1000, 300), (1, 1), (700, 256), (0, 5)])
def test_embedding(tokens: int, width: int, dtype: str, gpu: Any) -> None:
    x = np.random.default_rng(1).integers(0, 9, (1, tokens)).astype(np.uint16)
    x[:, ::3] = 4  # A token with many places, in each part of 256.
    assert_as_on_the_host(nn.Embedding(9, width), gpu, x, dtype, adds=tokens == 700)


def test_rows_of_a_token_are_added_in_their_order(gpu: Any) -> None:
    """So the bits are the same in every run, and in tests without a GPU."""
    tokens = np.random.default_rng(1).integers(0, 3, 800)
    d = np.random.default_rng(2).standard_normal((800, 5)).astype("f4")
    expected = np.zeros((3, 5), "f4")
    for token, row in zip(tokens, d, strict=True):
        expected[token] += row
    g = {"weight": gpu.zeros((3, 5), "f4")}
    nn.Embedding(3, 5).backward_weight((gpu.asarray(tokens), gpu.asarray(d)), g)
    np.testing.assert_array_equal(to_host(g["weight"]), expected)


@dtypes
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1000, 33), (31, 64), (0, 5), (4097, 3)])
def test_column_sums(rows: int, columns: int, dtype: str, gpu: Any) -> None:
    convert, table, old = Converter(gpu, dtype), values((rows, columns), 1), values((columns,), 2)
    first, second = convert(old)[: columns // 3], convert(old)[columns // 3 :]
    device_passes.column_sums(convert(table), (first, False), (second, True))
    sums = table.sum(axis=0)
    assert_near(first, sums[: columns // 3], dtype)
    assert_near(second, (sums + old)[columns // 3 :], dtype)


@dtypes
@pytest.mark.parametrize("shape", [(3, 5), (2, 16, 9), (1, 2500), (4, 1), (0, 3)])
@pytest.mark.parametrize("part", [None, (3, 12)])
def test_dropout_has_the_masks_of_the_host(shape: Any, part: Any, dtype: str, gpu: Any) -> None:
    layer, own = nn.Dropout(0.3), int(np.prod(shape[1:]))
    elements, part = (own, None) if part is None else (own + 20, (part[0], part[0] + own))
    found = []
    for convert in (Converter(np, dtype), Converter(gpu, dtype)):
        context = nn.Context(seed=5, step=3, path="drop", sample_start=11)
        stream = MaskStream(context, elements, layer.rate, part)
        y, saved = layer.mask_by(convert(values(shape, 1)), stream)
        dx, _ = layer.backward_input({}, saved, convert(values(shape, 2)))
        found.append([to_host(array) for array in (y, dx)])
    for host, device in zip(*found, strict=True):
        np.testing.assert_array_equal(device, host)
        assert host.size < 30 or 0.5 < np.count_nonzero(host) / host.size < 0.9


def test_dropout_of_samples_whose_counter_exceeds_64_bits(gpu: Any) -> None:
    layer, found = nn.Dropout(0.5), []
    for xp in (np, gpu):
        stream = MaskStream(nn.Context(sample_start=2**64 - 2), 8, layer.rate)
        found.append(to_host(layer.mask_by(xp.ones((4, 8)), stream)[0]))
    np.testing.assert_array_equal(*found)


@dtypes
def test_positions_fewer_than_the_context(dtype: str, gpu: Any) -> None:
    assert_as_on_the_host(nn.PositionalEmbedding(9, 4), gpu, values((3, 5, 4), 4), dtype)


def test_a_gpt_of_12_layers_takes_700_operations_and_one_read(gpu: Any) -> None:
    """A read for the loss at the end, and one for the checks of data that lie on the GPU."""
    model = nn.GPT(
        vocabulary_size=17, context_length=128, width=8, heads=2, layers=12, device="cuda"
    )
    generator = np.random.default_rng(0)
    x, y = (generator.integers(0, 17, (3, 128)) for _ in range(2))
    model.get_parameters()  # makes them
    is_stand_in = hasattr(gpu, "__stand_in__")
    model.compute_loss_and_gradients(x, y)  # the first pass finds out whether the GPU computes
    for reads, place in ((1, np.asarray), (2, gpu.asarray)):
        data = place(x), place(y)
        with counting() if is_stand_in else nullcontext(Counts()) as counts:
            model.compute_loss_and_gradients(*data)
        assert counts.operations <= 700
        if is_stand_in:
            assert (counts.reads, counts.waits) == (reads, 0)


UNITS = {"tf32": 2.0**-11, "bfloat16": 2.0**-9}
PRODUCTS = {
    "matrices": lambda a, b: (a, b),
    "both transposed": lambda a, b: (a.swapaxes(-1, -2).copy().swapaxes(-1, -2),
                                     b.swapaxes(-1, -2).copy().swapaxes(-1, -2)),
    "parts of rows": lambda a, b: (a[..., 1:], b[..., 1:, 2:]),
}  # fmt: skip


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("layout", PRODUCTS)
@pytest.mark.parametrize("precision", UNITS)
def test_products_of_rounded_operands(precision: str, layout: str, batch: Any, gpu: Any) -> None:
    host = values((*batch, 33, 70), 1), values((*batch, 70, 41), 2)
    a, b = PRODUCTS[layout](*host)
    exact, bound = a @ b, np.abs(a) @ np.abs(b)
    convert = Converter(gpu, "float32")
    far = PRODUCTS[layout](*map(convert, host))
    whole = gpu.zeros((*exact.shape[:-1], exact.shape[-1] + 1), "f4")
    places = [None, gpu.empty(exact.shape, "f4"), whole[..., 1:]]
    with device_passes.products_in(precision):
        found = [to_host(product(*far, out)) for out in places]
    for result in found:
        error = np.abs(result - exact)
        assert (error <= 2.2 * UNITS[precision] * bound).all()
        # cuBLAS may round for TF32, and need not; the stand-in does.
        is_rounded = precision == "bfloat16" or hasattr(gpu, "__stand_in__")
        assert not is_rounded or error.max() > 0.02 * UNITS[precision] * bound.max()
    np.testing.assert_array_equal(to_host(whole)[..., 1:], found[0])
    np.testing.assert_array_equal(to_host(whole)[..., 0], 0)
    # Outside of the block, and of float64, nothing is rounded.
    assert_near(product(*far), exact, "float32")
    with device_passes.products_in(precision):
        assert_near(product(*PRODUCTS[layout](*map(gpu.asarray, host))), exact, "float64")


@pytest.mark.parametrize("shapes", [((0, 3), (3, 2)), ((2, 0), (0, 2)), ((4, 3), (5, 3, 2))])
def test_products_of_empty_and_of_broadcast_operands(shapes: Any, gpu: Any) -> None:
    a, b = values(shapes[0], 1), values(shapes[1], 2)
    convert = Converter(gpu, "float32")
    with device_passes.products_in("bfloat16"):
        found = to_host(product(convert(a), convert(b)))
    np.testing.assert_allclose(found, a @ b, rtol=0, atol=0.05)


def test_a_gpu_rounds_to_bfloat16_as_the_host_does(gpu: Any) -> None:
    words = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint64).astype(np.uint32)
    # Infinities, the largest number, NaN, and ties between neighbours.
    words[:5] = [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F800001, 0xFFC00000]
    words[5:8] = [0x3F808000, 0x3F818000, 0xBF818000]
    x = words.view(np.float32)
    expected = rounded(x).view(np.uint16)
    np.testing.assert_array_equal(to_host(rounded_to_bfloat16(gpu.asarray(x))), expected)
