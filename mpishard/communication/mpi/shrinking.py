"""What becomes of an MPI world where a rank is gone, and the others go on."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self

from mpishard.communication.failure import hooks as exit_hooks
from mpishard.communication.mpi.library import leave_mpi_running
from mpishard.communication.mpi.quick_collectives import QuickCollectives
from mpishard.communication.mpi.ulfm import OnFailure, check_on_failure, check_survivable
from mpishard.communication.tracing.session import stop_recording
from mpishard.errors import CommunicationError

if TYPE_CHECKING:
    from mpishard.communication.mpi.job import Job

__all__ = ["ShrinkingWorld"]

_IN_SHRINK = "in shrink() for the other ranks that are left"


class ShrinkingWorld(QuickCollectives):
    """The part of the MPI backend that goes on without ranks that are gone.

    Parameters
    ----------
    on_failure : {"abort", "shrink"}
        Whether it does.
    """

    _mpi: Any
    _job: Job | None

    def __init__(self, on_failure: OnFailure) -> None:
        super().__init__()
        check_on_failure(on_failure)
        self._on_failure: OnFailure = on_failure
        self._may_record = True

    def _require_survival(self) -> None:
        if self._on_failure == "abort":
            raise CommunicationError(
                f"init(on_failure='shrink'): this process has {self.describe()} already, made with "
                "on_failure='abort'; the first init() of the process decides"
            )

    def _prepare_to_survive(self) -> None:
        """Refuse, before anything is communicated, what this MPI cannot do."""
        if self._on_failure == "shrink" and self.world_size > 1:
            check_survivable(self._mpi.Get_library_version())
            leave_mpi_running()

    def _explain(self, error: Exception, where: str) -> Exception:
        return error if self._job is None else self._job.explain(error, where)

    @abstractmethod
    def _world_of(self, comm: Any) -> Self:
        """A backend, not initialised, of the ranks of ``comm``."""

    def _shrink(self) -> Self:
        job = self._job
        assert job is not None
        survival = job.survival
        if self._on_failure == "abort":
            raise CommunicationError(
                f"{self.describe()} ends where one of its ranks does: it was made with "
                "on_failure='abort'; use mpishard.init(on_failure='shrink')"
            )
        if survival is None:
            raise CommunicationError(f"{self.describe()} has no other ranks that it could lose")
        made: list[Self] = []

        def build(comm: Any) -> None:
            world = self._world_of(comm)
            made.append(world)
            world._may_record = False  # ranks have other numbers now, and traces of the old ones
            world.initialize()

        def undo() -> None:
            for world in made:
                exit_hooks.remove(world)
                if world._job is not None:
                    world._job.retire()
            made.clear()

        stop_recording(self, survival.error)
        with job.wait(lambda: _IN_SHRINK):
            job.call_off()
            survival.succeed(build, undo)
        heir = made[0]
        exit_hooks.remove(self)
        for group in job.backends():
            group._retire(heir)
        job.retire()
        return heir
