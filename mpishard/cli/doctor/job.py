"""Findings about a job of two ranks that communicate, and the program of these ranks.

Without an argument the ranks communicate through mpishard, and measure. With the name of an MPI
operation they try it on GPU memory. A library that is not built for CUDA crashes on that, or moves
wrong bytes, so that each operation has a job of its own. Rank 0 answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpishard import settings
from mpishard.cli.doctor.finding import Finding, note, ok, problem
from mpishard.cli.doctor.mpi import MPIInstallation, why_it_failed
from mpishard.cli.doctor.shm import open_processes
from mpishard.cli.probe import answer_line, ask
from mpishard.cli.wording import bytes_text, milliseconds
from mpishard.communication import CommunicationBackend, init
from mpishard.devices import load_cupy
from mpishard.observe import time_alternately

__all__ = ["SIZES", "look_at_a_job"]

SIZES = (8, 2**20, 64 * 2**20)
"""Bytes that are all-reduced."""

_LIMIT_SECONDS = 30

# A rank that waits for one that never comes gives up before the doctor does.
_VARIABLES = {"MPISHARD_TIMEOUT": "20", "MPISHARD_WARN_AFTER": "0", "MPISHARD_TRACE": ""}


def look_at_a_job(mpi: MPIInstallation) -> Iterator[Finding]:
    """Yield whether two ranks start and get right sums, how fast, and where they share memory."""
    name = "job.round_trip"
    if mpi.launcher is None:
        yield ok(name, "not tried: there is no MPI, or no launcher of it", None)
        return
    try:
        settings.check()
    except ValueError:
        yield ok(name, "not tried: ranks refuse the settings, see above", None)
        return
    command = mpi.launcher.command(2, [sys.executable, "-m", "mpishard.cli.doctor.job"])
    answer = ask(command, _LIMIT_SECONDS, _VARIABLES)
    found = answer.found
    if answer.code != 0 or found is None:
        cause = why_it_failed(answer, command)
        how = "do not communicate" if found is None else "communicate, and do not end well"
        yield problem(name, f"two ranks {how}: {cause.text}", answer.code, cause.mend)
        return
    text = f"two ranks of {mpi.library} start, agree on sums and end"
    yield ok(name, text, {key: found[key] for key in ("world_size", "nodes")})
    yield ok("job.barrier", milliseconds(found["barrier"]), found["barrier"])
    messages, arena = found["messages"], {str(SIZES[-1]): found["arena"]}
    text = f"by messages: {_speeds(messages)}"
    if found["arena"] is not None:
        text += f"; in the arena: {_speeds(arena)}"
    yield ok("job.all_reduce", text, {"messages": messages, "arena": arena})
    name = "job.arena"
    if found["arena"] is not None:
        yield ok(name, "the ranks of a machine share memory (memfd)", {"taken": "memfd"})
        return
    why, mend = "MPISHARD_ARENA is off", "unset MPISHARD_ARENA"
    if settings.shares_memory():
        why, mend = "one rank cannot open the other's memory (memfd)", open_processes()
    text = f"{why}: ranks of a machine send messages, which is several times slower"
    yield note(name, text, {"taken": None}, mend)


def _speeds(seconds: dict[str, float]) -> str:
    texts = []
    for size, time in seconds.items():
        rate = f" ({int(size) / time / 1e9:.2g} GB/s)" if int(size) >= SIZES[1] else ""
        texts.append(f"{bytes_text(int(size))} {milliseconds(time)}{rate}")
    return ", ".join(texts)


_REPEATS = dict(zip(SIZES, (50, 20, 3), strict=True))
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
