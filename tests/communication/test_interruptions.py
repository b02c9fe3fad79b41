"""Ctrl-C in the middle of a collective that a script catches: what is called after it."""

import time
from contextlib import suppress

import numpy as np
import pytest

from mpishard import MPICommunicationBackend, run_in_threads
from mpishard.errors import CommunicationError, PeerError

LENGTH = 40_000
"""Elements that no header holds, and few enough to bounce."""


@pytest.fixture(params=["auto", "off"])
def world(request, backend, monkeypatch):
    monkeypatch.setenv("MPISHARD_ARENA", request.param)
    with MPICommunicationBackend(backend._comm) as own:
        yield own


def interrupted(*_arguments, **_named):
    raise KeyboardInterrupt


@pytest.mark.mpi
def test_one_that_asks_what_it_waits_for_goes_on(world, monkeypatch):
    array = np.full(LENGTH, 1.0)
    wanted = float(world.world_size)
    for _ in range(3):
        world.barrier()
        if world.rank == 0:
            work = world.all_reduce_async(array, out=np.empty(LENGTH))
            with monkeypatch.context() as patch:
                patch.setattr(type(work.waitable), "test", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    work.wait()
            assert not work.done
            assert (work.wait() == wanted).all()
        else:
            time.sleep(0.05)
            assert (world.all_reduce(array, out=np.empty(LENGTH)) == wanted).all()
        assert (world.all_reduce(np.ones(LENGTH)) == wanted).all()


@pytest.mark.mpi
def test_one_that_leaves_out_a_step_is_the_last(world, monkeypatch):
    """The others have done it: no later result would be right."""
    world.all_reduce(np.ones(LENGTH))
    if world.rank == 0:
        monkeypatch.setattr(world._reducer, "reduce", interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.all_reduce_async(np.ones(LENGTH)).wait()
        monkeypatch.undo()
        with pytest.raises(CommunicationError, match="rank 0 was interrupted in collective 2, all"):
            world.all_reduce(np.ones(LENGTH))
    else:
        with pytest.raises(PeerError):
            world.all_reduce(np.ones(LENGTH))


def test_threads_all_hear_of_it():
    def body(backend):
        if backend.rank == 0:
            reduce, backend._reducer.reduce = backend._reducer.reduce, interrupted
            with pytest.raises(KeyboardInterrupt):
                backend.all_reduce(np.ones(LENGTH))
            backend._reducer.reduce = reduce
        else:  # which is done with it, or not
            with suppress(PeerError):
                backend.all_reduce(np.ones(LENGTH))
        with pytest.raises(PeerError, match="rank 0 was interrupted in collective 1, all_reduce"):
            backend.all_reduce(np.ones(LENGTH))

    run_in_threads(2, body)
