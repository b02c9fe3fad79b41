"""Sequences that share blocks of keys and values are continued as each is alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpishard import nn
from mpishard.models import FSDPModel, HybridShardedModel, PagedModel
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]


def gpt() -> nn.GPT:
    model = nn.GPT(
        vocabulary_size=12,
        context_length=12,
        width=24,
        heads=4,
        kv_heads=2,
        layers=2,
        dtype="float64",
        seed=5,
    )
    vector = model.get_parameters()
    model.set_parameters(vector + 0.3 * np.random.default_rng(4).standard_normal(vector.shape))
    return model


def meshes(backend: Any) -> list[Any]:
    """The plain model, and sharded ones: by heads, by layers, by parameters."""
    size = backend.world_size
    configuration = ShardingConfiguration(backend)
    made = [gpt(), HybridShardedModel(gpt(), configuration, 1, size)]
    made.append(HybridShardedModel(gpt(), configuration, size if size < 4 else 2, 1))
    return [*made, FSDPModel(gpt(), configuration)]


def begin(paged: PagedModel, prompt: list[int], texts: Any, logits: Any) -> None:
    sequence, logits[sequence] = paged.prefill(prompt)
    texts[sequence] = list(prompt)


@in_worlds(1, 2, 3, 4)
def test_greedy_decoding_is_that_of_full_attention(backend: Any) -> None:
    plain = gpt()
    for model in meshes(backend):
        paged = PagedModel(model, 9, 3)
        texts: dict[int, list[int]] = {}
        logits: dict[int, Any] = {}
        begin(paged, PROMPTS[0], texts, logits)
        begin(paged, PROMPTS[1], texts, logits)
        for turn in range(6):
            if turn == 2:  # its blocks lie between those of the other and of the next
                ended = next(iter(texts))
                paged.free(ended)
                del texts[ended], logits[ended]
            if turn == 3:
                begin(paged, PROMPTS[2], texts, logits)
            for sequence, text in texts.items():
                expected = plain.predict(np.array([text]))[0, -1]
                np.testing.assert_allclose(logits[sequence], expected, rtol=0, atol=1e-12)
                assert logits[sequence].argmax() == expected.argmax()
                text.append(int(expected.argmax()))
            logits.update(paged.step({sequence: text[-1] for sequence, text in texts.items()}))
        assert [len(text) for text in texts.values()] == [11, 4]


@in_worlds(1, 3)
def test_many_prompts_are_continued_as_each_alone(backend: Any) -> None:
    model = HybridShardedModel(gpt(), ShardingConfiguration(backend), 1, backend.world_size)
    paged = PagedModel(model, 9, 3)
    options = {"temperature": 0.8, "seed": 3, "top_k": 5}
    for _ in range(2):
        found = paged.generate(PROMPTS, 6, **options)
        for prompt, text in zip(PROMPTS, found, strict=True):
            np.testing.assert_array_equal(text, gpt().generate(prompt, 6, **options))
        assert paged.cache.free_blocks == 9
    np.testing.assert_array_equal(paged.generate([[1, 2]], 0), [[1, 2]])


@in_worlds(2)
def test_tensor_ranks_keep_their_own_heads(backend: Any) -> None:
    model = HybridShardedModel(gpt(), ShardingConfiguration(backend), 1, 2)
    paged = PagedModel(model, 4, 3)
    paged.prefill([1, 2])
    assert paged.cache.byte_count == 2 * 2 * 12 * 6 * 8  # k and v of 2 layers, one head of two


@in_worlds(1, 2)
def test_too_few_blocks_are_refused_before_anything_changes(backend: Any) -> None:
    paged = PagedModel(HybridShardedModel(gpt(), ShardingConfiguration(backend), 1, 1), 4, 3)
    refused = "3 sequences of up to 8 positions need 7 blocks of 3, and 4 of 4 are free"
    with pytest.raises(ValueError, match=refused):
        paged.generate(PROMPTS, 4)
    one, _ = paged.prefill(PROMPTS[1])
    two, logits = paged.prefill(PROMPTS[0])
    refused = "4 more positions for each of 1 sequences need 2 blocks of 3 positions, but 1 of"
    with pytest.raises(ValueError, match=refused):
        paged.prefill([1, 2, 3, 4])
    third, _ = paged.prefill([7])
    with pytest.raises(ValueError, match="need 1 blocks of 3 positions, but 0 of 4"):
        paged.step({one: 1, two: 2})
    assert [paged.cache.length(s) for s in (one, two, third)] == [5, 3, 1]
    paged.free(third)
    token = int(logits.argmax())
    after = paged.step({two: token})[two]
    expected = gpt().predict(np.array([[*PROMPTS[0], token]]))[0, -1]
    np.testing.assert_allclose(after, expected, rtol=0, atol=1e-12)
    for too_long in (lambda: paged.prefill([1] * 13), lambda: paged.generate([[1] * 8], 6)):
        with pytest.raises(ValueError, match="13 positions is longer than the model's context"):
            too_long()
    with pytest.raises(ValueError, match="token 12 is outside the vocabulary"):
        paged.step({one: 12})


@in_worlds(2)
def test_other_models_and_calls_that_differ_between_ranks_are_refused(backend: Any) -> None:
    with pytest.raises(TypeError, match="takes a GPT or a sharded GPT, got MLP"):
        PagedModel(nn.MLP([2, 3, 1]), 1)
    paged = PagedModel(HybridShardedModel(gpt(), ShardingConfiguration(backend), 1, 2), 4)
    with pytest.raises(ValueError, match="prefill: the arguments differ between ranks"):
        paged.prefill([backend.rank])
