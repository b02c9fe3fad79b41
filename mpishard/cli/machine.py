"""Cores, processor and packages of this machine, as far as this process may use them."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from mpishard.base import (
    CGROUPS,
    OWN_CGROUP,
    Document,
    control_groups,
    memory_facts,
    read_text,
)
from mpishard.base.blas import Processor


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    # Launchers and containers bind processes to some cores; cpu_count() would return all.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_quota(groups: Path = CGROUPS, own: Path = OWN_CGROUP) -> float | None:
    """Return how many cores' time control groups give this process; None if there is no limit."""
    quotas = []
    # Each group up to the root may have a quota, and the smallest one holds.
    for folder in control_groups("cpu", groups, own):
        text = read_text(folder / "cpu.max").split()  # version 2
        if not text:  # version 1
            text = [read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")]
        if len(text) == 2 and text[0].isdecimal() and text[1].isdecimal():
            quotas.append(int(text[0]) / int(text[1]))
    return min(quotas, default=None)


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    # Imported here, because it loads a parser of mail, which `mpishard run` does not need.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_machine() -> Document:
    """Return the processor, cores, memory, and the versions that speed depends on."""
    import threadpoolctl  # which `mpishard run` does not need

    blas = threadpoolctl.threadpool_info()
    return {
        "processor": Processor.of_this_machine().name,
        "cores": usable_cores(),
        "memory_bytes": memory_facts().get("MemTotal"),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: installed_version(name) for name in ("mpishard", "numpy", "mpi4py")},
        "blas": [f"{i['internal_api']} {i['version']} {i.get('architecture')}" for i in blas],
        "blas_threads": [i["num_threads"] for i in blas],
    }
