"""Dropout: its formula, and masks that depend on the sample and not on the batch."""

from __future__ import annotations

import hashlib
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad

from mpishard.nn import GPT, MSE, Context, Dropout, Linear, Model, Residual, Sequential, Tanh
from mpishard.testing.gradients import check_gradients, check_layer_gradients

SHAPE = (9, 5, 7)
CONTEXT = Context(seed=3, step=4, path="block.dropout")


def mask(context: Context, rate: float = 0.3, shape: tuple[int, ...] = SHAPE) -> Any:
    return Dropout(rate).forward({}, np.ones(shape), context)[0] != 0


def test_it_is_the_formula() -> None:
    layer, x = Dropout(0.3), np.random.default_rng(0).standard_normal(SHAPE)
    kept = mask(CONTEXT)
    y, saved = layer.forward({}, x, CONTEXT)
    np.testing.assert_allclose(y, np.where(kept, x / 0.7, 0.0), rtol=1e-15)
    assert saved.nbytes == x.size
    r = np.random.default_rng(1).standard_normal(SHAPE)
    dx, _ = layer.backward_input({}, saved, r.copy())
    expected = grad(lambda x: anp.sum(r * x * kept / 0.7))(x)
    np.testing.assert_allclose(dx, expected, rtol=1e-15)
    np.testing.assert_array_equal(saved.reshape(SHAPE), kept)


def test_gradients_are_central_differences() -> None:
    x = np.random.default_rng(0).standard_normal((4, 6))
    check_layer_gradients(Dropout(0.4), x)
    check_layer_gradients(Sequential(Linear(6, 5), Dropout(0.4), Residual(Dropout(0.2))), x)


def test_sample_k_has_its_own_range_of_the_counter() -> None:
    key = hashlib.blake2b(b"dropout/3/4/block.dropout", digest_size=16).digest()
    generator = np.random.Philox(key=int.from_bytes(key, "little"))
    counts = -(-35 // 8)  # a count of the counter makes 8 words of 32 bits
    words = generator.random_raw(9 * counts * 4).view("<u4").reshape(9, -1)[:, :35]
    np.testing.assert_array_equal(mask(CONTEXT), (words >= 0.3 * 2**32).reshape(SHAPE))


@pytest.mark.parametrize("start", [0, 10**12])
def test_a_cut_batch_has_the_masks_of_the_whole(start: int) -> None:
    def at(sample: int) -> Context:
        return Context(seed=3, sample_start=start + sample)

    for cut in range(10):
        parts = [mask(at(0), shape=(cut, 5, 7)), mask(at(cut), shape=(9 - cut, 5, 7))]
        np.testing.assert_array_equal(np.concatenate(parts), mask(at(0)))


def test_several_chunks_are_one_stream() -> None:
    shape = (300, 1001)
    whole = mask(CONTEXT, shape=shape)
    for k in (0, 137, 299):
        context = Context(seed=3, step=4, sample_start=k, path="block.dropout")
        np.testing.assert_array_equal(mask(context, shape=(1, 1001)), whole[k : k + 1])


def test_masks_differ_by_sample_step_seed_and_layer() -> None:
    first = mask(Context(seed=1, step=1, path="a"))
    contexts = [
        Context(seed=2, step=1, path="a"),
        Context(seed=1, step=2, path="a"),
        Context(seed=1, step=1, path="b"),
        Context(seed=1, step=1, sample_start=1, path="a"),
    ]
    for context in contexts:
        assert 0.3 < (mask(context) != first).mean() < 0.55  # 2 * 0.3 * 0.7 of independent ones
    assert len({sample.tobytes() for sample in first}) == len(first)


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_rate_and_mean(rate: float) -> None:
    y, _ = Dropout(rate).forward({}, np.ones((100, 2000)), CONTEXT)
    spread = np.sqrt(rate * (1 - rate) / y.size)
    assert abs((y == 0).mean() - rate) < 4 * spread
    np.testing.assert_allclose(y[y != 0], 1 / (1 - rate))
    columns = (y == 0).mean(axis=0)  # of 100 samples
    assert abs(columns.std() - np.sqrt(rate * (1 - rate) / 100)) < 0.005


def test_it_is_the_identity_without_training_and_at_rate_0() -> None:
    x = np.ones(SHAPE)
    y, saved = Dropout(0.5).forward({}, x, Context(training=False))
    assert y is x
    assert saved is None
    y, saved = Dropout(0).forward({}, x, Context())
    assert y is x
    assert Dropout(0).backward_input({}, saved, x)[0] is x
    assert [Dropout(rate).is_random for rate in (0, 0.1)] == [False, True]
    check_layer_gradients(Dropout(0.0), x)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_rates_out_of_range_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=rf"rate in \[0, 1\), got {rate}"):
        Dropout(rate)


