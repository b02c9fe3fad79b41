"""Which files of shared memory the MPI library has mapped into this process."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["library_files"]

# What MPICH, Open MPI, Intel MPI, MVAPICH and the libraries below them call their files. Anything
# else there may be the user's own data.
_NAMES = re.compile(
    r"(mpich|mpi_shm|sm_segment|vader_segment|osc_|ompi|open_?mpi|prte|pmix|ucx_shm|ucp|psm|"
    r"Intel_MPI|impi|mvapich|cray|xpmem)"
)
_FOLDER = "/dev/shm/"  # noqa: S108 - memory, and not a place for temporary files


def library_files() -> list[str]:
    """Paths in ``/dev/shm`` that this process has mapped and a killed job leaves behind.

    Only files of this user, with a name as MPI libraries give; none on a system without
    ``/proc/self/maps``.
    """
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return []
    mapped = {fields[5] for line in lines if len(fields := line.split(None, 5)) == 6}
    return sorted(path for path in mapped if path.startswith(_FOLDER) and _is_library_s(Path(path)))


def _is_library_s(path: Path) -> bool:
    if not _NAMES.match(path.name):
        return False
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False  # its name is gone already
