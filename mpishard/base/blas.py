"""The choice of OpenBLAS's kernels for NumPy's products; its own choice is not always the fastest.

OpenBLAS reads ``OPENBLAS_CORETYPE`` once, when NumPy is loaded, so that a launcher must set it:
``mpishard run`` does. The choice is a function of the processor alone and not of a measurement,
because other kernels give other bits.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpishard.base import settings

_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}  # of OpenBLAS's AVX-512 kernels
_AVX2_KERNELS = ("Haswell", "Zen")
_ZEN_3_AND_4 = 25


@dataclass(frozen=True, slots=True)
class Processor:
    """The fields of the first core in ``/proc/cpuinfo``; empty if there is no such file."""

    vendor: str
    family: int
    flags: frozenset[str]
    name: str = ""
    """Its name, with the numbers that tell generations apart where a virtual machine hides it."""

    @classmethod
    def of_this_machine(cls) -> Processor:
        """Return the processor on which this process runs."""
        facts: dict[str, str] = {}
        try:
            text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
        # Other systems than Linux have no such file. Then no kernel is chosen.
        except OSError:
            text = ""
        for line in text.partition("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            facts[name.strip()] = value.strip()
        family = facts.get("cpu family", "")
        return cls(
            facts.get("vendor_id", ""),
            # Arm's processors list no family; 0 is no family of AMD.
            int(family) if family.isdecimal() else 0,
            frozenset(facts.get("flags", "").split()),
            _name(facts),
        )

    @property
    def splits_avx512(self) -> bool:
        """Whether it runs AVX-512 in two halves, as Zen 4 does, so that it gains nothing."""
        return self.vendor == "AuthenticAMD" and self.family == _ZEN_3_AND_4


def _name(facts: Mapping[str, str]) -> str:
    name = facts.get("model name") or platform.machine()
    family, model = facts.get("cpu family"), facts.get("model")
    return f"{name} (family {family}, model {model})" if family and model else name


def better_kernel(loaded: str | None, processor: Processor | None = None) -> str | None:
    """Return the OPENBLAS_CORETYPE with which NumPy is faster; None if it needs no other.

    OpenBLAS uses its AVX2 kernels on AVX-512 processors that it does not know by name. They
    multiply at half the speed of ``SkylakeX``. On Zen 4 it uses its AVX-512 kernels, which are 5 to
    30 % slower there than ``Haswell``, most of all for narrow matrices.

    Parameters
    ----------
    loaded : str or None
        The kernels that OpenBLAS has chosen by itself; None if NumPy does not use OpenBLAS.
    processor : Processor, optional
        The processor. Default: that of this machine.
    """
    processor = processor or Processor.of_this_machine()
    if settings.openblas_kernel_is_set() or loaded is None or not processor.flags >= _AVX512:
        return None
    if processor.splits_avx512:
        return None if loaded in _AVX2_KERNELS else "Haswell"
    return "SkylakeX" if loaded in _AVX2_KERNELS else None


def loaded_kernel() -> str | None:
    """Return the kernels of the OpenBLAS that this process has loaded; None if it has none."""
    # Imported here: every process imports this module, and few ask.
    import threadpoolctl

    libraries = threadpoolctl.threadpool_info()
    return next((i["architecture"] for i in libraries if i["internal_api"] == "openblas"), None)
