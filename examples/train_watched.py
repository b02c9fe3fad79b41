"""A run to watch: start it with a folder for its logs, and look at it in another terminal.

mpishard run -n 2 --log-dir runs/watched examples/train_watched.py
mpishard watch runs/watched
"""

import mpishard as ms
import numpy as np


def main(backend):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((4096, 32))
    y = np.sin(x @ generator.standard_normal((32, 1)))
    optimizer = ms.as_distributed(ms.optimizers.AdamW(1e-3), backend, "fsdp")
    result = optimizer.optimize(
        ms.OptimizationInputData(
            model=ms.nn.MLP([32, 256, 256, 1]),
            x_train=x[:3584],
            y_train=y[:3584],
            x_validation=x[3584:],
            y_validation=y[3584:],
            batch_size=64,
            epochs=8,
            metrics="runs/watched/metrics.jsonl",
        )
    )
    backend.print(f"{result.iterations} steps are in runs/watched/metrics.jsonl")


if __name__ == "__main__":
    ms.launch(main, world_size=2)
