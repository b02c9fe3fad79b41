"""Reductions and gathering by messages: on one node from rank to rank, between nodes the library's.

Pieces are cut into short chunks and rounds here, so that an element that lands in another's place,
or is sent before it is combined, shows in the result.
"""

import os

import ml_dtypes
import numpy as np
import pytest

from mpishard import MPICommunicationBackend, ReductionOperation, ShardLayout
from mpishard.communication.contract.call import DTYPES
from mpishard.communication.mpi import pairwise_collectives
from mpishard.communication.mpi import reductions as mpi_reductions
from mpishard.testing.communication import CommunicationConformance
from mpishard.testing.reference import tree_reduce

pytestmark = pytest.mark.mpi

FULL = bool(os.environ.get("MPISHARD_TEST_FULL"))
SAMPLE = tuple(d for d in DTYPES if d.name in ("bool", "bfloat16", "float64", "complex64"))
CHUNK = 64
PIECES = (3, 4, 5, 15, 16, 17, 31, 32, 33, 34, 65)
"""Elements of a rank: around one, two and four chunks, of 4 or 16 elements, of bfloat16 32."""


@pytest.fixture(params=[1, 2], ids=["one node", "two nodes"])
def world(request, backend, monkeypatch):
    """A world of which each array is sent, in rounds of two chunks."""
    monkeypatch.setenv("MPISHARD_ARENA", "off")
    monkeypatch.setenv("MPISHARD_VIRTUAL_NODES", str(request.param))
    monkeypatch.setattr(pairwise_collectives, "CHUNK_BYTES", CHUNK)
    for module in (pairwise_collectives, mpi_reductions):
        monkeypatch.setattr(module, "SCRATCH_BYTES", 2 * CHUNK * backend.world_size)
    with MPICommunicationBackend(backend._comm) as own:
        assert own.node_count == request.param
        assert own._sends_pairwise == (request.param == 1)
        yield own


def contributions(world, length, dtype):
    """Each rank's array: no two elements alike on it."""
    numbers = [np.random.default_rng([length, rank]) for rank in range(world.world_size)]
    return [generator.permutation(length).astype(dtype) / 7 for generator in numbers]


@pytest.mark.dealt
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.complex128])
def test_chunks_stay_apart(world, dtype):
    lengths = {world.world_size * n + more for n in PIECES for more in (0, 1, world.world_size - 1)}
    for length in sorted(lengths):
        data = contributions(world, length, dtype)
        part = ShardLayout(length, world.world_size).slice(world.rank)
        for operation in (ReductionOperation.SUM, ReductionOperation.AVERAGE):
            wanted = tree_reduce(data, operation)
            mine = data[world.rank].copy()
            out = np.empty_like(mine)
            assert world.all_reduce(mine, operation, out=out).tobytes() == wanted.tobytes()
            assert world.reduce_scatter(mine, operation).tobytes() == wanted[part].tobytes()
            assert mine.tobytes() == data[world.rank].tobytes()
            assert world.all_reduce(mine, operation).tobytes() == wanted.tobytes()
        assert world.all_gather(mine[part].copy()).tobytes() == mine.tobytes()


def test_pieces_of_any_lengths(world):
    rank, ranks = world.rank, world.world_size
    for counts in (
        [0] * (ranks - 1) + [70],
        [70] + [0] * (ranks - 1),
        [33 * r for r in range(ranks)],
    ):
        data = contributions(world, sum(counts), np.float32)
        part = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        wanted = tree_reduce(data, ReductionOperation.SUM)
        piece = world.reduce_scatter(data[rank], counts=counts)
        assert piece.tobytes() == wanted[part].tobytes()
        assert world.all_gather(piece).tobytes() == wanted.tobytes()


def test_many_at_once(world):
    """Each posts chunk by chunk; what was issued later does not come in between."""
    lengths = [world.world_size * n + 1 for n in (65, 33, 17, 65)]
    data = [contributions(world, length, np.float32) for length in lengths]
    sums = [tree_reduce(each, ReductionOperation.SUM) for each in data]
    works = []
    for each, wanted in zip(data, sums, strict=True):
        part = ShardLayout(len(wanted), world.world_size).slice(world.rank)
        works.append((world.all_reduce_async(each[world.rank].copy()), wanted))
        works.append((world.reduce_scatter_async(each[world.rank]), wanted[part]))
        works.append((world.all_gather_async(wanted[part].copy()), wanted))
    for work, wanted in reversed(works):
        assert work.wait().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("world", [2], ids=["two nodes"], indirect=True)
def test_between_nodes_as_on_one(world):
    checks = CommunicationConformance(DTYPES if FULL else SAMPLE)
    for name in ("check_all_reduce", "check_reduce_scatter", "check_all_gather",
                 "check_async_orders"):  # fmt: skip
        getattr(checks, name)(world)


def test_without_headers_rounds_stay_in_order(world):
    """One rank issues both at once, the other ranks one after the other."""
    world.check_collectives = False
    length = 65 * world.world_size
    first = contributions(world, length, np.float32)
    second = [array + 1 for array in first]
    mine = [first[world.rank].copy(), second[world.rank].copy()]
    if world.rank == 0:
        for work in [world.all_reduce_async(array) for array in mine]:
            work.wait()
    else:
        for array in mine:
            world.all_reduce(array)
    for array, data in zip(mine, (first, second), strict=True):
        assert array.tobytes() == tree_reduce(data, ReductionOperation.SUM).tobytes()
