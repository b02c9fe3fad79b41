"""Compare mpishard with PyTorch and JAX on this machine, all in turn, and with targets.

    python benchmarks/compare.py --peer-python PYTHON --jax-python PYTHON
    python benchmarks/compare.py --only mlp --repeats 9 --json results.json
    python benchmarks/compare.py --keep         # measures everything, for this processor's file
    python benchmarks/compare.py --report --page docs/performance.md    # shows all processors'

Every repeat starts fresh jobs of all sides. A ratio is taken within each repeat; the table has
the median of the ratios and their range. The peers' interpreters have PyTorch 2.6 or newer, for
the rows on the adapter mpishard too, and JAX with optax; without one its rows are left out. The
rows "products alone" and the bounds need the groups of their model and ``products``.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from jobs import (
    IMPORTS_ADAPTER,
    IMPORTS_JAX,
    IMPORTS_JAX_GPT,
    IMPORTS_LOOP,
    IMPORTS_OURS,
    IMPORTS_PEER,
    WORKLOADS,
    Runner,
    can,
    idle_memory,
)
from report import file_of, kept, markdown, replace_section, targets
from rich.console import Console
from rich.table import Table
from rows import LOOPS, ROWS

from mpishard.base import onednn
from mpishard.cli.wording import bytes_text

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Found:
    """Whether the peers' interpreters have what they need."""

    torch: bool
    adapter: bool
    jax: bool


class Steps:
    """One repeat of the jobs that train a workload, for the peers that are installed.

    Parameters
    ----------
    runner : Runner
        Starts the jobs.
    name : str
        One of `WORKLOADS`, with which the names of its samples begin.
    samples : dict
        Measurements by name; those of these jobs are added.
    """

    def __init__(self, runner: Runner, name: str, samples: Samples) -> None:
        self._runner, self._name, self._samples = runner, name, samples

    def _add(self, who: str, row: dict[str, Any]) -> None:
        self._samples[f"{self._name} {who}"].append(median(row["seconds"]))

    def ours(self, ranks: int, *, numba: bool = False, precision: str = "") -> None:
        """Our step; bfloat16 if there is oneDNN, else it is float32 of rounded operands."""
        if (numba and not find_spec("numba")) or (precision and onednn.library() is None):
            return
        words = ("--precision", precision) if precision else ()
        (row,) = self._runner.our_step(self._name, *words, ranks=ranks, numba=numba)
        self._add(f"ours {ranks} {precision or ('numba' if numba else '')}".strip(), row)

    def adapter(self) -> None:
        """PyTorch's module in our adapter, in both precisions."""
        self._add("adapter", self._runner.adapter_step(self._name))
        row = self._runner.adapter_step(self._name, "--precision", "bfloat16")
        self._add("adapter bfloat16", row)

    def peer(self, strategy: str, *, bfloat16: bool = False) -> None:
        """PyTorch's step on two ranks, or of one process for both batches on 2 threads."""
        options = ["--bfloat16"] if bfloat16 else []
        if strategy == "threads":
            both = str(2 * WORKLOADS[self._name].batch)
            options += ["--threads", "2", "--batch", both]
        ranks = 2 if strategy in ("fsdp2", "ddp") else 1
        how = "single" if strategy == "threads" else strategy
        row = self._runner.peer_step(self._name, how, *options, ranks=ranks)
        self._add(strategy + " bfloat16" * bfloat16, row)

    def jax(self) -> None:
        """JAX's step in both precisions."""
        self._add("jax", self._runner.jax_gpt(self._name))
        self._add("jax bfloat16", self._runner.jax_gpt(self._name, "--bfloat16"))


