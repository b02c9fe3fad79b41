"""Parts of a job on several hosts: steps, bytes on the wire, and the conformance suite."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import mpishard as ms
from mpishard.communication.contract.call import DTYPES
from mpishard.testing.communication import CommunicationConformance

BYTES_OF = ("fsdp", "zero1", "ddp")
_STEPS = 4
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")

# Sums of 16-bit data travel as float32. Four ranks, which take longest, run a part.
_DTYPES = {2: ("bfloat16", "float64"), 4: ("bfloat16",)}
# It takes 17 seconds, and compares headers, which are the same on one host.
_LEFT_OUT = ("check_mismatches",)


def pair(backend: Any, model: Any, strategy: str, **options: Any) -> tuple[Any, Any]:
    """Return the sharded model and optimizer."""
    rule = ms.optimizers.AdamW(learning_rate=1e-3)
    return (
        ms.as_distributed(model, backend, strategy, **options),
        ms.as_distributed(rule, backend, strategy, **options),
    )


def tensors(backend: Any) -> dict[str, str]:
    """Return the hash of all parameters after a few steps, for each strategy."""
    found = {}
    for strategy in (*BYTES_OF, "hybrid"):
        gpt = ms.nn.GPT(
            vocabulary_size=32, context_length=16, width=32, heads=4, layers=2, seed=0,
            dtype=np.float32,
        )  # fmt: skip
        options = {"tensor_parallel_size": 2} if strategy == "hybrid" else {}
        model, optimizer = pair(backend, gpt, strategy, **options)
        for step in range(_STEPS):
            rng = np.random.default_rng([step, model.data_rank])
            x, y = rng.integers(0, 32, (2, 4, 16))
            optimizer.step(model, x, y)
        full = model.gather_full_parameters()
        found[strategy] = hashlib.sha256(np.asarray(full).tobytes()).hexdigest()
    return found


def sent_bytes(backend: Any) -> dict[str, list[float]]:
    """Return for each strategy the bytes of one step on the wire, and by the formula.

    The formula is that of docs/strategies.md, with hosts in the place of ranks: a piece travels
    once per host.
    """
    # The first rank of each host reads the counter of the host.
    is_first = backend.nodes.index(backend.nodes[backend.rank]) == backend.rank
    found = {}
    for strategy in BYTES_OF:
        mlp = ms.nn.MLP([640] * 5, seed=0, dtype=np.float32)
        model, optimizer = pair(backend, mlp, strategy)
        x, y = np.random.default_rng(backend.rank).standard_normal((2, 4, 640), np.float32)
        optimizer.step(model, x, y)
        backend.barrier()
        before = int(_SENT.read_text()) if is_first else 0
        backend.barrier()
        for _ in range(_STEPS):
            optimizer.step(model, x, y)
        backend.barrier()
        wire = (int(_SENT.read_text()) if is_first else 0) - before
        wire = int(backend.all_reduce(np.array([wire]))[0]) / _STEPS
        size, kept = model.parameter_count * 4, model.units[-1].length * 4
        others = backend.node_count - 1
        by_formula = others * (3 * (size - kept) + 2 * kept if strategy == "fsdp" else 2 * size)
        found[strategy] = [wire, by_formula]
    return found


def checks() -> list[str]:
    """Return the checks of the conformance suite that the job runs."""
    return [n for n in CommunicationConformance.names() if n not in _LEFT_OUT]


def main() -> None:
    """Print each finding on a line of rank 0; on one host, those of the tensors alone."""
    backend = ms.init("mpi")
    _print(backend, "nodes", backend.node_count)
    _print(backend, "tensors", tensors(backend))
    if backend.node_count > 1:
        _print(backend, "bytes", sent_bytes(backend))
        suite = CommunicationConformance(
            tuple(dtype for dtype in DTYPES if dtype.name in _DTYPES[backend.world_size])
        )
        for name in checks():
            getattr(suite, name)(backend)
            _print(backend, name, "passed")


def _print(backend: Any, name: str, found: object) -> None:
    if backend.rank == 0:
        sys.stdout.write(f"found {json.dumps([name, found])}\n")


if __name__ == "__main__":
    main()
