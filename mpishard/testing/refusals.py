"""Checks that a communication backend refuses wrong calls, and works afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpishard.base import Array, CollectiveMismatchError, PeerError
from mpishard.communication import Arena, CommunicationBackend, ReductionOperation, Work
from mpishard.testing.reductions import (
    CommunicationChecks,
    assert_raises,
    assert_same,
    even_sizes,
)

MAX, AVERAGE = ReductionOperation.MAX, ReductionOperation.AVERAGE
_WITHOUT_TWIN = ("split", "allocate_shared", "allocate_arena")


class Ask(NamedTuple):
    """A call that is not made yet: a method of a backend or of an arena, and its arguments."""

    method: str
    arguments: tuple[object, ...] = ()
    options: dict[str, object] = {}  # noqa: RUF012 - it is never changed
    arena: Arena | None = None
    """The arena that has the method, if it is not the backend's."""

    def make(self, backend: CommunicationBackend, *, twin: bool = False) -> object:
        """Call the method, or issue its twin and wait; return the result."""
        if self.arena is not None:
            work: Work = getattr(self.arena, self.method)(*self.arguments, **self.options)
            return work.wait()
        if twin and self.method not in _WITHOUT_TWIN:
            work = getattr(backend, f"{self.method}_async")(*self.arguments, **self.options)
            return work.wait()
        return getattr(backend, self.method)(*self.arguments, **self.options)


class Arguments:
    """The arrays of one rank's call, all ones; `check` tests that they still are.

    Parameters
    ----------
    backend : CommunicationBackend
        Backend that makes the call.
    length : int
        Rows of an array, an even number.
    """

    def __init__(self, backend: CommunicationBackend, length: int) -> None:
        self.world_size = backend.world_size
        self.length = length
        self._made: list[Array] = []

    def ones(self, *shape: int, dtype: DTypeLike = np.float64) -> Array:
        """Return an array of ones of ``shape``, by default (length,)."""
        array = np.ones(shape or (self.length,), dtype)
        self._made.append(array)
        return array

    def check(self, what: str) -> None:
        """Raise AssertionError if the elements of an array have changed."""
        for array in self._made:
            assert_same(array, np.ones(array.shape, array.dtype), f"an array given to {what}")


Asking = Callable[[Arguments], Ask]


@dataclass(frozen=True)
class Mismatch:
    """The call of all ranks but one, and the call of the odd one.

    Parameters
    ----------
    collective : str
        The method that all other ranks call.
    difference : str
        The difference that the error must name.
    name : str
        The call of the odd rank, in words.
    many, odd : callable
        Make the call of the other ranks, and of the odd one, from the rank's `Arguments`.
    """

    collective: str
    difference: str
    name: str
    many: Asking
    odd: Asking

    def __str__(self) -> str:
        return f"{self.collective}, {self.name}"

    @property
    def is_of_kind(self) -> bool:
        """Whether the odd rank calls another collective."""
        return self.difference == "kind or order"


COLLECTIVES: dict[str, Asking] = {
    "all_reduce": lambda a: Ask("all_reduce", (a.ones(),)),
    "reduce_scatter": lambda a: Ask("reduce_scatter", (a.ones(),)),
    "all_gather": lambda a: Ask("all_gather", (a.ones(),)),
    "broadcast": lambda a: Ask("broadcast", (a.ones(), 0)),
    "scatter": lambda a: Ask("scatter", (a.ones(), 0)),
    "gather": lambda a: Ask("gather", (a.ones(), 0)),
    "all_to_all": lambda a: Ask("all_to_all", ([a.ones() for _ in range(a.world_size)],)),
    "barrier": lambda a: Ask("barrier"),
    "split": lambda a: Ask("split", (0,)),
    "allocate_shared": lambda a: Ask("allocate_shared", (a.length, np.float64)),
}
"""A right call of each collective, from a rank's `Arguments`."""


def _counts(a: Arguments) -> list[int]:
    return [0] * (a.world_size - 1) + [a.length]


_REDUCTIONS, _GATHERS = ("all_reduce", "reduce_scatter"), ("all_gather", "gather")
_ROOTED = ("broadcast", "scatter", "gather")

