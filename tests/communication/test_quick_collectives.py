"""All-reduces that are done on the spot, through memory or by messages, however the ranks come."""

import time

import ml_dtypes
import numpy as np
import pytest

from mpishard import MPICommunicationBackend, ReductionOperation
from mpishard.communication.mpi.bounce import BOUNCE_BYTES, PAIR_BYTES, WHOLE_BYTES, longest_bounced
from mpishard.communication.mpi.pairwise_collectives import CHUNK_BYTES, SWAP_BYTES
from mpishard.communication.mpi.plans import HalvesPlan, MessagePlan
from mpishard.errors import CollectiveMismatchError, CommunicationError
from mpishard.testing import reference
from mpishard.testing.reference import ADVERSARIAL_VALUES, tree_reduce

pytestmark = pytest.mark.mpi

SUM = ReductionOperation.SUM
LONG = BOUNCE_BYTES // 4 + 8
"""Elements of an array that is too long to bounce."""
BY_MESSAGES = "_steps_whole", "_steps_in_parts"
"""The quick ways that send some."""


@pytest.fixture(params=["auto", "off"])
def world(request, backend, monkeypatch):
    """A world that has made no plan yet, and shares memory or does not."""
    monkeypatch.setenv("MPISHARD_ARENA", request.param)
    with MPICommunicationBackend(backend._comm) as own:
        assert not own._plans
        yield own


@pytest.fixture
def bouncing(backend):
    """A world that has not bounced anything yet."""
    with MPICommunicationBackend(backend._comm) as own:
        assert own._talk.bounce is None
        yield own


def assert_same(actual, expected):
    reference.assert_same(actual, expected, "all_reduce")


def arrays(world, number, length, dtype=np.float64):
    """What each rank gives to all-reduce ``number``: no two alike."""
    numbers = [np.random.default_rng([number, rank]) for rank in range(world.world_size)]
    return [generator.standard_normal(length).astype(dtype) for generator in numbers]


def note_calls(monkeypatch, world, method, calls):
    """Let ``calls`` grow by one where ``method`` is called."""
    original = getattr(world, method)

    def noting(*arguments, **named):
        calls.append(method)
        return original(*arguments, **named)

    monkeypatch.setattr(world, method, noting)


def test_what_is_short_enough_sends_no_message(bouncing, monkeypatch):
    exchanged = []
    for method in ("_exchange", *BY_MESSAGES):
        note_calls(monkeypatch, bouncing, method, exchanged)
    longest = longest_bounced(bouncing.world_size) // 8
    for length, bounces in ((17, True), (longest, True), (longest + 1, False)):
        for repeat in range(3):
            data = arrays(bouncing, repeat, length)
            out = np.empty(length)
            bouncing.all_reduce(data[bouncing.rank], out=out)
            assert_same(out, tree_reduce(data, SUM))
        assert (not exchanged) == bounces
    assert bouncing.scratch_bytes > 2 * BOUNCE_BYTES


def test_ranks_come_in_any_order_and_call_in_any_way(world):
    """Blocking or not, one at a time or several, early or late: nobody reads an older array."""
    draw = np.random.default_rng(world.rank)
    under_way = []
    for number in range(150):
        length = (40, 3000, 20)[number % 3]
        data = arrays(world, number, length)
        wanted = tree_reduce(data, SUM)
        mine = data[world.rank]
        way = draw.integers(5)
        if way == 0:
            time.sleep(2e-4)
        if way == 1:
            under_way.append((world.all_reduce_async(mine, out=np.empty(length)), wanted))
        elif way == 2:
            out = np.empty(length)
            assert world.all_reduce(mine, out=out) is out
            assert_same(out, wanted)
            assert_same(mine, data[world.rank])
        else:
            world.all_reduce(mine)
            assert_same(mine, wanted)
        mine[...] = np.nan if way != 1 else mine
        if len(under_way) > 3:
            for work, expected in under_way:
                assert_same(work.wait(), expected)
            under_way.clear()
    for work, expected in under_way:
        assert_same(work.wait(), expected)


