"""``mpishard bench speedup``: one batch on all ranks together, against one rank alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from mpishard import nn
from mpishard.cli.tables import figures_table, timing_cells
from mpishard.cli.wording import bytes_text, counted
from mpishard.communication import CommunicationBackend, InMemoryCommunicationBackend
from mpishard.distributed import as_distributed
from mpishard.models.programs.mesh_program import MeshProgram
from mpishard.models.strategies.mesh_model import MeshModel
from mpishard.observe import Timing
from mpishard.optimizers import AdamW
from mpishard.pipeline import measured_layer_costs
from mpishard.sharding import ShardingConfiguration
from mpishard.tensor import TensorParallelLayerPartitioner

__all__ = ["TENSOR", "SpeedupBenchmark", "SpeedupResult", "speedup_table"]

TENSOR = "tensor"
"""The way that is no schedule of a pipeline."""

_VOCABULARY = 256
_CONTEXT = 128
_HEAD_SIZE = 64


@dataclass(frozen=True, slots=True)
class SpeedupResult:
    """What was measured of one way to share a step.

    Parameters
    ----------
    way : str
        ``one rank``, ``tensor``, or the name of a pipeline's schedule.
    seconds : tuple of float
        Of each step.
    speedup : float
        The one rank's median over this one's, taken in the same run.
    limit : float
        What the speed-up could be at most: of a pipeline its ranks times 1 - bubble times how
        evenly stages are dealt; of the tensor axis by the FLOPs that are split (Amdahl).
    balance : float
        Mean over largest time that a rank computes in a step; 1 where all compute alike. NaN
        where it was not taken.
    overhead : float
        What all ranks compute together, over the one rank's step: smaller micro-batches make
        smaller matrix products. NaN where it was not taken.
    waiting : float
        The part of its time that the rank which waits most waits for its neighbours.
    bytes_sent : int
        In one step, by all ranks.
    """

    way: str
    seconds: tuple[float, ...]
    speedup: float = 1.0
    limit: float = 1.0
    balance: float = float("nan")
    overhead: float = float("nan")
    waiting: float = float("nan")
    bytes_sent: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SpeedupBenchmark:
    """A GPT in float32 with AdamW, its batch, and how often it is stepped.

    Parameters
    ----------
    width, layers : int
        Of the GPT, with heads of 64, a vocabulary of 256 and sequences of 128.
    batch : int
        Sequences of a step, which all ranks compute together.
    micro_batches : int
        Of pipelines.
    steps, warmup : int
        Steps that count, and steps before them.
    """

    width: int
    layers: int
    batch: int
    micro_batches: int
    steps: int = 10
    warmup: int = 2

    def build_model(self) -> nn.GPT:
        """The model, as yet without arrays.

        Raises
        ------
        ValueError
            For sizes that do not fit each other.
        """
        return nn.GPT(
            vocabulary_size=_VOCABULARY, context_length=_CONTEXT, width=self.width,
            heads=max(1, self.width // _HEAD_SIZE), layers=self.layers,
        )  # fmt: skip

    def run(self, backend: CommunicationBackend, ways: list[str]) -> list[SpeedupResult]:
        """Measure, in turn from step to step, so that what disturbs one disturbs all. Collective.

        While rank 0 steps alone the others sleep. Stages are dealt by the measured time of each
        layer.
        """
        generator = np.random.default_rng(0)
        tokens = generator.integers(0, _VOCABULARY, (self.batch, _CONTEXT + 1))
        x, y = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        alone = InMemoryCommunicationBackend(0, 1, f"alone-{id(tokens)}")
        alone.initialize()
        rows = max(1, self.batch // self.micro_batches)
        costs = measured_layer_costs(self.build_model(), x[:rows], y[:rows])  # rank 0's count
        steps: dict[str, Callable[[], object]] = {}
        models: dict[str, Any] = {}
        models["one rank"], steps["one rank"] = self._stepper(alone, "ddp", x, y)
        for way in ways:
            options = (
                {"strategy": TENSOR}
                if way == TENSOR
                else {
                    "strategy": "pipeline",
                    "schedule": way,
                    "partition_strategy": costs,
                    "micro_batch_count": self.micro_batches,
                }
            )
            models[way], steps[way] = self._stepper(backend, x=x, y=y, **options)
        seconds: dict[str, list[float]] = {way: [] for way in steps}
        computing: dict[str, list[tuple[float, float]]] = {way: [] for way in steps}
        sent = dict.fromkeys(steps, 0)
        for number in range(-self.warmup, self.steps):
            for way, step in steps.items():
                is_alone = way == "one rank"
                backend.barrier()
                before = _sent(models[way])
                begun = time.perf_counter()
                if not is_alone:
                    step()
                elif backend.rank == 0:
                    step()
                    backend.broadcast(np.zeros(1))
                else:
                    _sleep_until_rank_0_is_through(backend)
                took = time.perf_counter() - begun
                if number >= 0:
                    seconds[way].append(took)
                    sent[way] = _sent(models[way]) - before
                    computing[way].append(_computing(models[way]))
        results = []
        one = float(np.median(seconds["one rank"]))
        for way in steps:
            mine = np.median(np.array(computing[way]), axis=0)
            rows = backend.all_gather(np.array([[*mine, sent[way]]]))
            results.append(self._result(way, seconds[way], one, rows, models[way]))
        alone.shutdown()
        return results

    def _stepper(
        self, backend: CommunicationBackend, strategy: str, x: Any, y: Any, **options: Any
    ) -> tuple[Any, Callable[[], object]]:
        config = ShardingConfiguration(backend)
        model = as_distributed(self.build_model(), config, strategy, **options)
        optimizer = as_distributed(AdamW(1e-3, weight_decay=0.01), config, strategy, **options)
        return model, lambda: optimizer.step(model, x, y)

    def _result(
        self, way: str, seconds: list[float], one: float, rows: np.ndarray[Any, Any], model: Any
    ) -> SpeedupResult:
        median = float(np.median(seconds))
        result = SpeedupResult(way, tuple(seconds), one / median)
        if not isinstance(model, MeshModel):
            return result
        ranks = len(rows)
        if way == TENSOR:
            partitioner = TensorParallelLayerPartitioner(model.mesh.tensor)
            chain = self.build_model().chain
            partitioner.partition(dict(chain.children), split_output=True)
            limit = partitioner.estimated_speedup((_CONTEXT,))
            return SpeedupResult(
                way, tuple(seconds), one / median, limit, bytes_sent=int(rows[:, 2].sum())
            )
        computes, waits = rows[:, 0], rows[:, 1]
        balance = float(computes.mean() / computes.max())
        return SpeedupResult(
            way,
            tuple(seconds),
            one / median,
            ranks * (1 - model.estimated_bubble_fraction) * balance,
            balance,
            float(computes.sum() / one),
            float(waits.max() / median),
            int(rows[:, 2].sum()),
        )


def _sent(model: Any) -> int:
    """Bytes that this rank has sent along the axes of the model's mesh."""
    if not isinstance(model, MeshModel):
        return 0
    groups = {id(g): g for g in (model.mesh.pipeline, model.mesh.tensor, model.mesh.world)}
    return sum(group.traffic.total_bytes for group in groups.values())


