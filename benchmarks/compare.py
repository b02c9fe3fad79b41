"""Compare mpishard with PyTorch on this machine, both sides in turn, beside the targets.

    python benchmarks/compare.py --peer-python PYTHON
    python benchmarks/compare.py --only mlp --repeats 9 --json results.json
    python benchmarks/compare.py --report results.json --page docs/performance.md

Every repeat starts fresh jobs of both sides. A ratio is taken within each repeat; the table has
the median of the ratios and their range. PYTHON is an interpreter with PyTorch 2.6 or newer, for
the rows on the adapter one that has mpishard too; without one its rows are left out.
"""

import argparse
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from jobs import (
    IMPORTS_ADAPTER,
    IMPORTS_JAX,
    IMPORTS_LOOP,
    IMPORTS_OURS,
    IMPORTS_PEER,
    Runner,
    can,
    idle_memory,
)
from report import markdown, replace_section
from rich.console import Console
from rich.table import Table
from rows import LOOPS, ROWS

from mpishard import onednn
from mpishard.cli.wording import bytes_text

Samples = dict[str, list[float]]


def compare_steps(runner: Runner, model: str, peers: bool, adapter: bool, samples: Samples) -> None:
    """One repeat of the step's jobs."""
    batch = {"mlp": 64, "gpt": 8}[model]

    def ours(ranks: int, *words: str, numba: bool = False) -> None:
        (row,) = runner.our_step(model, *words, ranks=ranks, numba=numba)
        name = f"{model} ours {ranks}" + (" bfloat16" if words else " numba" if numba else "")
        samples[name].append(median(row["seconds"]))

    def peer(name: str, strategy: str, *options: str, ranks: int = 1) -> None:
        row = runner.peer_step(model, strategy, *options, ranks=ranks)
        samples[f"{model} {name}"].append(median(row["seconds"]))

    ours(2)
    if find_spec("numba"):
        ours(2, numba=True)
        if onednn.library() is not None:  # else bfloat16 is float32 of rounded operands
            ours(2, "--precision", "bfloat16", numba=True)
    if adapter:
        row = runner.adapter_step(model)
        samples[f"{model} adapter"].append(median(row["seconds"]))
        row = runner.adapter_step(model, "--precision", "bfloat16")
        samples[f"{model} adapter bfloat16"].append(median(row["seconds"]))
    if peers:
        peer("fsdp2", "fsdp2", ranks=2)
        peer("fsdp2 bfloat16", "fsdp2", "--bfloat16", ranks=2)
        peer("ddp", "ddp", ranks=2)
        peer("ddp bfloat16", "ddp", "--bfloat16", ranks=2)
    ours(1)
    if peers:
        peer("single", "single")
        both = ("--threads", "2", "--batch", str(2 * batch))
        peer("threads", "single", *both)
        peer("threads bfloat16", "single", *both, "--bfloat16")
    ours(4)


def compare_checks(runner: Runner, samples: Samples) -> None:
    """Jobs whose steps are with checks and without in turn."""
    for model in ("mlp", "gpt"):
        on, off = runner.our_step(model, "--checks", "both", ranks=2)
        samples[f"{model} checked"].append(median(on["seconds"]))
        samples[f"{model} unchecked"].append(median(off["seconds"]))


def compare_speedup(runner: Runner, samples: Samples) -> None:
    """One batch on two ranks together, tensor-parallel and as a pipeline, and on one alone."""
    found = runner.ours("bench", "speedup", "-n", "--steps", "7", ranks=2)
    for row in found["speedup"]:
        samples[f"shared {row['way']}"].append(median(row["seconds"]))


def compare_products(runner: Runner, peers: bool, samples: Samples) -> None:
    """The matrix products alone, in both libraries."""
    for library in ("numpy", "torch") if peers else ("numpy",):
        for model, seconds in runner.products(library).items():
            samples[f"{model} products {library}"].append(seconds)


def compare_collectives(runner: Runner, repeats: int, samples: Samples) -> None:
    """One job on shared memory and one by plain messages; each has its repeats inside."""
    for variables, prefix in (({}, ""), ({"MPISHARD_ARENA": "off"}, "plain ")):
        found = runner.ours(
            *(
                "bench",
                "collectives",
                "-n",
                "--collective",
                "all_reduce",
                "--collective",
                "reduce_scatter",
            ),
            *("--sizes", "8B,1MiB,8MiB,64MiB", "--repeats", str(max(9, repeats))),
            ranks=2,
            **variables,
        )
        for row in found["collectives"]:
            name = f"{prefix}{row['collective']} {bytes_text(row['nbytes'])} {row['way']}"
            samples[name] = row["seconds"]


def compare_memory(runner: Runner, peers: bool, samples: Samples) -> None:
    """Resident memory of two ranks, at its greatest in the MLP's steps, above idle imports."""
    (row,) = runner.our_step("mlp", "--memory", ranks=2)
    idle = idle_memory(sys.executable, IMPORTS_OURS, 2)
    samples["mlp memory ours"].append(row["peak_bytes"] - idle)
    if peers:
        peer = runner.peer_step("mlp", "fsdp2", "--memory", ranks=2)
        idle = idle_memory(runner.peer_python, IMPORTS_PEER, 2)
        samples["mlp memory fsdp2"].append(peer["peak_bytes"] - idle)


