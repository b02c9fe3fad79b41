"""Saving a model and its optimizer, now or in the background.

Each rank's thread writes its file, then rank 0's thread commits.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.base import (
    Array,
    CheckpointError,
    Document,
    DType,
    Metadata,
    as_count,
    check_path,
    is_device_array,
    require_type,
    to_host,
)
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.format.content import (
    Checkpointable,
    CheckpointableOptimizer,
    CheckpointState,
    Pieces,
    as_json,
    as_metadata,
    require_checkpointable,
    states_of,
)
from mpishard.checkpoint.format.folder import Target
from mpishard.checkpoint.format.manifest import write_manifest
from mpishard.checkpoint.format.tensor_file import RankFile
from mpishard.checkpoint.saving.staging import StagingBuffer, aligned
from mpishard.communication import (
    CommunicationBackend,
    GatheredTexts,
    agree,
    all_texts,
    path_from,
    path_text,
    same_outcome,
)
from mpishard.sharding import ParameterEntry, Region

# Seconds between two collectives of ranks that wait for a slow disk. This is far below the time
# limit of a collective, and long enough that the cost does not matter.
_MEET_SECONDS = 1.0
# Maximum seconds that a rank, whose job ends for another reason, waits for its thread: a disk may
# hang.
_ABANDON_SECONDS = 2.0
_YIELD_SECONDS = 0.001
_NO_ROOM = "there is not enough room"
_IS_FULL = (errno.ENOSPC, errno.EDQUOT)

HostPieces = dict[str, list[tuple[Region, Array]]]


def save(
    path: str | os.PathLike[str],
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
    *,
    training: CheckpointState | None = None,
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
    training : CheckpointState, optional
        Arrays of a training loop for each parameter. Their kinds are ``"training/<name>"``.
    metadata : mapping, optional
        Values that JSON can represent, by name, with strings as keys. NaN and infinities are
        allowed. Those of rank 0 are saved, and `load` returns them.

    Raises
    ------
    TypeError, ValueError
        If the path is not a path or is blank, or the model, the optimizer or ``training`` is not
        checkpointable. Nothing has been communicated then.
    ValueError, TypeError, CheckpointError
        As for `write_checkpoint`, on every rank. The checkpoint at ``path`` is then unchanged.
    """
    check_path("the path of a checkpoint", path)
    require_checkpointable(model, optimizer, training)
    begin_save(lambda: Target(path), model, optimizer, training=training, metadata=metadata).wait()


def save_async(
    path: str | os.PathLike[str],
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
    *,
    training: CheckpointState | None = None,
    metadata: Mapping[str, object] | None = None,
    staging: StagingBuffer | None = None,
) -> PendingSave:
    """Begin a save that copies the arrays now and is written during training. Collective.

    Every rank must call `PendingSave.poll` once per step, which raises on all ranks if one could
    not write, and `PendingSave.wait` at the end. Without `wait` there may never be a checkpoint.

    Parameters
    ----------
    path, model, optimizer, training, metadata
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
    require_checkpointable(model, optimizer, training)
    if staging is not None:
        require_type("staging", staging, StagingBuffer)
    return begin_save(
        lambda: Target(path),
        model,
        optimizer,
        training=training,
        metadata=metadata,
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
    with same_outcome(model.checkpoint_backend, model.checkpoint_subject):
        nbytes = _staged_bytes(model.arrays_to_write()) * (1 + kept)
        if optimizer is not None:
            nbytes += _staged_bytes(optimizer.checkpoint_view(model).arrays_to_write())
        staging.reserve(nbytes)


def begin_save(
    make_target: Callable[[], Target],
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None = None,
    *,
    training: CheckpointState | None = None,
    metadata: Mapping[str, object] | None = None,
    staging: StagingBuffer | None = None,
    states: Mapping[str, CheckpointState] | None = None,
) -> PendingSave:
    """Begin to save to the target that ``make_target`` returns on rank 0. Collective.

    Without ``staging`` no array may change before the save is done. If there are ``states``, by
    name, only these are saved.
    """

    # `PendingSave` calls this function inside `together`, so that the error of one rank is raised
    # on all of them.
    def make_content() -> Content:
        arrays: dict[str, Any] = {}
        document: Document = {"model": None, "optimizer": None, "user": as_metadata(metadata)}
        for name, state in (states or states_of(model, optimizer, training)).items():
            arrays |= state.arrays_to_write()
            document[name] = dict(state.checkpoint_metadata())
        return Content(model.checkpoint_parameters(), model.checkpoint_dtype, arrays, document)

    return PendingSave(
        model.checkpoint_backend, make_target, make_content, staging, model.checkpoint_subject
    )


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
    begin_save(lambda: Target(path), model, states=states).wait()


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


# The states are integers, because the ranks exchange them as an array.
class _State(IntEnum):
    WORKING = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a checkpoint from one rank.

    Parameters
    ----------
    parameters : sequence of ParameterEntry
        The parameters along the flat vector. Those of rank 0 are used.
    dtype : dtype
        Dtype of the parameters.
    arrays : mapping of str to sequence of (Region, Array)
        Kind -> this rank's pieces: see `CheckpointState.arrays_to_write`.
    metadata : mapping
        Values that JSON can represent, or NumPy scalars and arrays. Those of rank 0 are used.
    """

    parameters: Sequence[ParameterEntry]
    dtype: DType
    arrays: Pieces
    metadata: Metadata


