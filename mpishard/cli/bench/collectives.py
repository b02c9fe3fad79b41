"""``mpishard bench collectives``: time of each collective, beside what bounds it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from mpishard import settings
from mpishard.cli.tables import figures_table, timing_cells
from mpishard.cli.wording import bytes_text, counted
from mpishard.communication import CommunicationBackend, MPICommunicationBackend
from mpishard.communication.mpi.library import load_mpi
from mpishard.layout import ShardLayout
from mpishard.observe import Curve, Panel, Timing, time_alternately

__all__ = [
    "KINDS",
    "CollectiveBenchmark",
    "CollectiveResult",
    "GlooGroup",
    "collective_panels",
    "collective_table",
]

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "barrier")
"""Collectives that are measured."""

Way = Callable[[], object]
Ways = dict[str, tuple[Way, Any]]
"""Name -> what does the collective once, and the array that it leaves its result in, or None."""

# It ends with the rank that started it, however that rank ends.
_BUSY_LOOP = "import os; rank = os.getppid()\nwhile os.getppid() == rank: sum(range(10**6))"

_IN_PLACE, _MPI_IN_PLACE = "ours, in place", "MPI, in place"


@dataclass(frozen=True, slots=True)
class CollectiveResult:
    """Measurements of one collective, at one size, done in one way.

    Parameters
    ----------
    collective : str
        One of `KINDS`.
    way : str
        ``ours``; ``ours, in place`` without an ``out``; ``ours, shared`` on arrays of
        ``allocate_shared``; ``MPI`` and ``gloo``, those libraries' own; ``MPI, in place``, with
        ``MPI_IN_PLACE``; ``memcpy``, a copy of as many bytes by every rank.
    nbytes : int
        Size of the whole array: the result of an all-gather, the input of the others.
    seconds : tuple of float
        Time of one call, for each repeat.
    """

    collective: str
    way: str
    nbytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CollectiveBenchmark:
    """Collectives that are measured, and their sizes.

    Parameters
    ----------
    kinds : sequence of str
        Of `KINDS`.
    sizes : sequence of int
        Bytes of the whole array.
    dtype : str
        Of its elements.
    repeats : int
        How often each is timed.
    busy : int
        Number of busy processes that run on each node meanwhile.
    """

    kinds: Sequence[str]
    sizes: Sequence[int]
    dtype: str = "float32"
    repeats: int = 15
    busy: int = 0

    def run(self, backend: CommunicationBackend) -> Iterator[list[CollectiveResult]]:
        """Measure one collective at one size after the other, each in all its ways. Collective."""
        mpi = load_mpi().COMM_WORLD if isinstance(backend, MPICommunicationBackend) else None
        gloo = GlooGroup.join(backend) if mpi is not None else None
        with _busy_loops(self.busy if backend.local_rank == 0 else 0):
            for kind in self.kinds:
                for nbytes in self.sizes if kind != "barrier" else (0,):
                    ways = _Ways(backend, mpi, gloo, nbytes, np.dtype(self.dtype)).of(kind)
                    timings = time_alternately(backend, list(ways.values()), self.repeats)
                    yield [
                        CollectiveResult(kind, way, nbytes, timing.seconds)
                        for way, timing in zip(ways, timings, strict=True)
                    ]
        if gloo is not None:
            gloo.leave()


@contextmanager
def _busy_loops(number: int) -> Iterator[None]:
    """Keep cores busy with other processes, as other users of the machine do."""
    with ExitStack() as stack:
        for _ in range(number):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY_LOOP]))
            stack.callback(loop.kill)
        yield


class _Ways:
    """Ways to do a collective on arrays of one size; the results that they leave are checked."""

    def __init__(
        self,
        backend: CommunicationBackend,
        mpi: Any,
        gloo: GlooGroup | None,
        nbytes: int,
        dtype: np.dtype[Any],
    ) -> None:
        self.backend = backend
        self.mpi = mpi
        self.gloo = gloo
        self.length = max(1, nbytes // dtype.itemsize)
        self.dtype = dtype
        self.layout = ShardLayout(self.length, backend.world_size)

    def of(self, kind: str) -> dict[str, Way]:
        """Return what does the collective once, for each way, after a look at its result."""
        ways, expected = getattr(self, f"_{kind}")()
        for way, (call, result) in ways.items():
            if result is None:
                continue
            call()
            self.backend.barrier()
            if not (result == expected).all():
                raise ArithmeticError(f"{way} gives {result[:4]}.. and not {expected[:4]}..")
        return {way: call for way, (call, _) in ways.items()}

    def _input(self, length: int) -> np.ndarray[Any, Any]:
        return np.full(length, self.backend.rank + 1, self.dtype)

    def _own_part_of_shared(self) -> Any:
        """Return an input of this rank in memory that its peers can read, or None."""
        buffer = self.backend.allocate_shared(self.backend.world_size * self.length, self.dtype)
        if buffer is None:
            return None
        mine = buffer[self.backend.rank * self.length :][: self.length]
        mine[...] = self.backend.rank + 1
        return mine

    def _sum(self) -> np.ndarray[Any, Any]:
        """Return the sum of the ranks' inputs."""
        return np.array([sum(range(1, self.backend.world_size + 1))])

    def _all_reduce(self) -> tuple[Ways, Any]:
        backend, array = self.backend, self._input(self.length)
        out, mpi_out, copy = (np.empty_like(array) for _ in range(3))
        zeros = np.zeros_like(array)  # which stay zeros, however often they are added up
        ways: Ways = {
            "ours": (lambda: backend.all_reduce(array, out=out), out),
            _IN_PLACE: (lambda: backend.all_reduce(zeros), None),
        }
        mine = self._own_part_of_shared()
        shared = backend.allocate_shared(self.length, self.dtype)
        if mine is not None and shared is not None:
            ways["ours, shared"] = (lambda: backend.all_reduce(mine, out=shared), shared)
        if self.mpi is not None:
            mpi_zeros, in_place = np.zeros_like(array), load_mpi().IN_PLACE
            ways["MPI"] = (lambda: self.mpi.Allreduce(array, mpi_out), mpi_out)
            ways[_MPI_IN_PLACE] = (lambda: self.mpi.Allreduce(in_place, mpi_zeros), None)
        if self.gloo is not None:
            ways["gloo"] = (self.gloo.all_reduce(array), None)
        ways["memcpy"] = (lambda: np.copyto(copy, array), None)
        return ways, self._sum()

    def _reduce_scatter(self) -> tuple[Ways, Any]:
        backend, array, counts = self.backend, self._input(self.length), list(self.layout.sizes)
        out, mpi_out, shared = (np.empty(counts[backend.rank], self.dtype) for _ in range(3))
        copy = np.empty_like(array)
        ways: Ways = {"ours": (lambda: backend.reduce_scatter(array, out=out), out)}
        mine = self._own_part_of_shared()
        if mine is not None:
            ways["ours, shared"] = (lambda: backend.reduce_scatter(mine, out=shared), shared)
        if self.mpi is not None:
            ways["MPI"] = (lambda: self.mpi.Reduce_scatter(array, mpi_out, counts), mpi_out)
        if self.gloo is not None and self.length % backend.world_size == 0:
            ways["gloo"] = (self.gloo.reduce_scatter(array), None)
        ways["memcpy"] = (lambda: np.copyto(copy, array), None)
        return ways, self._sum()

    def _all_gather(self) -> tuple[Ways, Any]:
        backend, counts = self.backend, list(self.layout.sizes)
        piece = self._input(counts[backend.rank])
        out, mpi_out, copy = (np.empty(self.length, self.dtype) for _ in range(3))
        ways: Ways = {"ours": (lambda: backend.all_gather(piece, out=out), out)}
        if self.mpi is not None:
            ways["MPI"] = (lambda: self.mpi.Allgatherv(piece, [mpi_out, counts]), mpi_out)
        if self.gloo is not None and self.length % backend.world_size == 0:
            ways["gloo"] = (self.gloo.all_gather(piece, self.length), None)
        ways["memcpy"] = (lambda: np.copyto(copy, out), None)
        return ways, np.repeat(range(1, backend.world_size + 1), counts)

    def _barrier(self) -> tuple[Ways, Any]:
        ways: Ways = {"ours": (self.backend.barrier, None)}
        if self.mpi is not None:
            ways["MPI"] = (self.mpi.Barrier, None)
        if self.gloo is not None:
            ways["gloo"] = (self.gloo.barrier, None)
        return ways, None


