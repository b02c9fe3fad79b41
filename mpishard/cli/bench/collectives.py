"""``mpishard bench collectives``: what each collective costs, beside what bounds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from mpishard.cli.bench.peers import GlooGroup
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
    "collective_panels",
    "collective_table",
]

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "barrier")
"""Collectives that are measured."""

Way = Callable[[], object]

_IN_PLACE, _MPI_IN_PLACE = "ours, in place", "MPI, in place"


@dataclass(frozen=True, slots=True)
class CollectiveResult:
    """What was measured of one collective, at one size, done in one way.

    Parameters
    ----------
    collective : str
        One of `KINDS`.
    way : str
        ``ours``; ``ours, in place`` without an ``out``; ``ours, shared`` on arrays of
        ``allocate_shared``; ``MPI`` and ``gloo``, those libraries' own; ``MPI, in place``, with
        ``MPI_IN_PLACE``; ``memcpy``, a copy of as many bytes by every rank.
    nbytes : int
        Of the whole array: an all-gather's result, the others' input.
    seconds : tuple of float
        Of one call, for each repeat.
    """

    collective: str
    way: str
    nbytes: int
    seconds: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CollectiveBenchmark:
    """Which collectives are measured, at which sizes.

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
    """

    kinds: Sequence[str]
    sizes: Sequence[int]
    dtype: str = "float32"
    repeats: int = 15

    def run(self, backend: CommunicationBackend) -> Iterator[list[CollectiveResult]]:
        """Measure one collective at one size after the other, each in all its ways. Collective."""
        mpi = load_mpi().COMM_WORLD if isinstance(backend, MPICommunicationBackend) else None
        gloo = GlooGroup.join(backend) if mpi is not None else None
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


class _Ways:
    """The ways to do a collective on arrays of one size; results that they leave are checked."""

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
        """Way -> what does it once."""
        ways: Mapping[str, Way] = getattr(self, f"_{kind}")()
        return dict(ways)

    def _input(self, length: int) -> np.ndarray[Any, Any]:
        return np.full(length, self.backend.rank + 1, self.dtype)

    def _own_part_of_shared(self) -> Any:
        """Input of this rank in memory that its peers can read, or None."""
        buffer = self.backend.allocate_shared(self.backend.world_size * self.length, self.dtype)
        if buffer is None:
            return None
        mine = buffer[self.backend.rank * self.length :][: self.length]
        mine[...] = self.backend.rank + 1
        return mine

    def _sums(self, ways: dict[str, Way], results: Mapping[str, Any]) -> dict[str, Way]:
        """``ways``, each of which fills its result with the sum over ranks."""
        return self._checked(ways, results, np.array([sum(self._of_each_rank())]))

    def _of_each_rank(self) -> range:
        """What the inputs of the ranks are full of."""
        return range(1, self.backend.world_size + 1)

    def _checked(
        self, ways: dict[str, Way], results: Mapping[str, Any], expected: np.ndarray[Any, Any]
    ) -> dict[str, Way]:
        """``ways``, each of which fills its result with what is expected."""
        for way, result in results.items():
            ways[way]()
            self.backend.barrier()
            if not (result == expected).all():
                raise ArithmeticError(f"{way} gives {result[:4]}.. and not {expected[:4]}..")
        return ways

    def _all_reduce(self) -> dict[str, Way]:
        backend, array = self.backend, self._input(self.length)
        out, mpi_out, copy = (np.empty_like(array) for _ in range(3))
        zeros = np.zeros_like(array)  # which stay zeros, however often they are added up
        ways: dict[str, Way] = {
            "ours": lambda: backend.all_reduce(array, out=out),
            _IN_PLACE: lambda: backend.all_reduce(zeros),
        }
        results = {"ours": out}
        mine = self._own_part_of_shared()
        shared = backend.allocate_shared(self.length, self.dtype)
        if mine is not None and shared is not None:
            ways["ours, shared"] = lambda: backend.all_reduce(mine, out=shared)
            results["ours, shared"] = shared
        if self.mpi is not None:
            mpi_zeros, in_place = np.zeros_like(array), load_mpi().IN_PLACE
            ways["MPI"] = lambda: self.mpi.Allreduce(array, mpi_out)
            ways[_MPI_IN_PLACE] = lambda: self.mpi.Allreduce(in_place, mpi_zeros)
            results["MPI"] = mpi_out
        if self.gloo is not None:
            ways["gloo"] = self.gloo.all_reduce(array)
        ways["memcpy"] = lambda: np.copyto(copy, array)
        return self._sums(ways, results)

    def _reduce_scatter(self) -> dict[str, Way]:
        backend, array = self.backend, self._input(self.length)
        out, mpi_out, shared_out = (
            np.empty(self.layout.size(backend.rank), self.dtype) for _ in range(3)
        )
        copy = np.empty_like(array)
        ways: dict[str, Way] = {"ours": lambda: backend.reduce_scatter(array, out=out)}
        results = {"ours": out}
        mine = self._own_part_of_shared()
        if mine is not None:
            ways["ours, shared"] = lambda: backend.reduce_scatter(mine, out=shared_out)
            results["ours, shared"] = shared_out
        if self.mpi is not None:
            counts = list(self.layout.sizes)
            ways["MPI"] = lambda: self.mpi.Reduce_scatter(array, mpi_out, counts)
            results["MPI"] = mpi_out
        if self.gloo is not None and self.length % self.backend.world_size == 0:
            ways["gloo"] = self.gloo.reduce_scatter(array)
        ways["memcpy"] = lambda: np.copyto(copy, array)
        return self._sums(ways, results)

    def _all_gather(self) -> dict[str, Way]:
        backend = self.backend
        piece = self._input(self.layout.size(backend.rank))
        out, mpi_out, copy = (np.empty(self.length, self.dtype) for _ in range(3))
        ways: dict[str, Way] = {"ours": lambda: backend.all_gather(piece, out=out)}
        results = {"ours": out}
        if self.mpi is not None:
            counts = list(self.layout.sizes)
            ways["MPI"] = lambda: self.mpi.Allgatherv(piece, [mpi_out, counts])
            results["MPI"] = mpi_out
        if self.gloo is not None and self.length % self.backend.world_size == 0:
            ways["gloo"] = self.gloo.all_gather(piece, self.length)
        ways["memcpy"] = lambda: np.copyto(copy, out)
        return self._checked(ways, results, np.repeat(self._of_each_rank(), self.layout.sizes))

    def _barrier(self) -> dict[str, Way]:
        ways: dict[str, Way] = {"ours": self.backend.barrier}
        if self.mpi is not None:
            ways["MPI"] = self.mpi.Barrier
        if self.gloo is not None:
            ways["gloo"] = self.gloo.barrier
        return ways


def collective_table(results: Sequence[CollectiveResult], world_size: int) -> Table:
    """The results as a table; ratios are to the same collective at the same size.

    A ratio is the median over the repeats, in each of which the ways took turns; what is done in
    place is compared with what the library does in place.
    """
    columns = ("collective", "size", "", "median", "spread", "bytes/s", "/ MPI", "/ memcpy")
    table = figures_table(f"{counted(world_size, 'rank')}, medians", columns, ("collective", ""))
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
    """A panel of time against size for each collective that has sizes."""
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