def _computing(model: Any) -> tuple[float, float]:
    """Seconds that this rank has computed and waited in the last step of a pipeline."""
    program = model.engine.program if isinstance(model, MeshModel) else None
    if not isinstance(program, MeshProgram):
        return 0.0, 0.0
    record = program.last_record
    return record.computing(), record.waiting()


def _sleep_until_rank_0_is_through(backend: CommunicationBackend) -> None:
    """Wait without taking the processor's time, or its memory's, from rank 0."""
    work = backend.broadcast_async(np.zeros(1))
    while not work.done:
        time.sleep(1e-3)
        backend.progress()
    work.wait()


def speedup_table(
    benchmark: SpeedupBenchmark, results: list[SpeedupResult], world_size: int
) -> Table:
    """The results as a table."""
    model = benchmark.build_model()
    title = (
        f"GPT, {counted(benchmark.layers, 'layer')} of width {benchmark.width}, "
        f"{model.parameter_count:,} parameters, {counted(benchmark.batch, 'sequence')} of "
        f"{_CONTEXT} tokens on {counted(world_size, 'rank')} together, "
        f"{counted(benchmark.micro_batches, 'micro-batch')}, {counted(benchmark.steps, 'step')}"
    )
    columns = (
        "way", "median", "spread", "speed-up", "limit", "balance", "compute / 1 rank", "waiting",
        "sent per step",
    )  # fmt: skip
    table = figures_table(title, columns, ("way",))
    for result in results:
        table.add_row(
            result.way,
            *timing_cells(Timing(result.seconds)),
            f"{result.speedup:.2f}",
            f"{result.limit:.2f}",
            *("" if np.isnan(v) else f"{v:.2f}" for v in (result.balance, result.overhead)),
            "" if np.isnan(result.waiting) else f"{result.waiting:.0%}",
            bytes_text(result.bytes_sent),
        )
    return table
