"""Findings about two ranks that communicate and about GPUs, and the program of these ranks.

Without an argument the ranks communicate through mpishard. With ``hosts`` they also measure the
networks between them. With the name of an MPI operation they
test it on GPU memory. A library that is not built for CUDA crashes there, or moves wrong bytes:
each operation has a job of its own. Rank 0 prints the answer.
"""

from __future__ import annotations

import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import distributions
from itertools import product
from typing import Any

import numpy as np

from mpishard.base import Array, load_cupy, settings
from mpishard.cli.doctor.finding import Finding, pip_install, shortened
from mpishard.cli.doctor.host import open_processes
from mpishard.cli.doctor.mpi import RANK_VARIABLES, why_it_failed
from mpishard.cli.probe import answer_line, ask, python_command
from mpishard.cli.run.launcher import Host, Launcher, MPIInstallation
from mpishard.cli.wording import bytes_text, counted
from mpishard.communication import CommunicationBackend, init, load_mpi

_SIZES = (8, 2**20, 64 * 2**20)
"""Sizes of the arrays that are all-reduced, in bytes: each travels in another way."""

_LIMIT_SECONDS = {"two ranks": 30, "hosts": 60, "driver": 15, "cupy": 60}  # CuPy may compile

_HOSTS = "hosts"
_ROUND_TRIPS, _LARGE_ROUND_TRIPS, _LARGE_BYTES = 100, 5, 8 * 2**20


def examine_job(mpi: MPIInstallation) -> Iterator[Finding]:
    """Yield the end of a job of two ranks, its thread level, and the memory that they share.

    Nothing without a launcher, or with settings that ranks refuse: other findings say so.
    """
    if mpi.launcher is None:
        return
    try:
        settings.check()
    except ValueError:
        return
    # Directly with the launcher, because `mpishard run` would hide its faults, or mend them.
    command = mpi.launcher.command(2, [sys.executable, "-m", "mpishard.cli.doctor.job"])
    answer = ask(command, _LIMIT_SECONDS["two ranks"], RANK_VARIABLES)
    found = answer.found
    if answer.code != 0 or found is None:
        cause = why_it_failed(answer, command)
        # After an answer the end has failed: MPI_Finalize, or the launcher.
        how = "do not communicate" if found is None else "communicate, and do not end well"
        text = f"two ranks {how}: {cause.text}"
        yield Finding("job.round_trip", text, answer.code, cause.fix, is_problem=True)
        return
    where = f" on {found['hosts']}" if mpi.launcher.is_slurm else ""
    text = f"two ranks of {mpi.library}{where} start, compute right sums and end"
    yield Finding("job.round_trip", text, {key: found[key] for key in ("world_size", "nodes")})
    level, fix = found["level"], None
    text = f"MPI_THREAD_{level}"
    if level != "MULTIPLE":
        text += " and not MULTIPLE: no thread moves data while a rank computes"
        # mpi4py asks for MULTIPLE unless one of these is set, or the library was built without it.
        fix = "unset MPI4PY_RC_THREAD_LEVEL MPI4PY_RC_THREADS MPICH_MAX_THREAD_SAFETY"
    yield Finding("job.threads", text, level, fix)
    is_shared, fix = found["is_shared"], None
    text = "the ranks of a machine share memory (memfd)"
    if not is_shared:
        why, fix = "MPISHARD_ARENA is off", "unset MPISHARD_ARENA"
        if settings.shares_memory():
            why, fix = "one rank cannot open the other's memory (memfd)", open_processes()
        text = f"{why}: ranks of a machine send messages, which is several times slower"
    yield Finding("job.arena", text, {"taken": "memfd" if is_shared else None}, fix)


