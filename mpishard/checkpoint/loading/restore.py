"""Restoring a model and its optimizer, at any world size.

`load` fills a model and its optimizer. `open_whole` opens a checkpoint that others may replace at
the same time, and `newest_valid` finds the newest checkpoint of a folder of which every byte
verifies.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from mpishard.base import Array, CheckpointError, Document, check_path
from mpishard.checkpoint.format.content import (
    Checkpointable,
    CheckpointableOptimizer,
    CheckpointedModel,
    CheckpointState,
    require_checkpointable,
    states_of,
)
from mpishard.checkpoint.format.folder import CheckpointFolder, Entry
from mpishard.checkpoint.loading.reader import CheckpointReader, SharedRegion, find_single
from mpishard.communication import (
    CommunicationBackend,
    agree,
    all_texts,
    path_from,
    path_text,
    same_outcome,
)

T = TypeVar("T")

# The common part of a stored and a wanted region, the stored values, and those to be filled.
_Copy = tuple[SharedRegion, Array, Array]

_log = logging.getLogger("mpishard")


def load(
    path: str | os.PathLike[str],
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
) -> Document:
    """Restore a model, and its optimizer if given, from a checkpoint of any world size. Collective.

    No rank changes anything before the checkpoint has been verified to fit on every rank.

    Parameters
    ----------
    path : path
        The checkpoint, or a folder of checkpoints, of which the newest that verifies is restored.
    model : Checkpointable
        Model with the parameters that were saved, under any strategy.
    optimizer : CheckpointableOptimizer, optional
        Optimizer whose rule has the state that was saved.

    Returns
    -------
    dict
        The ``metadata`` given to `save`.

    Raises
    ------
    TypeError, ValueError
        If the path is not a path or is blank, or the model or the optimizer is not checkpointable.
        Nothing has been communicated then. ValueError if one rank restores an optimizer, and
        another does not.
    FileNotFoundError
        If there is no checkpoint.
    CheckpointError
        If the checkpoint is damaged, or does not fit the model or the optimizer. If one rank raises
        it, all do.
    """
    check_path("the path of a checkpoint", path)
    require_checkpointable(model, optimizer)
    saved = model.checkpointed()
    with same_outcome(saved.backend, saved.subject):
        # A view of an optimizer may raise on some ranks only.
        states = states_of(model, optimizer)
    return load_states(path, model, states)


def load_states(
    path: str | os.PathLike[str], model: Checkpointable, states: Mapping[str, CheckpointState]
) -> Document:
    """Restore some of the states of ``model``, as `load` restores all. Collective.

    Parameters
    ----------
    path : path
        The directory.
    model : Checkpointable
        Model whose parameters were saved. They are restored only if it is one of ``states``.
    states : mapping of str to CheckpointState
        State to restore, by its name: "model", "optimizer" or "training".
    """
    check_path("the path of a checkpoint", path)
    require_checkpointable(model)
    saved = model.checkpointed()
    backend = saved.backend
    reader, copies = open_whole(
        lambda: _find(path, saved, list(states)),
        backend,
        lambda reader: _wanted_copies(reader, saved, states),
    )
    # From here on only a disk that fails between two reads can leave a model partly loaded.
    with reader:
        with same_outcome(backend):
            for shared, values, array in copies:
                shared.copy(values, array)
        for name, state in states.items():
            with _using_metadata(reader, name):
                state.restored(reader.metadata[name])
        return dict(reader.metadata["user"])


def _find(
    path: str | os.PathLike[str], saved: CheckpointedModel, names: Sequence[str]
) -> str | os.PathLike[str]:
    """Return the checkpoint at ``path`` whose states, of these names, are restored. Collective."""
    backend = saved.backend
    # Only rank 0 searches, because the ranks' working directories may differ, and a folder may
    # change between two searches.
    is_first = backend is None or backend.rank == 0
    everyone = agree(
        backend,
        lambda: (path_text(find_single(path)) if is_first else "", names),
        saved.subject,
    )
    if any(others != everyone[0][1] for _, others in everyone):
        by_rank = "; ".join(", ".join(others) for _, others in everyone)
        raise ValueError(f"every rank must restore the same states; by rank: {by_rank}")
    single = path_from(everyone[0][0])
    return single or newest_valid(path, backend) or path


def _wanted_copies(
    reader: CheckpointReader, saved: CheckpointedModel, states: Mapping[str, CheckpointState]
) -> list[_Copy]:
    """Return the copies that restore ``states``; refuse a checkpoint that does not fit them."""
    # All checks come before the first read, so that a refused load changes nothing.
    parameters = saved.parameters()
    kept = reader.not_saved(parameters)
    if kept and (saved.backend is None or saved.backend.rank == 0):
        _log.warning(
            "the checkpoint %s has no frozen parameters; those of the model stay as they are: %s",
            reader.path,
            ", ".join(sorted(kept)),
        )
    reader.require([e for e in parameters if e.name not in kept], saved.dtype)
    if not isinstance(reader.metadata.get("user"), Mapping):
        raise CheckpointError(f"the checkpoint {reader.path} has no user metadata")
    for state in states.values():
        # Some states read other arrays for other kinds in the checkpoint, for instance if more
        # ranks have saved.
        expect = getattr(state, "expect", None)
        if expect is not None:
            expect(reader.kinds)
    wanted = {
        name: {
            kind: [p for p in reader.readable(kind, given, parameters) if p[0].name not in kept]
            for kind, given in state.arrays_to_read().items()
        }
        for name, state in states.items()
    }
    for name, pieces in wanted.items():
        _check_fits(reader, name, pieces)
    if "model" in states:
        with _using_metadata(reader, "model"):
            saved.check_metadata(reader.metadata["model"])
    return [
        (shared, values, array)
        for pieces in wanted.values()
        for kind, given in pieces.items()
        for region, array in given
        for shared, values in reader.verified(kind, region)
    ]


@contextmanager
def _using_metadata(reader: CheckpointReader, name: str) -> Iterator[None]:
    """Convert errors of metadata that do not fit, or are forged, to a CheckpointError."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"the checkpoint {reader.path}: {error}") from error
    # A forged file may have any JSON here. These are the errors of values of a wrong type.
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
    saved_kinds = {k for k in reader.kinds if (k.split("/")[0] if "/" in k else "model") == name}
    if saved_kinds != set(pieces):
        saved, wanted = (", ".join(sorted(kinds)) or "no arrays" for kinds in (saved_kinds, pieces))
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


