"""Runs that are killed at random and resume at random world sizes must end with the same bits."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parent))

import history
from history import start

_MOST_LIVES = 12


def run_history(seed, folder, wanted):
    """Start the run until it reaches its end; return its fault, or nothing."""
    draw = random.Random(seed)
    rule = draw.choice([*history.RULES])
    lives = []
    for number in range(_MOST_LIVES):
        ranks, threads = draw.choice([(1, 1), (2, 1), (4, 1), (0, 1), (0, 2), (0, 4)])
        world_size = ranks or threads
        # The last ones are spared.
        victim = draw.randrange(world_size) if number < draw.randrange(2, 8) else -1
        life = {
            "strategy": draw.choice(["ddp", "zero1", "zero2", "fsdp"]),
            "rule": rule,
            "world_size": world_size,
            "victim": victim,
            "strike_after": draw.randrange(8),
        }
        options = ["--asynchronous"] if draw.random() < 0.5 else []
        lives.append(f"{'MPI' if ranks else 'threads'} {life}")
        ended = start(folder / "run", folder / "result.npy", *options, ranks=ranks, **life)
        if ended.returncode == 0:
            same = np.load(folder / "result.npy").tobytes() == wanted[rule]
            return "" if same else f"other bits after {lives}"
        if victim < 0 or ended.returncode not in (137, -9):
            return f"exit code {ended.returncode} after {lives}:\n{ended.stderr}"
    return f"no end after {lives}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/torture.sh elastic")
    parser.add_argument("--count", type=int, default=100, help="number of histories")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    arguments = parser.parse_args()
    wanted = {}
    with tempfile.TemporaryDirectory() as name:
        for rule in history.RULES:
            folder = Path(name) / rule
            ended = start(folder, folder.with_suffix(".npy"), rule=rule, strategy="ddp")
            assert ended.returncode == 0, ended.stderr
            wanted[rule] = np.load(folder.with_suffix(".npy")).tobytes()
    wrong = 0
    for seed in track(range(arguments.seed, arguments.seed + arguments.count), "histories"):
        with tempfile.TemporaryDirectory() as name:
            problem = run_history(seed, Path(name), wanted)
        if problem:
            wrong += 1
            print(f"wrong: {seed}: {problem}")
    print(f"{arguments.count} histories of kills and resumes: {wrong} with other bits, or no end")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
