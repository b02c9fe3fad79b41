"""The choice of BLAS kernels by processor."""

import os
import subprocess
import sys

import pytest

from mpishard.base import blas
from mpishard.base.blas import Processor, better_kernel, choose_kernel

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


@pytest.mark.parametrize(
    ("processor", "chosen"), [(ZEN_4, "Haswell"), (ZEN_5, None), (INTEL, None), (ZEN_3, None)]
)
def test_a_choice_is_made_before_numpy_is_loaded(monkeypatch, processor, chosen):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "to be restored")
    del os.environ["OPENBLAS_CORETYPE"]
    choose_kernel(processor)
    assert "OPENBLAS_CORETYPE" not in os.environ, "NumPy is loaded: too late"
    monkeypatch.setattr(blas.sys, "modules", {})
    choose_kernel(processor)
    assert os.environ.get("OPENBLAS_CORETYPE") == chosen
    os.environ["OPENBLAS_CORETYPE"] = "mine"
    choose_kernel(processor)
    assert os.environ["OPENBLAS_CORETYPE"] == "mine"


def test_mpishard_chooses_before_it_loads_numpy():
    code = (
        "import mpishard, numpy, mpishard.base.blas as b\n"
        "print(b.loaded_kernel(), b.better_kernel(b.loaded_kernel()))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    loaded, better = done.stdout.split()
    if Processor.of_this_machine().splits_avx512:
        assert (loaded, better) == ("Haswell", "None")
