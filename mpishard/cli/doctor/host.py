"""Findings about Python, the machine, NumPy and its libraries, and shared memory."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mpishard
from mpishard.base import (
    WHEEL,
    Document,
    available_memory,
    better_kernel,
    find_library,
    processor_has_unit,
    products,
    reason_for_no_library,
    settings,
)
from mpishard.cli.doctor.finding import Finding, pip_install, shortened
from mpishard.cli.machine import core_quota, installed_version, usable_cores
from mpishard.cli.probe import Answer, ask, python_command
from mpishard.cli.run.shared_memory import SHARED_MEMORY, leftovers
from mpishard.cli.wording import bytes_text, counted

_LIMIT_SECONDS = {"import": 30, "measure": 30}
_FEW_FILES = 1024
_LOW_MEMORY = 2**30
_LIMITS = "sudo tee -a /etc/security/limits.conf  # then log in again"

# ------------------------------------------------------------------------- Python and this machine


def examine_host() -> Iterator[Finding]:
    """Yield the two installations, settings, cores, memory, and the limits of the shell."""
    version, number = platform.python_version(), installed_version("mpishard")
    folder = str(Path(mpishard.__file__).parent)
    value = {"python": version, "executable": sys.executable, "mpishard": number, "folder": folder}
    text = f"{version}, {sys.executable}; mpishard {number or 'not installed'}, {folder}"
    yield Finding("host.python", text, value)
    try:
        settings.check()
        yield Finding("host.settings", "every MPISHARD_ variable is valid")
    except ValueError as error:
        # The messages of `settings` begin with the name of the variable.
        name = str(error).partition(" ")[0]
        yield Finding("host.settings", str(error), name, f"unset {name}", is_problem=True)
    yield from _cores_and_memory()
    yield from _limits_of_the_shell()


def _cores_and_memory() -> Iterator[Finding]:
    usable, present, quota, fix = usable_cores(), os.cpu_count() or 1, core_quota(), None
    text = f"{usable} of {present} usable"
    if quota is not None and quota < usable:
        text += f"; a control group grants the time of {quota:g}, and throttles more threads"
        fix = f"export OMP_NUM_THREADS={max(1, int(quota))}"
    value = {"usable": usable, "present": present, "quota": quota}
    yield Finding("host.cores", text, value, fix)
    (total, free), fix = available_memory(), None
    text = bytes_text(total) if free is None else f"{bytes_text(free)} free of {bytes_text(total)}"
    if free is not None and free < _LOW_MEMORY:
        text += ": a rank needs about 100 MiB besides its arrays"
        fix = "ps -eo rss,pid,user,args --sort=-rss | head  # lists the largest programs"
    yield Finding("host.memory", text, {"total": total, "free": free}, fix)


def _limits_of_the_shell() -> Iterator[Finding]:
    """Yield the limit of open files, and that of locked memory if a network card needs it."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    text, fix = f"{'any number' if soft is None else soft} (ulimit -n)", None
    if soft is not None and soft < _FEW_FILES:
        text += ": a launcher opens several files for each rank, and a model two"
        # A process may raise its soft limit as far as the hard one.
        wanted = min(4096, hard or 4096)
        fix = f"ulimit -n {wanted}"
        if wanted <= soft:  # the shell's own hard limit
            fix = f"echo '* - nofile 4096' | {_LIMITS}"
    yield Finding("host.open_files", text, {"soft": soft, "hard": hard}, fix)
    # An RDMA card writes to the memory of a process directly: the system must not move it.
    cards = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    text = f"{counted(len(cards), 'network card')} with RDMA ({', '.join(cards)}) and "
    most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if cards and most == resource.RLIM_INFINITY:
        yield Finding("host.locked_memory", f"{text}no limit of locked memory (ulimit -l)")
    elif cards:
        text += f"{bytes_text(most)} of locked memory (ulimit -l): MPI fails to start, or is slower"
        yield Finding("host.locked_memory", text, most, f"echo '* - memlock unlimited' | {_LIMITS}")


# ------------------------------------------------------------------------------------------- NumPy

_FASTER = 1.5
"""A larger ratio of two speeds is neither noise nor an effect of the shape of the matrices."""

