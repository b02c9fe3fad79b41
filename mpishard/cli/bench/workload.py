"""Models, batches and steps that several benchmarks train."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard import nn
from mpishard.communication import CommunicationBackend, InMemoryCommunicationBackend
from mpishard.distributed import as_distributed
from mpishard.optimizers import AdamW
from mpishard.sharding import ShardingConfiguration

__all__ = ["CONTEXT", "alone", "gpt", "tokens", "training_step"]

CONTEXT = 128
"""Tokens of a sequence."""

_VOCABULARY = 256

Matrix = np.ndarray[Any, np.dtype[Any]]


def gpt(width: int, layers: int, heads: int, context: int = CONTEXT) -> nn.GPT:
    """Return a GPT without arrays yet, in float32.

    Raises
    ------
    ValueError
        For sizes that do not fit each other.
    """
    return nn.GPT(
        vocabulary_size=_VOCABULARY, context_length=context, width=width, heads=heads, layers=layers
    )


def tokens(seed: int, sequences: int, context: int = CONTEXT) -> tuple[Matrix, Matrix]:
    """Return random inputs and targets of a GPT."""
    found = np.random.default_rng(seed).integers(0, _VOCABULARY, (sequences, context + 1))
    return found[:, :-1].copy(), found[:, 1:].copy()


def alone() -> CommunicationBackend:
    """Return a backend of one rank, which communicates with nobody."""
    backend = InMemoryCommunicationBackend(0, 1, f"alone-{uuid.uuid4()}")
    backend.initialize()
    return backend


def training_step(
    config: ShardingConfiguration,
    plain: nn.Model,
    strategy: str,
    x: Matrix,
    y: Matrix,
    rule: AdamW | None = None,
    **options: Any,
) -> tuple[Any, Callable[[], object]]:
    """Return the sharded model, and the step that trains it on one batch."""
    model = as_distributed(plain, config, strategy, **options)
    rule = rule or AdamW(1e-3, weight_decay=0.01)
    optimizer = as_distributed(rule, config, strategy, **options)
    return model, lambda: optimizer.step(model, x, y)
