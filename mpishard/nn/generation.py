"""Continuing a sequence of tokens, one drawn at a time from a model's prediction of the next."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.arrays import Array, to_host
from mpishard.nn.cache import KeyValueCache

__all__ = ["generate"]


def generate(
    forward_logits: Callable[[np.ndarray[Any, Any], KeyValueCache], Array],
    prompt: Any,
    length: int,
    *,
    vocabulary_size: int,
    context_length: int,
    temperature: float = 1.0,
    seed: int = 0,
    top_k: int | None = None,
    slide: int = 1,
) -> np.ndarray[Any, Any]:
    """Continue a sequence of tokens, whatever computes the logits.

    The prompt is read at once, then each new token alone, with the keys and values of all earlier
    ones in a `KeyValueCache`. Positions are learned, and begin with the window's first: once the
    sequence is longer than the context, the window slides, each token then has another position,
    and nothing that was kept holds. The window is read anew whenever it slides; by default that
    is for each token, which then is as dear as a prompt of ``context_length`` tokens. With
    ``slide`` = s the window slides by s tokens at once, so that one token in s is that dear; the
    others see up to s - 1 tokens less than they could.

    Parameters
    ----------
    forward_logits : callable
        ``forward_logits(tokens, cache) -> logits``: runs a model on tokens of shape (1, T) with
        ``Context(training=False, cache=cache)``, and gives the logits of the last position,
        shape (V,), on any device. Where several ranks generate together, each must be given the
        same logits; they then draw the same tokens.
    prompt : array_like of int, shape (P,)
        What to continue; P >= 1. Of prompt and continuation, the last ``context_length`` tokens
        are what the model sees.
    length : int
        Number of tokens to add.
    vocabulary_size : int
        Number V of tokens.
    context_length : int
        Greatest number of tokens that the model sees.
    temperature : float
        What logits are divided by; 0 always takes the likeliest token.
    seed : int
        Of the draws.
    top_k : int, optional
        Draw among the so many likeliest tokens only.
    slide : int
        Tokens by which the window slides when it is full, at most ``context_length``.

    Returns
    -------
    numpy.ndarray of int64, shape (P + length,)
        Prompt and continuation.

    Raises
    ------
    ValueError
        For a prompt that is not 1-D, empty or of other than known tokens, or another argument out
        of its range; before anything is computed.
    """
    tokens = _checked_prompt(prompt, vocabulary_size)
    if length < 0:
        raise ValueError(f"length must be >= 0, got {length}")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be finite and >= 0, got {temperature}")
    if top_k is not None and not 1 <= top_k <= vocabulary_size:
        raise ValueError(f"top_k must be in [1, {vocabulary_size}], got {top_k}")
    if not 1 <= slide <= context_length:
        raise ValueError(f"slide must be in [1, {context_length}], the context, got {slide}")
    generator = np.random.default_rng(seed)
    cache = KeyValueCache(context_length)
    sequence = np.empty(len(tokens) + length, dtype=np.int64)
    sequence[: len(tokens)] = tokens
    read = max(0, len(tokens) - context_length)  # the sequence's first token that is not kept
    for end in range(len(tokens), len(sequence)):
        if cache.length == context_length:
            cache.clear()
            read = end - (context_length - slide + 1)
        logits_V = forward_logits(sequence[None, read:end], cache)
        cache.advance(end - read)
        read = end
        sequence[end] = _draw(to_host(logits_V).astype(np.float64), temperature, top_k, generator)
    return sequence


def _checked_prompt(prompt: Any, vocabulary_size: int) -> np.ndarray[Any, Any]:
    """The prompt as an array, or a ValueError that says what is wrong with it."""
    tokens: np.ndarray[Any, Any] = np.asarray(prompt)
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


def _draw(
    logits_V: np.ndarray[Any, Any],
    temperature: float,
    top_k: int | None,
    generator: np.random.Generator,
) -> int:
    """One token from softmax(logits / temperature), among the ``top_k`` likeliest."""
    if temperature == 0:
        return int(logits_V.argmax())
    likeliest_V = np.argsort(-logits_V, kind="stable")[:top_k]
    scaled = (logits_V[likeliest_V] - logits_V.max()) / temperature
    cumulative = np.cumsum(np.exp(scaled))
    # The draw is below the last sum in exact arithmetic; min() holds where rounding meets it.
    position = np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")
    return int(likeliest_V[min(int(position), len(likeliest_V) - 1)])