# Runs in a process of its own, because this one may have chosen kernels and set threads. It answers
# before it measures, too, because a product may crash.
_BLAS = """
import sys, time, timeit
import threadpoolctl
import numpy
libraries = [i for i in threadpoolctl.threadpool_info() if i["user_api"] == "blas"]
answer([libraries, None])
N = 1024
def gigaflops(dtype, threads):
    a = numpy.random.default_rng(0).standard_normal((N, N)).astype(dtype)
    product = a @ a
    # One thread is measured by its own clock, which stops while other programs use its core.
    clock = time.thread_time if threads == 1 else time.perf_counter
    with threadpoolctl.threadpool_limits(threads):
        call = lambda: numpy.matmul(a, a, out=product)
        seconds = timeit.repeat(call, timer=clock, number=1, repeat=7)
    return 2 * N**3 / min(seconds) / 1e9
if sys.argv[1:] == ["measure"]:
    counts = sorted({1, libraries[0]["num_threads"] if libraries else 1})
    rates = {n: {d: gigaflops(d, n) for d in ("float32", "float64")} for n in counts}
    answer([libraries, rates])
"""

Rates = dict[str, dict[str, float]]
"""Threads -> dtype -> GFLOP/s."""


def examine_numpy(quick: bool) -> Iterator[Finding]:
    """Yield BLAS, kernels, threads and, unless ``quick``, the speed of products."""
    fix = None
    answer = _ask_blas(measures=not quick)
    reinstall = pip_install("--force-reinstall", "--only-binary=numpy", "numpy")
    if answer.found is None:
        number = installed_version("numpy")
        text = f"a new process cannot load NumPy {number}: {answer.reason}"
        yield Finding("numpy.blas", text, None, reinstall, is_problem=True)
        return
    libraries, rates = answer.found
    library = next(iter(libraries), None)
    if library is None:
        text = "not OpenBLAS, MKL, BLIS or FlexiBLAS: mpishard cannot set its threads, and NumPy's "
        text += "plain loops are ten times slower"
        yield Finding("numpy.blas", text, None, reinstall)
    else:
        text = f"{library['internal_api']} {library['version']}, {library['filepath']}"
        yield Finding("numpy.blas", text, library)
        # mpishard chooses kernels by OPENBLAS_CORETYPE, which other libraries ignore.
        if library["internal_api"] == "openblas" and library.get("architecture"):
            yield _kernel(library["architecture"], rates)
        yield _threads(library)
    if quick:
        return
    if rates is None:
        text = "a product of two matrices of 1024 x 1024 did not end, or crashed"
        yield Finding("numpy.speed", text, None, reinstall, is_problem=True)
        return
    parts = [
        f"{rate['float32']:.0f} and {rate['float64']:.0f} GFLOP/s on {counted(int(n), 'thread')}"
        for n, rate in rates.items()
    ]
    text = f"float32 and float64 matrices: {', '.join(parts)}"
    one, most = (rate["float32"] for rate in (rates["1"], rates[max(rates, key=int)]))
    if _FASTER * most < one:
        text += "; all threads together are slower than one, because the machine is busy or BLAS "
        text += "threads compete for cores. Measure again when it is idle"
        fix = "export OMP_NUM_THREADS=1"
    yield Finding("numpy.speed", text, rates, fix)


def _ask_blas(*, measures: bool, variables: dict[str, str | None] | None = None) -> Answer:
    """Return the BLAS libraries of NumPy in a new process, and `Rates` or None."""
    words = ["measure"] if measures else []
    return ask(python_command(_BLAS, *words), _LIMIT_SECONDS["measure"], variables)


def _kernel(kernel: str, rates: Rates | None) -> Finding:
    """Compare the loaded kernels with others that this processor can run."""
    is_chosen = settings.openblas_kernel_is_set()
    other, other_rates = None if is_chosen else better_kernel(kernel), None
    if is_chosen or (other and rates):
        # None removes the variable, which shows what the library itself would choose.
        found = _ask_blas(measures=bool(rates), variables={"OPENBLAS_CORETYPE": other}).found
        if found:
            (library, *_), other_rates = found
            other = library.get("architecture")
    text, fix = f"{kernel}, by OPENBLAS_CORETYPE" if is_chosen else kernel, None
    if other not in (None, kernel):
        better = f"; mpishard run sets {other}, which fits this processor"
        text += f"; {other} without it" if is_chosen else better
        # Without measurements the processor's name decides.
        is_better = not is_chosen
        if rates and other_rates:
            fast, slow = other_rates["1"]["float32"], rates["1"]["float32"]
            text += f" ({fast:.0f} instead of {slow:.0f} GFLOP/s in float32 on one thread)"
            is_better = fast > _FASTER * slow
        if is_better:
            fix = "unset OPENBLAS_CORETYPE" if is_chosen else f"export OPENBLAS_CORETYPE={other}"
    value = {"loaded": kernel, "better": other if fix else None}
    return Finding("numpy.kernel", text, value, fix)