def newest_valid(
    folder: str | os.PathLike[str] | CheckpointFolder,
    backend: CommunicationBackend | None = None,
) -> Path | None:
    """Return the newest checkpoint of a folder that verifies. Collective: each rank reads a share.

    If a newer checkpoint does not verify, rank 0 logs a warning with the reason in the log
    "mpishard".

    Parameters
    ----------
    folder : path or CheckpointFolder
        Folder to which a `CheckpointFolder` writes. That of rank 0 is used. A `CheckpointFolder`
        no longer counts checkpoints that do not verify among those to keep.
    backend : CommunicationBackend, optional
        Ranks that verify together. The default is one process.

    Returns
    -------
    Path or None
        The checkpoint's directory; None if there is no checkpoint.

    Raises
    ------
    CheckpointError
        If there are checkpoints, and none can be used. The message gives the reason for each.
    """
    rank, world_size = (0, 1) if backend is None else (backend.rank, backend.world_size)

    opened: list[CheckpointFolder] = []

    def look() -> tuple[str, list[tuple[str, int, str]]]:
        opened.append(folder if isinstance(folder, CheckpointFolder) else CheckpointFolder(folder))
        # Only rank 0 lists the folder, which may change while another rank does.
        if rank != 0:
            return "", []
        listed = [(e.path.name, e.sequence, e.problem) for e in newest_first(opened[0])]
        return path_text(opened[0].path), listed

    place, found = agree(backend, look)[0]
    (checkpoints,) = opened
    refused: list[str] = []
    for name, sequence, problem in found:
        path = Path(path_from(place) or "", name)
        reasons = [problem] if problem else _verify(path, backend, rank, world_size)
        if not reasons:
            if refused and rank == 0:
                _log.warning(
                    "resuming from %s, because later checkpoints cannot be used: %s",
                    path,
                    "; ".join(refused),
                )
            return path
        refused.append(f"{path.name}: {', '.join(reasons)}")
        if sequence:
            # Otherwise the folder would keep this checkpoint in place of one that can be read.
            checkpoints.refuse(sequence, reasons[0])
    if refused:
        raise CheckpointError(
            f"none of the checkpoints in {checkpoints.path} can be used: {'; '.join(refused)}. To "
            "start a new run, remove them, choose another folder, or pass resume=False"
        )
    return None


