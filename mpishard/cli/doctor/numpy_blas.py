"""Findings about NumPy: the library that multiplies its matrices, and how fast it is."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

from mpishard import settings
from mpishard.blas import better_kernel
from mpishard.cli.doctor.finding import Finding, note, ok, pip_install, problem
from mpishard.cli.machine import core_quota, usable_cores
from mpishard.cli.probe import ask, python_command
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

# A process of its own, because this one may have chosen its kernels and set its threads before.
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
    # One thread is measured in its own time: other programs on its core do not slow the kernel.
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
    """Yield NumPy's version, its BLAS library, kernels, threads, and unless ``quick`` its speed."""
    number = importlib.metadata.version("numpy")
    yield ok("numpy.version", number, number)
    answer = ask(python_command(_ASK), _LIMIT_SECONDS)
    library = answer.found
    if answer.code != 0:
        text = f"a new process cannot load NumPy: {answer.reason}"
        yield problem("numpy.blas", text, None, pip_install("--force-reinstall", "numpy"))
        return
    if library is None:
        text = "not OpenBLAS, MKL, BLIS or FlexiBLAS, but a system's own, whose threads mpishard "
        text += "cannot set, or plain loops, ten times slower"
        mend = pip_install("--force-reinstall", "--only-binary=numpy", "numpy")
        yield note("numpy.blas", text, None, mend)
    else:
        text = f"{library['internal_api']} {library['version']}, {library['filepath']}"
        yield ok("numpy.blas", text, library)
    rates = None if quick else _measured({})
    if library is not None:
        if library["internal_api"] == "openblas" and library.get("architecture"):
            yield _kernel(library["architecture"], rates)
        yield _threads(library)
    if not quick:
        yield _speed(rates)


def _kernel(kernel: str, rates: Rates | None) -> Finding:
    """Compare the loaded kernels with others that this processor can use."""
    is_chosen = settings.openblas_kernel_is_set()
    if is_chosen:  # by the user, or by importing mpishard before NumPy
        variables: dict[str, str | None] = {"OPENBLAS_CORETYPE": None}
        found = ask(python_command(_ASK), _LIMIT_SECONDS, variables).found
        other, text = found and found.get("architecture"), f"{kernel}, by OPENBLAS_CORETYPE"
        mend = "unset OPENBLAS_CORETYPE"
    else:
        other, text = better_kernel(kernel), kernel
        variables = {"OPENBLAS_CORETYPE": other}
        mend = f"export OPENBLAS_CORETYPE={other}"
    is_better = other not in (None, kernel)
    if is_better:
        measured = None if rates is None else _measured(variables)
        text += f"; {other} without it" if is_chosen else f", and {other} fits this processor"
        is_better = not is_chosen
        if measured and rates:
            fast, slow = measured["1"]["float32"], rates["1"]["float32"]
            text += f" ({fast:.0f} instead of {slow:.0f} GFLOP/s in float32 on one thread)"
            is_better = fast > _FASTER * slow
        if is_better and not is_chosen:
            text += "; mpishard run sets it by itself"
    value = {"loaded": kernel, "better": other if is_better else None}
    return note("numpy.kernel", text, value, mend) if is_better else ok("numpy.kernel", text, value)


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
    if threads <= most or not chosen:
        return ok("numpy.threads", text, value)
    mend = f"export {' '.join(f'{name}={most}' for name in chosen)}"
    return note("numpy.threads", f"{text}, on {counted(most, 'core')}: they wait for each other",
                value, mend)  # fmt: skip


def _speed(rates: Rates | None) -> Finding:
    name = "numpy.speed"
    if rates is None:
        text = "a product of two matrices of 1024 x 1024 did not end, or crashed"
        return problem(name, text, None, pip_install("--force-reinstall", "numpy"))
    parts = [
        f"{rate['float32']:.0f} and {rate['float64']:.0f} GFLOP/s on {counted(int(n), 'thread')}"
        for n, rate in rates.items()
    ]
    text = f"float32 and float64 matrices: {', '.join(parts)}"
    one, most = (rate["float32"] for rate in (rates["1"], rates[max(rates, key=int)]))
    if _FASTER * most >= one:
        return ok(name, text, rates)
    text += "; all threads together are slower than one: the machine is busy, or BLAS threads "
    text += "compete for cores. Measure again when it is idle"
    return note(name, text, rates, "export OMP_NUM_THREADS=1")


def _measured(variables: Mapping[str, str | None]) -> Rates | None:
    answer = ask(python_command(_MEASURE), _LIMIT_SECONDS, variables)
    rates: Rates | None = answer.found if answer.code == 0 else None
    return rates
