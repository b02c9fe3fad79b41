"""Loss against bytes of the GPT of examples/train_gpt.py, whose ranks send little.

    python benchmarks/little_communication.py                 # all ways, two thread-ranks
    mpishard run -n 4 benchmarks/little_communication.py --ways DDP int8
    python benchmarks/little_communication.py --steps 300     # shorter, with the same schedule

Text, model, rule, schedule, samples and validation are those of the example. Each line gives the
validation loss at the end in nats per byte, and the bytes that the ranks sent, relative to DDP's.
With ``--output FILE`` both are appended to that file of JSON lines, for each validation. A training
of the ranks behind a slow link, and the picture of such a file with the time that each takes there:

    benchmarks/slow_link.sh 4 100 .venv/bin/python benchmarks/little_communication.py --ways DDP
    python benchmarks/little_communication.py \
        --draw benchmarks/results/little_communication.jsonl PICTURE
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mpishard as ms

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import train_gpt

LINK = 100e6 / 8  # bytes a second in each direction, of each rank
GOAL = 1.4  # nats per byte
FSDP_SHARE = 1.5  # of DDP's bytes, at most: the last unit is not gathered twice
TIMED = 24  # steps: two periods of 12

Way = Callable[[Any, Any], Any]


def compressed(method: str, ratio: float = 0.1, **options: Any) -> Way:
    """Return a maker of an optimizer that compresses."""
    return lambda rule, config: ms.optimizers.GradientCompressionOptimizer(
        rule, config, ratio, method=method, **options
    )


def local(period: int, outer: Any = None, **options: Any) -> Way:
    """Return a maker of an optimizer whose ranks train alone for ``period`` steps."""
    return lambda rule, config: ms.optimizers.LocalSGDOptimizer(
        rule, config, period, outer, **options
    )


def late(delay: int) -> Way:
    """Return a maker of an optimizer that applies gradients ``delay`` steps later."""
    return lambda rule, config: ms.optimizers.AsyncSGDOptimizer(rule, config, delay)


def nesterov(rate: float, momentum: float) -> Any:
    """Return an outer rule."""
    return ms.optimizers.SGD(rate, momentum, nesterov=True)


WAYS: dict[str, Way] = {
    "DDP": ms.optimizers.DDPOptimizer,
    "int8": compressed("int8"),
    "quantization, ratio 0.1": compressed("quantization"),
    "top-k, 1 %": compressed("top-k", 0.01),
    "top-k, 1 %, from step 300": compressed("top-k", 0.01, start_step=300),
    "local steps, H = 10": local(10),
    "local steps, H = 50": local(50),
    "outer Nesterov 1.0, 0.5, H = 50": local(50, nesterov(1.0, 0.5)),
    "outer Nesterov 0.7, 0.8, H = 50": local(50, nesterov(0.7, 0.8)),
    "outer Nesterov 0.9, 0.7, H = 3, then 50, int8": local(
        50, nesterov(0.9, 0.7), exchange="int8", start_step=300, start_period=3
    ),
    "outer Nesterov 0.8, 0.7, H = 4, then 25, int8": local(
        25, nesterov(0.8, 0.7), exchange="int8", start_step=300, start_period=4
    ),
    "outer Nesterov 1.0, 0.5, H = 13, int8": local(13, nesterov(1.0, 0.5), exchange="int8"),
    "local steps, H = 13, int8": local(13, exchange="int8"),
    "late gradients, delay = 1": late(1),
    "late gradients, delay = 4": late(4),
}


class Curve:
    """Records validation losses, and the bytes that all ranks have sent until then.

    Attributes
    ----------
    rows : list of tuple
        Step, loss, bytes of all ranks, seconds without validation.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, int, float]] = []
        self._seconds = 0.0

    def on_start(self, run: Any, record: Any) -> None:
        """Begin to count."""
        run.backend.traffic.reset()

    def on_step(self, run: Any, record: Any) -> None:
        """Add the step's seconds."""
        self._seconds += record.step_seconds

    def on_evaluate(self, run: Any, record: Any) -> None:
        """Note a row."""
        sent = int(run.backend.all_reduce(np.array([run.backend.traffic.total_bytes]))[0])
        self.rows.append((record.step, record.score, sent, round(self._seconds, 2)))
        run.backend.print("   ", *self.rows[-1])


