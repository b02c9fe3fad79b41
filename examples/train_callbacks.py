"""Callbacks: figures to watch, TensorBoard, early stopping, and an object of one's own.

mpishard run -n 2 --log-dir runs/callbacks examples/train_callbacks.py
mpishard watch runs/callbacks                # in another terminal; or: tensorboard --logdir runs
"""

import mpishard as ms
import numpy as np


class LowEnough:
    """Smooth the loss, log it beside the other figures, and stop below a limit."""

    def __init__(self, limit):
        self.limit, self.smoothed = limit, None

    def on_step(self, run, record):
        before = record.loss if self.smoothed is None else self.smoothed
        self.smoothed = 0.9 * before + 0.1 * record.loss
        run.log(smoothed=self.smoothed)
        if self.smoothed < self.limit:
            run.stop(f"the smoothed loss is below {self.limit}")


def main(backend, folder="runs/callbacks"):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((1000, 8))
    y = np.sin(x @ generator.standard_normal((8, 1)))
    watching = [LowEnough(0.4), ms.callbacks.EarlyStopping(patience=10),
                ms.callbacks.JSONLines(f"{folder}/metrics.jsonl"),
                ms.callbacks.TensorBoard(folder)]  # or WandB(project="small")  # fmt: skip
    optimizer = ms.as_distributed(ms.optimizers.AdamW(1e-2), backend, "fsdp")
    result = optimizer.optimize(
        ms.OptimizationInputData(
            model=ms.nn.MLP([8, 64, 1], seed=0),
            x_train=x[:800],
            y_train=y[:800],
            batch_size=100,
            x_validation=x[800:],
            y_validation=y[800:],
            epochs=50,
            callbacks=watching,
        )
    )
    backend.print("stopped early:", result.stopped_early)


if __name__ == "__main__":
    ms.launch(main, world_size=2)
