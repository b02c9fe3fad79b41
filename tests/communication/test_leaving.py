"""Worlds whose ranks leave at different times leave no message to the next world."""

import gc
import time

import numpy as np
import pytest

from mpishard.communication import MPICommunicationBackend

pytestmark = pytest.mark.mpi


def test_a_late_rank_receives_no_notice_of_an_earlier_world(backend):
    last = backend.world_size - 1
    for _ in range(3):
        backend.barrier()
        if backend.rank == last:
            time.sleep(0.12)  # the others tell each other that they have left
        backend.shutdown()
        with MPICommunicationBackend() as following:
            for _ in range(20):  # past the collective after which the others have left
                following.barrier()
            if following.rank == 0:
                time.sleep(0.12)  # who waits long looks for notices
            following.barrier()
        backend = MPICommunicationBackend()
        backend.initialize()
    backend.shutdown()


@pytest.mark.parametrize("arena", ["auto", "off"])
def test_an_unawaited_collective_of_one_rank(backend, arena, monkeypatch, capfd):
    monkeypatch.setenv("MPISHARD_ARENA", arena)
    odd = backend.world_size - 1
    if odd == 0:
        pytest.skip("a world of one has nobody to wait for")
    for held in (True, False):
        with MPICommunicationBackend(backend._comm) as world:
            world.barrier()
            if world.rank == odd:
                works = [world.all_gather_async(np.ones(3)), world.all_reduce_async(np.ones(3))]
                for rank in range(odd):
                    world.send(np.ones(1), rank)
                if not held:
                    del works
            else:
                world.receive(odd, 1)  # so that it has begun before any leaves
        error = capfd.readouterr().err
        if backend.rank == odd:
            assert "has left collective 2, all_gather(float64[3]), called at" in error
            assert "test_leaving.py" in error
        else:
            assert not error
        backend.barrier()


def test_messages_of_a_rank_that_has_left_are_still_received(backend):
    """The notice of the rank arrives while the data of its first message are under way."""
    sizes = 3_000_000, 10
    with MPICommunicationBackend(backend._comm) as world:
        if world.rank == 0:
            for peer in range(1, world.world_size):
                for tag, size in enumerate(sizes):
                    world.send(np.arange(size), peer, tag)
        else:
            if world.rank == 1:
                time.sleep(0.2)
            first = world.receive_async(0, sizes[0], dtype=np.int64)
            second = world.receive_async(0, sizes[1], 1, dtype=np.int64)
            assert (second.wait() == np.arange(sizes[1])).all()
            assert (first.wait() == np.arange(sizes[0])).all()


@pytest.mark.parametrize("arena", ["auto", "off"])
def test_unawaited_collectives_of_all_ranks(backend, arena, monkeypatch, capfd):
    monkeypatch.setenv("MPISHARD_ARENA", arena)
    begun = []
    with MPICommunicationBackend(backend._comm) as world:
        for length in (3, 300_000):
            begun.append(world.all_reduce_async(np.ones(length)))
            begun.append(world.all_gather_async(np.ones(length)))
    assert not capfd.readouterr().err
    # Otherwise a message of one may meet the next communicator that MPI gives the same identity.
    assert all(work.done for work in begun)


@pytest.mark.parametrize("way", ["shut down", "dropped"])
def test_a_group_that_a_rank_leaves_with_a_collective_under_way(backend, way, monkeypatch):
    monkeypatch.setenv("MPISHARD_ARENA", "off")  # data in messages, which need the communicators
    group, arrays = backend.split(0), np.ones((8, 300_000))
    works = [group.all_reduce_async(array) for array in arrays]
    if way == "shut down":
        group.shutdown()
    elif backend.rank > 0:
        works[-1].wait()
    else:  # the others wait for this rank
        del group, works
        gc.collect()
    for _ in range(3):  # each split frees the groups that all ranks have left
        backend.split(0).barrier()
    assert way == "shut down" or backend.rank == 0 or (arrays == backend.world_size).all()
