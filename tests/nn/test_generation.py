"""Reading a sequence bit by bit gives what reading it at once gives."""

import numpy as np
import pytest

from mpishard.nn import (
    GPT,
    Attention,
    CausalAttention,
    Context,
    KeyValueCache,
    PositionalEmbedding,
    generate,
)

SIZES = {"vocabulary_size": 11, "context_length": 8, "width": 12, "heads": 3, "layers": 2}


def perturbed_gpt(**options):
    model = GPT(**SIZES, dtype="float64", **options)
    vector = model.get_parameters()
    model.set_parameters(vector + 0.2 * np.random.default_rng(4).standard_normal(vector.shape))
    return model


def views_of(model):
    return model.parameter_table.nested_views(model.get_parameters())


@pytest.mark.parametrize("cuts", [[8], [1] * 8, [3, 1, 2, 2], [5, 1, 1, 1]])
@pytest.mark.parametrize("options", [{}, {"tied_embeddings": True}, {"dropout": 0.4}])
def test_pieces_of_a_sequence_give_the_logits_of_the_whole(cuts, options):
    model = perturbed_gpt(**options)
    tokens = np.random.default_rng(1).integers(0, 11, (3, 8))
    cache = KeyValueCache(8)
    logits = []
    for count in cuts:
        context = Context(training=False, cache=cache)
        piece = tokens[:, cache.length : cache.length + count]
        logits.append(model.chain.forward(views_of(model), piece, context)[0])
        cache.advance(count)
    expected = model.predict(tokens)
    np.testing.assert_allclose(np.concatenate(logits, axis=1), expected, rtol=0, atol=1e-12)
    assert cache.byte_count == 2 * 2 * tokens.shape[0] * 8 * 12 * 8  # k and v of 2 layers


@pytest.mark.parametrize(("heads", "length", "cut"), [(4, 300, 220), (2, 131, 130), (3, 140, 70)])
def test_several_blocks_of_queries_see_what_is_cached(heads, length, cut):
    x = np.random.default_rng(0).standard_normal((2, length, 3 * 6 * heads))
    layer, cache = CausalAttention(heads), KeyValueCache(length)
    context = Context(training=False, cache=cache)
    first, saved = layer.forward({}, x[:, :cut], context)
    assert saved is None
    cache.advance(cut)
    rest, _ = layer.forward({}, x[:, cut:], context)
    whole, _ = layer.forward({}, x, Context(training=False))
    np.testing.assert_allclose(np.concatenate([first, rest], 1), whole, rtol=1e-12, atol=1e-13)


def windows_of_generation(model, sequence, prompt, slide):
    """The tokens that the model should have seen for each new one: the definition of ``slide``."""
    start = max(0, prompt - 8)
    for end in range(prompt, len(sequence)):
        if end - start > 8:
            start += slide
        yield end, sequence[start:end]


@pytest.mark.parametrize("slide", [1, 3, 8])
@pytest.mark.parametrize("prompt", [1, 5, 8, 11])
def test_each_token_is_the_likeliest_after_its_window(prompt, slide):
    model = perturbed_gpt()
    given = np.random.default_rng(2).integers(0, 11, prompt)
    sequence = model.generate(given, 20, temperature=0, slide=slide)
    np.testing.assert_array_equal(sequence[:prompt], given)
    for end, window in windows_of_generation(model, sequence, prompt, slide):
        assert sequence[end] == model.predict(window[None])[0, -1].argmax(), (end, len(window))


def test_each_token_is_computed_alone_until_the_window_slides():
    model = perturbed_gpt()
    lengths = []

    def forward_logits(tokens, cache):
        lengths.append((cache.length, tokens.shape[1]))
        context = Context(training=False, cache=cache)
        return model.chain.forward(views_of(model), tokens, context)[0][0, -1]

    sizes = {"vocabulary_size": 11, "context_length": 8}
    sequence = generate(forward_logits, [1, 2, 3], 9, seed=3, slide=3, **sizes)
    assert lengths == [
        (0, 3), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (0, 6), (6, 1), (7, 1),
    ]  # fmt: skip
    np.testing.assert_array_equal(sequence, model.generate([1, 2, 3], 9, seed=3, slide=3))


def test_a_failed_pass_leaves_the_cache_as_it_was():
    layer, cache = CausalAttention(1), KeyValueCache(3)
    context = Context(training=False, cache=cache)
    layer.forward({}, np.ones((1, 2, 6)), context)
    assert cache.length == 0
    cache.advance(2)
    with pytest.raises(ValueError, match=r"2 positions are kept and 2 more do not fit .* for 3"):
        layer.forward({}, np.ones((1, 2, 6)), context)
    with pytest.raises(ValueError, match=r"\(1, 1, 2\), got \(2, 1, 2\): a cache is for one"):
        layer.forward({}, np.ones((2, 1, 6)), context)
    with pytest.raises(ValueError, match="advance by 2: 2 of 3"):
        cache.advance(2)
    assert cache.length == 2
    cache.clear()
    assert cache.length == 0
    layer.forward({}, np.ones((1, 3, 6)), context)


def test_what_cannot_be_read_bit_by_bit_is_refused():
    x, cache = np.ones((1, 2, 6)), KeyValueCache(3)
    with pytest.raises(ValueError, match="core: attention that is not causal"):
        Attention(1).forward({}, x, Context(training=False, path="core", cache=cache))
    with pytest.raises(ValueError, match=r"core: a cache is for prediction"):
        CausalAttention(1).forward({}, x, Context(path="core", cache=cache))
    cache.advance(2)
    position, p = PositionalEmbedding(3, 6), {"weight": np.ones((3, 6))}
    with pytest.raises(ValueError, match=r"2 positions are cached and 2 more are given; .* has 3"):
        position.forward(p, x, Context(training=False, cache=cache))


@pytest.mark.parametrize("capacity", [0, 2.5])
def test_a_capacity_is_an_integer(capacity):
    with pytest.raises(ValueError, match=f"got capacity={capacity}"):
        KeyValueCache(capacity)


@pytest.mark.parametrize("slide", [0, 9])
def test_a_slide_is_refused(slide):
    with pytest.raises(ValueError, match=rf"slide must be in \[1, 8\], the context, got {slide}"):
        GPT(**SIZES).generate([1], 3, slide=slide)
