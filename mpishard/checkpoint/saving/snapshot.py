"""A model and its optimizer, saved at one world size and restored at any."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpishard.arguments import check_path
from mpishard.arrays import Array
from mpishard.checkpoint.format.consensus import share_path, together
from mpishard.checkpoint.format.metadata import as_metadata
from mpishard.checkpoint.format.protocol import (
    Checkpointable,
    CheckpointableOptimizer,
    CheckpointState,
    Pieces,
)
from mpishard.checkpoint.format.target import Target
from mpishard.checkpoint.loading.reader import CheckpointReader, find_single
from mpishard.checkpoint.loading.resume import newest_valid, open_whole
from mpishard.checkpoint.saving.content import Content, StagingBuffer, staged_bytes
from mpishard.checkpoint.saving.pending import PendingSave
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.errors import CheckpointError
from mpishard.sharding.regions import Region

__all__ = ["begin_save", "load", "load_states", "reserve", "save", "save_async", "save_states"]


def save(
    path: str | os.PathLike[str],
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
    *,
    training: CheckpointState | None = None,
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
    training : CheckpointState, optional
        What a training loop holds of each parameter; its kinds are ``"training/<name>"``.
    metadata : mapping, optional
        Names -> anything that JSON can hold, with strings for keys, NaN and infinities, too;
        `load` returns it. Rank 0's counts.

    Raises
    ------
    TypeError, ValueError
        For what is no path, or a blank one, and for another model or optimizer, before anything
        is communicated.
    ValueError, TypeError, CheckpointError
        As `write_checkpoint`, on every rank; what was at ``path`` is then as it was.
    """
    _check(path, model, optimizer)
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

    Every rank calls ``poll`` of what is returned once a step, which raises on all ranks where one
    could not write, and ``wait`` at the end. What is not waited for may never become a checkpoint.

    Parameters
    ----------
    path, model, optimizer, training, metadata
        As for `save`.
    staging : StagingBuffer, optional
        Host memory for the copy, kept from save to save by whoever saves often. Only one save at a
        time may use it.

    Returns
    -------
    PendingSave
        The save under way.

    Raises
    ------
    ValueError, TypeError, CheckpointError
        As `save`, for what is known before anything is written.
    """
    _check(path, model, optimizer)
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
    """Take now, and not in the first `save_async`, the memory that its copies need. Collective.

    Parameters
    ----------
    staging : StagingBuffer
        Which will be given to `save_async`.
    model, optimizer
        As for `save`.
    kept : int
        How many more arrays of each parameter's shape and dtype a save will hold, such as the
        best parameters of a training loop.

    Raises
    ------
    TypeError, ValueError
        For another model or optimizer; for a buffer that a save is still written from.
    OSError
        Where there is not enough memory. All ranks raise what one of them raises.
    """
    _check_states(model, optimizer)
    with together(model.checkpoint_backend):
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
    """Begin to save where ``make_target``, called on rank 0, says. Collective.

    Without ``staging`` nothing may change before the save is done.
    """
    return _begin(
        make_target, model, lambda: _states(model, optimizer, training), metadata, staging
    )


def save_states(
    path: str | os.PathLike[str],
    model: Checkpointable,
    states: Mapping[str, CheckpointState],
    *,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """As `save`, for some of what there is of ``model``. Collective.

    Parameters
    ----------
    path : path
        The directory to make or replace.
    model : Checkpointable
        Whose parameters the states belong to; they are saved only as one of ``states``.
    states : mapping of str to CheckpointState
        "model", "optimizer", "training" -> what to save.
    metadata : mapping, optional
        As for `save`.
    """
    _check(path, model)
    _begin(lambda: Target(path), model, lambda: states, metadata, None).wait()


def _begin(
    make_target: Callable[[], Target],
    model: Checkpointable,
    make_states: Callable[[], Mapping[str, CheckpointState]],
    metadata: Mapping[str, Any] | None,
    staging: StagingBuffer | None,
) -> PendingSave:
    def make_content() -> Content:
        arrays: dict[str, Any] = {}
        document: dict[str, Any] = {"model": None, "optimizer": None, "user": as_metadata(metadata)}
        for name, state in make_states().items():
            arrays |= state.arrays_to_write()
            document[name] = dict(state.checkpoint_metadata())
        return Content(model.checkpoint_parameters(), model.checkpoint_dtype, arrays, document)

    return PendingSave(model.checkpoint_backend, make_target, make_content, staging)


def load(
    path: str | os.PathLike[str],
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
    *,
    training: CheckpointState | None = None,
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
    training : CheckpointState, optional
        As was saved.

    Returns
    -------
    dict
        The ``metadata`` given to `save`.

    Raises
    ------
    TypeError, ValueError
        For what is no path, or a blank one, and for another model or optimizer, before anything
        is communicated.
    FileNotFoundError
        Where there is no checkpoint.
    CheckpointError
        Where it is torn, or does not fit the model or the optimizer. All ranks raise what one
        of them raises.
    """
    _check(path, model, optimizer)
    with together(model.checkpoint_backend):
        states = _states(model, optimizer, training)
    return load_states(path, model, states)


