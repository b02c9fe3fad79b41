"""The library that multiplies float32 matrices: NumPy's, or oneDNN if the user has chosen it.

The two round differently. A job must not get other bits because a machine was busy when it began,
so no job measures: `mpishard doctor` measures both libraries, and ``mpishard doctor --products``
keeps a choice for this processor. All ranks of a job take rank 0's choice.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mpishard.base import settings
from mpishard.base.arrays import Array
from mpishard.base.blas import Processor
from mpishard.base.onednn import Library, find_library, reason_for_no_library

_log = logging.getLogger("mpishard")

FASTER = 1.1
"""Ratio of two speeds from which another choice is worth other bits."""

_FLOAT32 = np.dtype(np.float32)  # in the machine's byte order, which oneDNN expects
_LEAST_SIZE = 2**20
"""Rows x inner dim x columns from which oneDNN multiplies: a call takes 3 us longer than NumPy's.
"""

_agreed: list[str] = []
"""The choice of rank 0, once this process is a rank of a job."""


def kept_choices() -> Path:
    """Return the file of the kept choices: a JSON object, processor -> "numpy" or "onednn"."""
    return settings.cache_folder() / "products.json"


def choice() -> str:
    """Return "numpy" or "onednn": MPISHARD_PRODUCTS, or what is kept for this processor."""
    given = settings.float32_products()
    return _read().get(Processor.of_this_machine().name, "numpy") if given == "auto" else given


def keep(chosen: str) -> None:
    """Keep a choice for this processor, "numpy" or "onednn"."""
    file = kept_choices()
    file.parent.mkdir(parents=True, exist_ok=True)
    choices = {**_read(), Processor.of_this_machine().name: chosen}
    # Renamed, so that a job that begins now reads the old file or the new one.
    whole = file.with_suffix(".part")
    whole.write_text(json.dumps(choices, indent=1) + "\n", encoding="utf-8")
    whole.replace(file)


def _read() -> dict[str, str]:
    file = kept_choices()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    # An exception here would end one rank while others wait for it in `init`.
    except (OSError, ValueError) as error:
        _log.warning("NumPy multiplies float32, because %s cannot be read: %s", file, error)
        return {}
    is_choice = isinstance(found, dict) and all(v in ("numpy", "onednn") for v in found.values())
    return found if is_choice else {}


def agree(chosen: str) -> None:
    """Take rank 0's choice for the rest of this process."""
    _agreed[:] = [chosen]
    float32_library.cache_clear()


@functools.cache  # Each product asks.
def float32_library() -> Library | None:
    """Return the oneDNN library if it multiplies float32 in this process; None if NumPy does.

    oneDNN computes on the calling thread alone. So NumPy multiplies if BLAS has several threads.

    Raises
    ------
    ValueError
        If MPISHARD_PRODUCTS is ``onednn``, and there is no such library.
    """
    if (_agreed or [choice()])[0] == "numpy" or _blas_threads() > 1:
        return None
    found = find_library()
    if found is None and settings.float32_products() == "onednn":
        raise ValueError(
            f"MPISHARD_PRODUCTS=onednn, but {reason_for_no_library()}; NumPy multiplies with "
            "MPISHARD_PRODUCTS=numpy"
        )
    return found


def float32_products() -> str:
    """Return the name of the library that multiplies float32: ``NumPy``, or ``oneDNN 3.12.0``."""
    found = float32_library()
    return "NumPy" if found is None else f"oneDNN {found.version}"


def _blas_threads() -> int:
    # Imported here: every process imports this module, and few ask.
    import threadpoolctl

    found = [i["num_threads"] for i in threadpoolctl.threadpool_info() if i["user_api"] == "blas"]
    return max(found, default=1)


def multiply_float32(
    a: Array, b: Array, out: Array | None = None, bias: Array | None = None
) -> Array | None:
    """Return ``a @ b + bias`` by oneDNN; None if NumPy is to compute it.

    Parameters
    ----------
    a, b : Array
        Arrays of NumPy, of shapes (..., N, K) and (..., K, M).
    out : Array, optional
        Array for the result. If not given, a new one is made.
    bias : Array, optional
        Vector of shape (M,) that is added to each row.
    """
    one = float32_library()
    # NumPy's products with a vector take a third of oneDNN's time, and those of attention's heads,
    # which are batches, a tenth less.
    if one is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] == 1 or b.shape[1] == 1:
        return None
    if a.size * b.shape[1] < _LEAST_SIZE:
        return None
    if out is None:
        out = np.empty((a.shape[0], b.shape[1]), np.float32)
    # All, because a user's samples may be float64, and a total wider than its parts.
    is_float32 = a.dtype == b.dtype == out.dtype == _FLOAT32
    return out if is_float32 and one.multiply(a, b, out, bias) else None


# --------------------------------------------------------------------------------- the measurement

_SHAPES = ((64, 1024, 1024), (1024, 256, 1024), (1024, 1024, 256))
"""Rows, inputs and outputs of linear layers: of an MLP, and of a transformer."""


def speeds() -> dict[str, float]:
    """Measure floating-point operations per second of NumPy and, if it is found, oneDNN.

    It takes a second. Each of the products of a linear layer's step is computed by both in turn,
    and the fastest of seven counts.
    """
    calls: dict[str, Callable[[Array, Array, Array], object]] = {"numpy": np.matmul}
    found = find_library()
    if found is not None:
        calls["onednn"] = found.multiply
    seconds = dict.fromkeys(calls, 0.0)
    for rows, inputs, outputs in _SHAPES:
        x, w, d = (
            np.ones(shape, np.float32)
            for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )
        for a, b in ((x, w.T), (d, w), (d.T, x)):
            out = np.empty((a.shape[0], b.shape[1]), np.float32)
            best = dict.fromkeys(calls, float("inf"))
            for _ in range(7):
                for name, call in calls.items():
                    # The thread's own clock, which stops while other programs use its core.
                    start = time.thread_time()
                    call(a, b, out)
                    best[name] = min(best[name], time.thread_time() - start)
            seconds = {name: seconds[name] + best[name] for name in calls}
    operations = sum(6 * rows * inputs * outputs for rows, inputs, outputs in _SHAPES)
    return {name: operations / seconds[name] for name in calls}
