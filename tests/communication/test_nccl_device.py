"""NCCL on the GPUs of this machine, or on the stand-in: each collective once, in any world.

A world of one runs on a machine with a single GPU: ``mpiexec -n 1 python -m pytest --gpu --with-mpi
-m "gpu and mpi" tests/communication/test_nccl_device.py``.
"""

import numpy as np
import pytest
from cupy_stand_in import installed

import mpishard as ms
from mpishard.base.devices import Device, load_cupy, load_nccl
from mpishard.communication import NCCLCommunicationBackend, ReductionOperation
from mpishard.errors import DeviceUnavailableError
from mpishard.testing.reductions import tree_reduce

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]

DTYPES = ["float32", "float64", "int32", "complex64", "float16"]


@pytest.fixture
def gpus(request, backend):
    """CuPy, with a GPU for each rank."""
    if not request.config.getoption("gpu"):
        with installed(device_count=backend.world_size) as cupy:
            yield cupy
        return
    try:
        Device.parse("cuda")
        load_nccl()
    except DeviceUnavailableError as error:
        pytest.skip(str(error))
    cupy = load_cupy()
    if cupy.cuda.runtime.getDeviceCount() < backend.world_size:
        pytest.skip("NCCL needs a GPU for each rank")
    yield cupy


@pytest.fixture
def length(request):
    """No multiple of the world; on a GPU more than 8 MiB, which even one rank sums by NCCL."""
    return 2_200_001 if request.config.getoption("gpu") else 40_003


@pytest.fixture(params=["exact", "fast"])
def world(request, backend, gpus):
    with NCCLCommunicationBackend(backend._comm, reductions=request.param) as made:
        yield made


def contribution(rank, dtype, length):
    drawn = np.random.default_rng([rank, 5]).standard_normal(length)
    return (1000 * drawn if dtype.startswith("int") else drawn).astype(dtype)


def check(got, expected, world):
    if world.reductions == "exact" or expected.dtype.kind in "iu" or expected.itemsize == 2:
        assert got.get().tobytes() == expected.tobytes()
    else:
        np.testing.assert_allclose(got.get(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(world, gpus, length, dtype):
    inputs = [contribution(rank, dtype, length) for rank in range(world.world_size)]
    operations = [ReductionOperation.SUM]
    if dtype.startswith("float"):
        operations += [ReductionOperation.AVERAGE, ReductionOperation.MAX]
    for operation in operations:
        expected = tree_reduce(inputs, operation)
        array = gpus.asarray(inputs[world.rank])
        out = gpus.empty(length, dtype)
        assert world.all_reduce(array, operation, out=out) is out
        check(out, expected, world)
        assert array.get().tobytes() == inputs[world.rank].tobytes()
        piece = world.reduce_scatter(array, operation)
        low = sum(
            length // world.world_size + (r < length % world.world_size) for r in range(world.rank)
        )
        check(piece, expected[low : low + piece.size], world)
        even = array[: length // world.world_size * world.world_size]
        check(
            world.reduce_scatter(even, operation)[:3],
            expected[even.size // world.world_size * world.rank :][:3],
            world,
        )
        assert world.all_reduce(array, operation) is array
        check(array, expected, world)


def test_movement(world, gpus, length):
    rank, ranks = world.rank, world.world_size
    for rows in ([100_000] * ranks, [100_000 + r for r in range(ranks)]):
        whole = world.all_gather(gpus.asarray(contribution(rank, "float32", rows[rank])))
        expected = [contribution(r, "float32", rows[r]) for r in range(ranks)]
        assert whole.get().tobytes() == np.concatenate(expected).tobytes()
    root = ranks - 1
    sent = contribution(root, "float64", length)
    array = gpus.asarray(sent) if rank == root else gpus.zeros(length)
    assert world.broadcast(array, root) is array
    assert array.get().tobytes() == sent.tobytes()
    scattered = world.scatter(array if rank == root else None, root)
    gathered = world.gather(gpus.asarray(contribution(rank, "int32", length)), root)
    assert scattered.size in (length // ranks, length // ranks + 1)
    assert (gathered is None) == (rank != root)
    received = world.all_to_all([gpus.full(70_000, 10.0 * rank + r) for r in range(ranks)])
    assert [float(part[0]) for part in received] == [10.0 * r + rank for r in range(ranks)]


def test_a_rank_can_send_to_itself_in_a_group_of_calls(world, gpus, length):
    """Messages to itself stand in for those of "exact", of which a world of one has none."""
    sent, received = (
        gpus.asarray(contribution(0, "float32", length)),
        gpus.zeros(length, np.float32),
    )
    channel = world._collectives._channel
    for waitable in channel.exchange([(world.rank, sent)], [(world.rank, received)]):
        while not waitable.test():
            pass
    assert received.get().tobytes() == sent.get().tobytes()


def test_calls_overlap_with_computation_and_with_calls_of_a_group(world, gpus, length):
    world.all_reduce(gpus.ones(length))
    group = world.split(world.rank % 2, key=-world.rank)
    works = [
        (made.all_reduce_async(gpus.ones(length)), made.world_size)
        for made in (world, group, group, world)
    ]
    product = gpus.ones((300, 300)).dot(gpus.ones((300, 300)))
    for work, expected in reversed(works):
        assert float(work.wait().max()) == expected
    assert float(product[0, 0]) == 300
    assert group.split(None) is None
    world.barrier()


def test_a_communicator_can_be_aborted(world, gpus, length):
    world.all_reduce(gpus.ones(length))
    world._communicator.end(in_good_order=False)
    world.barrier()


def losses(world):
    x = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    model = ms.nn.MLP([64, 512, 64], seed=0, device="cuda", dtype=np.float32)
    model = ms.as_distributed(model, world, "fsdp")
    optimizer = ms.as_distributed(ms.optimizers.AdamW(1e-3), world, "fsdp")
    return [optimizer.step(model, x, x) for _ in range(3)]


def test_a_model_trains_as_by_mpi(world, gpus):
    with ms.MPICommunicationBackend(world._comm) as by_mpi:
        expected = losses(by_mpi)
    is_exact = world.reductions == "exact"
    assert losses(world) == (expected if is_exact else pytest.approx(expected, rel=1e-4))
