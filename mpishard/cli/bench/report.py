"""What benchmarks write down: JSON, with the machine that they ran on."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import threadpoolctl

from mpishard.cli.machine import processor_name, total_memory, usable_cores

__all__ = ["describe_machine", "write_json"]


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
        "processor": processor_name(),
        "cores": usable_cores(),
        "memory_bytes": total_memory(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("mpishard", "numpy", "mpi4py")},
        "blas": [f"{i['internal_api']} {i['version']} {i.get('architecture')}" for i in blas],
        "blas_threads": [i["num_threads"] for i in blas],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
