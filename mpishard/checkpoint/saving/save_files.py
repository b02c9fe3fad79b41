"""The files of one save: what a rank writes to the disk, and how rank 0 commits it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mpishard.base import CheckpointError
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.format.content import as_json
from mpishard.checkpoint.format.folder import Target
from mpishard.checkpoint.format.manifest import write_manifest
from mpishard.checkpoint.format.tensor_file import RankFile, table_checksum
from mpishard.checkpoint.saving.free_space import (
    FoundSpace,
    directory_of,
    full_disk_error,
    is_full,
    make_temporary,
    require_found,
)
from mpishard.checkpoint.saving.host_pieces import Content, pieces_on_host
from mpishard.checkpoint.saving.staging import StagingBuffer


class SaveFiles:
    """Files that one rank writes for a save. Nothing here communicates.

    Life cycle. The constructor copies the arrays that may change. Rank 0 calls `make_directory`,
    and all ranks `use_directory`. Then `write` writes the rank's own file. After all ranks have
    written, rank 0 calls `commit` with their records. A save that fails ends with `discard`.

    Parameters
    ----------
    rank : int
        The rank.
    content : Content
        Content of the checkpoint from this rank.
    staging : StagingBuffer, optional
        Memory for copies of host arrays, which may then change before `write` has returned.

    Raises
    ------
    ValueError, TypeError, CheckpointError
        If the arrays or the metadata cannot be written.
    """

    def __init__(self, rank: int, content: Content, staging: StagingBuffer | None) -> None:
        # A buffer that another save uses raises here, and is not given back.
        pieces = pieces_on_host(content.arrays, staging)
        self._staging = staging
        self._target: Target | None = None
        self._made: Path | None = None
        self._is_abandoned = threading.Event()
        self._total_bytes = 0
        self.record = ""
        """The record of the written file for the manifest, as JSON."""
        try:
            self._file = RankFile(rank, pieces, table_checksum(content.parameters))
            # The metadata are copied, because training may append to their lists.
            metadata = as_json(content.metadata) if rank == 0 else {}
            self._content = replace(content, metadata=metadata)
        except BaseException:
            self._give_back()
            raise

    @property
    def nbytes(self) -> int:
        """Number of bytes that this rank will write."""
        return self._file.nbytes

    def make_directory(self, target: Target) -> FoundSpace:
        """Make the temporary directory of all ranks' files beside ``target``. Only on rank 0."""
        self._target = target
        found = make_temporary(target)
        self._made = directory_of(found)
        return found

    def use_directory(self, found: FoundSpace, needed: int) -> None:
        """Take rank 0's directory, or refuse if fewer than ``needed`` bytes are free.

        Parameters
        ----------
        found : FoundSpace
            The result of `make_directory` on rank 0.
        needed : int
            Number of bytes that all ranks will write.
        """
        self._total_bytes = needed
        self._directory = require_found(found, needed)

    def write(self) -> None:
        """Write this rank's file, and give the staging buffer back."""
        try:
            # A rank without pieces writes no file, and need not see the directory.
            if not (self._file.is_empty or self._directory.is_dir()):
                raise CheckpointError(
                    f"the directory {self._directory}, which rank 0 made, is not there: a "
                    "checkpoint must be on a file system that all ranks share, and another save to "
                    "the same place must wait for this one"
                )
            with self._explained_errors(self.nbytes):
                self._file.write(self._directory, self._require_wanted)
            self.record = json.dumps(self._file.record())
        finally:
            self._give_back()

    def commit(self, records: Sequence[str]) -> None:
        """Check that the pieces are complete, and move the checkpoint to its place. On rank 0.

        Parameters
        ----------
        records : sequence of str
            The `record` of every rank, in the order of ranks.
        """
        assert self._target is not None
        content = self._content
        with self._explained_errors(self._total_bytes):
            write_manifest(
                self._directory,
                self._target.sequence,
                content.parameters,
                content.dtype,
                content.metadata,
                map(json.loads, records),
            )
            # The last moment at which a run that has ended can keep its earlier checkpoint.
            self._require_wanted()
            self._target.put(self._directory)

    def abandon(self) -> None:
        """Make `write` and `commit`, which may run in another thread, stop as soon as they can."""
        self._is_abandoned.set()

    def discard(self) -> None:
        """Remove the temporary directory, and give the staging buffer back. No rank may write."""
        # Only rank 0 has made a directory.
        if self._made is not None:
            disk.remove_tree(self._made)
        # A buffer that is not given back could not be used by a later save.
        self._give_back()

    def state_of_disk(self) -> str:
        """Describe what a failed save has left on the disk; empty except on rank 0."""
        if self._target is None:
            return ""
        if self._target.is_put:
            return (
                f"the checkpoint {self._target.path} is whole and in its place, but not all was "
                "done that belongs to it"
            )
        return (
            f"no checkpoint was written in {self._directory.parent}, and what was there is as it "
            "was"
        )

    def _give_back(self) -> None:
        if self._staging is not None:
            self._staging.give_back()
        # Once only: the next save may have copies in the buffer already.
        self._staging = None

    def _require_wanted(self) -> None:
        if self._is_abandoned.is_set():
            raise CheckpointError("the run has ended while it was written")

    @contextmanager
    def _explained_errors(self, needed: int) -> Iterator[None]:
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
            if is_full(error):
                raise full_disk_error(error, self._directory, needed) from error
            raise