def collective_table(results: Sequence[CollectiveResult], world_size: int) -> Table:
    """Return the results as a table; ratios are to the same collective at the same size.

    A ratio is the median over the repeats, in each of which the ways took turns. Collectives in
    place are compared with the library's in place.
    """
    columns = ("collective", "size", "", "median", "spread", "bytes/s", "/ MPI", "/ copy")
    table = figures_table(f"{counted(world_size, 'rank')}, medians", columns, ("collective", ""), 1)
    seconds = {(r.collective, r.nbytes, r.way): np.array(r.seconds) for r in results}
    seen = None
    for result in results:
        key = (result.collective, result.nbytes)
        timing = Timing(result.seconds)
        ratios = [
            f"{np.median(result.seconds / seconds[*key, other]):.2f}"
            if (*key, other) in seconds
            else ""
            for other in (_MPI_IN_PLACE if result.way == _IN_PLACE else "MPI", "memcpy")
        ]
        table.add_row(
            *([result.collective, bytes_text(result.nbytes)] if key != seen else ["", ""]),
            result.way,
            *timing_cells(timing),
            f"{bytes_text(int(result.nbytes / timing.median))}/s" if result.nbytes else "",
            *ratios,
        )
        seen = key
    return table


def collective_panels(results: Sequence[CollectiveResult]) -> list[Panel]:
    """Return a panel of time against size for each collective that has sizes."""
    panels = []
    for kind in dict.fromkeys(r.collective for r in results if r.nbytes):
        mine = [r for r in results if r.collective == kind]
        curves = []
        for way in dict.fromkeys(r.way for r in mine):
            points = sorted((r.nbytes, Timing(r.seconds)) for r in mine if r.way == way)
            curves.append(
                Curve(
                    way,
                    [nbytes for nbytes, _ in points],
                    [timing.median * 1e3 for _, timing in points],
                    [(t.quartiles[0] * 1e3, t.quartiles[1] * 1e3) for _, t in points],
                )
            )
        panels.append(Panel(kind.replace("_", "-"), "bytes", "milliseconds", curves))
    return panels


