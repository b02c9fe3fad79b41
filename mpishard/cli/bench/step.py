"""``mpishard bench step``: time of a training step on these ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from mpishard import nn
from mpishard.cli.bench.workload import alone, gpt, tokens, training_step
from mpishard.cli.tables import figures_table, timing_cells
from mpishard.cli.wording import bytes_text, counted, milliseconds
from mpishard.communication import CommunicationBackend, InMemoryCommunicationBackend
from mpishard.observe import Curve, Panel, Timing, memory_while, time_chain
from mpishard.optimizers.rules.compiled import uses_numba
from mpishard.sharding import ShardingConfiguration

__all__ = ["ALONE", "StepBenchmark", "StepResult", "step_panel", "step_table"]

ALONE = "alone"
"""The step that communicates with nobody: a lower bound of the others."""

_HEADS = 8


@dataclass(frozen=True, slots=True)
class StepResult:
    """Measurements of one strategy.

    Parameters
    ----------
    strategy : str
        ``alone``, or a `DistributedStrategy`.
    parameters : int
        Number of the model's parameters.
    seconds : tuple of float
        Time of each step, on rank 0.
    bytes_sent : int
        By all ranks together in one step.
    resting_bytes, peak_bytes : int or None
        Resident memory of all ranks together, between steps and at most.
    """

    strategy: str
    parameters: int
    seconds: tuple[float, ...]
    bytes_sent: int
    resting_bytes: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StepBenchmark:
    """A model, its batch on each rank, and how often it is stepped.

    Parameters
    ----------
    model : {"mlp", "gpt"}
        ``mlp`` is linear layers of width x width with ReLU between them, ``gpt`` a `nn.GPT` with
        8 heads on 256 tokens and sequences of 128; both in float32, with AdamW.
    width, layers : int
        Size of the model.
    batch : int
        Samples or sequences of one rank.
    steps, warmup : int
        Steps that count, and steps before them.
    unit_size : int
        ``minimum_parameter_group_size``.
    checks : {"on", "off", "both"}
        Whether the ranks' calls are compared; ``both`` takes turns from step to step.
    memory : bool
        Whether resident memory is measured too, in steps of their own.
    """

    model: str
    width: int
    layers: int
    batch: int
    steps: int = 20
    warmup: int = 5
    unit_size: int = 1024
    checks: str = "on"
    memory: bool = False

    def build_model(self) -> nn.Model:
        """Return the model, without arrays yet.

        Raises
        ------
        ValueError
            For sizes that do not fit each other.
        """
        if self.model == "mlp":
            return nn.MLP([self.width] * (self.layers + 1), dtype="float32")
        return gpt(self.width, self.layers, _HEADS)

    def run(self, backend: CommunicationBackend, strategy: str) -> list[StepResult]:
        """Measure one strategy. Collective; a result for each setting of the checks."""
        model = self.build_model()
        if self.model == "mlp":
            generator = np.random.default_rng(backend.rank)
            x = y = generator.standard_normal((self.batch, self.width), dtype=np.float32)
        else:
            x, y = tokens(backend.rank, self.batch)
        own = alone() if strategy == ALONE else backend
        config = ShardingConfiguration(
            own,
            minimum_parameter_group_size=self.unit_size,
            check_collectives=self.checks != "off",
        )
        _, step = training_step(config, model, "ddp" if own is not backend else strategy, x, y)
        time_chain(step, 1, self.warmup - 1)
        if self.checks == "both":
            timings = _in_turn(step, own, self.steps)
        else:
            timings = {"": time_chain(step, self.steps)}
        own.traffic.reset()
        step()
        sent = own.traffic.total_bytes
        backend.barrier()
        memory = memory_while(step, 8) if self.memory else None
        if own is not backend:
            own.shutdown()
        if isinstance(backend, InMemoryCommunicationBackend) and backend.rank > 0:
            memory = (0, 0)  # the ranks are one process
        row = np.array([[sent, *(memory or (0, 0))]], np.int64)
        sent, *totals = (int(total) for total in backend.all_gather(row).sum(axis=0))
        resting, peak = totals if self.memory and memory is not None else (None, None)
        count = model.parameter_count
        return [
            StepResult(strategy + suffix, count, timing.seconds, sent, resting, peak)
            for suffix, timing in timings.items()
        ]


def _in_turn(
    step: Callable[[], object], backend: CommunicationBackend, repeats: int
) -> dict[str, Timing]:
    """Time the step with checks and without, one after the other."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats):
        for checked, times in seconds.items():
            backend.check_collectives = checked
            times.extend(time_chain(step, 1).seconds)
    backend.check_collectives = True
    return {
        "": Timing(tuple(seconds[True])),
        " without checks": Timing(tuple(seconds[False])),
    }


def step_table(benchmark: StepBenchmark, results: list[StepResult], world_size: int) -> Table:
    """Return the results as a table; ratios are to the step alone, if it was measured."""
    title = (
        f"{benchmark.model}, {counted(benchmark.layers, 'layer')} of width {benchmark.width}, "
        f"{results[0].parameters:,} parameters, {benchmark.batch} per rank, "
        f"{counted(world_size, 'rank')}, {counted(benchmark.steps, 'step')}, updates in "
        f"{'numba' if uses_numba() else 'NumPy'}"
    )
    columns = ("strategy", "median", "spread", "/ alone", "sent per step", "resident", "peak")
    table = figures_table(title, columns, ("strategy",))
    bound = next((Timing(r.seconds).median for r in results if r.strategy == ALONE), None)
    for result in results:
        timing = Timing(result.seconds)
        table.add_row(
            result.strategy,
            *timing_cells(timing),
            "" if bound is None else f"{timing.median / bound:.2f}",
            bytes_text(result.bytes_sent),
            bytes_text(result.resting_bytes),
            bytes_text(result.peak_bytes),
        )
    return table


def step_panel(benchmark: StepBenchmark, results: list[StepResult], world_size: int) -> Panel:
    """Return the time of each step, one curve for each strategy."""
    curves = [
        Curve(
            f"{result.strategy}, median {milliseconds(Timing(result.seconds).median)}",
            range(1, len(result.seconds) + 1),
            [seconds * 1e3 for seconds in result.seconds],
        )
        for result in results
    ]
    title = f"{benchmark.model}, {results[0].parameters / 1e6:.1f}M, {counted(world_size, 'rank')}"
    return Panel(title, "step", "milliseconds", curves, logarithmic="")
