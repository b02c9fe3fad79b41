"""Worlds that end at different times leave nothing behind for the next."""

import time

import pytest

from mpishard.communication import MPICommunicationBackend, job

pytestmark = pytest.mark.mpi


def test_a_late_rank_finds_no_notice_of_a_world_that_has_ended(backend, monkeypatch):
    monkeypatch.setattr(job, "_NOTICE_SECONDS", 0.02)
    last = backend.world_size - 1
    for _ in range(3):
        backend.barrier()
        if backend.rank == last:
            time.sleep(0.3)  # the others tell each other that they have left
        backend.shutdown()
        with MPICommunicationBackend() as following:
            for _ in range(20):  # past the collective after which the others have left
                following.barrier()
            if following.rank == 0:
                time.sleep(0.3)  # who waits long looks for notices
            following.barrier()
        backend = MPICommunicationBackend()
        backend.initialize()
    backend.shutdown()
