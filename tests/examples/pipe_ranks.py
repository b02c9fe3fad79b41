"""Programs of the processes of tests/examples/test_pipe_backend.py, which import this file."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.errors import CollectiveTimeoutError, PeerError
from mpishard.testing import CommunicationConformance

MEGABYTE = 2**20


def run_conformance(backend: Any, dtypes: list[str], times: int, fault: str) -> Any:
    """Run every check, then exchange large arrays, then cause a fault on the last rank."""
    suite = CommunicationConformance([np.dtype(name) for name in dtypes])
    names = suite.names()
    for name in names:
        for _ in range(times):
            getattr(suite, name)(backend)
    exchange_large_arrays(backend)
    last = backend.world_size - 1
    if backend.rank != last:
        backend.send(np.ones(1), last)
    else:
        for peer in range(last):
            backend.receive(peer, 1)  # it has all that this rank has sent
        if fault == "leaves":
            return len(names)
        if fault == "raises":
            raise OSError(f"no space left on device after {len(names)} checks")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        backend.all_reduce(np.ones(3))
    except PeerError as error:
        return len(names), error


def exchange_large_arrays(backend: Any) -> None:
    """Send 50 MB from every rank, more than a pipe holds, before any rank reads."""
    world, rank = backend.world_size, backend.rank
    part = np.full(50 * MEGABYTE // 8 // world, float(rank))
    received = backend.all_to_all([part] * world)
    assert [array[-1] for array in received] == list(range(world))
    for peer in range(world):
        if peer != rank:
            backend.send(part, peer)
    for peer in range(world):
        if peer != rank:
            assert backend.receive(peer, part.size)[0] == peer


def tell(backend: Any, folder: str, *arguments: Any) -> None:
    """`run_conformance`; its result goes to a file, for a job that cannot give results."""
    found = run_conformance(backend, *arguments)
    Path(folder, str(backend.rank)).write_text(f"{found!r}")


def stop(backend: Any, folder: str) -> None:
    """Stop the process of rank 1, to which rank 0 then sends large arrays."""
    if backend.rank == 1:
        backend.send(np.array([os.getpid()]), 0)
        backend.receive(0, 1)  # all that was sent has come
        os.kill(os.getpid(), signal.SIGSTOP)
    process = int(backend.receive(1, 1)[0])
    backend.send(np.ones(1), 1)
    backend._pipes.timeout = 1.0
    try:
        backend.all_to_all([np.zeros(50 * MEGABYTE // 8)] * 2)
    except CollectiveTimeoutError as error:
        Path(folder, "0").write_text(str(error))
    finally:
        os.kill(process, signal.SIGKILL)
