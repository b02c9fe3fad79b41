"""The machine's part in the bits of a result: versions, kernels, threads."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import numpy as np
import threadpoolctl

from mpishard.base import float32_products, numba_module


def numerics_fingerprint() -> dict[str, str]:
    """Return the versions, kernels and threads that the bits of this process's results depend on.

    Two processes that differ in any of them may round differently: BLAS kernels and numbers of
    threads add products in other orders, and NumPy's vector instructions, and numba's loops over
    float32, have functions of their own.

    Returns
    -------
    dict of str to str
        ``numpy``: its version; ``processor``: the architecture; ``simd``: the vector instructions
        that NumPy found; ``blas``: its library and version; ``blas_kernel``, ``blas_threads``:
        the library's choices, "unknown" for a library that threadpoolctl does not know;
        ``loops``: numba's version, or "NumPy"; ``products``: what multiplies float32, "NumPy" or
        oneDNN's version. GPUs are not described.
    """
    # None if a setting turns it off, too: the fingerprint is of what computes here.
    numba = numba_module()
    # NumPy chooses vector instructions when it is imported; `exp` differs in them.
    simd = np.show_config(mode="dicts").get("SIMD Extensions", {})
    libraries = [i for i in threadpoolctl.threadpool_info() if i["user_api"] == "blas"]
    # SciPy may have loaded another one, which NumPy does not use.
    libraries.sort(key=lambda library: "numpy" not in library["filepath"])
    blas = libraries[0] if libraries else {}
    return {
        "numpy": np.__version__,
        "processor": platform.machine(),
        "simd": " ".join(simd.get("found", ())),
        "blas": f"{blas['internal_api']} {blas['version']}" if blas else "unknown",
        "blas_kernel": str(blas.get("architecture", "unknown")),
        "blas_threads": str(blas.get("num_threads", "unknown")),
        "loops": "NumPy" if numba is None else f"numba {numba.__version__}",
        "products": float32_products(),
    }


def numerics_differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describe the differences of two fingerprints; empty if there are none.

    Examples
    --------
    >>> numerics_differences({"numpy": "2.3", "blas_threads": "1"},
    ...                      {"numpy": "2.4", "blas_threads": "1"})
    ['numpy was 2.3 and is 2.4']
    """
    return [
        f"{name} was {before.get(name)} and is {now.get(name)}"
        # Names of both: a checkpoint of another release may lack some, or have others.
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
    ]
