"""A GPT-2-like language model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.base import (
    Array,
    Device,
    as_amount,
    as_count,
    as_flag,
    as_integer,
    as_number,
    as_positive,
    check_divides,
    is_size,
    to_host,
)
from mpishard.nn.layers.activations import GELU
from mpishard.nn.layers.attention import CausalAttention
from mpishard.nn.layers.cache import KeyValueCache
from mpishard.nn.layers.composites import Residual, Sequential
from mpishard.nn.layers.dropout import Dropout
from mpishard.nn.layers.embedding import Embedding, PositionalEmbedding
from mpishard.nn.layers.initializers import normal
from mpishard.nn.layers.layer import Context, Initializer, Layer
from mpishard.nn.layers.linear import Linear
from mpishard.nn.layers.normalization import LayerNorm
from mpishard.nn.losses import CrossEntropy
from mpishard.nn.models.model import Model


class GPT(Model):
    """Decoder-only transformer with layer normalisation before each sub-layer.

    Weights are initially normal with standard deviation ``initial_std``. Those at the end of a
    residual branch have ``initial_std`` / sqrt(2 * layers), and biases are 0: Radford et al.,
    "Language models are unsupervised multitask learners" (GPT-2), 2019, section 2.3. Unlike in
    GPT-2, the projection to queries, keys and values has no bias (see `Attention`), and the head
    is tied to the embedding only if asked.

    Inputs are integer tokens of shape (B, T) with T <= context_length, and predictions are logits
    of shape (B, T, vocabulary_size). Targets are integers of shape (B, T); -1 is ignored. The loss
    is `CrossEntropy`.

    The layers are ``embedding``, ``position``, for each block ``block<i>_attention`` and
    ``block<i>_mlp``, then ``norm`` and ``head``. With dropout, a layer ``dropout`` follows
    ``position``, and ends each residual branch.

    Parameters
    ----------
    vocabulary_size : int
        Number V of tokens.
    context_length : int
        Maximum number of tokens of a sequence.
    width : int
        Size D of the residual stream, a multiple of ``heads``.
    heads : int
        Number of attention heads.
    layers : int
        Number of blocks, which may be 0.
    seed : int
        Seed of the initial parameters.
    dtype : str or numpy.dtype
        Dtype of parameters and computation.
    device : str or Device
        Device of parameters and computation: see `Model`.
    tied_embeddings : bool
        True if the head uses the embedding's weight.
    dropout : float
        Rate of the `Dropout` after the embeddings and at the end of each residual branch, as in
        GPT-2. Attention probabilities, which are never kept, are not dropped.
    kv_heads : int, optional
        Number of heads of keys and of values, each shared by heads / kv_heads heads of queries: see
        `Attention`. The default is `heads`.
    initial_std : float
        Standard deviation of the initial weights. GPT-2, of width 768 and more, uses 0.02. Models
        of small width learn faster with larger weights, because their attention scores are then
        not near 0 at first.

    Raises
    ------
    ValueError
        If a size is not an integer >= 1, or `layers` not one >= 0. If the width is not a multiple
        of `heads`, or `heads` not one of `kv_heads`. If the dropout is outside [0, 1), or the
        standard deviation is not positive.
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
        kv_heads: int | None = None,
        initial_std: float = 0.02,
    ) -> None:
        sizes = {
            "vocabulary_size": vocabulary_size,
            "context_length": context_length,
            "width": width,
            "heads": heads,
            "kv_heads": heads if kv_heads is None else kv_heads,
        }
        # All sizes before the layers are made, so that the error names the GPT's arguments.
        if not all(is_size(size) for size in sizes.values()) or not is_size(layers, least=0):
            raise ValueError(
                f"a GPT needs integer sizes >= 1 and an integer layers >= 0, got {sizes}, {layers=}"
            )
        groups = sizes["kv_heads"]
        check_divides("heads", heads, "width", width)
        check_divides("kv_heads", groups, "heads", heads)
        initial_std = as_positive("initial_std", initial_std)
        usual = normal(initial_std)
        # 2 L branches add to one sum. Their weights are smaller by the root of their number, so
        # that the variance of the sum does not grow with L (GPT-2, section 2.3).
        ends_branch = normal(initial_std / math.sqrt(2 * layers)) if layers else usual
        chain: dict[str, Layer] = {
            "embedding": Embedding(vocabulary_size, width, usual),
            "position": PositionalEmbedding(context_length, width, usual),
        }
        # Without dropout there are no such layers, which would only pass on their input.
        drop: dict[str, Layer] = {}
        if as_number("dropout", dropout):
            drop["dropout"] = Dropout(dropout)
        chain |= drop
        for i in range(layers):
            attention, mlp = _block(width, heads, groups, usual, ends_branch)
            chain[f"block{i}_attention"] = Residual(attention | drop)
            chain[f"block{i}_mlp"] = Residual(mlp | drop)
        chain["norm"] = LayerNorm(width)
        tied_to = "embedding.weight" if as_flag("tied_embeddings", tied_embeddings) else None
        chain["head"] = Linear(width, vocabulary_size, False, usual, tied_to)
        self.vocabulary_size = vocabulary_size
        self.context_length = context_length
        super().__init__(
            Sequential(chain),
            CrossEntropy(),
            input_shape=(context_length,),
            seed=seed,
            dtype=dtype,
            device=device,
        )

    def generate(
        self,
        prompt: object,
        length: int,
        temperature: float = 1.0,
        seed: int = 0,
        top_k: int | None = None,
        slide: int = 1,
    ) -> Array:
        """Continue a sequence of tokens, each drawn from the model's prediction of the next.

        Keys and values of earlier tokens are kept while the sequence fits in the context. See
        `mpishard.nn.generate`, which does the same for any chain of layers.

        Parameters
        ----------
        prompt : array_like of int, shape (P,)
            Tokens to continue; P >= 1. The model sees the last context_length tokens of prompt and
            continuation.
        length : int
            Number of tokens to add.
        temperature : float
            Divisor of the logits. With 0 the likeliest token is always taken.
        seed : int
            Seed of the draws.
        top_k : int, optional
            Number of likeliest tokens among which to draw. The default is all tokens.
        slide : int
            Number of tokens by which the window slides when it is full. With 1 the model always
            sees context_length tokens, and computes the whole window for each token.

        Returns
        -------
        numpy.ndarray of int64, shape (P + length,)
            Prompt and continuation.

        Raises
        ------
        ValueError
            If the prompt is not 1-D, is empty or has unknown tokens, or another argument is out of
            its range.
        """
        return generate(
            lambda tokens, cache: self.predict_next(tokens, cache)[0],
            prompt,
            length,
            vocabulary_size=self.vocabulary_size,
            context_length=self.context_length,
            temperature=temperature,
            seed=seed,
            top_k=top_k,
            slide=slide,
        )

    def predict_next(self, tokens: Any, cache: KeyValueCache) -> Array:
        """Return the logits (B, V) of the last position for new tokens (B, T) of cached sequences.

        The call must be inside ``cache.reading``: see `KeyValueCache`. The errors raised are those
        of the layers.
        """
        views = self._table.nested_views(self._parameters())
        # The cache belongs to the caller, so that one model can serve many sequences.
        context = Context(training=False, cache=cache)
        return self.chain.forward(views, self._device.put(tokens), context)[0][:, -1]


