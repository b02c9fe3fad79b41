"""Steps of a GPT on the ranks of several hosts, all strategies in turn, and without communication.

    mpishard run -n 2 --hosts node1,node2 benchmarks/hosts_job.py --json FILE

`hosts.py` starts it on hosts made of network namespaces.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import measure, options, positive
from rich.table import Table

import mpishard as ms
from mpishard.cli.bench.step import ALONE, alone, gpt, tokens, training_step

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp bfloat16": {"strategy": "fsdp", "enable_gradient_compression": True},
}
"""Name of a way -> its strategy, and choices of `ShardingConfiguration`."""


def sent_bytes() -> int:
    """Return the bytes that this host has sent to others, with the headers of TCP and Ethernet."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text(encoding="ascii"))


def step_of(backend: ms.CommunicationBackend, way: str) -> Callable[[], object]:
    """Return the training step of one of `WAYS`, or of a rank alone."""
    chosen: dict[str, Any] = {"strategy": "ddp"} if way == ALONE else dict(WAYS[way])
    strategy = chosen.pop("strategy")
    config = ms.ShardingConfiguration(alone() if way == ALONE else backend, **chosen)
    # 4 layers of width 256 with 8 heads, and 8 sequences of 128 tokens on each rank.
    _, step = training_step(config, gpt(256, 4, 8), strategy, *tokens(backend.rank, 8))
    return step


def main(backend: ms.CommunicationBackend, arguments: argparse.Namespace) -> tuple[Any, Table]:
    """Measure each way in turn, so that other programs on the machine slow all of them alike."""
    if arguments.nice:
        # Linux gives each session the same share of the cores, whatever the nice values inside.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(arguments.nice), encoding="ascii")
        os.nice(arguments.nice)
    ways = arguments.ways or [ALONE, *WAYS]
    steps = {way: step_of(backend, way) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    sent, processor = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
    for repeat in range(-arguments.warmup, arguments.steps):
        for way, step in steps.items():
            backend.barrier()
            before, busy, start = sent_bytes(), time.process_time(), time.perf_counter()
            step()
            # The step of the slowest rank, which the others wait for in training.
            backend.barrier()
            if repeat >= 0:
                seconds[way].append(time.perf_counter() - start)
                sent[way] += sent_bytes() - before
                processor[way] += (time.process_time() - busy) / arguments.steps
    mine = np.array([list(sent.values())], np.float64) / arguments.steps
    most = backend.all_gather(mine).max(axis=0)  # of the host that sends most
    table = Table("way", "median ms", "processor ms", "MB sent by a host")
    for way, nbytes in zip(ways, most, strict=True):
        times = (f"{s * 1e3:.1f}" for s in (np.median(seconds[way]), processor[way]))
        table.add_row(way, *times, f"{nbytes / 1e6:.2f}")
    most = dict(zip(ways, most.tolist(), strict=True))
    return {"seconds": seconds, "processor": processor, "bytes": most}, table


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--ways", nargs="+", choices=[ALONE, *WAYS], help="default: all")
    parser.add_argument("--nice", type=int, default=0, help="priority; below 0 needs root")
    parser.add_argument("--steps", type=positive, default=15)
    parser.add_argument("--warmup", type=positive, default=4)
    measure(main, parser.parse_args())
