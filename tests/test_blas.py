"""The choice of BLAS kernels by processor."""

import os
import subprocess
import sys

import pytest

from mpishard.base.blas import Processor, better_kernel

AVX512 = frozenset(["avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"])
INTEL = Processor("GenuineIntel", 6, AVX512)
ZEN_4 = Processor("AuthenticAMD", 25, AVX512)
ZEN_5 = Processor("AuthenticAMD", 26, AVX512)
ZEN_3 = Processor("AuthenticAMD", 25, frozenset(["avx2"]))
SOME_AVX512 = Processor("GenuineIntel", 6, frozenset(["avx2", "avx512f", "avx512cd"]))
UNKNOWN = Processor("", 0, frozenset())


@pytest.mark.parametrize(
    ("processor", "loaded", "better"),
    [
        (INTEL, "Haswell", "SkylakeX"),
        (INTEL, "Zen", "SkylakeX"),
        (INTEL, "SapphireRapids", None),
        (INTEL, None, None),
        (ZEN_4, "SkylakeX", "Haswell"),
        (ZEN_4, "Cooperlake", "Haswell"),
        (ZEN_4, "Haswell", None),
        (ZEN_4, "Zen", None),
        (ZEN_4, None, None),
        (ZEN_5, "Zen", "SkylakeX"),
        (ZEN_5, "SkylakeX", None),
        (ZEN_3, "Zen", None),
        (SOME_AVX512, "Haswell", None),
        (UNKNOWN, "Haswell", None),
    ],
)
def test_better_kernel(monkeypatch, processor, loaded, better):
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    assert better_kernel(loaded, processor) == better
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Zen")
    assert better_kernel(loaded, processor) is None


def test_the_order_of_imports_changes_no_kernel():
    """Otherwise two programs of equal seeds would have other bits."""
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    ask = "from mpishard.base import loaded_kernel; print(loaded_kernel())"
    found = {
        subprocess.run(
            [sys.executable, "-c", f"import {order}; {ask}"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for order in ("numpy, mpishard", "mpishard, numpy")
    }
    assert len(found) == 1
