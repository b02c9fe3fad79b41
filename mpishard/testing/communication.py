"""What every communication backend must do, as checks that run on any.

Each ``check_*`` method takes the backend of one rank, and is called by every rank of a world: by
threads, under mpiexec, or by a launcher of your own::

    from mpishard import run_in_threads
    from mpishard.testing.communication import CommunicationConformance

    run_in_threads(4, CommunicationConformance().run)

A check compares with results that each rank computes alone, from the inputs of all ranks, by
straightforward code of its own: a list of slots for the tree of a reduction, ``concatenate`` for a
gather. It raises AssertionError on the ranks that got something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.backend import CommunicationBackend
from mpishard.communication.call import DTYPES
from mpishard.communication.reduction import ReductionOperation
from mpishard.errors import CommunicationError
from mpishard.testing.reference import (
    ADVERSARIAL_VALUES,
    assert_raises,
    assert_same,
    bounds,
    even_sizes,
    shapes,
    tree_reduce,
    values,
)
from mpishard.testing.refusals import RefusalChecks

__all__ = ["CommunicationConformance"]

SUM, PRODUCT, MIN, MAX, AVERAGE = ReductionOperation


class CommunicationConformance(RefusalChecks):
    """The contract of `CommunicationBackend`, check by check.

    Parameters
    ----------
    dtypes : sequence of dtype
        Those that travel on the backend. Default: all of the contract.
    """

    def __init__(self, dtypes: Sequence[np.dtype[Any]] = DTYPES) -> None:
        self.dtypes = tuple(dtypes)

    @classmethod
    def names(cls) -> list[str]:
        """The checks, in the order in which `run` calls them."""
        members = [*vars(CommunicationConformance), *vars(RefusalChecks)]
        return [name for name in members if name.startswith("check_")]

    def run(self, backend: CommunicationBackend) -> None:
        """Call every check twice, so that what the first leaves behind shows in the second."""
        for name in self.names():
            for _ in range(2):
                getattr(self, name)(backend)

    def _cases(self, world: int) -> Iterator[tuple[np.dtype[Any], tuple[int, ...]]]:
        for dtype in self.dtypes:
            for shape in shapes(world):
                yield dtype, shape

    @staticmethod
    def _operations(dtype: np.dtype[Any]) -> list[ReductionOperation]:
        """The operations that have a meaning for ``dtype``."""
        operations = [SUM, PRODUCT]
        if dtype.kind != "c":
            operations += [MIN, MAX]
        if dtype.kind not in "iub":
            operations.append(AVERAGE)
        return operations

    # ------------------------------------------------------------------------------ reductions

    def check_all_reduce(self, backend: CommunicationBackend) -> None:
        """Every dtype, shape and operation, in place and into ``out``."""
        world = backend.world_size
        for dtype, shape in self._cases(world):
            inputs = [values(dtype, shape, rank) for rank in range(world)]
            for operation in self._operations(dtype):
                what = f"all_reduce {operation.name} {dtype.name}{list(shape)}"
                expected = tree_reduce(inputs, operation)
                mine = inputs[backend.rank].copy()
                result = backend.all_reduce(mine, operation)
                assert result is mine, f"{what}: not in place"
                assert_same(mine, expected, what)
            mine, out = inputs[backend.rank].copy(), np.zeros(shape, dtype)
            assert backend.all_reduce(mine, out=out) is out
            assert_same(out, tree_reduce(inputs, SUM), "all_reduce out=")
            assert_same(mine, inputs[backend.rank], "all_reduce input with out=")

    def check_reduce_scatter(self, backend: CommunicationBackend) -> None:
        """Every dtype, shape and operation; counts of one's own; ``out`` inside the input."""
        world, rank = backend.world_size, backend.rank
        for dtype, shape in self._cases(world):
            inputs = [values(dtype, shape, peer, 1) for peer in range(world)]
            even = even_sizes(shape[0], world)
            all_on_last = [0] * (world - 1) + [shape[0]]
            for operation in self._operations(dtype):
                what = f"reduce_scatter {operation.name} {dtype.name}{list(shape)}"
                expected = tree_reduce(inputs, operation)
                mine = inputs[rank].copy()
                piece = backend.reduce_scatter(mine, operation)
                assert_same(piece, expected[bounds(even, rank)], what)
                assert_same(mine, inputs[rank], f"{what}, input")
            expected = tree_reduce(inputs, SUM)
            piece = backend.reduce_scatter(inputs[rank].copy(), counts=all_on_last)
            assert_same(piece, expected[bounds(all_on_last, rank)], "reduce_scatter counts=")
            mine = inputs[rank].copy()
            out = mine[: even[rank]]
            assert backend.reduce_scatter(mine, out=out) is out
            assert_same(out, expected[bounds(even, rank)], "reduce_scatter out= in its input")

    def check_tree_order(self, backend: CommunicationBackend) -> None:
        """Sums of numbers whose order shows, short (in headers) and long, and one by one."""
        world = backend.world_size
        numbers = np.array(ADVERSARIAL_VALUES)
        for name in ("float16", "bfloat16", "float32", "float64", "complex128"):
            dtype = next(d for d in DTYPES if d.name == name)
            if dtype not in self.dtypes:
                continue
            for length in (3, len(numbers), 4097):
                inputs = []
                for rank in range(world):
                    order = np.random.default_rng([rank, length]).integers(0, len(numbers), length)
                    with np.errstate(all="ignore"):
                        inputs.append(numbers[order].astype(dtype))
                for operation in self._operations(dtype):
                    if dtype.kind == "c" and operation is not SUM:
                        continue
                    expected = tree_reduce(inputs, operation)
                    result = backend.all_reduce(inputs[backend.rank].copy(), operation)
                    assert_same(result, expected, f"tree {operation.name} {name}[{length}]")
                    sizes = even_sizes(length, world)
                    piece = backend.reduce_scatter(inputs[backend.rank], operation)
                    assert_same(
                        piece, expected[bounds(sizes, backend.rank)],
                        f"tree {operation.name} {name}[{length}] scattered",
                    )  # fmt: skip

    # -------------------------------------------------------------------------------- movement

    def check_all_gather(self, backend: CommunicationBackend) -> None:
        """Even, uneven and empty contributions; into ``out``, and from any part of ``out``."""
        world, rank = backend.world_size, backend.rank
        for dtype, shape in self._cases(world):
            for rows in ([shape[0]] * world, [(peer * 3) % (world + 1) for peer in range(world)]):
                trailing = shape[1:]
                inputs = [values(dtype, (n, *trailing), p, 2) for p, n in enumerate(rows)]
                expected = np.concatenate(inputs)
                what = f"all_gather {dtype.name} rows {rows} of {list(trailing)}"
                result = backend.all_gather(inputs[rank].copy())
                assert_same(result, expected, what)
                result[...] = 0  # a result that is another rank's buffer shows below
                out = np.zeros(expected.shape, dtype)
                assert backend.all_gather(inputs[rank].copy(), out=out) is out
                assert_same(out, expected, f"{what}, out=")
                out = np.zeros(expected.shape, dtype)
                part = out[bounds(rows, rank)]
                part[...] = inputs[rank]
                backend.all_gather(part, out=out)
                assert_same(out, expected, f"{what}, in place")
                if dtype != self.dtypes[-1]:
                    continue
                for start in (0, (len(out) - rows[rank]) // 2, len(out) - rows[rank]):
                    out = np.zeros(expected.shape, dtype)
                    part = out[start : start + rows[rank]]
                    part[...] = inputs[rank]
                    backend.all_gather(part, out=out)
                    assert_same(out, expected, f"{what}, from row {start} of out")

    def check_broadcast(self, backend: CommunicationBackend) -> None:
        """From every root, to ranks that bring an array and ranks that bring None."""
        for dtype, shape in self._cases(backend.world_size):
            root = (len(shape) + shape[0]) % backend.world_size
            expected = values(dtype, shape, root, 3)
            for brings in (False, True):
                mine: Array | None = np.zeros(shape, dtype) if brings else None
                if backend.rank == root:
                    mine = expected.copy()
                result = backend.broadcast(mine, root)
                assert_same(result, expected, f"broadcast {dtype.name}{list(shape)} of {root}")
                assert mine is None or result is mine, "broadcast returned another array"
        for root in range(backend.world_size):
            sent = np.array(root * 11) if backend.rank == root else None
            assert int(backend.broadcast(sent, root)) == root * 11

    def check_scatter(self, backend: CommunicationBackend) -> None:
        """From every root; even pieces and counts of the root's own."""
        world, rank = backend.world_size, backend.rank
        for dtype, shape in self._cases(world):
            root = shape[0] % world
            sent = values(dtype, shape, root, 4)
            first_takes_all = [shape[0]] + [0] * (world - 1)
            for counts in (None, first_takes_all):
                sizes = counts or even_sizes(shape[0], world)
                mine = sent.copy() if rank == root else None
                piece = backend.scatter(mine, root, counts=counts if rank == root else None)
                what = f"scatter {dtype.name}{list(shape)} of {root}, counts {counts}"
                assert_same(piece, sent[bounds(sizes, rank)], what)
                piece[...] = 0
                if mine is not None:
                    assert_same(mine, sent, f"{what}, input")

    def check_gather(self, backend: CommunicationBackend) -> None:
        """To every root, with uneven and empty contributions."""
        world, rank = backend.world_size, backend.rank
        for dtype, shape in self._cases(world):
            root = shape[0] % world
            rows = [(shape[0] + peer) % (world + 2) for peer in range(world)]
            inputs = [values(dtype, (n, *shape[1:]), p, 5) for p, n in enumerate(rows)]
            result = backend.gather(inputs[rank].copy(), root)
            if rank == root:
                assert_same(result, np.concatenate(inputs), f"gather {dtype.name} rows {rows}")
            else:
                assert result is None, "gather returned an array beside the root"

    def check_all_to_all(self, backend: CommunicationBackend) -> None:
        """Parts of any shape, empty ones among them."""
        world, rank = backend.world_size, backend.rank

        def part(dtype: np.dtype[Any], source: int, target: int) -> Array:
            shape = ((source + 2 * target) % 4, 1 + target) if source % 2 else (source * 40,)
            return values(dtype, shape, source, 6 + target)

        for dtype in self.dtypes:
            received = backend.all_to_all([part(dtype, rank, peer) for peer in range(world)])
            assert len(received) == world
            for peer, array in enumerate(received):
                assert_same(array, part(dtype, peer, rank), f"all_to_all {dtype.name}")
                array[...] = 0

    def check_barrier(self, backend: CommunicationBackend) -> None:
        """Nobody goes on before all have come."""
        world = backend.world_size
        for turn in range(world):
            if backend.rank == turn:
                for peer in range(world):
                    if peer != turn:
                        backend.send(np.array([turn]), peer, tag=9)
            backend.barrier()
            # What was sent before the barrier has been sent when it ends.
            if backend.rank != turn:
                assert backend.receive(turn, 1, tag=9)[0] == turn

    # ------------------------------------------------------------------------------ async, split

    def check_async_orders(self, backend: CommunicationBackend) -> None:
        """Issued in one order, waited for in another on each rank; short and long mixed."""
        world, rank = backend.world_size, backend.rank
        dtype = np.dtype(np.float64)
        lengths = [5, 3000, 1, 0, 2000, 7, 1000]
        arrays = [[values(dtype, n, p, k) for p in range(world)] for k, n in enumerate(lengths)]
        expected = [tree_reduce(inputs, SUM) for inputs in arrays]
        works = []
        for k, inputs in enumerate(arrays):
            works.append((k, "all_reduce", backend.all_reduce_async(inputs[rank].copy())))
            works.append((k, "reduce_scatter", backend.reduce_scatter_async(inputs[rank])))
            works.append((k, "all_gather", backend.all_gather_async(inputs[rank])))
            root = k % world
            rooted = inputs[rank] if rank == root else None
            works.append((k, "broadcast", backend.broadcast_async(rooted, root)))
            works.append((k, "scatter", backend.scatter_async(rooted, root)))
            works.append((k, "gather", backend.gather_async(inputs[rank], root)))
            works.append((k, "all_to_all", backend.all_to_all_async([inputs[rank]] * world)))
            works.append((k, "barrier", backend.barrier_async()))
        order = np.random.default_rng(rank).permutation(len(works))
        for index in order:
            k, kind, work = works[index]
            result = work.wait()
            piece = bounds(even_sizes(lengths[k], world), rank)
            whole = {
                "all_reduce": expected[k],
                "reduce_scatter": expected[k][piece],
                "all_gather": np.concatenate(arrays[k]),
                "broadcast": arrays[k][k % world],
                "scatter": arrays[k][k % world][piece],
                "gather": np.concatenate(arrays[k]) if rank == k % world else None,
                "all_to_all": np.concatenate(arrays[k]),
                "barrier": None,
            }[kind]
            if whole is None:
                assert result is None, f"{kind}_async gave {result!r}"
                continue
            given = np.concatenate(result) if kind == "all_to_all" else result
            assert_same(given, whole, f"{kind}_async [{lengths[k]}]")
            assert work.done
            assert work.wait() is result
        # A blocking call overtakes nothing that was issued before it.
        pending = backend.all_reduce_async(np.full(500, 1.0))
        assert backend.all_reduce(np.array([2]))[0] == 2 * world
        assert_same(pending.wait(), np.full(500, float(world)), "a work behind a blocking call")

    def check_split(self, backend: CommunicationBackend) -> None:
        """Colors, None, keys that turn the order round, and groups beside the world."""
        world, rank = backend.world_size, backend.rank
        sub = backend.split(rank % 2)
        assert sub is not None
        members = list(range(rank % 2, world, 2))
        assert (sub.world_size, sub.rank) == (len(members), members.index(rank))
        outer = backend.all_reduce_async(np.full(300, float(rank)))
        inner = sub.all_reduce_async(np.full(400, float(rank)))
        if sub.rank % 2:
            # Its peers of the group wait for the world first: each needs the other's help.
            inner.wait()
        assert outer.wait()[0] == sum(range(world))
        assert inner.wait()[0] == sum(members)
        assert sub.all_gather(np.array([rank])).tolist() == members
        inside = sub.split(0, key=-sub.rank)
        assert inside is not None
        assert inside.all_gather(np.array([rank])).tolist() == members[::-1]
        some = backend.split(3 if rank == 0 else None)
        assert (some is not None) == (rank == 0)
        if some is not None:
            assert (some.rank, some.world_size) == (0, 1)
            assert some.all_reduce(np.array([5]))[0] == 5
        reverse = backend.split(0, key=world - rank)
        assert reverse is not None
        assert reverse.rank == world - 1 - rank
        assert int(reverse.broadcast(np.array(rank), root=0)) == world - 1
        for group in (inside, sub, some, reverse):
            if group is not None:
                group.shutdown()
        backend.barrier()

    # -------------------------------------------------------------------------- point to point

    def check_point_to_point(self, backend: CommunicationBackend) -> None:
        """In order for each tag, whatever order the tags are received in; shapes are kept."""
        world, rank = backend.world_size, backend.rank
        if world == 1:
            return
        right, left = (rank + 1) % world, (rank - 1) % world
        for dtype in self.dtypes:
            for number, size in enumerate((0, 3, 5000)):
                for tag in (0, 7):
                    mine = values(dtype, size, rank, 100 * tag + number)
                    backend.send(mine, right, tag)
                    mine[...] = 0  # what was sent is a copy
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
        """Receives issued ahead, sends without copies, both mixed with the blocking ones."""
        world, rank = backend.world_size, backend.rank
        if world == 1:
            return
        right, left = (rank + 1) % world, (rank - 1) % world
        sizes = (5000, 0, 3, 7000, 511, 513)

        def message(dtype: np.dtype[Any], sender: int, tag: int, number: int) -> Array:
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
            got = {key: coming[key].wait() for key in keys}
            for sent, work in going:
                work.wait()
                sent[...] = 0  # is the sender's again
            for key in keys:
                expected = message(dtype, left, *key)
                assert_same(got[key], expected, f"receive_async tag {key[0]}")
                got[key][...] = 0  # and what came is the receiver's
            assert coming[keys[0]].wait() is got[keys[0]], "a second wait gives another array"
        backend.barrier()
        self._check_receives_in_line(backend, left, right)

    @staticmethod
    def _check_receives_in_line(backend: CommunicationBackend, left: int, right: int) -> None:
        """Receives of all sorts behind each other; what is given up is the next one's."""
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
            # Messages that are not the one expected are refused, and those behind them are not.
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

    # ------------------------------------------------------------------------- counts, copies

    def check_traffic(self, backend: CommunicationBackend) -> None:
        """The bytes booked are those of the contract, headers not among them."""
        world, rank = backend.world_size, backend.rank
        others = world - 1
        for length in (0, 1, world + 1, 1001):
            sizes = even_sizes(length, world)
            array = np.ones(length)
            expected: dict[str, tuple[Callable[[Array], Any], dict[str, int]]] = {
                "all_reduce": (
                    backend.all_reduce,
                    {"reduce_scatter": 8 * (length - sizes[rank]),
                     "all_gather": 8 * sizes[rank] * others},
                ),
                "reduce_scatter": (
                    backend.reduce_scatter,
                    {"reduce_scatter": 8 * (length - sizes[rank])},
                ),
                "all_gather": (
                    backend.all_gather,
                    {"all_gather": 8 * length * others},
                ),
                "broadcast": (
                    backend.broadcast,
                    {"broadcast": 8 * length * others if rank == 0 else 0},
                ),
                "scatter": (
                    backend.scatter,
                    {"scatter": 8 * (length - sizes[0]) if rank == 0 else 0},
                ),
                "gather": (
                    backend.gather,
                    {"gather": 0 if rank == 0 else 8 * length},
                ),
                "all_to_all": (
                    lambda array: backend.all_to_all([array] * world),
                    {"all_to_all": 8 * length * others},
                ),
                "barrier": (lambda array: backend.barrier(), {}),
            }  # fmt: skip
            for name, (call, booked) in expected.items():
                backend.traffic.reset()
                call(array)
                got = dict(backend.traffic.bytes_sent)
                assert got == booked, f"{name} of {length}: booked {got}, expected {booked}"
                assert dict(backend.traffic.calls) == dict.fromkeys(booked, 1)
        backend.traffic.reset()

    def check_results_are_ones_own(self, backend: CommunicationBackend) -> None:
        """Writing into a result changes nobody else's arrays; reused inputs leak nowhere."""
        world, rank = backend.world_size, backend.rank
        for size in (4, 2000):
            mine = np.full(size, float(rank))
            kept = [
                backend.all_gather(mine),
                backend.all_reduce(mine, out=np.empty(size)),
                backend.reduce_scatter(mine),
                backend.broadcast(mine.copy() if rank == 0 else None),
                backend.scatter(mine if rank == 0 else None),
                *backend.all_to_all([mine] * world),
            ]
            copies = [array.copy() for array in kept]
            mine[...] = -1.0
            backend.all_reduce(mine, out=np.empty(size))
            backend.all_gather(mine)
            backend.barrier()
            for array, copy in zip(kept, copies, strict=True):
                assert_same(array, copy, "a result after later collectives")
                array[...] = -2.0 - rank
            backend.barrier()
            for array in kept:
                assert (array == -2.0 - rank).all(), "another rank wrote into this one's result"
            assert (mine == -1.0).all(), "a result of another rank is this one's input"

    def check_without_header_checks(self, backend: CommunicationBackend) -> None:
        """``check_collectives = False`` changes no result."""
        world, rank = backend.world_size, backend.rank
        backend.check_collectives = False
        try:
            for length in (0, 3, world, 3000):
                inputs = [values(np.dtype(np.float64), length, p, 8) for p in range(world)]
                expected = tree_reduce(inputs, SUM)
                assert_same(backend.all_reduce(inputs[rank].copy()), expected, "unchecked")
                assert_same(
                    backend.reduce_scatter(inputs[rank]),
                    expected[bounds(even_sizes(length, world), rank)],
                    "unchecked",
                )
                backend.barrier()
                assert_same(backend.all_gather(inputs[rank]), np.concatenate(inputs), "unchecked")
        finally:
            backend.check_collectives = True
