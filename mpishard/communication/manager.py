"""The backend of the calling rank, for code that is not passed one."""

from __future__ import annotations

from contextvars import ContextVar

import numpy as np

from mpishard.base import (
    Array,
    CommunicationError,
    NotInitializedError,
    array_namespace,
    require_type,
)
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.reduction import ReductionOperation

# A context variable and no global, because thread-ranks share all globals.
_backend: ContextVar[CommunicationBackend | None] = ContextVar("manager_backend", default=None)
_REDUCIBLE = (np.dtype(np.float32), np.dtype(np.float64))


# A metaclass, because the mirrored interface has properties on the class itself.
class _WithState(type):
    """The metaclass of `CommunicationManager`, with the properties of the class itself."""

    @property
    def is_initialized(cls) -> bool:
        """Return whether this rank has set a backend that is not shut down."""
        return _given() is not None


class CommunicationManager(metaclass=_WithState):
    """Collectives without an object: a facade over the backend that this rank has set.

    The backend is kept in a context variable. A process under MPI has one. Each thread-rank has its
    own, and sets it itself. Threads that a rank starts have none. ``is_initialized`` says whether
    there is one. Before `initialize` other members raise `NotInitializedError`, a RuntimeError;
    afterwards they raise the errors of the backend. Pass a backend to code that can take one: that
    code then works with any backend.

    Examples
    --------
    >>> import numpy as np
    >>> from mpishard import CommunicationManager, run_in_threads
    >>> def body(backend):
    ...     CommunicationManager.initialize(backend)
    ...     return CommunicationManager.all_reduce(np.array([1.0])).tolist()
    >>> run_in_threads(3, body)
    [[3.0], [3.0], [3.0]]
    """

    @staticmethod
    def initialize(backend: CommunicationBackend) -> None:
        """Use ``backend`` from now on; initialise it if it is not initialised.

        Raises
        ------
        TypeError
            For anything but a `CommunicationBackend`.
        CommunicationError
            If this rank has set a backend already: a RuntimeError.
        """
        require_type("backend", backend, CommunicationBackend)
        if _given() is not None:
            raise CommunicationError(
                "the CommunicationManager has a backend already; call its shutdown() first"
            )
        backend.initialize()
        _backend.set(backend)

    @staticmethod
    def shutdown() -> None:
        """Shut the backend down and let it go. Idempotent."""
        backend = _backend.get()
        if backend is not None:
            # First, so that an exception of `shutdown` leaves no backend that is half shut down.
            _backend.set(None)
            backend.shutdown()

    @staticmethod
    def get_rank() -> int:
        """Return the rank of this process or thread."""
        return _ours().rank

    @staticmethod
    def get_world_size() -> int:
        """Return the number of ranks."""
        return _ours().world_size

    @staticmethod
    def barrier() -> None:
        """Wait until every rank is here."""
        _ours().barrier()

    @staticmethod
    def all_reduce(array: Array, operation: ReductionOperation = ReductionOperation.SUM) -> Array:
        """Combine every rank's array, in place; see `CommunicationBackend.all_reduce`.

        Raises
        ------
        NotImplementedError
            For a dtype other than float32 and float64, as the mirrored interface says. The
            backend's own method takes more.
        """
        return _ours(reduced=array).all_reduce(array, operation)

    @staticmethod
    def reduce_scatter(
        array: Array, operation: ReductionOperation = ReductionOperation.SUM
    ) -> Array:
        """Return this rank's piece of the reduced array; see `CommunicationBackend.reduce_scatter`.

        Raises
        ------
        NotImplementedError
            As `all_reduce`.
        """
        return _ours(reduced=array).reduce_scatter(array, operation)

    @staticmethod
    def all_gather(array: Array) -> Array:
        """Return all ranks' arrays, end to end in rank order."""
        return _ours().all_gather(array)

    @staticmethod
    def broadcast(array: Array | None, root: int = 0) -> Array:
        """Return the root's array. Raise ValueError for a root outside the world."""
        return _ours().broadcast(array, root)

    @staticmethod
    def scatter(array: Array | None, root: int = 0) -> Array:
        """Return this rank's piece of the root's array; ValueError if ``root`` is no rank."""
        return _ours().scatter(array, root)


def _given() -> CommunicationBackend | None:
    """Return the backend of this rank; None if there is none, or its owner has shut it down."""
    backend = _backend.get()
    return backend if backend is not None and backend.is_initialized else None


def _ours(reduced: Array | None = None) -> CommunicationBackend:
    """Return the backend of this rank; check the dtype of the array that it will reduce, if any."""
    backend = _given()
    if backend is None:
        raise NotInitializedError(
            "the CommunicationManager has no backend here; call "
            "CommunicationManager.initialize(backend) on every rank, each with its own"
        )
    if reduced is not None:
        array_namespace(reduced)  # refuses other objects
        if reduced.dtype not in _REDUCIBLE:
            raise NotImplementedError(
                f"the CommunicationManager reduces float32 and float64, got {reduced.dtype}; the "
                "backend's own all_reduce and reduce_scatter take other dtypes"
            )
    return backend
