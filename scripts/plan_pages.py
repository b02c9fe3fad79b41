"""Write what docs/plan-time.md shows: the published table beside the plan, and scaling curves.

python scripts/plan_pages.py table
python scripts/plan_pages.py curves docs/images/scaling.png
"""

from __future__ import annotations

import argparse
import itertools
import sys

from mpishard import nn
from mpishard.observe import Curve, Panel, plot_panels
from mpishard.pipeline import ActivationCheckpointConfig, Interleaved1F1BSchedule
from mpishard.planning import Job, Link, Machine, PassRate, ProductRate, plan_step

# Narayanan et al., SC 2021 (arXiv:2104.04473), table 1: billions of parameters, heads, width,
# layers, tensor and pipeline size, GPUs, batch, achieved TFLOP/s per GPU.
MEGATRON = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)
_TOKENS, _WORDS = 2048, 51_200
_PEAK, _EFFICIENCY = 312e12, 0.63
_AGAIN = ActivationCheckpointConfig(enabled=True, checkpoint_every_n_layers=1)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def a100() -> Machine:
    """Return a node of 8 A100 GPUs of 80 GB, as the paper states it, and the efficiency above."""
    return Machine(
        "8 A100 (80 GB), NVLink, 8 HDR InfiniBand cards",
        8,
        (ProductRate("bfloat16", 4096, 4096, 4096, _PEAK * _EFFICIENCY),),
        (2.0e12 * 0.8,) * 8,
        Link(10e-6, 300e9 * 0.8),
        Link(10e-6, 8 * 25e9 * 0.8, 1e-6),
        call_seconds=5e-6,
    )


def published(row: tuple[float, ...]) -> float:
    """Return the seconds of an iteration by equation 3 of the paper and the achieved rate."""
    _, _, width, layers, _, _, gpus, batch, achieved = row
    flops = 96 * batch * _TOKENS * layers * width**2
    flops *= 1 + _TOKENS / (6 * width) + _WORDS / (16 * layers * width)
    return flops / (gpus * achieved * 1e12)


def planned(row: tuple[float, ...]) -> float:
    """Return the planned seconds of the same iteration."""
    _, heads, width, layers, tensor, pipeline, gpus, batch, _ = (int(value) for value in row)
    model = nn.GPT(
        vocabulary_size=_WORDS, context_length=_TOKENS, width=width, heads=heads, layers=layers
    )
    data = gpus // (tensor * pipeline)
    # Stages of whole layers: 105 layers on 35 ranks are 3 of a rank.
    stages = 2 if layers // pipeline % 2 == 0 else 3
    job = Job(
        gpus,
        gpus // 8,
        "hybrid",
        (pipeline, tensor, data),
        batch_size=batch,
        micro_batch_count=batch // data,
        schedule=Interleaved1F1BSchedule(stages) if pipeline > 1 else None,
        precision="bfloat16",
        checkpoint_config=_AGAIN,
        minimum_parameter_group_size=1,
        order=("pipeline", "data", "tensor"),
    )
    return plan_step(model, job, a100()).seconds


def table() -> None:
    """Print the table as Markdown."""
    _say("| parameters | GPUs | TP x PP | batch | published | planned | difference |")
    _say("|---|---|---|---|---|---|---|")
    for row in MEGATRON:
        theirs, ours = published(row), planned(row)
        _say(
            f"| {row[0]} billion | {row[6]} | {row[4]} x {row[5]} | {row[7]} | {theirs:.2f} s "
            f"| {ours:.2f} s | {ours / theirs - 1:+.0%} |",
        )


def cpu_nodes(gigabits: float) -> Machine:
    """Return nodes of 64 cores with a rank on each of 16, by this machine's products."""
    return Machine(
        f"{gigabits:g} Gbit/s",
        16,
        (ProductRate("float32", 256, 256, 256, 4 * 90e9),),
        (8e9,) * 16,
        Link(5e-6, 5e9),
        Link(20e-6, gigabits / 8 * 1e9, 2e-6),
        (
            PassRate("GELU", "float32", 0.2e-9, 0.05e-9),
            PassRate("LayerNorm", "float32", 0.1e-9, 0.15e-9),
            PassRate("CausalAttention", "float32", 0.2e-9, 0.15e-9),
        ),
        5e-6,
        100e-6,
        500e-6,
    )


_BATCH = 512  # sequences of 1024 tokens: half a million tokens, as for GPT-2 and GPT-3


def curves(path: str) -> None:
    """Draw tokens per second against the number of ranks, and print where each line ends."""
    model = nn.GPT(vocabulary_size=50_257, context_length=1024, width=768, heads=12, layers=12)
    panels = []
    _say("| | 25 Gbit/s | 200 Gbit/s |\n|---|---|---|")
    cells: dict[str, list[str]] = {}
    for gigabits in (25, 200):
        machine = cpu_nodes(gigabits)
        drawn = []
        for name, jobs in _jobs().items():
            ranks = [job.ranks for job in jobs]
            rates = [1024 * plan_step(model, job, machine).samples_per_second for job in jobs]
            drawn.append(Curve(name, ranks, rates))
            cells.setdefault(name, []).append(_stop(ranks, rates))
        title = f"{gigabits} Gbit/s between hosts of 16 ranks"
        panels.append(Panel(title, "ranks", "tokens per second", drawn))
    for name, found in cells.items():
        _say(f"| {name} | {' | '.join(found)} |")
    plot_panels(path, panels)


def _jobs() -> dict[str, list[Job]]:
    """Return the jobs of each curve, with a sequence for each data rank at least."""
    jobs: dict[str, list[Job]] = {}
    for ranks in (16 << k for k in range(9)):
        for name in ("ddp", "zero2", "fsdp"):
            if ranks <= _BATCH:
                jobs.setdefault(name, []).append(Job(ranks, ranks // 16, name, batch_size=_BATCH))
        for pipeline, tensor in ((1, 4), (4, 1), (4, 4)):
            data = ranks // (pipeline * tensor)
            if data <= _BATCH:
                job = Job(
                    ranks,
                    ranks // 16,
                    "hybrid",
                    (pipeline, tensor, data),
                    "zero1",
                    batch_size=_BATCH,
                    micro_batch_count=min(16, _BATCH // data) if pipeline > 1 else 1,
                    schedule="1f1b",
                    order=("pipeline", "data", "tensor"),
                )
                jobs.setdefault(f"{pipeline} x {tensor} x data", []).append(job)
    return jobs


def _stop(ranks: list[int], rates: list[float]) -> str:
    """Return the rank count after which twice the ranks give less than one and a half times."""
    for position, (before, after) in enumerate(itertools.pairwise(rates)):
        if after < 1.5 * before:
            return f"{ranks[position]} ranks"
    return f"pays up to {ranks[-1]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table", help="print the published table beside the plan")
    commands.add_parser("curves", help="draw scaling curves").add_argument("picture")
    given = parser.parse_args()
    table() if given.command == "table" else curves(given.picture)