def measure_hosts(
    launcher: Launcher, hosts: Sequence[Host], variables: Mapping[str, str]
) -> tuple[list[tuple[float, float]] | None, str, str]:
    """Run a job of one rank on each host.

    Returns
    -------
    found : list of (float, float), or None
        Seconds of a round trip, and bytes per second, between the first host and each other one;
        None if the job has failed.
    cause, fix : str
        The cause of the failure, and the command that fixes it.
    """
    passed_on = [*settings.forwarded_variables(), *RANK_VARIABLES, *variables]
    program = [sys.executable, "-m", "mpishard.cli.doctor.job", _HOSTS]
    command = launcher.command(len(hosts), program, hosts=hosts, variables=passed_on)
    answer = ask(command, _LIMIT_SECONDS["hosts"], {**RANK_VARIABLES, **variables})
    if answer.code == 0 and answer.found is not None:
        return answer.found, "", ""
    cause = why_it_failed(answer, command)
    return None, cause.text, cause.fix


# -------------------------------------------------------------------------------------------- GPUs

_OPERATIONS = ("Allreduce", "Allgatherv", "Alltoallv", "Bcast", "Send")
"""Operations that are tested on GPU memory, each of them blocking and non-blocking."""

_HANDED_OVER = "Send"
"""Operation to which mpishard passes pointers to GPU memory if MPISHARD_CUDA_AWARE=1."""

_ASK_CUPY = """
import cupy
runtime = cupy.cuda.runtime
count = runtime.getDeviceCount()
for number in range(count):
    with cupy.cuda.Device(number):
        a = cupy.ones((64, 64), "float32")
        assert float((a @ a + 1).sum()) == 64 * 64 * 65
answer({"runtime": runtime.runtimeGetVersion(), "driver": runtime.driverGetVersion(),
        "memory": [runtime.getDeviceProperties(i)["totalGlobalMem"] for i in range(count)]})
"""


def examine_gpus(mpi: MPIInstallation, quick: bool) -> Iterator[Finding]:
    """Yield GPUs, CuPy and, unless ``quick``, the MPI operations that work on GPU memory.

    Nothing on a machine without a driver and without CuPy.
    """
    driver = _driver()
    if driver is not None:
        yield driver
    known = driver.value if driver is not None and isinstance(driver.value, dict) else {}
    cupy = _cupy(known.get("cuda"))
    if cupy is None:
        return
    yield cupy
    # The value is a dict only if CuPy has computed on a GPU.
    has_gpu = isinstance(cupy.value, dict) and cupy.value["memory"]
    if has_gpu and mpi.launcher is not None and not quick:
        yield _cuda_aware(mpi.launcher)


def _driver() -> Finding | None:
    """Find the GPUs, and the newest major version of CUDA of their driver; None without one."""
    name, program = "gpu.driver", shutil.which("nvidia-smi")
    if program is None:
        return None
    query = "--query-gpu=name,memory.total,driver_version"
    answer = ask([program, query, "--format=csv,noheader"], _LIMIT_SECONDS["driver"])
    gpus = [line.strip() for line in answer.out.splitlines() if line.count(",") >= 2]
    if answer.code != 0 or not gpus:
        text = f"nvidia-smi finds no GPU: {shortened(answer.reason)}"
        fix = "sudo modprobe nvidia && nvidia-smi  # in a container: start it with --gpus all"
        return Finding(name, text, None, fix)
    # No field of --query-gpu has the version of CUDA: it stands in the table for people.
    version = re.search(r"CUDA Version: (\d+)", ask([program], _LIMIT_SECONDS["driver"]).out)
    cuda = int(version[1]) if version else 12
    visible = settings.visible_gpus()
    chosen = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible}"
    number = gpus[0].rpartition(",")[2].strip()
    names = ", ".join(gpu.rpartition(",")[0] for gpu in gpus)
    text = f"{counted(len(gpus), 'GPU')}: {names}; driver {number}, CUDA {cuda}{chosen}"
    return Finding(name, text, {"gpus": gpus, "cuda": cuda})


