"""Saving a model and its optimizer, now or in the background."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpishard.base import Document, DType, Metadata, as_count, check_path, require_type
from mpishard.checkpoint.format.content import (
    Checkpointable,
    CheckpointableOptimizer,
    CheckpointState,
    Pieces,
    as_metadata,
    require_checkpointable,
    states_of,
)
from mpishard.checkpoint.format.folder import Target
from mpishard.checkpoint.saving.host_pieces import Content, staged_bytes
from mpishard.checkpoint.saving.pending import PendingSave
from mpishard.checkpoint.saving.staging import StagingBuffer
from mpishard.communication import CommunicationBackend, same_outcome
from mpishard.sharding import ParameterEntry


def save(
    path: str | os.PathLike[str],
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
    *,
    metadata: Metadata | None = None,
) -> None:
    """Save a model, and its optimizer if given. Collective.

    Parameters
    ----------
    path : path
        Directory to make or replace, on a file system that all ranks see.
    model : Checkpointable
        Model whose parameters are saved.
    optimizer : CheckpointableOptimizer, optional
        Optimizer whose state is saved, too.
    metadata : mapping, optional
        Values that JSON can represent, by name, with strings as keys. NaN and infinities are
        allowed. Those of rank 0 are saved, and `load` returns them.

    Raises
    ------
    TypeError, ValueError
        If the path is not a path or is blank, or the model or the optimizer is not checkpointable.
        Nothing has been communicated then.
    ValueError, TypeError, CheckpointError
        As for `write_checkpoint`, on every rank. The checkpoint at ``path`` is then unchanged.
    """
    check_path("the path of a checkpoint", path)
    require_checkpointable(model, optimizer)
    # Only rank 0 makes the target, and if that raises, all ranks raise.
    begin_save(lambda: Target(path), model, optimizer, metadata=metadata).wait()


def save_async(
    path: str | os.PathLike[str],
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
    *,
    metadata: Mapping[str, object] | None = None,
    staging: StagingBuffer | None = None,
) -> PendingSave:
    """Begin a save that copies the arrays now and is written during training. Collective.

    Every rank must call `PendingSave.poll` once per step, which raises on all ranks if one could
    not write, and `PendingSave.wait` at the end. Without `wait` there may never be a checkpoint.

    Parameters
    ----------
    path, model, optimizer, metadata
        As for `save`.
    staging : StagingBuffer, optional
        Host memory for the copy, which can be kept from save to save. Only one save at a time may
        use it.

    Returns
    -------
    PendingSave
        The save under way.

    Raises
    ------
    ValueError, TypeError, CheckpointError
        As for `save`, for errors that are found before anything is written.
    """
    check_path("the path of a checkpoint", path)
    require_checkpointable(model, optimizer)
    if staging is not None:
        require_type("staging", staging, StagingBuffer)
    return begin_save(
        lambda: Target(path),
        model,
        optimizer,
        metadata=metadata,
        # Without a buffer, training would change arrays before they are written.
        staging=StagingBuffer() if staging is None else staging,
    )


def reserve(
    staging: StagingBuffer,
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
    *,
    kept: int = 0,
) -> None:
    """Allocate the memory for the copies of `save_async` before the first save. Collective.

    Parameters
    ----------
    staging : StagingBuffer
        Buffer that `save_async` will be given.
    model, optimizer
        As for `save`.
    kept : int
        Number of other arrays of each parameter's shape and dtype in a save, such as the best
        parameters of a training loop.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another type, ``kept`` is below 0, or the buffer must grow while a save
        is still being written from it.
    OSError
        If there is not enough memory. If one rank raises it, all do.
    """
    require_checkpointable(model, optimizer)
    require_type("staging", staging, StagingBuffer)
    as_count("kept", kept, least=0)
    saved = model.checkpointed()
    # One rank alone may lack the memory.
    with same_outcome(saved.backend, saved.subject):
        nbytes = staged_bytes(saved.arrays_to_write()) * (1 + kept)
        if optimizer is not None:
            nbytes += staged_bytes(optimizer.checkpoint_view(model).arrays_to_write())
        staging.reserve(nbytes)


def begin_save(
    make_target: Callable[[], Target],
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
    *,
    metadata: Mapping[str, object] | None = None,
    staging: StagingBuffer | None = None,
    states: Callable[[], Mapping[str, CheckpointState]] | None = None,
) -> PendingSave:
    """Begin to save to the target that ``make_target`` returns on rank 0. Collective.

    Without ``staging`` no array may change before the save is done. ``states`` returns the states
    to save by name; by default, those of the model and the optimizer.
    """
    saved = model.checkpointed()

    # `PendingSave` calls this function inside `agree`, so that the error of one rank is raised on
    # all of them.
    def make_content() -> Content:
        arrays: dict[str, Any] = {}
        # None marks a state that is not saved. A load that needs it is refused with that reason.
        document: Document = {"model": None, "optimizer": None, "user": as_metadata(metadata)}
        for name, state in (states() if states else states_of(model, optimizer)).items():
            arrays |= state.arrays_to_write()
            document[name] = dict(state.checkpoint_metadata())
        return Content(saved.parameters(), saved.dtype, arrays, document)

    return PendingSave(saved.backend, make_target, make_content, staging, saved.subject)


def save_states(
    path: str | os.PathLike[str], model: Checkpointable, states: Mapping[str, CheckpointState]
) -> None:
    """Save some of the states of ``model``, as `save` saves all. Collective.

    Parameters
    ----------
    path : path
        Directory to make or replace.
    model : Checkpointable
        Model of the states. Its parameters are saved only if it is one of ``states``.
    states : mapping of str to CheckpointState
        State to save, by its name: "model", "optimizer" or "training".
    """
    check_path("the path of a checkpoint", path)
    require_checkpointable(model)
    begin_save(lambda: Target(path), model, states=lambda: states).wait()


def write_checkpoint(
    path: str | os.PathLike[str],
    backend: CommunicationBackend | None,
    parameters: Sequence[ParameterEntry],
    dtype: DType,
    arrays: Pieces,
    metadata: Mapping[str, object],
) -> None:
    """Write the checkpoint ``path``, or leave the earlier one unchanged. Collective.

    At every moment ``path``, or ``<path>.previous`` between two renames, is a complete checkpoint.
    `CheckpointReader` opens either. The next save removes files of a killed save, so that only one
    job at a time may save to a path.

    Parameters
    ----------
    path : path
        Directory to make or replace, on a file system that all ranks see. That of rank 0 is used.
    backend : CommunicationBackend or None
        Ranks that write together; None for a single process.
    parameters, dtype, arrays, metadata
        As for `Content`.

    Raises
    ------
    ValueError, TypeError
        If the path is blank, or arrays cannot be written.
    CheckpointError
        If ``path`` has other files, there is not enough room, or a file cannot be written. If the
        pieces of all ranks do not have each element of each parameter exactly once. All ranks raise
        it, and the message lists the ranks that failed.
    """
    PendingSave(
        backend, lambda: Target(path), lambda: Content(parameters, dtype, arrays, metadata)
    ).wait()
