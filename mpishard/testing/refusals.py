"""Calls that a communication backend must refuse, and live on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.backend import CommunicationBackend
from mpishard.communication.reduction import ReductionOperation
from mpishard.errors import CollectiveMismatchError
from mpishard.testing.reference import assert_raises, assert_same

__all__ = ["RefusalChecks"]

SUM, MAX, AVERAGE = ReductionOperation.SUM, ReductionOperation.MAX, ReductionOperation.AVERAGE


class RefusalChecks:
    """The checks of `CommunicationConformance` that end in an error."""

    def check_refusals(self, backend: CommunicationBackend) -> None:
        """What is wrong on one rank alone is refused there, before anything is communicated."""
        world, rank = backend.world_size, backend.rank
        askew = np.zeros((4, 4))[:, 1:3]
        ok = np.zeros(3)
        fixed = np.zeros(3)
        fixed.flags.writeable = False
        other = (rank + 1) % world
        cases: list[tuple[type[Exception], Callable[[], Any]]] = [
            (TypeError, lambda: backend.all_reduce(None)),
            (TypeError, lambda: backend.all_reduce([1.0, 2.0])),
            (ValueError, lambda: backend.all_reduce(askew)),
            (ValueError, lambda: backend.all_gather(askew)),
            (ValueError, lambda: backend.reduce_scatter(askew)),
            (ValueError, lambda: backend.all_reduce(np.array(["a"]))),
            (ValueError, lambda: backend.all_reduce(np.arange(3), AVERAGE)),
            (ValueError, lambda: backend.all_reduce(np.ones(3, complex), MAX)),
            (ValueError, lambda: backend.all_reduce(ok, out=np.zeros(4))),
            (ValueError, lambda: backend.all_reduce(ok, out=np.zeros(3, np.float32))),
            (ValueError, lambda: backend.reduce_scatter(np.float64(1) * np.ones(()))),
            (ValueError, lambda: backend.reduce_scatter(ok, counts=[4] * world)),
            (ValueError, lambda: backend.reduce_scatter(ok, counts=[3])
             if world > 1 else backend.reduce_scatter(ok, counts=[-1])),
            (ValueError, lambda: backend.all_gather(np.ones(()))),
            (ValueError, lambda: backend.all_reduce(fixed)),
            (ValueError, lambda: backend.all_reduce(np.float64(1))),
            (ValueError, lambda: backend.all_reduce(ok, out=fixed)),
            (ValueError, lambda: backend.all_reduce_async(fixed)),
            (ValueError, lambda: backend.reduce_scatter(np.ones(3 * world), out=fixed)),
            (ValueError, lambda: backend.all_gather(ok, out=fixed)),
            (ValueError, lambda: backend.broadcast(ok, root=world)),
            (ValueError, lambda: backend.broadcast(ok, root=-1)),
            (ValueError, lambda: backend.gather(ok, root=world)),
            (ValueError, lambda: backend.scatter(ok, root=world)),
            (ValueError, lambda: backend.all_to_all([ok] * (world + 1))),
            (ValueError, lambda: backend.split(-1)),
            (ValueError, lambda: backend.send(ok, rank)),
            (ValueError, lambda: backend.send(ok, world)),
            (ValueError, lambda: backend.receive(rank, 1)),
        ]  # fmt: skip
        if world > 1:
            cases += [
                (ValueError, lambda: backend.reduce_scatter(np.ones(world + 1), strict=True)),
                (ValueError, lambda: backend.broadcast(fixed, root=other)),
                (ValueError, lambda: backend.send(ok, other, tag=-1)),
                (ValueError, lambda: backend.receive(other, -1)),
                (ValueError, lambda: backend.all_to_all([ok] * (world - 1) + [np.ones(3, int)])),
            ]
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
        last = rank == world - 1
        for size in (4, 4000):
            a = np.ones(size)
            cases: list[Callable[[Array], Any]] = [
                lambda a: backend.all_reduce(a, MAX if last else SUM),
                lambda a: backend.all_reduce(a[1:] if last else a),
                lambda a: backend.all_reduce(a.astype(np.float32) if last else a),
                lambda a: backend.all_reduce(a.reshape(2, -1) if last else a),
                lambda a: backend.reduce_scatter(a, MAX if last else SUM),
                lambda a: backend.reduce_scatter(
                    a, counts=[len(a)] + [0] * (world - 1) if last else None
                ),
                lambda a: backend.all_gather(a.astype(np.float32) if last else a),
                lambda a: backend.all_gather(a.reshape(-1, 2) if last else a),
                lambda a: backend.broadcast(a, root=1 if last else 0),
                lambda a: backend.broadcast(a[1:] if last else a),
                lambda a: backend.gather(a, root=1 if last else 0),
                lambda a: backend.scatter(a, root=1 if last else 0),
                lambda a: backend.all_to_all([a.astype(np.int64) if last else a] * world),
                lambda a: backend.barrier() if last else backend.all_reduce(a),
                lambda a: backend.all_gather(a) if last else backend.all_reduce(a),
                lambda a: backend.split(0) if last else backend.barrier(),
            ]
            for call in cases:
                message = assert_raises(CollectiveMismatchError, call, a)
                assert f"rank {world - 1}: " in message, message
                assert message.count(" at ") >= world, f"call sites are missing: {message}"
                # The arguments that differ must not have been touched.
                assert_same(a, np.ones(size), "an argument of a refused call")
                total = backend.all_reduce(np.full(size, 1.0))
                assert_same(total, np.full(size, float(world)), "the collective after")
        short = backend.all_reduce_async(np.ones(2 if last else 3))
        good = backend.all_reduce_async(np.ones(700))
        assert_same(good.wait(), np.full(700, float(world)), "a work behind a refused one")
        assert_raises(CollectiveMismatchError, short.wait)
        assert_raises(ValueError, backend.all_gather, np.ones(2), out=np.ones(1) if last else None)
        backend.barrier()
