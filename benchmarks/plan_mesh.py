"""The choice of `mpishard plan mesh` beside the measured times of all ways that fit.

    mpishard bench machine -n 2
    mpishard run -n 2 benchmarks/plan_mesh.py --machine machine.json --json FILE

Two models, each without a limit of memory and with limits that half, a quarter and a tenth of the
ways fit. Ways take turns, round by round, so that a busy moment is not one way's alone; the least
time of each counts.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import measure, options, positive
from rich.table import Table

import mpishard as ms
from mpishard.cli.bench.step import gpt, tokens, training_step
from mpishard.cli.tables import figures_table
from mpishard.cli.wording import milliseconds
from mpishard.planning import Candidate, Job, Machine, memory_of, plan_mesh


def models() -> dict[str, tuple[Any, Any, Any]]:
    """Return a factory of each model, and a batch of all ranks together."""
    x = np.random.default_rng(0).standard_normal((128, 1024), dtype=np.float32)
    return {
        "mlp": (lambda: ms.nn.MLP([1024] * 9, dtype="float32"), x, x),
        "gpt": (lambda: gpt(256, 4, 8, 128), *tokens(0, 16, 128)),
    }


def main(
    backend: ms.CommunicationBackend, arguments: argparse.Namespace
) -> tuple[dict[str, Any], Table]:
    """Measure the ways of each model."""
    machine = Machine.load(arguments.machine)
    table = figures_table(
        "the choice, and the fastest of all that fit",
        ("ways", "chosen", "step", "fastest", "step", "slower"),
        ("ways", "chosen", "fastest"),
    )
    rows, choices = [], []
    for name, (make, x, y) in models().items():
        job = Job(backend.world_size, batch_size=len(x))
        free = plan_mesh(make, job, machine, 1 << 50)
        assert free.chosen is not None, "all memory suffices"
        ways = free.candidates[: arguments.ways]
        seconds = _seconds(backend, make, x, y, ways, arguments.rounds)
        needs = [memory_of(make(), each.step.job).host.total for each in ways]
        for each, measured, needed in zip(ways, seconds, needs, strict=True):
            row = {"measured": measured, "host_bytes": needed}
            rows.append({"model": name, **each.step.as_dict(), **row})
        ordered = sorted(needs)
        for limit in (ordered[-1], *(ordered[len(ways) // part] for part in (2, 4, 10))):
            fits = [i for i, needed in enumerate(needs) if needed <= limit]
            chosen, fastest = fits[0], min(fits, key=lambda i: seconds[i])
            slower = seconds[chosen] / seconds[fastest] - 1
            names = [ways[i].step.job.name for i in (chosen, fastest)]
            choices.append({"model": name, "limit": limit, "chosen": names[0], "slower": slower})
            table.add_row(
                f"{len(fits)} of {name}",
                names[0],
                milliseconds(seconds[chosen]),
                names[1],
                milliseconds(seconds[fastest]),
                f"{slower:.1%}",
            )
    return {"ways": rows, "choices": choices}, table


def _seconds(
    backend: ms.CommunicationBackend,
    make: Callable[[], Any],
    x: Any,
    y: Any,
    ways: tuple[Candidate, ...],
    rounds: int,
) -> list[float]:
    """Return the least wall time of a step of each way, of the slowest rank."""
    found = np.full((1, len(ways)), np.inf)
    for _ in range(rounds):
        for number, way in enumerate(ways):
            job = way.step.job
            size = job.sizes[2]
            mesh = ms.ProcessMesh(backend, *job.sizes, order=job.order)
            mine = slice(mesh.data_rank, None, size)
            _, step = training_step(
                ms.ShardingConfiguration(backend),
                make(),
                job.strategy,
                x[mine],
                y[mine],
                **job.options,
            )
            step()  # makes what later steps use again
            for _ in range(2):
                backend.barrier()
                begun = time.perf_counter()
                step()
                found[0, number] = min(found[0, number], time.perf_counter() - begun)
    return list(map(float, backend.all_gather(found).max(axis=0)))


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--machine", default="machine.json", help="file of mpishard bench machine")
    parser.add_argument("--ways", type=positive, default=1000, help="the fastest ones by the plan")
    parser.add_argument("--rounds", type=positive, default=3)
    measure(main, parser.parse_args())
