"""The exceptions of mpishard, and their tree.

::

    MpishardError (Exception)
    |-- CommunicationError (RuntimeError)
    |   |-- NotInitializedError            a collective before initialize() or after shutdown()
    |   |-- CollectiveMismatchError        the ranks called different collectives
    |   |-- PeerError                      another rank raised, or left
    |   |-- CollectiveTimeoutError         (TimeoutError) a rank never arrived
    |   `-- MPIUnavailableError            MPI was asked for and is not there or not the launcher's
    |-- OutMismatchError (ValueError)      the ranks' out arrays do not fit
    |-- ShardingError (RuntimeError)       a use that the strategy of a sharded model forbids
    |   `-- StructureOnlyError             parameters asked of a model whose wrapper holds them
    |-- ReplicaError (RuntimeError)        the ranks' copies of a parameter differ
    |-- DeviceUnavailableError (RuntimeError)  a GPU was asked for; CuPy or the GPU is not there
    |-- NonFiniteLossError (ArithmeticError)
    |-- NoSampleError (ValueError)         a step in which all weights are 0, on all ranks
    |-- MissingInterfaceError (RuntimeError)  a model does not implement an interface
    |   `-- MissingMemberError (NotImplementedError)  a user's model lacks a member
    |-- MissingLossError (RuntimeError)    gradients asked of a model that has no loss
    `-- CheckpointError (OSError)          a checkpoint that is torn, or does not fit the model
    Preempted (SystemExit)               a training run was preempted, and has saved

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
    """Raised when ranks cannot communicate as requested."""


class NotInitializedError(CommunicationError):
    """Raised when a backend is used before ``initialize()`` or after ``shutdown()``."""


class CollectiveMismatchError(CommunicationError):
    """Raised on every rank when the ranks called collectives that do not belong together.

    No data was mixed when it is raised. The message lists each rank's call, with its line in the
    script and the function of this package that was called there. It names the odd ones out if most
    ranks agree, or the call at which the ranks parted. Cause: a branch that depends on the rank, or
    an array whose dtype or shape does. Fix: make the call on all ranks, with equal values of the
    arguments that must match, as the method's documentation says.
    """


class OutMismatchError(MpishardError, ValueError):
    """Raised on every rank if the ``out`` arrays of a collective do not fit the data.

    Their rows are not the sum of the ranks' rows, or one overlaps an array that other ranks read.
    The message names the ranks. Nothing was written, and collectives can still be called.
    """


class PeerError(CommunicationError):
    """Raised on a rank because another rank failed or left.

    Parameters
    ----------
    message : str
        The event, with the origin rank and the collective.
    rank : int
        The rank where the failure began. This is its number in the root world, also in a group that
        was split off, or an axis of a mesh. It is -1 if a thread that is no rank failed, or if no
        rank failed and another one called ``shrink()``.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        # The error may be sent to another process, and pickle would call ``cls(message)`` only.
        return type(self), (str(self), self.rank), self.__dict__


class CollectiveTimeoutError(CommunicationError, TimeoutError):
    """Raised when a rank waited longer than the time limit for the others to arrive.

    The message names the ranks that did not arrive and their present activity, with a table of all
    ranks. In memory every rank that waits in a collective raises it, with the message of the first.
    Under MPI the job ends (exit code 124) with this message.
    """


class MPIUnavailableError(CommunicationError):
    """Raised when MPI was asked for and mpi4py, the library or the launcher does not fit."""


class ShardingError(MpishardError, RuntimeError):
    """Raised when a sharded model or optimizer is used in a way that its strategy forbids."""


class StructureOnlyError(ShardingError):
    """Raised when a model without parameters, which its wrapper holds now, is asked for them."""


class ReplicaError(MpishardError, RuntimeError):
    """Raised on every rank when their copies of a parameter, which should be equal, differ."""


class DeviceUnavailableError(MpishardError, RuntimeError):
    """Raised when a GPU is asked for and CuPy is not installed, or finds none."""


class NonFiniteLossError(MpishardError, ArithmeticError):
    """Raised on every rank, before the update, when the loss or its gradient is not finite.

    Attributes
    ----------
    result : OptimizeResult or None
        From `minimize`, the best point before the error: ``x``, ``fun``, ``nit`` and the other
        fields, the same on every rank. None if no evaluation was finite, and elsewhere.
    """

    # An attribute of the class, because only `minimize` sets it.
    result: Any = None


class NoSampleError(MpishardError, ValueError):
    """Raised on every rank, before the update, when no rank has a sample that counts."""


class MissingInterfaceError(MpishardError, RuntimeError):
    """Raised when a model does not implement an interface, which the message names.

    An example are the features of a model, which only linear models know.
    """


class MissingMemberError(MissingInterfaceError, NotImplementedError):
    """Raised when a user's model lacks a member at the moment it is needed."""


class MissingLossError(MpishardError, RuntimeError):
    """Raised when the gradient of a model without a loss is computed, and no loss is given."""


class CheckpointError(MpishardError, OSError):
    """Raised when a checkpoint is incomplete, corrupt, or does not fit the model."""


class Preempted(SystemExit):
    """Raised on every rank when a signal has preempted a run, and its checkpoint is written.

    It is a SystemExit and no Exception. If nobody catches it, ``with`` and ``finally`` run, all
    ranks leave in good order, and the process ends with `code`, 75. The same command goes on from
    the checkpoint. If a script has work to do before it ends, it catches the error, and raises it
    again.

    Parameters
    ----------
    message : str
        The step, and the checkpoint that was saved.
    step : int
        Number of updates that the run has made.
    code : int
        The exit code of the process.
    """

    def __init__(self, message: str, step: int, code: int) -> None:
        super().__init__(code)
        self.message = message
        self.step = step

    def __str__(self) -> str:
        return self.message

    # As above: pickle would pass the exit code as the message.
    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.step, self.code)


# Users import them from `mpishard.errors`, and see that name in a traceback.
for _name in __all__:
    globals()[_name].__module__ = "mpishard.errors"
