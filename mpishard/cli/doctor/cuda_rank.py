"""What `mpishard doctor` starts on two ranks for each MPI operation: calls on GPU memory.

A library that is not built for CUDA crashes on it, or moves rubbish: so each has its own job.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from mpishard.cli.doctor.probe import answer_line
from mpishard.devices import load_cupy

__all__: list[str] = []

_LENGTHS = (16, 2**20)  # small messages and large ones go different ways


def main() -> None:
    """One rank's part; rank 0 answers whether every rank got what it should."""
    from mpi4py import MPI

    cupy: Any = load_cupy()
    comm = MPI.COMM_WORLD
    cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
    is_right = all(
        _is_right(comm, MPI.FLOAT, cupy, sys.argv[1], length, waits)
        for length in _LENGTHS
        for waits in (True, False)
    )
    answers = comm.gather(is_right)
    if answers is not None:
        print(answer_line(all(answers)), flush=True)  # noqa: T201 - it is read by the doctor


def _is_right(comm: Any, float32: Any, cupy: Any, operation: str, length: int, waits: bool) -> bool:
    """Whether ``operation``, or its twin that does not wait, gives this rank what it should."""
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
