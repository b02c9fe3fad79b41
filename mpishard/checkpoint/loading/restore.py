"""Restoring a model and its optimizer at any world size, whatever size they were saved at."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpishard.arguments import check_path
from mpishard.arrays import Array
from mpishard.checkpoint.format.consensus import path_from, path_text, together
from mpishard.checkpoint.format.protocol import (
    Checkpointable,
    CheckpointableOptimizer,
    CheckpointState,
    Pieces,
    require_checkpointable,
    states_of,
)
from mpishard.checkpoint.loading.reader import CheckpointReader, find_single
from mpishard.checkpoint.loading.resume import newest_valid, open_whole
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.errors import CheckpointError
from mpishard.sharding.regions import Region

__all__ = ["load", "load_states"]


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
        The checkpoint, or a folder of them, of which the newest that verifies is restored.
    model : Checkpointable
        A model with the parameters that were saved, under any strategy.
    optimizer : CheckpointableOptimizer, optional
        An optimizer whose rule has the state that was saved.
    training : CheckpointState, optional
        As was saved.

    Returns
    -------
    dict
        The ``metadata`` given to `save`.

    Raises
    ------
    TypeError, ValueError
        For a path that is none, or blank, and for another model or optimizer, before anything is
        communicated.
    FileNotFoundError
        If there is no checkpoint.
    CheckpointError
        If it is torn, or does not fit the model or the optimizer. All ranks raise what one
        of them raises.
    """
    check_path("the path of a checkpoint", path)
    require_checkpointable(model, optimizer)
    with together(model.checkpoint_backend):
        states = states_of(model, optimizer, training)
    return load_states(path, model, states)


def load_states(
    path: str | os.PathLike[str], model: Checkpointable, states: Mapping[str, CheckpointState]
) -> dict[str, Any]:
    """As `load`, for some of the states of ``model``. Collective.

    Parameters
    ----------
    path : path
        The directory.
    model : Checkpointable
        The model whose parameters were saved; they are restored only as one of ``states``.
    states : mapping of str to CheckpointState
        "model", "optimizer", "training" -> the state to restore.
    """
    check_path("the path of a checkpoint", path)
    require_checkpointable(model)
    backend = model.checkpoint_backend

    def verify(reader: CheckpointReader) -> dict[str, Pieces]:
        # All of it is compared before anything is read: a refused load changes nothing.
        reader.require(model.checkpoint_parameters(), model.checkpoint_dtype)
        if not isinstance(reader.metadata.get("user"), Mapping):
            raise CheckpointError(f"the checkpoint {reader.path} has no metadata of its user")
        for state in states.values():
            # What a rank reads may depend on the number of ranks that wrote.
            expect = getattr(state, "expect", None)
            if expect is not None:
                expect(reader.kinds)
        wanted = {name: state.arrays_to_read() for name, state in states.items()}
        for name, pieces in wanted.items():
            _check_fits(reader, name, pieces)
        if "model" in states:
            with _using_metadata(reader, "model"):
                model.check_metadata(reader.metadata["model"])
        # Before anything is read, so that no model is half loaded if a block is damaged.
        for kind, region, _ in _each(wanted):
            reader.verify_region(kind, region)
        return wanted

    reader, wanted = open_whole(lambda: _agree_on_one(path, backend) or path, backend, verify)
    # From here on only a disk that fails between two reads can leave a model half loaded.
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
    """Return the checkpoint at ``path``, or the newest in it that verifies; None if there is none.

    Rank 0 looks for all: working directories may differ, and a folder change between two looks.
    """
    with together(backend) as statements:
        if backend is None or backend.rank == 0:
            statements.own = path_text(find_single(path))
    for text in statements.everyone:  # rank 0's, if there is one
        return path_from(text)
    return newest_valid(path, backend)


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


_ARTICLES = {"model": "a model", "optimizer": "an optimizer", "training": "a training loop"}


def _check_fits(reader: CheckpointReader, name: str, pieces: Mapping[str, Any]) -> None:
    """Refuse a state other than the saved one."""
    if not isinstance(reader.metadata.get(name), Mapping):
        raise CheckpointError(f"the checkpoint {reader.path} was saved without {_ARTICLES[name]}")
    # A kind is "parameters", which the model has, or "optimizer/..." or "training/...".
    held = {k for k in reader.kinds if (k.split("/")[0] if "/" in k else "model") == name}
    if held != set(pieces):
        saved, wanted = (", ".join(sorted(kinds)) or "no arrays" for kinds in (held, pieces))
        raise CheckpointError(
            f"the checkpoint {reader.path} holds {saved} of the {name} that was saved; the one "
            f"that is to be restored has {wanted}"
        )
    for kind, given in pieces.items():
        for region, array in given:
            try:
                reader.check_readable(kind, region, array)
            except ValueError as error:
                raise CheckpointError(str(error)) from error
