"""Arrays too large for a C int: more than 2**31 bytes, and more than 2**31 elements."""

import functools
import os

import numpy as np
import pytest

from mpishard import ShardLayout
from mpishard.communication import InMemoryCommunicationBackend
from mpishard.testing.worlds import in_worlds

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("MPISHARD_TEST_LARGE"),
        reason="needs 12 GiB of memory and minutes: set MPISHARD_TEST_LARGE=1",
    ),
    pytest.mark.timeout(600),
]

NBYTES = 2**31 + 2**20 + 8
STEP = 2**20
FEW = 5

by_path = pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
by_dtype = pytest.mark.parametrize("dtype", ["uint8", "float64"])


@functools.cache
def pattern(salt, dtype):
    """Return the block that the array of ``salt`` repeats; sums of two such are exact."""
    return np.random.default_rng(salt).integers(0, 100, STEP, np.uint8).astype(dtype)


def fill(array, salt, start=0):
    """Write the elements from ``start`` on of the array of ``salt``."""
    repeated = pattern(salt, array.dtype)
    head = min(-start % STEP, array.size)
    array[:head] = repeated[start % STEP :][:head]
    blocks = (array.size - head) // STEP
    array[head : head + blocks * STEP].reshape(blocks, STEP)[...] = repeated
    tail = array[head + blocks * STEP :]
    tail[...] = repeated[: tail.size]
    # Each block has a number of its own, and so differs from its neighbours.
    numbers = array[head::STEP]
    numbers[...] = (-(-start // STEP) + np.arange(numbers.size)) % 251
    return array


def check(array, *salts, start=0):
    """Check that elements from ``start`` on are the sum of the arrays of ``salts``."""
    scratch = np.empty(STEP, array.dtype)
    # Blocks all over the array, and those on both sides of each possible cut.
    lows = {*range(0, array.size, 7 * STEP), max(0, array.size - STEP)}
    lows |= {max(0, at - STEP // 2) for at in range(0, array.size, 2**25)}
    for low in sorted(lows):
        part = array[low : low + STEP]
        expected = np.zeros(part.size, array.dtype)
        for salt in salts:
            expected += fill(scratch[: part.size], salt, start + low)
        assert np.array_equal(part, expected), f"wrong in elements {start + low} .."


def patient(backend):
    """Wait for a rank that fills and looks through gigabytes on a machine that others use."""
    if isinstance(backend, InMemoryCommunicationBackend):
        backend._timeout = 500.0


def own_array(dtype, salt):
    """Return more than 2**31 bytes."""
    return fill(np.empty(NBYTES // np.dtype(dtype).itemsize, dtype), salt)


@by_path
@by_dtype
@in_worlds(2)
def test_all_reduce(backend, path, dtype):
    patient(backend)
    mine = own_array(dtype, backend.rank)
    assert backend.all_reduce(mine) is mine
    check(mine, 0, 1)


@pytest.mark.parametrize("path", ["arena"], indirect=True)
@by_dtype
@in_worlds(2)
def test_an_arena(backend, path, dtype):
    patient(backend)
    arena = backend.allocate_arena(NBYTES // np.dtype(dtype).itemsize, dtype)
    part = ShardLayout(arena.mine.size, 2).slice(backend.rank)
    fill(arena.mine, backend.rank)
    out = np.empty(part.stop - part.start, dtype)
    check(arena.reduce_into(out).wait(), 0, 1, start=part.start)
    arena.reduce_in_place().wait()
    check(arena.mine, 0, 1)
    fill(arena.mine, 3)[part] = 0
    arena.gather_in_place(fill(out, 3, part.start)).wait()
    check(arena.mine, 3)


@by_path
@by_dtype
@in_worlds(2)
def test_reduce_scatter(backend, path, dtype):
    patient(backend)
    mine = own_array(dtype, backend.rank)
    part = ShardLayout(mine.size, 2).slice(backend.rank)
    check(backend.reduce_scatter(mine), 0, 1, start=part.start)
    counts = [FEW, mine.size - FEW]
    piece = backend.reduce_scatter(mine, counts=counts)
    assert piece.size == counts[backend.rank]
    check(piece, 0, 1, start=FEW * backend.rank)
    check(mine, backend.rank)


@by_path
@by_dtype
@pytest.mark.parametrize("large", [0, 1])
@in_worlds(2)
def test_all_gather(backend, path, dtype, large):
    """One rank's array is large, so that the next rank's begins beyond 2**31."""
    patient(backend)
    length = NBYTES // np.dtype(dtype).itemsize
    rows = [length if rank == large else FEW for rank in range(2)]
    start = sum(rows[: backend.rank])
    out = np.empty(sum(rows), dtype)
    mine = fill(out[start : start + rows[backend.rank]], backend.rank)
    assert backend.all_gather(mine, out=out) is out
    check(out[: rows[0]], 0)
    check(out[rows[0] :], 1)


@by_path
@by_dtype
@in_worlds(2)
def test_broadcast(backend, path, dtype):
    patient(backend)
    mine = own_array(dtype, backend.rank)
    assert backend.broadcast(mine, root=1) is mine
    check(mine, 1)


@by_dtype
@pytest.mark.parametrize("large", [0, 1])
@in_worlds(2)
def test_scatter(backend, dtype, large):
    patient(backend)
    length = NBYTES // np.dtype(dtype).itemsize
    counts = [length if rank == large else FEW for rank in range(2)]
    sent = fill(np.empty(sum(counts), dtype), 3) if backend.rank == 0 else None
    piece = backend.scatter(sent, counts=counts if backend.rank == 0 else None)
    assert piece.size == counts[backend.rank]
    check(piece, 3, start=sum(counts[: backend.rank]))


@by_dtype
@pytest.mark.parametrize("large", [0, 1])
@in_worlds(2)
def test_gather(backend, dtype, large):
    patient(backend)
    length = NBYTES // np.dtype(dtype).itemsize
    rows = [length if rank == large else FEW for rank in range(2)]
    result = backend.gather(fill(np.empty(rows[backend.rank], dtype), backend.rank))
    if backend.rank == 0:
        check(result[: rows[0]], 0)
        check(result[rows[0] :], 1)


@by_dtype
@pytest.mark.parametrize("large", [0, 1])
@in_worlds(2)
def test_all_to_all(backend, dtype, large):
    """Rank 0 keeps or sends a large part, so that the next part begins beyond 2**31."""
    patient(backend)
    length = NBYTES // np.dtype(dtype).itemsize
    sizes = [[length if target == large else FEW for target in range(2)], [FEW, FEW]]
    parts = [
        fill(np.empty(size, dtype), 2 * backend.rank + target)
        for target, size in enumerate(sizes[backend.rank])
    ]
    for source, part in enumerate(backend.all_to_all(parts)):
        assert part.size == sizes[source][backend.rank]
        check(part, 2 * source + backend.rank)


@by_dtype
@pytest.mark.parametrize("twins", [False, True])
@in_worlds(2)
def test_send(backend, dtype, twins):
    patient(backend)
    length = NBYTES // np.dtype(dtype).itemsize
    if backend.rank == 0:
        mine = fill(np.empty(length, dtype), 0)
        if twins:
            backend.send_async(mine, 1).wait()
        else:
            backend.send(mine, 1)
        backend.barrier()
        return
    if twins:
        check(backend.receive_async(0, length, dtype=dtype).wait(), 0)
    else:
        check(backend.receive(0, length), 0)
    backend.barrier()
