"""Mismatched calls: refused on all ranks, before any rank's data are changed."""

import inspect
import os

import numpy as np
import pytest

from mpishard import run_in_threads
from mpishard.communication.contract.call import CollectiveKind
from mpishard.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerError
from mpishard.testing.refusals import (
    COLLECTIVES,
    MISMATCHES,
    Arguments,
    Ask,
    arena_mismatches,
    refusal,
)
from mpishard.testing.worlds import in_worlds

by_path = pytest.mark.parametrize("path", ["arena", "two nodes"], indirect=True)
FULL = bool(os.environ.get("MPISHARD_TEST_FULL"))
LENGTHS = {"small": 4, "large": 1000}


def sample(method, world_size):
    """The mismatches of ``method``; of other kinds of call a few, others in each world."""
    of_kind = [m for m in MISMATCHES if m.collective == method and m.is_of_kind]
    kept = of_kind if FULL else of_kind[world_size % 3 :: 3]
    return [m for m in MISMATCHES if m.collective == method and not m.is_of_kind] + kept


def refuse_all(backend, method, odd_rank, place, *, twin):
    for mismatch in sample(method, backend.world_size):
        arguments = Arguments(backend, LENGTHS[place])
        is_odd = backend.rank == odd_rank
        ask = (mismatch.odd if is_odd else mismatch.many)(arguments)
        what = f"{mismatch}, {place}, {'twin' if twin else 'blocking'}"
        line = inspect.currentframe().f_lineno
        if is_odd:
            message = refusal(backend, ask, odd_rank, twin=twin, what=what)  # line + 2
        else:
            message = refusal(backend, ask, odd_rank, twin=twin, what=what)  # line + 4
        assert f"do not match in {mismatch.difference}" in message, f"{what}: {message}"
        for rank, text in enumerate(message.splitlines()[1:]):
            place_called = line + (2 if rank == odd_rank else 4)
            assert f" at {__file__}:{place_called} " in f"{text} ", f"{what}: {text}"
        arguments.check(what)
        total = backend.all_reduce(np.full(LENGTHS[place], 1.0))
        assert (total == backend.world_size).all(), f"the collective after {what}"


@pytest.mark.parametrize("place", LENGTHS)
@pytest.mark.parametrize("odd", ["first", "last"])
@pytest.mark.parametrize("method", COLLECTIVES)
@in_worlds(2, 3, 4)
def test_a_mismatch_is_found_on_all_ranks(backend, method, odd, place):
    odd_rank = 0 if odd == "first" else backend.world_size - 1
    # The twin has the same steps. Small blocking calls have a quick way of their own.
    twins = (False, True) if FULL or (place == "small" and odd == "last") else (odd == "first",)
    for twin in twins:
        refuse_all(backend, method, odd_rank, place, twin=twin)


@pytest.mark.parametrize("method", COLLECTIVES)
@in_worlds(4)
def test_a_mismatch_in_a_group_is_found_there_alone(backend, method):
    """The mismatch is in one of two groups; the other group and the world go on."""
    group = backend.split(backend.rank % 2, key=-backend.rank)
    if backend.rank % 2:
        refuse_all(group, method, 1, "small", twin=False)
        refuse_all(group, method, 0, "large", twin=True)
    else:
        for _ in range(3):
            assert (group.all_reduce(np.ones(300)) == 2).all()
    assert backend.all_reduce(np.ones(1))[0] == 4
    group.shutdown()


@by_path
@pytest.mark.parametrize("odd", ["first", "last"])
@in_worlds(2, 3, 4)
def test_another_arena_or_part_is_refused_on_all_ranks(backend, path, odd):
    odd_rank = 0 if odd == "first" else backend.world_size - 1
    cases = arena_mismatches(backend)
    is_shared = backend.node_count < backend.world_size
    assert {difference for difference, *_ in cases} == {
        "arena", "part of the arena", "kind or order"
    }  # fmt: skip
    for difference, many, other in cases if is_shared else ():
        ask = other if backend.rank == odd_rank else many
        message = refusal(backend, ask, odd_rank, twin=False, what=difference)
        assert f"do not match in {difference}" in message
        if backend.world_size > 2:
            assert f"rank {odd_rank} is the odd one out: " in message.replace("Rank", "rank")
        if ask.arena is not None:
            assert (ask.arena.mine == 1).all()
    assert backend.all_reduce(np.ones(1))[0] == backend.world_size