@pytest.mark.parametrize("operation", ReductionOperation)
def test_every_operation_and_type(world, operation):
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.complex64):
        kind = np.dtype(dtype).kind
        ordered = operation in (ReductionOperation.MIN, ReductionOperation.MAX)
        if (kind == "i" and operation is ReductionOperation.AVERAGE) or (kind == "c" and ordered):
            continue
        for number in range(3):
            data = arrays(world, number, 400, np.float64)
            data = [(40 * array).astype(dtype).reshape(20, 20) for array in data]
            mine = data[world.rank].copy()
            wanted = tree_reduce(data, operation)
            world.all_reduce(mine, operation)
            assert_same(mine, wanted)


def test_adversarial_values(world):
    values = np.resize(np.array(ADVERSARIAL_VALUES, np.float64), 500)
    data = [np.roll(values, rank) for rank in range(world.world_size)]
    for _ in range(3):
        mine = data[world.rank].copy()
        assert_same(world.all_reduce(mine), tree_reduce(data, SUM))


@pytest.mark.parametrize(("length", "shift"), [(12, 5), (600, 100)])
def test_results_that_overlap_the_array(world, length, shift):
    for number in range(4):
        data = arrays(world, number, length)
        memory = np.concatenate([data[world.rank], np.zeros(shift)])
        world.all_reduce(memory[:length], out=memory[shift:])
        assert_same(memory[shift:], tree_reduce(data, SUM))


