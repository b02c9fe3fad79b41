"""The jobs that `compare.py` runs: a training step of ours or of a peer, each on fresh ranks."""

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

from mpishard.cli.machine import describe_machine
from mpishard.observe import proportional_memory

PEER_STEP = Path(__file__).parent / "peers" / "step.py"
JAX_GPT = Path(__file__).parent / "peers" / "jax_gpt.py"
ADAPTER_STEP = Path(__file__).with_name("adapter_step.py")
JAX_STEP = Path(__file__).with_name("jax_step.py")
PRODUCTS = Path(__file__).with_name("products.py")
PRECISION_MEMORY = Path(__file__).with_name("precision_memory.py")
SPEEDUP = Path(__file__).with_name("speedup.py")


@dataclass(frozen=True)
class Workload:
    """Training of a job: model, sequences or samples of a rank, steps that count, and warm-up.

    ``size`` has the options of a model that does not have the default width and depth.
    """

    model: str
    batch: int
    steps: int
    warmup: int
    size: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """Options that all programs understand."""
        return [*self.size, "--steps", str(self.steps), "--warmup", str(self.warmup)]


_LARGE = ("--width", "768", "--layers", "8", "--tokens", "256")

WORKLOADS = {
    "mlp": Workload("mlp", 64, 20, 4),
    "gpt": Workload("gpt", 8, 7, 2),
    # A step is 350 GFLOP on each rank: three to five seconds.
    "large": Workload("gpt", 4, 2, 1, _LARGE),
    "conv": Workload("conv", 16, 15, 3),
    "encoder": Workload("encoder", 16, 15, 3),
    # A step is milliseconds, most of them outside of products.
    "small": Workload("mlp", 16, 100, 10, ("--width", "256", "--layers", "32")),
}

IMPORTS_OURS = (
    "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI, mpishard.cli.bench.command"
)
IMPORTS_ADAPTER = "import torch, mpi4py; from mpishard.adapters import TorchModel"
IMPORTS_PEER = "import torch; from torch.distributed.fsdp import fully_shard"
IMPORTS_JAX_GPT = "import jax, optax"
# PyTorch's optimizers import its compiler, of 60 MiB, which is no cost of sharding.
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
    """Starts jobs, with the interpreters and options of the command line.

    Parameters
    ----------
    peer_python : str
        Python interpreter with PyTorch.
    adapter_python : str
        Python interpreter with both PyTorch and mpishard.
    prefix : sequence of str
        Words before each command, such as ``taskset -c 0,1``.
    peer_optimizer : str
        Name of an implementation of AdamW in PyTorch.
    jax_python : str
        Python interpreter with JAX and optax.
    machine : dict
        Description of the machine by the ranks of the last job.
    peer, jax : str
        Names and versions of PyTorch and JAX, once a job of them has run.
    """

    peer_python: str
    adapter_python: str = sys.executable
    prefix: Sequence[str] = ()
    peer_optimizer: str = "fused"
    jax_python: str = sys.executable
    machine: dict[str, Any] = field(default_factory=describe_machine)
    peer: str = ""
    jax: str = ""

    def ours(self, *words: str, ranks: int, python: str = sys.executable, **variables: str) -> Any:
        """What ``mpishard WORDS --json FILE`` writes, with RANKS after the word ``-n``."""
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = [python, "-m", "mpishard", *words, "--json", str(result)]
            place = command.index("-n") + 1
            self._run([*command[:place], str(ranks), *command[place:]], variables)
            return json.loads(result.read_text(encoding="utf-8"))

    def our_step(
        self, name: str, *options: str, ranks: int, numba: bool = False, **variables: str
    ) -> list[dict[str, Any]]:
        """The results of ``mpishard bench step`` under FSDP, with compiled loops or without."""
        work = WORKLOADS[name]
        words = ["bench", "step", "-n", "--strategy", "fsdp", "--model", work.model]
        words += ["--batch", str(work.batch)]
        variables["MPISHARD_NUMBA"] = "auto" if numba else "off"
        found = self.ours(*words, *work.words, *options, ranks=ranks, **variables)
        self.machine = found["machine"]
        rows: list[dict[str, Any]] = found["steps"]
        return rows

    def peer_step(self, name: str, strategy: str, *options: str, ranks: int) -> dict[str, Any]:
        """The result of PyTorch's step: of several ranks, or of 2 threads on both batches."""
        work = WORKLOADS[name]
        command = [self.peer_python, str(PEER_STEP), "--strategy", strategy]
        command += ["--model", work.model, *work.words]
        command += ["--ranks", str(ranks), "--batch", str(work.batch)]
        printed = self._run([*command, "--optimizer", self.peer_optimizer, *options], {})
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
        self.peer = found["library"]
        return found

    def jax_gpt(self, name: str, *options: str) -> dict[str, Any]:
        """The result of JAX's step of a GPT: one process on all cores, with both ranks' batches."""
        work = WORKLOADS[name]
        command = [self.jax_python, str(JAX_GPT), *work.words, "--batch", str(2 * work.batch)]
        printed = self._run([*command, *options], {})
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
        self.jax = found["library"]
        return found

    def adapter_step(self, name: str, *options: str) -> dict[str, Any]:
        """The result of PyTorch's modules in mpishard's adapter."""
        work = WORKLOADS[name]
        words = ["run", "-n", str(ADAPTER_STEP), "--model", work.model, *work.words, *options]
        found: dict[str, Any] = self.ours(
            *words, ranks=2, python=self.adapter_python, MPISHARD_NUMBA="off"
        )
        return found

    def loop_step(self, model: str, strategy: str) -> dict[str, Any]:
        """The result of a loop of PyTorch on two ranks: time, processor time, memory."""
        if not strategy.startswith("mst"):
            return self.peer_step(model, strategy, "--memory", ranks=2)
        command = [self.adapter_python, "-m", "mpishard", "run", "-n", "2", str(PEER_STEP)]
        command += ["--model", model, "--strategy", strategy, "--memory", *WORKLOADS[model].words]
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

    def precision_memory(self, precision: str) -> dict[str, int]:
        """Bytes of activations, and all bytes, of both ranks in a step of the GPT 8 x 768."""
        words = ["run", "-n", str(PRECISION_MEMORY), "--precision", precision]
        found: dict[str, int] = self.ours(*words, ranks=2)
        return found

    def speedup(self) -> list[dict[str, Any]]:
        """Times of one batch on two ranks together, in several ways, and on one alone."""
        rows: list[dict[str, Any]] = self.ours("run", "-n", str(SPEEDUP), ranks=2)["speedup"]
        return rows

    def products(self, library: str) -> dict[str, float]:
        """Seconds of each model's matrix products in NumPy or PyTorch, on one thread."""
        # Under the launcher NumPy uses the same BLAS kernels as the ranks.
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