def train(backend: Any, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a way's training gives, the same on all ranks."""
    config = ms.ShardingConfiguration(backend, precision=settings["precision"])
    model = ms.DDPModel(train_gpt.gpt(settings), config)
    optimizer = WAYS[name](train_gpt.update_rule(settings), config)
    curve = Curve()
    optimizer.optimize(
        ms.OptimizationInputData(
            model=model, **train_gpt.training(settings), progress=False, callbacks=[curve]
        )
    )
    # DDP by messages, because in the memory of one node it sends nothing.
    per_step = 2 * (backend.world_size - 1) * model.parameter_count * model.dtype.itemsize
    return {
        "way": name, "ranks": backend.world_size, "settings": settings, "bytes": per_step,
        "step_seconds": {str(size): step_seconds(WAYS[name], size, settings) for size in (2, 4)},
        "rows": curve.rows,
    }  # fmt: skip


def step_seconds(way: Way, ranks: int, settings: dict[str, Any]) -> float:
    """Return a processor's seconds for a step of one of ``ranks`` ranks, without the link."""

    def steps(backend: Any) -> float:
        config = ms.ShardingConfiguration(backend, precision=settings["precision"])
        model = ms.DDPModel(train_gpt.gpt(settings), config)
        optimizer = way(train_gpt.update_rule(settings), config)
        if isinstance(optimizer, ms.optimizers.GradientCompressionOptimizer):
            optimizer.start_step = 0  # most steps of a training are compressed
        optimizer.bind(model)
        data = train_gpt.training(settings)
        rows = np.arange(max(1, settings["batch"] // ranks))
        x, y = data["x_train"][rows], data["y_train"][rows]
        optimizer.step(model, x, y)  # compiles
        began = time.thread_time()
        for _ in range(TIMED):
            optimizer.step(model, x, y)
        return (time.thread_time() - began) / TIMED

    return float(ms.run_in_threads(1, steps)[0])


def same_training(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs, and DDP and FSDP on as many ranks, which have the losses of the DDP run."""
    ddp = next(run for run in runs if run["way"] == "DDP")
    others = [run for run in runs if run is not ddp]
    found = []
    for ranks in sorted({run["ranks"] for run in runs}):
        each = ddp["bytes"] / (ddp["ranks"] - 1) * (ranks - 1)
        for way, share in (("DDP", 1.0), ("FSDP", FSDP_SHARE)):
            rows = [(step, loss, step * each * share, 0) for step, loss, _, _ in ddp["rows"]]
            found.append(ddp | {"way": way, "ranks": ranks, "bytes": each, "rows": rows})
    return [*found, *others]


def seconds_at(found: dict[str, Any], steps: float, sent: float) -> float:
    """Return the time of so many steps and bytes, if each rank has a processor and a link."""
    return steps * found["step_seconds"][str(found["ranks"])] + sent / found["ranks"] / LINK


def at_goal(found: dict[str, Any]) -> tuple[float, float] | None:
    """Return steps and bytes at which the loss, between validations a line, is `GOAL`."""
    for (step, loss, sent, _), (later, lower, more, _) in itertools.pairwise(found["rows"]):
        if lower <= GOAL < loss:
            share = (loss - GOAL) / (loss - lower)
            return step + share * (later - step), sent + share * (more - sent)
    return None


def draw(source: Path, picture: Path) -> None:
    """Draw the losses over seconds and bytes, and print a line for each run."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    runs = same_training([json.loads(line) for line in source.read_text().splitlines()])
    sizes = sorted({run["ranks"] for run in runs})
    ways = list(dict.fromkeys(run["way"] for run in runs))
    figure, axes = plt.subplots(
        len(sizes), 2, figsize=(10, 3.6 * len(sizes)), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    lines = {}
    for found in runs:
        steps, losses, sent, _ = (list(column) for column in zip(*found["rows"], strict=True))
        seconds = [seconds_at(found, *pair) for pair in zip(steps, sent, strict=True)]
        goal = at_goal(found)
        left, right = axes[sizes.index(found["ranks"])]
        style = {"marker": ".", "color": f"C{ways.index(found['way'])}"}
        (lines[found["way"]],) = left.plot(seconds, losses, **style)
        right.plot([each / 1e6 for each in sent], losses, **style)
        print(
            f"{found['way']:24} {found['ranks']} ranks, loss {losses[-1]:.3f} after {steps[-1]} "
            f"steps, {sent[-1] / steps[-1] / found['bytes']:7.2%} of DDP's bytes, "
            f"{seconds[-1]:4.0f} s; {GOAL} after "
            + (f"{goal[0]:.0f} steps, {seconds_at(found, *goal):.0f} s" if goal else "more")
        )
    for (left, right), ranks in zip(axes, sizes, strict=True):
        left.set(xscale="log", ylabel="validation loss, nats per byte",
                 xlabel="seconds, with links of 100 Mbit/s", title=f"{ranks} ranks")  # fmt: skip
        right.set(xscale="log", xlabel="MB sent by all ranks", title=f"{ranks} ranks")
        for each in (left, right):
            each.axhline(GOAL, color="grey", linewidth=0.5)
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=4, fontsize="small"
    )
    figure.savefig(picture, dpi=90)


def run(backend: Any, given: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Train in each way that was asked for, and print a line for it."""
    # A whole name selects one way: "int8" is also a word in the names of others.
    for name in [n for n in WAYS if any(w == n if w in WAYS else w in n for w in given.ways)]:
        found = train(backend, name, settings)
        step, loss, sent, seconds = found["rows"][-1]
        share = sent / step / max(1, found["bytes"])  # one rank sends nothing
        backend.print(f"{name:28} {loss:.4f}  {share:7.2%}  {seconds:.0f} s")
        if given.output and backend.rank == 0:
            with given.output.open("a") as file:
                file.write(json.dumps(found) + "\n")


def main() -> None:
    """Read the options, and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2, help="thread-ranks without a launcher")
    parser.add_argument("--steps", type=int, default=train_gpt.DEFAULTS["steps"])
    parser.add_argument("--ways", nargs="+", default=[""], help="names of ways, or words in them")
    parser.add_argument("--output", type=Path, help="file of JSON lines to add the figures to")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=JSON", help="settings")
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("FILE", "PICTURE"))
    given = parser.parse_args()
    if given.draw:
        draw(*given.draw)
        return
    settings = train_gpt.DEFAULTS | {"steps": given.steps}
    settings |= {k: json.loads(v) for k, v in (each.split("=", 1) for each in given.set)}
    ms.launch(run, given, settings, world_size=given.n)


if __name__ == "__main__":
    main()
