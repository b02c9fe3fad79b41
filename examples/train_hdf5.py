"""Train from an HDF5 file that is larger than memory could be: shuffled in blocks, read ahead."""

from pathlib import Path

import mpishard as ms
import h5py
import numpy as np


def write(path):
    """Write the file: `y` is whether a point lies in a ball."""
    points = 0.6 * np.random.default_rng(0).standard_normal((20_000, 8))
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=points, dtype="f4", chunks=(256, 8), compression="gzip")
        file.create_dataset("y", data=np.linalg.norm(points, axis=1) < 1.6, dtype="i8")


def main(backend, path="points.h5"):
    if backend.rank == 0 and not Path(path).exists():
        write(path)
    backend.barrier()
    model = ms.nn.MLP([8, 64, 2], loss=ms.nn.CrossEntropy())
    optimizer = ms.as_distributed(ms.optimizers.AdamW(3e-3), backend, "fsdp")
    with h5py.File(path) as file:  # stays open as long as the training reads
        x, y = file["x"], file["y"]
        result = optimizer.optimize(
            ms.OptimizationInputData(
                model=model,
                x_train=x,
                y_train=y,
                x_validation=x,
                y_validation=y,
                shuffle_block_size=x.chunks[0],
                batch_size=128,
                epochs=2,
                progress=False,
            )
        )
    accuracy = result.validation_result.stats["accuracy"]
    backend.print(f"{result.iterations} steps, accuracy above 0.9: {accuracy > 0.9}")


if __name__ == "__main__":
    ms.launch(main, world_size=2)
