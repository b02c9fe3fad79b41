"""One job of `growth.py`: time of collectives, and of steps of several sizes, on its ranks.

mpishard run -n 2 benchmarks/growth_job.py --study parameters --json FILE
"""

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from harness import measure, options

import mpishard as ms
from mpishard.cli.bench.collectives import CollectiveBenchmark
from mpishard.cli.bench.step import ALONE, StepBenchmark
from mpishard.observe import Timing, time_chain
from mpishard.sharding import build_units

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)


@dataclass(frozen=True)
class Case:
    """An MLP, and the least size of its units."""

    width: int
    layers: int
    batch: int
    unit_size: int

    @property
    def units(self) -> list[int]:
        """Number of elements of each unit."""
        layer = self.width * (self.width + 1)
        return [unit.length for unit in build_units([layer] * self.layers, self.unit_size)]


STUDIES = {
    # 1, 4, 8.4, 25, 50 and 99 million parameters.
    "parameters": [Case(width, 8, 64, 1024) for width in (352, 704, 1024, 1760, 2496, 3520)],
    "ranks": [Case(1024, 8, 64, 1024)],
    # 32 layers of 65 792 parameters: from one layer in each unit to all in one.
    "units": [Case(256, 32, 16, 65_792 * layers) for layers in (1, 2, 4, 8, 16, 32)],
}


def figures(backend: ms.CommunicationBackend, case: Case) -> dict[str, Any]:
    """The step alone and under FSDP, and the update of all parameters."""
    steps = 12 if case.width <= 1024 else 6
    benchmark = StepBenchmark(
        "mlp", case.width, case.layers, case.batch, steps, 2, unit_size=case.unit_size
    )
    (alone,) = benchmark.run_one(backend, ALONE)
    (fsdp,) = benchmark.run_one(backend, "fsdp")
    timing = Timing(fsdp.seconds)
    return {
        **asdict(case),
        "units": case.units,
        "parameters": fsdp.parameters,
        "seconds": timing.median,
        "quartiles": timing.quartiles,
        "bytes_sent": fsdp.bytes_sent,
        "alone": Timing(alone.seconds).median,
        "update": update_seconds(backend, fsdp.parameters),
    }


def update_seconds(backend: ms.CommunicationBackend, length: int) -> float:
    """Time in which AdamW updates ``length`` elements, on all ranks at once."""
    rule = ms.optimizers.AdamW(1e-3, weight_decay=0.01)
    parameters, gradients, *state = (np.full(length, 0.1, np.float32) for _ in range(4))
    named = dict(zip(rule.needed_state(), state, strict=True))
    segments = (ms.optimizers.Segment("all", 0, length),)
    context = ms.optimizers.UpdateContext(step=1, learning_rate=1e-3, gradient_scale=1.0)
    backend.barrier()
    update = time_chain(lambda: rule.update(parameters, gradients, named, segments, context), 3, 1)
    return update.median


def main(backend: ms.CommunicationBackend, arguments: argparse.Namespace) -> tuple[Any, str]:
    """Measure."""
    kinds = ("reduce_scatter", "all_gather")
    rows = (
        [] if backend.world_size == 1 else CollectiveBenchmark(kinds, SIZES, repeats=5).run(backend)
    )
    cases = [figures(backend, case) for case in STUDIES[arguments.study]]
    found = {"collectives": [asdict(result) for result in rows], "cases": cases}
    return found, f"{arguments.study}: {len(cases)} sizes"


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--study", choices=list(STUDIES), required=True)
    measure(main, parser.parse_args())
