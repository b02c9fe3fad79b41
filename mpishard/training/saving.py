"""A training run's checkpoints: when they are written, and which of them a run continues."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from mpishard.base import (
    CheckpointError,
    Metadata,
    NonFiniteLossError,
    NoSampleError,
    Preempted,
    settings,
)
from mpishard.callbacks import Preemption
from mpishard.checkpoint import (
    ANYTHING,
    COUNT,
    MANIFEST,
    NUMBER,
    OBJECT,
    TEXT,
    CheckpointableOptimizer,
    CheckpointFolder,
    CheckpointReader,
    CheckpointState,
    Kind,
    PendingSave,
    StagingBuffer,
    begin_save,
    find_single,
    newest_valid,
    require_form,
    reserve,
    states_of,
)
from mpishard.communication import CommunicationBackend, same_outcome, share_path
from mpishard.models import ShardedModelBase
from mpishard.training.data import OptimizationInputData
from mpishard.training.run_state import BestParameters, UserState

_log = logging.getLogger("mpishard")

LOOP = "training_loop"
"""Key of the run's position in a checkpoint's metadata."""

_STEP = Kind("a whole number, or null", lambda value: value is None or COUNT.holds(value))
_FORM = {
    "step": COUNT,
    "epoch_sums": (NUMBER, NUMBER),
    "fitness_history": [NUMBER],
    "validation_history": [(COUNT, NUMBER)],
    "stopping": {"best_score": NUMBER, "best_step": _STEP, "reference": NUMBER, "waited": COUNT},
    "order": OBJECT,
    "user_state": {"names": [TEXT], "ranks": [OBJECT]},
}


def folder_of(data: OptimizationInputData) -> CheckpointFolder:
    """Return the folder that a run saves to."""
    assert data.checkpoint is not None
    return CheckpointFolder(data.checkpoint, keep_last=data.keep_last, keep_every=data.keep_every)


def checkpoint_to_resume(
    data: OptimizationInputData,
    backend: CommunicationBackend,
    folder: CheckpointFolder | None,
) -> Path | None:
    """Return the checkpoint that a run continues from; None if it begins anew. Collective.

    Raises
    ------
    FileNotFoundError
        If one was asked for, and there is none.
    CheckpointError
        If none of the existing ones can be used.
    """
    if data.resume is False or (data.resume is None and data.checkpoint is None):
        return None
    is_asked_for = data.resume is not None
    place = data.checkpoint if data.resume in (None, True) else data.resume
    assert place is not None
    assert not isinstance(place, bool)
    found = None
    with same_outcome(backend):
        if backend.rank == 0:  # for all ranks, because their working directories may differ
            found = find_single(place)
    # The path that rank 0 has found: other hosts may see an older listing of the folder.
    found = share_path(backend, found)
    if found is not None:
        return found
    # The run's own folder object keeps the manifests that it has read.
    own = folder if data.resume in (None, True) else None
    newest = newest_valid(own or place, backend)
    if newest is None and is_asked_for:
        raise FileNotFoundError(
            f"resume: there is no checkpoint in {Path(place)}; leave resume out to start a new "
            "run if there is none"
        )
    return newest


_FIRST_ONLY = (
    "a folder without checkpoints begins anew. Or give resume in the first start only, if "
    "mpishard.base.settings.restart_count() == 0"
)


class RunCheckpoints:
    """The saves of one run, one at a time.

    Parameters
    ----------
    data : OptimizationInputData
        The arguments of the run, with a ``checkpoint``.
    backend : CommunicationBackend
        The ranks that train together.
    allowed_ranks : tuple of int
        The fewest and the most ranks that may continue the run. If each rank has data of its own,
        only as many ranks as now can.
    on_saved : callable
        Called with the folder of each checkpoint that is on the disk, on all ranks.
    """

    def __init__(
        self,
        data: OptimizationInputData,
        backend: CommunicationBackend,
        allowed_ranks: tuple[int, int] = (1, sys.maxsize),
        on_saved: Callable[[Path], object] = str,
    ) -> None:
        self._on_saved = on_saved
        self.folder = folder_of(data)
        self._rank = backend.rank
        # The setting that keeps the same script, started again, from continuing this run.
        self._begins_anew = ""
        if data.resume is False or (
            not isinstance(data.resume, bool | None)
            and CheckpointFolder(data.resume).path != self.folder.path
        ):
            self._begins_anew = f"resume={data.resume!r}"
            # Restarts that make no use of what this run saves.
            causes = ["on_failure='shrink' begins main again"] * backend._begins_again
            if restarts := settings.most_restarts():
                causes.append(f"mpishard run --max-restarts {restarts} starts the job again")
            if causes and self._rank == 0:
                _log.warning(
                    "%s, and %s if it fails: it would not go on from its checkpoints in %s, and "
                    "write over them. Leave resume out; %s",
                    self._begins_anew,
                    " and ".join(causes),
                    self.folder.path,
                    _FIRST_ONLY,
                )
            allowed_ranks = 0, 0  # a run of any number of ranks would begin anew
        # No other rank has the samples of a rank that is missing.
        elif data.local_data:
            allowed_ranks = backend.world_size, backend.world_size
        self._preemption = Preemption(backend, allowed_ranks)
        self._every = data.checkpoint_every
        # A save in the background first copies the state, because training changes it meanwhile.
        self._staging = StagingBuffer() if data.checkpoint_async else None
        self._pending: PendingSave | None = None
        self._step = 0  # of the last save

    def reserve(
        self, model: ShardedModelBase, optimizer: CheckpointableOptimizer, *, keeps_best: bool
    ) -> None:
        """Take the memory for the copies of saves before the run trains. Collective.

        Raises
        ------
        OSError
            If there is not enough.
        """
        if self._staging is not None:
            reserve(self._staging, model, optimizer, kept=int(keeps_best))

    def require_access(self) -> None:
        """Refuse a folder that cannot be saved to. Rank 0 looks for all; nothing is communicated.

        Raises
        ------
        CheckpointError
            If it is a file, or this user may not write there.
        """
        if self._rank == 0:
            self.folder.target(0)
            self.folder.require_access()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context in which the run trains; after it no save is under way. Collective.

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
                # An error of this rank alone: the other ranks do not end the save together with it.
                if self._pending is not None:
                    self._pending.abandon()
                raise
            self.finish()

    def is_preempted(self) -> bool:
        """Return whether any rank was ordered to save and end. Collective; called once a step.

        Raises
        ------
        CheckpointError
            As `save`, if the save under way has failed on any rank.
        """
        if self._pending is None:
            return self._preemption.is_asked()
        # All ranks learn of a failure in this step; through `poll` they would in the next.
        # In one message: this is asked after each step.
        is_asked, has_failed = self._preemption.is_asked_or(self._pending.has_failed)
        if has_failed:
            self.finish()
        return is_asked

    def leave(self, step: int, total: int) -> NoReturn:
        """End the run on all ranks once the save after ``step`` is on the disk. Collective.

        Raises
        ------
        Preempted
            Always, unless the save failed.
        CheckpointError
            As `save`.
        """
        # The job may be killed as soon as it ends, so that the save must be on the disk.
        self.finish()
        place = self.folder.path_of(step)
        message = f"preempted after step {step} of {total}; saved in {place}"
        if self._rank == 0 and self._begins_anew:
            _log.warning("%s; to resume from there, leave %s out", message, self._begins_anew)
        elif self._rank == 0:
            _log.warning("%s; the same command resumes from there", message)
        raise Preempted(message, step, settings.EXIT_PREEMPTED)

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Return whether to save after ``step`` steps."""
        return is_last or (self._every is not None and step % self._every == 0)

    def save(
        self,
        step: int,
        model: ShardedModelBase,
        optimizer: CheckpointableOptimizer,
        training: CheckpointState | None,
        metadata: Mapping[str, object],
    ) -> None:
        """Save, or begin to save if that is done in the background. Collective.

        Raises
        ------
        CheckpointError
            On all ranks, if any of them could not write this one or the previous one.
        """
        # One save at a time: the last one may be under way still, and uses the memory for copies.
        self.finish()
        self._step = step
        self._pending = begin_save(
            lambda: self.folder.target(step),
            model,
            metadata=metadata,
            staging=self._staging,
            states=lambda: states_of(model, optimizer, training),
        )
        # Without memory for a copy the arrays must not change before they are written.
        if self._staging is None:
            self.finish()

    def poll(self) -> None:
        """Ask whether the save under way, if any, has ended. Collective; called once a step.

        Raises
        ------
        CheckpointError
            As `save`.
        """
        if self._pending is not None and self._pending.poll():
            self._ended()

    def finish(self) -> None:
        """Wait for the save under way, if any. Collective.

        Raises
        ------
        CheckpointError
            As `save`.
        """
        if self._pending is not None:
            self._pending.wait()
            self._ended()

    def _ended(self) -> None:
        # First, so that an error of a callback does not leave a save that is over.
        self._pending = None
        self._on_saved(self.folder.path_of(self._step))