@in_worlds(3)
def test_a_report_names_the_arenas_and_parts(backend):
    first, second = (backend.allocate_arena(100, np.float64) for _ in range(2))
    used = second if backend.rank == 1 else first
    work = used.reduce_into(np.ones((34, 33, 33)[backend.rank]))
    with pytest.raises(CollectiveMismatchError) as caught:
        work.wait()
    for text in (
        "Rank 1 is the odd one out: arena 2, where ranks 0, 2 gave arena 1",
        "rank 1: collective 3, reduce_into(SUM, float64[100], arena=2, start=0) at ",
    ):
        assert text in str(caught.value)
    start = 10 * (backend.rank == 2)
    work = first.part(20, 50).reduce_in_place(slice(start, start + 40))
    with pytest.raises(CollectiveMismatchError) as caught:
        work.wait()
    text = "Rank 2 is the odd one out: elements 30 to 70, where ranks 0, 1 gave elements 20 to 60"
    assert text in str(caught.value)


def test_every_collective_has_its_mismatches():
    differences = {
        method: {m.difference for m in MISMATCHES if m.collective == method}
        for method in COLLECTIVES
    }
    kind = {"kind or order"}
    assert differences == {
        "all_reduce": kind | {"operation", "shape", "dtype"},
        "reduce_scatter": kind | {"operation", "shape", "dtype", "counts"},
        "all_gather": kind | {"trailing dims", "dtype"},
        "broadcast": kind | {"root", "shape or dtype"},
        "scatter": kind | {"root"},
        "gather": kind | {"root", "trailing dims", "dtype"},
        "all_to_all": kind | {"dtype"},
        "barrier": kind,
        "split": kind,
        "allocate_shared": kind | {"shape", "dtype"},
    }
    of_arenas = {"reduce_into", "reduce_in_place", "gather_in_place"}
    assert set(COLLECTIVES) == {k.label for k in CollectiveKind} - of_arenas
    assert len([m for m in MISMATCHES if m.is_of_kind]) == 10 * 9


@pytest.mark.parametrize("length", [3, 700])
@in_worlds(2, 3, 4)
def test_order(backend, length):
    """One rank swaps two calls: both are refused, and later calls succeed."""
    odd = backend.rank == 0
    for first, second in (("all_reduce", "all_gather"), ("barrier", "all_to_all")):
        arguments = Arguments(backend, length)
        asks = [
            COLLECTIVES[name](arguments) for name in ((second, first) if odd else (first, second))
        ]
        works = [getattr(backend, f"{ask.method}_async")(*ask.arguments) for ask in asks]
        for work in works:
            with pytest.raises(CollectiveMismatchError, match="kind or order"):
                work.wait()
        for ask in asks:
            refusal(backend, ask, 0, twin=False, what="order")
        arguments.check("calls in another order")
    # The same collective twice, of arrays that differ.
    arrays = [np.ones(length), np.ones(length + 1)]
    for array in reversed(arrays) if odd else arrays:
        refusal(backend, Ask("all_reduce", (array,)), 0, twin=False, what="order")
        assert (array == 1).all()
    assert backend.all_reduce(np.ones(1))[0] == backend.world_size


@pytest.mark.parametrize("odd", ["first", "last"])
@in_worlds(2, 3, 4)
def test_one_extra_call(backend, odd):
    """The extra call of one rank is compared with the next call of the others."""
    odd_rank = 0 if odd == "first" else backend.world_size - 1
    for length in (3, 700):
        array = np.ones(length)
        assert (backend.all_reduce(array) == backend.world_size).all()
        if backend.rank == odd_rank:
            again = Ask("all_reduce", (array,))
            refusal(backend, again, odd_rank, twin=False, what="a call more")
            assert (array == backend.world_size).all()
        else:
            refusal(backend, Ask("barrier"), odd_rank, twin=False, what="a call more")
        assert (backend.all_reduce(np.ones(length)) == backend.world_size).all()


@pytest.mark.parametrize("length", [3, 700])
def test_one_extra_call_at_the_end(length):
    """The others make no further call, because they have left."""

    def body(backend):
        backend.all_reduce(np.ones(length))
        if backend.rank == 1:
            with pytest.raises(PeerError, match=r"rank 0 left after collective 1"):
                backend.all_reduce(np.ones(length))
        return backend.rank

    assert run_in_threads(2, body) == [0, 1]


