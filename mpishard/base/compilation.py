"""Loops that numba compiles, if it is installed, works with this NumPy, and is not switched off.

Machine code is kept in numba's cache. Without a folder for it each process compiles anew.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from types import FunctionType, ModuleType

from mpishard.base import settings

_log = logging.getLogger("mpishard")


def numba_module() -> ModuleType | None:
    """Return numba if loops may be compiled in this process, otherwise None."""
    return _numba() if settings.numba_is_allowed() else None


def compile_loop(
    loop: Callable[..., None],
    signature: object,
    variant: str = "",
    *,
    sums_in_lanes: bool = False,
    **names: object,
) -> Callable[..., None]:
    """Compile ``loop`` for one signature. The machine code runs without Python's lock.

    Parameters
    ----------
    loop : function
        A function at the top level of its module, where numba's cache finds it again. Its
        operations are not contracted, and not reassociated unless ``sums_in_lanes`` is True.
    signature : numba signature
        Types of its arguments.
    variant : str
        A part of its name, such as a dtype, which differs between functions of one name and code.
    sums_in_lanes : bool
        Whether sums may be made in the lanes of the processor's vectors, and then added up.
    names : object
        Values that it uses besides its module's globals.
    """
    numba = _numba()
    assert numba is not None, "whoever has a signature of it has numba"
    assert isinstance(loop, FunctionType)
    processor = importlib.import_module("llvmlite.binding").get_host_cpu_name()
    name = "_".join(filter(None, [loop.__name__, variant, processor]))
    # A copy of ``loop``, so that each variant and processor has its own entry in numba's cache.
    # numba replaces the index of an entry and its code one after the other. Processes that wrote
    # to one entry at the same time might mix up the code of different dtypes. If nodes share the
    # folder, they might mix up that of different processors.
    function = FunctionType(loop.__code__, {**loop.__globals__, **names}, name)
    function.__module__, function.__qualname__ = loop.__module__, name
    # Thread-ranks compute at the same time, without the lock. By NumPy's error model x / 0 is
    # infinite and raises nothing, so that loops vectorize.
    options: dict[str, object] = {"nogil": True, "error_model": "numpy"}
    if sums_in_lanes:
        # No other flag of fastmath: the compiler could then assume that there is no NaN or
        # infinity.
        options["fastmath"] = {"reassoc"}
    events = importlib.import_module("numba.core.event")

    # An event of numba is the only sign that its cache has no code for the function.
    class Compiles(events.Listener):  # type: ignore[name-defined, misc]
        """Logs why the first step is slow, if numba finds no code in its cache."""

        def on_start(self, event: object) -> None:
            _say_that_it_compiles()

        def on_end(self, event: object) -> None:
            pass

    run: Callable[..., None]
    with events.install_listener("numba:compile", Compiles()):
        try:
            run = numba.njit(signature, cache=True, **options)(function)
        except (OSError, RuntimeError) as error:  # no folder to write to, or it is full
            _log.info("%s is compiled anew in each process: %s", loop.__name__, error)
            run = numba.njit(signature, **options)(function)
    return run


@functools.cache
def _say_that_it_compiles() -> None:
    """Log the reason of a slow first step, once in a process."""
    _log.info("numba compiles loops, a second or two each; later starts load them")


@functools.cache
def _numba() -> ModuleType | None:
    # A missing package is no news, but a package that cannot be imported is logged below.
    if importlib.util.find_spec("numba") is None:
        return None
    # At exit colorama, which numba uses if it is installed, would write to Open MPI's terminal.
    if settings.output_is_passed_on():
        settings.write_default("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
    try:
        return importlib.import_module("numba")
    except ImportError as error:  # numba refuses releases of NumPy that it does not support
        _log.info("loops run in NumPy, because numba cannot be imported: %s", error)
        return None
