"""Tensor-parallel attention against its formula, and in training against one rank's."""

import numpy as np
import pytest

from mpishard.nn import Attention, CausalAttention, Context, Linear, Sequential
from mpishard.sharding import ParameterTable
from mpishard.tensor import TensorParallelAttention, TensorParallelPagedAttention
from mpishard.testing.worlds import in_worlds


def formula(x, qkv, projection, bias, heads, groups, causal):
    """Attention written from the definition, with plain NumPy."""
    batch, time, width = x.shape
    size = width // heads
    q, k, v = np.split(x @ qkv.T, [width, width + groups * size], axis=-1)
    y = np.empty((batch, time, width))
    for b in range(batch):
        for h in range(heads):
            group = h // (heads // groups)
            own, shared = (slice(i * size, (i + 1) * size) for i in (h, group))
            for t in range(time):
                seen = slice(0, t + 1 if causal else time)
                scores = np.exp(k[b, seen, shared] @ q[b, t, own] / np.sqrt(size))
                y[b, t, own] = scores @ v[b, seen, shared] / scores.sum()
    return y @ projection.T + bias


def whole_chain(width, heads, groups, causal):
    core = (CausalAttention if causal else Attention)(heads, kv_heads=groups)
    qkv = Linear(width, width + 2 * groups * (width // heads), bias=False)
    return Sequential({"qkv": qkv, "core": core, "projection": Linear(width, width)})


def own_part(whole, layer, name):
    boxes = layer.boxes(name)
    return np.concatenate([whole[tuple(slice(*range_) for range_ in box)] for box in boxes])


def views(chain, values):
    table = ParameterTable(chain.walk_parameters())
    vector = np.concatenate([values[entry.name].reshape(-1) for entry in table.entries])
    return table, table.nested_views(vector)


@pytest.mark.parametrize(("causal", "shared"), [(False, 1), (True, 1), (False, 2), (True, 3)])
@in_worlds(1, 2, 3, 4)
def test_it_is_the_formula_and_trains_like_one_rank(backend, causal, shared):
    groups = 6 if backend.world_size == 3 else 4
    heads = groups * shared
    generator = np.random.default_rng(1)
    layer = TensorParallelAttention(backend, 2 * heads, heads, causal, num_kv_heads=groups)
    whole = whole_chain(2 * heads, heads, groups, causal)
    values = {name: generator.standard_normal(s.shape) for name, s in whole.walk_parameters()}
    x, dy = generator.standard_normal((2, 2, 5, 2 * heads))
    children = layer.children
    own = {
        name: own_part(value, children[name.split(".")[0]], name.split(".")[1])
        for name, value in values.items()
    }
    results = []
    for chain, parameters in ((whole, values), (layer, own)):
        table, p = views(chain, parameters)
        gradients = np.zeros(table.length)
        y, saved = chain.forward(p, x.copy(), Context())
        dx = chain.backward(p, saved, dy.copy(), table.nested_views(gradients))
        found = {e.name: gradients[e.start : e.stop].reshape(e.shape) for e in table.entries}
        results.append((y, dx, found))
    (y, dx, gradients), (own_y, own_dx, own_gradients) = results
    matrices = [values[n] for n in ("qkv.weight", "projection.weight", "projection.bias")]
    expected = formula(x, *matrices, heads, groups, causal)
    np.testing.assert_allclose(own_y, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(own_y, y, rtol=0, atol=1e-12)
    np.testing.assert_allclose(own_dx, dx, rtol=0, atol=1e-12)
    for name, gradient in gradients.items():
        part = own_part(gradient, children[name.split(".")[0]], name.split(".")[1])
        np.testing.assert_allclose(own_gradients[name], part, rtol=0, atol=1e-12, err_msg=name)
    if backend.world_size > 1:
        assert children["core"].heads == heads // backend.world_size
        rows = (2 * heads + 4 * groups) // backend.world_size
        assert own["qkv.weight"].shape == (rows, 2 * heads)


@in_worlds(2)
def test_sizes_and_inputs_are_refused(backend):
    with pytest.raises(TypeError, match="backend must be a CommunicationBackend, got int"):
        TensorParallelAttention(2, 8, 2)
    with pytest.raises(ValueError, match="num_heads 3 is not a multiple of the 2 ranks"):
        TensorParallelAttention(backend, 9, 3)
    with pytest.raises(ValueError, match=r"divide embed_dim, got 9 = 4 \* 2 \+ 1"):
        TensorParallelAttention(backend, 9, 2)
    with pytest.raises(ValueError, match="embed_dim=0"):
        TensorParallelAttention(backend, 0, 2)
    layer = TensorParallelAttention(backend, 8, 2)
    for shape in ((3, 8), (2, 3, 4), (2, 3, 8, 8)):
        with pytest.raises(ValueError, match=r"an input of shape \(batch, time, 8\), got samples"):
            layer.forward({}, np.ones(shape), Context())


@in_worlds(1, 2, 3, 4)
def test_paged_attention_reads_sequences_of_different_lengths(backend):
    groups, heads = (6, 12) if backend.world_size == 3 else (4, 8)
    generator = np.random.default_rng(1)
    whole = whole_chain(2 * heads, heads, groups, True)
    values = {name: generator.standard_normal(s.shape) for name, s in whole.walk_parameters()}
    paged = TensorParallelPagedAttention(
        backend, 2 * heads, heads, num_kv_heads=groups, block_count=5, block_size=2
    )
    children = paged.layer.children
    own = {n: own_part(v, children[n.split(".")[0]], n.split(".")[1]) for n, v in values.items()}
    _, p = views(paged.layer, own)
    x = generator.standard_normal((2, 5, 2 * heads))
    expected, _ = whole.forward(views(whole, values)[1], x, Context(training=False))
    one, two = paged.cache.add(), paged.cache.add()
    parts = [paged.forward(p, x[:1, :3], [one])]
    parts += [paged.forward(p, x[1:, :1], [two])]
    for at in range(1, 3):
        rows = np.stack([x[0, at + 2 : at + 3], x[1, at : at + 1]])
        parts += np.split(paged.forward(p, rows, [one, two]), 2)
    found = np.concatenate([parts[0], parts[2], parts[4]], 1)
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-12)
    found = np.concatenate([parts[1], parts[3], parts[5]], 1)
    np.testing.assert_allclose(found[0], expected[1, :3], rtol=0, atol=1e-12)
    assert paged.cache.byte_count == 2 * 10 * groups // backend.world_size * 2 * 8
    with pytest.raises(ValueError, match="need 2 blocks of 2 positions, but 0 of 5 blocks"):
        paged.forward(p, x[:, :2], [one, two])
    with pytest.raises(ValueError, match="got 2 rows for 1 sequences"):
        paged.forward(p, x, [one])
    with pytest.raises(ValueError, match=r"\(batch, time, .*\), got samples"):
        paged.forward(p, x[0], [one])
    assert [paged.cache.length(sequence) for sequence in (one, two)] == [5, 3]
