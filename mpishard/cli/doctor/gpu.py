"""What ``mpishard doctor`` finds of GPUs: the driver, CuPy, and MPI on GPU memory."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from typing import NamedTuple

from mpishard import settings
from mpishard.cli.doctor.causes import why_it_failed
from mpishard.cli.doctor.finding import Finding, Verdict, pip_install, some
from mpishard.cli.doctor.mpi import MPIInstallation
from mpishard.cli.doctor.probe import ask, python_command
from mpishard.cli.wording import bytes_text, counted

__all__ = ["look_at_gpus"]

_OPERATIONS = ("Allreduce", "Allgatherv", "Alltoallv", "Bcast", "Send")
"""What is tried on GPU memory, each with its twin that does not wait."""

_HANDED_OVER = {"Allgatherv", "Alltoallv", "Bcast"}
"""Of these, what mpishard hands pointers to GPU memory where MPISHARD_CUDA_AWARE=1."""

_DRIVER_SECONDS = 15
_CUPY_SECONDS = 60  # it may compile
_JOB_SECONDS = 30

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


class _Driver(NamedTuple):
    gpus: list[str]
    cuda: int
    """The newest major version of CUDA that it can run; 12 where it does not say."""


def look_at_gpus(mpi: MPIInstallation, quick: bool) -> Iterator[Finding]:
    """GPUs, CuPy, and unless ``quick`` each MPI operation on GPU memory."""
    driver, finding = _driver()
    yield finding
    cupy, works = _cupy(driver)
    yield cupy
    if not quick:
        yield _cuda_aware(mpi, works)


def _driver() -> tuple[_Driver | None, Finding]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, Finding("gpu.driver", Verdict.OK, "no CUDA driver here (no nvidia-smi)", None)
    query = "--query-gpu=name,memory.total,driver_version"
    answer = ask([program, query, "--format=csv,noheader"], _DRIVER_SECONDS)
    gpus = [line.strip() for line in answer.out.splitlines() if line.count(",") >= 2]
    if answer.code != 0 or not gpus:
        return None, Finding(
            "gpu.driver",
            Verdict.NOTE,
            f"nvidia-smi finds no GPU: {some(answer.reason)}",
            None,
            "sudo modprobe nvidia && nvidia-smi  # in a container: start it with --gpus all",
        )
    version = re.search(r"CUDA Version: (\d+)", ask([program], _DRIVER_SECONDS).out)
    driver = _Driver(gpus, int(version[1]) if version else 12)
    visible = settings.visible_gpus()
    chosen = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible}"
    number = gpus[0].rpartition(",")[2].strip()
    names = ", ".join(gpu.rpartition(",")[0] for gpu in gpus)
    text = f"{counted(len(gpus), 'GPU')}: {names}; driver {number}, CUDA {driver.cuda}{chosen}"
    return driver, Finding("gpu.driver", Verdict.OK, text, {"gpus": gpus, "cuda": driver.cuda})


def _cupy(driver: _Driver | None) -> tuple[Finding, bool]:
    """What of CuPy is there, and whether it computes."""
    found = {
        (distribution.name.lower(), distribution.version)
        for distribution in distributions()
        if re.fullmatch(r"cupy(-(cuda|rocm)[\w-]*)?", distribution.name or "", re.IGNORECASE)
    }
    packages = sorted(found)
    fitting = f"cupy-cuda{max(12, driver.cuda if driver else 12)}x"
    names = ", ".join(f"{name} {version}" for name, version in packages)
    if not packages and driver is None:
        return Finding("gpu.cupy", Verdict.OK, "not installed, and there is no GPU", None), False
    if not packages:
        text = "not installed, so that models cannot use the GPU"
        return Finding("gpu.cupy", Verdict.NOTE, text, None, pip_install(f"{fitting}[ctk]")), False
    if len(packages) > 1:
        unwanted = [name for name, _ in packages if name != fitting] or [packages[0][0]]
        return Finding(
            "gpu.cupy",
            Verdict.PROBLEM,
            f"installed several times, each over the files of the other: {names}",
            names,
            f"{_pip_uninstall(*unwanted)} && {pip_install('--force-reinstall', fitting)}",
        ), False
    answer = ask(python_command(_ASK_CUPY), _CUPY_SECONDS)
    if answer.found is None and driver is None:
        text = f"{names} is installed, and there is no GPU"
        return Finding("gpu.cupy", Verdict.OK, text, names), False
    if answer.found is None:
        name = packages[0][0]
        mend = pip_install(f"{name}[ctk]")  # what it needs of the CUDA toolkit, as wheels
        if name != fitting:
            mend = f"{_pip_uninstall(name)} && {pip_install(f'{fitting}[ctk]')}"
        text = f"{names} does not compute: {some(answer.reason)}"
        return Finding("gpu.cupy", Verdict.PROBLEM, text, names, mend), False
    memory = [bytes_text(nbytes) for nbytes in answer.found["memory"]]
    text = f"{names} computes on {counted(len(memory), 'GPU')} ({', '.join(memory)})"
    return Finding("gpu.cupy", Verdict.OK, text, {"package": names, **answer.found}), bool(memory)


def _pip_uninstall(*packages: str) -> str:
    return pip_install(*packages).replace(" install ", " uninstall -y ")


def _cuda_aware(mpi: MPIInstallation, cupy_works: bool) -> Finding:
    """Whether each MPI operation can be given GPU memory, tried in jobs of their own."""
    name = "gpu.cuda_aware"
    if not cupy_works:
        return Finding(name, Verdict.OK, "not tested: no GPU", None)
    if mpi.launcher is None:
        return Finding(name, Verdict.OK, "not tested: no MPI", None)
    works, text = {}, []
    for operation in _OPERATIONS:
        program = [sys.executable, "-m", "mpishard.cli.doctor.cuda_rank", operation]
        command = mpi.launcher.command(2, program)
        answer = ask(command, _JOB_SECONDS)
        works[operation] = answer.code == 0 and answer.found is True
        if works[operation]:
            text.append(f"{operation} right")
        elif answer.found is False:
            text.append(f"{operation} wrong")
        else:
            text.append(f"{operation} fails ({some(why_it_failed(answer, command).text, 60)})")
    return _judged(works, "of GPU memory: " + ", ".join(text))


def _judged(works: dict[str, bool], text: str) -> Finding:
    """Whether MPISHARD_CUDA_AWARE is as what was tried says that it should be."""
    is_able = all(works[operation] for operation in _HANDED_OVER)
    if settings.cuda_aware() and not is_able:
        text += "; MPISHARD_CUDA_AWARE=1 makes jobs crash or compute rubbish"
        return Finding("gpu.cuda_aware", Verdict.PROBLEM, text, works, "unset MPISHARD_CUDA_AWARE")
    if is_able and not settings.cuda_aware():
        text += "; mpishard copies through host memory, until it is told"
        return Finding("gpu.cuda_aware", Verdict.NOTE, text, works, "export MPISHARD_CUDA_AWARE=1")
    way = "gets pointers to it" if is_able else "gets copies in host memory"
    return Finding("gpu.cuda_aware", Verdict.OK, f"{text}; MPI {way}", works)
