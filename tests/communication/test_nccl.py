"""`NCCLCommunicationBackend` on the stand-in for CuPy, whose NCCL is late and refuses mistakes."""

import logging
import re
import sys
import time

import numpy as np
import pytest
from cupy_stand_in import installed

import mpishard as ms
from mpishard.communication import (
    NCCLCommunicationBackend,
    ReductionOperation,
)
from mpishard.communication.mpi.node_memory import at_once
from mpishard.communication.nccl import channel, collectives
from mpishard.errors import (
    CollectiveMismatchError,
    CommunicationError,
    DeviceUnavailableError,
)
from mpishard.testing.reductions import ADVERSARIAL_VALUES, values

pytestmark = pytest.mark.mpi

LARGE = 20_001  # elements; more than 64 KiB of any dtype of 4 bytes or more


@pytest.fixture
def cupy(backend):
    with installed(device_count=backend.world_size) as module:
        yield module


@pytest.fixture
def world(backend, cupy):
    with NCCLCommunicationBackend(backend._comm) as made:
        yield made


@pytest.fixture
def by_nccl(monkeypatch):
    """Let NCCL carry all that does not fit a header."""
    for module in (channel, collectives):
        monkeypatch.setattr(module, "SMALL_BYTES", 128)


def nccl():
    return sys.modules["cupy.cuda.nccl"]


def bits(array):
    """The bytes of an array with one NaN: processors give those that they make other signs."""
    numbers = array.view(array.real.dtype).copy()
    numbers[np.isnan(numbers)] = np.nan
    return numbers.tobytes()


def names():
    """The calls of this rank's NCCL, from first to last."""
    return [call[0] for call in nccl().calls]


# ---------------------------------------------------------------------------------- calls of NCCL


def test_exact_sums_have_the_bits_of_every_backend(backend, world, cupy):
    for dtype in ("float32", "float16", "complex128"):
        for operation in (ReductionOperation.SUM, ReductionOperation.AVERAGE):
            drawn = np.random.default_rng(backend.rank).integers(0, 13, LARGE * 4)
            with np.errstate(all="ignore"):
                mine = np.array(ADVERSARIAL_VALUES)[drawn].astype(dtype)
            expected = backend.all_reduce(mine.copy(), operation)
            got = world.all_reduce(cupy.asarray(mine), operation)
            assert bits(got.get()) == bits(expected)
            piece = world.reduce_scatter(cupy.asarray(mine), operation)
            assert bits(piece.get()) == bits(backend.reduce_scatter(mine, operation))
    assert {"allReduce", "reduceScatter", "reduce"}.isdisjoint(names())


def test_fast_sums_are_made_by_nccl(backend, cupy, caplog):
    caplog.set_level(logging.WARNING, "mpishard")
    ranks = backend.world_size
    drawn = np.random.default_rng([3, backend.rank]).standard_normal(LARGE * ranks)
    with NCCLCommunicationBackend(backend._comm, reductions="fast") as world:
        for operation in (ReductionOperation.SUM, ReductionOperation.AVERAGE):
            for dtype in ("float32", "complex64"):
                mine = drawn.astype(dtype)
                expected = backend.all_reduce(mine.copy(), operation)
                uneven = backend.reduce_scatter(mine[:-1], operation)
                low = LARGE * backend.rank
                wholes = [
                    (world.all_reduce(cupy.asarray(mine), operation), expected),
                    (world.reduce_scatter(cupy.asarray(mine), operation),
                     expected[low : low + LARGE]),
                    (world.reduce_scatter(cupy.asarray(mine[:-1]), operation), uneven),
                ]  # fmt: skip
                for got, wanted in wholes:
                    np.testing.assert_allclose(got.get(), wanted, rtol=1e-4, atol=1e-5)
        world.split(0).barrier()
    if ranks > 1:
        assert {"allReduce", "reduceScatter", "reduce"} <= set(names())
    logged = [record for record in caplog.records if "reductions='fast'" in record.message]
    assert len(logged) == (backend.rank == 0)


