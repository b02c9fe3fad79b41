"""A GPT-2-like language model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.devices import Device
from mpishard.nn.activations import GELU
from mpishard.nn.attention import CausalAttention
from mpishard.nn.cache import KeyValueCache
from mpishard.nn.composites import Residual, Sequential
from mpishard.nn.cross_entropy import CrossEntropy
from mpishard.nn.dropout import Dropout
from mpishard.nn.embedding import Embedding, PositionalEmbedding
from mpishard.nn.generation import generate
from mpishard.nn.initializers import normal
from mpishard.nn.layer import Context, Layer
from mpishard.nn.linear import Linear
from mpishard.nn.model import Model
from mpishard.nn.normalization import LayerNorm
from mpishard.nn.sizes import is_size

__all__ = ["GPT", "gpt_chain"]

_STD = 0.02


class GPT(Model):
    """Decoder-only transformer with layer normalisation before each sub-layer.

    Radford et al., "Language models are unsupervised multitask learners" (GPT-2), 2019,
    section 2.3: weights are first normal with standard deviation 0.02, those that end a
    residual branch with 0.02 / sqrt(2 * layers), biases 0. Unlike GPT-2, the projection to
    queries, keys and values has no bias (see `CausalAttention`), and the head is tied to the
    embedding only where asked.

    Inputs are integer tokens of shape (B, T) with T <= context_length, predictions logits of
    shape (B, T, vocabulary_size), targets integers of shape (B, T) of which -1 counts for
    nothing; the loss is `CrossEntropy`.

    Parameters
    ----------
    vocabulary_size : int
        Number V of tokens.
    context_length : int
        Greatest length of a sequence.
    width : int
        Size D of the residual stream; a multiple of ``heads``.
    heads : int
        Number of attention heads.
    layers : int
        Number of blocks; 0 is allowed.
    seed : int
        Of the first parameters.
    dtype : str or numpy.dtype
        Of parameters and computation.
    device : str or Device
        Where both are: see `Model`.
    tied_embeddings : bool
        Whether the head's weight is the embedding's.
    dropout : float
        Rate of the `Dropout` after the embeddings and at the end of each residual branch, as in
        GPT-2; attention probabilities, which are never kept, are not dropped.

    Raises
    ------
    ValueError
        For a size that is no integer >= 1, a number of layers that is none >= 0, heads that do
        not divide the width, or a dropout outside [0, 1).
    """

    def __init__(
        self,
        *,
        vocabulary_size: int,
        context_length: int,
        width: int,
        heads: int,
        layers: int,
        seed: int = 0,
        dtype: Any = "float32",
        tied_embeddings: bool = False,
        dropout: float = 0.0,
        device: str | Device = "cpu",
    ) -> None:
        chain = gpt_chain(
            vocabulary_size, context_length, width, heads, layers, tied_embeddings, dropout
        )
        self.vocabulary_size = vocabulary_size
        self.context_length = context_length
        super().__init__(
            chain, CrossEntropy(), input_shape=(context_length,), seed=seed, dtype=dtype,
            device=device,
        )  # fmt: skip

    def generate(
        self,
        prompt: Any,
        length: int,
        temperature: float = 1.0,
        seed: int = 0,
        top_k: int | None = None,
        slide: int = 1,
    ) -> np.ndarray[Any, Any]:
        """Continue a sequence of tokens, each drawn from the model's prediction of the next.

        Keys and values of earlier tokens are kept while the sequence fits in the context; see
        `mpishard.nn.generate`, which any chain of layers can be given to.

        Parameters
        ----------
        prompt : array_like of int, shape (P,)
            What to continue; P >= 1. Of prompt and continuation, the last context_length tokens
            are what the model sees.
        length : int
            Number of tokens to add.
        temperature : float
            What logits are divided by; 0 always takes the likeliest token.
        seed : int
            Of the draws.
        top_k : int, optional
            Draw among the so many likeliest tokens only.
        slide : int
            Tokens by which the window slides when it is full: 1 always shows the model as much as
            it can see, and computes the whole window for each token.

        Returns
        -------
        numpy.ndarray of int64, shape (P + length,)
            Prompt and continuation.

        Raises
        ------
        ValueError
            For a prompt that is not 1-D, empty or of other than known tokens, or another
            argument out of its range.
        """
        views = self._table.nested_views(self._parameters())

        def forward_logits(tokens: np.ndarray[Any, Any], cache: KeyValueCache) -> Array:
            context = Context(training=False, cache=cache)
            return self.chain.forward(views, self._device.put(tokens), context)[0][0, -1]

        return generate(
            forward_logits, prompt, length, vocabulary_size=self.vocabulary_size,
            context_length=self.context_length, temperature=temperature, seed=seed, top_k=top_k,
            slide=slide,
        )  # fmt: skip


def gpt_chain(
    vocabulary_size: int,
    context_length: int,
    width: int,
    heads: int,
    layers: int,
    tied_embeddings: bool = False,
    dropout: float = 0.0,
) -> Sequential:
    """The layers of a `GPT`.

    ``embedding``, ``position``, for each block ``block<i>_attention`` and ``block<i>_mlp``, then
    ``norm`` and ``head``; with dropout, ``dropout`` after ``position`` and last in each block.
    Parameters and errors are those of `GPT`.
    """
    sizes = {
        "vocabulary_size": vocabulary_size,
        "context_length": context_length,
        "width": width,
        "heads": heads,
    }
    if not all(is_size(size) for size in sizes.values()) or not is_size(layers, least=0):
        raise ValueError(
            f"a GPT needs integer sizes >= 1 and an integer layers >= 0, got {sizes}, {layers=}"
        )
    if width % heads:
        raise ValueError(
            f"heads must divide width, got {width} = {width // heads} * {heads} + {width % heads}"
        )
    chain: dict[str, Layer] = {
        "embedding": Embedding(vocabulary_size, width, normal(_STD)),
        "position": PositionalEmbedding(context_length, width, normal(_STD)),
    }
    drop: dict[str, Layer] = {"dropout": Dropout(dropout)} if dropout else {}
    chain |= drop
    residual_std = _STD / math.sqrt(2 * layers) if layers else _STD
    for i in range(layers):
        chain[f"block{i}_attention"] = Residual(_attention(width, heads, residual_std) | drop)
        chain[f"block{i}_mlp"] = Residual(_mlp(width, residual_std) | drop)
    chain["norm"] = LayerNorm(width)
    tied_to = "embedding.weight" if tied_embeddings else None
    chain["head"] = Linear(width, vocabulary_size, False, normal(_STD), tied_to)
    return Sequential(chain)


def _attention(width: int, heads: int, residual_std: float) -> dict[str, Layer]:
    return {
        "norm": LayerNorm(width),
        "qkv": Linear(width, 3 * width, bias=False, initializer=normal(_STD)),
        "core": CausalAttention(heads),
        "projection": Linear(width, width, initializer=normal(residual_std)),
    }


def _mlp(width: int, residual_std: float) -> dict[str, Layer]:
    return {
        "norm": LayerNorm(width),
        "expansion": Linear(width, 4 * width, initializer=normal(_STD)),
        "gelu": GELU(),
        "projection": Linear(4 * width, width, initializer=normal(residual_std)),
    }
