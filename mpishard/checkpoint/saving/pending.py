"""A save under way: the ranks' common steps until its checkpoint is in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from mpishard.base import CheckpointError
from mpishard.checkpoint.format.folder import Target
from mpishard.checkpoint.saving.background import BackgroundTask, TaskState
from mpishard.checkpoint.saving.free_space import FoundSpace
from mpishard.checkpoint.saving.host_pieces import Content
from mpishard.checkpoint.saving.save_files import SaveFiles
from mpishard.checkpoint.saving.staging import StagingBuffer
from mpishard.communication import CommunicationBackend, GatheredTexts, agree, all_texts

# Seconds between two collectives of ranks that wait for a slow disk. This is far below the time
# limit of a collective, and long enough that the cost does not matter.
_MEET_SECONDS = 1.0
# Maximum seconds that a rank, whose job ends for another reason, waits for its thread: a disk may
# hang.
_ABANDON_SECONDS = 2.0


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
        self.done = False
        """True if the checkpoint is complete and in its place."""
        self._files = self._agreed_files(make_target, make_content, staging)
        # The rank's present work: its file; on rank 0 then the commit, which is None until it has
        # the records of all ranks.
        self._task: BackgroundTask | None = BackgroundTask(self._files.write)
        # The records of all files, on rank 0; None until all ranks have written.
        self._records: GatheredTexts | None = None
        # Returns the states of all ranks; None if no exchange is under way.
        self._receive: Callable[[], list[int]] | None = None
        self._failure: BaseException | None = None

    def _agreed_files(
        self,
        make_target: Callable[[], Target],
        make_content: Callable[[], Content],
        staging: StagingBuffer | None,
    ) -> SaveFiles:
        """Return this rank's files, after all ranks have agreed to write. Collective."""
        own: list[SaveFiles] = []

        def prepare() -> tuple[int, FoundSpace | None]:
            files = SaveFiles(self._rank, make_content(), staging)
            own.append(files)
            return files.nbytes, files.make_directory(make_target()) if self._rank == 0 else None

        try:
            # One exchange decides about the whole save: it has errors, sizes and free bytes.
            everyone = agree(self._backend, prepare, self._subject)
            found = everyone[0][1]
            assert found is not None
            own[0].use_directory(found, sum(nbytes for nbytes, _ in everyone))
        except BaseException:
            for files in own:
                files.discard()
            raise
        return own[0]

    @property
    def has_failed(self) -> bool:
        """True if this rank could not write. `wait` then raises on all. Communicates nothing."""
        return self._state is TaskState.FAILED

    @property
    def _state(self) -> TaskState:
        return TaskState.WORKING if self._task is None else self._task.state

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
        with self._remembered_failure():
            self._receive_states()
            if not self.done:
                self._begin_commit(waits=False)
                self._send_state()
        return self.done

    def wait(self) -> None:
        """Wait until the save is done. Collective.

        Raises
        ------
        CheckpointError
            As for `poll`.
        """
        with self._remembered_failure():
            self._receive_states()  # Of a `poll` before.
            while not self.done:
                self._begin_commit(waits=True)
                # The wait is short, so that ranks with a slow disk do not look as if they hang.
                if self._task is not None:
                    self._task.join(_MEET_SECONDS)
                self._send_state()
                self._receive_states()

    def abandon(self) -> None:
        """Stop writing, because this rank cannot continue with the others. Communicates nothing.

        A save that is just being moved to its place may still become a checkpoint. Otherwise the
        next save to the same place removes its files.
        """
        self._files.abandon()
        if self._task is not None:
            self._task.join(_ABANDON_SECONDS)

    @contextmanager
    def _remembered_failure(self) -> Iterator[None]:
        """Raise an earlier error again, and remember one that is raised now."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except BaseException as error:
            self._failure = error
            if not isinstance(error, CheckpointError):
                # The surviving ranks may save again, and this thread must not interfere.
                self.abandon()
            raise

    # ------------------------------------------------------------------ steps common to all ranks

    def _send_state(self) -> None:
        """Begin to exchange the states of all ranks. Collective."""
        state = np.array([int(self._state)])
        if self._backend is None:
            self._receive = state.tolist
        else:
            work = self._backend.all_gather_async(state, subject=self._subject)
            self._receive = lambda: work.wait().tolist()

    def _receive_states(self) -> None:
        """End an exchange; begin the save's next part if no rank is working. Collective."""
        if self._receive is None:
            return
        states = self._receive()
        self._receive = None
        # All ranks have the same states, and therefore take the same branch.
        if TaskState.WORKING in states:
            return
        if TaskState.FAILED in states:
            self._raise_errors()
        if self._records is None:
            # Records grow with the model, and only rank 0 needs them: this is not an all-gather.
            self._records = GatheredTexts(self._backend, self._files.record, self._subject)
            # Rank 0 works once more, to commit. The other ranks only wait for it.
            if self._rank == 0:
                self._task = None
        else:
            self._records.wait()
            self.done = True

    def _begin_commit(self, *, waits: bool) -> None:
        """Commit in a thread of rank 0 as soon as the records of all ranks are there."""
        # `_task` is None only on rank 0, and only then.
        if self._task is None and self._records is not None and (waits or self._records.done):
            self._task = BackgroundTask(partial(self._files.commit, self._records.wait()))

    def _raise_errors(self) -> None:
        """Raise the errors of all ranks on every rank. Collective."""
        texts = [text] if (text := self._files.state_of_disk()) else []
        # No rank is writing now, because this is called only if none is working.
        self._files.discard()
        error = None if self._task is None else self._task.error
        if error is not None:
            is_ours = isinstance(error, CheckpointError)
            message = str(error) if is_ours else f"{type(error).__name__}: {error}"
            texts.append(f"rank {self._rank}: {message}")
        everyone = all_texts(self._backend, "; ".join(texts), self._subject)
        raise CheckpointError("; ".join(everyone)) from error