def _threads(library: Document) -> Finding:
    threads, cores, fix = library["num_threads"], usable_cores(), None
    chosen = settings.blas_thread_variables()
    source = "one for each core; a rank of mpishard run gets its share of the cores"
    if chosen:
        source = "from " + " ".join(f"{name}={number}" for name, number in chosen.items())
        if str(threads) not in chosen.values():
            source += ", but limited by the library"
    text = f"{counted(threads, 'BLAS thread')}, {source}"
    most = max(1, int(min(cores, core_quota() or cores)))
    # Without a variable each rank gets its share of the cores: there is nothing to mend.
    if threads > most and chosen:
        text += f", on {counted(most, 'core')}: threads wait for each other"
        fix = f"export {' '.join(f'{name}={most}' for name in chosen)}"
    return Finding("numpy.threads", text, {"threads": threads, "variables": chosen}, fix)


_MEASURE_BFLOAT16 = """
from mpishard.nn.layers.products import products_per_second
from mpishard.base.onednn import library, reason_for_none
import threadpoolctl
found = library()
with threadpoolctl.threadpool_limits(1):
    rates = {str(d): products_per_second(d, 1024) / 1e9 for d in ("float32", "bfloat16")}
answer({"library": found and [found.version, found.path], "reason": reason_for_none(), **rates})
"""


def examine_bfloat16(quick: bool) -> Iterator[Finding]:
    """Yield whether bfloat16 is faster here than float32, if the processor multiplies it."""
    name, unit = "numpy.bfloat16", processor_has_unit()
    # Without the unit bfloat16 saves memory alone, and no command changes that.
    if quick or not unit:
        return
    answer = ask(python_command(_MEASURE_BFLOAT16), _LIMIT_SECONDS["measure"])
    found = answer.found
    if found is None:
        text = f"products of bfloat16 fail: {shortened(answer.reason)}"
        yield Finding(name, text, None, "export MPISHARD_ONEDNN=off")
        return
    reason, fix = found.pop("reason"), None
    rates = f"{found['bfloat16']:.0f} and {found['float32']:.0f} GFLOP/s of bfloat16 and float32"
    if found["library"] is None:
        text = f'precision="bfloat16" does not use the processor\'s unit: {reason}'
        fix = pip_install(WHEEL)
        if settings.onednn_library() == "off":
            fix = "unset MPISHARD_ONEDNN"
    else:
        text = 'precision="bfloat16" uses the processor\'s unit, oneDNN {} at {}; {}'.format(
            *found["library"], rates
        )
    yield Finding(name, text, found, fix)


_MEASURE_FLOAT32 = """
from mpishard.base import speeds
import threadpoolctl
with threadpoolctl.threadpool_limits(1):
    answer(speeds())
"""


def examine_float32(quick: bool) -> Iterator[Finding]:
    """Yield the library that multiplies float32, and whether the other one is faster here."""
    name, chosen, fix = "numpy.float32", products.choice(), None
    source = "by default"
    if settings.float32_products() != "auto":
        source = "because of MPISHARD_PRODUCTS"
    elif products.kept_choices().exists():
        source = f"by {products.kept_choices()}"
    names = {
        "numpy": "NumPy multiplies",
        "onednn": "oneDNN multiplies, in ranks of one BLAS thread",
    }
    text, speeds = f"{names[chosen]}, {source}", None
    if chosen == "onednn" and find_library() is None:
        text, fix = f"NumPy multiplies: {reason_for_no_library()}", pip_install(WHEEL)
        if settings.onednn_library() == "off":
            fix = "unset MPISHARD_ONEDNN"
    elif not quick:
        answer = ask(python_command(_MEASURE_FLOAT32), _LIMIT_SECONDS["measure"])
        speeds = answer.found
        if speeds is None:
            text += f"; the measurement failed: {shortened(answer.reason)}"
        elif "onednn" in speeds:
            other = "numpy" if chosen == "onednn" else "onednn"
            gigaflops = [f"{speeds[n] / 1e9:.0f}" for n in ("numpy", "onednn")]
            text += "; NumPy {} and oneDNN {} GFLOP/s on one thread".format(*gigaflops)
            # Who has set the variable has decided.
            if speeds[other] >= products.FASTER * speeds[chosen] and (
                settings.float32_products() == "auto"
            ):
                fix = f"mpishard doctor --products {other}  # rounds differently"
    yield Finding(name, text, {"library": chosen, "speeds": speeds}, fix)


