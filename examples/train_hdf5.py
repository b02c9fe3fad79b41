"""Train from an HDF5 file that is larger than memory could be: shuffled in blocks, read ahead."""

from pathlib import Path

import mpishard as ms
import h5py
import numpy as np

SAMPLES, CHUNK = 20_000, 256


def write(path):
    """Make the file: `y` is whether the point lies in the unit ball."""
    generator = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (SAMPLES, 8), "f4", chunks=(CHUNK, 8), compression="gzip")
        y = file.create_dataset("y", (SAMPLES,), "i8", chunks=(CHUNK,))
        for start in range(0, SAMPLES, CHUNK):
            points = 0.6 * generator.standard_normal((min(CHUNK, SAMPLES - start), 8))
            x[start : start + CHUNK] = points
            y[start : start + CHUNK] = np.linalg.norm(points, axis=1) < 1.6


def main(backend, path="points.h5"):
    if backend.rank == 0 and not Path(path).exists():
        write(path)
    backend.barrier()
    with h5py.File(path) as file:  # stays open as long as the training reads
        optimizer = ms.as_distributed(ms.optimizers.AdamW(3e-3), backend, "fsdp")
        result = optimizer.optimize(
            ms.OptimizationInputData(
                model=ms.nn.MLP([8, 64, 2], loss=ms.nn.CrossEntropy()),
                x_train=file["x"],
                y_train=file["y"],
                shuffle_block_size=CHUNK,
                x_validation=file["x"],
                y_validation=file["y"],
                batch_size=128,
                epochs=2,
                progress=False,
            )
        )
    accuracy = result.validation_result.stats["accuracy"]
    backend.print(f"{result.iterations} steps, accuracy above 0.9: {accuracy > 0.9}")


if __name__ == "__main__":
    ms.launch(main, world_size=2)
