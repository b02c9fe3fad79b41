"""Ranks in a grid: the documented arithmetic, and groups that talk."""

from itertools import permutations, product

import numpy as np
import pytest

from mpishard.communication import ProcessMesh, run_in_threads
from mpishard.communication.mesh import AXES, mesh_sizes
from mpishard.testing.worlds import in_worlds


class Grid(ProcessMesh):
    """The arithmetic alone, of a world that is not there."""

    def __init__(self, sizes, order=AXES):
        self.pipeline_size, self.tensor_size, self.data_size = sizes
        self.order = order


def test_the_documented_example():
    grid = Grid((8, 8, 8))
    assert [grid.coordinates_of(rank)[0] for rank in range(64)] == [0] * 64
    assert grid.group_of("data", 3) == tuple(range(8))
    assert grid.group_of("tensor", 0) == tuple(range(0, 64, 8))
    assert grid.group_of("pipeline", 9) == tuple(range(9, 512, 64))
    for rank in range(512):
        pipeline, tensor, data = grid.coordinates_of(rank)
        assert rank == pipeline * 64 + tensor * 8 + data == grid.rank_of(pipeline, tensor, data)
        assert pipeline == rank // 64
        assert tensor == (rank % 64) // 8
        assert data == rank % 8


@pytest.mark.parametrize("order", list(permutations(AXES)))
def test_any_order_is_undone(order):
    grid = Grid((2, 3, 4), order)
    assert sorted(grid.coordinates_of(rank) for rank in range(24)) == sorted(
        product(range(2), range(3), range(4))
    )
    fastest = dict(zip(AXES, grid.coordinates_of(1), strict=True))
    assert fastest[order[-1]] == 1
    for rank in range(24):
        assert grid.rank_of(*grid.coordinates_of(rank)) == rank
        for axis in AXES:
            assert rank in grid.group_of(axis, rank)


@pytest.mark.parametrize("order", [AXES, ("pipeline", "data", "tensor")])
@in_worlds(1, 2, 3, 4, 6, 8, 12)
def test_groups_hold_whom_the_arithmetic_says(backend, order):
    world_size = backend.world_size
    sizes = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2), 6: (3, 2), 8: (2, 2), 12: (2, 3)}
    mesh = ProcessMesh(backend, *sizes[world_size], order=order)
    me = np.array([backend.rank])
    for axis in AXES:
        group = getattr(mesh, axis)
        assert tuple(group.all_gather(me).tolist()) == mesh.group_of(axis)
        assert group.rank == getattr(mesh, f"{axis}_rank")
        assert group.world_size == getattr(mesh, f"{axis}_size")
    expected = [
        mesh.rank_of(p, t, mesh.data_rank)
        for p in range(mesh.pipeline_size) for t in range(mesh.tensor_size)
    ]  # fmt: skip
    assert mesh.replica.all_gather(me).tolist() == expected
    assert mesh.replica_size == len(expected)


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ((0, 1, -1), ValueError, "pipeline must be 1 or more, got 0"),
        ((1, -1, -1), ValueError, "tensor must be 1 or more, got -1"),
        ((1, 1, 0), ValueError, "data must be 1 or more, or -1"),
        ((1, 1, -2), ValueError, "data must be 1 or more, or -1"),
        ((3, 1, -1), ValueError, "= 3 does not divide the world of 4"),
        ((8, 1, -1), ValueError, "= 8 does not divide the world of 4"),
        ((2, 1, 1), ValueError, "x data 1 = 2, and the world has 4"),
        ((1.5, 1, -1), TypeError, "pipeline"),
    ],
)
def test_refuses_sizes_that_are_not_the_world(sizes, error, words):
    with pytest.raises(error, match=words):
        mesh_sizes(4, *sizes)


def test_refuses_other_things():
    with pytest.raises(TypeError, match="CommunicationBackend, got int"):
        ProcessMesh(3)

    def body(backend):
        with pytest.raises(ValueError, match="order must name"):
            ProcessMesh(backend, order=("data", "tensor", "tensor"))
        mesh = ProcessMesh(backend)
        with pytest.raises(ValueError, match="unknown axis 'time'"):
            mesh.group_of("time")
        with pytest.raises(ValueError, match="rank 2 is outside"):
            mesh.coordinates_of(2)
        with pytest.raises(ValueError, match="tensor coordinate 1 is outside"):
            mesh.rank_of(0, 1, 0)
        return mesh.describe()

    assert run_in_threads(2, body) == ["1 pipeline x 1 tensor x 2 data"] * 2
