"""Memory that `mpishard plan memory` says, beside the ledger's and the processes' PSS.

    python benchmarks/plan_memory.py [--only gpt] [--json FILE]

Starts one job of 4 MPI ranks for each row: a model, a strategy or a mesh, a precision. Each rank
makes a small step first, which loads all libraries, and then steps of the model. PSS, the
proportional share of pages, is the peak in the steps above that before them, summed over the ranks.
Pages of files are left out: a rank's share of them grows if another process with them ends.

The model torch needs an environment with PyTorch.
"""

import argparse
import gc
import importlib.util
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import mpishard as ms
from mpishard.observe import MemoryCategory, memory_while, proportional_memory
from mpishard.pipeline import ActivationCheckpointConfig
from mpishard.planning import Job, memory_of, planned_model

RANKS = 4
BATCH = {"mlp": 2048, "gpt": 32, "gpt-recompute": 64, "convolutions": 256}
AGAIN = ActivationCheckpointConfig(enabled=True, checkpoint_every_n_layers="sqrt")
BOXES = ("torch", "function", "black-box")
SIZE = 6_000_000  # parameters of the function and of the black box


class BlackBox:
    """A model of which mpishard knows the vector and its gradient alone."""

    def __init__(self, size: int = SIZE) -> None:
        self.theta = np.zeros(size, np.float32)

    def get_parameters(self) -> Any:
        """Return the vector."""
        return self.theta

    def set_parameters(self, vector: Any) -> None:
        """Take a vector."""
        self.theta = vector

    def compute_gradients(self, x: Any, y: Any) -> Any:
        """Return a gradient."""
        return self.theta * np.float32(0.5)