@pytest.mark.parametrize("shape", [(0, 3), (4,), (4, 1)])
def test_small_shapes_and_float32(shape: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32)
    y, saved = Dropout(0.5).forward({}, x, CONTEXT)
    dx, _ = Dropout(0.5).backward_input({}, saved, x.copy())
    assert y.shape == dx.shape == shape
    assert y.dtype == dx.dtype == np.float32
    np.testing.assert_array_equal(y, dx)


def chain() -> Sequential:
    return Sequential(
        Dropout(0.2), Linear(3, 8), Tanh(), Dropout(0.5), Residual(Linear(8, 8), Dropout(0.3)),
        Linear(8, 2),
    )  # fmt: skip


def test_a_model_cut_over_ranks_is_the_whole() -> None:
    model = Model(chain(), MSE(), input_shape=(3,), seed=5)
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((7, 3)), generator.standard_normal((7, 2))
    loss, gradient = model.compute_loss_and_gradients(x, y, step=2)
    for cut in (1, 4):
        parts = [
            model.compute_loss_and_gradients(x[part], y[part], step=2, sample_start=part.start)
            for part in (slice(0, cut), slice(cut, 7))
        ]
        weights = (cut / 7, 1 - cut / 7)
        mean = sum(w * part[0] for w, part in zip(weights, parts, strict=True))
        total = sum(w * part[1] for w, part in zip(weights, parts, strict=True))
        np.testing.assert_allclose(mean, loss, rtol=1e-13)
        np.testing.assert_allclose(total, gradient, rtol=1e-12, atol=1e-15)
    assert model.compute_loss_and_gradients(x, y, step=3)[0] != loss
    other = Model(chain(), MSE(), input_shape=(3,), seed=6)
    other.set_parameters(model.get_parameters())
    assert other.compute_loss_and_gradients(x, y, step=2)[0] != loss
    check_gradients(model, x, y)


def test_layers_of_one_model_have_masks_of_their_own() -> None:
    seen = []

    class Traced(Dropout):
        def forward(self, p: Any, x: Any, context: Context) -> tuple[Any, Any]:
            seen.append(context)
            return super().forward(p, x, context)

    layers = Sequential(
        {"a": Traced(0.5), "block": Residual({"tanh": Tanh(), "a": Traced(0.5)}), "b": Traced(0)}
    )
    layers.forward({}, np.ones((2, 3)), Context(seed=1, step=2, sample_start=3))
    assert [context.path for context in seen[:2]] == ["a", "block.a"]
    assert all((c.seed, c.step, c.sample_start) == (1, 2, 3) for c in seen)


SIZES = {"vocabulary_size": 11, "context_length": 6, "width": 12, "heads": 3, "layers": 2}


def test_gpt_drops_after_embeddings_and_in_each_branch() -> None:
    model, plain = GPT(**SIZES, dropout=0.1, dtype="float64"), GPT(**SIZES, dtype="float64")
    names = [name for name, _ in _walk(model.chain) if name.endswith("dropout")]
    blocks = [f"block{i}_{part}.dropout" for i in range(2) for part in ("attention", "mlp")]
    assert names == ["dropout", *blocks]
    assert not plain.chain.is_random
    np.testing.assert_array_equal(model.get_parameters(), plain.get_parameters())
    tokens = np.arange(12).reshape(2, 6) % 11
    np.testing.assert_array_equal(model.predict(tokens), plain.predict(tokens))
    loss, _ = model.compute_loss_and_gradients(tokens, tokens)
    assert loss != plain.compute_loss_and_gradients(tokens, tokens)[0]
    check_gradients(model, tokens, tokens, samples=8)
    with pytest.raises(ValueError, match="rate in"):
        GPT(**SIZES, dropout=1.0)


def _walk(layer: Any, prefix: str = "") -> Any:
    for name, child in layer.children.items():
        yield prefix + name, child
        yield from _walk(child, f"{prefix}{name}.")