def compare_steps(runner: Runner, model: str, found: Found, samples: Samples) -> None:
    """One repeat of the jobs of the MLP or the GPT."""
    steps = Steps(runner, model, samples)
    steps.ours(2)
    steps.ours(2, numba=True)
    steps.ours(2, numba=True, precision="bfloat16")
    if found.adapter:
        steps.adapter()
    if found.torch:
        for strategy in ("fsdp2", "ddp"):
            steps.peer(strategy)
            steps.peer(strategy, bfloat16=True)
    steps.ours(1)
    if found.torch:
        steps.peer("single")
        steps.peer("threads")
        steps.peer("threads", bfloat16=True)
    if found.jax and model == "gpt":
        steps.jax()
    steps.ours(4)


def compare_large(runner: Runner, found: Found, samples: Samples) -> None:
    """One repeat of the jobs of the GPT of width 768: about two minutes."""
    steps = Steps(runner, "large", samples)
    steps.ours(2, numba=True)
    steps.ours(2, numba=True, precision="bfloat16")
    if found.torch:
        for strategy in ("fsdp2", "ddp", "threads"):
            steps.peer(strategy, bfloat16=True)
    if found.jax:
        steps.jax()


def compare_small(runner: Runner, samples: Samples) -> None:
    """Steps of a small model in shared memory and by messages; several jobs, which are short."""
    for _ in range(3):
        for name, arena in (("shared", "auto"), ("messages", "off")):
            for size, suffix in (("1024", ""), ("1000000", " large units")):
                words = ("--unit-size", size)
                (row,) = runner.our_step("small", *words, ranks=2, MPISHARD_ARENA=arena)
                samples[f"small {name}{suffix}"].append(median(row["seconds"]))


def compare_checks(runner: Runner, samples: Samples) -> None:
    """Jobs whose steps are with checks and without in turn."""
    for model in ("mlp", "gpt"):
        on, off = runner.our_step(model, "--checks", "both", ranks=2)
        samples[f"{model} checked"].append(median(on["seconds"]))
        samples[f"{model} unchecked"].append(median(off["seconds"]))


def compare_speedup(runner: Runner, samples: Samples) -> None:
    """One batch on two ranks together, tensor-parallel and as a pipeline, and on one alone."""
    for row in runner.speedup():
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
            "bench",
            "collectives",
            "-n",
            "--collective",
            "all_reduce",
            "--collective",
            "reduce_scatter",
            "--sizes",
            "8B,1MiB,8MiB,64MiB",
            "--repeats",
            str(max(9, repeats)),
            ranks=2,
            **variables,
        )
        for row in found["collectives"]:
            name = f"{prefix}{row['collective']} {bytes_text(row['nbytes'])} {row['way']}"
            samples[name] = row["seconds"]


def compare_memory(runner: Runner, peers: bool, samples: Samples) -> None:
    """Resident memory of two ranks at its greatest: of the MLP, and of a GPT in both precisions."""
    for precision in ("float32", "bfloat16"):
        found = runner.precision_memory(precision)
        samples[f"large activations {precision}"].append(found["activations"])
        samples[f"large memory {precision}"].append(found["bytes"])
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


