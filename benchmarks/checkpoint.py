"""Time of saving, of saving beside training and of loading, and of plain writing and reading.

    mpishard run -n 2 benchmarks/checkpoint.py
    mpishard run -n 2 benchmarks/checkpoint.py --size 1GiB --folder /scratch --json FILE
    mpishard run -n 2 benchmarks/checkpoint.py --tiny 20000      # parameters of 10 elements

All ranks must see the folder. The files are removed.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import measure, options, positive, size
from rich.table import Table

from mpishard import checkpoint, nn
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.format.tensor_file import file_name
from mpishard.cli.tables import figures_table, rate_cells
from mpishard.cli.wording import bytes_text, counted
from mpishard.communication import CommunicationBackend
from mpishard.communication.agreement import same_outcome, share_path
from mpishard.distributed import as_distributed
from mpishard.optimizers import AdamW

_WIDTH = 1024
_TINY = 10  # elements of a parameter of a layer norm
_STEP_WIDTH = 1024  # of the matrix product that simulates a step of training
_KINDS = 3  # parameters, and AdamW's two moments
_ITEM = 4  # bytes
_PART = 8 << 20  # bytes of one plain write or read

_WAYS = {
    "write + fsync": (True, ""),
    "save": (True, "write + fsync"),
    "memory for copies": (False, ""),
    "save_async, call": (False, "save"),
    "save_async, polls": (False, "save"),
    "save_async, stall": (False, "save"),
    "save_async, until it is done": (True, "save"),
    "step alone": (False, ""),
    "step beside a save": (False, "step alone"),
    "read": (True, ""),
    "load": (True, "read"),
}
"""Way -> True if it moves the bytes of all files, and the way that it is compared with."""


@dataclass(frozen=True, slots=True)
class CheckpointResult:
    """Measurements of one way.

    Parameters
    ----------
    way : str
        Name of the operation that was timed.
    seconds : tuple of float
        Time of each repeat, on the slowest rank.
    nbytes : int
        Size of all ranks' files; 0 if the time is of something else.
    other : str
        The way that it is compared with, in the same repeat; empty if there is none.
    """

    way: str
    seconds: tuple[float, ...]
    nbytes: int = 0
    other: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointBenchmark:
    """An MLP in float32 with AdamW under FSDP, whose checkpoint has a given size.

    Parameters
    ----------
    nbytes : int
        Size of one rank's file, about.
    repeats : int
        Number of times of each way.
    folder : Path
        A folder on the file system that is measured.
    tiny : int
        Number of parameters of 10 elements, in layer norms, of the model that is measured instead;
        0 for the MLP.
    """

    nbytes: int
    repeats: int
    folder: Path
    tiny: int = 0

    def model(self, world_size: int) -> nn.Model:
        """Return the model before it is sharded."""
        if not self.tiny:
            return nn.MLP([_WIDTH] * (self.layers(world_size) + 1), dtype="float32")
        norms = [nn.LayerNorm(_TINY) for _ in range(-(-self.tiny // 2))]
        return nn.Model(nn.Sequential(*norms), nn.MSE(), input_shape=(_TINY,), dtype="float32")

    def description(self, world_size: int) -> str:
        """Return the model in words."""
        if self.tiny:
            return f"{counted(-(-self.tiny // 2), 'layer norm')} of {_TINY} features"
        return f"MLP of {counted(self.layers(world_size), 'layer')} of width {_WIDTH}"

    def layers(self, world_size: int) -> int:
        """Return the number of layers of 1024 x 1024 that make up the size."""
        # The ranks' files together hold each parameter and its two moments once.
        elements = self.nbytes * world_size // (_KINDS * _ITEM)
        return max(1, round(elements / (_WIDTH * _WIDTH + _WIDTH)))

    def run(self, backend: CommunicationBackend) -> list[CheckpointResult]:
        """Measure, each way in turn. Collective.

        Raises
        ------
        CheckpointError
            If there is not enough room.
        """
        made = None
        with same_outcome(backend):
            if backend.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                made = Path(tempfile.mkdtemp(prefix="mpishard-bench-", dir=self.folder))
        folder = share_path(backend, made)
        assert folder is not None
        try:
            return _Run(self, backend, folder).results()
        finally:
            if backend.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)

    def table(self, results: list[CheckpointResult], world_size: int) -> Table:
        """Return the results as a table; a ratio is the median over repeats that have both."""
        total = next(result.nbytes for result in results if result.nbytes)
        title = (
            f"{self.description(world_size)}, AdamW, FSDP, "
            f"{counted(world_size, 'rank')}: {bytes_text(total)} in {self.folder.resolve()}"
        )
        columns = ("", "median", "spread", "bytes/s", "ratio", "to")
        table = figures_table(title, columns, ("", "to"), gap=1)
        seconds: Mapping[str, np.ndarray[Any, Any]] = {r.way: np.array(r.seconds) for r in results}
        for result in results:
            way, other = result.way, result.other
            ratio = f"{np.median(seconds[way] / seconds[other]):.2f}" if other else ""
            table.add_row(way, *rate_cells(result.seconds, result.nbytes), ratio, other)
        table.caption = (
            "read and load: from the system's cache. stall: time that training waits in all"
        )
        return table


class _Run:
    """The model on one rank, and its measurements."""

    def __init__(
        self, benchmark: CheckpointBenchmark, backend: CommunicationBackend, folder: Path
    ) -> None:
        self._benchmark = benchmark
        self._backend = backend
        self._folder = folder
        model = as_distributed(benchmark.model(backend.world_size), backend, "fsdp")
        self._trained = model, as_distributed(AdamW(1e-3), backend, "fsdp")
        self._staging = checkpoint.StagingBuffer()
        self._square = np.ones((_STEP_WIDTH, _STEP_WIDTH), np.float32)
        self._product = np.empty_like(self._square)
        self._totals = np.zeros(3)  # loss, weight, squared norm of the gradient
        self._seconds: dict[str, list[float]] = {}

    def results(self) -> list[CheckpointResult]:
        saved = self._folder / "saved"
        checkpoint.save(saved, *self._trained)  # allocates memory; its files are read below
        file = saved / file_name(self._backend.rank)
        content = np.fromfile(file, np.uint8)
        total = int(self._backend.all_gather(np.array([content.size])).sum())
        plain = self._folder / f"plain{self._backend.rank}"
        # First, because otherwise the first save would include it.
        self._timed("memory for copies", lambda: checkpoint.reserve(self._staging, *self._trained))
        for repeat in range(self._benchmark.repeats):
            # The same bytes to a new file each time, as in a save.
            self._timed("write + fsync", lambda: _write(plain, content))
            plain.unlink()
            path = self._folder / f"save{repeat}"
            self._timed("save", partial(checkpoint.save, path, *self._trained))
            self._remove(path)
            self._save_beside_steps(self._folder / f"async{repeat}")
            self._timed("read", lambda: _read(file, content))
            self._timed("load", lambda: checkpoint.load(saved, *self._trained))
        return [
            CheckpointResult(way, tuple(self._seconds[way]), total if moves else 0, other)
            for way, (moves, other) in _WAYS.items()
        ]

    def _save_beside_steps(self, path: Path) -> None:
        self._backend.barrier()
        # Just before the save, so that the machine is in the same state for both kinds of steps.
        alone = float(np.median([self._step() for _ in range(10)]))
        self._backend.barrier()
        begun = time.perf_counter()
        pending = checkpoint.save_async(path, *self._trained, staging=self._staging)
        called = time.perf_counter() - begun
        polled, steps = 0.0, []
        while not pending.done:
            steps.append(self._step())
            before = time.perf_counter()
            pending.poll()
            polled += time.perf_counter() - before
        took = time.perf_counter() - begun
        self._remove(path)
        self._note("save_async, call", called)
        self._note("save_async, polls", polled)
        self._note("save_async, stall", called + polled)
        self._note("save_async, until it is done", took)
        self._note("step alone", alone)
        self._note("step beside a save", float(np.median(steps)))

    def _step(self) -> float:
        """Return the time of a layer's product and the small reduction of a step. Collective."""
        begun = time.perf_counter()
        np.matmul(self._square, self._square, out=self._product)
        np.maximum(self._product, 0.0, out=self._product)
        self._backend.all_reduce(self._totals)
        return time.perf_counter() - begun

    def _timed(self, way: str, body: Callable[[], object]) -> None:
        self._backend.barrier()
        begun = time.perf_counter()
        body()
        self._note(way, time.perf_counter() - begun)

    def _note(self, way: str, seconds: float) -> None:
        """Record the slowest rank's time. Collective."""
        # Training continues when the last rank is ready.
        slowest = float(self._backend.all_gather(np.array([seconds])).max())
        self._seconds.setdefault(way, []).append(slowest)

    def _remove(self, path: Path) -> None:
        # The first barrier waits for ranks that still write, the second for the removal.
        self._backend.barrier()
        if self._backend.rank == 0:
            shutil.rmtree(path)
        self._backend.barrier()


def _write(file: Path, content: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    parts = range(0, content.size, _PART)
    disk.write_file(file, (content[start : start + _PART].data for start in parts))


def _read(file: Path, out: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    with file.open("rb", buffering=0) as opened:
        for start in range(0, out.size, _PART):
            opened.readinto(out[start : start + _PART].data)


def main(backend: CommunicationBackend, arguments: argparse.Namespace) -> tuple[Any, Table]:
    """Measure."""
    benchmark = CheckpointBenchmark(
        arguments.size, arguments.repeats, arguments.folder, arguments.tiny
    )
    results = benchmark.run(backend)
    rows = [asdict(result) for result in results]
    return {"checkpoint": rows}, benchmark.table(results, backend.world_size)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument(
        "--size", type=size, default="256MiB", help="of each rank's file, about; default: 256MiB"
    )
    parser.add_argument(
        "--tiny", type=positive, default=0, help="parameters of 10 elements, and not an MLP"
    )
    parser.add_argument("--repeats", type=positive, default=7, help="of each; default: 7")
    parser.add_argument("--folder", type=Path, default=Path(), help="default: this folder")
    measure(main, parser.parse_args())
