"""Jobs that tests start: their environment, and one of them from its start to its end.

pyproject.toml puts this folder on the path of tests.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

__all__ = ["MPIEXEC", "ROOT", "Job", "environment_of_a_job", "needs_mpiexec", "outside_launchers"]

ROOT = Path(__file__).parents[2]
MPIEXEC = Path(sys.executable).with_name("mpiexec")

_OF_LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "SLURM_", "HYDI", "MPICH_", "MPISHARD_")
_LIMIT = 60

needs_mpiexec = pytest.mark.skipif(
    not MPIEXEC.exists() or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and mpiexec",
)


def outside_launchers(**variables):
    """This environment, less what is the launcher's that this test may run under, and more."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)}
    return kept | variables


def environment_of_a_job(**variables):
    """The same, for what starts ranks of this package, as root and on few cores, too."""
    return outside_launchers() | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MPISHARD_NUMBA": "off",  # which takes each rank a second to load
        "MPISHARD_PRODUCTS": os.environ.get("MPISHARD_PRODUCTS", "numpy"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        **variables,
    }


class Job:
    """A command that starts two ranks, each of which says ``word`` and its process id when ready.

    Nothing of it outlives the block.
    """

    def __init__(self, command, *, word="ready", **variables):
        self._word, self._pids = word, []
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            errors="replace",
            env=environment_of_a_job(**variables),
            start_new_session=True,
        )
        self.pid = self._process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            for pid in self._pids:  # a launcher may give them a group of their own
                os.kill(pid, signal.SIGKILL)
            os.killpg(self.pid, signal.SIGKILL)
        self._process.communicate()
        self._stderr.close()

    def ranks(self):
        """The processes of both ranks, when both are ready."""
        while len(self._pids) < 2:
            line = self._process.stdout.readline()
            assert line, self.end()
            if line.startswith(self._word):
                self._pids.append(int(line.split()[1]))
        time.sleep(0.1)  # from the word to the deed
        return self._pids

    def wait_for(self, words, count=1):
        """Wait until the job has said ``words`` so often on stderr."""
        deadline = time.monotonic() + _LIMIT
        while (text := self._errors_so_far()).count(words) < count:
            assert self._process.poll() is None, self.end()
            assert time.monotonic() < deadline, text
            time.sleep(0.02)

    def end(self, limit=_LIMIT):
        """Wait for it, and not for as long as its ranks would sleep."""
        self.out, _ = self._process.communicate(timeout=limit)
        self.err = self._errors_so_far()
        self.code = self._process.returncode
        return self

    def _errors_so_far(self):
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), size, 0).decode(errors="replace")

    def __repr__(self):
        return f"code {self.code}\n{self.out}\n{self.err}"
