"""Cores, memory, processor and packages of this machine, as far as this process may use them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

from mpishard.base import Document

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_NO_LIMIT = 2**60  # version 1 of control groups has no word for "none", but the most pages


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    # Launchers and containers bind processes to some cores; cpu_count() would return all.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_quota(groups: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> float | None:
    """Return how many cores' time control groups give this process; None if there is no limit."""
    quotas = []
    # Each group up to the root may have a quota, and the smallest one holds.
    for folder in _control_groups("cpu", groups, own):
        text = _read(folder / "cpu.max").split()  # version 2
        if not text:  # version 1
            text = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if len(text) == 2 and text[0].isdecimal() and text[1].isdecimal():
            quotas.append(int(text[0]) / int(text[1]))
    return min(quotas, default=None)


def available_memory(groups: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> tuple[int, int | None]:
    """Return the bytes that this process may ever have, and the free ones; None if not known."""
    facts = _memory_facts()
    if "MemTotal" not in facts or "MemAvailable" not in facts:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    total, free = facts["MemTotal"], facts["MemAvailable"]
    # /proc/meminfo shows the memory of the host, even inside a container.
    for folder in _control_groups("memory", groups, own):
        for limit, used in (
            ("memory.max", "memory.current"),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            most, now = _read(folder / limit), _read(folder / used)
            if most.isdecimal() and now.isdecimal() and int(most) < _NO_LIMIT:
                total, free = min(total, int(most)), min(free, int(most) - int(now))
    return total, free


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

    lines = _read(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    blas = threadpoolctl.threadpool_info()
    return {
        "processor": next(names, platform.processor() or platform.machine()),
        "cores": usable_cores(),
        "memory_bytes": _memory_facts().get("MemTotal"),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: installed_version(name) for name in ("mpishard", "numpy", "mpi4py")},
        "blas": [f"{i['internal_api']} {i['version']} {i.get('architecture')}" for i in blas],
        "blas_threads": [i["num_threads"] for i in blas],
    }


def _memory_facts() -> dict[str, int]:
    """Return the amounts of /proc/meminfo in bytes."""
    facts = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        name, _, amount = line.partition(":")
        facts[name] = int(amount.split()[0]) * 1024
    return facts


def _control_groups(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """Yield folders of this process's control groups, of both versions, up to the root."""
    for line in _read(own).splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        # Version 1 has a tree for each controller. Version 2 has one tree, and names none.
        root = groups / controller if names else groups
        inside = Path(path.lstrip("/"))
        for part in (inside, *inside.parents):
            yield root / part


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
