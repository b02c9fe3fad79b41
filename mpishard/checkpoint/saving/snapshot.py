"""Saving a model and its optimizer, now or in the background."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.arguments import check_path
from mpishard.checkpoint.format.consensus import together
from mpishard.checkpoint.format.folder import Target
from mpishard.checkpoint.format.metadata import as_metadata
from mpishard.checkpoint.format.protocol import (
    Checkpointable,
    CheckpointableOptimizer,
    CheckpointState,
    Pieces,
    require_checkpointable,
    states_of,
)
from mpishard.checkpoint.saving.pending import Content, PendingSave
from mpishard.checkpoint.saving.staging import StagingBuffer, staged_bytes
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.sharding.table import ParameterEntry

__all__ = ["begin_save", "reserve", "save", "save_async", "save_states", "write_checkpoint"]


def save(
    path: str | os.PathLike[str],
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
    *,
    training: CheckpointState | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Save a model, and its optimizer if given. Collective.

    Parameters
    ----------
    path : path
        The directory to make or replace, on a file system that all ranks see.
    model : Checkpointable
        The model whose parameters are saved.
    optimizer : CheckpointableOptimizer, optional
        The optimizer whose state is saved, too.
    training : CheckpointState, optional
        Arrays of a training loop for each parameter; their kinds are ``"training/<name>"``.
    metadata : mapping, optional
        Names -> anything that JSON can hold, with strings as keys; NaN and infinities are allowed.
        `load` returns it. Rank 0's is saved.

    Raises
    ------
    TypeError, ValueError
        For a path that is none, or blank, and for another model or optimizer, before anything is
        communicated.
    ValueError, TypeError, CheckpointError
        As `write_checkpoint`, on every rank; the checkpoint at ``path`` is then unchanged.
    """
    check_path("the path of a checkpoint", path)
    require_checkpointable(model, optimizer)
    begin_save(lambda: Target(path), model, optimizer, training=training, metadata=metadata).wait()


def save_async(
    path: str | os.PathLike[str],
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
    *,
    training: CheckpointState | None = None,
    metadata: Mapping[str, Any] | None = None,
    staging: StagingBuffer | None = None,
) -> PendingSave:
    """As `save`, but only copy now, and write while training goes on. Collective.

    Every rank calls `PendingSave.poll` once a step, which raises on all ranks if one could not
    write, and `PendingSave.wait` at the end. Without `wait` there may never be a checkpoint.

    Parameters
    ----------
    path, model, optimizer, training, metadata
        As for `save`.
    staging : StagingBuffer, optional
        Host memory for the copy, to be kept from save to save. Only one save at a time may use it.

    Returns
    -------
    PendingSave
        The save under way.

    Raises
    ------
    ValueError, TypeError, CheckpointError
        As `save`, for errors that are found before anything is written.
    """
    check_path("the path of a checkpoint", path)
    require_checkpointable(model, optimizer)
    return begin_save(
        lambda: Target(path), model, optimizer, training=training, metadata=metadata,
        staging=staging or StagingBuffer(),
    )  # fmt: skip


def reserve(
    staging: StagingBuffer,
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
    *,
    kept: int = 0,
) -> None:
    """Take the memory for the copies of `save_async` before the first of them. Collective.

    Parameters
    ----------
    staging : StagingBuffer
        The buffer that `save_async` will be given.
    model, optimizer
        As for `save`.
    kept : int
        Number of further arrays of each parameter's shape and dtype that a save will hold, such
        as the best parameters of a training loop.

    Raises
    ------
    TypeError, ValueError
        For another model or optimizer; for a buffer that a save is still written from.
    OSError
        If there is not enough memory. All ranks raise what one of them raises.
    """
    require_checkpointable(model, optimizer)
    with together(model.checkpoint_backend):
        # The best parameters of a loop are as long as the model's.
        nbytes = staged_bytes(model.arrays_to_write()) * (1 + kept)
        if optimizer is not None:
            nbytes += staged_bytes(optimizer.checkpoint_view(model).arrays_to_write())
        staging.reserve(nbytes)


def begin_save(
    make_target: Callable[[], Target],
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
    *,
    training: CheckpointState | None = None,
    metadata: Mapping[str, Any] | None = None,
    staging: StagingBuffer | None = None,
) -> PendingSave:
    """Begin to save to the target that ``make_target`` returns on rank 0. Collective.

    Without ``staging`` no array may change before the save is done.
    """
    return _begin(
        make_target, model, lambda: states_of(model, optimizer, training), metadata, staging
    )


def save_states(
    path: str | os.PathLike[str],
    model: Checkpointable,
    states: Mapping[str, CheckpointState],
    *,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """As `save`, for some of the states of ``model``. Collective.

    Parameters
    ----------
    path : path
        The directory to make or replace.
    model : Checkpointable
        The model of the states; its parameters are saved only as one of ``states``.
    states : mapping of str to CheckpointState
        "model", "optimizer", "training" -> the state to save.
    metadata : mapping, optional
        As for `save`.
    """
    check_path("the path of a checkpoint", path)
    require_checkpointable(model)
    _begin(lambda: Target(path), model, lambda: states, metadata, None).wait()


def _begin(
    make_target: Callable[[], Target],
    model: Checkpointable,
    make_states: Callable[[], Mapping[str, CheckpointState]],
    metadata: Mapping[str, Any] | None,
    staging: StagingBuffer | None,
) -> PendingSave:
    # A function, because its errors are those of one rank, and all ranks agree on them at once.
    def make_content() -> Content:
        arrays: dict[str, Any] = {}
        document: dict[str, Any] = {"model": None, "optimizer": None, "user": as_metadata(metadata)}
        for name, state in make_states().items():
            arrays |= state.arrays_to_write()
            document[name] = dict(state.checkpoint_metadata())
        return Content(model.checkpoint_parameters(), model.checkpoint_dtype, arrays, document)

    return PendingSave(model.checkpoint_backend, make_target, make_content, staging)


def write_checkpoint(
    path: str | os.PathLike[str],
    backend: CommunicationBackend | None,
    parameters: Sequence[ParameterEntry],
    dtype: np.dtype[Any],
    arrays: Pieces,
    metadata: Mapping[str, Any],
) -> None:
    """Write the checkpoint ``path``, or leave the earlier one unchanged. Collective.

    At every moment ``path``, or ``<path>.previous`` between two renames, is a complete checkpoint;
    `CheckpointReader` looks at both. The next save removes what a killed one left behind, so only
    one job may save to a path at a time.

    Parameters
    ----------
    path : path
        The directory to make or replace, on a file system that all ranks see. Rank 0's counts.
    backend : CommunicationBackend or None
        The ranks that write together; None for a single process.
    parameters, dtype, arrays, metadata
        As those of `Content`.

    Raises
    ------
    ValueError, TypeError
        For a blank path, or arrays that cannot be written.
    CheckpointError
        If ``path`` holds something else, there is not enough room, a file cannot be written, or
        the pieces of all ranks do not make up each parameter exactly once. All ranks raise it, and
        it lists those that failed.
    """
    PendingSave(
        backend, lambda: Target(path), lambda: Content(parameters, dtype, arrays, metadata)
    ).wait()
