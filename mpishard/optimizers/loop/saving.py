"""A training run's checkpoints: when they are written, and which one the run goes on from."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from mpishard import settings
from mpishard.checkpoint import CheckpointFolder, StagingBuffer, newest_valid
from mpishard.checkpoint.format.consensus import share_path, together
from mpishard.checkpoint.format.protocol import CheckpointableOptimizer, CheckpointState
from mpishard.checkpoint.loading.reader import find_single
from mpishard.checkpoint.saving.pending import PendingSave
from mpishard.checkpoint.saving.snapshot import begin_save, reserve
from mpishard.communication import CommunicationBackend
from mpishard.errors import CheckpointError, NonFiniteLossError, NoSampleError, Preempted
from mpishard.models import ShardedModelBase
from mpishard.optimizers.loop.data import OptimizationInputData
from mpishard.optimizers.loop.preemption import Preemption

__all__ = ["RunCheckpoints", "checkpoint_to_resume", "folder_of"]

_log = logging.getLogger("mpishard")


def folder_of(data: OptimizationInputData) -> CheckpointFolder:
    """The folder that a run saves to."""
    assert data.checkpoint is not None
    return CheckpointFolder(data.checkpoint, keep_last=data.keep_last, keep_every=data.keep_every)


def checkpoint_to_resume(
    data: OptimizationInputData,
    backend: CommunicationBackend,
    folder: CheckpointFolder | None,
) -> Path | None:
    """The checkpoint that a run goes on from; None where it begins anew. Collective.

    Raises
    ------
    FileNotFoundError
        Where one was asked for, and there is none.
    CheckpointError
        Where there are some, and none of them can be used.
    """
    if data.resume is False or (data.resume is None and data.checkpoint is None):
        return None
    is_asked_for = data.resume is not None
    place = data.checkpoint if data.resume in (None, True) else data.resume
    assert place is not None
    assert not isinstance(place, bool)
    found = None
    with together(backend):
        if backend.rank == 0:  # for all: their working directories may differ
            found = find_single(place)
    found = share_path(backend, found)
    if found is not None:
        return found
    own = folder if data.resume in (None, True) else None
    newest = newest_valid(own or place, backend)
    if newest is None and is_asked_for:
        raise FileNotFoundError(
            f"there is no checkpoint in {Path(place)} to go on from; leave resume out to begin "
            "where there is none"
        )
    return newest


class RunCheckpoints:
    """The saves of one run, one at a time.

    Parameters
    ----------
    data : OptimizationInputData
        Which has a ``checkpoint``.
    backend : CommunicationBackend
        The ranks that train together.
    """

    def __init__(self, data: OptimizationInputData, backend: CommunicationBackend) -> None:
        self.folder = folder_of(data)
        self._rank = backend.rank
        self._preemption = Preemption(backend)
        self._every = data.checkpoint_every
        self._staging = StagingBuffer() if data.checkpoint_async else None
        self._pending: PendingSave | None = None

    def reserve(
        self, model: ShardedModelBase, optimizer: CheckpointableOptimizer, *, keeps_best: bool
    ) -> None:
        """Take the memory for the copies of saves before the run trains. Collective.

        Raises
        ------
        OSError
            Where there is not enough.
        """
        if self._staging is not None:
            reserve(self._staging, model, optimizer, kept=int(keeps_best))

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the run trains; behind it no save is under way. Collective.

        Raises
        ------
        CheckpointError
            As `save`.
        """
        with self._preemption:
            try:
                yield
            except (NonFiniteLossError, NoSampleError) as error:  # on all ranks, at the same step
                try:
                    self.finish()
                except CheckpointError as failure:
                    error.add_note(str(failure))
                raise
            except BaseException:
                if self._pending is not None:
                    self._pending.abandon()
                raise
            self.finish()

    def is_preempted(self) -> bool:
        """Whether any rank was told to make room. Collective; asked once a step.

        Raises
        ------
        CheckpointError
            As `save`, where the save under way has failed on any rank.
        """
        if self._pending is None:
            return self._preemption.is_asked()
        # What has failed all hear in this step; in `poll` they would in the next.
        is_asked, has_failed = self._preemption.is_asked_or(self._pending.has_failed)
        if has_failed:
            self.finish()
        return is_asked

    def leave(self, step: int, total: int) -> NoReturn:
        """End the run on all ranks once what was saved after ``step`` is on the disk. Collective.

        Raises
        ------
        Preempted
            Always, unless it could not be written.
        CheckpointError
            As `save`.
        """
        self.finish()
        place = self.folder.path_of(step)
        message = f"preempted after step {step} of {total}; saved in {place}"
        if self._rank == 0:
            _log.warning("%s, from where the same command goes on", message)
        raise Preempted(message, step, settings.EXIT_PREEMPTED)

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether to save after ``step`` steps."""
        return is_last or (self._every is not None and step % self._every == 0)

    def save(
        self,
        step: int,
        model: ShardedModelBase,
        optimizer: CheckpointableOptimizer,
        training: CheckpointState | None,
        metadata: Mapping[str, Any],
    ) -> None:
        """Save, or begin to, where that is done in the background. Collective.

        Raises
        ------
        CheckpointError
            On all ranks, where any of them could not write this one or the one before.
        """
        self.finish()
        self._pending = begin_save(
            lambda: self.folder.target(step), model, optimizer,
            training=training, metadata=metadata, staging=self._staging,
        )  # fmt: skip
        if self._staging is None:
            self.finish()

    def poll(self) -> None:
        """Hear of the save under way, if there is one. Collective; called once a step.

        Raises
        ------
        CheckpointError
            As `save`.
        """
        if self._pending is not None and self._pending.poll():
            self._pending = None

    def finish(self) -> None:
        """Wait for the save under way, if there is one. Collective.

        Raises
        ------
        CheckpointError
            As `save`.
        """
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
