"""Planned steps beside measured ones, for models x strategies and schedules.

    mpishard bench machine -n 2
    mpishard run -n 2 benchmarks/plan_step.py --machine machine.json --json FILE

The ways of a model take turns, in rounds of a few steps each, so that other programs slow all of
them alike. A figure is the lower quartile of the steps, as in `bench machine`. If the machine is
busy compare the ratios: the last column has the plan's ratio to ddp over the measured one.
`plan_hosts.py` starts this job on hosts made of network namespaces.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness import measure, options, positive
from rich.table import Table

import mpishard as ms
from mpishard.base import Array
from mpishard.cli.bench.step import gpt, tokens, training_step
from mpishard.cli.tables import figures_table
from mpishard.cli.wording import milliseconds
from mpishard.nn import Conv2D, CrossEntropy, Flatten, Linear, MaxPool2D, Model, ReLU, Sequential
from mpishard.observe import Timing
from mpishard.planning import Job, Machine, StepPlan, plan_step

BASE = "ddp"
"""The way to which ratios are taken."""

SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v")
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("ddp", "zero1", "zero2", "fsdp", "tensor")},
    "pipeline": ("pipeline", {}),
    **{
        f"{schedule} m{count}": (
            "pipeline", {"schedule": schedule, "micro_batch_count": count}
        )
        for count in (2, 4, 8)
        for schedule in SCHEDULES
    },
}  # fmt: skip
"""Name of a way -> strategy, and its options."""


def convolutions() -> Model:
    """Return a small network of two convolutions for images of 32 x 32."""
    layers = [Conv2D(3, 32, 3, padding=1), ReLU(), MaxPool2D(2)]
    layers += [Conv2D(32, 64, 3, padding=1), ReLU(), MaxPool2D(2), Flatten(), Linear(64 * 64, 10)]
    return Model(Sequential(*layers), CrossEntropy(), input_shape=(3, 32, 32), dtype="float32")


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and the batch of a data rank."""

    name: str
    make: Callable[[], Model]
    batch: Callable[[int], tuple[Array, Array]]
    samples: int
    precision: str | None = None
    leaves_out: tuple[str, ...] = field(default=())
    """Strategies that do not take the model."""


def _mlp(width: int, samples: int) -> Callable[[int], tuple[Array, Array]]:
    def batch(seed: int) -> tuple[Array, Array]:
        x = np.random.default_rng(seed).standard_normal((samples, width), dtype=np.float32)
        return x, x

    return batch


def _images(seed: int) -> tuple[Array, Array]:
    x = np.random.default_rng(seed).standard_normal((32, 3, 32, 32), dtype=np.float32)
    return x, np.arange(32) % 10


CASES = (
    Case("mlp", lambda: ms.nn.MLP([1024] * 9, dtype="float32"), _mlp(1024, 64), 64),
    Case("mlp-narrow", lambda: ms.nn.MLP([256] * 9, dtype="float32"), _mlp(256, 32), 32),
    Case("gpt", lambda: gpt(256, 4, 8), lambda seed: tokens(seed, 8), 8),
    Case("gpt-bfloat16", lambda: gpt(256, 4, 8), lambda seed: tokens(seed, 8), 8, "bfloat16"),
    Case("convolutions", convolutions, _images, 32, None, ("tensor", "pipeline")),
)


def _planned(case: Case, way: str, machine: Machine, ranks: int, hosts: int) -> StepPlan:
    strategy, choices = WAYS[way]
    total = case.samples * (1 if strategy in ("tensor", "pipeline") else ranks)
    job = Job(ranks, hosts, strategy, batch_size=total, precision=case.precision, **choices)
    return plan_step(case.make(), job, machine)


def main(
    backend: ms.CommunicationBackend, arguments: argparse.Namespace
) -> tuple[dict[str, Any], Table]:
    """Measure and plan each case."""
    if arguments.nice:
        # Linux gives each session the same share of the cores, whatever the nice values inside.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(arguments.nice), encoding="ascii")
        os.nice(arguments.nice)
    machine = Machine.load(arguments.machine)
    ranks, hosts = backend.world_size, backend.node_count
    heads = ("", "planned", "measured", "/", "of ratios")
    table = figures_table(f"planned / measured, {ranks} ranks on {hosts} hosts", heads, ("",))
    rows = []
    for case in CASES:
        if arguments.models and case.name not in arguments.models:
            continue
        ways = [way for way in arguments.ways if WAYS[way][0] not in case.leaves_out]
        steps = {}
        for way in ways:
            strategy, choices = WAYS[way]
            shared = strategy in ("tensor", "pipeline")
            config = ms.ShardingConfiguration(backend, precision=case.precision)
            batch = case.batch(0 if shared else backend.rank)
            _, steps[way] = training_step(config, case.make(), strategy, *batch, **choices)
        found = dict(zip(ways, _seconds(backend, list(steps.values()), arguments), strict=True))
        plans = {way: _planned(case, way, machine, ranks, hosts) for way in ways}
        for way, plan in plans.items():
            rows.append({"model": case.name, "way": way, "measured": found[way], **plan.as_dict()})
            ratio = plan.seconds / found[way]
            of_base = f"{ratio * found[BASE] / plans[BASE].seconds:.2f}" if BASE in ways else ""
            times = milliseconds(plan.seconds), milliseconds(found[way])
            table.add_row(f"{case.name} {way}", *times, f"{ratio:.2f}", of_base)
    return {"steps": rows, "load": os.getloadavg()[0]}, table


def _seconds(
    backend: ms.CommunicationBackend, steps: list[Any], arguments: argparse.Namespace
) -> list[float]:
    """Return the lower quartile of each step's times, of which each is that of the slowest rank."""
    own: list[list[float]] = [[] for _ in steps]
    for _ in range(arguments.rounds):
        for step, seconds in zip(steps, own, strict=True):
            for count in range(-arguments.warmup, arguments.steps):
                backend.barrier()
                begun = time.perf_counter()
                step()
                if count >= 0:  # the first ones bring the model back into the caches
                    seconds.append(time.perf_counter() - begun)
    slowest = backend.all_gather(np.array([own])).max(axis=0)
    return [Timing(tuple(each)).quartiles[0] for each in slowest.tolist()]


def _ways(patterns: list[str]) -> Iterator[str]:
    for pattern in patterns:
        found = [way for way in WAYS if pattern in (way, way.split()[0], way.split()[-1])]
        if not found:
            raise SystemExit(f"--ways takes {', '.join(WAYS)}, or a part of one, got {pattern}")
        yield from found


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--machine", default="machine.json", help="file of mpishard bench machine")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="as ddp, 1f1b, 'zb-v m4', m8")
    parser.add_argument("--models", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--steps", type=positive, default=5, help="of a round")
    parser.add_argument("--warmup", type=positive, default=2, help="steps before those of a round")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--nice", type=int, default=0, help="priority; below 0 needs root")
    given = parser.parse_args()
    given.ways = list(dict.fromkeys(_ways(given.ways)))
    measure(main, given)
