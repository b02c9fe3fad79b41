"""World of a PyTorch program: the backend of this process, or of this thread-rank."""

from __future__ import annotations

import builtins
import logging
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from mpishard.base import NotInitializedError
from mpishard.communication import BackendName, CommunicationBackend, blas_threads, skip_frames_of
from mpishard.communication import init as init_backend

_log = logging.getLogger("mpishard")

# Each thread-rank has its own value, because a thread has a context of its own.
_world: ContextVar[CommunicationBackend | None] = ContextVar("torch_world", default=None)


def init(backend: BackendName = "auto") -> CommunicationBackend:
    """Return the initialised backend of this process, and set the number of PyTorch's threads.

    The backend is that of `mpishard.init`; ``torch.distributed`` is not used. Under MPI PyTorch
    gets as many threads as `mpishard.init` gives to this rank's BLAS. ``OMP_NUM_THREADS`` or, after
    this call, ``torch.set_num_threads`` changes it.

    Parameters
    ----------
    backend : {"auto", "mpi", "nccl", "memory"}
        Kind of the backend: see `mpishard.init`.

    Returns
    -------
    CommunicationBackend
        Backend that is ready for collectives.

    Raises
    ------
    MPIUnavailableError, CommunicationError, ValueError
        As for `mpishard.init`.
    """
    world = init_backend(backend)
    _world.set(world)
    prepare_torch()
    return world


def prepare_torch() -> None:
    """Set the number of PyTorch's threads, and let reports name the user's lines.

    The number is that of the rank's BLAS, if `mpishard.init` has set one. It is never raised. The
    function may be called again.
    """
    # PyTorch's autograd and optimizers call our hooks, so that the user's line is behind theirs.
    skip_frames_of(str(Path(torch.__file__).parent))
    # The user may have set fewer threads before, and they stay.
    threads = blas_threads()
    if threads is not None and torch.get_num_threads() > threads:
        torch.set_num_threads(threads)
        _log.info("%d PyTorch threads for each rank; torch.set_num_threads changes it", threads)


def current_world() -> CommunicationBackend:
    """Return the backend that `init` made in this process or thread-rank.

    Raises
    ------
    NotInitializedError
        If `init` was not called.
    """
    world = _world.get()
    if world is None or not world.is_initialized:
        raise NotInitializedError("call mpishard.torch.init() first, once on every rank")
    return world


def rank() -> int:
    """Return this rank, in ``[0, world_size())``."""
    return current_world().rank


def world_size() -> int:
    """Return the number of ranks."""
    return current_world().world_size


def barrier() -> None:
    """Wait until every rank has called it. Collective."""
    current_world().barrier()


def print(*values: object, flush: bool = True, **options: Any) -> None:  # noqa: A001
    """Print on rank 0 only; ``options`` are those of Python's ``print``."""
    if rank() == 0:
        builtins.print(*values, flush=flush, **options)  # noqa: T201
