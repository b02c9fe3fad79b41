"""Program of the two ranks that ``mpishard doctor`` starts; rank 0 answers.

Without an argument they communicate through mpishard, and measure. With the name of an MPI
operation they try it on GPU memory. A library that is not built for CUDA crashes on that, or moves
wrong bytes, so that each operation has a job of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard import settings
from mpishard.cli.doctor.job import SIZES, SOURCES
from mpishard.cli.probe import answer_line
from mpishard.communication import CommunicationBackend, init
from mpishard.devices import load_cupy
from mpishard.observe import time_alternately

__all__: list[str] = []

_REPEATS = dict(zip(SIZES, (50, 20, 3), strict=True))
_ARENA_BYTES = 2**20
_GPU_LENGTHS = (16, 2**20)  # small and large messages take different ways


def main() -> None:
    """Do one rank's part."""
    if sys.argv[1:]:
        _try_on_gpu(sys.argv[1])
        return
    backend = init("mpi")
    shared = backend.allocate_shared(2 * SIZES[-1] // 8, np.float64)
    found = {
        "world_size": backend.world_size,
        "nodes": len(set(backend.nodes)),
        "barrier": _seconds(backend, backend.barrier, 50),
        "messages": {str(n): _all_reduce(backend, np.empty(n // 8)) for n in SIZES},
        "arena": None
        if shared is None
        else _all_reduce(backend, np.split(shared, 2)[backend.rank]),
        "sources": {source: _is_shared(backend, source) for source in SOURCES},
    }
    if backend.rank == 0:
        print(answer_line(found), flush=True)  # noqa: T201 - the doctor reads it
    backend.shutdown()


def _seconds(backend: CommunicationBackend, call: Callable[[], object], repeats: int) -> float:
    return time_alternately(backend, [call], repeats)[0].median


def _all_reduce(backend: CommunicationBackend, own: Any) -> float:
    """Return the seconds of an all-reduce of float64 that gives the right sum."""
    own[:] = backend.rank + 1.0
    total = backend.all_reduce(own)
    expected = backend.world_size * (backend.world_size + 1) / 2
    if not np.all(total == expected):
        raise ArithmeticError(f"an all-reduce of {own.nbytes} bytes gave {total[:4]}, "
                              f"not {expected}")  # fmt: skip
    return _seconds(backend, lambda: backend.all_reduce(own, out=total), _REPEATS[own.nbytes])


def _is_shared(backend: CommunicationBackend, source: str) -> bool:
    """Tell whether every rank reads what the others write into memory from ``source``."""
    settings.write("MPISHARD_ARENA", source)
    memory = backend.allocate_shared(_ARENA_BYTES, np.uint8)
    if memory is None:
        return False
    memory[backend.rank] = backend.rank + 1
    backend.barrier()
    is_read = (memory[: backend.world_size] == np.arange(backend.world_size) + 1).all()
    return bool(backend.all_gather(np.array([is_read])).all())


def _try_on_gpu(operation: str) -> None:
    from mpi4py import MPI

    cupy: Any = load_cupy()
    comm = MPI.COMM_WORLD
    cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
    is_right = all(
        _is_right(comm, MPI.FLOAT, cupy, operation, length, waits)
        for length in _GPU_LENGTHS
        for waits in (True, False)
    )
    answers = comm.gather(is_right)
    if answers is not None:
        print(answer_line(all(answers)), flush=True)  # noqa: T201 - the doctor reads it


def _is_right(comm: Any, float32: Any, cupy: Any, operation: str, length: int, waits: bool) -> bool:
    """Tell whether ``operation``, or its non-blocking twin, gives this rank the right numbers."""
    rank, other = comm.rank, 1 - comm.rank
    first, second = (np.arange(length, dtype=np.float32) + number for number in (0, 1))
    own = cupy.asarray(first if rank == 0 else second)
    out = cupy.zeros(2 * length, np.float32)
    cupy.cuda.get_current_stream().synchronize()  # the library knows nothing of streams
    name = operation if waits else f"I{operation.lower()}"
    counts, starts = [length, length], [0, length]
    halves, half_starts = [length // 2] * 2, [0, length // 2]
    part = slice(rank * length // 2, (rank + 1) * length // 2)
    calls: dict[str, tuple[list[Any], Any]] = {
        "Allreduce": ([own, out[:length]], first + second),
        "Allgatherv": ([own, [out, counts, starts, float32]], np.append(first, second)),
        "Alltoallv": (
            [[own, halves, half_starts, float32], [out, halves, half_starts, float32]],
            np.append(first[part], second[part]),
        ),
        "Bcast": ([own], first),
        "Send": ([own, other], first),
    }
    arguments, expected = calls[operation]
    if operation == "Send" and rank == 1:
        name, arguments = ("Recv" if waits else "Irecv"), [out[:length], other]
    request = getattr(comm, name)(*arguments)
    if not waits:
        request.Wait()
    is_in_place = operation == "Bcast" or (operation == "Send" and rank == 0)
    found = cupy.asnumpy((own if is_in_place else out)[: expected.size])
    return bool(np.array_equal(found, expected))


if __name__ == "__main__":
    main()
