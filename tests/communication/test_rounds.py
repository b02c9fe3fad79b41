"""Collectives in rounds, through rows of the node's memory and by messages, however ranks come.

Rows and messages are short here, so that an element that lands in another's place, is sent before
it is combined, or is read from an older round shows in the result.
"""

import os
import time

import ml_dtypes
import numpy as np
import pytest

from mpishard import MPICommunicationBackend, ReductionOperation, ShardLayout
from mpishard.communication.mpi.messages import MessageChannel
from mpishard.communication.mpi.node_memory import RowChannel
from mpishard.errors import CollectiveMismatchError
from mpishard.testing import reductions
from mpishard.testing.communication import CommunicationConformance
from mpishard.testing.reductions import ADVERSARIAL_VALUES, tree_reduce

pytestmark = pytest.mark.mpi

SUM = ReductionOperation.SUM
ROUND = 1024
"""Bytes of a row, or received in a round."""
PATHS = ("rows", "messages", "two nodes")
IS_FULL = bool(os.environ.get("MPISHARD_TEST_FULL"))


@pytest.fixture(params=PATHS)
def world(request, backend, monkeypatch):
    """A world whose rounds are short."""
    monkeypatch.setenv("MPISHARD_ARENA", "off" if request.param == "messages" else "auto")
    monkeypatch.setenv("MPISHARD_VIRTUAL_NODES", "2" if request.param == "two nodes" else "1")
    monkeypatch.setattr(RowChannel, "ROW_BYTES", ROUND)
    monkeypatch.setattr(MessageChannel, "ROUND_BYTES", ROUND)
    with MPICommunicationBackend(backend._comm) as own:
        through_rows = isinstance(own._group.channel, RowChannel)
        assert through_rows == (request.param == "rows")
        yield own


def assert_same(actual, expected):
    reductions.assert_same(actual, expected, "all_reduce")


def arrays(world, number, length, dtype=np.float64):
    """The array of each rank for all-reduce ``number``: no two alike."""
    numbers = [np.random.default_rng([number, rank]) for rank in range(world.world_size)]
    return [(8 * generator.standard_normal(length)).astype(dtype) for generator in numbers]


def lengths_around(world, itemsize):
    """Lengths around one round and two, and those that no rank divides."""
    one = ROUND // itemsize // world.world_size * world.world_size
    return sorted({17, one - 1, one, one + 1, 2 * one + 1, 5 * one + world.world_size - 1})


@pytest.mark.parametrize("operation", ReductionOperation)
@pytest.mark.parametrize("dtype", [np.float64, np.int8, ml_dtypes.bfloat16, np.complex64])
def test_every_operation_and_type(world, operation, dtype):
    kind = np.dtype(dtype).kind
    ordered = operation in (ReductionOperation.MIN, ReductionOperation.MAX)
    if (kind == "i" and operation is ReductionOperation.AVERAGE) or (kind == "c" and ordered):
        return
    for length in lengths_around(world, np.dtype(dtype).itemsize):
        data = arrays(world, length, length, dtype)
        with np.errstate(over="ignore"):
            wanted = tree_reduce(data, operation)
        mine = data[world.rank].copy()
        out = np.empty_like(mine)
        assert_same(world.all_reduce(mine, operation, out=out), wanted)
        part = ShardLayout(length, world.world_size).slice(world.rank)
        assert_same(world.reduce_scatter(mine, operation), wanted[part])
        assert_same(mine, data[world.rank])
        assert_same(world.all_reduce(mine, operation), wanted)
        assert_same(world.all_gather(mine[part].copy()), wanted)


def test_adversarial_values(world):
    values = np.resize(np.array(ADVERSARIAL_VALUES, np.float64), 500)
    data = [np.roll(values, rank) for rank in range(world.world_size)]
    for _ in range(3):
        mine = data[world.rank].copy()
        assert_same(world.all_reduce(mine), tree_reduce(data, SUM))


def test_pieces_of_any_length(world):
    rank, ranks = world.rank, world.world_size
    for counts in (
        [0] * (ranks - 1) + [700],
        [700] + [0] * (ranks - 1),
        [330 * r for r in range(ranks)],
    ):
        data = arrays(world, 1, sum(counts), np.float32)
        part = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        wanted = tree_reduce(data, SUM)
        piece = world.reduce_scatter(data[rank], counts=counts)
        assert piece.tobytes() == wanted[part].tobytes()
        assert world.all_gather(piece).tobytes() == wanted.tobytes()
        scattered = world.scatter(wanted if rank == 1 else None, 1, counts=counts if rank else None)
        assert scattered.tobytes() == wanted[part].tobytes()
        gathered = world.gather(scattered, ranks - 1)
        assert gathered is None or gathered.tobytes() == wanted.tobytes()