# Methods, difference, name, and the call of the odd rank; the others make the right call.
_ODD: tuple[tuple[tuple[str, ...], str, str, Callable[[str, Arguments], Ask]], ...] = (
    (_REDUCTIONS, "operation", "another operation", lambda m, a: Ask(m, (a.ones(), MAX))),
    (_REDUCTIONS, "shape", "a row less", lambda m, a: Ask(m, (a.ones(a.length - 1),))),
    (_REDUCTIONS, "shape", "no rows", lambda m, a: Ask(m, (a.ones(0),))),
    (_REDUCTIONS, "shape", "many more rows", lambda m, a: Ask(m, (a.ones(a.length + 500),))),
    (_REDUCTIONS, "shape", "a dim more", lambda m, a: Ask(m, (a.ones(a.length, 1),))),
    (_REDUCTIONS, "shape", "as many elements in two dims",
     lambda m, a: Ask(m, (a.ones(2, a.length // 2),))),
    ((*_REDUCTIONS, *_GATHERS), "dtype", "a narrower dtype",
     lambda m, a: Ask(m, (a.ones(dtype=np.float32),))),
    ((*_REDUCTIONS, *_GATHERS), "dtype", "a dtype as wide",
     lambda m, a: Ask(m, (a.ones(dtype=np.int64),))),
    (("reduce_scatter",), "counts", "counts of its own",
     lambda m, a: Ask(m, (a.ones(),), {"counts": _counts(a)})),
    (_GATHERS, "trailing dims", "a dim more", lambda m, a: Ask(m, (a.ones(a.length, 1),))),
    (_GATHERS, "trailing dims", "a dim more, no rows", lambda m, a: Ask(m, (a.ones(0, 1),))),
    (_GATHERS, "dtype", "another dtype, no rows",
     lambda m, a: Ask(m, (a.ones(0, dtype=np.int8),))),
    (("broadcast",), "shape or dtype", "a row less",
     lambda m, a: Ask(m, (a.ones(a.length - 1), 0))),
    (("broadcast",), "shape or dtype", "no rows", lambda m, a: Ask(m, (a.ones(0), 0))),
    (("broadcast",), "shape or dtype", "a dim more", lambda m, a: Ask(m, (a.ones(a.length, 1), 0))),
    (("broadcast",), "shape or dtype", "a narrower dtype",
     lambda m, a: Ask(m, (a.ones(dtype=np.float32), 0))),
    (("broadcast",), "shape or dtype", "a dtype as wide",
     lambda m, a: Ask(m, (a.ones(dtype=np.int64), 0))),
    (_ROOTED, "root", "another root", lambda m, a: Ask(m, (a.ones(), 1))),
    (("all_to_all",), "dtype", "another dtype",
     lambda m, a: Ask(m, ([a.ones(dtype=np.int64) for _ in range(a.world_size)],))),
    (("all_to_all",), "dtype", "another dtype, nothing in it",
     lambda m, a: Ask(m, ([a.ones(0, dtype=np.int8) for _ in range(a.world_size)],))),
    (("allocate_shared",), "shape", "an element more",
     lambda m, a: Ask(m, (a.length + 1, np.float64))),
    (("allocate_shared",), "dtype", "another dtype", lambda m, a: Ask(m, (a.length, np.float32))),
)  # fmt: skip


def _mismatches() -> Iterator[Mismatch]:
    for method, many in COLLECTIVES.items():
        for other, odd in COLLECTIVES.items():
            if other != method:
                yield Mismatch(method, "kind or order", f"calls {other}", many, odd)
    for methods, difference, name, ask in _ODD:
        for method in methods:
            yield Mismatch(method, difference, name, COLLECTIVES[method], partial(ask, method))

    def wide(method: str, dims: int) -> Asking:
        return lambda a: Ask(method, (a.ones(a.length, dims),))

    def into(method: str, *operation: ReductionOperation) -> Asking:
        return lambda a: Ask(
            method,
            (a.ones(), *operation),
            {"out": a.ones() if method == "all_reduce" else None},
        )

    def counted(order: int) -> Asking:
        return lambda a: Ask("reduce_scatter", (a.ones(),), {"counts": _counts(a)[::order]})

    name = "another trailing dim"
    for method in _REDUCTIONS:
        many, odd = into(method), into(method, MAX)
        yield Mismatch(method, "operation", "another operation, into out", many, odd)
        yield Mismatch(method, "shape", name, wide(method, 2), wide(method, 3))
    for method in _GATHERS:
        yield Mismatch(method, "trailing dims", name, wide(method, 2), wide(method, 3))
    yield Mismatch("reduce_scatter", "counts", "other counts", counted(1), counted(-1))


MISMATCHES = tuple(_mismatches())
"""Every pair of different collectives, and each argument that must match in a collective."""


def arena_mismatches(backend: CommunicationBackend) -> list[tuple[str, Ask, Ask]]:
    """Make arenas of ones; return each difference, the call of most ranks, and that of the odd one.

    Collective. The list is empty if some rank has nothing to share with another.
    """
    first, second = (backend.allocate_arena(1000, np.float64) for _ in range(2))
    gathered = backend.allocate_arena(1000, np.float64, once_per_node=True)
    if first is None or second is None or gathered is None:
        return []
    for arena in (first, second, gathered):
        arena.mine[...] = 1

    def ask(arena: Arena, method: str, start: int, length: int = 500) -> Ask:
        size = even_sizes(length, backend.world_size)[backend.rank]
        given = {"reduce_into": (np.ones(size),), "gather_in_place": (np.ones(size),)}
        arguments = (*given.get(method, ()), slice(start, start + length))
        return Ask(method, arguments, arena=arena)

    one = ask(first, "reduce_into", 0)
    return [
        ("arena", one, ask(second, "reduce_into", 0)),
        ("part of the arena", one, ask(first, "reduce_into", 8)),
        ("part of the arena", one, ask(first, "reduce_into", 0, 501)),
        ("kind or order", one, ask(first, "reduce_in_place", 0)),
        ("kind or order", one, Ask("reduce_scatter", (np.ones(500),))),
        ("arena", ask(first, "reduce_in_place", 0), ask(second, "reduce_in_place", 0)),
        ("arena", ask(gathered, "gather_in_place", 0), ask(first, "gather_in_place", 0)),
        ("part of the arena", ask(gathered, "gather_in_place", 0),
         ask(gathered, "gather_in_place", 500)),
        ("arena", Ask("allocate_shared", (16 * backend.world_size, np.float64)),
         Ask("allocate_arena", (16 * backend.world_size, np.float64), {"once_per_node": True})),
    ]  # fmt: skip


def refusal(
    backend: CommunicationBackend, ask: Ask, odd_rank: int, *, twin: bool, what: str
) -> str:
    """Make the call of ``ask``, and return the message of its refusal, the same on all ranks.

    Raises
    ------
    AssertionError
        If it is not refused, the ranks' messages differ, or do not name each rank's call.
    """
    try:
        ask.make(backend, twin=twin)
    except CollectiveMismatchError as error:
        message = str(error)
    except PeerError:
        raise  # another rank has failed, and its error is the one to report
    except Exception as error:
        raise AssertionError(f"CollectiveMismatchError was not raised for {what}") from error
    else:
        raise AssertionError(f"CollectiveMismatchError was not raised for {what}")
    lines = message.splitlines()[1:]
    assert len(lines) == backend.world_size, f"{what}: a line for each rank is missing:\n{message}"
    for rank, line in zip(backend.world_ranks, lines, strict=True):
        assert line.startswith(f"  rank {rank}: collective "), f"{what}: {line}"
        assert " at " in line, f"{what}: a call site is missing: {line}"
    own = f", {'allocate_shared' if ask.method == 'allocate_arena' else ask.method}("
    assert own in lines[backend.rank], f"{what}: {own} of rank {backend.rank} is not {lines}"
    # Compared between ranks: each must raise the same words, whichever rank was wrong.
    text = np.frombuffer(message.encode(), np.uint8)
    for rank, other in enumerate(np.split(backend.all_gather(text), backend.world_size)):
        assert other.tobytes() == text.tobytes(), (
            f"{what}, rank {odd_rank} being odd: rank {rank} was told otherwise:\n"
            f"{other.tobytes().decode(errors='replace')}\nand not\n{message}"
        )
    return message


Refusal = tuple[type[Exception], Callable[[], object]]


class RefusalChecks(CommunicationChecks):
    """The part of `CommunicationConformance` that checks refused calls."""

    def check_refusals(self, backend: CommunicationBackend) -> None:
        """Calls that are wrong on one rank alone are refused there, before any communication."""
        world, rank = backend.world_size, backend.rank
        fixed = np.zeros(3)
        fixed.flags.writeable = False
        cases = [*_wrong_arrays(backend), *_wrong_arguments(backend), *_wrong_messages(backend)]
        for number, (kind, call) in enumerate(cases):
            # Only one rank makes the call. If the call communicated, it would wait for the others.
            if number % world == rank:
                assert_raises(kind, call)
        # A read-only array is accepted if it is only read.
        assert_same(backend.all_reduce(fixed, out=np.ones(3)), fixed, "read-only input")
        assert_same(backend.broadcast(fixed if rank == 0 else None), fixed, "read-only root")
        assert backend.all_reduce(np.ones(1))[0] == world

    def check_mismatches(self, backend: CommunicationBackend) -> None:
        """Calls that do not match raise on every rank, and the backend works afterwards."""
        world, rank = backend.world_size, backend.rank
        if world == 1:
            return
        names = list(COLLECTIVES)
        for number, mismatch in enumerate(MISMATCHES):
            if mismatch.is_of_kind:
                # A sample of all pairs of collectives, in which each is once on either side.
                following = names[(names.index(mismatch.collective) + 1) % len(names)]
                if mismatch.name != f"calls {following}":
                    continue
            odd = number % world
            # A few elements travel with the header, and more of them after it.
            for length, twin in ((4, number % 2 == 0), (1000, number % 2 == 1)):
                arguments = Arguments(backend, length)
                ask = (mismatch.odd if rank == odd else mismatch.many)(arguments)
                message = refusal(backend, ask, odd, twin=twin, what=str(mismatch))
                assert mismatch.difference in message, f"{mismatch}: {message}"
                arguments.check(str(mismatch))
        for number, (difference, many, odd_ask) in enumerate(arena_mismatches(backend)):
            odd = number % world
            ask = odd_ask if rank == odd else many
            message = refusal(backend, ask, odd, twin=False, what=f"another {difference}")
            assert f"do not match in {difference}" in message, message
            if ask.arena is not None:
                assert_same(ask.arena.mine, np.ones(1000), f"an arena after another {difference}")
        # Right calls beside refused ones.
        last = rank == world - 1
        short = backend.all_reduce_async(np.ones(2 if last else 3))
        # Issued before the refused one is waited for: a refusal must not disturb its neighbours.
        good = backend.all_reduce_async(np.ones(700))
        assert_same(good.wait(), np.full(700, float(world)), "a work behind a refused one")
        assert_raises(CollectiveMismatchError, short.wait)
        out = np.ones(1) if last else None
        assert_raises(ValueError, backend.all_gather, np.ones(2), out=out)
        assert_raises(ValueError, backend.all_gather_async(np.ones(2), out=out).wait)
        backend.barrier()


def _wrong_arrays(backend: CommunicationBackend) -> Iterator[Refusal]:
    """Yield calls of each collective and its twin with arrays that none of them takes."""
    world, root = backend.world_size, backend.rank
    # One dim more than a header has room for.
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

    def calls(name: str, kind: type[Exception], *arguments: object) -> Iterator[Refusal]:
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
    """Yield calls, and their twins, with wrong operations, roots, counts and results."""
    world, rank = backend.world_size, backend.rank
    ok, fixed = np.zeros(3), np.zeros(3)
    fixed.flags.writeable = False
    rows = np.ones((world, 3))
    calls: list[tuple[type[Exception], str, tuple[object, ...], dict[str, object]]] = [
        (ValueError, "all_reduce", (fixed,), {}),
        (TypeError, "all_reduce", (np.float64(1),), {}),
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
    calls += [
        (TypeError, "reduce_scatter", (np.ones(world),), {"strict": "no"}),
        (TypeError, "scatter", (np.ones(world), 0), {"strict": "no"}),
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
    """Yield sends and receives with wrong ranks, tags and counts."""
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
