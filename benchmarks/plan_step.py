"""Planned steps beside measured ones, for models x strategies.

    mpishard bench machine -n 2
    mpishard run -n 2 benchmarks/plan_step.py --machine machine.json --json FILE

A step is timed by the wall, and by the clock of the rank's thread, which stands still while other
programs run or the rank sleeps. On an idle machine both are the step; on a busy one compare the
clock of the thread, but not for pipelines, whose ranks wait for each other.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from harness import measure, options, positive
from rich.table import Table

import mpishard as ms
from mpishard.cli.bench.step import gpt, tokens, training_step
from mpishard.cli.tables import figures_table
from mpishard.cli.wording import milliseconds
from mpishard.nn import Conv2D, CrossEntropy, Flatten, Linear, MaxPool2D, Model, ReLU, Sequential
from mpishard.planning import Job, Machine, plan_step

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline")


def convolutions() -> Model:
    """Return a small network of two convolutions for images of 32 x 32."""
    layers = [Conv2D(3, 32, 3, padding=1), ReLU(), MaxPool2D(2)]
    layers += [Conv2D(32, 64, 3, padding=1), ReLU(), MaxPool2D(2), Flatten(), Linear(64 * 64, 10)]
    return Model(Sequential(*layers), CrossEntropy(), input_shape=(3, 32, 32), dtype="float32")


def cases(rank: int) -> Iterator[tuple[str, Any, int, Any, Any, str | None]]:
    """Yield name, model, samples of a rank, its batch and a precision."""
    for name, width, samples in (("mlp", 1024, 64), ("mlp-narrow", 256, 32)):
        x = np.random.default_rng(rank).standard_normal((samples, width), dtype=np.float32)
        yield name, ms.nn.MLP([width] * 9, dtype="float32"), samples, x, x, None
    for name, precision in (("gpt", None), ("gpt-bfloat16", "bfloat16")):
        yield name, gpt(256, 4, 8, 128), 8, *tokens(rank, 8, 128), precision
    x = np.random.default_rng(rank).standard_normal((32, 3, 32, 32), dtype=np.float32)
    yield "convolutions", convolutions(), 32, x, np.arange(32) % 10, None


def main(
    backend: ms.CommunicationBackend, arguments: argparse.Namespace
) -> tuple[dict[str, Any], Table]:
    """Measure and plan each case."""
    machine = Machine.load(arguments.machine)
    table = figures_table(
        "planned / measured", ("", "planned", "thread", "wall", "/ thread", "/ wall"), ("",)
    )
    rows = []
    for strategy in arguments.strategies:
        together = strategy in ("tensor", "pipeline")
        for name, model, samples, x, y, precision in cases(0 if together else backend.rank):
            if arguments.only not in name or (together and name == "convolutions"):
                continue
            total = samples if together else samples * backend.world_size
            job = Job(backend.world_size, 1, strategy, batch_size=total, precision=precision)
            seconds = plan_step(model, job, machine).seconds
            config = ms.ShardingConfiguration(backend, precision=precision)
            _, step = training_step(config, model, strategy, x, y)
            thread, wall = _times(backend, step, arguments.steps)
            rows.append(
                {"model": name, "planned": seconds, "thread": thread, "wall": wall, **asdict(job)}
            )
            cells = [milliseconds(s) for s in (seconds, thread, wall)]
            table.add_row(
                f"{name} {strategy}", *cells, f"{seconds / thread:.2f}", f"{seconds / wall:.2f}"
            )
    for row in rows:
        row["optimizer"] = "AdamW"
    return {"steps": rows}, table


def _times(backend: ms.CommunicationBackend, step: Any, steps: int) -> tuple[float, float]:
    """Return the least time of a step by both clocks: the mean and the largest of the ranks."""
    for _ in range(3):
        step()
    thread, wall = [], []
    for _ in range(steps):
        backend.barrier()
        begun = time.thread_time(), time.perf_counter()
        step()
        thread.append(time.thread_time() - begun[0])
        wall.append(time.perf_counter() - begun[1])
    found = backend.all_gather(np.array([[min(thread), min(wall)]]))
    return float(found[:, 0].mean()), float(found[:, 1].max())


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--machine", default="machine.json", help="file of mpishard bench machine")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--only", default="", help="models whose name has this text")
    parser.add_argument("--steps", type=positive, default=10)
    measure(main, parser.parse_args())
