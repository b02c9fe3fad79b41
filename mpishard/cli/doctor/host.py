"""Findings about Python, the machine, NumPy and its BLAS library, and optional packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mpishard
from mpishard import settings
from mpishard.blas import better_kernel
from mpishard.cli.doctor.finding import Finding, note, ok, pip_install, problem, shortened
from mpishard.cli.machine import available_memory, core_quota, installed_version, usable_cores
from mpishard.cli.probe import ask, python_command
from mpishard.cli.wording import bytes_text, counted
from mpishard.onednn import processor_has_unit

__all__ = ["look_at_bfloat16", "look_at_host", "look_at_numpy", "look_at_packages"]

_FEW_FILES = 1024
_LOW_MEMORY = 2**30
_RESOLVE_SECONDS = 5
_IMPORT_SECONDS = 30

_PACKAGES = {
    "autograd": "gradients of losses written in NumPy (AutogradModel)",
    "h5py": "data sets that are read from a file sample by sample",
    "jax": "losses written in JAX (JaxModel), and transformations of optax (OptaxRule)",
    "matplotlib": "plots of losses, traces and benchmarks",
    "numba": "update rules, attention, GELU, layer norms and copies of saves as compiled loops",
    "torch": "PyTorch loops (mpishard.torch), and modules as models (TorchModel)",
}
"""Optional packages, and what each one adds; CuPy is in the group of GPUs, mpi4py in MPI's."""


def look_at_host() -> Iterator[Finding]:
    """Yield versions, cores, memory, the address of this machine, limits of the shell."""
    number, place = platform.python_version(), sys.executable
    yield ok("host.python", f"{number}, {place}", {"version": number, "executable": place})
    number = installed_version("mpishard") or "not installed"
    place = str(Path(mpishard.__file__).parent)
    yield ok("host.mpishard", f"{number}, {place}", {"version": number, "folder": place})
    yield ok("host.system", platform.platform(), platform.platform())
    try:
        settings.check()
        yield ok("host.settings", "every MPISHARD_ variable can be read")
    except ValueError as error:
        name = str(error).partition(" ")[0]
        yield problem("host.settings", str(error), name, f"unset {name}")
    yield _cores()
    yield _memory()
    yield _name()
    yield _open_files()
    yield from _locked_memory()


def look_at_packages() -> Iterator[Finding]:
    """Yield which optional packages are installed."""
    for package, gives in _PACKAGES.items():
        name, number = f"packages.{package}", installed_version(package)
        if number is None:
            yield ok(name, f"not installed; gives {gives}", None)
        elif package != "numba":
            yield ok(name, f"{number}: {gives}", number)
        elif not settings.numba_is_allowed():
            text = f"{number}, and MPISHARD_NUMBA=off: {gives}"
            yield note(name, text, number, "unset MPISHARD_NUMBA")
        # numba refuses releases of NumPy that it does not know, so it has to be tried.
        elif (answer := ask(python_command("import numba"), _IMPORT_SECONDS)).code == 0:
            yield ok(name, f"{number}: {gives}", number)
        else:
            reason = shortened(answer.reason)
            text = f"{number} cannot be imported, so that loops run in NumPy: {reason}"
            yield note(name, text, number, pip_install("--upgrade", "numba"))


def _cores() -> Finding:
    usable, present, quota = usable_cores(), os.cpu_count() or 1, core_quota()
    value = {"usable": usable, "present": present, "quota": quota}
    text = f"{usable} of {present} usable"
    if quota is None or quota >= usable:
        return ok("host.cores", text, value)
    text += f", and a control group gives them the time of {quota:g}: more threads or ranks than "
    text += "that are stopped again and again"
    return note("host.cores", text, value, f"export OMP_NUM_THREADS={max(1, int(quota))}")


def _memory() -> Finding:
    found = available_memory()
    if found is None:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return ok("host.memory", bytes_text(total), {"total": total})
    total, free = found
    value = {"total": total, "free": free}
    text = f"{bytes_text(free)} free of {bytes_text(total)}"
    if free >= _LOW_MEMORY:
        return ok("host.memory", text, value)
    largest = "ps -eo rss,pid,user,args --sort=-rss | head  # lists the programs that use most"
    return note("host.memory", f"{text}: a rank alone takes some 100 MiB", value, largest)