def _cupy(cuda: int | None) -> Finding | None:
    """Find the packages of CuPy, and test whether it computes; None without CuPy and GPU."""
    packages = sorted(
        {
            (distribution.name.lower(), distribution.version)
            for distribution in distributions()
            if re.fullmatch(r"cupy(-(cuda|rocm)[\w-]*)?", distribution.name or "", re.IGNORECASE)
        }
    )
    # CuPy 14 has no wheels for releases of CUDA before 12.
    fitting = f"cupy-cuda{max(12, cuda or 12)}x"
    names = ", ".join(f"{name} {version}" for name, version in packages)
    uninstall = pip_install().replace(" install ", " uninstall -y ")
    if not packages and cuda is None:
        return None
    # ctk: the parts of CUDA that CuPy needs beside the driver, as wheels. CuPy 13 has none.
    wanted = f"{fitting}[ctk]>=14"
    install = pip_install(wanted)
    if not packages:
        text = "not installed, so that models cannot use the GPU"
        return Finding("gpu.cupy", text, None, install)
    # All of them install the folder cupy, so the last one has overwritten parts of the first.
    if len(packages) > 1:
        unwanted = [name for name, _ in packages if name != fitting] or [packages[0][0]]
        text = f"several packages are installed over each other's files: {names}"
        fix = f"{uninstall}{' '.join(unwanted)} && {pip_install('--force-reinstall', wanted)}"
        return Finding("gpu.cupy", text, names, fix, is_problem=True)
    answer = ask(python_command(_ASK_CUPY), _LIMIT_SECONDS["cupy"])
    if answer.found is not None:
        memory = [bytes_text(nbytes) for nbytes in answer.found["memory"]]
        text = f"{names} computes on {counted(len(memory), 'GPU')} ({', '.join(memory)})"
        return Finding("gpu.cupy", text, {"package": names, **answer.found})
    if cuda is None:
        return Finding("gpu.cupy", f"{names} is installed, and there is no GPU", names)
    name, text = packages[0][0], f"{names} does not compute: {shortened(answer.reason)}"
    fix = install if name == fitting else f"{uninstall}{name} && {install}"
    return Finding("gpu.cupy", text, names, fix, is_problem=True)


def _cuda_aware(launcher: Launcher) -> Finding:
    """Test each operation on GPU memory in a job of its own, and judge MPISHARD_CUDA_AWARE."""
    works, texts, fix = {}, [], None
    for operation in _OPERATIONS:
        program = [sys.executable, "-m", "mpishard.cli.doctor.job", operation]
        command = launcher.command(2, program)
        answer = ask(command, _LIMIT_SECONDS["two ranks"])
        # A crash, a rank that hangs and wrong numbers all forbid the operation.
        works[operation] = answer.code == 0 and answer.found is True
        how = "right" if works[operation] else "wrong"
        if answer.found is not False and not works[operation]:
            how = f"fails ({shortened(why_it_failed(answer, command).text, 60)})"
        texts.append(f"{operation} {how}")
    text = f"on GPU memory: {', '.join(texts)}"
    is_able, is_set = works[_HANDED_OVER], settings.cuda_aware()
    if is_set and not is_able:
        text += "; MPISHARD_CUDA_AWARE=1 makes jobs crash or compute wrong results"
        fix = "unset MPISHARD_CUDA_AWARE"
    elif is_able and not is_set:
        text += "; without MPISHARD_CUDA_AWARE=1 mpishard copies through host memory"
        fix = "export MPISHARD_CUDA_AWARE=1"
    else:
        text += f"; mpishard passes {'pointers to it' if is_able else 'copies in host memory'}"
    return Finding("gpu.cuda_aware", text, works, fix, is_problem=not is_able)


# ---------------------------------------------------------------------------- program of the ranks