def keep_products(chosen: str) -> Finding:
    """Keep the library that multiplies float32 on this processor.

    Raises
    ------
    ValueError
        For another word, or for ``onednn`` if there is no such library.
    OSError
        If the file cannot be written.
    """
    if chosen not in ("numpy", "onednn"):
        raise ValueError(f"--products takes numpy or onednn; got {chosen!r}")
    if chosen == "onednn" and find_library() is None:
        raise ValueError(f"--products onednn needs oneDNN: {reason_for_no_library()}")
    products.keep(chosen)
    (finding,) = examine_float32(quick=True)
    return finding


def examine_numba() -> Iterator[Finding]:
    """Yield whether the installed numba compiles loops; nothing if it is not installed."""
    number, fix = installed_version("numba"), None
    if number is None:
        return
    text = f"{number} compiles update rules, attention, GELU, layer norms and copies of saves"
    if not settings.numba_is_allowed():
        text = f"{number} compiles nothing, because of MPISHARD_NUMBA=off"
        fix = "unset MPISHARD_NUMBA"
    else:
        # numba refuses to be imported with releases of NumPy that it does not know.
        answer = ask(python_command("import numba"), _LIMIT_SECONDS["import"])
        if answer.code != 0:
            text = f"{number} cannot be imported, so that loops run in NumPy: "
            text += shortened(answer.reason)
            fix = pip_install("--upgrade", "numba")
    yield Finding("numpy.numba", text, number, fix)


# ----------------------------------------------------------------------------------- shared memory

NEEDED_BYTES = 64 * 2**20
"""Open MPI takes 16 MiB for each rank, MPICH some 3 MiB for each job; below 20 it may crash."""

# Their names would fill the screen. The command looks for them again, so that it removes no file
# that a new job has mapped.
REMOVE_LEFTOVERS = f"{shlex.quote(sys.executable)} -m {leftovers.__module__}"
"""The command that removes the files of killed jobs."""


def examine_shared_memory() -> Iterator[Finding]:
    """Yield findings about the folder /dev/shm, and files of killed jobs in it."""
    if not SHARED_MEMORY.is_dir():
        return
    yield _folder()
    dead, fix = leftovers(), None
    nbytes = sum(path.stat().st_size for path in dead if path.exists())
    text = f"no killed job has left files in {SHARED_MEMORY}"
    if dead:
        text = f"{counted(len(dead), 'file')} of killed jobs in {SHARED_MEMORY}, "
        text += f"{bytes_text(nbytes)}, which no process here has mapped"
        fix = REMOVE_LEFTOVERS
    value = {"files": [str(path) for path in dead], "bytes": nbytes}
    yield Finding("memory.leftovers", text, value, fix)


def free_bytes() -> int | None:
    """Return the free bytes of /dev/shm; None if there is no such folder."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return None


def larger_folder() -> str:
    """Return the command that makes /dev/shm larger and writable."""
    # Only the engine can set the size of a container's folder, when it starts.
    for engine, file in (("docker", "/.dockerenv"), ("podman", "/run/.containerenv")):
        if Path(file).exists():
            return f"{engine} run --shm-size=2g ...  # start the container like this"
    return f"sudo mount -o remount,rw,size=2g,mode=1777 {SHARED_MEMORY}"


def _folder() -> Finding:
    name, fix, free = "memory.folder", larger_folder(), free_bytes()
    if free is None:
        return Finding(name, f"{SHARED_MEMORY} cannot be read", None, fix, is_problem=True)
    total = shutil.disk_usage(SHARED_MEMORY).total
    value = {"free": free, "total": total}
    try:
        # A write, because the mode of the folder does not show that its mount is read-only.
        with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
            file.write(b"mpishard")
    except OSError as error:
        text = f"{SHARED_MEMORY} cannot be written to ({error.strerror}): MPICH cannot start"
        return Finding(name, text, value, fix, is_problem=True)
    text = f"{SHARED_MEMORY} has {bytes_text(free)} free of {bytes_text(total)}"
    if free >= NEEDED_BYTES:
        return Finding(name, text, value)
    text += ": Open MPI takes 16 MiB for each rank, and MPICH crashes without enough"
    return Finding(name, text, value, fix)


def open_processes() -> str:
    """Return the command that lets a rank open the memory of another one, through /proc."""
    if Path("/.dockerenv").exists():
        return "docker run --cap-add=SYS_PTRACE ...  # start the container like this"
    return "sudo mount -o remount,rw,hidepid=0 /proc"
