"""GPU arrays between ranks: on threads, and under MPI through the host or by device pointer."""

import ctypes
import logging
import os
from types import SimpleNamespace

import numpy as np
import pytest

import mpishard as ms
from mpishard.communication import InMemoryCommunicationBackend
from mpishard.communication.mpi import messages
from mpishard.testing.worlds import in_worlds


def reads_gpu_memory():
    """Return whether MPI reads GPU memory: the user's setting, or else the library's answer."""
    if "MPISHARD_CUDA_AWARE" in os.environ:
        return os.environ["MPISHARD_CUDA_AWARE"] == "1"
    from mpi4py import MPI

    ask = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return ask is not None and bool(ask())


@pytest.fixture(params=["0", "1"], ids=["staged", "aware"])
def way(request, monkeypatch):
    """How MPI gets them; in memory there is no difference."""
    gives_addresses = request.param == "1" and request.config.getoption("with_mpi")
    if gives_addresses and request.config.getoption("gpu") and not reads_gpu_memory():
        pytest.skip("this MPI library is not built for CUDA: it would crash")
    monkeypatch.setenv("MPISHARD_CUDA_AWARE", request.param)
    return request.param


def use_device_of(backend, gpu):
    gpu.cuda.Device(backend.local_rank % gpu.cuda.runtime.getDeviceCount()).use()


@in_worlds(1, 2, 3)
@pytest.mark.parametrize("length", [3, 1000])
def test_collectives(backend, gpu, way, length):
    use_device_of(backend, gpu)
    if way == "1" and isinstance(backend, InMemoryCommunicationBackend):
        pytest.skip("for MPI")
    rank, world = backend.rank, backend.world_size

    def device(host):
        return gpu.asarray(host)

    for _ in range(2):  # buffers are used again
        ones = device(np.ones(length))
        assert backend.all_reduce(ones) is ones
        assert (ones.get() == world).all()
        out = device(np.zeros(length))
        assert backend.all_reduce(device(np.ones(length)), out=out) is out
        assert (out.get() == world).all()
        rows = device(np.arange(world * length, dtype=float).reshape(world, length))
        piece = backend.reduce_scatter(rows)
        assert (piece.get() == world * rows.get()[rank : rank + 1]).all()
        assert backend.reduce_scatter(rows, out=rows[rank : rank + 1]) is not None
        assert (rows.get()[rank] == piece.get()[0]).all()
        whole = backend.all_gather(device(np.full((rank + 1) * length, rank)))
        wanted = [peer for peer in range(world) for _ in range((peer + 1) * length)]
        assert whole.get().tolist() == wanted
        target = device(np.zeros(world * length))
        mine = target[rank * length : (rank + 1) * length]
        mine.fill(rank + 1)
        assert backend.all_gather(mine, out=target) is target
        assert (target.get().reshape(world, length) == 1 + np.arange(world)[:, None]).all()
        sent = device(np.full(length, 7.0)) if rank == 0 else device(np.zeros(length))
        assert backend.broadcast(sent) is sent
        assert (sent.get() == 7).all()
        part = backend.scatter(device(np.arange(world)) if rank == 0 else None)
        assert (part.get() if hasattr(part, "get") else part).tolist() == [rank]
        gathered = backend.gather(device(np.full(length, rank)))
        assert (
            gathered is None
            if rank
            else (gathered.get().reshape(world, -1)[:, 0]).tolist() == [*range(world)]
        )
        received = backend.all_to_all([device(np.array([rank, peer])) for peer in range(world)])
        assert [array.get().tolist() for array in received] == [
            [peer, rank] for peer in range(world)
        ]


@in_worlds(1, 2, 3, 4)
@pytest.mark.parametrize("way", ["1"], ids=["aware"], indirect=True)
def test_a_cuda_aware_mpi_gets_device_pointers_in_messages_only(backend, gpu, way, monkeypatch):
    """Open MPI has no non-blocking collectives of GPU memory.

    The stand-in refuses to give an address while the stream has work, which may use the memory.
    """
    use_device_of(backend, gpu)
    if isinstance(backend, InMemoryCommunicationBackend):
        pytest.skip("for MPI")
    given, post = [], messages.post_bytes

    def post_bytes(mpi, function, buffer, *where):
        if isinstance(buffer, gpu.ndarray):
            given.append(function.__name__)
        return post(mpi, function, buffer, *where)

    monkeypatch.setattr(messages, "post_bytes", post_bytes)
    monkeypatch.setattr(messages.MessageChannel, "ROUND_BYTES", 2000)
    rank, world = backend.rank, backend.world_size
    for length in (20, 1001):  # one round, and several
        for root in range(world):
            sent = gpu.full(length, float(rank))
            assert backend.broadcast(sent, root=root) is sent
            assert (sent.get() == root).all()
        array = gpu.arange(float(length))
        for _ in range(2):  # the second has work of the first before it
            backend.all_reduce(array)
        assert (array.get() == world**2 * np.arange(length)).all()
        array = gpu.full((world, length), float(rank))
        assert (backend.reduce_scatter(array).get() == sum(range(world))).all()
        whole = backend.all_gather(gpu.full((1, length), float(rank)))
        assert (whole.get() == np.arange(world)[:, None]).all()
    assert set(given) == ({"Irecv", "Isend"} if world > 1 else set())


