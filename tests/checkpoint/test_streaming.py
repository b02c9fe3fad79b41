"""Copies that bypass the caches are equal to NumPy's, for any dtype, length and address."""

from __future__ import annotations

import itertools
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

from mpishard import checkpoint
from mpishard.base import compilation
from mpishard.checkpoint import StagingBuffer
from mpishard.checkpoint.saving import staging as module

DTYPES = ["uint8", ml_dtypes.bfloat16, "float32", "float64"]  # the copy knows bytes alone


@pytest.fixture
def copy():
    pytest.importorskip("numba")
    return module.streaming_copy() or pytest.skip("MPISHARD_NUMBA=off")


def bits(length, dtype, seed=0):
    dtype = np.dtype(dtype)
    data = np.random.default_rng(seed).bytes(length * dtype.itemsize)
    return np.frombuffer(data, np.uint8).copy().view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_of_any_length_and_dtype(copy, dtype):
    guard = 16
    for length in (0, 1, 2, 3, 7, 8, 9, 64, 1_001, 65_536, 100_000):
        source = bits(length, dtype)
        target = bits(length + 2 * guard, dtype, 1)
        before = target.tobytes()
        source.flags.writeable = False
        copy(source, target[guard : guard + length])
        width = target.itemsize * guard
        wanted = before[:width] + source.tobytes() + before[width + source.nbytes :]
        assert target.tobytes() == wanted, length


def test_copies_between_any_addresses(copy):
    for of_source, of_target in itertools.product(range(0, 9, 3), range(0, 9, 4)):
        source, target = bits(4_008, "uint8"), bits(4_008, "uint8", 1)
        given, taken = (a[n : n + 3_992] for a, n in ((source, of_source), (target, of_target)))
        copy(given, taken)
        assert (taken == given).all(), (of_source, of_target)


def test_another_thread_reads_what_was_copied(copy):
    """As the one that writes a save does, which is started then."""
    target, seen = np.zeros(1 << 20), []
    for number in range(1, 21):
        copy(np.full(target.size, float(number)), target)
        thread = threading.Thread(target=lambda: seen.append((target.min(), target.max())))
        thread.start()
        thread.join()
    assert seen == [(number, number) for number in range(1, 21)]


def test_a_reserved_buffer_uses_it_and_another_does_not(copy, monkeypatch):
    """A save does not wait for anything to be compiled."""
    used = []

    def noted(source, target):
        used.append(source.size)
        copy(source, target)

    monkeypatch.setattr(module, "streaming_copy", lambda: noted)
    arrays = [bits(1_000, "float32"), bits(77, "float64")]
    wanted = [array.tobytes() for array in arrays]
    staging = StagingBuffer()
    assert [copied.tobytes() for copied in staging.copies(arrays)] == wanted
    assert not used
    staging.give_back()
    staging.reserve(10_000)
    assert [copied.tobytes() for copied in staging.copies(arrays)] == wanted
    assert used == [1_000, 77]


def test_without_numba_there_is_no_streaming_copy(monkeypatch, tmp_path, fakes):
    for cached in (compilation._numba, module._compile):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    try:
        assert module.streaming_copy() is None
        staging, values = StagingBuffer(), fakes.values(1)
        checkpoint.reserve(staging, fakes.Model(None, values))
        checkpoint.save_async(tmp_path / "a", fakes.Model(None, values), staging=staging).wait()
        checkpoint.check(tmp_path / "a")
    finally:
        for cached in (compilation._numba, module._compile):
            cached.cache_clear()
