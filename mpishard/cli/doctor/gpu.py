"""Findings about GPUs: the driver, CuPy, and MPI calls on GPU memory."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import distributions

from mpishard import settings
from mpishard.cli.doctor.finding import Finding, note, ok, pip_install, problem, shortened
from mpishard.cli.doctor.mpi import MPIInstallation, why_it_failed
from mpishard.cli.probe import ask, python_command
from mpishard.cli.wording import bytes_text, counted

__all__ = ["look_at_gpus"]

_OPERATIONS = ("Allreduce", "Allgatherv", "Alltoallv", "Bcast", "Send")
"""Operations that are tried on GPU memory, each blocking and non-blocking."""

_HANDED_OVER = ("Allgatherv", "Alltoallv", "Bcast")
"""Those to which mpishard gives pointers to GPU memory if MPISHARD_CUDA_AWARE=1."""

_LIMIT_SECONDS = {"driver": 15, "cupy": 60, "job": 30}  # CuPy may compile

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


def look_at_gpus(mpi: MPIInstallation, quick: bool) -> Iterator[Finding]:
    """Yield GPUs, CuPy, and unless ``quick`` the MPI operations that work on GPU memory."""
    driver = _driver()
    yield driver
    cuda = driver.value and driver.value["cuda"]
    cupy = _cupy(cuda)
    yield cupy
    if quick:
        return
    if not (isinstance(cupy.value, dict) and cupy.value["memory"]):
        yield ok("gpu.cuda_aware", "not tested: no GPU", None)
    elif mpi.launcher is None:
        yield ok("gpu.cuda_aware", "not tested: no MPI", None)
    else:
        yield _cuda_aware(mpi)


def _driver() -> Finding:
    """Find GPUs, and the newest major version of CUDA that their driver can run."""
    name, program = "gpu.driver", shutil.which("nvidia-smi")
    if program is None:
        return ok(name, "no CUDA driver here (no nvidia-smi)", None)
    query = "--query-gpu=name,memory.total,driver_version"
    answer = ask([program, query, "--format=csv,noheader"], _LIMIT_SECONDS["driver"])
    gpus = [line.strip() for line in answer.out.splitlines() if line.count(",") >= 2]
    if answer.code != 0 or not gpus:
        text = f"nvidia-smi finds no GPU: {shortened(answer.reason)}"
        mend = "sudo modprobe nvidia && nvidia-smi  # in a container: start it with --gpus all"
        return note(name, text, None, mend)
    said = re.search(r"CUDA Version: (\d+)", ask([program], _LIMIT_SECONDS["driver"]).out)
    cuda = int(said[1]) if said else 12
    visible = settings.visible_gpus()
    chosen = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible}"
    number = gpus[0].rpartition(",")[2].strip()
    names = ", ".join(gpu.rpartition(",")[0] for gpu in gpus)
    text = f"{counted(len(gpus), 'GPU')}: {names}; driver {number}, CUDA {cuda}{chosen}"
    return ok(name, text, {"gpus": gpus, "cuda": cuda})


def _cupy(cuda: int | None) -> Finding:
    """Find the packages of CuPy, and tell whether it computes with this version of CUDA."""
    packages = sorted({
        (distribution.name.lower(), distribution.version)
        for distribution in distributions()
        if re.fullmatch(r"cupy(-(cuda|rocm)[\w-]*)?", distribution.name or "", re.IGNORECASE)
    })  # fmt: skip
    fitting = f"cupy-cuda{max(12, cuda or 12)}x"
    names = ", ".join(f"{name} {version}" for name, version in packages)
    uninstall = pip_install().replace(" install ", " uninstall -y ")
    if not packages:
        if cuda is None:
            return ok("gpu.cupy", "not installed, and there is no GPU", None)
        text = "not installed, so that models cannot use the GPU"
        return note("gpu.cupy", text, None, pip_install(f"{fitting}[ctk]"))
    if len(packages) > 1:
        unwanted = [name for name, _ in packages if name != fitting] or [packages[0][0]]
        text = f"installed several times, each over the files of the other: {names}"
        mend = f"{uninstall}{' '.join(unwanted)} && {pip_install('--force-reinstall', fitting)}"
        return problem("gpu.cupy", text, names, mend)
    answer = ask(python_command(_ASK_CUPY), _LIMIT_SECONDS["cupy"])
    if answer.found is not None:
        memory = [bytes_text(nbytes) for nbytes in answer.found["memory"]]
        text = f"{names} computes on {counted(len(memory), 'GPU')} ({', '.join(memory)})"
        return ok("gpu.cupy", text, {"package": names, **answer.found})
    if cuda is None:
        return ok("gpu.cupy", f"{names} is installed, and there is no GPU", names)
    name = packages[0][0]
    mend = pip_install(f"{fitting}[ctk]")  # ctk: parts of the CUDA toolkit, as wheels
    if name != fitting:
        mend = f"{uninstall}{name} && {mend}"
    text = f"{names} does not compute: {shortened(answer.reason)}"
    return problem("gpu.cupy", text, names, mend)


def _cuda_aware(mpi: MPIInstallation) -> Finding:
    """Try each operation on GPU memory, in a job of its own, and judge MPISHARD_CUDA_AWARE."""
    name, works, texts = "gpu.cuda_aware", {}, []
    assert mpi.launcher is not None
    for operation in _OPERATIONS:
        program = [sys.executable, "-m", "mpishard.cli.doctor.job", operation]
        command = mpi.launcher.command(2, program)
        answer = ask(command, _LIMIT_SECONDS["job"])
        works[operation] = answer.code == 0 and answer.found is True
        how = "right" if works[operation] else "wrong"
        if answer.found is not False and not works[operation]:
            how = f"fails ({shortened(why_it_failed(answer, command).text, 60)})"
        texts.append(f"{operation} {how}")
    text = f"of GPU memory: {', '.join(texts)}"
    is_able = all(works[operation] for operation in _HANDED_OVER)
    if settings.cuda_aware() and not is_able:
        text += "; MPISHARD_CUDA_AWARE=1 makes jobs crash or compute wrong results"
        return problem(name, text, works, "unset MPISHARD_CUDA_AWARE")
    if is_able and not settings.cuda_aware():
        text += "; mpishard copies through host memory, until it is told"
        return note(name, text, works, "export MPISHARD_CUDA_AWARE=1")
    way = "gets pointers to it" if is_able else "gets copies in host memory"
    return ok(name, f"{text}; MPI {way}", works)
