"""Time of a step that tensor or pipeline parallelism divides, and of the same step on one rank.

mpishard run -n 2 benchmarks/speedup.py
mpishard run -n 2 benchmarks/speedup.py --way gpipe 1f1b --layers 6 --batch 16 --json FILE

All ways take turns in one job. While rank 0 steps alone, the other ranks sleep.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import measure, options, positive
from rich.table import Table

from mpishard import nn
from mpishard.cli.bench.step import CONTEXT, alone, gpt, tokens, training_step
from mpishard.cli.tables import figures_table, timing_cells
from mpishard.cli.wording import bytes_text, counted
from mpishard.communication import CommunicationBackend
from mpishard.communication.agreement import share_path
from mpishard.models.strategies.mesh_parallel import MeshModel
from mpishard.observe import RankShares, open_trace, summarize_trace, trace
from mpishard.pipeline import SCHEDULE_NAMES, measured_layer_costs
from mpishard.sharding import ShardingConfiguration
from mpishard.tensor import TensorParallelLayerPartitioner

TENSOR = "tensor"
"""The way without a pipeline: the tensor axis."""

WAYS = (TENSOR, *SCHEDULE_NAMES)

_ONE = "one rank"
_HEAD_SIZE = 64


@dataclass(frozen=True, slots=True)
class SpeedupResult:
    """Measurements of one way to share a step.

    Parameters
    ----------
    way : str
        ``one rank``, ``tensor``, or the name of a pipeline's schedule.
    seconds : tuple of float
        Time of each step.
    speedup : float
        Median time of one rank, divided by that of this way in the same run.
    limit : float
        Upper bound of the speed-up. For a pipeline: ranks times 1 - bubble times the balance of
        the stages; for the tensor axis: by the share of FLOPs that are split (Amdahl's law).
    bytes_sent : int
        Bytes that all ranks together send in one step.
    balance : float, optional
        Mean computing time of a rank in a step, divided by the largest; 1 if all compute equally
        long. None if it was not measured.
    overhead : float, optional
        Computing time of all ranks together, divided by the step of one rank: smaller
        micro-batches make smaller matrix products. None if it was not measured.
    waiting : float, optional
        Share of a step in which the rank that waits longest waits for its neighbours. None if it
        was not measured.
    """

    way: str
    seconds: tuple[float, ...]
    speedup: float = 1.0
    limit: float = 1.0
    bytes_sent: int = 0
    balance: float | None = None
    overhead: float | None = None
    waiting: float | None = None


@dataclass(frozen=True, slots=True)
class SpeedupBenchmark:
    """A GPT in float32 with AdamW, its batch, and the number of steps.

    Parameters
    ----------
    width, layers : int
        Size of the GPT, which has heads of 64, a vocabulary of 256 and sequences of 128 tokens.
    batch : int
        Sequences of a step, which all ranks compute together.
    micro_batches : int
        Micro-batches of a pipeline.
    steps, warmup : int
        Steps that count, and steps before them.
    ways : sequence of str
        `TENSOR`, and names of schedules.
    """

    width: int
    layers: int
    batch: int
    micro_batches: int
    steps: int = 10
    warmup: int = 2
    ways: Sequence[str] = ()

    def build_model(self) -> nn.GPT:
        """Return the model, without arrays yet.

        Raises
        ------
        ValueError
            For sizes that do not fit each other.
        """
        return gpt(self.width, self.layers, max(1, self.width // _HEAD_SIZE))

    def run(self, backend: CommunicationBackend) -> list[SpeedupResult]:
        """Measure all ways in turn, step by step, so that noise affects all alike. Collective.

        While rank 0 steps alone the others sleep. Layers are divided into stages by their measured
        time.
        """
        x, y = tokens(0, self.batch)
        single = alone()
        # Of a micro-batch, because stages compute one at a time.
        rows = max(1, self.batch // self.micro_batches)
        costs = measured_layer_costs(
            self.build_model(), x[:rows], y[:rows]
        )  # those of rank 0 count
        cut = {"partition_strategy": costs, "micro_batch_count": self.micro_batches}
        trained: dict[str, tuple[Any, Callable[[], object]]] = {}
        for way in (_ONE, *self.ways):
            config = ShardingConfiguration(single if way == _ONE else backend)
            strategy = {_ONE: "ddp", TENSOR: TENSOR}.get(way, "pipeline")
            options: dict[str, Any] = {"schedule": way, **cut} if strategy == "pipeline" else {}
            trained[way] = training_step(config, self.build_model(), strategy, x, y, **options)
        # Seconds and bytes sent of each step.
        figures: dict[str, list[tuple[float, ...]]] = {way: [] for way in trained}
        for number in range(-self.warmup, self.steps):
            for way, (model, step) in trained.items():
                # Otherwise a late rank would be measured as waiting of the others.
                backend.barrier()
                before, begun = _sent(model), time.perf_counter()
                if way == _ONE:
                    _on_one(backend, step)
                else:
                    step()
                took = time.perf_counter() - begun
                if number >= 0:
                    figures[way].append((took, _sent(model) - before))
        # Only now, because a trace takes time, too.
        shares = {
            way: _traced(backend, step, self.steps)
            for way, (_, step) in trained.items()
            if way not in (_ONE, TENSOR)
        }
        single.shutdown()
        one = float(np.median([took for took, _ in figures[_ONE]]))
        results = []
        for way, (model, _) in trained.items():
            sent = int(np.median([sent for _, sent in figures[way]]))
            total = int(backend.all_gather(np.array([sent])).sum())
            seconds = [took for took, _ in figures[way]]
            results.append(self._result(way, seconds, one, total, model, shares.get(way, [])))
        return results

    def _result(
        self,
        way: str,
        seconds: list[float],
        one: float,
        sent: int,
        model: Any,
        ranks: list[RankShares],
    ) -> SpeedupResult:
        limit = 1.0
        measured: tuple[float, ...] = ()
        if way == TENSOR:
            partitioner = TensorParallelLayerPartitioner(model.mesh.tensor)
            partitioner.partition(dict(self.build_model().chain.children), split_output=True)
            limit = partitioner.estimated_speedup((CONTEXT,))
        elif way != _ONE:
            computes = np.array([rank.computing / rank.steps for rank in ranks])
            balance = float(computes.mean() / computes.max())
            limit = len(ranks) * (1 - model.estimated_bubble_fraction) * balance
            waiting = max(rank.waiting / rank.seconds for rank in ranks)
            measured = (balance, float(computes.sum() / one), waiting)
        speedup = one / float(np.median(seconds))
        return SpeedupResult(way, tuple(seconds), speedup, limit, sent, *measured)

    def table(self, results: list[SpeedupResult], world_size: int) -> Table:
        """Return the results as a table."""
        model = self.build_model()
        title = (
            f"GPT, {counted(self.layers, 'layer')} of width {self.width}, "
            f"{model.parameter_count:,} parameters, {counted(self.batch, 'sequence')} of "
            f"{CONTEXT} tokens on {counted(world_size, 'rank')} together, "
            f"{counted(self.micro_batches, 'micro-batch')}, {counted(self.steps, 'step')}"
        )
        columns = (
            "way", "median", "spread", "speed-up", "limit", "balance", "compute / 1 rank",
            "waiting", "sent per step",
        )  # fmt: skip
        table = figures_table(title, columns, ("way",), gap=1)
        for result in results:
            table.add_row(
                result.way,
                *timing_cells(result.seconds),
                f"{result.speedup:.2f}",
                f"{result.limit:.2f}",
                *("" if v is None else f"{v:.2f}" for v in (result.balance, result.overhead)),
                "" if result.waiting is None else f"{result.waiting:.0%}",
                bytes_text(result.bytes_sent),
            )
        return table


def _traced(
    backend: CommunicationBackend, step: Callable[[], object], count: int
) -> list[RankShares]:
    """Return where the time of each rank goes in ``count`` steps, by a trace. Collective."""
    folder = tempfile.TemporaryDirectory(prefix="mpishard-") if backend.rank == 0 else None
    place = share_path(backend, None if folder is None else Path(folder.name))
    with trace(place, backend):
        for _ in range(count):
            step()
    backend.barrier()  # all files are written
    shares = summarize_trace(open_trace(place)).ranks
    backend.barrier()  # all ranks have read them
    if folder is not None:
        folder.cleanup()
    return shares


def _on_one(backend: CommunicationBackend, step: Callable[[], object]) -> None:
    """Step on rank 0, while the others sleep and leave it cores and memory. Collective."""
    if backend.rank == 0:
        step()
        backend.broadcast(np.zeros(1))
        return
    work = backend.broadcast_async(np.zeros(1))
    while not work.done:
        time.sleep(1e-3)
        backend.progress()
    work.wait()


def _sent(model: Any) -> int:
    """Return the bytes that this rank has sent along the axes of the model's mesh."""
    if not isinstance(model, MeshModel):
        return 0
    groups = {id(g): g for g in (model.mesh.pipeline, model.mesh.tensor, model.mesh.world)}
    return sum(group.traffic.total_bytes for group in groups.values())


def main(backend: CommunicationBackend, arguments: argparse.Namespace) -> tuple[Any, Table]:
    """Measure.

    Raises
    ------
    ValueError
        For one rank, which shares a step with nobody.
    """
    if backend.world_size == 1:
        text = "ranks that share a step are compared with one alone: start two or more, as -n 2"
        raise ValueError(text)
    sizes = (arguments.width, arguments.layers, arguments.batch, arguments.micro_batches)
    ways = WAYS if "all" in arguments.way else arguments.way
    benchmark = SpeedupBenchmark(*sizes, arguments.steps, arguments.warmup, ways)
    results = benchmark.run(backend)
    return {"speedup": [asdict(result) for result in results]}, benchmark.table(
        results, backend.world_size
    )


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument(
        "--way", nargs="+", choices=[*WAYS, "all"], default=[TENSOR, "1f1b", "zb-h1"]
    )
    for name, default, text in (
        ("width", 512, "width of the GPT"),
        ("layers", 4, "number of its blocks"),
        ("batch", 32, "sequences of a step, of all ranks together"),
        ("micro-batches", 8, "micro-batches of pipelines"),
        ("steps", 7, "steps that count"),
        ("warmup", 1, "steps before them"),
    ):
        parser.add_argument(
            f"--{name}", type=positive, default=default, help=f"{text}; default: {default}"
        )
    measure(main, parser.parse_args())
