"""Generation through a tensor-parallel chain, each rank with the keys and values of its heads."""

import numpy as np
import pytest

from mpishard.nn import GPT, Context, KeyValueCache, Sequential, generate
from mpishard.sharding import ParameterTable
from mpishard.tensor import partition_chain
from mpishard.testing.worlds import in_worlds

SIZES = {"vocabulary_size": 11, "context_length": 8, "width": 12, "heads": 4, "layers": 2}


def perturbed_gpt():
    model = GPT(**SIZES, dtype="float64", dropout=0.2, tied_embeddings=True)
    vector = model.get_parameters()
    model.set_parameters(vector + 0.3 * np.random.default_rng(4).standard_normal(vector.shape))
    return model


def own_part(model, backend):
    """This rank's part of a model, whose output is whole, and its parameters."""
    partition = partition_chain(model.chain.children, backend)
    chain = Sequential(partition.layers)
    table = ParameterTable(chain.walk_parameters())
    whole, pieces = model.get_parameters(), []
    for entry in table.entries:
        place = model.parameter_table[entry.name]
        value = whole[place.start : place.stop].reshape(place.shape)
        boxes = partition.boxes.get(entry.name, [tuple((0, n) for n in place.shape)])
        pieces += [value[tuple(slice(*r) for r in box)].reshape(-1) for box in boxes]
    return chain, table.nested_views(np.concatenate(pieces))


@pytest.mark.parametrize("slide", [1, 3])
@in_worlds(1, 2, 3, 4)
def test_all_ranks_draw_what_one_process_draws(backend, slide):
    model = perturbed_gpt()
    chain, p = own_part(model, backend)
    bytes_kept = []

    def forward_logits(tokens, cache):
        y, _ = chain.forward(p, tokens, Context(training=False, cache=cache))
        bytes_kept.append(cache.byte_count)
        return y[0, -1]

    sizes = {"vocabulary_size": 11, "context_length": 8}
    own = generate(forward_logits, [3, 1, 4], 12, seed=5, slide=slide, **sizes)
    np.testing.assert_array_equal(own, model.generate([3, 1, 4], 12, seed=5, slide=slide))
    heads = chain.children["block0_attention"].children["core"].heads
    assert set(bytes_kept) == {2 * 2 * 8 * heads * 3 * 8}  # k and v of 2 layers, 8 positions
    assert backend.all_reduce(np.array(heads)) == 4


@in_worlds(2)
def test_logits_of_a_sequence_read_in_pieces_are_those_of_the_whole(backend):
    model = perturbed_gpt()
    chain, p = own_part(model, backend)
    tokens = np.random.default_rng(1).integers(0, 11, (2, 8))
    cache, logits, read = KeyValueCache(6, 3), [], 0
    sequences = [cache.add(), cache.add()]
    for count in (3, 1, 2, 1, 1):
        context = Context(training=False, cache=cache)
        with cache.reading(sequences, count):
            logits.append(chain.forward(p, tokens[:, read : read + count], context)[0])
        read += count
    expected = model.predict(tokens)
    np.testing.assert_allclose(np.concatenate(logits, axis=1), expected, rtol=0, atol=1e-12)


@in_worlds(2)
def test_sequence_parallelism_refuses_a_cache(backend):
    model = perturbed_gpt()
    partition = partition_chain(model.chain.children, backend, sequence_parallel=True)
    _, p = own_part(model, backend)
    context = Context(training=False, cache=KeyValueCache(1))
    with pytest.raises(ValueError, match="generate with a partition without sequence_parallel"):
        Sequential(partition.layers).forward(p, np.ones((1, 4), np.int64), context)
