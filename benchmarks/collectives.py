"""Collectives beside those of MPI and of PyTorch's gloo, also while other programs use the cores.

    mpishard run -n 2 benchmarks/collectives.py
    mpishard run -n 2 benchmarks/collectives.py --sizes 64KiB 1MiB --busy 4 --repeats 101

The rows of gloo need PyTorch in the environment of the ranks, and one node. `mpishard bench
collectives` measures the rest without this script.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import measure, options, positive, size
from rich.table import Table

import mpishard as ms
from mpishard.cli.bench.collectives import KINDS, CollectiveBenchmark, CollectiveResult, Way
from mpishard.communication.agreement import share_path
from mpishard.layout import ShardLayout

# It ends with the rank that started it, even if that rank is killed.
BUSY_LOOP = "import os; rank = os.getppid()\nwhile os.getppid() == rank: sum(range(10**6))"

GLOO_NAMES = {
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
}


@dataclass(frozen=True)
class PeerBenchmark(CollectiveBenchmark):
    """Collectives that are measured, with gloo's, and processes that take time of the cores.

    Parameters
    ----------
    busy : int
        Number of busy processes on each node meanwhile.
    """

    busy: int = 0

    def run(self, backend: ms.CommunicationBackend) -> list[CollectiveResult]:
        """Measure, in a group of gloo if there is PyTorch. Collective."""
        with gloo(backend), ExitStack() as stack:
            for _ in range(self.busy if backend.local_rank == 0 else 0):
                loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY_LOOP]))
                stack.callback(loop.kill)
            return super().run(backend)

    def ways(self, backend: ms.CommunicationBackend, kind: str, nbytes: int) -> dict[str, Way]:
        """Return the ways to perform a collective; gloo's is the last."""
        found, torch = super().ways(backend, kind, nbytes), sys.modules.get("torch")
        if torch is None or not torch.distributed.is_initialized():
            return found
        if kind == "barrier":
            return found | {"gloo": torch.distributed.barrier}
        dtype = np.dtype(self.dtype)
        length = max(1, nbytes // dtype.itemsize)
        if kind != "all_reduce" and length % backend.world_size:  # gloo refuses uneven pieces
            return found
        piece = ShardLayout(length, backend.world_size).size(backend.rank)
        lengths = {"reduce_scatter": (length, piece), "all_gather": (piece, length)}
        source, out = (np.zeros(n, dtype) for n in lengths.get(kind, (length, 0)))
        return found | {"gloo": of_gloo(torch, kind, source, out)}


@contextmanager
def gloo(backend: ms.CommunicationBackend) -> Iterator[None]:
    """Have a group of gloo inside, on MPI ranks of one node with PyTorch. Collective."""
    is_here = importlib.util.find_spec("torch") is not None
    on_threads = isinstance(backend, ms.InMemoryCommunicationBackend)
    if on_threads or backend.node_count > 1 or not backend.all_gather(np.array([is_here])).all():
        yield
        return
    import torch
    import torch.distributed

    folder = tempfile.TemporaryDirectory(prefix="mpishard-") if backend.rank == 0 else None
    place = share_path(backend, None if folder is None else Path(folder.name))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", f"file://{place}/store", rank=backend.rank, world_size=backend.world_size
    )
    yield
    # Not after an exception, because the other ranks may never come.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if folder is not None:
        folder.cleanup()


def of_gloo(torch: Any, kind: str, source: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> Way:
    """Return gloo's collective, which sums ``source`` in place, or writes to ``out``."""
    distributed, tensor, result = torch.distributed, *map(torch.from_numpy, (source, out))
    if kind == "all_reduce":
        return lambda: distributed.all_reduce(tensor)
    # Newer versions have renamed it, and warn about the old name.
    new, old = GLOO_NAMES[kind]
    call = getattr(distributed, new if hasattr(distributed, new) else old)
    return lambda: call(result, tensor)


def main(backend: ms.CommunicationBackend, arguments: argparse.Namespace) -> tuple[Any, Table]:
    """Measure."""
    kinds, sizes = arguments.collective, arguments.sizes
    benchmark = PeerBenchmark(kinds, sizes, repeats=arguments.repeats, busy=arguments.busy)
    results = benchmark.run(backend)
    rows = [asdict(result) for result in results]
    return {"collectives": rows}, benchmark.table(results, backend.world_size)


if __name__ == "__main__":
    usual = ["8B", "1KiB", "64KiB", "1MiB", "16MiB", "64MiB"]
    parser = options(__doc__)
    parser.add_argument("--collective", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--sizes", nargs="+", type=size, default=[*map(size, usual)])
    parser.add_argument("--repeats", type=positive, default=15, help="of each; default: 15")
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N", help="busy processes on each node meanwhile"
    )
    measure(main, parser.parse_args())
