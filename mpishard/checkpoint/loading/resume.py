"""The checkpoint of a folder to resume from: the newest of which every byte verifies."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mpishard.checkpoint.format.consensus import all_texts, path_from, path_text, together
from mpishard.checkpoint.format.folder import CheckpointFolder, Entry
from mpishard.checkpoint.loading.reader import CheckpointReader
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.errors import CheckpointError

__all__ = ["newest_first", "newest_valid", "open_whole"]

T = TypeVar("T")

_log = logging.getLogger("mpishard")


def newest_valid(
    folder: str | os.PathLike[str] | CheckpointFolder,
    backend: CommunicationBackend | None = None,
) -> Path | None:
    """Return the newest checkpoint of a folder that verifies. Collective: each rank reads a share.

    If a newer one does not verify, rank 0 logs a warning with the reason in the log "mpishard".

    Parameters
    ----------
    folder : path or CheckpointFolder
        A folder that a `CheckpointFolder` writes to; rank 0's is used. A `CheckpointFolder` no
        longer counts those that do not verify among the ones that it keeps.
    backend : CommunicationBackend, optional
        The ranks that look together.

    Returns
    -------
    Path or None
        None if there is no checkpoint.

    Raises
    ------
    CheckpointError
        If there are some, and none can be used; the message gives the reason for each.
    """
    rank, world_size = (0, 1) if backend is None else (backend.rank, backend.world_size)
    with together(backend) as statements:
        if not isinstance(folder, CheckpointFolder):
            folder = CheckpointFolder(folder)
        if rank == 0:
            listed = [[e.path.name, e.sequence, e.problem] for e in newest_first(folder)]
            statements.own = json.dumps([path_text(folder.path), listed])
    place, found = json.loads(statements.everyone[0])
    refused: list[str] = []
    for name, sequence, problem in found:
        path = Path(path_from(place) or "", name)
        reasons = [problem] if problem else _verify(path, backend, rank, world_size)
        if not reasons:
            if refused and rank == 0:
                _log.warning(
                    "going on from %s, because what was saved after it cannot be used: %s",
                    path, "; ".join(refused),
                )  # fmt: skip
            return path
        refused.append(f"{path.name}: {', '.join(reasons)}")
        if sequence:
            folder.refuse(sequence, reasons[0])
    if refused:
        raise CheckpointError(
            f"none of the checkpoints in {folder.path} can be used: {'; '.join(refused)}. To begin "
            "anew remove them, choose another folder, or pass resume=False"
        )
    return None


def open_whole(
    find: Callable[[], str | os.PathLike[str]],
    backend: CommunicationBackend | None,
    verify: Callable[[CheckpointReader], T],
) -> tuple[CheckpointReader, T]:
    """Open one save of a checkpoint that others may replace meanwhile. Collective.

    If a save replaces the checkpoint before ``verify`` has returned, it is read again: twice at
    most.

    Parameters
    ----------
    find : callable
        Returns the path that `CheckpointReader` opens; may be collective.
    backend : CommunicationBackend, optional
        The ranks that open it together.
    verify : callable
        Looks at every block that will be read later. It raises on all ranks or on none.

    Returns
    -------
    reader : CheckpointReader
        The same save on every rank; the caller closes it.
    T
        The result of ``verify``.

    Raises
    ------
    OSError
        On every rank, if there is no checkpoint; also as ``verify``.
    """
    for looks_left in (2, 1, 0):
        path, failure, reader, opened = find(), None, None, None
        try:
            reader = CheckpointReader(path)
            opened = reader, verify(reader)
            found = f"save {reader.identity}"
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            failure = error
            # Between the two renames of a save nothing, or half of it, is there to be opened.
            is_replaced = reader is None or reader.was_replaced()
            found = "replaced" if is_replaced else "failed"
        # The ranks must have opened the same save: one may have come before its renames.
        everyone = set(all_texts(backend, found))
        if opened is not None and len(everyone) == 1:
            return opened
        if reader is not None:
            reader.close()
        if looks_left == 0 or ("failed" in everyone and "replaced" not in everyone):
            break
    with together(backend):
        if failure is not None:
            raise failure
    raise CheckpointError(f"the ranks read different saves: {path} was replaced while it was read")


def newest_first(folder: CheckpointFolder) -> list[Entry]:
    """Return the checkpoints of a folder, in the order in which a run would resume from them.

    The time of a save is in the manifest, so those without one are ordered by step.
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
    """Return the problems of a checkpoint that any rank finds."""
    problem = ""
    try:
        with CheckpointReader(path) as reader:
            reader.verify(rank, world_size)
    except OSError as error:  # a CheckpointError is one
        problem = str(error)
    return list(dict.fromkeys(all_texts(backend, problem)))