def find_peers(runner: Runner) -> Found:
    """Return the peers that can be measured; print which rows are left out."""
    found = Found(
        can(runner.peer_python, IMPORTS_PEER),
        can(runner.adapter_python, IMPORTS_ADAPTER),
        can(runner.jax_python, IMPORTS_JAX_GPT),
    )
    left_out = []
    if not found.torch:
        left_out.append(
            f"{runner.peer_python} has no PyTorch with FSDP2: its rows are left out. Make an "
            "environment with `pip install torch` and give its interpreter as --peer-python"
        )
    elif not found.adapter:
        left_out.append(
            f"{runner.adapter_python} has not both PyTorch and mpishard: the adapter's rows are "
            "left out. Give an interpreter that has as --adapter-python"
        )
    if not found.jax:
        left_out.append(
            f"{runner.jax_python} has not both JAX and optax: JAX's rows are left out. Make an "
            "environment with `pip install jax optax` and give its interpreter as --jax-python"
        )
    for text in left_out:
        print(text, file=sys.stderr)
    return found


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
    groups = ["mlp", "gpt", "large", "small", "collectives", "memory", "checks", "products"]
    groups += ["speedup", "loops", "jax"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--adapter-python", metavar="PYTHON", help="default: --peer-python")
    parser.add_argument("--jax-python", metavar="PYTHON", help="default: --adapter-python")
    parser.add_argument(
        "--peer-optimizer", choices=["fused", "foreach", "default"], default="fused"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=groups, default=groups, help="default: all")
    parser.add_argument("--prefix", default="", help="put before every job, as 'taskset -c 0,1'")
    parser.add_argument("--json", type=Path, help="append to the results in this file, or make it")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="measure all, and replace this processor's file in benchmarks/results/processors",
    )
    parser.add_argument("--report", action="store_true", help="only print the kept results")
    parser.add_argument("--page", type=Path, help="write the report between the page's marks")
    parser.add_argument("--targets", type=Path, help="the same, beside what we want to reach")
    arguments = parser.parse_args()
    if arguments.keep and (arguments.json or arguments.only is not groups):
        # A file with its date and commit has results of one day and one commit alone.
        parser.error("--keep measures all groups, into a file of its own: no --only and no --json")
    if (arguments.page or arguments.targets) and not arguments.report:
        parser.error("--page and --targets are for --report, which has all processors")
    if arguments.repeats < 1:
        parser.error(f"--repeats must be 1 or more, got {arguments.repeats}")
    return arguments


def measures(runner: Runner, repeats: int) -> dict[str, Callable[[Samples], None]]:
    """Return the function of each group; groups whose libraries are missing are left out."""
    peers = find_peers(runner)
    found: dict[str, Callable[[Samples], None]] = {
        "mlp": lambda samples: compare_steps(runner, "mlp", peers, samples),
        "gpt": lambda samples: compare_steps(runner, "gpt", peers, samples),
        "large": lambda samples: compare_large(runner, peers, samples),
        "small": lambda samples: compare_small(runner, samples),
        "checks": lambda samples: compare_checks(runner, samples),
        "collectives": lambda samples: compare_collectives(runner, repeats, samples),
        "products": lambda samples: compare_products(runner, peers.torch, samples),
        "speedup": lambda samples: compare_speedup(runner, samples),
        "memory": lambda samples: compare_memory(runner, peers.torch, samples),
    }
    if peers.torch and peers.adapter:
        found["loops"] = lambda samples: compare_loops(runner, samples)
    if can(runner.adapter_python, IMPORTS_JAX):
        found["jax"] = lambda samples: compare_jax(runner, samples)
    return found


def main(arguments: argparse.Namespace) -> None:
    """Measure what is asked for, and print it."""
    if arguments.report:
        text, beside = markdown(kept()), targets(kept())
        print(text, beside, sep="\n\n")
        for page, section in ((arguments.page, text), (arguments.targets, beside)):
            if page:
                replace_section(page, section)
        return
    runner = Runner(
        arguments.peer_python,
        arguments.adapter_python or arguments.peer_python,
        shlex.split(arguments.prefix),
        arguments.peer_optimizer,
        arguments.jax_python or arguments.adapter_python or arguments.peer_python,
    )
    measure = measures(runner, arguments.repeats)
    measured = commit()  # before the results change a file
    result: dict[str, Any] = {}
    samples = defaultdict(list)
    before: dict[str, Any] = {}
    if arguments.keep:
        arguments.json = file_of(runner.machine["processor"])
    elif arguments.json and arguments.json.exists():
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
            # A group that ends early leaves no samples, so that those of all sides stay in pairs.
            for name, values in fresh.items():
                samples[name].extend(values)
            result = {
                "date": time.strftime("%Y-%m-%d"),
                "commit": measured,
                "machine": runner.machine,
                "peer": runner.peer or before.get("peer", ""),
                "jax": runner.jax or before.get("jax", ""),
                "peer_optimizer": arguments.peer_optimizer,
                "samples": samples,
            }
            if arguments.json:
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(samples)


def commit() -> str:
    """The commit that is measured, with "-dirty" if files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main(parse())
