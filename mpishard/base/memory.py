"""Memory that this process may use: that of the machine, and of its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
_NO_LIMIT = 2**60  # version 1 of control groups has no word for "none", but the most pages


def available_memory(groups: Path = CGROUPS, own: Path = OWN_CGROUP) -> tuple[int, int | None]:
    """Return the bytes that this process may ever have, and the free ones; None if not known."""
    facts = memory_facts()
    if "MemTotal" not in facts or "MemAvailable" not in facts:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    total, free = facts["MemTotal"], facts["MemAvailable"]
    # /proc/meminfo shows the memory of the host, even inside a container.
    for folder in control_groups("memory", groups, own):
        for limit, used in (
            ("memory.max", "memory.current"),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            most, now = read_text(folder / limit), read_text(folder / used)
            if most.isdecimal() and now.isdecimal() and int(most) < _NO_LIMIT:
                total, free = min(total, int(most)), min(free, int(most) - int(now))
    return total, free


def memory_facts() -> dict[str, int]:
    """Return the amounts of /proc/meminfo in bytes."""
    facts = {}
    for line in read_text(Path("/proc/meminfo")).splitlines():
        name, _, amount = line.partition(":")
        facts[name] = int(amount.split()[0]) * 1024
    return facts


def control_groups(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """Yield folders of this process's control groups, of both versions, up to the root."""
    for line in read_text(own).splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        # Version 1 has a tree for each controller. Version 2 has one tree, and names none.
        root = groups / controller if names else groups
        inside = Path(path.lstrip("/"))
        for part in (inside, *inside.parents):
            yield root / part


def read_text(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