def test_fast_sums_use_the_tree_if_nccl_breaks_the_contract(backend, cupy):
    """These are NaN in MIN and MAX, sums of 16-bit numbers, and dtypes that NCCL lacks."""
    cases = [("float32", ReductionOperation.MAX), ("float32", ReductionOperation.MIN),
             ("float16", ReductionOperation.SUM), ("int16", ReductionOperation.SUM),
             ("complex64", ReductionOperation.PRODUCT)]  # fmt: skip
    with NCCLCommunicationBackend(backend._comm, reductions="fast") as world:
        for dtype, operation in cases:
            mine = values(np.dtype(dtype), 4 * LARGE, backend.rank, 7)
            if operation in (ReductionOperation.MAX, ReductionOperation.MIN):
                mine[backend.rank :: 7] = np.nan
            expected = backend.all_reduce(mine.copy(), operation)
            got = world.all_reduce(cupy.asarray(mine), operation).get()
            assert got.tobytes() == expected.tobytes(), (dtype, operation)
    assert {"allReduce", "reduceScatter", "reduce"}.isdisjoint(names())


def test_small_arrays_and_arrays_on_the_host_do_not_start_nccl(world, cupy):
    world.all_reduce(cupy.ones(8192))  # 64 KiB
    world.all_gather(cupy.ones(65536 // 8 // world.world_size))
    world.broadcast(cupy.ones(100))
    world.all_reduce(np.ones(LARGE))
    world.all_gather(np.ones(LARGE))
    world.barrier()
    world.split(0)
    assert names() == []
    world.all_reduce(cupy.ones(8193))
    assert "init" in names()


def test_each_rank_uses_the_gpu_of_its_local_rank(world, cupy):
    assert int(cupy.cuda.Device()) == world.rank
    world.all_gather(cupy.ones(LARGE))
    assert world._communicator._made.device_id() == world.rank


def test_groups_are_split_off_an_idle_communicator(world, cupy):
    early = world.split(0)  # before NCCL has begun
    world.all_reduce(cupy.ones(LARGE))
    parity = world.rank % 2
    group = world.split(parity, key=-world.rank)
    inner = group.split(None if group.rank == 0 else 7)
    for made in (early, group, inner):
        if made is not None:
            members = made.world_ranks
            got = made.all_gather(cupy.full(LARGE, float(world.rank)))
            assert got.get()[::LARGE].tolist() == [float(rank) for rank in members]
            assert made.reductions == "exact"
    splits = [call for call in nccl().calls if call[0] == "commSplit"]
    assert splits == [
        ("commSplit", parity, group.rank),
        ("commSplit", -1, 0)
        if inner is None
        else ("commSplit", min(inner.world_ranks), inner.rank),
    ]
    assert names().count("init") == 2, "of the world and the early group"


def test_async_calls_overlap(world, cupy):
    """A call is under way until its event has happened, and the rank computes meanwhile."""
    if world.world_size == 1:
        pytest.skip("needs two ranks")
    world.all_reduce(cupy.ones(LARGE))
    nccl().hangs = True
    works = [world.all_reduce_async(cupy.ones(LARGE)), world.all_gather_async(cupy.ones(LARGE))]
    other = cupy.ones(LARGE) * 2
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        world.progress()
    assert not any(work.done for work in works)
    assert float(other[0]) == 2
    nccl().hangs = False
    assert float(works[1].wait()[0]) == 1
    assert float(works[0].wait()[0]) == world.world_size


def test_worlds_may_begin_with_nccl_in_any_order(world, cupy):
    """The start blocks until all ranks arrive; here they enter two worlds in two orders."""
    group = world.split(0)
    starts = [made._communicator._begin() for made in (world, group)]
    for start in starts:
        at_once(iter([next(start)]))  # the exchange of the unique id
    if world.rank % 2:
        starts.reverse()
    entries = [next(start) for start in starts]
    at_once(iter(entries))
    assert [next(start, None) for start in starts] == [None, None]
    for made in (world, group):
        assert float(made.all_reduce(cupy.ones(LARGE))[0]) == world.world_size


# --------------------------------------------------------------------------------------- refusals


def test_two_ranks_on_one_gpu_are_refused_by_name(backend):
    if backend.world_size == 1:
        pytest.skip("needs two ranks")
    ranks = backend.world_size
    with installed(device_count=ranks - 1) as cupy:
        with NCCLCommunicationBackend(backend._comm) as world:
            with pytest.raises(
                CommunicationError,
                match=rf"ranks 0, {ranks - 1} have GPU 0000:00:00.0 of .* in common, and NCCL",
            ):
                world.all_reduce(cupy.ones(LARGE))
            assert world.all_reduce(np.ones(3))[0] == ranks
            assert world.all_reduce(cupy.ones(3))[0] == ranks
        assert "init" not in names()


def test_a_large_array_on_the_gpus_of_some_ranks_is_refused_on_all(world, cupy):
    if world.world_size == 1:
        pytest.skip("needs two ranks")
    ones = np.ones(LARGE) if world.rank == 0 else cupy.ones(LARGE)
    for call in (world.all_reduce, world.reduce_scatter, world.all_gather):
        others = "rank 1" if world.world_size == 2 else "ranks 1.*"
        with pytest.raises(
            CollectiveMismatchError,
            match=rf"{call.__name__}: {others} passed arrays on a GPU and rank 0 in host memory",
        ):
            call(ones)
    assert names() == []


def test_placement_may_differ_if_data_travel_through_the_host(world, cupy):
    ranks, rank = world.world_size, world.rank
    for length in (3, 100, 900):  # in the header, and through the host
        mine = np.full(length, float(rank)) if rank == 0 else cupy.full(length, float(rank))
        total = world.all_reduce(mine.copy())
        assert float(total[0]) == sum(range(ranks))
        whole = world.all_gather(mine)
        assert type(whole) is type(mine)
        assert [float(one) for one in whole[::length]] == [*range(ranks)]
    for root in range(min(ranks, 2)):
        for length in (3, 100, LARGE):
            own = np.full(length, float(rank)) if rank == 0 else cupy.full(length, float(rank))
            assert float(world.broadcast(own, root)[length - 1]) == root
            given = cupy.full(length, 7.0) if rank == root else None
            assert float(world.broadcast(given, root)[length - 1]) == 7
    # Contributions that fit a header say nothing of their place.
    mine = np.ones(3) if rank == 0 else cupy.ones(LARGE)
    whole = world.all_gather(mine)
    assert (whole.size, float(whole[-1])) == (3 + LARGE * (ranks - 1), 1.0)


def test_arrays_on_another_gpu_are_refused_before_anything_is_sent(world, cupy):
    if world.world_size == 1:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device((world.rank + 1) % world.world_size):
        elsewhere = cupy.ones(LARGE)
    mine = f"rank {world.rank} communicates from cuda:{world.rank}, and got arrays on cuda:"
    with pytest.raises(ValueError, match=mine):
        world.all_reduce(elsewhere)
    with pytest.raises(ValueError, match=re.escape(f"on cuda:{world.rank}, cpu: copy them there")):
        world.all_reduce(cupy.ones(LARGE), out=np.ones(LARGE))
    assert world.all_reduce(np.ones(1))[0] == world.world_size


def test_backends_that_differ_between_ranks_are_refused_on_all(backend, cupy):
    if backend.world_size == 1:
        pytest.skip("needs two ranks")
    fast = NCCLCommunicationBackend(backend._comm, reductions="fast")
    exact = NCCLCommunicationBackend(backend._comm)
    others = "rank 1" if backend.world_size == 2 else "ranks 1.*"
    for other, name in ((exact, "nccl, exact"), (ms.MPICommunicationBackend(backend._comm), "mpi")):
        with pytest.raises(
            CollectiveMismatchError,
            match=rf"backend is nccl, fast on rank 0, {name} on {others}. Every rank",
        ):
            (fast if backend.rank == 0 else other).initialize()


def test_arguments_and_missing_libraries_are_refused(backend, monkeypatch):
    with pytest.raises(ValueError, match="reductions must be 'exact' or 'fast', got 'quick'"):
        NCCLCommunicationBackend(backend._comm, reductions="quick")
    with installed():
        monkeypatch.setattr(nccl(), "available", False, raising=False)
        with pytest.raises(DeviceUnavailableError, match="pip install nvidia-nccl-cu12"):
            NCCLCommunicationBackend(backend._comm)
    with installed(device_count=0), pytest.raises(DeviceUnavailableError, match="no GPU"):
        NCCLCommunicationBackend(backend._comm)


# ------------------------------------------------------------------------- the stand-in sees faults


def test_a_missing_event_is_a_race(world, cupy, monkeypatch):
    world.all_reduce(cupy.ones(LARGE))
    monkeypatch.setattr(cupy.cuda.Stream, "wait_event", lambda stream, event: None)
    with pytest.raises(AssertionError, match="NCCL's stream has not waited for this thread's"):
        list(world._communicator.run(lambda *a: post_broadcast(cupy.ones(LARGE), *a)))


def post_broadcast(array, made, stream):
    made.broadcast(array.data.ptr, array.data.ptr, array.nbytes, 1, 0, stream)


def test_an_array_that_nccl_still_uses_is_a_race(world, cupy):
    world.all_reduce(cupy.ones(LARGE))
    ones = cupy.ones(LARGE)
    steps = world._communicator.run(lambda *a: post_broadcast(ones, *a))
    waitable = next(steps)
    with pytest.raises(AssertionError, match="a race: NCCL may still write this array"):
        ones *= 2
    at_once(iter([waitable]))
    ones *= 2


def test_mismatches_with_which_nccl_would_hang_are_refused(world, cupy):
    if world.world_size == 1:
        pytest.skip("needs two ranks")
    world.all_reduce(cupy.ones(LARGE))
    ones = cupy.ones(LARGE + world.rank)
    (waitable,) = world._communicator.run(lambda *a: post_broadcast(ones, *a))
    with pytest.raises(AssertionError, match=r"calls that do not match: .*broadcast"):
        at_once(iter([waitable]))
    world._communicator.end(in_good_order=False)


# -------------------------------------------------------------------------------------- the end


def test_the_end_of_a_job_aborts_nccl_before_mpi(world, cupy):
    if world.world_size == 1:
        pytest.skip("needs two ranks")
    world.all_reduce(cupy.ones(LARGE))
    nccl().hangs = True
    work = world.all_reduce_async(cupy.ones(LARGE))
    for _ in range(100):
        world.progress()
    assert not work.done
    world._job.ending.stop()
    assert names()[-1] == "abort"
    with pytest.raises(CommunicationError, match="NCCL was aborted"):
        work.wait()


# ------------------------------------------------------------------------------------- whole runs


def test_init_makes_an_nccl_backend_and_returns_it_again(backend, cupy, monkeypatch):
    monkeypatch.setattr(sys.modules["mpishard.communication.process"], "_process_backend", None)
    with ms.init("nccl") as world:
        assert type(world) is NCCLCommunicationBackend
        assert ms.init() is ms.init("nccl") is world
        with pytest.raises(CommunicationError, match=r"init\('mpi'\): this process has NCCL"):
            ms.init("mpi")
    assert ms.launch(lambda made: made.reductions, backend="nccl") == "exact"


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_models_train_to_the_same_bits_as_by_mpi(backend, world, cupy, by_nccl, strategy):
    x = np.random.default_rng(backend.rank).standard_normal((8, 64))
    trained = []
    for made in (backend, world):
        model = ms.nn.MLP([64, 31, 64], seed=0, device="cuda")
        model = ms.as_distributed(model, made, strategy)
        optimizer = ms.as_distributed(ms.optimizers.AdamW(1e-3), made, strategy)
        losses = [optimizer.step(model, x, x) for _ in range(3)]
        trained.append((losses, model.gather_full_parameters().get().tobytes()))
    assert trained[0] == trained[1]
    assert backend.world_size == 1 or "send" in names()


def test_checkpoints_record_fast_sums_and_gradient_leaves_refuse_them(backend, cupy, shared_path):
    with NCCLCommunicationBackend(backend._comm, reductions="fast") as world:
        model = ms.as_distributed(ms.nn.MLP([4, 4], seed=0, device="cuda"), world, "fsdp")
        ms.checkpoint.save(shared_path / "fast", model)
        world.barrier()
        assert ms.checkpoint.check(shared_path / "fast").metadata["model"]["reductions"] == "fast"
        ms.checkpoint.load(shared_path / "fast", model)
        config = ms.ShardingConfiguration(world, gradient_leaves=8)
        with pytest.raises(ValueError, match=r"gradient_leaves=8 .* and reductions='fast' would"):
            ms.as_distributed(ms.nn.MLP([4, 4], seed=0, device="cuda"), config, "fsdp")
    model = ms.as_distributed(ms.nn.MLP([4, 4], seed=0, device="cuda"), backend, "fsdp")
    ms.checkpoint.save(shared_path / "exact", model)
    backend.barrier()
    assert "reductions" not in ms.checkpoint.check(shared_path / "exact").metadata["model"]
