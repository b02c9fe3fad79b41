"""How benchmarks show what they measured: tables on a terminal, JSON, the machine."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import threadpoolctl
from rich.console import Console
from rich.table import Table

from mpishard import settings
from mpishard.cli.launcher import usable_cores

__all__ = [
    "bytes_text",
    "counted",
    "describe_machine",
    "milliseconds",
    "parse_bytes",
    "screen_width",
    "show",
    "write_json",
]

_NARROWEST = 100


def screen_width() -> int:
    """Columns of the terminal at the other end; 100 where there is none, and at least."""
    console = Console()
    columns = settings.terminal_columns()
    width = columns or (console.width if console.is_terminal else _NARROWEST)
    return max(width, _NARROWEST)


def show(table: Table) -> None:
    """Print a table, as wide as the terminal at the other end."""
    Console(width=screen_width(), highlight=False).print(table)


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write what was measured, with the machine that it was measured on.

    A number that is not finite, as of what was not taken, becomes null: JSON knows no NaN.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    found = _finite({"machine": describe_machine(), **result})
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, and the versions that decide about speed."""
    blas = threadpoolctl.threadpool_info()
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_bytes": _memory(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("mpishard", "numpy", "mpi4py")},
        "blas": [f"{i['internal_api']} {i['version']} {i.get('architecture')}" for i in blas],
        "blas_threads": [i["num_threads"] for i in blas],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _memory() -> int | None:
    try:
        first = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return None
    return int(first.split()[1]) * 1024


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def milliseconds(seconds: float) -> str:
    """A time as text, with as many digits as can be believed."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.{2 if seconds < 0.1 else 1}f} ms"


def counted(number: int, noun: str) -> str:
    """``1 layer``, ``2 layers``, ``3 batches``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def bytes_text(nbytes: int | None) -> str:
    """A number of bytes as text: exact below 1 KiB, then in KiB, MiB or GiB."""
    if nbytes is None:
        return ""
    amount, units = float(nbytes), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while amount >= 1024 and unit != "GiB":
        amount, unit = amount / 1024, next(units)
    return f"{amount:.4g} {unit}"


def parse_bytes(text: str) -> int:
    """The number of bytes that ``8B``, ``64KiB``, ``1.5MiB`` or ``2GiB`` says.

    Raises
    ------
    ValueError
        For any other text, and for less than 1 byte.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB)?", text.strip())
    number = 0.0
    if found is not None:
        number = float(found[1]) * 1024 ** ("B", "KiB", "MiB", "GiB").index(found[2] or "B")
    if number < 1:
        raise ValueError(f"a size is a number with B, KiB, MiB or GiB, as 64KiB; got {text!r}")
    return int(number)