def _block(
    width: int, heads: int, kv_heads: int, usual: Initializer, ends_branch: Initializer
) -> tuple[dict[str, Layer], dict[str, Layer]]:
    """Return the layers of a block's attention branch, and those of its perceptron branch."""
    keys_and_values = 2 * kv_heads * (width // heads)
    # qkv has no bias: the softmax does not depend on a bias of the keys (see `Attention`).
    return {
        "norm": LayerNorm(width),
        "qkv": Linear(width, width + keys_and_values, bias=False, initializer=usual),
        "core": CausalAttention(heads, kv_heads=kv_heads),
        "projection": Linear(width, width, initializer=ends_branch),
    }, {
        "norm": LayerNorm(width),
        "expansion": Linear(width, 4 * width, initializer=usual),
        "gelu": GELU(),
        "projection": Linear(4 * width, width, initializer=ends_branch),
    }


def generate(
    forward_logits: Callable[[Array, KeyValueCache], Array],
    prompt: object,
    length: int,
    *,
    vocabulary_size: int,
    context_length: int,
    temperature: float = 1.0,
    seed: int = 0,
    top_k: int | None = None,
    slide: int = 1,
) -> Array:
    """Continue a sequence of tokens with logits from any function.

    The prompt is read at once, then each new token alone, with the keys and values of all earlier
    tokens in a `KeyValueCache`. When the sequence becomes longer than the context, the window of
    visible tokens slides. Learned positions count from the first token of the window. After a
    slide each token therefore has another position, the cached keys and values are invalid, and
    the whole window is read again.

    By default the window slides for each token, which then costs as much as a prompt of
    ``context_length`` tokens. With ``slide`` = s the window slides by s tokens at once, so that
    only one token in s costs that much. The other tokens see up to s - 1 tokens less.

    Parameters
    ----------
    forward_logits : callable
        ``forward_logits(tokens, cache)`` runs a model on tokens of shape (1, T) with
        ``Context(training=False, cache=cache)``. It returns the logits of the last position, shape
        (V,), on any device. If several ranks generate together, it must return the same logits on
        each of them; they then draw the same tokens.
    prompt : array_like of int, shape (P,)
        Tokens to continue; P >= 1. The model sees the last ``context_length`` tokens of prompt and
        continuation.
    length : int
        Number of tokens to add.
    vocabulary_size : int
        Number V of tokens.
    context_length : int
        Maximum number of tokens that the model sees.
    temperature : float
        Divisor of the logits. With 0 the likeliest token is always taken.
    seed : int
        Seed of the draws.
    top_k : int, optional
        Number of likeliest tokens among which to draw. The default is all tokens.
    slide : int
        Number of tokens, at most ``context_length``, by which the window slides when it is full.

    Returns
    -------
    numpy.ndarray of int64, shape (P + length,)
        Prompt and continuation.

    Raises
    ------
    ValueError
        If the prompt is not 1-D, is empty or has unknown tokens, or another argument is out of its
        range. Nothing has been computed then.
    """
    tokens = checked_prompt(prompt, vocabulary_size)
    check_drawing(length, temperature, top_k, vocabulary_size)
    if not 1 <= as_integer("slide", slide) <= context_length:
        raise ValueError(f"slide must be in [1, {context_length}], the context, got {slide}")
    # Each rank has its own, with the same seed, so that tokens need not be broadcast.
    generator = np.random.default_rng(seed)
    cache = KeyValueCache(1, context_length)  # One sequence in one block is enough.
    kept = cache.add()
    sequence = np.empty(len(tokens) + length, dtype=np.int64)
    sequence[: len(tokens)] = tokens
    read = max(0, len(tokens) - context_length)  # Index of the first token that is not cached.
    for end in range(len(tokens), len(sequence)):
        # When the context is full, its last tokens are read again at their new positions. They are
        # so few that `slide` tokens can be drawn before it is full again.
        if cache.length(kept) == context_length:
            cache.free(kept)
            kept = cache.add()
            read = end - (context_length - slide + 1)
        with cache.reading([kept], end - read):
            logits_V = forward_logits(sequence[None, read:end], cache)
        read = end
        sequence[end] = draw(logits_V, temperature, top_k, generator)
    return sequence


def check_drawing(length: int, temperature: float, top_k: int | None, vocabulary_size: int) -> None:
    """Refuse arguments of `generate` that are out of their range."""
    as_count("length", length, least=0)
    as_amount("temperature", temperature)
    if top_k is not None and not 1 <= as_integer("top_k", top_k) <= vocabulary_size:
        raise ValueError(f"top_k must be in [1, {vocabulary_size}], got {top_k}")


def checked_prompt(prompt: object, vocabulary_size: int) -> Array:
    """Return the prompt as an array, or raise a ValueError with the reason."""
    tokens: Array = np.asarray(prompt)
    if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
        raise ValueError(
            "prompt must be a 1-D array of at least one integer, got "
            f"shape {tokens.shape} of {tokens.dtype}"
        )
    unknown = tokens[(tokens < 0) | (tokens >= vocabulary_size)]
    if unknown.size:
        raise ValueError(
            f"token {int(unknown[0])} is outside the vocabulary [0, {vocabulary_size})"
        )
    return tokens


def draw(
    logits_V: Array,
    temperature: float,
    top_k: int | None,
    generator: np.random.Generator,
) -> int:
    """Draw a token from softmax(logits / temperature), among the ``top_k`` likeliest tokens."""
    # In float64, because sums over a large vocabulary lose digits in float32.
    logits_V = to_host(logits_V).astype(np.float64)
    # The limit of small temperatures, without a division by 0.
    if temperature == 0:
        return int(logits_V.argmax())
    # A stable sort puts the lower token first if logits are equal, on every machine.
    likeliest_V = np.argsort(-logits_V, kind="stable")[:top_k]
    # The maximum is subtracted, so that no exponential overflows.
    scaled = (logits_V[likeliest_V] - logits_V.max()) / temperature
    cumulative = np.cumsum(np.exp(scaled))
    # The draw is below the last sum in exact arithmetic, but rounding can make them equal: min().
    position = np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")
    return int(likeliest_V[min(int(position), len(likeliest_V) - 1)])
