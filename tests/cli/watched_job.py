"""Trains slowly, with metrics in a folder; rank 1 stalls as long as ``stall`` is there."""

import os
import sys
import time
from pathlib import Path

import numpy as np

import mpishard as ms

RUN = Path(sys.argv[1])


class Pace:
    """A callback that slows the steps down, and lets rank 1 stall."""

    def on_step(self, run, record):
        time.sleep(0.01)
        while run.rank == 1 and (RUN / "stall").exists():
            time.sleep(0.05)


def main(backend):
    x = np.random.default_rng(0).standard_normal((200, 4))
    y = np.sin(x @ np.ones((4, 1)))
    model = ms.as_distributed(ms.nn.MLP([4, 64, 1], seed=0), backend)
    print(f"training {os.getpid()}", flush=True)
    ms.as_distributed(ms.optimizers.AdamW(1e-3), backend).optimize(
        ms.OptimizationInputData(
            model=model,
            x_train=x[40:],
            y_train=y[40:],
            x_validation=x[:40],
            y_validation=y[:40],
            batch_size=20,
            epochs=9000,
            validate_every=100,
            metrics=RUN / "metrics.jsonl",
            callbacks=[Pace()],
            progress=False,
        )
    )


ms.launch(main)
