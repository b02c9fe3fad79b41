"""Models, batches and steps that benchmarks train, and the JSON that they write."""

from __future__ import annotations

import json
import platform
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl

from mpishard import nn
from mpishard.cli.machine import installed_version, processor_name, total_memory, usable_cores
from mpishard.communication import CommunicationBackend, InMemoryCommunicationBackend
from mpishard.distributed import as_distributed
from mpishard.optimizers import AdamW
from mpishard.sharding import ShardingConfiguration

__all__ = ["CONTEXT", "alone", "describe_machine", "gpt", "tokens", "training_step", "write_json"]

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
    # Ranks of one environment find each other by its name: nobody else has this one.
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


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write the measurements, with the machine that they were made on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": describe_machine(), **result}
    # NaN and infinity are refused: other readers of JSON do not know them.
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, and the versions that decide about speed."""
    blas = threadpoolctl.threadpool_info()
    return {
        "processor": processor_name(),
        "cores": usable_cores(),
        "memory_bytes": total_memory(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: installed_version(name) for name in ("mpishard", "numpy", "mpi4py")},
        "blas": [f"{i['internal_api']} {i['version']} {i.get('architecture')}" for i in blas],
        "blas_threads": [i["num_threads"] for i in blas],
    }
