"""Ranks in a grid: the documented arithmetic, and collectives in its groups."""

from itertools import permutations, product

import numpy as np
import pytest

from mpishard.communication import ProcessMesh, run_in_threads
from mpishard.communication.mesh import AXES, mesh_order, mesh_sizes
from mpishard.testing.worlds import in_worlds

ALL = ("replica", *AXES)


class Grid(ProcessMesh):
    """The arithmetic alone, of a world that is not there."""

    def __init__(self, sizes, order=AXES, replica=1):
        self.pipeline_size, self.tensor_size, self.data_size = sizes
        self.replica_count, self.order = replica, mesh_order(order)


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


def test_coordinates_invert_rank_of_in_any_order():
    for order in (*permutations(AXES), *permutations(ALL)):
        replicas = 2 if "replica" in order else 1
        grid = Grid((2, 3, 4), order, replicas)
        ranks = range(24 * replicas)
        places = [(grid.replica_of(rank), *grid.coordinates_of(rank)) for rank in ranks]
        assert sorted(places) == list(product(range(replicas), range(2), range(3), range(4)))
        assert dict(zip(ALL, places[1], strict=True))[order[-1]] == 1
        for rank, (replica, *place) in enumerate(places):
            assert grid.rank_of(*place, replica) == rank, order
            for axis in ALL[replicas == 1 :]:
                assert rank in grid.group_of(axis, rank), order


@pytest.mark.parametrize("order", [AXES, ("pipeline", "data", "tensor"), ALL[::-1]])
@pytest.mark.parametrize("replicas", [1, 2])
@in_worlds(1, 2, 3, 4, 6, 8, 12)
def test_groups_have_the_ranks_of_the_arithmetic(backend, order, replicas):
    world_size = backend.world_size // replicas
    sizes = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2), 6: (3, 2), 8: (2, 2), 12: (2, 3)}
    if world_size * replicas != backend.world_size:
        return
    mesh = ProcessMesh(backend, *sizes[world_size], replica=replicas, order=order)
    me = np.array([backend.rank])
    for axis in ALL:
        group = getattr(mesh, axis)
        assert tuple(group.all_gather(me).tolist()) == mesh.group_of(axis)
        assert group.rank == getattr(mesh, f"{axis}_rank")
        assert group.world_size == mesh._size[axis]
        if group.world_size not in (1, world_size * replicas):
            assert group.axis == axis
    place = mesh.coordinates_of(backend.rank)
    batch = mesh.model_ranks(mesh.data_rank, mesh.replica_rank)
    assert mesh.model.all_gather(me).tolist() == batch
    assert mesh.model_size == len(batch) == len(set(batch))
    one = [rank for rank in range(backend.world_size) if mesh.replica_of(rank) == mesh.replica_rank]
    assert mesh.group.all_gather(me).tolist() == one
    assert mesh.replica_size == len(one) == world_size
    dealt = [
        mesh.rank_of(*place[:2], data, replica)
        for replica in range(replicas)
        for data in range(mesh.data_size)
    ]
    assert mesh.samples.all_gather(me).tolist() == dealt
    if "replica" not in order:  # it is the slowest then
        assert [mesh.replica_of(rank) for rank in range(backend.world_size)] == [
            n for n in range(replicas) for _ in range(world_size)
        ]


def test_groups_of_the_same_ranks_are_shared():
    def body(backend):
        plain = ProcessMesh(backend, replica=2)
        assert plain.group is plain.data
        assert plain.samples is backend
        rows = ProcessMesh(backend, tensor=2, replica=2)
        assert rows.model is rows.group
        assert rows.samples is rows.replica
        one = ProcessMesh(backend, tensor=2)
        assert one.group is backend
        assert one.samples is one.data
        assert one.replica is one.pipeline
        return rows.describe(), rows.replica.label

    words, label = run_in_threads(4, body)[3]
    assert words == "2 replica x 1 pipeline x 2 tensor x 1 data"
    assert (label.split()[0], label.split("(")[1]) == ("replica", "ranks 1, 3)")


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
        ((1, 1, -1, 3), ValueError, "replica 3 does not divide the world of 4 ranks"),
        ((1, 1, -1, 8), ValueError, "replica 8 does not divide the world of 4 ranks"),
        ((1, 1, -1, 0), ValueError, "replica must be 1 or more, got 0"),
        ((1, 1, -1, "2"), TypeError, "replica"),
        ((1, 3, -1, 2), ValueError, "= 3 does not divide each of the 2 replicas of 2 ranks"),
        ((1, 2, 2, 2), ValueError, "x data 2 = 4, and each of the 2 replicas has 2 ranks"),
    ],
)
def test_sizes_that_do_not_make_up_the_world_are_refused(sizes, error, words):
    with pytest.raises(error, match=words):
        mesh_sizes(4, *sizes)


def test_other_wrong_arguments_of_a_mesh_are_refused():
    with pytest.raises(TypeError, match="CommunicationBackend, got int"):
        ProcessMesh(3)

    def body(backend):
        with pytest.raises(ValueError, match="order must name"):
            ProcessMesh(backend, order=("data", "tensor", "tensor"))
        with pytest.raises(TypeError, match=r"order must name .*may name replica, got 'replica'"):
            ProcessMesh(backend, order="replica")
        mesh = ProcessMesh(backend)
        with pytest.raises(ValueError, match="unknown axis 'time'"):
            mesh.group_of("time")
        with pytest.raises(ValueError, match="rank 2 is outside"):
            mesh.coordinates_of(2)
        with pytest.raises(ValueError, match="tensor coordinate 1 is outside"):
            mesh.rank_of(0, 1, 0)
        with pytest.raises(ValueError, match="replica coordinate 1 is outside"):
            mesh.rank_of(0, 0, 0, 1)
        return mesh.describe()

    assert run_in_threads(2, body) == ["1 pipeline x 1 tensor x 2 data"] * 2


@pytest.mark.parametrize(
    ("first", "others", "words"),
    [
        ({"pipeline": 2}, {"tensor": 2}, r"2 pipeline x 1 tensor.*rank 1 for 1 replica x 1 pipel"),
        ({}, {"replica": 2}, "rank 0 for 1 replica.*rank 1 for 2 replica x 1 pipeline"),
        (
            {},
            {"order": ("data", "tensor", "pipeline")},
            "pipeline, tensor, data, rank 1 .* in the order replica, data, tensor, pipeline;",
        ),
    ],
)
@in_worlds(2, 4)
def test_meshes_that_differ_are_refused_on_all_ranks(backend, first, others, words):
    with pytest.raises(ValueError, match=words):
        ProcessMesh(backend, **(others if backend.rank else first))
    assert ProcessMesh(backend).data_size == backend.world_size
