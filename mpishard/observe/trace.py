"""Traces of each rank for Perfetto and Chrome: `trace` records, `span` names a part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from mpishard.base import as_count, settings
from mpishard.communication import (
    CommunicationBackend,
    Row,
    current_recorder,
    init,
    start_recording,
    stop_recording,
)

# One for all spans that are not recorded: it has no state, and they should cost nothing.
_NOTHING = nullcontext()


@contextmanager
def trace(
    folder: str | os.PathLike[str],
    backend: CommunicationBackend | None = None,
    *,
    maximum_events: int = settings.TRACE_EVENTS,
) -> Iterator[None]:
    """Record the activity of every rank inside the block, in ``folder/rank_<r>.json``. Collective.

    Collectives, messages and steps are recorded automatically; `span` adds other parts. ``mpishard
    trace merge`` makes one file of the files, and ``mpishard trace summary`` prints the shares of
    computing, waiting and idling. An earlier trace in the folder is replaced. Files are written
    between steps, about once a second, and at the end of the block, also after an exception. If a
    rank is killed, the events written so far remain. ``MPISHARD_TRACE`` records a whole run.

    Times are those of the host: work that a GPU does later does not appear.

    Parameters
    ----------
    folder : path
        Folder of the trace, which is made if it is missing.
    backend : CommunicationBackend, optional
        The recorded world, with all worlds split off it. Default: that of `init`.
    maximum_events : int
        Largest number of events of each rank. Events beyond it are counted and not kept.

    Raises
    ------
    TypeError, ValueError
        For a world that was split off, or a maximum below 1.
    NotInitializedError
        For a backend that is not initialised.
    RuntimeError
        If this rank records a trace already.
    OSError
        If the folder or file cannot be written.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from mpishard import run_in_threads
    >>> from mpishard.observe import span, trace
    >>> def body(backend, folder):
    ...     with trace(folder, backend):
    ...         with span("forward", micro_batch=0):
    ...             y = np.ones((64, 64)) @ np.ones((64, 64))
    ...         backend.all_reduce(y)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = run_in_threads(2, body, folder)
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['rank_0.json', 'rank_1.json']
    """
    world = init() if backend is None else backend
    if not isinstance(world, CommunicationBackend):
        raise TypeError(f"backend must be a CommunicationBackend, got {type(backend).__name__}")
    # Files are named by rank, and those of two worlds would have the same names.
    if not world._is_root:
        raise ValueError(
            f"trace() records a whole world, and {world.describe()} was split from one; give it "
            "the backend of init(): what its ranks do among themselves is recorded too"
        )
    as_count("maximum_events", maximum_events)
    start_recording(world, Path(folder), maximum_events)
    try:
        yield
    # Also after Ctrl-C, because the events until then may explain it.
    except BaseException as error:
        # sys.exit is a planned end, after which the trace is complete.
        stop_recording(world, None if isinstance(error, SystemExit) else error)
        raise
    stop_recording(world)


def span(name: str, **arguments: str | float) -> AbstractContextManager[None]:
    """Mark the block as computation in the trace, if one is recorded.

    Parameters
    ----------
    name : str
        Name of the part: ``forward``, ``backward_input``.
    **arguments : str or number
        Facts that are shown with the part: ``micro_batch``, ``stage``.

    Examples
    --------
    >>> from mpishard.observe import span
    >>> with span("load data", file="part-7"):
    ...     pass
    """
    # A context variable, because each thread-rank has a recorder of its own.
    recorder = current_recorder.get()
    return _NOTHING if recorder is None else recorder.span(Row.COMPUTE, name, arguments)


def step_span(number: int) -> AbstractContextManager[None]:
    """Mark the block as step ``number`` in the trace, if one is recorded. Engines call it.

    Idle time is counted inside of steps only.

    Examples
    --------
    >>> from mpishard.observe import step_span
    >>> with step_span(1):
    ...     pass
    """
    recorder = current_recorder.get()
    if recorder is None:
        return _NOTHING
    return recorder.span(Row.STEP, f"step {number}", {"step": number})