def main() -> None:
    """Run as one rank."""
    if sys.argv[1:] == [_HOSTS]:
        _measure_networks()
        return
    if sys.argv[1:]:
        _try_on_gpu(sys.argv[1])
        return
    backend = init("mpi")
    for nbytes in _SIZES:
        _all_reduce(backend, np.empty(nbytes // 8))
    arena = backend.allocate_arena(_SIZES[-1] // 8, np.float64)
    if arena is not None:
        arena.mine[:] = backend.rank + 1.0
        arena.reduce_in_place().wait()
        _check_sum(backend, arena.mine)
    mpi = load_mpi()
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    found = {
        "world_size": backend.world_size,
        "nodes": len(set(backend.nodes)),
        "hosts": settings.slurm_step_nodes() or socket.gethostname(),
        "level": next(n for n in levels if getattr(mpi, f"THREAD_{n}") == mpi.Query_thread()),
        "is_shared": arena is not None,
    }
    if backend.rank == 0:
        print(answer_line(found), flush=True)  # noqa: T201 - the doctor reads it
    backend.shutdown()


def _all_reduce(backend: CommunicationBackend, own: Array) -> None:
    """Sum float64 over the ranks, and check the result."""
    own[:] = backend.rank + 1.0
    _check_sum(backend, backend.all_reduce(own))


def _check_sum(backend: CommunicationBackend, total: Array) -> None:
    expected = backend.world_size * (backend.world_size + 1) / 2
    if not np.all(total == expected):
        text = f"an all-reduce of {total.nbytes} bytes gave {total[:4]}, not {expected}"
        raise ArithmeticError(text)


def _measure_networks() -> None:
    """Measure messages between the first rank and each other one, one after the other."""
    backend = init("mpi")
    _all_reduce(backend, np.empty(1024))
    comm = load_mpi().COMM_WORLD
    found = []
    for other in range(1, backend.world_size):
        times = []
        for nbytes, count in ((8, _ROUND_TRIPS), (_LARGE_BYTES, _LARGE_ROUND_TRIPS)):
            data = np.zeros(nbytes, np.uint8)
            seconds = []
            for _ in range(count if backend.rank in (0, other) else 0):
                started = time.perf_counter()
                if backend.rank == 0:
                    comm.Send(data, other)
                    comm.Recv(data, other)
                else:
                    comm.Recv(data, 0)
                    comm.Send(data, 0)
                seconds.append(time.perf_counter() - started)
            times.append(float(np.median(seconds)) if seconds else 0.0)
        backend.barrier()
        if backend.rank == 0:
            found.append((times[0], 2 * _LARGE_BYTES / times[1]))
    if backend.rank == 0:
        print(answer_line(found), flush=True)  # noqa: T201 - the doctor reads it
    backend.shutdown()


def _try_on_gpu(operation: str) -> None:
    from mpi4py import MPI

    cupy = load_cupy()
    comm = MPI.COMM_WORLD
    # Two ranks on one GPU are enough for the test.
    cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
    # A list: a rank that left out the rest after a wrong result would leave the other waiting.
    cases = product((16, 2**20), (True, False))  # short and long messages take different ways
    are_right = [_is_right(comm, cupy, operation, *case) for case in cases]
    answers = comm.gather(all(are_right))
    if answers is not None:
        print(answer_line(all(answers)), flush=True)  # noqa: T201 - the doctor reads it


def _is_right(comm: Any, cupy: Any, operation: str, length: int, waits: bool) -> bool:
    """Return whether ``operation``, or its non-blocking twin, gives this rank right numbers."""
    rank, other = comm.rank, 1 - comm.rank
    first, second = (np.arange(length, dtype=np.float32) + number for number in (0, 1))
    own = cupy.asarray(first if rank == 0 else second)
    out = cupy.zeros(2 * length, np.float32)
    cupy.cuda.get_current_stream().synchronize()  # MPI libraries do not wait for streams
    halves = [length // 2] * 2
    part = slice(rank * length // 2, (rank + 1) * length // 2)
    # Arguments, the array that holds the result, and the expected numbers at its start.
    calls: dict[str, tuple[list[object], Array, Array]] = {
        "Allreduce": ([own, out[:length]], out, first + second),
        "Allgatherv": ([own, [out, [length] * 2]], out, np.append(first, second)),
        "Alltoallv": ([[own, halves], [out, halves]], out, np.append(first[part], second[part])),
        "Bcast": ([own], own, first),
        "Send": ([own, other], own, first),
        "Recv": ([out[:length], other], out, first),
    }
    # A send has two sides; all other operations are the same on both ranks.
    name = "Recv" if operation == "Send" and rank == 1 else operation
    arguments, result, expected = calls[name]
    request = getattr(comm, name if waits else f"I{name.lower()}")(*arguments)
    if not waits:
        request.Wait()
    return bool(np.array_equal(cupy.asnumpy(result[: expected.size]), expected))


if __name__ == "__main__":
    main()
