"""What ``mpishard doctor`` finds of the packages that mpishard can use and does not need."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from mpishard import settings
from mpishard.cli.doctor.finding import Finding, Verdict, pip_install, some
from mpishard.cli.doctor.probe import ask, python_command

__all__ = ["look_at_packages"]

_GIVES = {
    "autograd": "gradients of losses written in NumPy (AutogradModel)",
    "h5py": "data sets that are read from a file sample by sample",
    "jax": "gradients for FunctionModel",
    "matplotlib": "plots of losses, traces and benchmarks",
    "numba": "update rules and copies of saves as compiled loops, with the same bits",
    "torch": "PyTorch modules as models (TorchModel)",
}
_IMPORT_SECONDS = 30


def look_at_packages() -> Iterator[Finding]:
    """Which optional packages are there; CuPy stands with the GPUs, mpi4py with MPI."""
    for package, gives in _GIVES.items():
        name = f"packages.{package}"
        try:
            number = version(package)
        except PackageNotFoundError:
            yield Finding(name, Verdict.OK, f"not installed; gives {gives}", None)
            continue
        if package == "numba":
            yield _numba(number, gives)
        else:
            yield Finding(name, Verdict.OK, f"{number}: {gives}", number)


def _numba(number: str, gives: str) -> Finding:
    """It knows which releases of NumPy it can work with, and refuses others."""
    if not settings.numba_is_allowed():
        text = f"{number}, and MPISHARD_NUMBA=off: {gives}"
        return Finding("packages.numba", Verdict.NOTE, text, number, "unset MPISHARD_NUMBA")
    answer = ask(python_command("import numba"), _IMPORT_SECONDS)
    if answer.code == 0:
        return Finding("packages.numba", Verdict.OK, f"{number}: {gives}", number)
    return Finding(
        "packages.numba",
        Verdict.NOTE,
        f"{number} cannot be imported, and loops run in NumPy: {some(answer.reason)}",
        number,
        pip_install("--upgrade", "numba"),
    )
