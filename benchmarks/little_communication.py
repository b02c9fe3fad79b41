"""Loss and bytes of a byte-level GPT whose ranks send little, or do not wait for one another.

    python benchmarks/little_communication.py                 # two thread-ranks, 200 steps
    python benchmarks/little_communication.py -n 4 --steps 400
    python benchmarks/little_communication.py --slow          # one rank at a third of the speed

All train on the text of this project's documentation, with the same samples and AdamW. Each line
gives the mean loss of the last 20 steps in nats per byte, and after a last agreement that of 256
other samples, and the bytes that the ranks sent, relative to DDP's.

With ``--slow`` the last rank sleeps after each step, so that it takes three times as long, and
whoever is free takes the next samples. The lines give seconds for a thousand samples, and the loss
after as many samples, of DDP and of `AsyncSGDOptimizer` with ``allow_staleness``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mpishard as ms

DOCS = Path(__file__).parents[1] / "docs"
CONTEXT, BATCH, LAST = 64, 8, 20
PAUSE = 0.2  # seconds

Ways = dict[str, Callable[[Any, Any], Any]]


def compressed(method: str, ratio: float = 0.1) -> Callable[[Any, Any], Any]:
    """Return a maker of an optimizer that compresses."""
    return lambda rule, config: ms.optimizers.GradientCompressionOptimizer(
        rule, config, ratio, method=method, rank=4
    )


def local(period: int, outer: Any = None) -> Callable[[Any, Any], Any]:
    """Return a maker of an optimizer whose ranks train alone for ``period`` steps."""
    return lambda rule, config: ms.optimizers.LocalSGDOptimizer(rule, config, period, outer)


def late(delay: int) -> Callable[[Any, Any], Any]:
    """Return a maker of an optimizer that applies gradients ``delay`` steps later."""
    return lambda rule, config: ms.optimizers.AsyncSGDOptimizer(rule, config, delay=delay)


WAYS: Ways = {
    "DDP": ms.optimizers.DDPOptimizer,
    "int8": compressed("int8"),
    "quantization, ratio 0.1": compressed("quantization"),
    "top-k, 1 %": compressed("top-k", 0.01),
    "random-k, 1 %": compressed("random-k", 0.01),
    "PowerSGD, rank 4": compressed("powersgd"),
    "local steps, H = 10": local(10),
    "local steps, H = 50": local(50),
    "outer Nesterov, H = 10": local(10, ms.optimizers.SGD(0.7, 0.9, nesterov=True)),
    "outer Nesterov, H = 50": local(50, ms.optimizers.SGD(0.7, 0.9, nesterov=True)),
    "late gradients, delay = 1": late(1),
    "late gradients, delay = 4": late(4),
}


def wrapped(backend: Any) -> tuple[Any, Any, Any]:
    """Return the GPT, and the inputs and targets of all samples."""
    text = "".join(p.read_text() for p in sorted(DOCS.glob("*.md"))).encode()
    tokens = np.frombuffer(text, np.uint8).astype(np.int64)
    x = ms.data.TokenWindows(tokens, CONTEXT)
    y = ms.data.TokenWindows(tokens, CONTEXT, offset=1)
    plain = ms.nn.GPT(
        vocabulary_size=256, context_length=CONTEXT, width=64, heads=4, layers=2, seed=0,
        dtype=np.float32,
    )  # fmt: skip
    return ms.DDPModel(plain, ms.ShardingConfiguration(backend)), x, y


def loss_of_others(model: Any, x: Any, y: Any) -> float:
    """Return the mean loss of 256 samples."""
    rows = np.random.default_rng(2).integers(0, len(x), 256)
    total, weight = model.engine.evaluate(x[rows], y[rows])
    return float(total / weight)


def with_a_slow_rank(backend: Any, staleness: int, steps: int) -> tuple[float, float]:
    """Return seconds for a thousand samples, and the loss of other samples at the end."""
    model, x, y = wrapped(backend)
    optimizer = ms.optimizers.AsyncSGDOptimizer(
        ms.optimizers.AdamW(1e-3), model.sharding_configuration, staleness
    )
    optimizer.bind(model)
    is_slow = backend.rank == backend.world_size - 1 > 0
    generator = np.random.default_rng(backend.rank)
    model.compute_gradients(x[:BATCH], y[:BATCH])  # compiles
    backend.barrier()
    began, made = time.perf_counter(), 0
    while (sum(optimizer.clocks) if staleness else made) < steps * backend.world_size:
        rows = generator.integers(0, len(x), BATCH)
        # All sleep, so that cores that are shared do not count as speed.
        time.sleep(3 * PAUSE if is_slow else PAUSE)
        optimizer.step(model, x[rows], y[rows])
        made += backend.world_size
    optimizer.settle()
    seconds = float(backend.all_reduce(np.array([time.perf_counter() - began]))[0])
    samples = steps * backend.world_size * BATCH
    return seconds / backend.world_size / samples * 1000, loss_of_others(model, x, y)


def train(backend: Any, name: str, steps: int) -> tuple[float, float, float]:
    """Return both losses, and the bytes that all ranks sent relative to DDP's."""
    model, x, y = wrapped(backend)
    config = model.sharding_configuration
    optimizer = WAYS[name](ms.optimizers.AdamW(3e-3), config)
    optimizer.bind(model)
    generator = np.random.default_rng(1)
    layout = ms.ShardLayout(BATCH * 4, backend.world_size)
    backend.traffic.reset()
    losses = []
    for _ in range(steps):
        rows = generator.integers(0, len(x), BATCH * 4)[layout.slice(backend.rank)]
        losses.append(optimizer.step(model, x[rows], y[rows]))
    optimizer.settle()
    sent = np.array([backend.traffic.total_bytes])
    share = float(backend.all_reduce(sent)[0])
    # By messages; in the memory of one node DDP reads, and sends nothing.
    share /= steps * 2 * max(1, backend.world_size - 1) * model.parameter_count * 4
    if name == "DDP":
        share = 1.0
    return float(np.mean(losses[-LAST:])), loss_of_others(model, x, y), share


def main() -> None:
    """Print one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ways", nargs="+", default=[""], help="words of the ways to run")
    parser.add_argument("--slow", action="store_true", help="one rank at a third of the speed")
    given = parser.parse_args()
    if given.slow:
        for staleness in (0, given.steps):
            seconds, loss = ms.run_in_threads(given.n, with_a_slow_rank, staleness, given.steps)[0]
            print(
                f"allow_staleness {staleness:4}: {seconds:.2f} s for 1000 samples, loss {loss:.3f}"
            )
        return
    first: tuple[float, float, float] | None = None
    for name in [n for n in WAYS if n == "DDP" or any(word in n for word in given.ways)]:
        found = ms.run_in_threads(given.n, train, name, given.steps)[0]
        first = first or found
        print(
            f"{name:26} loss {found[0]:.3f} ({found[0] - first[0]:+.3f}), of other samples "
            f"{found[1]:.3f} ({found[1] - first[1]:+.3f}), {found[2]:7.2%} of DDP's bytes"
        )


if __name__ == "__main__":
    main()