class GlooGroup:
    """The ranks of one node as a process group of ``torch.distributed``."""

    def __init__(self, torch: Any, folder: tempfile.TemporaryDirectory[str] | None) -> None:
        self._torch = torch
        self._folder = folder

    @classmethod
    def join(cls, backend: CommunicationBackend) -> GlooGroup | None:
        """Meet the other ranks; None on all where one has no PyTorch. Collective."""
        here = importlib.util.find_spec("torch") is not None
        if backend.node_count > 1 or backend.all_gather(np.array([here])).min() == 0:
            return None
        import torch
        import torch.distributed

        folder = tempfile.TemporaryDirectory(prefix="mpishard-") if backend.rank == 0 else None
        name = None if folder is None else np.frombuffer(os.fsencode(folder.name), np.uint8)
        place = os.fsdecode(backend.broadcast(name).tobytes())
        settings.write_default("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            "gloo", f"file://{place}/store", rank=backend.rank, world_size=backend.world_size
        )
        return cls(torch, folder)

    def leave(self) -> None:
        """Part from the other ranks."""
        self.barrier()
        self._torch.distributed.destroy_process_group()
        if self._folder is not None:
            self._folder.cleanup()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._torch.distributed.barrier()

    def all_reduce(self, array: np.ndarray[Any, Any]) -> Callable[[], object]:
        """Sum zeros of the array's length and dtype, in place."""
        tensor = self._torch.from_numpy(np.zeros_like(array))
        return lambda: self._torch.distributed.all_reduce(tensor)

    def reduce_scatter(self, array: np.ndarray[Any, Any]) -> Callable[[], object]:
        """Sum the array, and keep this rank's piece."""
        distributed = self._torch.distributed
        # Newer versions have the same under another name, and warn of the old one.
        scatter = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)
        source = self._torch.from_numpy(array)
        out = self._torch.empty(len(array) // distributed.get_world_size(), dtype=source.dtype)
        return lambda: scatter(out, source)

    def all_gather(self, piece: np.ndarray[Any, Any], length: int) -> Callable[[], object]:
        """Put all ranks' pieces end to end."""
        distributed = self._torch.distributed
        gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
        source = self._torch.from_numpy(piece)
        out = self._torch.empty(length, dtype=source.dtype)
        return lambda: gather(out, source)
