"""A thread that lets MPI go on while a rank computes."""

import threading
import time

import numpy as np
import pytest

from mpishard import MPICommunicationBackend, settings

LENGTH = 500_000


def threads():
    return [t for t in threading.enumerate() if t.name == "mpishard-progress"]


@pytest.mark.mpi
@pytest.mark.parametrize("threaded", [True, False])
def test_data_arrive_while_a_rank_computes(backend, threaded, monkeypatch):
    monkeypatch.setenv("MPISHARD_ARENA", "off")
    monkeypatch.setenv("MPISHARD_PROGRESS", "on" if threaded else "off")
    own = MPICommunicationBackend(backend._comm)
    with own:
        assert len(threads()) == threaded
        mine, everyone = np.full(LENGTH, own.rank), np.empty(LENGTH * own.world_size, int)
        work = own.all_gather_async(mine, out=everyone)
        deadline = time.monotonic() + 20
        # A rank that computes says from time to time that it has begun something.
        while len(own._talk.in_flight) == 1 and time.monotonic() < deadline and threaded:
            time.sleep(0.01)
            own.progress()
        if threaded:
            while everyone[-1] != own.world_size - 1 or everyone[0]:
                time.sleep(0.01)
                assert time.monotonic() < deadline
        assert work.wait() is everyone
        assert (everyone == np.repeat(np.arange(own.world_size), LENGTH)).all()
    assert not threads()
    with own:  # entered again
        assert len(threads()) == threaded
    assert not threads()


@pytest.mark.mpi
def test_by_itself_it_runs_only_where_a_core_is_free_and_messages_are_sent(backend, monkeypatch):
    for arena in ("auto", "off"):
        monkeypatch.setenv("MPISHARD_ARENA", arena)
        with MPICommunicationBackend(backend._comm) as own:
            assert len(threads()) == (arena == "off" and own.cores_per_rank >= 2)


def test_other_words_are_refused(monkeypatch):
    monkeypatch.setenv("MPISHARD_PROGRESS", "yes")
    with pytest.raises(ValueError, match="auto, on or off; got 'yes'"):
        settings.check()