def _name() -> Finding:
    """Tell whether the machine's name has an address: launchers look it up."""
    name = socket.gethostname()
    look_up = f"import socket; socket.getaddrinfo({name!r}, None)"
    if ask(python_command(look_up), _RESOLVE_SECONDS).code == 0:
        return ok("host.name", f"{name}, which has an address", name)
    text = f"{name}, which has no address: some MPI libraries look it up when a job starts"
    return note("host.name", text, name, f"echo '127.0.0.1 {name}' | sudo tee -a /etc/hosts")


def _open_files() -> Finding:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    value = {"soft": soft, "hard": hard}
    text = f"{'any number' if soft is None else soft} (ulimit -n)"
    if soft is None or soft >= _FEW_FILES:
        return ok("host.open_files", text, value)
    wanted = 4096 if hard is None else min(4096, hard)
    mend = f"ulimit -n {wanted}"
    if wanted <= soft:  # a shell cannot raise it further
        mend = "echo '* - nofile 4096' | sudo tee -a /etc/security/limits.conf  # log in again"
    text += ": a launcher opens several files for each rank, a model two"
    return note("host.open_files", text, value, mend)


def _locked_memory() -> Iterator[Finding]:
    """Yield a finding if there are network cards that write into a process's memory directly."""
    cards = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if not cards:
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"{counted(len(cards), 'network card')} with RDMA ({', '.join(cards)}), "
    if soft == resource.RLIM_INFINITY:
        yield ok("host.locked_memory", f"{text}no limit (ulimit -l)", None)
        return
    text += f"and a process may lock {bytes_text(soft)} (ulimit -l): MPI then fails to start, or "
    text += "takes a slower way"
    mend = "echo '* - memlock unlimited' | sudo tee -a /etc/security/limits.conf  # log in again"
    yield note("host.locked_memory", text, soft, mend)


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


_MEASURE_BFLOAT16 = """
from mpishard.blas import Processor  # before NumPy, for its kernels
from mpishard.nn.products import products_per_second
from mpishard.onednn import library, reason_for_none
import threadpoolctl
found = library()
with threadpoolctl.threadpool_limits(1):
    rates = {str(d): products_per_second(d, 1024) / 1e9 for d in ("float32", "bfloat16")}
answer({"library": found and [found.version, found.path], "reason": reason_for_none(), **rates})
"""


def look_at_bfloat16(quick: bool) -> Iterator[Finding]:
    """Yield the unit and library that multiply bfloat16, and unless ``quick`` their speed."""
    unit = processor_has_unit()
    value: dict[str, Any] = {"unit": unit, "library": None}
    name, text = "numpy.bfloat16", "a unit for it" if unit else "no unit for it in this processor"
    if quick:
        yield ok(name, text, value)
        return
    answer = ask(python_command(_MEASURE_BFLOAT16), _LIMIT_SECONDS)
    found = answer.found
    if answer.code != 0 or found is None:
        text += f", and its products fail: {shortened(answer.reason)}"
        yield note(name, text, value, "export MPISHARD_ONEDNN=off")
        return
    value |= {key: found[key] for key in ("library", "float32", "bfloat16")}
    if found["library"] is None:
        text += f'; precision="bfloat16" is computed as float32: {found["reason"]}'
    else:
        text += ", oneDNN {} at {}".format(*found["library"])
    text += (
        f"; {found['bfloat16']:.0f} GFLOP/s of bfloat16 and {found['float32']:.0f} of float32 "
        "matrices, on 1 thread"
    )
    yield ok(name, text, value)


def _measured(variables: Mapping[str, str | None]) -> Rates | None:
    answer = ask(python_command(_MEASURE), _LIMIT_SECONDS, variables)
    rates: Rates | None = answer.found if answer.code == 0 else None
    return rates
