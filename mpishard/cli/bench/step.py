"""``mpishard bench step``: time of a training step, with communication and without."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from rich.table import Table

from mpishard import nn
from mpishard.base import Array
from mpishard.cli.tables import figures_table, timing_cells
from mpishard.cli.wording import bytes_text, counted
from mpishard.communication import CommunicationBackend, InMemoryCommunicationBackend
from mpishard.distributed import as_distributed
from mpishard.models import ShardedModelBase
from mpishard.observe import Timing, memory_while, time_chain
from mpishard.optimizers import AdamW, uses_numba
from mpishard.sharding import ShardingConfiguration

ALONE = "alone"
"""The step without communication: a lower bound of the others."""

STRATEGIES = (ALONE, "ddp", "zero1", "zero2", "zero3", "fsdp")
"""Strategies whose ranks compute samples of their own."""

_HEADS = 8

CONTEXT = 128
"""Tokens of a sequence."""

_VOCABULARY = 256


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


def tokens(seed: int, sequences: int, context: int = CONTEXT) -> tuple[Array, Array]:
    """Return random inputs and targets of a GPT."""
    found = np.random.default_rng(seed).integers(0, _VOCABULARY, (sequences, context + 1))
    # Copies, because all columns but one are no contiguous array.
    return found[:, :-1].copy(), found[:, 1:].copy()


def alone() -> CommunicationBackend:
    """Return a backend of one rank, without communication."""
    # Ranks find each other by the name of their environment: no other rank has this one.
    backend = InMemoryCommunicationBackend(0, 1, f"alone-{uuid.uuid4()}")
    backend.initialize()
    return backend


def training_step(
    config: ShardingConfiguration,
    plain: nn.Model,
    strategy: str,
    x: Array,
    y: Array,
    rule: AdamW | None = None,
    **options: Any,
) -> tuple[ShardedModelBase, Callable[[], object]]:
    """Return the sharded model, and the step that trains it on one batch."""
    model = as_distributed(plain, config, strategy, **options)
    rule = rule or AdamW(1e-3, weight_decay=0.01)
    optimizer = as_distributed(rule, config, strategy, **options)
    return model, lambda: optimizer.step(model, x, y)


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
        Bytes that all ranks together send in one step.
    resting_bytes, peak_bytes : int or None
        Resident memory of all ranks together between steps, and its maximum.
    """

    strategy: str
    parameters: int
    seconds: tuple[float, ...]
    bytes_sent: int
    resting_bytes: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StepBenchmark:
    """A model, its batch on each rank, and the number of steps.

    Parameters
    ----------
    model : {"mlp", "gpt"}
        ``mlp`` is linear layers of width x width with ReLU between them, ``gpt`` a `nn.GPT` with
        8 heads and 256 words; both in float32, with AdamW.
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
    precision : {"bfloat16"}, optional
        See `ShardingConfiguration`; None computes in float32.
    context : int
        Tokens of a sequence, of ``gpt``.
    strategies : sequence of str
        Of `STRATEGIES`.
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
    precision: str | None = None
    context: int = CONTEXT
    strategies: Sequence[str] = ()
    key: ClassVar[str] = "steps"

    def build_model(self) -> nn.Model:
        """Return the model, without arrays yet.

        Raises
        ------
        ValueError
            For sizes that do not fit each other.
        """
        if self.model == "mlp":
            return nn.MLP([self.width] * (self.layers + 1), dtype="float32")
        return gpt(self.width, self.layers, _HEADS, self.context)

    def run(self, backend: CommunicationBackend) -> list[StepResult]:
        """Measure one strategy after the other. Collective."""
        return [result for name in self.strategies for result in self.run_one(backend, name)]

    def run_one(self, backend: CommunicationBackend, strategy: str) -> list[StepResult]:
        """Measure one strategy. Collective; a result for each setting of the checks."""
        model = self.build_model()
        if self.model == "mlp":
            # Each rank has samples of its own, as in training.
            generator = np.random.default_rng(backend.rank)
            # The cost of a step does not depend on the target.
            x = y = generator.standard_normal((self.batch, self.width), dtype=np.float32)
        else:
            x, y = tokens(backend.rank, self.batch, self.context)
        # The same engine and optimizer on a world of one: only communication is left out.
        own = alone() if strategy == ALONE else backend
        config = ShardingConfiguration(
            own,
            minimum_parameter_group_size=self.unit_size,
            check_collectives=self.checks != "off",
            precision=self.precision,
        )
        _, step = training_step(config, model, "ddp" if own is not backend else strategy, x, y)
        # The first steps allocate buffers and compile loops.
        time_chain(step, 1, self.warmup - 1)
        ways = {"": self.checks != "off"} | (
            {" without checks": False} if self.checks == "both" else {}
        )
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(self.steps):
            for way, checked in ways.items():  # in turn, so that noise affects both alike
                own.check_collectives = checked
                seconds[way] += time_chain(step, 1).seconds
        own.check_collectives = ways[""]
        # The bytes of one step, which is not timed.
        own.traffic.reset()
        step()
        sent = own.traffic.total_bytes
        backend.barrier()
        # In steps of their own, because the samples of memory would slow those that are timed.
        memory = memory_while(step, 8) if self.memory else None
        if own is not backend:
            own.shutdown()
        if isinstance(backend, InMemoryCommunicationBackend) and backend.rank > 0:
            memory = (0, 0)  # the ranks are one process
        # As integers, because the bytes of all ranks are added exactly.
        row = np.array([[sent, *(memory or (0, 0))]], np.int64)
        sent, *totals = (int(total) for total in backend.all_gather(row).sum(axis=0))
        resting, peak = totals if self.memory and memory is not None else (None, None)
        count = model.parameter_count
        return [
            StepResult(strategy + way, count, tuple(times), sent, resting, peak)
            for way, times in seconds.items()
        ]

    def table(self, results: list[StepResult], world_size: int) -> Table:
        """Return the results as a table; ratios are to the step alone, if it was measured."""
        title = (
            f"{self.model}, {counted(self.layers, 'layer')} of width {self.width}, "
            f"{results[0].parameters:,} parameters, {self.batch} per rank, "
            f"{counted(world_size, 'rank')}, {counted(self.steps, 'step')}, "
            f"{self.precision or 'float32'}, updates in "
            f"{'numba' if uses_numba() else 'NumPy'}"
        )
        columns = ("strategy", "median", "spread", "/ alone", "sent per step", "resident", "peak")
        table = figures_table(title, columns, ("strategy",))
        # None if "alone" was not among the strategies: the column of ratios is empty then.
        bound = next((Timing(r.seconds).median for r in results if r.strategy == ALONE), None)
        for result in results:
            table.add_row(
                result.strategy,
                *timing_cells(result.seconds),
                "" if bound is None else f"{Timing(result.seconds).median / bound:.2f}",
                bytes_text(result.bytes_sent),
                bytes_text(result.resting_bytes),
                bytes_text(result.peak_bytes),
            )
        return table
