"""Element loops of update rules, compiled by numba where it is installed.

NumPy goes through memory once per operation, or in chunks through the cache; a compiled loop reads
and writes each element once. Reassociation and contraction stay off, so that each operation is
rounded as NumPy rounds it and the bits are the same. A loop runs on the thread that calls it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from mpishard import settings
from mpishard.arrays import Array
from mpishard.compilation import compile_loop, numba_module

__all__ = ["ElementLoop", "run_compiled", "uses_numba"]


class ElementLoop(NamedTuple):
    """What a rule does to one element after the other, and the numbers that it takes to do so.

    Parameters
    ----------
    function : callable
        ``function(p, g, *state, *factors)``, at the top of its module, where numba's cache finds
        it again. It writes p and state in place, by the operations of the rule's NumPy passes.
    factors : tuple of float
        Rounded to the dtype of the arrays, as NumPy does it.
    """

    function: Callable[..., None]
    factors: tuple[float, ...]


_lock = threading.Lock()


def uses_numba() -> bool:
    """Whether update rules are compiled in this process: numba is there and not switched off."""
    return numba_module() is not None


def run_compiled(loop: ElementLoop | None, arrays: Sequence[Array]) -> bool:
    """Run ``loop`` as machine code, where that can be; compiles at the first call.

    Parameters
    ----------
    loop : ElementLoop or None
        None where the rule has none.
    arrays : sequence of Array
        p, g and the state, each of shape (n,). g may be read-only.

    Returns
    -------
    bool
        Whether it ran. It does not without numba, with ``MPISHARD_NUMBA=off``, and on arrays that
        are not float32 or float64 in the host's own layout.
    """
    if loop is None or not settings.numba_is_allowed() or not _are_plain(arrays):
        return False
    dtype = arrays[0].dtype
    with _lock:  # thread-ranks come here at the same time, and one of them compiles
        function = _compile(loop.function, dtype, len(arrays))
    if function is None:
        return False
    function(*arrays, *map(dtype.type, loop.factors))
    return True


def _are_plain(arrays: Sequence[Array]) -> bool:
    dtype = arrays[0].dtype
    return dtype in (np.float32, np.float64) and all(
        type(array) is np.ndarray
        and array.dtype == dtype
        and array.flags.c_contiguous
        and array.flags.aligned
        and (array.flags.writeable or place == 1)
        for place, array in enumerate(arrays)
    )


@functools.cache
def _compile(loop: FunctionType, dtype: np.dtype[Any], count: int) -> Callable[..., None] | None:
    numba = numba_module()
    if numba is None:
        return None
    number = numba.from_dtype(dtype)
    writable = numba.types.Array(number, 1, "C")
    read_only = numba.types.Array(number, 1, "C", readonly=True)  # takes both kinds
    factors = [number] * (loop.__code__.co_argcount - count)
    signature = numba.void(writable, read_only, *[writable] * (count - 2), *factors)
    return compile_loop(loop, signature, dtype.name)
