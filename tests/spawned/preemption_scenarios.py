"""A run that saves checkpoints, for `test_preemption`: ``python .. FOLDER SECONDS [WAY]``.

Each rank says "training PROCESS" when it is in the middle of it, SECONDS a step from then on; where
it "builds", before it begins.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

import mpishard as ms

STEPS, SAMPLES = 60, 40
generator = np.random.default_rng(0)
X = generator.standard_normal((SAMPLES, 4))
Y = np.sin(X[:, :2])


class Slow:
    """Inputs whose batches take some time to read."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.reads = 0

    def __len__(self):
        return SAMPLES

    def __getitem__(self, indices):
        self.reads += 1
        if self.reads == 4:
            sys.stdout.write(f"training {os.getpid()}\n")  # in one piece
            sys.stdout.flush()
        if self.reads >= 4:
            time.sleep(self.seconds)
        return X[indices]


def train(backend, folder, seconds, way=""):
    strategy = "zero2"
    model = ms.as_distributed(ms.nn.MLP([4, 7, 2], seed=1), backend, strategy)
    optimizer = ms.as_distributed(ms.optimizers.AdamW(1e-2), backend, strategy)
    data = ms.OptimizationInputData(
        model=model,
        x_train=Slow(float(seconds)),
        y_train=Y,
        batch_size=8,
        epochs=STEPS,
        max_steps=STEPS,
        checkpoint=folder,
        progress=False,
    )
    try:
        optimizer.optimize(data)
    except ms.errors.Preempted as preempted:
        if way == "catches":
            backend.print(f"caught after step {preempted.step}: code {preempted.code}")
        raise
    return model.gather_full_parameters()


def build(folder):
    """Wait until FOLDER-go exists, like a script that reads much data before it trains."""
    sys.stdout.write(f"training {os.getpid()}\n")
    sys.stdout.flush()
    while not Path(f"{folder}-go").exists():
        time.sleep(0.02)


def main(backend, folder, seconds, way=""):
    if way.startswith("builds"):
        build(folder)
    if way == "builds only":
        return
    parameters = train(backend, folder, seconds, way)
    undisturbed = train(backend, f"{folder}-undisturbed", seconds)
    backend.print("same bits:", np.array_equal(parameters, undisturbed))


if __name__ == "__main__":
    ms.launch(main, *sys.argv[1:])
