"""Steps of training from files: samples shuffled in blocks, shuffled one by one, and in order.

    mpiexec -n 2 python benchmarks/files.py [--steps 60] [--rounds 5] [--folder FOLDER]

Each rank trains an MLP from HDF5, Zarr, a memory map, Parquet and Arrow (those installed). The
figures are medians over rounds of a step's time in milliseconds, and ratios to samples in order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mpishard as ms

WIDTH, BLOCK, BATCH = 1024, 64, 128
WAYS: dict[str, dict[str, Any]] = {
    "in order": {"shuffle": False},
    "in blocks": {"shuffle_block_size": BLOCK},
    "shuffled": {},
}


def hdf5(x: np.ndarray, folder: Path) -> Any:
    """Chunks of a block each, compressed."""
    import h5py

    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(BLOCK, WIDTH), compression="gzip")
    return h5py.File(folder / "x.h5")["x"]


def zarr(x: np.ndarray, folder: Path) -> Any:
    """Chunks of a block each, compressed."""
    from zarr import create_array, open_array

    create_array(str(folder / "x.zarr"), data=x, chunks=(BLOCK, WIDTH))
    return open_array(str(folder / "x.zarr"), mode="r")


def memory_map(x: np.ndarray, folder: Path) -> Any:
    """A file of NumPy."""
    np.save(folder / "x.npy", x)
    return np.load(folder / "x.npy", mmap_mode="r")


def parquet(x: np.ndarray, folder: Path) -> Any:
    """Row groups of a block each."""
    import pyarrow as pa
    from pyarrow import parquet as files

    flat = pa.array(x.reshape(-1))
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(flat, WIDTH)})
    files.write_table(table, folder / "x.parquet", row_group_size=BLOCK)
    return ms.data.ParquetColumns(folder / "x.parquet", "x")


def arrow(x: np.ndarray, folder: Path) -> Any:
    """A data set of Hugging Face."""
    from datasets import Dataset, load_from_disk

    Dataset.from_dict({"x": x}).save_to_disk(folder / "x")
    return ms.data.Column(load_from_disk(folder / "x").with_format("numpy"), "x")


FORMATS: dict[str, Callable[[np.ndarray, Path], Any]] = {
    "HDF5, gzip": hdf5, "Zarr, zstd": zarr, "memory map": memory_map, "Parquet": parquet,
    "Arrow": arrow, "in memory": lambda x, _: x,
}  # fmt: skip


def milliseconds(backend: Any, x: Any, y: np.ndarray, steps: int, **way: Any) -> float:
    """Time of one step."""
    model = ms.as_distributed(ms.nn.MLP([WIDTH, 256, 10]), backend, "fsdp")
    optimizer = ms.as_distributed(ms.optimizers.SGD(0.01), backend, "fsdp")
    data = ms.OptimizationInputData(
        model=model,
        x_train=x,
        y_train=y,
        batch_size=BATCH,
        max_steps=steps,
        progress=False,
        epochs=9,
        **way,
    )
    backend.barrier()
    start = time.perf_counter()
    optimizer.optimize(data)
    backend.barrier()
    return (time.perf_counter() - start) * 1e3 / steps


def main() -> None:
    """Measure each format; rank 0 prints a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=64 * BATCH)
    parser.add_argument("--folder", type=Path, help="where files are written; default: temporary")
    arguments = parser.parse_args()
    backend = ms.init()
    generator = np.random.default_rng(0)
    # Few distinct values, so that they can be compressed like images and counts.
    x = generator.integers(0, 50, (arguments.samples, WIDTH)).astype(np.float32) / 50
    y = generator.standard_normal((arguments.samples, 10)).astype(np.float32)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name, store in FORMATS.items():
            own = Path(folder) / f"{name}-{backend.rank}"
            own.mkdir()
            try:
                stored = store(x, own)
            except ImportError as error:
                if backend.rank == 0:
                    print(json.dumps({"format": name, "not measured": str(error)}))
                continue
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(arguments.rounds):  # in turn, so that noise affects all alike
                for way, options in WAYS.items():
                    times[way].append(milliseconds(backend, stored, y, arguments.steps, **options))
            row: dict[str, Any] = {"format": name}
            row |= {way: round(statistics.median(found), 2) for way, found in times.items()}
            pairs = {way: zip(times[way], times["in order"], strict=True) for way in WAYS}
            row["ratios"] = {
                way: round(statistics.median(one / other for one, other in pairs[way]), 2)
                for way in ("in blocks", "shuffled")
            }
            if backend.rank == 0:
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