def open_whole(
    find: Callable[[], str | os.PathLike[str]],
    backend: CommunicationBackend | None,
    verify: Callable[[CheckpointReader], T],
) -> tuple[CheckpointReader, T]:
    """Open the same save of a checkpoint, which others may replace meanwhile, on all ranks.

    Collective. If a save replaces the checkpoint before ``verify`` has returned, it is opened
    again, at most twice.

    Parameters
    ----------
    find : callable
        ``find()`` returns the path that `CheckpointReader` opens. It may be collective.
    backend : CommunicationBackend, optional
        Ranks that open it together. The default is one process.
    verify : callable
        ``verify(reader)`` verifies every block that will be read later. It may fail on some ranks.

    Returns
    -------
    reader : CheckpointReader
        Reader of the same save on every rank, which the caller closes.
    T
        The result of ``verify``.

    Raises
    ------
    OSError
        If there is no checkpoint, or ``verify`` raises it. Every rank raises it.
    """
    for looks_left in (2, 1, 0):
        path, failure, reader, opened = find(), None, None, None
        try:
            reader = CheckpointReader(path)
            opened = reader, verify(reader)
            found = f"save {reader.identity}"
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            failure = error
            # Between the two renames of a save there is no checkpoint at the path.
            is_replaced = reader is None or reader.was_replaced()
            found = "replaced" if is_replaced else "failed"
        # The ranks must have opened the same save. A rank may have opened the one before.
        everyone = set(all_texts(backend, found))
        if opened is not None and len(everyone) == 1:
            return opened
        if reader is not None:
            reader.close()
        if looks_left == 0 or ("failed" in everyone and "replaced" not in everyone):
            break
    with same_outcome(backend):
        if failure is not None:
            raise failure
    raise CheckpointError(f"the ranks read different saves: {path} was replaced while it was read")


def newest_first(folder: CheckpointFolder) -> list[Entry]:
    """Return the checkpoints of a folder, in the order in which a run would resume from them.

    The number of a save is in its manifest. Checkpoints without a manifest are ordered by step.
    """
    entries = folder.entries()
    ordered = sorted(
        (e for e in entries if e.sequence), key=lambda e: (e.sequence, e.step), reverse=True
    )
    for entry in sorted((e for e in entries if not e.sequence), key=lambda e: e.step):
        older = (index for index, other in enumerate(ordered) if entry.step > other.step)
        ordered.insert(next(older, len(ordered)), entry)
    return ordered


def _verify(
    path: Path, backend: CommunicationBackend | None, rank: int, world_size: int
) -> list[str]:
    """Return the problems of a checkpoint that any rank finds. Collective."""
    problem = ""
    try:
        with CheckpointReader(path) as reader:
            reader.verify(rank, world_size)
    except OSError as error:  # This includes CheckpointError.
        problem = str(error)
    return list(dict.fromkeys(all_texts(backend, problem)))
