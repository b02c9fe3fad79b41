"""One body for each rule: NumPy runs it on chunks, numba and CUDA compile it for elements.

NumPy reads and writes the chunk's memory once per operation. The compiled body reads and writes
each element once. Reassociation and contraction stay off, so that each operation is rounded as
NumPy rounds it and all give the same bits. A body runs on the thread that calls it, or on a GPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from mpishard.base import (
    Array,
    DType,
    array_namespace,
    chunk_length,
    compile_loop,
    is_device_array,
    numba_module,
    reuse_freed_memory,
    settings,
)
from mpishard.optimizers.rules import device_code


def elements(count: int) -> Any:
    """Return the indices of the elements that a body updates at once.

    In NumPy and CuPy that is one slice of all ``count`` elements. In compiled code the name
    stands for ``range``, and the body updates one element after the other.
    """
    return (slice(0, count),)


class Body(NamedTuple):
    """An update of elements, and the numbers that it takes besides them.

    Parameters
    ----------
    function : callable
        ``function(p, g, *state, *factors)`` writes p and state in place and never g. It is a loop
        ``for i in elements(p.size)`` over operations that mean the same for one element and for
        an array of them. numba and CUDA compile a function at the top of a module; a method or
        closure always runs in NumPy or CuPy, and so does what `device_code` cannot translate.
    factors : tuple of float
        Numbers, rounded to the dtype of the arrays.
    """

    function: Callable[..., None]
    factors: tuple[float, ...]


_lock = threading.Lock()


def uses_numba() -> bool:
    """Return whether update rules are compiled here: numba is installed and not switched off."""
    return numba_module() is not None


def run(
    body: Body, arrays: Sequence[Array | None], clip: tuple[float, float] | None = None
) -> None:
    """Run a body on 1-D arrays of equal length.

    Parameters
    ----------
    body : Body
        The update.
    arrays : sequence of Array
        p, g and the state, with None for the state that is not needed. g may be read-only.
    clip : (float, float), optional
        Scale and limit: the body receives ``g * scale``, cut off at plus and minus the limit.
    """
    p = arrays[0]
    assert p is not None
    # The values of a closure may change after it was compiled, so that NumPy runs it.
    may_be_compiled = isinstance(body.function, FunctionType) and not body.function.__closure__
    if may_be_compiled and is_device_array(p):
        if device_code.launch(body.function, arrays, body.factors, clip):
            return
        may_be_compiled = False
    function = _machine_code(body.function, arrays) if may_be_compiled else None
    if function is None:
        function = body.function
        # A NumPy scalar of float64 would make NumPy compute float32 arrays in float64.
        factors = [*map(float, body.factors)]
    else:
        factors = [*map(p.dtype.type, body.factors)]
        # A compiled loop touches each element once, so that chunks would gain nothing.
        if clip is None:
            function(*arrays, *factors)
            return
    for part in in_chunks(p):
        chunk = [None if array is None else array[part] for array in arrays]
        if clip is not None:
            # Into a new array: g belongs to the caller.
            scale, limit = clip
            assert chunk[1] is not None
            scaled = chunk[1] * scale
            chunk[1] = array_namespace(scaled).clip(scaled, -limit, limit, out=scaled)
        function(*chunk, *factors)


def in_chunks(array: Array, block: int = 1) -> Iterator[slice]:
    """Yield the slices of a 1-D array in which it, and others as long, fit the cache.

    Each chunk but the last has a multiple of ``block`` elements.
    """
    reuse_freed_memory()  # each operation on a chunk reuses the memory that another one has freed
    # Half a chunk: an update has more operands than most chains of operations.
    step = max(1, chunk_length(array) // 2 // block) * block
    for start in range(0, array.size, step):
        yield slice(start, start + step)


def _machine_code(
    function: Callable[..., None], arrays: Sequence[Array | None]
) -> Callable[..., None] | None:
    """Return the compiled function for these arrays; None if NumPy or CuPy must run it.

    They run arrays that are not float32 or float64 in the host's own layout, and everything if
    numba is not installed or MPISHARD_NUMBA is ``off``.
    """
    p = arrays[0]
    assert p is not None
    dtype = p.dtype
    if not settings.numba_is_allowed() or dtype not in (np.float32, np.float64):
        return None
    missing = []
    for array in arrays:
        missing.append(array is None)
        if array is None:
            continue
        flags = array.flags
        if not (
            type(array) is np.ndarray
            and array.dtype == dtype
            and flags.c_contiguous
            and flags.aligned
            and (flags.writeable or len(missing) == 2)  # only g may be read-only
        ):
            return None
    with _lock:  # thread-ranks come here at the same time, and one of them compiles
        return _compile(function, dtype, tuple(missing))


# By what is missing, too, because numba has a type for None.
@functools.cache
def _compile(
    function: FunctionType, dtype: DType, missing: tuple[bool, ...]
) -> Callable[..., None] | None:
    numba = numba_module()
    if numba is None:
        return None
    number = numba.from_dtype(dtype)
    writable = numba.types.Array(number, 1, "C")
    read_only = numba.types.Array(number, 1, "C", readonly=True)  # takes both kinds
    state = [numba.none if is_missing else writable for is_missing in missing[2:]]
    factors = [number] * (function.__code__.co_argcount - len(missing))
    signature = numba.void(writable, read_only, *state, *factors)
    # Each variant has an entry of its own in numba's cache, as `compile_loop` asks for.
    variant = dtype.name + "".join(str(int(is_missing)) for is_missing in missing[2:])
    return compile_loop(function, signature, variant, elements=range)
