"""What ``mpishard doctor`` finds of NumPy: who multiplies its matrices, and how fast."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

from mpishard import settings
from mpishard.blas import better_kernel
from mpishard.cli.doctor.finding import Finding, Verdict, pip_install
from mpishard.cli.doctor.host import core_quota
from mpishard.cli.doctor.probe import ask, python_command
from mpishard.cli.run.launcher import usable_cores
from mpishard.cli.wording import counted

__all__ = ["look_at_numpy"]

_LIMIT_SECONDS = 30

_FASTER = 1.5
"""A ratio of two measurements that neither noise nor matrices of other shapes explain."""

_LIBRARY = """
import threadpoolctl
import numpy
libraries = [i for i in threadpoolctl.threadpool_info() if i["user_api"] == "blas"]
"""

# A process of its own: this one may have chosen its kernels, and set its threads, before.
_ASK = _LIBRARY + "answer(libraries[0] if libraries else None)"

_MEASURE = (
    _LIBRARY
    + """
from time import perf_counter, thread_time
N, SECONDS = 1024, 0.15
def gigaflops(dtype, clock):
    a = numpy.random.default_rng(0).standard_normal((N, N)).astype(dtype)
    product = a @ a
    best, end = float("inf"), perf_counter() + SECONDS
    while perf_counter() < end:
        start = clock()
        numpy.matmul(a, a, out=product)
        best = min(best, clock() - start)
    return 2 * N**3 / best / 1e9
def measure(threads):
    # Of one thread its own time: what other programs take of the core is no matter of the kernel.
    clock = thread_time if threads == 1 else perf_counter
    with threadpoolctl.threadpool_limits(threads):
        return {dtype: gigaflops(dtype, clock) for dtype in ("float32", "float64")}
most = libraries[0]["num_threads"] if libraries else 1
answer({str(threads): measure(threads) for threads in sorted({1, most})})
"""
)

Rates = dict[str, dict[str, float]]
"""Threads -> dtype -> GFLOP/s."""


def look_at_numpy(quick: bool) -> Iterator[Finding]:
    """NumPy's version, its BLAS library, kernels and threads, and unless ``quick`` its speed."""
    number = importlib.metadata.version("numpy")
    yield Finding("numpy.version", Verdict.OK, number, number)
    answer = ask(python_command(_ASK), _LIMIT_SECONDS)
    if answer.code != 0:
        yield Finding(
            "numpy.blas",
            Verdict.PROBLEM,
            f"a new process cannot load NumPy: {answer.reason}",
            None,
            pip_install("--force-reinstall", "numpy"),
        )
        return
    library = answer.found
    yield _library(library)
    rates = None if quick else _measured({})
    if library is not None:
        yield from _kernel(library, rates)
        yield _threads(library)
    if not quick:
        yield _speed(rates)


def _library(library: dict[str, Any] | None) -> Finding:
    if library is None:
        return Finding(
            "numpy.blas",
            Verdict.NOTE,
            "not OpenBLAS, MKL, BLIS or FlexiBLAS: a system's own, whose threads mpishard cannot "
            "set, or plain loops, ten times slower",
            None,
            pip_install("--force-reinstall", "--only-binary=numpy", "numpy"),
        )
    name, number = library["internal_api"], library["version"]
    text = f"{name} {number}, {library['filepath']}"
    return Finding("numpy.blas", Verdict.OK, text, library)


def _kernel(library: dict[str, Any], rates: Rates | None) -> Iterator[Finding]:
    kernel = library.get("architecture")
    if library["internal_api"] != "openblas" or kernel is None:
        return
    if settings.openblas_kernel_is_set():
        yield _chosen_kernel(kernel, rates)
        return
    better = better_kernel(kernel)
    if better is None:
        yield Finding("numpy.kernel", Verdict.OK, kernel, {"loaded": kernel, "better": None})
        return
    faster = None if rates is None else _measured({"OPENBLAS_CORETYPE": better})
    yield Finding(
        "numpy.kernel",
        Verdict.NOTE,
        f"{kernel}, and {better} is faster on this processor{_compared(faster, rates)}; mpishard "
        "run sets it by itself",
        {"loaded": kernel, "better": better},
        f"export OPENBLAS_CORETYPE={better}",
    )


def _chosen_kernel(kernel: str, rates: Rates | None) -> Finding:
    """Of a user's choice, or the one that importing mpishard before NumPy makes."""
    unset: dict[str, str | None] = {"OPENBLAS_CORETYPE": None}
    library = ask(python_command(_ASK), _LIMIT_SECONDS, unset).found
    own = library.get("architecture") if library else None
    text = f"{kernel}, by OPENBLAS_CORETYPE"
    if own == kernel:
        return Finding("numpy.kernel", Verdict.OK, text, {"loaded": kernel, "better": None})
    without = None if rates is None else _measured(unset)
    text = f"{text}; {own} without it{_compared(without, rates)}"
    if without and rates and without["1"]["float32"] > _FASTER * rates["1"]["float32"]:
        value = {"loaded": kernel, "better": own}
        return Finding("numpy.kernel", Verdict.NOTE, text, value, "unset OPENBLAS_CORETYPE")
    return Finding("numpy.kernel", Verdict.OK, text, {"loaded": kernel, "better": None})


def _compared(other: Rates | None, loaded: Rates | None) -> str:
    if other is None or loaded is None:
        return ""
    a, b = other["1"]["float32"], loaded["1"]["float32"]
    return f" ({a:.0f} instead of {b:.0f} GFLOP/s in float32 on one thread)"


def _threads(library: dict[str, Any]) -> Finding:
    threads, cores = library["num_threads"], usable_cores()
    chosen = settings.blas_thread_variables()
    value = {"threads": threads, "variables": chosen}
    source = "from " + " ".join(f"{name}={number}" for name, number in chosen.items())
    if chosen and str(threads) not in chosen.values():
        source += ", and no more than the library can have here"
    if not chosen:
        source = "one for each core; a rank of mpishard run gets its share of the cores"
    text = f"{counted(threads, 'BLAS thread')}, {source}"
    most = max(1, int(min(cores, core_quota() or cores)))
    if threads > most and chosen:
        return Finding(
            "numpy.threads",
            Verdict.NOTE,
            f"{text}, on {counted(most, 'core')}: they wait for each other",
            value,
            f"export {' '.join(f'{name}={most}' for name in chosen)}",
        )
    return Finding("numpy.threads", Verdict.OK, text, value)


def _speed(rates: Rates | None) -> Finding:
    if rates is None:
        return Finding(
            "numpy.speed",
            Verdict.PROBLEM,
            "a product of two matrices of 1024 x 1024 did not end, or crashed",
            None,
            pip_install("--force-reinstall", "numpy"),
        )
    parts = [
        f"{rate['float32']:.0f} and {rate['float64']:.0f} GFLOP/s on {counted(int(n), 'thread')}"
        for n, rate in rates.items()
    ]
    text = f"float32 and float64 matrices: {', '.join(parts)}"
    one, most = (rate["float32"] for rate in (rates["1"], rates[max(rates, key=int)]))
    if most < one:
        text += "; all threads together are slower than one: the machine is busy, or BLAS threads "
        text += "fight for cores. Measure again when idle"
        return Finding("numpy.speed", Verdict.NOTE, text, rates, "export OMP_NUM_THREADS=1")
    return Finding("numpy.speed", Verdict.OK, text, rates)


def _measured(variables: Mapping[str, str | None]) -> Rates | None:
    answer = ask(python_command(_MEASURE), _LIMIT_SECONDS, variables)
    rates: Rates | None = answer.found if answer.code == 0 else None
    return rates
