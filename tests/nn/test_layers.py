"""Each layer against central differences and against autograd on a formula of its own."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad

from mpishard.nn import (
    GELU,
    Attention,
    CausalAttention,
    Context,
    Embedding,
    Layer,
    LayerNorm,
    Linear,
    PositionalEmbedding,
    ReLU,
    Residual,
    RMSNorm,
    Sequential,
    Sigmoid,
    SiLU,
    Softmax,
    SwiGLU,
    Tanh,
)
from mpishard.nn.layers.initializers import normal
from mpishard.testing.gradients import check_layer_gradients


@dataclass(frozen=True)
class Case:
    """A layer, the shape of its input, and what it computes, written for autograd.

    ``formula(x, *parameters)`` takes the parameters in table order. ``tokens`` is the size of
    the vocabulary where the input is integer.
    """

    layer: Layer
    shape: tuple[int, ...]
    formula: Callable[..., Any]
    tokens: int = 0

    def input(self, batch: int | None = None) -> np.ndarray[Any, Any]:
        generator = np.random.default_rng(5)
        shape = self.shape if batch is None else (batch, *self.shape[1:])
        if self.tokens:
            return generator.integers(0, self.tokens, shape)
        return generator.standard_normal(shape)


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    variance = anp.var(x, axis=-1, keepdims=True)
    return weight * (x - anp.mean(x, axis=-1, keepdims=True)) / anp.sqrt(variance + 1e-5) + bias


def rms_norm(x: Any, weight: Any) -> Any:
    return weight * x / anp.sqrt(anp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def softmax(x: Any) -> Any:
    return anp.exp(x) / anp.sum(anp.exp(x), axis=-1, keepdims=True)


def gelu(x: Any) -> Any:
    return x / 2 * (1 + anp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attention(x: Any, heads: int, causal: bool = True, kv_heads: int | None = None) -> Any:
    groups = kv_heads or heads
    length, size = x.shape[1], x.shape[2] // (heads + 2 * groups)
    outputs = []
    for h in range(heads):
        group = h // (heads // groups)
        q, k, v = (
            x[..., i * size : (i + 1) * size] for i in (h, heads + group, heads + groups + group)
        )
        scores = anp.einsum("btk,bsk->bts", q, k) / np.sqrt(size)
        if causal:
            weights = anp.exp(scores) * np.tril(np.ones((length, length)))
        else:
            weights = anp.exp(scores - anp.max(scores, axis=-1, keepdims=True))
        weights = weights / anp.sum(weights, axis=-1, keepdims=True)
        outputs.append(anp.einsum("bts,bsk->btk", weights, v))
    return anp.concatenate(outputs, axis=-1)


CASES = {
    "linear": Case(Linear(5, 3), (7, 5), lambda x, w, b: anp.dot(x, w.T) + b),
    "linear no bias": Case(Linear(5, 3, bias=False), (2, 3, 5), lambda x, w: anp.dot(x, w.T)),
    "linear many rows": Case(Linear(2, 301), (3, 2), lambda x, w, b: anp.dot(x, w.T) + b),
    "linear one": Case(Linear(1, 1), (1, 1), lambda x, w, b: anp.dot(x, w.T) + b),
    "embedding": Case(Embedding(7, 3), (4, 5), lambda x, w: w[x], tokens=7),
    "embedding 1-D": Case(Embedding(3, 2), (6,), lambda x, w: w[x], tokens=3),
    "position": Case(PositionalEmbedding(6, 3), (2, 5, 3), lambda x, w: x + w[:5]),
    "layer norm": Case(LayerNorm(7), (2, 3, 7), layer_norm),
    "relu": Case(ReLU(), (3, 5), lambda x: anp.where(x > 0, x, 0.0)),
    "gelu": Case(GELU(), (3, 5, 2), gelu),
    "tanh": Case(Tanh(), (3, 5), anp.tanh),
    "sigmoid": Case(Sigmoid(), (3, 5), lambda x: 1 / (1 + anp.exp(-x))),
    "silu": Case(SiLU(), (3, 5, 2), lambda x: x / (1 + anp.exp(-x))),
    "swiglu": Case(
        SwiGLU(), (3, 2, 10), lambda x: x[..., :5] / (1 + anp.exp(-x[..., :5])) * x[..., 5:]
    ),
    "softmax": Case(Softmax(), (2, 3, 5), softmax),
    "softmax of one": Case(Softmax(), (3, 1), softmax),
    "rms norm": Case(RMSNorm(7), (2, 3, 7), rms_norm),
    "attention": Case(CausalAttention(3), (2, 5, 18), lambda x: attention(x, 3)),
    "attention one head": Case(CausalAttention(1), (3, 4, 15), lambda x: attention(x, 1)),
    "attention one step": Case(CausalAttention(2), (2, 1, 6), lambda x: attention(x, 2)),
    "whole attention": Case(Attention(3), (2, 5, 18), lambda x: attention(x, 3, False)),
    "grouped attention": Case(
        CausalAttention(6, kv_heads=2), (2, 5, 30), lambda x: attention(x, 6, True, 2)
    ),
    "attention with one head of keys": Case(
        Attention(3, kv_heads=1), (2, 4, 10), lambda x: attention(x, 3, False, 1)
    ),
    "sequential": Case(
        Sequential(Linear(4, 5), Tanh(), Linear(5, 2)),
        (3, 4),
        lambda x, w, b, v, c: anp.dot(anp.tanh(anp.dot(x, w.T) + b), v.T) + c,
    ),
    # An in-place addition to the inner output would spoil what tanh saved.
    "residual that saves its output": Case(
        Residual(Linear(4, 4), Tanh()), (3, 4), lambda x, w, b: x + anp.tanh(anp.dot(x, w.T) + b)
    ),
    # Here the inner layer hands back the very gradient array that it was given.
    "residual of a pass-through": Case(
        Residual(PositionalEmbedding(3, 4)), (2, 3, 4), lambda x, w: x + x + w
    ),
    "residual in residual": Case(
        Residual(
            {"norm": LayerNorm(3), "inner": Residual(GELU()), "out": Linear(3, 3, bias=False)}
        ),
        (2, 3),
        lambda x, g, b, w: x + anp.dot(layer_norm(x, g, b) + gelu(layer_norm(x, g, b)), w.T),
    ),
}

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def parameters(layer: Layer, dtype: str = "float64") -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(3)
    return {
        name: generator.standard_normal(spec.shape).astype(dtype)
        for name, spec in layer.walk_parameters()
    }


def nested(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, last = name.split(".")
        inner = result
        for word in path:
            inner = inner.setdefault(word, {})
        inner[last] = array
    return result


@cases
def test_gradients_are_central_differences(case: Case) -> None:
    check_layer_gradients(case.layer, case.input())


@cases
def test_values_and_gradients_are_those_of_autograd(case: Case) -> None:
    x, values = case.input(), parameters(case.layer)
    y, saved = case.layer.forward(nested(values), x, Context())
    np.testing.assert_allclose(y, case.formula(x, *values.values()), rtol=1e-12, atol=1e-12)

    r = np.random.default_rng(1).standard_normal(y.shape)
    gradients = {name: np.zeros_like(value) for name, value in values.items()}
    dx = case.layer.backward(nested(values), saved, r.copy(), nested(gradients))
    arguments = [x, *values.values()]
    for position, computed in enumerate([dx, *gradients.values()]):
        if position == 0 and case.tokens:
            assert computed is None
            continue
        expected = grad(lambda *a: anp.sum(r * case.formula(*a)), position)(*arguments)
        np.testing.assert_allclose(computed, expected, rtol=1e-11, atol=1e-12)


@cases
def test_float32_stays_float32(case: Case) -> None:
    x, values = case.input(), parameters(case.layer, "float32")
    x = x if case.tokens else x.astype("float32")
    y, saved = case.layer.forward(nested(values), x, Context())
    assert y.dtype == np.float32
    gradients = {name: np.zeros_like(value) for name, value in values.items()}
    dx = case.layer.backward(nested(values), saved, np.ones_like(y), nested(gradients))
    assert case.tokens or dx.dtype == np.float32
    exact = case.formula(x, *values.values())
    np.testing.assert_allclose(y, exact, rtol=1e-4, atol=1e-5)


@cases
def test_a_batch_of_no_samples_adds_nothing(case: Case) -> None:
    x, values = case.input(batch=0), parameters(case.layer)
    gradients = {name: np.full_like(value, 2.0) for name, value in values.items()}
    for training in (True, False):
        y, saved = case.layer.forward(nested(values), x, Context(training=training))
        assert y.shape == (0, *case.layer.output_shape(case.shape[1:]))
    _, saved = case.layer.forward(nested(values), x, Context())
    dx = case.layer.backward(nested(values), saved, np.zeros_like(y), nested(gradients))
    assert case.tokens or dx.shape == x.shape
    assert all((gradient == 2.0).all() for gradient in gradients.values())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (GELU(), (3, 50_001)),
        (Tanh(), (3, 50_001)),
        (Sigmoid(), (3, 50_001)),
        (SiLU(), (3, 50_001)),
        (SwiGLU(), (3000, 62)),
        (LayerNorm(33), (5000, 33)),
        (RMSNorm(33), (5000, 33)),
        (Softmax(), (5000, 33)),
        (CausalAttention(4), (3, 100, 24)),
        (CausalAttention(2), (2, 131, 12)),
        (CausalAttention(5), (1, 300, 30)),
        (Attention(5), (2, 300, 30)),
        (CausalAttention(6, kv_heads=3), (3, 170, 24)),
        (Embedding(11, 3), (50, 7)),
    ],
)
def test_several_chunks_give_what_each_sample_gives_alone(
    layer: Layer, shape: tuple[int, ...]
) -> None:
    generator = np.random.default_rng(0)
    if isinstance(layer, Embedding):
        x: Any = generator.integers(0, 11, shape)
    else:
        x = generator.standard_normal(shape)
    values = parameters(layer)
    y, saved = layer.forward(nested(values), x, Context())
    r = generator.standard_normal(y.shape)
    gradients = {name: np.zeros_like(value) for name, value in values.items()}
    dx = layer.backward(nested(values), saved, r.copy(), nested(gradients))

    alone = {name: np.zeros_like(value) for name, value in values.items()}
    ys, dxs = [], []
    for i in range(shape[0]):
        one = slice(i, i + 1)
        y_one, saved = layer.forward(nested(values), x[one], Context())
        ys.append(y_one)
        dxs.append(layer.backward(nested(values), saved, r[one].copy(), nested(alone)))
    np.testing.assert_allclose(np.concatenate(ys), y, rtol=1e-12, atol=1e-13)
    if dx is not None:
        np.testing.assert_allclose(np.concatenate(dxs), dx, rtol=1e-10, atol=1e-11)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(alone[name], gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layer", [Sigmoid(), SiLU(), Softmax()])
def test_exponentials_neither_overflow_nor_vanish(layer: Layer) -> None:
    x = np.array([[-1e4, -40.0, 0.0, 40.0], [1e4, 1e4, -1e4, 0.0]])
    y, saved = layer.forward({}, x, Context())
    dx, _ = layer.backward_input({}, saved, np.ones_like(y))
    assert np.isfinite(y).all()
    assert np.isfinite(dx).all()
    if not isinstance(layer, Softmax):
        factor = -40.0 if isinstance(layer, SiLU) else 1.0
        np.testing.assert_allclose(y[0, 1], factor * np.exp(-40.0), rtol=1e-13)


@pytest.mark.parametrize(("length", "scale"), [(65, 1), (131, 1), (300, 1), (131, 7)])
def test_blocked_attention_is_the_formula(length: int, scale: float) -> None:
    # At scale 7 there are scores beyond half the range of exp.
    x = scale * np.random.default_rng(0).standard_normal((2, length, 24))
    for layer in (CausalAttention(4), Attention(4), CausalAttention(4, kv_heads=2)):
        y, saved = layer.forward({}, x, Context())
        expected = attention(x, 4, layer.causal, layer.kv_heads)
        np.testing.assert_allclose(y, expected, rtol=1e-11, atol=1e-12)
        r = np.random.default_rng(1).standard_normal(y.shape)

        def total(x: Any, r: Any = r, layer: Attention = layer) -> Any:
            return anp.sum(r * attention(x, 4, layer.causal, layer.kv_heads))

        dx, _ = layer.backward_input({}, saved, r)
        np.testing.assert_allclose(dx, grad(total)(x), rtol=1e-9, atol=1e-11)


def test_causal_attention_does_not_depend_on_later_positions() -> None:
    x = np.random.default_rng(0).standard_normal((1, 9, 12))
    changed = x.copy()
    changed[:, 6:] += 5.0
    y, _ = CausalAttention(2).forward({}, x, Context())
    z, _ = CausalAttention(2).forward({}, changed, Context())
    np.testing.assert_array_equal(y[:, :6], z[:, :6])
    assert not np.allclose(y[:, 6:], z[:, 6:])


def test_attention_takes_scores_that_overflow_exp() -> None:
    x = np.random.default_rng(0).standard_normal((1, 4, 6)) * 1e3
    y, saved = CausalAttention(1).forward({}, x, Context())
    dx, _ = CausalAttention(1).backward_input({}, saved, np.ones_like(y))
    assert np.isfinite(y).all()
    assert np.isfinite(dx).all()


@pytest.mark.parametrize("backward", [False, True])
def test_memory_of_attention_grows_with_the_length_and_not_its_square(backward: bool) -> None:
    def peak(length: int) -> int:
        x = np.zeros((1, length, 12))
        y, saved = CausalAttention(1).forward({}, x, Context())
        tracemalloc.start()
        if backward:
            CausalAttention(1).backward_input({}, saved, y)
        else:
            CausalAttention(1).forward({}, x, Context())
        bytes_at_most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return bytes_at_most

    assert peak(2048) < 2.5 * peak(1024)


def test_embedding_adds_up_the_rows_of_each_token() -> None:
    layer, dy = Embedding(4, 3), np.random.default_rng(0).standard_normal((6, 3))
    tokens = np.array([3, 1, 3, 3, 0, 1])
    for _ in range(2):
        g = np.zeros((4, 3))
        layer.backward_weight((tokens, dy), {"weight": g})
        expected = np.stack([dy[4], dy[1] + dy[5], np.zeros(3), dy[0] + dy[2] + dy[3]])
        np.testing.assert_allclose(g, expected, rtol=1e-15)


@pytest.mark.parametrize("token", [-1, 4])
def test_tokens_outside_the_vocabulary_are_named(token: int) -> None:
    with pytest.raises(ValueError, match=rf"token {token} is outside the vocabulary \[0, 4\)"):
        Embedding(4, 2).forward({"weight": np.zeros((4, 2))}, np.array([[1, token]]), Context())


def test_embedding_takes_integers_only() -> None:
    with pytest.raises(TypeError, match="float64"):
        Embedding(4, 2).forward({"weight": np.zeros((4, 2))}, np.zeros((1, 2)), Context())


REAL = [np.float32, np.float64, np.int8, np.uint64, bool]
CHAIN_OF_TOKENS = Sequential(Residual(Embedding(4, 2)), Tanh())


@pytest.mark.parametrize("layer", [Linear(2, 2), Tanh(), Sequential(Residual(Linear(2, 2)))])
def test_layers_take_real_numbers(layer: Layer) -> None:
    assert not layer.takes_integers
    for dtype in REAL:
        layer.check_input(np.zeros((3, 2), dtype))
        layer.check_input(np.zeros((0, 2), dtype))
    for dtype in (complex, object, "U3", "datetime64[s]"):
        with pytest.raises(TypeError, match="takes real numbers, got an array of"):
            layer.check_input(np.zeros((3, 2), dtype))
        with pytest.raises(TypeError, match="takes real numbers, got an array of"):
            layer.check_input(np.zeros((0, 2), dtype))
    with pytest.raises(TypeError, match="array, got list"):
        layer.check_input([[1.0, 2.0]])


@pytest.mark.parametrize("layer", [Embedding(4, 2), CHAIN_OF_TOKENS])
def test_an_embedding_takes_tokens(layer: Layer) -> None:
    assert layer.takes_integers
    for dtype in (np.int64, np.uint8, np.uint64):
        layer.check_input(np.array([[0, 3]], dtype))
        layer.check_input(np.zeros((0, 2), dtype))
    for token in (-1, 4):
        with pytest.raises(ValueError, match=rf"token {token} is outside the vocabulary \[0, 4\)"):
            layer.check_input(np.array([[1, token]]))
    for dtype in (np.float32, bool, complex, object):
        with pytest.raises(TypeError, match="integer tokens, got an array of"):
            layer.check_input(np.zeros((1, 2), dtype))
    with pytest.raises(TypeError, match="array, got list"):
        layer.check_input([[1, 2]])


def test_a_chain_can_leave_out_the_gradient_of_its_input() -> None:
    asked = []

    class Spy(Linear):
        def backward_input(self, p: Any, saved: Any, dy: Any) -> tuple[Any, Any]:
            asked.append(self.inputs)
            return super().backward_input(p, saved, dy)

    chain = Sequential(Sequential(Spy(2, 3), Tanh()), Spy(3, 4))
    values = parameters(chain)
    results = []
    for needed in (True, False):
        asked.clear()
        y, saved = chain.forward(nested(values), np.ones((5, 2)), Context())
        g = {name: np.zeros_like(value) for name, value in values.items()}
        dx = chain.backward(
            nested(values), saved, np.ones_like(y), nested(g), needs_input_gradient=needed
        )
        assert asked == ([3, 2] if needed else [3])
        assert (dx is not None) == needed
        results.append(np.concatenate([gradient.ravel() for gradient in g.values()]))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (Linear(5, 3), (4,), r"last dim is 5, got sample shape \(4,\)"),
        (Linear(5, 3), (), r"\(\)"),
        (LayerNorm(5), (2, 4), r"last dim is 5, got sample shape \(2, 4\)"),
        (RMSNorm(5), (2, 4), r"last dim is 5, got sample shape \(2, 4\)"),
        (Softmax(), (), r"at least 1, got \(\)"),
        (Softmax(), (3, 0), r"at least 1, got \(3, 0\)"),
        (PositionalEmbedding(6, 3), (7, 3), r"T <= 6, 3\), got \(7, 3\)"),
        (PositionalEmbedding(6, 3), (5, 4), r"got \(5, 4\)"),
        (CausalAttention(2), (5, 9), r"\(T, 6 \* K\), got \(5, 9\)"),
        (SwiGLU(), (3, 5), r"even, got sample shape \(3, 5\)"),
        (CausalAttention(2), (12,), r"got \(12,\)"),
        (Attention(4, kv_heads=2), (5, 9), r"heads \+ 2 \* kv_heads\) \* K\) = \(T, 8 \* K\), got"),
        (Residual(Linear(3, 4)), (3,), r"must keep the shape, got \(3,\) -> \(4,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(
    layer: Layer, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        layer.output_shape(shape)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Linear(0, 3),
        lambda: Linear(3, 0),
        lambda: Embedding(0, 1),
        lambda: PositionalEmbedding(1, 0),
        lambda: LayerNorm(0),
        lambda: LayerNorm(3, epsilon=0.0),
        lambda: RMSNorm(0),
        lambda: RMSNorm(3, epsilon=0.0),
        lambda: CausalAttention(0),
        lambda: Linear(3.0, 3),
        lambda: Embedding(3, 2.0),
        lambda: PositionalEmbedding(np.float64(3), 2),
        lambda: LayerNorm("3"),
        lambda: CausalAttention(2.0),
        lambda: CausalAttention(4, kv_heads=0),
        lambda: Attention(4, kv_heads=3),
        Sequential,
        lambda: Sequential({}),
        lambda: Sequential({"a.b": ReLU()}),
        lambda: Sequential({"": ReLU()}),
        lambda: Sequential({"a": ReLU()}, ReLU()),
        Residual,
    ],
)
def test_arguments_out_of_range_are_refused(make: Callable[[], Layer]) -> None:
    with pytest.raises(ValueError, match=r"needs|must|takes"):
        make()


def test_composites_name_their_parameters_in_order() -> None:
    chain = Sequential(
        {
            "first": Linear(3, 3),
            "block": Residual({"norm": LayerNorm(3), "out": Linear(3, 3, bias=False)}),
            "relu": ReLU(),
        }
    )
    names = [name for name, _ in chain.walk_parameters()]
    assert names == [
        "first.weight",
        "first.bias",
        "block.norm.weight",
        "block.norm.bias",
        "block.out.weight",
    ]
    assert list(Sequential(ReLU(), Tanh()).children) == ["0", "1"]


def test_a_chain_frees_saved_values_as_it_uses_them() -> None:
    chain = Sequential(Linear(2, 2), Tanh(), Linear(2, 2))
    values = nested(parameters(chain))
    _, saved = chain.forward(values, np.ones((3, 2)), Context())
    _, pending = chain.backward_input(values, saved, np.ones((3, 2)))
    assert saved == []
    chain.backward_weight(pending, nested({n: v.copy() for n, v in parameters(chain).items()}))
    assert pending == []


def test_a_tied_weight_has_a_description_and_no_table_entry() -> None:
    head = Linear(3, 7, bias=False, initializer=normal(0.1), tied_to="embedding.weight")
    spec = head.parameters["weight"]
    assert spec.tied_to == "embedding.weight"
    assert spec.shape == (7, 3)
