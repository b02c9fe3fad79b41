"""The cost of comparing and logging calls, in a step of the model of examples/train_gpt.py.

mpishard run -n 2 benchmarks/checks.py
mpishard run -n 2 benchmarks/checks.py --strategy ddp --steps 60 --json FILE

The sum of the call log's time and of one header exchange for each collective is an upper bound.
"""

import argparse
import time
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import numpy as np
from harness import measure, options, positive
from rich.table import Table

import mpishard as ms
from mpishard.cli.bench.step import gpt, tokens, training_step
from mpishard.cli.tables import figures_table
from mpishard.cli.wording import counted, milliseconds
from mpishard.communication.contract.call import Call
from mpishard.observe import Timing, time_alternately, time_chain
from mpishard.optimizers import AdamW

LIMIT = 0.02
"""Share of a step that checks and call log may take."""

_AS_IS, _NO_CHECKS, _NO_LOG = "as it is", "without checks", "without call log"


@dataclass(frozen=True, slots=True)
class ChecksResult:
    """Measurements, in seconds on rank 0 unless the field says otherwise.

    Parameters
    ----------
    steps : dict of str to tuple of float
        Each step as it is, without checks, and without call log, in turn.
    collectives : int
        Number of collectives in a step.
    record_seconds : tuple of float
        Time that the call log took in each step.
    header_seconds : tuple of float
        Time of a collective that is only a header, on the slowest rank. It includes more than
        the check: the header travels there and back, and the call is logged.
    """

    steps: dict[str, tuple[float, ...]]
    collectives: int
    record_seconds: tuple[float, ...]
    header_seconds: tuple[float, ...]

    @property
    def step(self) -> float:
        """Median of a step as it is, in seconds."""
        return Timing(self.steps[_AS_IS]).median

    @property
    def record_share(self) -> float:
        """Share of a step that the call log takes."""
        return Timing(self.record_seconds).median / self.step

    @property
    def header_share(self) -> float:
        """Share of a step that headers would take if each were waited for: an upper bound."""
        return self.collectives * Timing(self.header_seconds).median / self.step

    def difference(self, without: str) -> float:
        """Return how much longer a step is than ``without``: the median over consecutive pairs."""
        ratios = np.array(self.steps[_AS_IS]) / np.array(self.steps[without])
        return float(np.median(ratios)) - 1

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        shares = {"record_share": self.record_share, "header_share": self.header_share}
        differences = {f"step / {w} - 1": self.difference(w) for w in (_NO_CHECKS, _NO_LOG)}
        return asdict(self) | shares | differences | {"limit": LIMIT}


@dataclass(frozen=True, slots=True)
class ChecksBenchmark:
    """The model of ``examples/train_gpt.py``, and the number of steps.

    Parameters
    ----------
    strategy : str
        A `DistributedStrategy`; the example's is ``fsdp``.
    layers, width, heads, context : int
        Size of the model.
    batch : int
        Sequences of a step, of all ranks together.
    steps : int
        Steps of each way.
    """

    strategy: str = "fsdp"
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    batch: int = 16
    steps: int = 30

    def run(self, backend: ms.CommunicationBackend) -> ChecksResult:
        """Measure. Collective; ends with the backend as it was."""
        config = ms.ShardingConfiguration(backend)
        model = gpt(self.width, self.layers, self.heads, self.context)
        rule = AdamW(3e-3, beta2=0.99, weight_decay=0.1, clip_global_norm=1.0)
        x, y = tokens(backend.rank, -(-self.batch // backend.world_size), self.context)
        _, step = training_step(config, model, self.strategy, x, y, rule)
        time_chain(step, 1, warmup=2)
        page, checks = backend.status, backend.check_collectives
        record = page.record
        seconds: dict[str, list[float]] = {_AS_IS: [], _NO_CHECKS: [], _NO_LOG: []}
        recorded, clocked = [], []

        def clock(call: Call, frame: FrameType | None) -> None:
            start = time.perf_counter()
            record(call, frame)
            clocked.append(time.perf_counter() - start)

        try:
            for _ in range(self.steps):
                for way, times in seconds.items():
                    backend.check_collectives = way != _NO_CHECKS
                    page.record = (lambda *_: None) if way == _NO_LOG else record  # type: ignore[method-assign]
                    times.extend(time_chain(step, 1).seconds)
            backend.check_collectives = True
            page.record = clock  # type: ignore[method-assign]
            for _ in range(self.steps):
                clocked.clear()
                step()
                recorded.append(sum(clocked))
        finally:
            vars(page).pop("record", None)  # restores the method of its class
            backend.check_collectives = checks
        # Outside a step, whose headers travel while layers compute: an upper bound.
        (header,) = time_alternately(backend, [lambda: backend.barrier_async().wait()], self.steps)
        return ChecksResult(
            {way: tuple(times) for way, times in seconds.items()},
            len(clocked),
            tuple(recorded),
            header.seconds,
        )

    def table(self, result: ChecksResult, world_size: int) -> Table:
        """Return the result as a table; percentages are of the step."""
        title = (
            f"GPT, {counted(self.layers, 'layer')} of width {self.width}, "
            f"{self.strategy}, {counted(world_size, 'rank')}: {milliseconds(result.step)} a step, "
            f"{result.collectives} collectives in it"
        )
        table = figures_table(title, ("", "a collective", "a step", "of the step", "limit"), ("",))
        record, header = Timing(result.record_seconds).median, Timing(result.header_seconds).median
        count = max(1, result.collectives)
        for name, seconds, share in (
            ("call log, clocked in the step", record / count, result.record_share),
            ("header alone, there and back", header, result.header_share),
        ):
            table.add_row(
                name, milliseconds(seconds), milliseconds(seconds * count), f"{share:.2%}"
            )
        both = result.record_share + result.header_share
        table.add_row("both, at most", "", "", f"{both:.2%}", f"{LIMIT:.0%}")
        for without in (_NO_CHECKS, _NO_LOG):
            table.add_row(f"a step / one {without}", "", "", f"{result.difference(without):+.2%}")
        return table


def main(backend: ms.CommunicationBackend, arguments: argparse.Namespace) -> tuple[Any, Table]:
    """Measure."""
    benchmark = ChecksBenchmark(arguments.strategy, steps=arguments.steps)
    result = benchmark.run(backend)
    return {"checks": result.as_dict()}, benchmark.table(result, backend.world_size)


if __name__ == "__main__":
    parser = options(__doc__)
    strategies = ["ddp", "zero1", "zero2", "fsdp"]
    parser.add_argument("--strategy", choices=strategies, default="fsdp", help="default: fsdp")
    parser.add_argument("--steps", type=positive, default=30, help="of each way; default: 30")
    measure(main, parser.parse_args())