@in_worlds(2, 3)
def test_messages(backend, gpu):
    use_device_of(backend, gpu)
    rank, world = backend.rank, backend.world_size
    for length in (3, 5000):
        backend.send(gpu.full(length, float(rank)), (rank + 1) % world)
        received = backend.receive((rank - 1) % world, length)
        assert received.data.device_id == gpu.cuda.runtime.getDevice()
        assert (received.get() == (rank - 1) % world).all()
        coming = backend.receive_async((rank - 1) % world, length, dtype=np.float64)
        sent = gpu.full(length, float(rank))
        going = backend.send_async(sent, (rank + 1) % world)
        received = coming.wait()
        going.wait()
        sent[...] = -1.0
        assert received.data.device_id == gpu.cuda.runtime.getDevice()
        assert (received.get() == (rank - 1) % world).all()


@pytest.mark.mpi
def test_staging_is_logged_once_and_reuses_pinned_memory(backend, gpu, caplog):
    caplog.set_level(logging.INFO, "mpishard")
    if backend.world_size == 1:
        pytest.skip("needs two ranks")
    for _ in range(3):
        backend.all_reduce(gpu.full(1000, 1.0))
    logged = [record for record in caplog.records if "pinned host buffers" in record.message]
    assert len(logged) == (backend.rank == 0)
    assert backend.scratch_bytes >= 8000
    if getattr(gpu, "__stand_in__", False):
        assert gpu.cuda.pinned_bytes == 8000  # which the pool would round up


@pytest.mark.mpi
def test_cuda_support_is_read_from_the_library_unless_the_user_sets_it(backend, monkeypatch):
    monkeypatch.delenv("MPISHARD_CUDA_AWARE", raising=False)
    assert reads_gpu_memory() in (False, True)
    for answers in ({}, {"MPIX_Query_cuda_support": lambda: 0}):
        monkeypatch.setattr(
            ctypes, "CDLL", lambda path, answers=answers: SimpleNamespace(**answers)
        )
        assert not reads_gpu_memory()
    for value in ("0", "1"):
        monkeypatch.setenv("MPISHARD_CUDA_AWARE", value)
        assert reads_gpu_memory() == (value == "1")


def test_a_wrong_value_of_the_cuda_setting_is_refused(monkeypatch):
    monkeypatch.setenv("MPISHARD_CUDA_AWARE", "yes")
    with pytest.raises(ValueError, match="MPISHARD_CUDA_AWARE must be 0 or 1"):
        InMemoryCommunicationBackend(0, 1, "switch").initialize()


@in_worlds(1, 2, 3)
@pytest.mark.parametrize("operation", ms.ReductionOperation)
@pytest.mark.parametrize("length", [40, 30_000])
def test_reductions_of_tiny_numbers_have_the_bits_of_the_host(backend, gpu, operation, length):
    """CuPy's own functions replace float32 numbers below 1.2e-38 by 0."""
    use_device_of(backend, gpu)
    generator = np.random.default_rng(backend.rank)
    values = generator.standard_normal(length).astype("float32")
    values[::2] *= np.float32(1e-39)
    values[1::4] *= np.float32(1e-30)
    values[:3] = np.nan, np.inf, -np.inf
    expected = backend.all_reduce(values.copy(), operation)
    found = backend.all_reduce(gpu.asarray(values), operation)
    np.testing.assert_array_equal(found.get(), expected)
    found = backend.reduce_scatter(gpu.asarray(values), operation)
    np.testing.assert_array_equal(found.get(), backend.reduce_scatter(values, operation))
    tiny = np.abs(expected[expected != 0])
    assert np.nanmin(tiny) < np.finfo("float32").smallest_normal or operation.name == "PRODUCT"