def compare_loops(runner: Runner, samples: Samples) -> None:
    """Loops of PyTorch with `mpishard.torch`, FSDP2 and DDP: time, processor time, memory."""
    pythons = {"fsdp2": runner.peer_python, "mst-fsdp": runner.adapter_python}
    idle = {name: idle_memory(pythons[name], code, 2) for name, code in IMPORTS_LOOP.items()}
    for model in LOOPS:
        for strategy in ("fsdp2", "mst-fsdp", "ddp", "mst-ddp"):
            row = runner.loop_step(model, strategy)
            name = f"loop {model} {strategy}"
            samples[name].append(median(row["seconds"]))
            samples[f"{name} processor"].append(row["processor"])
            if strategy in idle:
                samples[f"{name} memory"].append(row["peak_bytes"] - idle[strategy])


def compare_jax(runner: Runner, samples: Samples) -> None:
    """The step of a loss in JAX on ranks, and without mpishard."""
    for how in ("ranks", "one", "devices"):
        samples[f"jax {how}"].append(median(runner.jax_step(how)["seconds"]))


def show(samples: Samples) -> None:
    """The table on the terminal."""
    table = Table()
    for column in ("", "target", "measured", "lowest", "highest"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in ROWS:
        values = row.values(samples)
        if values:
            found = median(values)
            texts = [row.format(value) for value in (row.target, found, min(values), max(values))]
            colour = "green" if found <= row.target else "red"
            texts[1] = f"[{colour}]{texts[1]}[/]"
            table.add_row(row.text, *texts)
    Console(width=max(100, Console().width), highlight=False).print(table)


def parse() -> argparse.Namespace:
    """The command line."""
    groups = ["mlp", "gpt", "collectives", "memory", "checks", "products", "speedup", "loops"]
    groups += ["jax"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--adapter-python", metavar="PYTHON", help="default: --peer-python")
    parser.add_argument(
        "--peer-optimizer", choices=["fused", "foreach", "default"], default="fused"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=groups, default=groups, help="default: all")
    parser.add_argument("--prefix", default="", help="put before every job, as 'taskset -c 0,1'")
    parser.add_argument("--json", type=Path, help="add to the results in this file, or begin it")
    parser.add_argument("--report", type=Path, metavar="FILE", help="measure nothing, print these")
    parser.add_argument("--page", type=Path, help="put the results between the marks of this page")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats must be 1 or more, got {arguments.repeats}")
    return arguments


def measures(runner: Runner, repeats: int) -> dict[str, Callable[[Samples], None]]:
    """What measures each group; a group whose libraries are not there is left out, and said."""
    peers = can(runner.peer_python, IMPORTS_PEER)
    adapter = can(runner.adapter_python, IMPORTS_ADAPTER)
    if not peers:
        print(
            f"{runner.peer_python} has no PyTorch with FSDP2: its rows are left out. Make an "
            "environment with `pip install torch` and give its interpreter as --peer-python",
            file=sys.stderr,
        )
    elif not adapter:
        print(
            f"{runner.adapter_python} has not both PyTorch and mpishard: the adapter's rows are "
            "left out. Give an interpreter that has as --adapter-python",
            file=sys.stderr,
        )
    found: dict[str, Callable[[Samples], None]] = {
        "mlp": lambda samples: compare_steps(runner, "mlp", peers, adapter, samples),
        "gpt": lambda samples: compare_steps(runner, "gpt", peers, adapter, samples),
        "checks": lambda samples: compare_checks(runner, samples),
        "collectives": lambda samples: compare_collectives(runner, repeats, samples),
        "products": lambda samples: compare_products(runner, peers, samples),
        "speedup": lambda samples: compare_speedup(runner, samples),
        "memory": lambda samples: compare_memory(runner, peers, samples),
    }
    if peers and adapter:
        found["loops"] = lambda samples: compare_loops(runner, samples)
    if can(runner.adapter_python, IMPORTS_JAX):
        found["jax"] = lambda samples: compare_jax(runner, samples)
    return found


def main(arguments: argparse.Namespace) -> None:
    """Measure what is asked for, and print it."""
    if arguments.report:
        result = json.loads(arguments.report.read_text(encoding="utf-8"))
        print(markdown(result))
        if arguments.page:
            replace_section(arguments.page, markdown(result))
        return
    runner = Runner(
        arguments.peer_python,
        arguments.adapter_python or arguments.peer_python,
        shlex.split(arguments.prefix),
        arguments.peer_optimizer,
    )
    measure = measures(runner, arguments.repeats)
    result: dict[str, Any] = {}
    samples = defaultdict(list)
    if arguments.json and arguments.json.exists():
        before = json.loads(arguments.json.read_text(encoding="utf-8"))
        samples.update(before["samples"])
    for repeat in range(arguments.repeats):
        for group in arguments.only:
            # The repeats of collectives are inside the job.
            if group not in measure or (group == "collectives" and repeat > 0):
                continue
            print(f"repeat {repeat + 1} of {arguments.repeats}: {group}", file=sys.stderr)
            fresh: Samples = defaultdict(list)
            measure[group](fresh)
            # A group that ends early leaves nothing: the sides' samples stay in pairs.
            for name, values in fresh.items():
                samples[name].extend(values)
            result = {
                "machine": runner.machine,
                "peer": runner.peer,
                "peer_optimizer": arguments.peer_optimizer,
                "samples": samples,
            }
            if arguments.json:
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(samples)
    if arguments.page:
        replace_section(arguments.page, markdown(result))


if __name__ == "__main__":
    main(parse())
