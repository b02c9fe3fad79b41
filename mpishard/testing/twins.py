"""Checks of collectives that are issued and waited for later, and of messages between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from mpishard.base import Array, CommunicationError, DType
from mpishard.communication import CommunicationBackend, ReductionOperation
from mpishard.testing.reductions import (
    CommunicationChecks,
    assert_raises,
    assert_same,
    bounds,
    expected_result,
    operations,
    right_calls,
    tree_reduce,
    values,
)

SUM = ReductionOperation.SUM


class TwinChecks(CommunicationChecks):
    """The part of `CommunicationConformance` that checks the ``_async`` twins."""

    def check_async_orders(self, backend: CommunicationBackend) -> None:
        """Twins of short and long arrays, for which each rank waits in another order."""
        world, rank = backend.world_size, backend.rank
        dtype = np.dtype(np.float64)
        lengths = [5, 3000, 1, 0, 2000, 7, 1000]
        arrays = [[values(dtype, n, p, k) for p in range(world)] for k, n in enumerate(lengths)]
        # All are issued before the first wait, in one order; only the waits differ between ranks.
        works = []
        for k, inputs in enumerate(arrays):
            for name, arguments in right_calls(backend, inputs[rank], k % world).items():
                works.append((k, name, getattr(backend, f"{name}_async")(*arguments)))
        order = np.random.default_rng(rank).permutation(len(works))
        for index in order:
            k, kind, work = works[index]
            given = [[array] * world for array in arrays[k]] if kind == "all_to_all" else arrays[k]
            result = work.wait()
            expected = expected_result(kind, given, rank, root=k % world)
            assert_same(result, expected, f"{kind}_async [{lengths[k]}]")
            assert work.done
            # A second wait must neither repeat the collective nor copy the result.
            assert work.wait() is result
        # A blocking call completes although an earlier twin has not been waited for.
        pending = backend.all_reduce_async(np.full(500, 1.0))
        assert backend.all_reduce(np.array([2]))[0] == 2 * world
        assert_same(pending.wait(), np.full(500, float(world)), "a work behind a blocking call")

    def check_twins(self, backend: CommunicationBackend) -> None:
        """Twins, several under way at once, give the bits of the blocking calls in every dtype."""
        shapes = ((5,), (backend.world_size + 40, 3))
        for dtype in self.dtypes:
            sets = [self._calls(backend, dtype, shape) for shape in shapes]
            for (name, short), (_, long) in zip(*sets, strict=True):
                both = (short, long)
                blocking = [getattr(backend, name)(*arguments()) for arguments in both]
                works = [getattr(backend, f"{name}_async")(*arguments()) for arguments in both]
                # Odd ranks wait in the order of issue, even ones in reverse.
                for number in (0, 1) if backend.rank % 2 else (1, 0):
                    what = f"{name}_async {dtype.name}{list(shapes[number])}"
                    assert_same(works[number].wait(), blocking[number], what)

    @staticmethod
    def _calls(
        backend: CommunicationBackend, dtype: DType, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, Callable[[], tuple[object, ...]]]]:
        """Yield the collectives, each with a function that makes the arguments of one call."""
        world, rank = backend.world_size, backend.rank
        mine = values(dtype, shape, rank, 9)
        root = shape[0] % world
        for operation in operations(dtype):
            yield "all_reduce", partial(_copied, mine, operation)
            yield "reduce_scatter", partial(_copied, mine, operation)
        yield "all_gather", lambda: (mine[rank % shape[0] :],)
        yield "broadcast", lambda: (mine.copy(), root)
        yield "scatter", lambda: (mine if rank == root else None, root)
        yield "gather", lambda: (mine[rank % shape[0] :], root)
        yield "all_to_all", lambda: ([mine[peer % shape[0] :] for peer in range(world)],)

    def check_twin_arguments(self, backend: CommunicationBackend) -> None:
        """Twins also take ``out``, ``counts`` and arrays that receive."""
        world, rank = backend.world_size, backend.rank
        for length in (world + 1, 3000):
            counts = [0] * (world - 1) + [length]
            inputs = [values(np.dtype(np.float32), length, peer, 10) for peer in range(world)]
            total = tree_reduce(inputs, SUM)
            mine = inputs[rank].copy()
            whole, piece = np.empty_like(mine), np.empty(counts[rank], np.float32)
            gathered, received = np.empty(world * length, np.float32), np.empty_like(mine)
            sent = mine if rank == 0 else received
            works = [
                (backend.all_reduce_async(mine, out=whole), whole, total),
                (
                    backend.reduce_scatter_async(mine, counts=counts, out=piece),
                    piece,
                    total[bounds(counts, rank)],
                ),
                (backend.all_gather_async(mine, out=gathered), gathered, np.concatenate(inputs)),
                (backend.broadcast_async(sent), sent, inputs[0]),
            ]
            given = counts if rank == 0 else None
            scattered = backend.scatter_async(mine if rank == 0 else None, counts=given)
            for work, out, expected in works:
                assert work.wait() is out, "a twin returned another array than the one given"
                assert_same(out, expected, "a twin with an array for its result")
            assert_same(scattered.wait(), inputs[0][bounds(counts, rank)], "scatter_async counts=")
            assert_same(mine, inputs[rank], "the input of twins")

    def check_barrier_twin(self, backend: CommunicationBackend) -> None:
        """An issued barrier is not done before all ranks have issued theirs."""
        world, rank = backend.world_size, backend.rank
        if world == 1:
            assert backend.barrier_async().wait() is None
            return
        if rank != world - 1:
            # The other ranks wait for a message of the last one, so that it is alone at the
            # barrier.
            backend.receive(world - 1, 1, tag=9)
            work = backend.barrier_async()
        else:
            work = backend.barrier_async()
            backend.progress()
            assert not work.done, "a barrier was done before others had come"
            for peer in range(world - 1):
                backend.send(np.ones(1), peer, tag=9)
        assert work.wait() is None
        assert work.done


def _copied(array: Array, operation: ReductionOperation) -> tuple[object, ...]:
    return array.copy(), operation


class TransferChecks(CommunicationChecks):
    """The part of `CommunicationConformance` that checks messages between two ranks."""

    def check_point_to_point(self, backend: CommunicationBackend) -> None:
        """Messages keep their order for each tag, in any order of the tags, and their shapes."""
        world, rank = backend.world_size, backend.rank
        if world == 1:
            return
        right, left = (rank + 1) % world, (rank - 1) % world
        for dtype in self.dtypes:
            for number, size in enumerate((0, 3, 5000)):
                for tag in (0, 7):
                    mine = values(dtype, size, rank, 100 * tag + number)
                    backend.send(mine, right, tag)
                    mine[...] = 0  # must not change the message, which is a copy
            for tag in (7, 0):
                for number, size in enumerate((0, 3, 5000)):
                    got = backend.receive(left, size, tag)
                    assert_same(
                        got, values(dtype, size, left, 100 * tag + number), f"receive tag {tag}"
                    )
        backend.send(np.ones((2, 3)), right)
        assert backend.receive(left, 6).shape == (2, 3)
        backend.send(np.arange(4), right)
        backend.send(np.arange(2000), right)
        for count, wrong in ((4, 5), (2000, 4)):
            assert_raises(CommunicationError, backend.receive, left, wrong)
            assert backend.receive(left, count).tolist() == list(range(count))
        backend.barrier()

    def check_async_point_to_point(self, backend: CommunicationBackend) -> None:
        """Receives issued ahead and sends without copies, mixed with blocking ones."""
        world, rank = backend.world_size, backend.rank
        if world == 1:
            return
        right, left = (rank + 1) % world, (rank - 1) % world
        sizes = (5000, 0, 3, 7000, 511, 513)

        def message(dtype: DType, sender: int, tag: int, number: int) -> Array:
            return values(dtype, sizes[number], sender, 100 * tag + number)

        for dtype in self.dtypes:
            coming = {
                (tag, number): backend.receive_async(left, size, tag, dtype=dtype)
                for tag in (0, 7)
                for number, size in enumerate(sizes)
            }
            going = []
            for number in range(len(sizes)):
                for tag in (7, 0):
                    mine = message(dtype, rank, tag, number)
                    if number % 3 == 1:
                        backend.send(mine, right, tag)
                        mine[...] = 0
                    else:
                        going.append((mine, backend.send_async(mine, right, tag)))
            order = np.random.default_rng(rank).permutation(len(coming))
            keys = [list(coming)[index] for index in order]
            # In random order: receives take messages in the order of issue, whatever the order of
            # waits.
            got = {key: coming[key].wait() for key in keys}
            for sent, work in going:
                work.wait()
                sent[...] = 0  # must not change the message, which has been sent
            for key in keys:
                expected = message(dtype, left, *key)
                assert_same(got[key], expected, f"receive_async tag {key[0]}")
                got[key][...] = 0  # the received array belongs to the receiver
            assert coming[keys[0]].wait() is got[keys[0]], "a second wait gives another array"
        backend.barrier()
        self._check_receives_in_line(backend, left, right)

    @staticmethod
    def _check_receives_in_line(backend: CommunicationBackend, left: int, right: int) -> None:
        """Receives of all kinds share one queue; a cancelled one leaves its message to the next."""
        for size in (2, 4000):
            first = backend.receive_async(left, size, dtype=np.float64)
            given_up = backend.receive_async(left, size, dtype=np.float64)
            third = backend.receive_async(left, size, dtype=np.float64)
            given_up.cancel()
            given_up.cancel()
            assert_raises(CommunicationError, given_up.wait)
            backend.barrier()  # nothing has been sent before
            sends = [backend.send_async(np.full(size, float(k)), right) for k in range(4)]
            assert backend.receive(left, size)[-1] == 2.0, "a receive did not wait in line"
            last = backend.receive_async(left, size, dtype=np.float64)
            assert [work.wait()[-1] for work in (last, third, first)] == [3.0, 1.0, 0.0]
            for work in sends:
                work.wait()
            assert_raises(ValueError, sends[0].cancel)
            # Unexpected messages are refused, and later ones with other tags are received.
            wrong = backend.receive_async(left, size, 1, dtype=np.float32)
            fewer = backend.receive_async(left, size + 1, 2, dtype=np.float64)
            backend.send(np.full(size, 1.0), right, 1)
            backend.send(np.full(size, 2.0), right, 2)
            backend.send(np.full(size, 3.0), right, 3)
            assert backend.receive(left, size, 3)[0] == 3.0
            assert_raises(CommunicationError, wrong.wait)
            assert_raises(CommunicationError, fewer.wait)
            assert backend.receive(left, size, 2)[0] == 2.0, "a refused message is lost"
            backend.barrier()