# ----------------------------------------------------------------------------------- positions


def check_position(
    path: Path, backend: CommunicationBackend, order: Metadata, user_state: UserState
) -> bool:
    """Refuse a checkpoint that a run with this order of samples cannot continue. Collective.

    Nothing is loaded.

    Returns
    -------
    bool
        Whether the checkpoint has the best parameters so far.

    Raises
    ------
    ValueError
        If there is no position of a training loop, the order of samples would differ, or the names
        of the user's own state differ. If each rank had its own data, and the number of ranks is
        another now.
    FileNotFoundError, CheckpointError
        As `CheckpointReader`.
    """
    with same_outcome(backend):
        reader = CheckpointReader(path)
        try:
            require_form(reader.metadata, {"user": {f"{LOOP}?": _FORM}}, "metadata")
            position: Mapping[str, Any] | None = reader.metadata["user"].get(LOOP)
            if position is not None:
                state = position["user_state"]
                form = [dict.fromkeys(state["names"], ANYTHING)]
                require_form(state["ranks"], form, f"metadata.user.{LOOP}.user_state.ranks")
        except ValueError as error:
            raise CheckpointError(f"cannot use {reader.path / MANIFEST}: {error}") from None
        if position is None:
            raise ValueError(
                f"{path} was not saved by optimize, so it has no position in the data: load it "
                "with model.load_model, and train without resume"
            )
        saved = position["order"]
        if order["local_data"] and isinstance(saved.get("samples"), list):
            before, now = len(saved["samples"]), len(order["samples"])
            if before != now:
                raise ValueError(
                    f"the run was saved with local_data by {before} ranks, and there are {now} "
                    "now: it is not known which samples of the epoch are left. Resume it with "
                    f"{before} ranks, or load it with model.load_model and train without resume"
                )
        # Before the model is loaded, so that a refusal leaves it as it was.
        differing = [
            f"{name} was {saved.get(name)} and is {value}"
            for name, value in order.items()
            if saved.get(name) != value
        ]
        if differing:
            raise ValueError(
                "the run cannot be resumed, because the order of samples would differ: "
                + "; ".join(differing)
                + ". For a new run choose another folder, or pass resume=False"
            )
        user_state.check(position["user_state"])
    return BestParameters.KIND in reader.kinds
