"""Every exception that mpishard raises on purpose, and where it hangs.

::

    MpishardError (Exception)
    |-- CommunicationError (RuntimeError)
    |   |-- NotInitializedError            a collective before initialize() or after shutdown()
    |   |-- CollectiveMismatchError        the ranks called different collectives
    |   |-- PeerError                      another rank raised, or left
    |   |-- CollectiveTimeoutError         (TimeoutError) a rank never arrived
    |   `-- MPIUnavailableError            MPI was asked for and is not there or not the launcher's
    |-- OutMismatchError (ValueError)      the ranks' out arrays do not fit
    |-- ShardingError (RuntimeError)       a sharded model was used as its strategy cannot mean
    |   `-- StructureOnlyError             parameters asked of a model whose wrapper holds them
    |-- ReplicaError (RuntimeError)        the ranks' copies of a parameter differ
    |-- DeviceUnavailableError (RuntimeError)  a GPU was asked for; CuPy or the GPU is not there
    |-- NonFiniteLossError (ArithmeticError)
    |-- NoSampleError (ValueError)         a step in which all weights are 0, on all ranks
    |-- MissingInterfaceError (RuntimeError)  a model was asked what its kind does not know
    |   `-- MissingMemberError (NotImplementedError)  a user's model lacks a member
    |-- MissingLossError (RuntimeError)    gradients asked of a model that has no loss
    `-- CheckpointError (OSError)          a checkpoint that is torn, or does not fit the model
    Preempted (SystemExit)               a training run was told to make room, and has saved

A wrong argument is a plain ``TypeError`` or ``ValueError``, raised before
anything is communicated, written or changed.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommunicationError",
    "DeviceUnavailableError",
    "MPIUnavailableError",
    "MissingInterfaceError",
    "MissingLossError",
    "MissingMemberError",
    "MpishardError",
    "NoSampleError",
    "NonFiniteLossError",
    "NotInitializedError",
    "OutMismatchError",
    "PeerError",
    "Preempted",
    "ReplicaError",
    "ShardingError",
    "StructureOnlyError",
]


class MpishardError(Exception):
    """Root of every exception that mpishard defines."""


class CommunicationError(MpishardError, RuntimeError):
    """Raised when ranks cannot talk to each other as asked."""


class NotInitializedError(CommunicationError):
    """Raised when a backend is used before ``initialize()`` or after ``shutdown()``."""


class CollectiveMismatchError(CommunicationError):
    """Raised on every rank when the ranks called collectives that do not belong together.

    No data was mixed when it is raised. The message lists each rank's call, where in the script it
    was made and in which function of this package, and names the odd ones out if most ranks
    agree, or where the ranks parted. Cause: a branch that depends on the rank, or arrays whose
    dtype or shape does. Mend: make the call on all ranks, with the arguments that the collective's
    table entry says must match.
    """


class OutMismatchError(MpishardError, ValueError):
    """Raised on every rank if the ``out`` arrays of a collective do not fit the data.

    Their rows are not the sum of the ranks' rows, or one overlaps an array that other ranks read.
    The message names the ranks. Nothing was written, and the world goes on.
    """


class PeerError(CommunicationError):
    """Raised on a rank because another rank failed or left.

    Parameters
    ----------
    message : str
        The event, with the origin rank and the collective.
    rank : int
        The rank where the failure began, by its number in the root world: also where the
        collective is one of a group that was split off, or of an axis of a mesh. -1 if it was
        a thread that is no rank, or if nobody failed and another rank called ``shrink()``.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        # What is raised in one process may be told in another.
        return type(self), (str(self), self.rank), self.__dict__


class CollectiveTimeoutError(CommunicationError, TimeoutError):
    """Raised when a rank waited longer than the time limit for the others to arrive.

    The message names the ranks that did not arrive and their present activity, with a table of all
    ranks. In memory every rank that waits in a collective raises it, with the words of the first;
    under MPI the job ends (exit code 124) with the same words.
    """


class MPIUnavailableError(CommunicationError):
    """Raised when MPI was asked for and mpi4py, the library or the launcher does not fit."""


class ShardingError(MpishardError, RuntimeError):
    """Raised when a sharded model or optimizer is used in a way its strategy cannot mean."""


class StructureOnlyError(ShardingError):
    """Raised when parameters are asked of a model whose wrapper holds them now."""


class ReplicaError(MpishardError, RuntimeError):
    """Raised on every rank when their copies of a parameter, which should be equal, differ."""


class DeviceUnavailableError(MpishardError, RuntimeError):
    """Raised when a GPU is asked for and CuPy is not installed, or finds none."""


class NonFiniteLossError(MpishardError, ArithmeticError):
    """Raised on every rank, before the update, when the loss or its gradient is not finite."""


class NoSampleError(MpishardError, ValueError):
    """Raised on every rank, before the update, when no rank has a sample that counts."""


class MissingInterfaceError(MpishardError, RuntimeError):
    """Raised when a model is asked what its kind does not know, naming the interface.

    So do a model's features, which only linear models know.
    """


class MissingMemberError(MissingInterfaceError, NotImplementedError):
    """Raised when a user's model lacks a member at the moment it is needed."""


class MissingLossError(MpishardError, RuntimeError):
    """Raised when a gradient is asked of a model without a loss, and no loss is given."""


class CheckpointError(MpishardError, OSError):
    """Raised when a checkpoint is incomplete, corrupt, or does not fit the model."""


class Preempted(SystemExit):
    """Raised on every rank when a signal told a run to make room, and its checkpoint is written.

    A SystemExit, and no Exception: if nobody catches it, ``with`` and ``finally`` run, all ranks
    leave in good order, and the process ends with `code`, 75. The same command goes on from the
    checkpoint. A script that has something to do before it ends catches it, and raises it again.

    Parameters
    ----------
    message : str
        The checkpoint that was saved, and its place.
    step : int
        Updates that the run has made.
    code : int
        The exit code of the process.
    """

    def __init__(self, message: str, step: int, code: int) -> None:
        super().__init__(code)
        self.message = message
        self.step = step

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.step, self.code)
