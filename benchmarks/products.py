"""Time of the matrix products of a step's linear layers alone: a lower bound of the step.

    OMP_NUM_THREADS=1 python benchmarks/products.py numpy
    OMP_NUM_THREADS=1 python benchmarks/products.py torch

Prints one line of JSON: seconds of one rank's products for each model. Needs NumPy, for ``torch``
PyTorch too, and nothing of mpishard.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

LAYERS = {
    # (rows, inputs, outputs) -> number of products; those inside attention are left out.
    "mlp": Counter({(64, 1024, 1024): 8}),
    "gpt": Counter({
        (1024, 256, 768): 4, (1024, 256, 256): 5, (1024, 256, 1024): 4, (1024, 1024, 256): 4,
    }),
}  # fmt: skip


def products(library: str, rows: int, inputs: int, outputs: int) -> list[Callable[[], Any]]:
    """Forward, the input's gradient, the weight's gradient."""
    generator = np.random.default_rng(0)
    shapes = (rows, inputs), (outputs, inputs), (rows, outputs)
    x, w, dy = (generator.standard_normal(shape, dtype=np.float32) for shape in shapes)
    multiply: Callable[..., Any] = np.matmul
    if library == "torch":
        import torch

        torch.set_num_threads(1)
        x, w, dy = map(torch.from_numpy, (x, w, dy))
        multiply = torch.mm
    y, dx, dw = multiply(x, w.T), multiply(dy, w), multiply(dy.T, x)
    return [
        lambda: multiply(x, w.T, out=y),
        lambda: multiply(dy, w, out=dx),
        lambda: multiply(dy.T, x, out=dw),
    ]


def seconds(call: Callable[[], Any], repeats: int = 25) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def main(library: str) -> None:
    """Measure every shape, and add up each model's."""
    shapes = {shape for layers in LAYERS.values() for shape in layers}
    times = {shape: sum(map(seconds, products(library, *shape))) for shape in shapes}
    totals = {
        model: sum(times[shape] * count for shape, count in layers.items())
        for model, layers in LAYERS.items()
    }
    print(json.dumps(totals))


if __name__ == "__main__":
    if sys.argv[1:] not in (["numpy"], ["torch"]):
        sys.exit(f"usage: products.py numpy|torch, got {sys.argv[1:]}")
    main(sys.argv[1])
