"""Findings about Python, the machine, what this process may use of it, and optional packages."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mpishard
from mpishard import settings
from mpishard.cli.doctor.finding import Finding, note, ok, pip_install, problem, shortened
from mpishard.cli.machine import available_memory, core_quota, usable_cores
from mpishard.cli.probe import ask, python_command
from mpishard.cli.wording import bytes_text, counted

__all__ = ["look_at_host", "look_at_packages"]

_FEW_FILES = 1024
_LOW_MEMORY = 2**30
_RESOLVE_SECONDS = 5
_IMPORT_SECONDS = 30

_PACKAGES = {
    "autograd": "gradients of losses written in NumPy (AutogradModel)",
    "h5py": "data sets that are read from a file sample by sample",
    "jax": "gradients for FunctionModel",
    "matplotlib": "plots of losses, traces and benchmarks",
    "numba": "update rules and copies of saves as compiled loops, with the same bits",
    "torch": "PyTorch modules as models (TorchModel)",
}
"""Optional packages, and what each one adds; CuPy is in the group of GPUs, mpi4py in MPI's."""


def look_at_host() -> Iterator[Finding]:
    """Yield versions, cores, memory, the address of this machine, limits of the shell."""
    number, place = platform.python_version(), sys.executable
    yield ok("host.python", f"{number}, {place}", {"version": number, "executable": place})
    number, place = _version("mpishard") or "not installed", str(Path(mpishard.__file__).parent)
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
        name, number = f"packages.{package}", _version(package)
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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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
