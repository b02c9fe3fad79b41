"""The jobs that `compare.py` runs: a training step of ours or of PyTorch, each on fresh ranks."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpishard.cli.bench.workload import describe_machine
from mpishard.observe import proportional_memory

PEER_STEP = Path(__file__).parent / "peers" / "step.py"
ADAPTER_STEP = Path(__file__).with_name("adapter_step.py")
JAX_STEP = Path(__file__).with_name("jax_step.py")
PRODUCTS = Path(__file__).with_name("products.py")

STEPS = {"mlp": (20, 4), "gpt": (7, 2), "conv": (15, 3), "encoder": (15, 3)}
"""Steps that count and steps before them, per job: about two seconds."""

IMPORTS_OURS = "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI, mpishard.cli"
IMPORTS_ADAPTER = "import torch, mpi4py; from mpishard.adapters import TorchModel"
IMPORTS_PEER = "import torch; from torch.distributed.fsdp import fully_shard"
# PyTorch's optimizers import its compiler, which is 60 MiB: no way of sharding changes that.
IMPORTS_LOOP = {
    "fsdp2": f"import torch._dynamo; {IMPORTS_PEER}",
    "mst-fsdp": "import mpi4py.rc; mpi4py.rc.initialize = False; import mpi4py.MPI; "
    "import torch._dynamo, mpishard.torch",
}
IMPORTS_JAX = "import jax, optax, mpi4py, mpishard"


class JobError(RuntimeError):
    """Raised when a job does not give a result."""


@dataclass
class Runner:
    """How jobs are started.

    Parameters
    ----------
    peer_python : str
        Interpreter that has PyTorch.
    adapter_python : str
        Interpreter that has both PyTorch and mpishard.
    prefix : sequence of str
        Words put before each command, as ``taskset -c 0,1``.
    peer_optimizer : str
        Which of PyTorch's implementations of AdamW.
    machine : dict
        The machine as the ranks of the last job saw it.
    peer : str
        Name and version of the peer, once a job of it has run.
    """

    peer_python: str
    adapter_python: str = sys.executable
    prefix: Sequence[str] = ()
    peer_optimizer: str = "fused"
    machine: dict[str, Any] = field(default_factory=describe_machine)
    peer: str = ""

    def ours(self, *words: str, ranks: int, python: str = sys.executable, **variables: str) -> Any:
        """What ``mpishard WORDS --json FILE`` writes, with RANKS after the word ``-n``."""
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = [python, "-m", "mpishard", *words, "--json", str(result)]
            place = command.index("-n") + 1
            self._run([*command[:place], str(ranks), *command[place:]], variables)
            return json.loads(result.read_text(encoding="utf-8"))

    def our_step(
        self, model: str, *options: str, ranks: int, numba: bool = False
    ) -> list[dict[str, Any]]:
        """The results of ``mpishard bench step`` under FSDP, with compiled updates or without."""
        steps, warmup = STEPS[model]
        words = ["bench", "step", "-n", "--model", model, "--strategy", "fsdp"]
        words += ["--steps", str(steps), "--warmup", str(warmup)]
        allowed = "auto" if numba else "off"
        found = self.ours(*words, *options, ranks=ranks, MPISHARD_NUMBA=allowed)
        self.machine = found["machine"]
        rows: list[dict[str, Any]] = found["steps"]
        return rows

    def peer_step(self, model: str, strategy: str, *options: str, ranks: int) -> dict[str, Any]:
        """The result of PyTorch's step."""
        steps, warmup = STEPS[model]
        command = [self.peer_python, str(PEER_STEP), "--model", model, "--strategy", strategy]
        command += ["--ranks", str(ranks), "--steps", str(steps), "--warmup", str(warmup)]
        printed = self._run([*command, "--optimizer", self.peer_optimizer, *options], {})
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
        self.peer = found["library"]
        return found

    def adapter_step(self, model: str, *options: str) -> dict[str, Any]:
        """The result of PyTorch's modules in mpishard's adapter."""
        steps, warmup = STEPS[model]
        words = ["run", "-n", str(ADAPTER_STEP), "--model", model, *options]
        words += ["--steps", str(steps), "--warmup", str(warmup)]
        found: dict[str, Any] = self.ours(
            *words, ranks=2, python=self.adapter_python, MPISHARD_NUMBA="off"
        )
        return found

    def loop_step(self, model: str, strategy: str) -> dict[str, Any]:
        """The result of a loop of PyTorch on two ranks: time, processor time, memory."""
        if not strategy.startswith("mst"):
            return self.peer_step(model, strategy, "--memory", ranks=2)
        steps, warmup = STEPS[model]
        command = [self.adapter_python, "-m", "mpishard", "run", "-n", "2", str(PEER_STEP)]
        command += ["--model", model, "--strategy", strategy, "--memory"]
        command += ["--steps", str(steps), "--warmup", str(warmup)]
        printed = self._run([*command, "--optimizer", self.peer_optimizer], {})
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return found

    def jax_step(self, how: str) -> dict[str, Any]:
        """The times of a step in JAX: on two ranks, in one process, or over two devices."""
        words = ["run", "-n", str(JAX_STEP), "--how", how]
        ranks = 2 if how == "ranks" else 1
        variables = {"NPROC": "1"} if how == "one" else {}
        python = self.adapter_python
        found: dict[str, Any] = self.ours(*words, ranks=ranks, python=python, **variables)
        return found

    def products(self, library: str) -> dict[str, float]:
        """Seconds of each model's matrix products in NumPy or PyTorch, on one thread."""
        # Under the launcher NumPy has the BLAS kernels that the ranks have.
        words = [self.peer_python]
        if library == "numpy":
            words = [sys.executable, "-m", "mpishard", "run", "-n", "1"]
        printed = self._run([*words, str(PRODUCTS), library], {})
        found: dict[str, float] = json.loads(printed.splitlines()[-1])
        return found

    def _run(self, command: Sequence[str], variables: dict[str, str]) -> str:
        """Run a job to its end and return what it printed."""
        done = subprocess.run(
            [*self.prefix, *command],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise JobError(
                f"`{shlex.join(command)}` ended with code {done.returncode}:\n{done.stderr[-2000:]}"
            )
        return done.stdout


def idle_memory(python: str, imports: str, processes: int) -> int:
    """Resident memory (PSS) of processes that have imported the libraries and do nothing."""
    program = f"{imports}; print('ready', flush=True); input()"
    started = [
        subprocess.Popen(
            [python, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(processes)
    ]
    for process in started:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise JobError(f"{python} cannot do: {imports}")
    total = sum(proportional_memory(process.pid) or 0 for process in started)
    for process in started:
        process.communicate("\n")
    return total


def can(python: str, imports: str) -> bool:
    """Whether an interpreter is there and imports the libraries."""
    try:
        probe = subprocess.run([python, "-c", imports], capture_output=True, check=False)
    except OSError:
        return False
    return probe.returncode == 0
