"""A model and its optimizer, saved at one world size and restored at any."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mpishard.checkpoint.consensus import together
from mpishard.checkpoint.protocol import Checkpointable, CheckpointableOptimizer, CheckpointState
from mpishard.checkpoint.reader import CheckpointReader
from mpishard.checkpoint.writer import write_checkpoint
from mpishard.errors import CheckpointError

__all__ = ["load", "save"]

_OPTIMIZER = "optimizer/"


def save(
    path: str | os.PathLike[str],
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
    *,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Save a model, with its optimizer if given. Collective.

    Parameters
    ----------
    path : path
        The directory to make or replace, on a file system that all ranks see.
    model : Checkpointable
        Whose parameters to save.
    optimizer : CheckpointableOptimizer, optional
        Whose state to save beside them.
    metadata : mapping, optional
        Anything that JSON can hold; `load` returns it. Rank 0's counts.

    Raises
    ------
    ValueError, TypeError, CheckpointError
        As `write_checkpoint`, on every rank; what was at ``path`` is then as it was.
    """
    backend = model.checkpoint_backend
    with together(backend):
        view = None if optimizer is None else optimizer.checkpoint_view(model)
        arrays = dict(model.arrays_to_write())
        if view is not None:
            arrays |= view.arrays_to_write()
        document = {
            "model": dict(model.checkpoint_metadata()),
            "optimizer": None if view is None else dict(view.checkpoint_metadata()),
            "user": dict(metadata or {}),
        }
        parameters, dtype = model.checkpoint_parameters(), model.checkpoint_dtype
    write_checkpoint(path, backend, parameters, dtype, arrays, document)


def load(
    path: str | os.PathLike[str],
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
) -> dict[str, Any]:
    """Restore a model, and its optimizer if given, from any world size. Collective.

    Nothing is changed on any rank before every rank knows that the checkpoint fits.

    Parameters
    ----------
    path : path
        The directory that `save` made.
    model : Checkpointable
        The same parameters as were saved, under any strategy.
    optimizer : CheckpointableOptimizer, optional
        Its rule must have the state that was saved.

    Returns
    -------
    dict
        The ``metadata`` given to `save`.

    Raises
    ------
    FileNotFoundError
        Where there is no checkpoint.
    CheckpointError
        Where it is torn, or does not fit the model or the optimizer. All ranks raise what one
        of them raises.
    """
    backend = model.checkpoint_backend
    with together(backend):
        view = None if optimizer is None else optimizer.checkpoint_view(model)
        states: dict[str, CheckpointState] = {"model": model}
        if view is not None:
            states["optimizer"] = view
        reader = CheckpointReader(path)
        reader.require(model.checkpoint_parameters(), model.checkpoint_dtype)
        wanted = {name: state.arrays_to_read() for name, state in states.items()}
        for name, pieces in wanted.items():
            _check_fits(reader, name, pieces)
    with reader:
        with together(backend):
            for pieces in wanted.values():
                for kind, given in pieces.items():
                    for start, array in given:
                        reader.read(kind, start, array)
        for name, state in states.items():
            state.restored(reader.metadata[name])
        return dict(reader.metadata["user"])


def _check_fits(reader: CheckpointReader, name: str, pieces: Mapping[str, Any]) -> None:
    """Refuse a state that is not the one that was saved."""
    if not isinstance(reader.metadata.get(name), Mapping):
        raise CheckpointError(f"the checkpoint {reader.path} was saved without an {name}")
    held = {kind for kind in reader.kinds if kind.startswith(_OPTIMIZER) == (name == "optimizer")}
    if held != set(pieces):
        raise CheckpointError(
            f"the checkpoint {reader.path} holds {sorted(held)} of the {name}, which needs "
            f"{sorted(pieces)}"
        )
    for kind, given in pieces.items():
        for start, array in given:
            try:
                reader.check_readable(kind, start, array)
            except ValueError as error:
                raise CheckpointError(str(error)) from error
