"""Calls that a communication backend must refuse, and live on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.reduction import ReductionOperation
from mpishard.errors import CollectiveMismatchError
from mpishard.testing.checks import CommunicationChecks
from mpishard.testing.mismatches import COLLECTIVES, MISMATCHES, Arguments, refusal
from mpishard.testing.reference import assert_raises, assert_same

__all__ = ["RefusalChecks"]

MAX, AVERAGE = ReductionOperation.MAX, ReductionOperation.AVERAGE

Refusal = tuple[type[Exception], Callable[[], Any]]


class RefusalChecks(CommunicationChecks):
    """The checks of `CommunicationConformance` that end in an error."""

    def check_refusals(self, backend: CommunicationBackend) -> None:
        """What is wrong on one rank alone is refused there, before anything is communicated."""
        world, rank = backend.world_size, backend.rank
        fixed = np.zeros(3)
        fixed.flags.writeable = False
        cases = [*_wrong_arrays(backend), *_wrong_arguments(backend), *_wrong_messages(backend)]
        for number, (kind, call) in enumerate(cases):
            if number % world == rank:
                assert_raises(kind, call)
        # Nobody minds a read-only array that is only read.
        assert_same(backend.all_reduce(fixed, out=np.ones(3)), fixed, "read-only input")
        assert_same(backend.broadcast(fixed if rank == 0 else None), fixed, "read-only root")
        assert backend.all_reduce(np.ones(1))[0] == world

    def check_mismatches(self, backend: CommunicationBackend) -> None:
        """Calls that do not belong together raise on every rank, and the backend lives on."""
        world, rank = backend.world_size, backend.rank
        if world == 1:
            return
        names = list(COLLECTIVES)
        for number, mismatch in enumerate(MISMATCHES):
            if mismatch.is_of_kind:
                following = names[(names.index(mismatch.collective) + 1) % len(names)]
                if mismatch.name != f"calls {following}":
                    continue
            odd = number % world
            for length, twin in ((4, number % 2 == 0), (1000, number % 2 == 1)):
                arguments = Arguments(backend, length)
                ask = (mismatch.odd if rank == odd else mismatch.many)(arguments)
                message = refusal(backend, ask, odd, twin=twin, what=str(mismatch))
                assert mismatch.difference in message, f"{mismatch}: {message}"
                arguments.check(str(mismatch))
        self._check_works_beside_refused_ones(backend)

    @staticmethod
    def _check_works_beside_refused_ones(backend: CommunicationBackend) -> None:
        world, last = backend.world_size, backend.rank == backend.world_size - 1
        short = backend.all_reduce_async(np.ones(2 if last else 3))
        good = backend.all_reduce_async(np.ones(700))
        assert_same(good.wait(), np.full(700, float(world)), "a work behind a refused one")
        assert_raises(CollectiveMismatchError, short.wait)
        out = np.ones(1) if last else None
        assert_raises(ValueError, backend.all_gather, np.ones(2), out=out)
        assert_raises(ValueError, backend.all_gather_async(np.ones(2), out=out).wait)
        backend.barrier()


def _wrong_arrays(backend: CommunicationBackend) -> Iterator[Refusal]:
    """Arrays that no collective takes, given to each collective and its twin."""
    world, root = backend.world_size, backend.rank
    dims = np.ones((1,) * 9)
    bad = [
        (TypeError, [1.0, 2.0]),
        (ValueError, np.zeros((4, 4))[:, 1:3]),
        (ValueError, np.zeros((4, 4)).T[1:]),
        (ValueError, np.zeros(8)[::2]),
        (ValueError, np.zeros(8)[::-1]),
        (ValueError, np.array(["a"])),
        (ValueError, np.array([None])),
        (TypeError, np.ma.array([1.0, 2.0], mask=[False, True])),
        (TypeError, np.ones((world, 2)).view(np.matrix)),
        (ValueError, dims),
    ]

    def calls(name: str, kind: type[Exception], *arguments: Any) -> Iterator[Refusal]:
        for method in (getattr(backend, name), getattr(backend, f"{name}_async")):
            yield kind, partial(method, *arguments)

    for kind, array in [*bad, (TypeError, None)]:
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            yield from calls(name, kind, array)
        for name in ("broadcast", "scatter", "gather"):
            yield from calls(name, kind, array, root)
        yield from calls("all_to_all", kind, [array] * world)
        if world > 1:
            yield from calls("send", kind, array, (root + 1) % world)
    for kind, array in bad if world > 1 else []:
        yield from calls("broadcast", kind, array, (root + 1) % world)
    for name in ("reduce_scatter", "all_gather", "scatter", "gather"):
        where = (root,) if name in ("scatter", "gather") else ()
        yield from calls(name, ValueError, np.ones(()), *where)


def _wrong_arguments(backend: CommunicationBackend) -> Iterator[Refusal]:
    """What else is refused: operations, roots, counts, results, each in both twins."""
    world, rank = backend.world_size, backend.rank
    ok, fixed = np.zeros(3), np.zeros(3)
    fixed.flags.writeable = False
    rows = np.ones((world, 3))
    calls: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (ValueError, "all_reduce", (fixed,), {}),
        (ValueError, "all_reduce", (np.float64(1),), {}),
        (ValueError, "all_reduce", (ok,), {"out": fixed}),
        (ValueError, "all_reduce", (ok,), {"out": np.zeros(4)}),
        (ValueError, "all_reduce", (ok,), {"out": np.zeros((3, 1))}),
        (ValueError, "all_reduce", (ok,), {"out": np.zeros(6)[::2]}),
        (ValueError, "all_reduce", (ok,), {"out": np.zeros(3, np.float32)}),
        (ValueError, "reduce_scatter", (rows,), {"out": np.zeros((2, 3))}),
        (ValueError, "reduce_scatter", (rows,), {"out": np.zeros((1, 3), np.float32)}),
        (ValueError, "reduce_scatter", (np.ones(3 * world),), {"out": fixed}),
        (ValueError, "reduce_scatter", (ok,), {"counts": [4] * world}),
        (ValueError, "reduce_scatter", (ok,), {"counts": [3] * (world + 1)}),
        (ValueError, "reduce_scatter", (ok,), {"counts": [-1] + [4] * (world - 1)}),
        (ValueError, "scatter", (ok, rank), {"counts": [4] * world}),
        (ValueError, "scatter", (ok, rank), {"counts": []}),
        (ValueError, "all_gather", (ok,), {"out": fixed}),
        (ValueError, "all_gather", (ok,), {"out": np.zeros((3 * world, 1))}),
        (ValueError, "all_gather", (ok,), {"out": np.zeros(3 * world, np.float32)}),
        (ValueError, "all_gather", (ok,), {"out": np.ones(())}),
        (ValueError, "all_to_all", ([ok] * (world + 1),), {}),
        (ValueError, "all_to_all", ([],), {}),
    ]  # fmt: skip
    for name in ("all_reduce", "reduce_scatter"):
        calls += [
            (ValueError, name, (np.arange(3), AVERAGE), {}),
            (ValueError, name, (np.ones(3, bool), AVERAGE), {}),
            (ValueError, name, (np.ones(3, complex), MAX), {}),
            (TypeError, name, (ok, "SUM"), {}),
        ]
    for name in ("broadcast", "scatter", "gather"):
        calls += [
            (ValueError, name, (ok, world), {}),
            (ValueError, name, (ok, -1), {}),
            (TypeError, name, (ok, 0.5), {}),
        ]
    if world > 1:
        calls += [
            (ValueError, "reduce_scatter", (np.ones(world + 1),), {"strict": True}),
            (ValueError, "scatter", (np.ones(world + 1), rank), {"strict": True}),
            (ValueError, "broadcast", (fixed, (rank + 1) % world), {}),
            (ValueError, "all_to_all", ([ok] * (world - 1) + [np.ones(3, int)],), {}),
        ]
    for kind, name, arguments, options in calls:
        for method in (getattr(backend, name), getattr(backend, f"{name}_async")):
            yield kind, partial(method, *arguments, **options)
    yield ValueError, lambda: backend.split(-1)
    yield ValueError, lambda: backend.allocate_shared(0, float)
    yield ValueError, lambda: backend.allocate_shared(3, object)


def _wrong_messages(backend: CommunicationBackend) -> Iterator[Refusal]:
    """Ranks, tags and counts that point to point refuses."""
    world, rank, ok = backend.world_size, backend.rank, np.zeros(3)
    wrong = [(rank, 0), (world, 0), (-1, 0)]
    if world > 1:
        wrong += [((rank + 1) % world, -1), ((rank + 1) % world, 2**31)]
    for peer, tag in wrong:
        yield ValueError, partial(backend.send, ok, peer, tag)
        yield ValueError, partial(backend.send_async, ok, peer, tag)
        yield ValueError, partial(backend.receive, peer, 1, tag)
        yield ValueError, partial(backend.receive_async, peer, 1, tag, dtype=float)
    if world > 1:
        other = (rank + 1) % world
        yield ValueError, lambda: backend.receive(other, -1)
        yield ValueError, lambda: backend.receive_async(other, -1, dtype=float)
        yield ValueError, lambda: backend.receive_async(other, 1, dtype=object)
