"""``mpishard bench collectives``: time of each collective, of MPI's own, and of a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from rich.table import Table

from mpishard.base import Array, DType, ShardLayout
from mpishard.cli.tables import figures_table, rate_cells
from mpishard.cli.wording import bytes_text, counted
from mpishard.communication import Arena, CommunicationBackend, MPICommunicationBackend, load_mpi
from mpishard.observe import time_alternately

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "barrier")
"""Collectives that are measured."""

Way = Callable[[], object]
"""A function that performs a collective once."""

_Found = tuple[Way, Array | None]
"""A way, and the array with its result; None if the result is not checked."""

_IN_PLACE, _MPI_IN_PLACE = "ours, in place", "MPI, in place"


@dataclass(frozen=True, slots=True)
class CollectiveResult:
    """Measurements of one collective, at one size, done in one way.

    Parameters
    ----------
    collective : str
        One of `KINDS`.
    way : str
        ``ours``; ``ours, in place`` without an ``out``; ``ours, shared``, by an `Arena`; ``MPI``,
        that of the MPI library; ``MPI, in place`` with ``MPI_IN_PLACE``; ``memcpy``, a copy of the
        same number of bytes by every rank.
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
        Dtype of its elements.
    repeats : int
        Number of times of each way.
    """

    kinds: Sequence[str]
    sizes: Sequence[int]
    dtype: str = "float32"
    repeats: int = 15
    key: ClassVar[str] = "collectives"

    def run(self, backend: CommunicationBackend) -> list[CollectiveResult]:
        """Measure one collective at one size after the other, each in all its ways. Collective."""
        results = []
        for kind in self.kinds:
            # A barrier has no array, and so one row.
            for nbytes in self.sizes if kind != "barrier" else (0,):
                ways = self.ways(backend, kind, nbytes)
                timings = time_alternately(backend, list(ways.values()), self.repeats)
                for way, timing in zip(ways, timings, strict=True):
                    results.append(CollectiveResult(kind, way, nbytes, timing.seconds))
        return results

    def ways(self, backend: CommunicationBackend, kind: str, nbytes: int) -> dict[str, Way]:
        """Return the ways to perform a collective, after a check of the result of each."""
        # Thread-ranks have no collectives of MPI to compare with.
        mpi = load_mpi().COMM_WORLD if isinstance(backend, MPICommunicationBackend) else None
        if kind == "barrier":
            return {"ours": backend.barrier} | ({"MPI": mpi.Barrier} if mpi is not None else {})
        return _ways(backend, mpi, kind, nbytes, np.dtype(self.dtype))

    def table(self, results: Sequence[CollectiveResult], world_size: int) -> Table:
        """Return the results as a table.

        A ratio is to another way at the same size: the median over the repeats, in each of which
        the ways took turns. Collectives in place are compared with those of MPI in place.
        """
        columns = ("collective", "size", "", "median", "spread", "bytes/s", "/ MPI", "/ copy")
        title = f"{counted(world_size, 'rank')}, medians"
        table = figures_table(title, columns, ("collective", ""), gap=1)
        seconds = {(r.collective, r.nbytes, r.way): np.array(r.seconds) for r in results}
        seen = None
        for result in results:
            key = (result.collective, result.nbytes)
            ratios = [
                f"{np.median(result.seconds / seconds[*key, other]):.2f}"
                if (*key, other) in seconds
                else ""
                for other in (_MPI_IN_PLACE if result.way == _IN_PLACE else "MPI", "memcpy")
            ]
            table.add_row(
                *([result.collective, bytes_text(result.nbytes)] if key != seen else ["", ""]),
                result.way,
                *rate_cells(result.seconds, result.nbytes),
                *ratios,
            )
            seen = key
        if world_size == 1:
            table.caption = "One rank has no other to communicate with: -n 2 starts two."
        elif not any("shared" in result.way for result in results):
            table.caption = "No rows of shared memory: there is none, or MPISHARD_ARENA is off."
        return table


def _ways(
    backend: CommunicationBackend, mpi: Any, kind: str, nbytes: int, dtype: DType
) -> dict[str, Way]:
    """Return the ways of a collective that has an array."""
    world, rank, ours = backend.world_size, backend.rank, getattr(backend, kind)
    length, is_gather = max(1, nbytes // dtype.itemsize), kind == "all_gather"
    counts = list(ShardLayout(length, world).sizes)
    # Ranks have different values, so that the check finds a result without one of them.
    source = np.full(counts[rank] if is_gather else length, rank + 1, dtype)
    whole, mine = np.empty(length, dtype), np.arange(world)
    size = counts[rank] if kind == "reduce_scatter" else length
    out, mpi_out = np.empty(size, dtype), np.empty(size, dtype)
    expected = np.repeat(mine + 1, counts) if is_gather else np.array([(mine + 1).sum()])
    found: dict[str, _Found] = {"ours": (lambda: ours(source, out=out), out)}
    if kind == "all_reduce":
        # In place the result is the next input: sums of ones would overflow.
        zeros = np.zeros_like(source)
        found[_IN_PLACE] = (lambda: ours(zeros), None)
    arena = None if is_gather else backend.allocate_arena(length, dtype)
    if arena is not None:
        found["ours, shared"] = _in_arena(arena, kind, rank + 1, np.empty(size, dtype))
    if mpi is not None:
        calls: dict[str, Way] = {
            "all_reduce": lambda: mpi.Allreduce(source, mpi_out),
            "reduce_scatter": lambda: mpi.Reduce_scatter(source, mpi_out, counts),
            "all_gather": lambda: mpi.Allgatherv(source, [mpi_out, counts]),
        }
        found["MPI"] = (calls[kind], mpi_out)
    if mpi is not None and kind == "all_reduce":
        mpi_zeros, in_place = np.zeros_like(source), load_mpi().IN_PLACE
        found[_MPI_IN_PLACE] = (lambda: mpi.Allreduce(in_place, mpi_zeros), None)
    # The least work of a collective that moves this array: each byte is read and written once.
    found["memcpy"] = (lambda: np.copyto(whole, out if is_gather else source), None)
    # A fast collective with a wrong result would be no measurement.
    for way, (call, result) in found.items():
        if result is not None:
            call()
            backend.barrier()
            if not (result == expected).all():
                raise ArithmeticError(f"{way} gives {result[:4]}.. and not {expected[:4]}..")
    if arena is not None and kind == "all_reduce":
        arena.mine[...] = 0  # as for the other way in place
    return {way: call for way, (call, _) in found.items()}


def _in_arena(arena: Arena, kind: str, value: int, out: Array) -> _Found:
    """Return the reduction ``kind`` of vectors in shared memory, which copies nothing."""
    arena.mine[...] = value
    if kind == "all_reduce":
        return lambda: arena.reduce_in_place().wait(), arena.mine
    return lambda: arena.reduce_into(out).wait(), out
