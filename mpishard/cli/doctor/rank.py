"""What `mpishard doctor` starts on two ranks: it talks through mpishard, and measures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard import settings
from mpishard.cli.doctor.job import SIZES, SOURCES
from mpishard.cli.doctor.probe import answer_line
from mpishard.communication import CommunicationBackend, init

_REPEATS = dict(zip(SIZES, (100, 20, 3), strict=True))
_ARENA_BYTES = 2**20


def main() -> None:
    """One rank's part; rank 0 answers."""
    backend = init("mpi")
    found = {
        "world_size": backend.world_size,
        "nodes": len(set(backend.nodes)),
        "barrier": _median_seconds(backend, backend.barrier, 200),
        "messages": {str(nbytes): _all_reduce(backend, nbytes, None) for nbytes in SIZES},
        "arena": None,
    }
    shared = backend.allocate_shared(2 * SIZES[-1] // 8, np.float64)
    if shared is not None:
        own = np.split(shared, 2)[backend.rank]
        found["arena"] = _all_reduce(backend, SIZES[-1], own)
    found["sources"] = {source: _is_shared(backend, source) for source in SOURCES}
    if backend.rank == 0:
        print(answer_line(found), flush=True)  # noqa: T201 - it is read by the doctor
    backend.shutdown()


def _all_reduce(backend: CommunicationBackend, nbytes: int, array: Any) -> float:
    """Seconds of an all-reduce of float64, after its result was found right."""
    own = np.empty(nbytes // 8) if array is None else array
    own[:] = backend.rank + 1.0
    total = backend.all_reduce(own)
    expected = backend.world_size * (backend.world_size + 1) / 2
    if not np.all(total == expected):
        raise ArithmeticError(f"an all-reduce of {nbytes} bytes gave {total[:4]}, not {expected}")
    return _median_seconds(backend, lambda: backend.all_reduce(own, out=total), _REPEATS[nbytes])


def _median_seconds(
    backend: CommunicationBackend, call: Callable[[], object], repeats: int
) -> float:
    times = []
    backend.barrier()
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _is_shared(backend: CommunicationBackend, source: str) -> bool:
    """Whether what one rank writes into memory from ``source`` the other reads."""
    settings.write("MPISHARD_ARENA", source)
    memory = backend.allocate_shared(_ARENA_BYTES, np.uint8)
    if memory is None:
        return False
    memory[backend.rank] = backend.rank + 1
    backend.barrier()
    is_read = memory[: backend.world_size].tolist() == [
        rank + 1 for rank in range(backend.world_size)
    ]
    return bool(backend.all_reduce(np.array([is_read], np.int64))[0] == backend.world_size)


if __name__ == "__main__":
    main()
