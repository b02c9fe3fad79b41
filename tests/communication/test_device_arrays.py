"""Arrays in GPU memory go through host buffers under MPI. The GPU is a stand-in here."""

import sys
import types

import numpy as np
import pytest

pytestmark = pytest.mark.mpi


class DeviceArray:
    """What the backend may ask of a CuPy array: to be described, read and written as a whole."""

    def __init__(self, host):
        self._host = np.array(host)

    dtype = property(lambda self: self._host.dtype)
    shape = property(lambda self: self._host.shape)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    flags = property(lambda self: self._host.flags)

    def get(self):
        return self._host.copy()

    def set(self, host):
        assert host.shape == self._host.shape
        assert host.dtype == self._host.dtype
        self._host[...] = host


@pytest.fixture
def device(monkeypatch):
    cupy = types.ModuleType("cupy")
    cupy.ndarray = DeviceArray
    cupy.empty = lambda shape, dtype: DeviceArray(np.empty(shape, dtype))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return DeviceArray


@pytest.mark.parametrize("length", [3, 1000])
def test_collectives(backend, device, length):
    rank, world = backend.rank, backend.world_size
    ones = device(np.ones(length))
    assert backend.all_reduce(ones) is ones
    assert (ones.get() == world).all()
    out = device(np.zeros(length))
    assert backend.all_reduce(device(np.ones(length)), out=out) is out
    assert (out.get() == world).all()
    piece = backend.reduce_scatter(device(np.ones((world, 2))))
    assert piece.get().tolist() == [[world, world]]
    whole = backend.all_gather(device(np.full(rank + 1, rank)))
    assert whole.get().tolist() == [peer for peer in range(world) for _ in range(peer + 1)]
    target = device(np.zeros(world * length))
    assert backend.all_gather(device(np.ones(length)), out=target) is target
    assert (target.get() == 1).all()
    sent = device(np.full(length, 7.0)) if rank == 0 else device(np.zeros(length))
    assert backend.broadcast(sent) is sent
    assert (sent.get() == 7).all()
    part = backend.scatter(device(np.arange(world)) if rank == 0 else None)
    assert (part.get() if rank == 0 else part).tolist() == [rank]
    gathered = backend.gather(device(np.array([rank])))
    assert gathered is None if rank else gathered.get().tolist() == list(range(world))
    received = backend.all_to_all([device(np.array([rank, peer])) for peer in range(world)])
    assert [array.get().tolist() for array in received] == [[peer, rank] for peer in range(world)]


def test_messages(backend, device):
    rank, world = backend.rank, backend.world_size
    if world == 1:
        pytest.skip("needs two ranks")
    for length in (3, 5000):
        backend.send(device(np.full(length, rank)), (rank + 1) % world)
        assert (backend.receive((rank - 1) % world, length).get() == (rank - 1) % world).all()
