"""A sequence that is read in several passes gives the logits of one pass."""

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
    cache = KeyValueCache(12, 2)
    sequences = [cache.add() for _ in tokens]
    logits, read = [], 0
    for count in cuts:
        context = Context(training=False, cache=cache)
        with cache.reading(sequences, count):
            piece = tokens[:, read : read + count]
            logits.append(model.chain.forward(views_of(model), piece, context)[0])
        read += count
    expected = model.predict(tokens)
    np.testing.assert_allclose(np.concatenate(logits, axis=1), expected, rtol=0, atol=1e-12)
    assert [cache.length(sequence) for sequence in sequences] == [8, 8, 8]
    assert cache.byte_count == 2 * 2 * tokens.shape[0] * 8 * 12 * 8  # k and v of 2 layers


@pytest.mark.parametrize(("heads", "length", "cut"), [(4, 300, 220), (2, 131, 130), (3, 140, 70)])
def test_several_blocks_of_queries_see_what_is_cached(heads, length, cut):
    x = np.random.default_rng(0).standard_normal((2, length, 3 * 6 * heads))
    layer, cache = CausalAttention(heads), KeyValueCache(2 * length // 5 + 2, 5)
    context, sequences = Context(training=False, cache=cache), [cache.add(), cache.add()]
    with cache.reading(sequences, cut):
        first, saved = layer.forward({}, x[:, :cut], context)
    assert saved is None
    with cache.reading(sequences, length - cut):
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
        lengths.append((cache.starts[0], tokens.shape[1]))
        context = Context(training=False, cache=cache)
        return model.chain.forward(views_of(model), tokens, context)[0][0, -1]

    sizes = {"vocabulary_size": 11, "context_length": 8}
    sequence = generate(forward_logits, [1, 2, 3], 9, seed=3, slide=3, **sizes)
    assert lengths == [
        (0, 3), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (0, 6), (6, 1), (7, 1),
    ]  # fmt: skip
    np.testing.assert_array_equal(sequence, model.generate([1, 2, 3], 9, seed=3, slide=3))


def test_a_failed_pass_leaves_the_cache_as_it_was():
    layer, cache = CausalAttention(1), KeyValueCache(3, 2)
    context, sequence = Context(training=False, cache=cache), cache.add()
    with pytest.raises(ValueError, match="got 1 rows of 4"), cache.reading([sequence], 3):
        layer.forward({}, np.ones((1, 4, 6)), context)
    assert (cache.length(sequence), cache.free_blocks, cache.starts) == (0, 3, [])
    with cache.reading([sequence], 3):
        layer.forward({}, np.ones((1, 3, 6)), context)
    assert (cache.length(sequence), cache.free_blocks) == (3, 1)
    cache.free(sequence)
    assert cache.free_blocks == 3


def test_too_few_blocks_are_refused_with_numbers():
    cache = KeyValueCache(5, 2)
    long, short = cache.add(), cache.add()
    with cache.reading([long], 4), pytest.raises(ValueError, match="run a pass inside"):
        list(cache.extend("core", *np.ones((2, 2, 1, 4, 3))))
    with (
        pytest.raises(
            ValueError,
            match=r"^too few free blocks: 3 more positions for each of 2 sequences need "
            r"4 blocks of 2 positions, but 3 of 5 blocks are free\. ",
        ),
        cache.reading([long, short], 3),
    ):
        pass
    assert [cache.length(long), cache.length(short), cache.free_blocks] == [4, 0, 3]
    with pytest.raises(ValueError, match="each sequence once, got"), cache.reading([1, 1], 1):
        pass
    cache.free(long)
    for use in (cache.free, cache.length):
        with pytest.raises(ValueError, match=r"has no sequence 1: it has \[2\]"):
            use(long)


def test_interleaved_sequences_see_only_their_own_keys():
    layer, cache = CausalAttention(4, kv_heads=2), KeyValueCache(8, 3)
    context = Context(training=False, cache=cache)
    texts = np.random.default_rng(0).standard_normal((3, 12, 8 * 6))
    expected, _ = layer.forward({}, texts, Context(training=False))
    sequences, found = {}, [np.empty((0, 24))] * 3

    def read(count, *rows):
        for row in rows:
            sequences.setdefault(row, cache.add() if row not in sequences else None)
        starts = [len(found[row]) for row in rows]
        x = np.stack([texts[row, s : s + count] for row, s in zip(rows, starts, strict=True)])
        with cache.reading([sequences[row] for row in rows], count):
            y, _ = layer.forward({}, x, context)
        for row, own in zip(rows, y, strict=True):
            found[row] = np.concatenate([found[row], own])

    read(5, 0)
    read(2, 1)
    read(3, 0, 1)  # lengths 8 and 5
    cache.free(sequences[0])
    read(7, 2)  # in freed blocks, which do not lie together
    for _ in range(5):
        read(1, 2, 1)
    for row, length in enumerate((8, 10, 12)):
        np.testing.assert_allclose(found[row], expected[row, :length], rtol=0, atol=1e-12)


def test_passes_that_cannot_use_a_cache_are_refused():
    x, cache = np.ones((1, 2, 6)), KeyValueCache(1, 3)
    with pytest.raises(ValueError, match="core: attention that is not causal"):
        Attention(1).forward({}, x, Context(training=False, path="core", cache=cache))
    with pytest.raises(ValueError, match=r"core: a cache is for prediction"):
        CausalAttention(1).forward({}, x, Context(path="core", cache=cache))
    with pytest.raises(ValueError, match="1 rows of 2 positions, and 0 rows of 0 are to be read"):
        CausalAttention(1).forward({}, x, Context(training=False, path="core", cache=cache))
    sequence = cache.add()
    context = Context(training=False, path="core", cache=cache)
    with cache.reading([sequence], 2):
        CausalAttention(1).forward({}, x, context)
        with pytest.raises(ValueError, match=r"= \(1, 2\), got \(2, 1\): a cache is for one model"):
            CausalAttention(2).forward({}, x, context)
    position, p = PositionalEmbedding(3, 6), {"weight": np.ones((3, 6))}
    refused = r"2 positions are cached and 2 more are given; PositionalEmbedding has 3"
    with cache.reading([sequence], 1), pytest.raises(ValueError, match=refused):
        position.forward(p, x, Context(training=False, cache=cache))


@pytest.mark.parametrize("size", [0, 2.5])
def test_sizes_of_blocks_are_integers(size):
    with pytest.raises(ValueError, match=f"got .*block_size={size}"):
        KeyValueCache(4, size)


@pytest.mark.parametrize("slide", [0, 9])
def test_a_slide_is_refused(slide):
    with pytest.raises(ValueError, match=rf"slide must be in \[1, 8\], the context, got {slide}"):
        GPT(**SIZES).generate([1], 3, slide=slide)
