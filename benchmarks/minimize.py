"""Time to a loss: `minimize` on several ranks, Adam in the training loop, and SciPy alone.

    python benchmarks/minimize.py              # ranks are threads
    python benchmarks/minimize.py -n 1 2 --unknowns 20000

The problem is deblurring: the picture is the unknown, and each sample is a noisy blurred pattern of
it. All minimize one function, and stop at the loss that SciPy's L-BFGS-B reaches in 40 iterations.
Times depend on the machine and its load: compare the ratios.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import scipy.optimize

import mpishard as ms

ITERATIONS = 40
LONGEST = 600  # steps of Adam


def problem(unknowns: int, samples: int) -> tuple[Any, tuple[Any, Any]]:
    """Return the function and its data: each sample is a window of the unknown, blurred."""
    generator = np.random.default_rng(0)
    width = 64
    starts = generator.integers(0, unknowns - width, (samples, 32))
    truth = np.cumsum(generator.standard_normal(unknowns)) / np.sqrt(unknowns)
    kernel = np.exp(-(((np.arange(width) - width / 2) / 9) ** 2))
    kernel /= kernel.sum()
    windows = starts[:, :, None] + np.arange(width)
    seen = truth[windows] @ kernel + 1e-3 * generator.standard_normal(starts.shape)

    def fun(theta: Any, starts: Any, seen: Any) -> tuple[float, Any]:
        windows = starts[:, :, None] + np.arange(width)
        error = theta[windows] @ kernel - seen
        spread = (2 / error.size) * error[:, :, None] * kernel
        gradient = np.bincount(windows.ravel(), spread.ravel(), minlength=len(theta))
        rough = np.diff(theta)
        gradient[1:] += 2e-6 * rough
        gradient[:-1] -= 2e-6 * rough
        return float(np.mean(error**2) + 1e-6 * rough @ rough), gradient

    return fun, (starts, seen)


def seconds_of_adam(fun: Any, unknowns: int, args: Any, target: float, ranks: int) -> float:
    """Return the seconds until the loss is below ``target``, or infinity."""

    def main(backend: Any) -> float:
        model = ms.as_distributed(ms.FunctionModel(fun, np.zeros(unknowns)), backend, "zero2")
        optimizer = ms.as_distributed(ms.optimizers.Adam(0.03), backend, "zero2")
        part = ms.ShardLayout(len(args[0]), backend.world_size).slice(backend.rank)
        begin = time.perf_counter()
        for _ in range(LONGEST):
            if optimizer.step(model, *(a[part] for a in args)) <= target:
                return time.perf_counter() - begin
        return float("inf")

    return ms.run_in_threads(ranks, main)[0]


def main() -> None:
    """Print one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--unknowns", type=int, default=50_000)
    parser.add_argument("--samples", type=int, default=400)
    given = parser.parse_args()
    fun, args = problem(given.unknowns, given.samples)
    start = np.zeros(given.unknowns)
    fun(start, *args)  # not timed: the first call allocates memory
    options = {"maxiter": ITERATIONS, "ftol": 0, "gtol": 0}
    begin = time.perf_counter()
    alone = scipy.optimize.minimize(
        fun,
        start,
        args,
        "L-BFGS-B",
        jac=True,
        options=options,
    )
    seconds = time.perf_counter() - begin
    print(f"SciPy, 1 process: {seconds:.2f} s, {alone.nfev} evaluations, loss {alone.fun:.4e}")
    for ranks in given.n:
        begin = time.perf_counter()
        found = ms.run_in_threads(
            ranks,
            lambda backend: ms.minimize(fun, start, args, backend=backend, options=options),
        )[0]
        own = time.perf_counter() - begin
        print(
            f"minimize, {ranks} ranks: {own:.2f} s ({own / seconds:.2f} of SciPy's), "
            f"{found.nfev} evaluations, loss {found.fun:.4e}"
        )
        adam = seconds_of_adam(fun, given.unknowns, args, alone.fun, ranks)
        print(f"Adam, {ranks} ranks: {adam:.2f} s ({adam / seconds:.2f} of SciPy's)")


if __name__ == "__main__":
    main()
