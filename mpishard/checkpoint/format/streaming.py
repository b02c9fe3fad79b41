"""Copies past the processor's caches, of what nobody reads soon.

A store into a cache first reads the line that it overwrites; one that goes past the caches takes
two thirds of a copy's time. The C library does the same, from a size on that it makes up from the
cache's, which virtual machines may report ten times as large.
"""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any, Protocol

import numpy as np

from mpishard.arrays import address
from mpishard.compilation import compile_loop, numba_module

__all__ = ["StreamingCopy", "streaming_copy"]

_lock = threading.Lock()
_WORD = np.dtype(np.uint64)


class StreamingCopy(Protocol):
    """Copies one array into another."""

    def __call__(self, source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
        """Copy 1-D ``source`` into ``target``, of the same dtype and length; both contiguous."""


def streaming_copy() -> StreamingCopy | None:
    """The compiled copy; None without numba. Compiles it at the first call in a process."""
    with _lock:  # thread-ranks come here at the same time, and one of them compiles
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

    def copy(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
        if (address(source) | address(target)) % _WORD.itemsize:
            target[...] = source
            return
        given, taken = source.view(np.uint8), target.view(np.uint8)
        whole = given.size - given.size % _WORD.itemsize
        copy_words(given[:whole].view(_WORD), taken[:whole].view(_WORD))
        taken[whole:] = given[whole:]

    return copy


def _copy_words(source: Any, target: Any) -> None:
    """Compiled. What other threads are told of later, under a lock, they see complete."""
    for index in range(source.size):
        _store_past_caches(target, index, source[index])  # type: ignore[name-defined]  # noqa: F821


def _make_store(numba: Any) -> Any:
    """What stands for ``array[index] = value`` in compiled code, with LLVM's hint for the store."""
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
