"""Host memory from which a save in the background is written, and fast copies to it.

The copies bypass the processor's caches, because they are not read soon. A store to a cache first
reads the line that it overwrites; a copy that bypasses the caches takes two thirds of the time. The
C library does the same above a size that depends on that of the cache. Virtual machines may report
that size ten times too large.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from mpishard.base import Array, DType, address, compile_loop, numba_module

_ALIGNMENT = 64  # Alignment of copies in the buffer, in bytes: a cache line.
_lock = threading.Lock()
_WORD = np.dtype(np.uint64)


class StagingBuffer:
    """Host memory for the copies of a save, so that training continues while it is written.

    The buffer grows to the size that a save needs, and is kept for the next save. The first save
    waits for the system to provide the memory, unless `reserve` was called before. Copies to
    reserved memory are faster if numba is installed.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._copy: StreamingCopy | None = None
        self._is_lent = False

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return int(self._memory.nbytes)

    def reserve(self, nbytes: int) -> None:
        """Grow the memory to at least ``nbytes`` bytes, and prepare fast copies.

        Raises
        ------
        ValueError
            If the memory must grow, and a save is still being written from it.
        OSError
            If the system does not have that much memory.
        """
        self._grow(nbytes)
        self._copy = streaming_copy()  # The first call in a process may compile it.

    def copies(self, arrays: Sequence[Array]) -> list[Array]:
        """Return copies of 1-D arrays, which are valid until `give_back`.

        Raises
        ------
        ValueError
            If a save is still being written from the memory.
        """
        self._require_own()
        runs = _runs(arrays)
        # Each run begins at a cache line, because the fast copy needs aligned words.
        starts = [0, *accumulate(aligned(sum(a.nbytes for a in run)) for run in runs)]
        self._grow(starts.pop())
        self._is_lent = True
        copied = []
        for run, start in zip(runs, starts, strict=True):
            # The arrays of a run are end to end in memory. One array with the first one's start
            # spans them all.
            length = sum(array.size for array in run)
            whole = np.lib.stride_tricks.as_strided(run[0], (length,), writeable=False)
            copy = self._memory[start : start + whole.nbytes].view(whole.dtype)
            if self._copy is None:
                copy[...] = whole
            else:
                self._copy(whole, copy)
            copied += np.split(copy, list(accumulate(array.size for array in run[:-1])))
        return copied

    def give_back(self) -> None:
        """Allow the next save to use the memory, because the copies are no longer read."""
        self._is_lent = False

    def _grow(self, nbytes: int) -> None:
        if self._memory.size < nbytes:
            self._require_own()
            self._memory = np.empty(0, np.uint8)  # The old memory is freed first.
            self._memory = _touched_memory(nbytes)

    def _require_own(self) -> None:
        if self._is_lent:
            raise ValueError(
                "this staging buffer holds a save that is still being written: wait for that one, "
                "or give this one a buffer of its own"
            )


def _runs(arrays: Sequence[Array]) -> list[list[Array]]:
    """Group ``arrays``, in their order, into runs that are end to end in memory.

    The pieces of one vector are such a run. A copy of a run takes two thirds of the time of copies
    of its arrays.
    """
    runs: list[list[Array]] = []
    end: tuple[int, DType] | None = None
    for array in arrays:
        start = address(array)
        if (start, array.dtype) == end:
            runs[-1].append(array)
        else:
            runs.append([array])
        end = start + array.nbytes, array.dtype
    return runs


def aligned(nbytes: int) -> int:
    """Return the bytes of a staging buffer that a copy of ``nbytes`` bytes takes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _touched_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return new memory whose pages exist already, on systems with MAP_POPULATE.

    NumPy would request huge pages, which the system provides when they are first written. It moves
    other pages to make room for each, and the first save would wait for that.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags), np.uint8)


StreamingCopy = Callable[[Array, Array], None]
"""Function ``copy(source, target)`` for 1-D, contiguous arrays of one dtype and length."""


def streaming_copy() -> StreamingCopy | None:
    """Return the compiled copy, or None without numba. The first call in a process compiles it."""
    with _lock:  # Thread-ranks arrive at the same time, and only one of them compiles.
        return _compile()


@functools.cache
def _compile() -> StreamingCopy | None:
    numba = numba_module()
    if numba is None:
        return None
    word = numba.from_dtype(_WORD)
    signature = numba.void(
        numba.types.Array(word, 1, "C", readonly=True), numba.types.Array(word, 1, "C")
    )
    copy_words = compile_loop(_copy_words, signature, _store_past_caches=_make_store(numba))

    def copy(source: Array, target: Array) -> None:
        if (address(source) | address(target)) % _WORD.itemsize:
            target[...] = source
            return
        given, taken = source.view(np.uint8), target.view(np.uint8)
        whole = given.size - given.size % _WORD.itemsize
        copy_words(given[:whole].view(_WORD), taken[:whole].view(_WORD))
        taken[whole:] = given[whole:]

    return copy


def _copy_words(source: Any, target: Any) -> None:
    """Copy words past the caches, when numba has compiled this.

    A thread that takes a lock after the copy sees all of it.
    """
    for index in range(source.size):
        _store_past_caches(target, index, source[index])  # type: ignore[name-defined]  # noqa: F821


def _make_store(numba: Any) -> Any:
    """Return an intrinsic for ``array[index] = value`` with LLVM's hint to bypass the caches."""
    ir = importlib.import_module("llvmlite.ir")

    def store(_context: Any, array: Any, _index: Any, value: Any) -> Any:
        signature = numba.void(array, numba.types.intp, value)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            into, index, what = arguments
            data = context.make_array(signature.args[0])(context, builder, into).data
            stored = builder.store(what, builder.gep(data, [index]), align=_WORD.itemsize)
            one = ir.Constant(ir.IntType(32), 1)
            stored.set_metadata("nontemporal", builder.module.add_metadata([one]))
            return context.get_dummy_value()

        return signature, generate

    return importlib.import_module("numba.extending").intrinsic(store)
