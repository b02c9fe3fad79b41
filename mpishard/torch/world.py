"""The world of a PyTorch program: this process's, or this thread's, backend."""

from __future__ import annotations

import builtins
import logging
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import torch

from mpishard.communication import CommunicationBackend
from mpishard.communication import init as init_backend
from mpishard.communication.contract.status import look_behind
from mpishard.communication.init import blas_threads
from mpishard.errors import NotInitializedError

_log = logging.getLogger("mpishard")

# One for each thread-rank, as a thread has a context of its own.
_world: ContextVar[CommunicationBackend | None] = ContextVar("torch_world", default=None)


def init(backend: Literal["auto", "mpi", "memory"] = "auto") -> CommunicationBackend:
    """Return the initialised backend of this process, and let PyTorch use its share of the cores.

    The same as `mpishard.init`. ``torch.distributed`` is not used. Under MPI PyTorch gets as many
    threads as `mpishard.init` gives to this rank's BLAS; ``OMP_NUM_THREADS`` and, afterwards,
    ``torch.set_num_threads`` change it.

    Parameters
    ----------
    backend : {"auto", "mpi", "memory"}
        See `mpishard.init`.

    Returns
    -------
    CommunicationBackend
        Ready for collectives.

    Raises
    ------
    MPIUnavailableError, CommunicationError, ValueError
        As `mpishard.init`.
    """
    world = init_backend(backend)
    _world.set(world)
    prepare_torch()
    return world


def prepare_torch() -> None:
    """Give PyTorch this rank's share of the cores, and let reports name the user's lines.

    The share is that of the rank's BLAS, if `mpishard.init` has set one. Idempotent.
    """
    # Autograd and optimizers call our hooks.
    look_behind(str(Path(torch.__file__).parent))
    threads = blas_threads()
    if threads is not None and torch.get_num_threads() > threads:
        torch.set_num_threads(threads)
        _log.info("%d PyTorch threads for each rank; torch.set_num_threads changes it", threads)


def current_world() -> CommunicationBackend:
    """Return the backend that `init` made here.

    Raises
    ------
    NotInitializedError
        Before `init`.
    """
    world = _world.get()
    if world is None or not world.is_initialized:
        raise NotInitializedError("call mpishard.torch.init() first, once on every rank")
    return world


def rank() -> int:
    """Return the number of this rank, in ``[0, world_size())``."""
    return current_world().rank


def world_size() -> int:
    """Return the number of ranks."""
    return current_world().world_size


def barrier() -> None:
    """Wait until every rank is here."""
    current_world().barrier()


def print(*values: object, flush: bool = True, **options: Any) -> None:  # noqa: A001
    """Print on rank 0 only; ``options`` are those of Python's ``print``."""
    if rank() == 0:
        builtins.print(*values, flush=flush, **options)  # noqa: T201