def load_states(
    path: str | os.PathLike[str], model: Checkpointable, states: Mapping[str, CheckpointState]
) -> dict[str, Any]:
    """As `load`, for some of what was saved of ``model``. Collective.

    Parameters
    ----------
    path : path
        The directory.
    model : Checkpointable
        Whose parameters the checkpoint must be of; they are restored only as one of ``states``.
    states : mapping of str to CheckpointState
        "model", "optimizer", "training" -> what to restore.
    """
    _check(path, model)
    backend = model.checkpoint_backend

    def verify(reader: CheckpointReader) -> dict[str, Pieces]:
        wanted = _fitting(reader, model, states)
        for kind, region, _ in _each(wanted):  # so that nothing is half loaded if one is damaged
            reader.verify_region(kind, region)
        return wanted

    reader, wanted = open_whole(lambda: _agree_on_one(path, backend) or path, backend, verify)
    with reader:
        with together(backend):
            for kind, region, array in _each(wanted):
                reader.read(kind, region, array)
        for name, state in states.items():
            with _using_metadata(reader, name):
                state.restored(reader.metadata[name])
        return dict(reader.metadata["user"])


def _agree_on_one(
    path: str | os.PathLike[str], backend: CommunicationBackend | None
) -> Path | None:
    """The checkpoint at ``path``, or the newest that verifies in it; None where there is none.

    As rank 0 sees it: working directories may differ, and a folder change between two looks.
    """
    found = None
    with together(backend):
        if backend is None or backend.rank == 0:
            found = find_single(path)
    return share_path(backend, found) or newest_valid(path, backend)


def _fitting(
    reader: CheckpointReader, model: Checkpointable, states: Mapping[str, CheckpointState]
) -> dict[str, Pieces]:
    """Return the pieces that each state needs, if the checkpoint has them all."""
    reader.require(model.checkpoint_parameters(), model.checkpoint_dtype)
    if not isinstance(reader.metadata.get("user"), Mapping):
        raise CheckpointError(f"the checkpoint {reader.path} has no metadata of its user")
    wanted = {name: state.arrays_to_read() for name, state in states.items()}
    for name, pieces in wanted.items():
        _check_fits(reader, name, pieces)
    if "model" in states:
        with _using_metadata(reader, "model"):
            model.check_metadata(reader.metadata["model"])
    return wanted


def _each(wanted: Mapping[str, Pieces]) -> Iterator[tuple[str, Region, Array]]:
    for pieces in wanted.values():
        for kind, given in pieces.items():
            for region, array in given:
                yield kind, region, array


@contextmanager
def _using_metadata(reader: CheckpointReader, name: str) -> Iterator[None]:
    """Name file and reason if metadata do not fit, or are not what any save wrote."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"the checkpoint {reader.path}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint {reader.path} has no metadata.{name} that {_ARTICLES[name]} can use: "
            f"{type(error).__name__}: {error}"
        ) from error


def _check(path: Any, model: Any, optimizer: Any = None) -> None:
    """Refuse on this rank what no rank could save or load; nothing is communicated."""
    check_path("the path of a checkpoint", path)
    _check_states(model, optimizer)


def _check_states(model: Any, optimizer: Any) -> None:
    if not hasattr(model, "checkpoint_parameters"):
        raise TypeError(
            "a checkpoint needs a model of mpishard, plain or sharded (Checkpointable), got "
            f"{type(model).__name__}"
        )
    if optimizer is not None and not hasattr(optimizer, "checkpoint_view"):
        raise TypeError(
            "a checkpoint needs a sharded optimizer (CheckpointableOptimizer), got "
            f"{type(optimizer).__name__}; mpishard.as_distributed makes one"
        )


def _states(
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None,
    training: CheckpointState | None,
) -> dict[str, CheckpointState]:
    states: dict[str, CheckpointState] = {"model": model}
    if optimizer is not None:
        states["optimizer"] = optimizer.checkpoint_view(model)
    if training is not None:
        states["training"] = training
    return states


_ARTICLES = {"model": "a model", "optimizer": "an optimizer", "training": "a training loop"}


def _listed(kinds: Iterable[str]) -> str:
    return ", ".join(sorted(kinds)) or "no arrays"


def _owner(kind: str) -> str:
    """Which of a checkpoint's states a kind belongs to."""
    name, slash, _ = kind.partition("/")
    return name if slash else "model"


def _check_fits(reader: CheckpointReader, name: str, pieces: Mapping[str, Any]) -> None:
    """Refuse a state that is not the one that was saved."""
    if not isinstance(reader.metadata.get(name), Mapping):
        raise CheckpointError(f"the checkpoint {reader.path} was saved without {_ARTICLES[name]}")
    held = {kind for kind in reader.kinds if _owner(kind) == name}
    if held != set(pieces):
        raise CheckpointError(
            f"the checkpoint {reader.path} holds {_listed(held)} of the {name} that was saved; the "
            f"one that is to be restored has {_listed(pieces)}"
        )
    for kind, given in pieces.items():
        for region, array in given:
            try:
                reader.check_readable(kind, region, array)
            except ValueError as error:
                raise CheckpointError(str(error)) from error
