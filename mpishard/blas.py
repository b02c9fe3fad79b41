"""The kernels that multiply NumPy's matrices: OpenBLAS's own choice is not always the fastest.

To import this module before NumPy makes the choice, for this process and those that it starts.
OpenBLAS reads ``OPENBLAS_CORETYPE`` once, when NumPy is loaded. A choice is a function of the
processor alone and not of a measurement, because other kernels give other bits.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from mpishard import settings

_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX2_KERNELS = ("Haswell", "Zen")
_ZEN_3_AND_4 = 25


@dataclass(frozen=True, slots=True)
class Processor:
    """Return the fields of the first core in ``/proc/cpuinfo``; none if there is no such file."""

    vendor: str
    family: int
    flags: frozenset[str]

    @classmethod
    def of_this_machine(cls) -> Processor:
        """The processor that this process runs on."""
        facts: dict[str, str] = {}
        try:
            text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
        except OSError:
            text = ""
        for line in text.partition("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            facts[name.strip()] = value.strip()
        family = facts.get("cpu family", "")
        return cls(
            facts.get("vendor_id", ""),
            int(family) if family.isdecimal() else 0,
            frozenset(facts.get("flags", "").split()),
        )

    @property
    def has_avx512(self) -> bool:
        """True if it has the instructions of OpenBLAS's AVX-512 kernels."""
        return self.flags >= _AVX512

    @property
    def splits_avx512(self) -> bool:
        """True if it runs them in two halves, as Zen 4 does: then they gain nothing."""
        return self.vendor == "AuthenticAMD" and self.family == _ZEN_3_AND_4


def better_kernel(loaded: str | None, processor: Processor | None = None) -> str | None:
    """OPENBLAS_CORETYPE that NumPy should be loaded with, or None if it is well as it is.

    On AVX-512 processors that it does not know by name, OpenBLAS takes its AVX2 kernels, which
    multiply at half the speed of ``SkylakeX``. On Zen 4 it takes those of AVX-512, which are 5 to
    30 % slower there than ``Haswell``, most so for narrow matrices.

    Parameters
    ----------
    loaded : str or None
        The kernels that OpenBLAS has chosen by itself; None if it is not used.
    processor : Processor, optional
        Default: this machine's.
    """
    processor = processor or Processor.of_this_machine()
    if settings.openblas_kernel_is_set() or loaded is None or not processor.has_avx512:
        return None
    if processor.splits_avx512:
        return None if loaded in _AVX2_KERNELS else "Haswell"
    return "SkylakeX" if loaded in _AVX2_KERNELS else None


def choose_kernel(processor: Processor | None = None) -> None:
    """Set OPENBLAS_CORETYPE if NumPy is not loaded yet and the best kernels are known.

    They are on Zen 4. Elsewhere it depends on what OpenBLAS would choose, which only a process
    that has loaded it can tell, as ``mpishard run`` does for its ranks.
    """
    if "numpy" in sys.modules or settings.openblas_kernel_is_set():
        return
    processor = processor or Processor.of_this_machine()
    if processor.has_avx512 and processor.splits_avx512:
        settings.write("OPENBLAS_CORETYPE", "Haswell")


def loaded_kernel() -> str | None:
    """The kernels of the OpenBLAS that this process has loaded; None if it has none."""
    import threadpoolctl

    libraries = threadpoolctl.threadpool_info()
    return next((i["architecture"] for i in libraries if i["internal_api"] == "openblas"), None)


choose_kernel()