class PendingSave:
    """Checkpoint that is being written. The constructor, `poll` and `wait` are collective.

    Each rank writes its pieces to one file of a directory beside the target, in a thread that
    communicates nothing. When all have written, a thread of rank 0 checks that the pieces are
    complete, writes the manifest, and moves the directory to its place. At each `poll` the ranks
    send their states, and at the next `poll` they receive the states of all ranks. All ranks
    therefore continue, or raise, at the same call.

    A save makes four collectives. The first exchanges errors of any rank, the bytes that each rank
    will write, and rank 0's directory. The second confirms that all ranks have written. The third
    sends the record of each file to rank 0, and the fourth confirms that rank 0 has committed. Each
    second of waiting for a slow disk adds one, and so does each `poll` before the end.

    Parameters
    ----------
    backend : CommunicationBackend or None
        Ranks that write together; None for a single process.
    make_target : callable
        ``make_target()``, called on rank 0, returns the place of the checkpoint.
    make_content : callable
        ``make_content()``, called on every rank, returns the content to write.
    staging : StagingBuffer, optional
        Memory for copies of host arrays, which may then change before the save is done.
    subject : int
        Number of the model in collectives, so that ranks cannot mix two models.

    Raises
    ------
    ValueError, TypeError
        If the path is blank, or arrays cannot be written.
    CheckpointError
        If the target has other files, or there is not enough room. If one rank raises it, all do.
    """

    def __init__(
        self,
        backend: CommunicationBackend | None,
        make_target: Callable[[], Target],
        make_content: Callable[[], Content],
        staging: StagingBuffer | None = None,
        subject: int = 0,
    ) -> None:
        self._backend = backend
        self._subject = subject
        self._rank = 0 if backend is None else backend.rank
        self._target: Target | None = None
        self._error: BaseException | None = None
        self._ended: BaseException | None = None
        self._state = _State.WORKING
        self._record = ""
        self._records: GatheredTexts | None = None
        self._is_awaited = False
        self.done = False
        """True if the checkpoint is complete and in its place."""
        self._is_abandoned = threading.Event()
        self._staging = staging
        room: Document | None = None
        is_staged = False

        def prepare() -> tuple[int, Document | None]:
            nonlocal is_staged, room
            self._content = content = make_content()
            pieces = _on_host(content.arrays, staging)
            is_staged = True
            self._file = RankFile(self._rank, pieces)
            if self._rank == 0:
                # The metadata are copied, because training may append to their lists.
                self._content = replace(content, metadata=as_json(content.metadata))
                self._target = make_target()
                room = _make_room(self._target)
            return self._file.nbytes, room

        try:
            # One exchange decides about the whole save: it has errors, sizes and free bytes.
            everyone = agree(backend, prepare, subject)
            self._nbytes = sum(nbytes for nbytes, _ in everyone)
            self._directory = _require_room(everyone[0][1] or {}, self._nbytes)
        except BaseException:
            made = path_from(room["directory"]) if room is not None else None
            if made is not None:
                disk.remove_tree(made)
            # A buffer that is not given back could not be used by a later save.
            if staging is not None and is_staged:
                staging.give_back()
            raise
        self._thread = self._start(self._write)
        self._steps = self._advance()

    @property
    def has_failed(self) -> bool:
        """True if this rank could not write. `wait` then raises on all. Communicates nothing."""
        return self._state is _State.FAILED

    def poll(self) -> bool:
        """Make progress, and return True if the save is done. Collective, once per step.

        A rank does not wait until the others have called this poll, but only until they have called
        the poll before, from which it receives their states.

        Raises
        ------
        CheckpointError
            If a rank could not write. All ranks raise it, now and at every later call. The earlier
            checkpoint is unchanged, unless the message says that the new one is in its place.
        """
        if self._ended is not None:
            raise self._ended
        try:
            next(self._steps, None)
        except BaseException as error:
            self._ended = error
            if not isinstance(error, CheckpointError):
                # The surviving ranks may save again, and this thread must not interfere.
                self.abandon()
            raise
        return self.done

    def wait(self) -> None:
        """Wait until the save is done. Collective.

        Raises
        ------
        CheckpointError
            As for `poll`.
        """
        self._is_awaited = True
        while not self.poll():
            pass

    def abandon(self) -> None:
        """Stop writing, because this rank cannot continue with the others. Communicates nothing.

        A save that is just being moved to its place may still become a checkpoint. Otherwise the
        next save to the same place removes its files.
        """
        self._is_abandoned.set()
        self._thread.join(_ABANDON_SECONDS)

    # ------------------------------------------------------------------------------- in a thread

    def _start(self, body: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            # The starting thread waits until this thread runs, and then for Python's lock. Without
            # this sleep training would lose milliseconds.
            time.sleep(_YIELD_SECONDS)
            try:
                body()
            except BaseException as error:  # noqa: BLE001 - poll() raises it, on all ranks
                self._error = error
                self._state = _State.FAILED
            else:
                self._state = _State.DONE

        # A process that ends by an error does not wait for a daemon thread, nor for the disk.
        thread = threading.Thread(target=run, name="mpishard-checkpoint", daemon=True)
        thread.start()
        return thread

    def _write(self) -> None:
        try:
            # A rank without pieces writes no file, and need not see the directory.
            if not (self._file.is_empty or self._directory.is_dir()):
                raise CheckpointError(
                    f"the directory {self._directory}, which rank 0 made, is not there: a "
                    "checkpoint must be on a file system that all ranks share, and another save to "
                    "the same place must wait for this one"
                )
            with self._explaining(self._file.nbytes):
                self._file.write(self._directory, self._check_wanted)
            self._record = json.dumps(self._file.record())
        finally:
            if self._staging is not None:
                self._staging.give_back()

    @contextmanager
    def _explaining(self, needed: int) -> Iterator[None]:
        """Convert errors of a full disk, and of a directory that is gone, to ones that say so."""
        try:
            yield
        except FileNotFoundError as error:
            # Another file may be missing, such as an earlier checkpoint that somebody moved.
            if self._directory.is_dir() or (self._target is not None and self._target.is_put):
                raise
            # Another save to the same place removes this directory, because it looks left over.
            raise CheckpointError(
                f"{self._directory} was removed while this was written: does another job, or "
                "another save, write to the same place? One at a time may"
            ) from error
        except OSError as error:
            if error.errno in _IS_FULL:
                free = disk.free_bytes(self._directory)
                raise _no_room(str(error), needed, free, self._directory.parent) from error
            raise

    def _check_wanted(self) -> None:
        if self._is_abandoned.is_set():
            raise CheckpointError("the run has ended while it was written")

    def _commit(self, records: Sequence[str]) -> None:
        assert self._target is not None
        content = self._content
        with self._explaining(self._nbytes):
            write_manifest(
                self._directory,
                self._target.sequence,
                content.parameters,
                content.dtype,
                content.metadata,
                map(json.loads, records),
            )
            self._check_wanted()
            self._target.put(self._directory)

    # ---------------------------------------------------------------------------------- together

    def _advance(self) -> Iterator[None]:
        """Run the ranks' common steps: one at each `poll`, all of them in `wait`. Collective."""
        yield from self._meet()
        # Records grow with the model, and only rank 0 needs them: this is not an all-gather.
        records = self._records = GatheredTexts(self._backend, self._record, self._subject)
        # Rank 0 works once more, to commit. The other ranks only wait for it.
        if self._rank == 0:
            self._state = _State.WORKING
        yield from self._meet()
        records.wait()
        self.done = True

    def _meet(self) -> Iterator[None]:
        """Exchange states until no rank is working, and raise if one has failed. Collective."""
        states = [int(_State.WORKING)]
        while _State.WORKING in states:
            # Rank 0 commits, in a thread, as soon as it has all records.
            records = self._records
            if self._rank == 0 and records is not None and (self._is_awaited or records.done):
                self._records = None
                self._thread = self._start(partial(self._commit, records.wait()))
            if self._is_awaited:
                # The wait is short, so that ranks with a slow disk do not look as if they hang.
                self._thread.join(_MEET_SECONDS)
            states, backend = [int(self._state)], self._backend
            work = None
            if backend is not None:
                work = backend.all_gather_async(np.array(states), subject=self._subject)
            if not self._is_awaited:
                yield
            if work is not None:
                states = work.wait().tolist()
        if _State.FAILED in states:
            self._fail()

    def _fail(self) -> None:
        """Raise the errors of all ranks on every rank. Collective."""
        said = []
        if self._target is not None:
            if self._target.is_put:
                said.append(
                    f"the checkpoint {self._target.path} is whole and in its place, but not all "
                    "was done that belongs to it"
                )
            else:
                said.append(
                    f"no checkpoint was written in {self._directory.parent}, and what was there "
                    "is as it was"
                )
            # No rank is writing now, because `_meet` ends only when none is working.
            disk.remove_tree(self._directory)
        if self._error is not None:
            own = self._error
            words = str(own) if isinstance(own, CheckpointError) else f"{type(own).__name__}: {own}"
            said.append(f"rank {self._rank}: {words}")
        everyone = all_texts(self._backend, "; ".join(said), self._subject)
        raise CheckpointError("; ".join(everyone)) from self._error


def _on_host(arrays: Pieces, staging: StagingBuffer | None) -> HostPieces:
    """Return the pieces in host memory, without empty ones, as copies if there is a buffer."""
    pieces: HostPieces = {}
    shared: list[tuple[str, int]] = []
    for kind, given in arrays.items():
        pieces[kind] = []
        for region, array in given:
            length = region.stop - region.start
            if array.shape != (length,):
                raise ValueError(
                    f"{kind}: the piece {region} has shape ({length},), got {array.shape}"
                )
            # Empty pieces need no place in a file.
            if array.size:
                is_host = not is_device_array(array)
                host = np.ascontiguousarray(array if is_host else to_host(array))
                # `to_host` has copied CuPy arrays already, and NumPy cannot test them.
                if staging is not None and is_host and np.may_share_memory(host, array):
                    shared.append((kind, len(pieces[kind])))
                pieces[kind].append((region, host))
    if staging is not None:
        copies = staging.copies([pieces[kind][index][1] for kind, index in shared])
        for (kind, index), copy in zip(shared, copies, strict=True):
            pieces[kind][index] = (pieces[kind][index][0], copy)
    return pieces


def _staged_bytes(arrays: Pieces) -> int:
    """Return the number of bytes that `_on_host` copies into a staging buffer."""
    return sum(
        aligned(array.nbytes)
        for given in arrays.values()
        for _, array in given
        if not is_device_array(array)
    )


def _make_room(target: Target) -> Document:
    """Make the temporary directory of ``target``, and return its data for every rank, as JSON."""
    parent, full, directory = target.path.parent, "", None
    try:
        directory = target.make_temporary()
        free = disk.free_bytes(parent)
    except OSError as error:
        if directory is not None:
            disk.remove_tree(directory)
        if error.errno not in _IS_FULL:
            raise
        # The error is raised later, when the ranks have exchanged how many bytes they need.
        full, directory, free = f"rank 0: {error}", None, disk.free_bytes(parent)
    return {
        "directory": path_text(directory),
        "parent": path_text(parent),
        "free": free,
        "full": full,
    }


def _require_room(room: Mapping[str, Any], needed: int) -> Path:
    """Return rank 0's temporary directory, or refuse if fewer than ``needed`` bytes are free."""
    directory, parent = path_from(room["directory"]), path_from(room["parent"])
    assert parent is not None
    if directory is None or needed > room["free"]:
        raise _no_room(room["full"] or _NO_ROOM, needed, room["free"], parent)
    return directory


def require_room(directory: Path, needed: int) -> None:
    """Refuse to write ``needed`` bytes to ``directory`` if fewer are free."""
    free = disk.free_bytes(directory)
    if needed > free:
        raise _no_room(_NO_ROOM, needed, free, directory.parent)


def _no_room(why: str, needed: int, free: int, parent: Path) -> CheckpointError:
    return CheckpointError(
        f"{why}: {needed:,} bytes are needed and {free:,} are free in {parent}; free some, or save "
        "elsewhere"
    )