@pytest.mark.parametrize("length", [500, WHOLE_BYTES // 8 + 8, LONG])
def test_a_shared_array_on_one_rank_alone(bouncing, length):
    shared = bouncing.allocate_shared(length, np.float64)
    if shared is None:
        pytest.skip("these ranks share no memory")
    bouncing.all_reduce(np.zeros(length))  # makes the rows
    for number in range(4):
        data = arrays(bouncing, number, length)
        mine = shared if bouncing.rank == number % bouncing.world_size else np.empty(length)
        mine[...] = data[bouncing.rank]
        assert_same(bouncing.all_reduce(mine, out=np.empty(length)), tree_reduce(data, SUM))
        bouncing.barrier()


def test_what_does_not_match_is_told_and_the_next_is_right(world):
    for number in range(3):
        data = arrays(world, number, 800)
        world.all_reduce(data[world.rank].copy())
        odd = np.zeros(800 if world.rank else 801)
        with pytest.raises(CollectiveMismatchError, match="801"):
            world.all_reduce(odd)
        odd = ReductionOperation.MAX if world.rank else SUM
        with pytest.raises(CollectiveMismatchError, match="MAX"):
            world.all_reduce(np.zeros(800), odd)
        out = world.all_reduce(data[world.rank].copy())
        assert_same(out, tree_reduce(data, SUM))


def test_without_checks(world):
    world.check_collectives = False
    for number in range(3):
        data = arrays(world, number, 300)
        assert_same(world.all_reduce(data[world.rank].copy()), tree_reduce(data, SUM))
    has_bounced = world._talk.bounce is not None
    assert has_bounced == (world._talk.mailbox is not None)


@pytest.fixture
def in_parts(world, monkeypatch):
    """A world whose arrays of `LONG` elements and more go as messages of at most `LONG // 4`."""
    monkeypatch.setattr("mpishard.communication.mpi.bounce.PAIR_BYTES", BOUNCE_BYTES)
    monkeypatch.setattr(world, "_message_length", lambda *_, **__: LONG // 4)
    return world


@pytest.mark.parametrize("more", [0, 1, 2, LONG // 2, LONG // 2 + 1])
def test_two_ranks_swap_part_after_part(in_parts, monkeypatch, more):
    swapped = []
    for method in BY_MESSAGES:
        note_calls(monkeypatch, in_parts, method, swapped)
    length = LONG + more
    for number, operation in enumerate((SUM, ReductionOperation.MAX)):
        data = arrays(in_parts, number, length)
        wanted = tree_reduce(data, operation)
        out = np.empty(length)
        before = in_parts.traffic.bytes_sent.total()
        assert_same(in_parts.all_reduce(data[in_parts.rank], operation, out=out), wanted)
        sent = in_parts.traffic.bytes_sent.total() - before
        assert_same(in_parts.all_reduce(data[in_parts.rank].copy(), operation), wanted)
        if in_parts.world_size == 2:
            assert len(swapped) == 2 * number + 2
            assert sent == data[0].nbytes


@pytest.fixture
def swapping(backend, monkeypatch):
    """A world of two ranks that talk by messages alone, and how many elements it combines."""
    if backend.world_size != 2:
        pytest.skip("needs two ranks")
    monkeypatch.setenv("MPISHARD_ARENA", "off")
    with MPICommunicationBackend(backend._comm) as own:
        lengths = []
        combine, reduce = MessagePlan.combine, own._reducer.reduce

        def noting_combine(plan, mine, received, out):
            lengths.append(out.size)
            combine(plan, mine, received, out)

        def noting_reduce(contributions, operation, out):
            lengths.append(out.size)
            reduce(contributions, operation, out)

        monkeypatch.setattr(MessagePlan, "combine", noting_combine)
        monkeypatch.setattr(own._reducer, "reduce", noting_reduce)
        yield own, lengths


@pytest.mark.parametrize("operation", ReductionOperation)
@pytest.mark.parametrize("dtype", [np.float64, np.complex64, ml_dtypes.bfloat16])
def test_results_that_lie_apart_take_the_other_array(swapping, operation, dtype):
    world, lengths = swapping
    ordered = operation in (ReductionOperation.MIN, ReductionOperation.MAX)
    if np.dtype(dtype).kind == "c" and ordered:
        pytest.skip("complex numbers have no order")
    for length in (400, 9001, SWAP_BYTES // np.dtype(dtype).itemsize):
        values = np.resize(np.array(ADVERSARIAL_VALUES, np.float64), length)
        with np.errstate(all="ignore"):
            data = [np.roll(values, rank).astype(dtype) for rank in range(2)]
        wanted = tree_reduce(data, operation)
        mine = data[world.rank].copy()
        before = world.traffic.bytes_sent.total()
        lengths.clear()
        assert_same(world.all_reduce(mine, operation, out=np.empty_like(mine)), wanted)
        assert world.traffic.bytes_sent.total() - before == mine.nbytes
        work = world.all_reduce_async(mine, operation, out=np.empty_like(mine))
        assert_same(work.wait(), wanted)
        assert_same(mine, data[world.rank])
        narrow = dtype is ml_dtypes.bfloat16
        is_whole = operation is not ReductionOperation.AVERAGE and not narrow
        assert (lengths == [length, length]) == is_whole


def test_what_is_not_swapped_whole(swapping):
    """Where one result lies in its array or overlaps it, without headers, and what is long."""
    world, lengths = swapping
    for number in range(4):
        data = arrays(world, number, 5000)
        mine = data[world.rank].copy()
        out = mine if world.rank == number % 2 else np.empty_like(mine)
        assert_same(world.all_reduce(mine, out=out), tree_reduce(data, SUM))
        memory = np.concatenate([data[world.rank], np.zeros(8)])
        into = memory[8:] if world.rank == number % 2 else np.empty_like(mine)
        assert_same(world.all_reduce(memory[:5000], out=into), tree_reduce(data, SUM))
    world.check_collectives = False
    data = arrays(world, 4, 5000)
    mine = data[world.rank].copy()
    out = mine if world.rank == 0 else np.empty_like(mine)
    assert_same(world.all_reduce(mine, out=out), tree_reduce(data, SUM))
    world.check_collectives = True
    assert max(lengths) == 2500


def test_what_is_long_goes_in_short_messages_where_results_lie_apart(swapping):
    world, lengths = swapping
    array = np.full(SWAP_BYTES // 8 + 1, 1.0 + world.rank)
    half = array.size // 2 + (world.rank == 0)
    for is_blocking in (True, False):
        out = np.empty_like(array)
        lengths.clear()
        if is_blocking:
            world.all_reduce(array, out=out)
        else:
            world.all_reduce_async(array, out=out).wait()
        assert (out == 3).all()
        combined = [length for length in lengths if length]
        assert combined == [CHUNK_BYTES // 8] * 2 + [1] * (world.rank == 0)
    lengths.clear()
    world.all_reduce(array)
    assert lengths == [half]


@pytest.mark.parametrize("is_view", [False, True])
def test_results_in_memory_that_both_ranks_have(swapping, tmp_path, is_view):
    """None may see there what is no result: of a file that they map, nobody knows but they."""
    world, lengths = swapping
    path = world._comm.bcast(str(tmp_path / "result") if world.rank == 0 else None)
    if world.rank == 0:
        np.zeros(40000).tofile(path)
    world.barrier()
    out = np.memmap(path, np.float64, "r+")
    out = out.view(np.ndarray)[:20000] if is_view else out
    for number in range(20):
        mine = np.full(out.size, 1.0 + world.rank + number)
        if number % 2:
            world.all_reduce(mine, out=out)
        else:
            world.all_reduce_async(mine, out=out).wait()
        assert (out == 3.0 + 2 * number).all()
        world.barrier()
    assert out.size not in lengths


def test_whole_arrays_in_any_order_and_any_way(swapping, monkeypatch):
    """Blocking or not, early or late, with polls or without, apart on one rank or on both."""
    world, lengths = swapping
    monkeypatch.setattr("mpishard.communication.mpi.message_collectives._MESSAGE_POLLS", 3)
    monkeypatch.setattr("mpishard.communication.mpi.message_collectives._CROWDED_MESSAGE_POLLS", 3)
    draw = np.random.default_rng(world.rank)
    under_way = []
    for number in range(60):
        data = arrays(world, number, (400, 20000, 5000)[number % 3])
        wanted, mine = tree_reduce(data, SUM), data[world.rank]
        out = np.empty_like(mine) if draw.integers(4) else mine
        way = draw.integers(4)
        if way == 0:
            time.sleep(1e-3)
        if way == 1:
            under_way.append((world.all_reduce_async(mine, out=out), wanted))
        else:
            assert_same(world.all_reduce(mine, out=out), wanted)
        while len(under_way) > 2:
            work, expected = under_way.pop(0)
            assert_same(work.wait(), expected)
    for work, expected in under_way:
        assert_same(work.wait(), expected)
    assert len([length for length in lengths if length in (400, 20000, 5000)]) > 15


def test_long_arrays_in_any_order_and_any_way(in_parts):
    """Blocking or not, early or late, one rank in one way and one in another."""
    draw = np.random.default_rng(in_parts.rank)
    under_way = []
    for number in range(30):
        length = (LONG + 7, 20, 3000)[number % 3]
        data = arrays(in_parts, number, length)
        wanted, mine = tree_reduce(data, SUM), data[in_parts.rank]
        way = draw.integers(4)
        if way == 0:
            time.sleep(2e-3)
        if way == 1:
            under_way.append((in_parts.all_reduce_async(mine), wanted))
        else:
            assert_same(in_parts.all_reduce(mine), wanted)
        if len(under_way) > 2:
            for work, expected in under_way:
                assert_same(work.wait(), expected)
            under_way.clear()
    for work, expected in under_way:
        assert_same(work.wait(), expected)
    buffers = in_parts._pool._free
    assert len({id(buffer) for buffer in buffers}) == len(buffers), "two would write one"


@pytest.mark.parametrize("nbytes", [WHOLE_BYTES, WHOLE_BYTES + 8, 2 * PAIR_BYTES])
def test_rows_and_halves_when_a_rank_is_late(bouncing, nbytes):
    """Whoever is late for the quick way takes the other, and copies nothing a second time."""
    draw = np.random.default_rng(bouncing.rank)
    length = nbytes // 8
    for number in range(25):
        data = [np.full(length, float(rank + number)) for rank in range(bouncing.world_size)]
        out = np.empty(length)
        if draw.integers(2):
            time.sleep(1e-2 * draw.random())
        if draw.integers(4) == 0:
            bouncing.all_reduce_async(data[bouncing.rank], out=out).wait()
        else:
            bouncing.all_reduce(data[bouncing.rank], out=out)
        assert (out == sum(array[0] for array in data)).all()


@pytest.mark.parametrize("operation", ReductionOperation)
@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16])
def test_halves_of_every_operation(bouncing, monkeypatch, operation, dtype):
    monkeypatch.setattr("mpishard.communication.mpi.bounce_collectives.WHOLE_BYTES", 300)
    for length in (400, 401, 402):
        data = [(40 * a).astype(dtype) for a in arrays(bouncing, length, length)]
        wanted = tree_reduce(data, operation)
        for _ in range(3):
            mine = data[bouncing.rank].copy()
            assert_same(bouncing.all_reduce(mine, operation, out=np.empty_like(mine)), wanted)
            assert_same(bouncing.all_reduce(mine, operation), wanted)
        if bouncing.world_size == 2 and dtype is np.float64:
            is_quick = operation is not ReductionOperation.AVERAGE
            plans = [plan for plan in bouncing._plans.values() if isinstance(plan, HalvesPlan)]
            assert len(plans) == is_quick * (length - 399)


def test_halves_that_wait_for_the_other_to_combine(bouncing, monkeypatch):
    monkeypatch.setattr("mpishard.communication.mpi.quick_collectives._FENCE_POLLS", 0)
    for number in range(10):
        data = arrays(bouncing, number, 5000)
        mine = data[bouncing.rank].copy()
        if number % 3 == 2 and bouncing.rank == 1:
            time.sleep(2e-3)
        bouncing.all_reduce(mine)
        assert_same(mine, tree_reduce(data, SUM))
        assert not bouncing._pending


@pytest.mark.parametrize("length", [1000, 5000])
def test_one_that_is_interrupted_halfway_is_the_last(bouncing, monkeypatch, length):
    """The other rank has used the rows that this one has not: no later result would be right."""
    if bouncing.world_size != 2 or bouncing._talk.mailbox is None:
        pytest.skip("needs two ranks, and memory that they share")
    # However late the other is, this is done on the spot.
    monkeypatch.setattr("mpishard.communication.mpi.message_collectives._CROWDED_POLLS", 1 << 40)
    monkeypatch.setattr("mpishard.communication.mpi.quick_collectives.COPY_POLLS", 1 << 40)
    for _ in range(3):
        bouncing.all_reduce(np.ones(length))

    def interrupted(*_):
        raise KeyboardInterrupt

    if bouncing.rank == 0:
        where = "mpishard.communication.mpi.plans.BouncePlan.combine"
        if length == 5000:
            where = "mpishard.communication.mpi.lanes.Condition.test"
        with monkeypatch.context() as patch:
            patch.setattr(where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                bouncing.all_reduce(np.ones(length))
        with pytest.raises(CommunicationError, match="rank 0 was interrupted in collective 4, all"):
            bouncing.all_reduce(np.ones(length))
    else:
        bouncing.all_reduce(np.ones(length))


def test_halves_that_overlap(bouncing, monkeypatch):
    monkeypatch.setattr("mpishard.communication.mpi.bounce_collectives.WHOLE_BYTES", 300)
    for shift in (1, 100, 300):
        for number in range(3):
            data = arrays(bouncing, number, 601)
            memory = np.concatenate([data[bouncing.rank], np.zeros(shift)])
            bouncing.all_reduce(memory[:601], out=memory[shift:])
            assert_same(memory[shift:], tree_reduce(data, SUM))


def test_long_results_that_overlap_the_array(in_parts):
    for shift in (8, LONG // 8):
        data = arrays(in_parts, shift, LONG)
        memory = np.concatenate([data[in_parts.rank], np.zeros(shift)])
        in_parts.all_reduce(memory[:LONG], out=memory[shift:])
        assert_same(memory[shift:], tree_reduce(data, SUM))


@pytest.fixture
def rank_1_is_late(in_parts, monkeypatch):
    """`in_parts`, where rank 1 takes long before it waits for any of its messages."""
    if in_parts.world_size != 2:
        pytest.skip("needs two ranks")
    wait = in_parts._await

    def late_wait(requests, *keep):
        time.sleep(0.02)
        return wait(requests, *keep)

    if in_parts.rank == 1:
        monkeypatch.setattr(in_parts, "_await", late_wait)
    return in_parts


@pytest.mark.parametrize(("length", "is_apart"), [(LONG, False), (LONG, True), (5000, True)])
def test_a_rank_is_done_when_the_other_has_what_it_sent(rank_1_is_late, length, is_apart):
    for number in range(3):
        data = arrays(rank_1_is_late, number, length)
        mine = data[rank_1_is_late.rank].copy()
        result = rank_1_is_late.all_reduce(mine, out=np.empty(length) if is_apart else mine).copy()
        mine[...] = np.nan
        assert_same(result, tree_reduce(data, SUM))


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(("length", "is_apart"), [(LONG, False), (5000, True)])
def test_one_that_is_interrupted_goes_on_and_comes_before_the_next(
    rank_1_is_late, monkeypatch, checked, length, is_apart
):
    world = rank_1_is_late
    world.check_collectives = checked
    data = arrays(world, 0, length), arrays(world, 1, length)
    wanted = [tree_reduce(each, SUM) for each in data]
    mine = [each[world.rank] for each in data]
    results = [np.empty(length) if is_apart else array for array in mine]
    world.barrier()
    drive = world._drive

    def interrupted_drive(work):
        monkeypatch.setattr(world, "_drive", drive)
        raise KeyboardInterrupt

    if world.rank == 1:
        world.all_reduce(mine[0], out=results[0])
    else:
        monkeypatch.setattr(world, "_drive", interrupted_drive)
        with pytest.raises(KeyboardInterrupt):
            world.all_reduce(mine[0], out=results[0])
    world.all_reduce(mine[1], out=results[1])
    for result, expected in zip(results, wanted, strict=True):
        assert_same(result, expected)


def test_long_arrays_whose_result_lies_apart_on_one_rank(world, monkeypatch):
    """Messages are as long as both ranks can know."""
    monkeypatch.setattr("mpishard.communication.mpi.bounce.PAIR_BYTES", BOUNCE_BYTES)
    for number in range(6):
        data = arrays(world, number, LONG)
        mine = data[world.rank].copy()
        out = np.empty_like(mine) if (world.rank + number) % 3 else mine
        assert_same(world.all_reduce(mine, out=out), tree_reduce(data, SUM))


def test_long_arrays_that_all_share_are_not_sent(in_parts, monkeypatch):
    shared = in_parts.allocate_shared(in_parts.world_size * LONG, np.float64)
    if shared is None:
        pytest.skip("these ranks share no memory")
    sent = []
    for method in BY_MESSAGES:
        note_calls(monkeypatch, in_parts, method, sent)
    data = arrays(in_parts, 0, LONG)
    mine = shared[in_parts.rank * LONG :][:LONG]
    mine[...] = data[in_parts.rank]
    assert_same(in_parts.all_reduce(mine, out=np.empty(LONG)), tree_reduce(data, SUM))
    assert not sent
    in_parts.barrier()


def test_long_arrays_that_do_not_match(in_parts):
    def reduce_zeros():
        in_parts.all_reduce(np.zeros(LONG))

    for number in range(3):
        data = arrays(in_parts, number, LONG)
        in_parts.all_reduce(data[in_parts.rank].copy())
        with pytest.raises(CollectiveMismatchError, match=str(LONG + 1)):
            in_parts.all_reduce(np.zeros(LONG if in_parts.rank else LONG + 1))
        with pytest.raises(CollectiveMismatchError, match="barrier"):
            (in_parts.barrier if in_parts.rank else reduce_zeros)()
        out = in_parts.all_reduce(data[in_parts.rank].copy())
        assert_same(out, tree_reduce(data, SUM))


def test_groups_have_their_own(world):
    group = world.split(world.rank % 2, world.rank)
    with group:
        for number in range(6):
            data = arrays(world, number, 300)
            whole = world.all_reduce_async(data[world.rank].copy())
            members = [data[rank] for rank in group.world_ranks]
            part = group.all_reduce(data[world.rank].copy())
            assert_same(part, tree_reduce(members, SUM))
            assert_same(whole.wait(), tree_reduce(data, SUM))


def test_no_memory_for_it(bouncing, monkeypatch):
    """Messages are sent instead."""

    def no_memory(call, turn, nbytes):
        return None
        yield

    shared = bouncing.allocate_shared(30000, np.float64)
    monkeypatch.setattr(bouncing, "_steps_share", no_memory)
    for number in range(6):
        data = arrays(bouncing, number, 30000)
        wanted = tree_reduce(data, SUM)
        assert_same(bouncing.all_reduce(data[bouncing.rank], out=np.empty(30000)), wanted)
        if shared is not None:
            assert_same(bouncing.all_reduce(data[bouncing.rank], out=shared), wanted)
            bouncing.barrier()
        assert_same(bouncing.all_reduce(data[bouncing.rank]), wanted)
    assert bouncing._talk.bounce is None