@in_worlds(2, 3, 4)
def test_arrays_that_a_collective_ignores(backend):
    """An array of a rank that is not the root is ignored by scatter, but not by broadcast."""
    rank, world = backend.rank, backend.world_size
    mine = np.ones((3, world), np.int8) if rank else np.arange(2.0 * world)
    piece = backend.scatter(mine)
    assert piece.tolist() == [2.0 * rank, 2.0 * rank + 1]
    last = rank == world - 1
    given = np.zeros(3) if last else (np.ones(4) if rank == 0 else None)
    refusal(backend, Ask("broadcast", (given,)), world - 1, twin=False, what="an array for None")
    assert given is None or given.tolist() == ([0.0] * 3 if last else [1.0] * 4)
    assert backend.broadcast(np.ones(4) if rank == 0 else None).tolist() == [1.0] * 4


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("odd", ["first", "last"])
@in_worlds(2, 3, 4)
def test_wrong_rows_of_out_are_refused_on_all_ranks(backend, odd, twin):
    """The rows of the other ranks are known only from their headers, so all ranks raise."""
    odd_rank = 0 if odd == "first" else backend.world_size - 1
    world = backend.world_size
    for length in (2, 500):
        mine = np.ones(length)
        out = np.zeros(length * world + (backend.rank == odd_rank))
        for given in (out, out if backend.rank == odd_rank else None):
            with (
                pytest.raises(ValueError, match=f"out on rank {odd_rank} has {out.size}")
                if (backend.rank == odd_rank)
                else pytest.raises(
                    ValueError, match=f"out on rank {odd_rank} has {length * world + 1} rows"
                )
            ):
                Ask("all_gather", (mine,), {"out": given}).make(backend, twin=twin)
            assert not out.any()
        assert (backend.all_gather(mine) == 1).all()


@in_worlds(2, 3, 4)
def test_one_mismatch_among_several_works(backend):
    """One work of several is refused, at any position, and no other."""
    world = backend.world_size
    for bad in (0, 4, 9):
        works = []
        for number in range(10):
            length = 700 if number % 2 else 5
            if number == bad and backend.rank == 1:
                length += 1
            works.append(backend.all_reduce_async(np.ones(length)))
        for number in np.random.default_rng(backend.rank).permutation(10):
            if number == bad:
                with pytest.raises(CollectiveMismatchError, match="shape"):
                    works[number].wait()
            else:
                assert (works[number].wait() == world).all()


@in_worlds(2, 3)
def test_calls_with_a_header_are_checked_also_without_checks(backend):
    """``check_collectives = False`` accepts the documented mismatches, and no others."""
    backend.check_collectives = False
    for mismatch in MISMATCHES:
        if mismatch.is_of_kind or mismatch.collective in ("all_reduce", "reduce_scatter"):
            continue
        arguments = Arguments(backend, 1000)
        ask = (mismatch.odd if backend.rank == 0 else mismatch.many)(arguments)
        refusal(backend, ask, 0, twin=False, what=str(mismatch))
        arguments.check(str(mismatch))


def test_groups_called_in_another_order_are_reported():
    """Two worlds that are called in two orders wait for each other: every rank raises."""

    def barriers(worlds):
        for world in worlds:
            world.barrier()

    def body(backend):
        group = backend.split(0)
        worlds = (backend, group) if backend.rank == 0 else (group, backend)
        with pytest.raises((CollectiveTimeoutError, PeerError)) as caught:
            barriers(worlds)
        return str(caught.value)

    messages = run_in_threads(3, body, timeout=0.3)
    assert all("waits in collective" in m or "did not arrive" in m for m in messages)
    assert any("did not arrive" in message for message in messages)


@in_worlds(2, 3)
def test_works_of_groups_may_be_issued_in_another_order(backend):
    """Works of two worlds may be issued in different orders on different ranks."""
    group = backend.split(0)
    worlds = (backend, group) if backend.rank == 0 else (group, backend)
    works = [world.all_reduce_async(np.ones(700)) for world in worlds]
    assert all((work.wait() == backend.world_size).all() for work in works)
    group.shutdown()