def test_ranks_arrive_in_any_order_and_block_or_not(world):
    """Blocking or not, one or several at a time, early or late: no rank reads an old row."""
    draw = np.random.default_rng(world.rank)
    under_way = []
    for number in range(100):
        length = (16, 600, 9, 20, 3, 40)[number % 6]
        data = arrays(world, number, length)
        wanted, mine = tree_reduce(data, SUM), data[world.rank]
        way = draw.integers(5)
        if way == 0:
            time.sleep(1e-3 * draw.random())
        if way == 1:
            under_way.append((world.all_reduce_async(mine, out=np.empty(length)), wanted))
        elif way == 2:
            out = np.empty(length)
            assert world.all_reduce(mine, out=out) is out
            assert_same(out, wanted)
        else:
            world.all_reduce(mine)
            assert_same(mine, wanted)
        if way != 1:
            mine[...] = np.nan  # the others must not read it any more
        while len(under_way) > 3 or (number == 99 and under_way):
            work, expected = under_way.pop()
            assert_same(work.wait(), expected)


def test_several_collectives_at_once(world):
    """Each proceeds in rounds, and no round of a later collective comes in between."""
    lengths = [world.world_size * n + 1 for n in (65, 330, 17, 165)]
    data = [arrays(world, length, length) for length in lengths]
    sums = [tree_reduce(each, SUM) for each in data]
    works = []
    for each, wanted in zip(data, sums, strict=True):
        part = ShardLayout(len(wanted), world.world_size).slice(world.rank)
        works.append((world.all_reduce_async(each[world.rank].copy()), wanted))
        works.append((world.reduce_scatter_async(each[world.rank]), wanted[part]))
        works.append((world.all_gather_async(wanted[part].copy()), wanted))
        root = wanted.copy() if world.rank == 0 else np.empty_like(wanted)
        works.append((world.broadcast_async(root, 0), wanted))
    for work, wanted in reversed(works):
        assert work.wait().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("shift", [1, 100, 599])
def test_results_that_overlap_the_array(world, shift):
    for number in range(3):
        data = arrays(world, number, 600)
        memory = np.concatenate([data[world.rank], np.zeros(shift)])
        world.all_reduce(memory[:600], out=memory[shift:])
        assert_same(memory[shift:], tree_reduce(data, SUM))


def test_a_result_in_place_on_some_ranks_only(world):
    for number in range(6):
        data = arrays(world, number, 700)
        mine = data[world.rank].copy()
        out = np.empty_like(mine) if (world.rank + number) % 2 else mine
        assert_same(world.all_reduce(mine, out=out), tree_reduce(data, SUM))


def test_the_next_call_after_a_mismatch_succeeds(world):
    for number in range(2):
        data = arrays(world, number, 800)
        world.all_reduce(data[world.rank].copy())
        with pytest.raises(CollectiveMismatchError, match="801"):
            world.all_reduce(np.zeros(800 if world.rank else 801))
        with pytest.raises(CollectiveMismatchError, match="MAX"):
            world.all_reduce(np.zeros(800), ReductionOperation.MAX if world.rank else SUM)
        with pytest.raises(CollectiveMismatchError, match="barrier"):
            world.barrier() if world.rank else world.all_reduce(np.zeros(800))
        assert_same(world.all_reduce(data[world.rank].copy()), tree_reduce(data, SUM))


def test_without_checks_rounds_stay_in_order(world):
    """One rank issues both at once, the others one after the other."""
    world.check_collectives = False
    data = [arrays(world, number, 1000) for number in range(2)]
    mine = [each[world.rank].copy() for each in data]
    if world.rank == 0:
        for work in [world.all_reduce_async(array) for array in mine]:
            work.wait()
    else:
        for array in mine:
            world.all_reduce(array)
    for array, each in zip(mine, data, strict=True):
        assert_same(array, tree_reduce(each, SUM))


def test_groups_have_rounds_of_their_own(world):
    group = world.split(world.rank % 2, world.rank)
    with group:
        for number in range(6):
            data = arrays(world, number, 300)
            whole = world.all_reduce_async(data[world.rank].copy())
            members = [data[rank] for rank in group.world_ranks]
            assert_same(group.all_reduce(data[world.rank].copy()), tree_reduce(members, SUM))
            assert_same(whole.wait(), tree_reduce(data, SUM))


def test_many_groups_at_once(backend):
    groups = [backend.split(0) for _ in range(40)]
    try:
        for number, group in enumerate(groups):
            data = arrays(backend, number, 3000)
            assert_same(group.all_reduce(data[backend.rank].copy()), tree_reduce(data, SUM))
    finally:
        for group in groups:
            group.shutdown()


@pytest.mark.parametrize(
    ("world", "dtype"),
    # Elements of one byte and of eight: above, all ways meet more types.
    [
        (path, dtype)
        for place, path in enumerate(PATHS)
        for dtype in (("bool", "float64") if IS_FULL else (("float64", "bool")[place % 2],))
    ],
    indirect=["world"],
)
def test_the_conformance_suite(world, dtype):
    checks = CommunicationConformance((np.dtype(dtype),))
    for name in (
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "broadcast",
        "scatter",
        "gather",
        "all_to_all",
        "twins",
        "async_orders",
        "shared_memory",
    ):
        getattr(checks, f"check_{name}")(world)


def test_messages_move_while_the_rank_computes(world):
    """No call of this rank advances the reduction; its rounds need several."""
    mine = np.full(5 * ROUND // 8, 1.0)
    world.barrier()
    work = world.all_reduce_async(mine)
    deadline = time.monotonic() + 20
    while isinstance(world._group.channel, MessageChannel) and not work.done:
        assert time.monotonic() < deadline
        sum(range(1000))
    assert work.wait()[0] == world.world_size
