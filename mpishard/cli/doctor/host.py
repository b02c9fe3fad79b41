"""What ``mpishard doctor`` finds of Python, the machine, and what this process may use of it."""

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
from mpishard.cli.doctor.finding import Finding, Verdict
from mpishard.cli.doctor.probe import ask, python_command
from mpishard.cli.run.launcher import usable_cores
from mpishard.cli.wording import bytes_text, counted

__all__ = ["available_memory", "core_quota", "look_at_host"]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_FEW_FILES = 1024
_LOW_MEMORY = 2**30
_NO_LIMIT = 2**60  # version 1 writes "none" as the largest number of pages
_RESOLVE_SECONDS = 5


def look_at_host() -> Iterator[Finding]:
    """Versions, cores, memory, limits of the shell, this machine's name."""
    yield Finding(
        "host.python",
        Verdict.OK,
        f"{platform.python_version()}, {sys.executable}",
        {"version": platform.python_version(), "executable": sys.executable},
    )
    yield _mpishard()
    yield Finding("host.system", Verdict.OK, platform.platform(), platform.platform())
    yield _settings()
    yield _cores()
    yield _memory()
    yield _name()
    yield _open_files()
    yield from _locked_memory()


def _mpishard() -> Finding:
    try:
        installed = version("mpishard")
    except PackageNotFoundError:
        installed = "not installed"
    folder = Path(mpishard.__file__).parent
    return Finding(
        "host.mpishard",
        Verdict.OK,
        f"{installed}, {folder}",
        {"version": installed, "folder": str(folder)},
    )


def _settings() -> Finding:
    try:
        settings.check()
    except ValueError as error:
        name = str(error).partition(" ")[0]
        return Finding("host.settings", Verdict.PROBLEM, str(error), name, f"unset {name}")
    return Finding("host.settings", Verdict.OK, "every MPISHARD_ variable can be read")


def _cores() -> Finding:
    usable, present, quota = usable_cores(), os.cpu_count() or 1, core_quota()
    value = {"usable": usable, "present": present, "quota": quota}
    text = f"{usable} of {present} usable"
    if quota is not None and quota < usable:
        threads = max(1, int(quota))
        return Finding(
            "host.cores",
            Verdict.NOTE,
            f"{text}, and a control group gives them the time of {quota:g}: more threads or ranks "
            "than that are stopped again and again",
            value,
            f"export OMP_NUM_THREADS={threads}",
        )
    return Finding("host.cores", Verdict.OK, text, value)


def core_quota(groups: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> float | None:
    """Cores' worth of time that control groups give this process; None where all it can get."""
    quotas = []
    for folder in _control_groups("cpu", groups, own):
        text = _read(folder / "cpu.max").split()  # version 2
        if not text:  # version 1
            text = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if len(text) == 2 and text[0].isdecimal() and text[1].isdecimal():
            quotas.append(int(text[0]) / int(text[1]))
    return min(quotas, default=None)


def available_memory(groups: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> tuple[int, int] | None:
    """Bytes that this process may ever have, and that are free; None where nothing tells."""
    facts = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        name, _, amount = line.partition(":")
        facts[name] = amount.split()[0]
    if "MemTotal" not in facts or "MemAvailable" not in facts:
        return None
    total, free = int(facts["MemTotal"]) * 1024, int(facts["MemAvailable"]) * 1024
    for folder in _control_groups("memory", groups, own):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            most, now = _read(folder / limit), _read(folder / used)
            if most.isdecimal() and now.isdecimal() and int(most) < _NO_LIMIT:
                total, free = min(total, int(most)), min(free, int(most) - int(now))
    return total, free


def _control_groups(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """Folders of the control groups that this process is in, of both versions, up to the root."""
    for line in _read(own).splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        root = groups / controller if names else groups
        inside = Path(path.lstrip("/"))
        for part in (inside, *inside.parents):
            yield root / part


def _memory() -> Finding:
    found = available_memory()
    if found is None:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return Finding("host.memory", Verdict.OK, bytes_text(pages * size), {"total": pages * size})
    total, free = found
    value = {"total": total, "free": free}
    text = f"{bytes_text(free)} free of {bytes_text(total)}"
    if free < _LOW_MEMORY:
        return Finding(
            "host.memory",
            Verdict.NOTE,
            f"{text}: a rank alone takes some 100 MiB",
            value,
            "ps -eo rss,pid,user,args --sort=-rss | head  # shows who has it",
        )
    return Finding("host.memory", Verdict.OK, text, value)


def _name() -> Finding:
    """Whether the machine's name has an address: launchers look it up."""
    name = socket.gethostname()
    look_up = f"import socket; socket.getaddrinfo({name!r}, None)"
    if ask(python_command(look_up), _RESOLVE_SECONDS).code == 0:
        return Finding("host.name", Verdict.OK, f"{name}, which has an address", name)
    return Finding(
        "host.name",
        Verdict.NOTE,
        f"{name}, which has no address: some MPI libraries look it up when a job starts",
        name,
        f"echo '127.0.0.1 {name}' | sudo tee -a /etc/hosts",
    )


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = {"soft": _limit(soft), "hard": _limit(hard)}
    text = f"{_limit_text(soft)} (ulimit -n)"
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
        return Finding(
            "host.open_files",
            Verdict.NOTE,
            f"{text}: a launcher takes several for each rank, a model of a rank two",
            value,
            f"ulimit -n {wanted}"
            if wanted > soft
            else "echo '* - nofile 4096' | sudo tee -a /etc/security/limits.conf  # log in again",
        )
    return Finding("host.open_files", Verdict.OK, text, value)


def _locked_memory() -> Iterator[Finding]:
    """Of interest to networks that write into a process's memory by themselves."""
    cards = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if not cards:
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"{counted(len(cards), 'network card')} with RDMA ({', '.join(cards)}), "
    if soft == resource.RLIM_INFINITY:
        yield Finding("host.locked_memory", Verdict.OK, f"{text}no limit (ulimit -l)", None)
        return
    yield Finding(
        "host.locked_memory",
        Verdict.NOTE,
        f"{text}and a process may lock {bytes_text(soft)} (ulimit -l): MPI then fails to start, "
        "or goes by a slower way",
        soft,
        "echo '* - memlock unlimited' | sudo tee -a /etc/security/limits.conf  # log in again",
    )


def _limit(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _limit_text(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else f"{limit}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
