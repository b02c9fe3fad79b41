"""A training run that is killed several times, and resumes with another number of ranks.

As a script it is one life of the run, on MPI ranks or on threads; `Life` says how it ends. The
last one writes the parameters.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

import mpishard as ms

# One kernel and one thread for all: a matrix product's bits depend on both. Not on numba, which
# each rank of each start would take a second to load.
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_CORETYPE": "Haswell",
    "MPISHARD_NUMBA": "off",
}

LEAVES = 4
STEPS = 12
RULES = {
    "momentum": lambda: ms.optimizers.SGD(0.05, momentum=0.9),
    "adamw": lambda: ms.optimizers.AdamW(0.01),
}


class StruckError(Exception):
    """The error that ends a life: one start of the run."""


class Samples:
    """A data set that records its reads, and kills the run at a step."""

    def __init__(self, values, life, rank, strike):
        self._values = values
        self._life = life
        self._strike = strike if rank == life.victim else None
        self.taken = []

    def __len__(self):
        return len(self._values)

    def __getitem__(self, indices):
        if len(np.atleast_1d(indices)) and self._strike is not None:
            self._life.calls += 1
            if self._life.calls > self._life.strike_after:
                self._strike()
        self.taken.append(np.atleast_1d(indices))
        return self._values[indices]


@dataclasses.dataclass
class Life:
    """One start of the run, up to its end.

    ``victim`` is struck at its batch number ``strike_after``; -1 is nobody.
    """

    strategy: str = "fsdp"
    rule: str = "adamw"
    world_size: int = 1
    victim: int = -1
    strike_after: int = 0
    steps: int = STEPS
    asynchronous: bool = False
    calls: int = 0


def train(backend, folder, life, strike):
    """Run one life on one rank; return the parameters at its end."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((37, 6)).astype(np.float32)
    y = np.tanh(x @ rng.standard_normal((6, 3)).astype(np.float32))
    config = ms.ShardingConfiguration(backend, gradient_leaves=LEAVES)
    model = ms.nn.MLP([6, 16, 3], seed=1, dtype=np.float32)
    model = ms.as_distributed(model, config, life.strategy)
    optimizer = ms.as_distributed(RULES[life.rule](), config, life.strategy)
    samples = Samples(x, life, backend.rank, strike)
    optimizer.optimize(
        ms.OptimizationInputData(
            model=model,
            x_train=samples,
            y_train=y,
            batch_size=11,
            epochs=100,
            max_steps=life.steps,
            seed=5,
            progress=False,
            user_state={"none": np.random.default_rng(0)},  # so that a read happens in its own step
            checkpoint=folder,
            checkpoint_every=2,
            checkpoint_async=life.asynchronous,
        )
    )
    return model.gather_full_parameters()


def strike_by_raising():
    raise StruckError


def strike_by_killing():
    os.kill(os.getpid(), signal.SIGKILL)


def start(folder, result, *options, ranks=0, **known):
    """Run one life in other processes: on MPI ranks, or for 0 on threads of one process."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "mpishard", "run", "-n", str(ranks)]
    command += [__file__, folder, result, *options]
    if not ranks:
        command.append("--threads")
    for name, value in known.items():
        command += [f"--{name}", str(value)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--threads", action="store_true")
    for field in dataclasses.fields(Life):
        if isinstance(field.default, bool):
            parser.add_argument(f"--{field.name}", action="store_true")
        else:
            parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    words = vars(parser.parse_args())
    folder, result, threads = (words.pop(name) for name in ("folder", "result", "threads"))
    life = Life(**words)
    if threads:
        parameters, *_ = ms.run_in_threads(life.world_size, train, folder, life, strike_by_killing)
        np.save(result, parameters)
        return
    backend = ms.init()
    parameters = train(backend, folder, life, strike_by_killing)
    if backend.rank == 0:
        np.save(result, parameters)


if __name__ == "__main__":
    sys.exit(main())