def model_of(name: str, scale: int = 1) -> Any:
    """Return a model, ``scale`` times smaller, as a user builds it to train."""
    if name == "mlp":
        width = 1024 // scale
        return ms.nn.MLP([width] * 9, dtype="float32")
    if name.startswith("gpt"):
        width, layers = 256 // scale, 8 // scale
        return ms.nn.GPT(
            vocabulary_size=4096 // scale, context_length=128, width=width, heads=8, layers=layers
        )
    if name == "convolutions":
        c = 32 // min(scale, 8)
        chain = ms.nn.Sequential(
            ms.nn.Conv2D(3, c, 3, padding=1), ms.nn.ReLU(), ms.nn.Conv2D(c, c, 3, padding=1),
            ms.nn.ReLU(), ms.nn.MaxPool2D(2), ms.nn.Conv2D(c, 2 * c, 3, padding=1), ms.nn.ReLU(),
            ms.nn.MaxPool2D(2), ms.nn.Flatten(), ms.nn.Linear(2 * c * 64, 1024 // scale),
            ms.nn.ReLU(), ms.nn.Linear(1024 // scale, 10),
        )  # fmt: skip
        loss = ms.nn.CrossEntropy()
        return ms.nn.Model(chain, loss, input_shape=(3, 32, 32), dtype="float32")
    if name == "function":
        start = np.zeros(SIZE // scale, np.float32)
        return ms.FunctionModel(lambda theta, x, y: (0.0, theta * np.float32(0.5)), start)
    if name == "black-box":
        return BlackBox(SIZE // scale)
    return ms.adapters.TorchModel(module_of(scale), loss_of)


def module_of(scale: int = 1) -> Any:
    """Return a PyTorch module."""
    import torch

    width = 1024 // scale
    layers = [part for _ in range(6) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers)


def loss_of(output: Any, y: Any) -> Any:
    """Return a loss of PyTorch."""
    return ((output - y) ** 2).mean()


def planned(name: str) -> Any:
    """Return the same model for a plan."""
    if name != "torch":
        return planned_model(lambda: model_of(name))
    import torch

    with torch.device("meta"):
        return planned_model(module_of())


def data_of(model: Any, name: str, samples: int) -> tuple[Any, Any]:
    """Return a batch."""
    if name == "torch":
        x = np.zeros((samples, next(iter(model.parameter_entries)).shape[1]), np.float32)
        return x, x
    if name in BOXES:
        return np.zeros((samples, 1), np.float32), np.zeros(samples, np.float32)
    shape = tuple(model.get_input_shape())
    if name.startswith("gpt"):
        tokens = np.random.default_rng(0).integers(0, model.vocabulary_size, (samples, *shape))
        return tokens, tokens
    x = np.zeros((samples, *shape), np.float32)
    if name == "convolutions":
        return x, np.zeros(samples, np.int64)
    return x, np.zeros((samples, *model.get_output_shape()), np.float32)


def job_of(name: str, strategy: str, precision: str | None) -> Job:
    """Return the job of a row; a strategy or a mesh as 2x1x2."""
    choices: dict[str, Any] = {"precision": precision, "batch_size": BATCH.get(name, RANKS)}
    if name == "gpt-recompute":
        choices["checkpoint_config"] = AGAIN
    if "x" not in strategy:
        return Job(RANKS, strategy=strategy, **choices).with_options()
    pipeline, tensor, data = map(int, strategy.split("x"))
    mesh = {"mesh": (pipeline, tensor, data), "data_parallel_strategy": "fsdp"}
    return Job(RANKS, strategy="hybrid", micro_batch_count=4, **mesh, **choices)


def share_of_files() -> int:
    """Return this process's share of the pages of files, such as libraries, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_File:"))


def measure(name: str, strategy: str, precision: str | None, path: str) -> None:
    """Train on this rank, and write what its ledger and its process have."""
    logging.disable(logging.WARNING)
    backend = ms.init("mpi")
    job = job_of(name, strategy, precision)

    def steps(scale: int, samples: int) -> Any:
        config = ms.ShardingConfiguration(backend, precision=precision)
        model = ms.as_distributed(
            plain := model_of(name, scale), config, job.strategy, **job.options
        )
        optimizer = ms.as_distributed(ms.optimizers.AdamW(), config, job.strategy, **job.options)
        batch = data_of(plain, name, samples)
        _, peak = memory_while(lambda: optimizer.step(model, *batch), 3) or (0, 0)
        return model, optimizer, batch, peak

    small = steps(8, 4)
    del small
    gc.collect()
    backend.barrier()
    before, files = proportional_memory() or 0, share_of_files()
    backend.barrier()
    model, optimizer, batch, after = steps(1, job.samples_of_rank)
    after -= share_of_files() - files
    ledger = sum(model.memory.peak(category) for category in MemoryCategory)
    mine = np.array([ledger, after - before - sum(array.nbytes for array in batch)], np.int64)
    total = backend.all_reduce(mine.astype(np.float64))
    if backend.rank == 0:
        Path(path).write_text(json.dumps([int(total[0]), int(total[1])]))
    del optimizer
    backend.shutdown()


def row_of(name: str, strategy: str, precision: str | None) -> dict[str, Any]:
    """Plan a row, run it, and return both."""
    plan = memory_of(planned(name), job_of(name, strategy, precision)).host
    activations = plan.activations or 0
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "measured.json"))
        words = [name, strategy, precision or "float32", path]
        command = ["mpiexec", "-n", str(RANKS), sys.executable, __file__, "--measure", *words]
        subprocess.run(command, check=True, timeout=600)
        ledger, pss = json.loads(Path(path).read_text())
    return {
        "model": name,
        "strategy": strategy,
        "precision": precision or "float32",
        "planned_ledger": plan.total - activations - plan.messages - plan.black_box,
        "ledger": ledger,
        "planned": plan.total,
        "pss": pss,
    }


def rows(only: str) -> Any:
    """Yield model, strategy and precision of each row."""
    for name in (*BATCH, *BOXES):
        if only and name != only:
            continue
        if name == "torch" and importlib.util.find_spec("torch") is None:
            print("torch is not installed: no rows of it")
            continue
        meshes = () if name in BOXES else ("2x1x2", "1x2x2", "2x2x1")
        precisions = (None,) if name in ("function", "black-box") else (None, "bfloat16")
        for precision in precisions:
            for strategy in ("ddp", "zero1", "zero2", "fsdp", *meshes):
                yield name, strategy, precision


ZERO_TABLE_1 = {
    (7.5, 4608, 29, 36): {4: (52.5, 41.3, 30), 64: (31.4, 16.6, 1.88), 1024: (30.1, 15.1, 0.12)},
    (128, 10240, 101, 80): {4: (896, 704, 512), 64: (536, 284, 32), 1024: (513, 257, 2)},
    (1000, 25600, 127, 160): {
        4: (7000, 5500, 4000),
        64: (4187, 2218, 250),
        1024: (4011, 2013, 15.6),
    },
}
"""Billions of parameters, width, layers and heads of a GPT -> ranks -> GB of stages 1, 2 and 3."""


def zero_bytes(model: Any, strategy: str, ranks: int) -> float:
    """Return bytes per parameter of a rank, with the dtypes of the paper."""
    use = memory_of(model, Job(ranks, ranks, strategy, precision="bfloat16")).rank
    size = model.parameter_count
    own = 4 * size / ranks  # float32 parameters of the rank, beside the bfloat16 copy
    # The paper's gradients have 2 bytes each, and those of mpishard 4.
    return (use.parameters - own + use.gradients / 2 + own + use.optimizer_state) / size


def published() -> None:
    """Print table 1 of ZeRO beside the plan."""
    for (billions, width, layers, heads), rows_of_size in ZERO_TABLE_1.items():
        model = ms.nn.GPT(
            vocabulary_size=50304, context_length=1024, width=width, heads=heads, layers=layers
        )
        print(f"{model.parameter_count / 1e9:.1f} billion, scaled to {billions}")
        for ranks, figures in rows_of_size.items():
            cells = []
            for strategy, figure in zip(("zero1", "zero2", "fsdp"), figures, strict=True):
                found = zero_bytes(model, strategy, ranks) * billions
                cells.append(f"{found:.4g} / {figure} ({found / figure - 1:+.1%})")
            print(f"| {billions:g} | {ranks} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Measure all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="one model")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--published", action="store_true", help="print ZeRO's table and end")
    arguments = parser.parse_args()
    if arguments.published:
        published()
        return
    if arguments.measure:
        name, strategy, precision, path = arguments.measure
        measure(name, strategy, None if precision == "float32" else precision, path)
        return
    found = []
    for key in rows(arguments.only):
        row = row_of(*key)
        found.append(row)
        mib = {n: row[n] / 2**20 for n in ("planned_ledger", "ledger", "planned", "pss")}
        print(
            f"{row['model']:14} {row['strategy']:6} {row['precision']:8} ledger "
            f"{mib['planned_ledger']:8.1f} {mib['ledger']:8.1f} "
            f"{row['planned_ledger'] / row['ledger'] - 1:+6.1%}   PSS {mib['planned']:8.1f} "
            f"{mib['pss']:8.1f} {row['planned'] / row['pss'] - 1:+6.1%}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
