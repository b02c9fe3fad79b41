"""World of a PyTorch program: the backend of this process, or of this thread-rank."""

from __future__ import annotations

import builtins
import logging
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpishard.base import NotInitializedError, require_type
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


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the mean over the ranks of a tensor that each of them has. Collective.

    For instance for a parameter that ``forward`` sets from the samples of a rank
    (``self.shift.data = mean_over_ranks(x.mean(0))``), or for a loss to print.

    Parameters
    ----------
    values : torch.Tensor
        Values on the CPU of floating point, of the same shape on every rank, without a gradient.

    Returns
    -------
    torch.Tensor
        New tensor of the same shape and dtype, equal on every rank.

    Raises
    ------
    TypeError
        If the values are no tensor.
    ValueError
        If the values require a gradient, which would not go through the mean, or are integers.
    CollectiveMismatchError
        If shapes or dtypes differ between ranks.
    """
    require_type("values", values, torch.Tensor)
    if values.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "mean_over_ranks() of values that require a gradient would drop it: give "
            "values.detach(); backward() itself takes the mean of gradients over the ranks"
        )
    if not values.is_floating_point():
        raise ValueError(f"the values must be of floating point, got {values.dtype}")
    backend = current_world()
    wide = values.detach().contiguous()
    wide = wide.float() if wide.itemsize == 2 else wide
    total = backend.all_reduce(wide.reshape(-1).numpy())
    mean = torch.from_numpy(np.asarray(total)) / backend.world_size
    return mean.view(values.shape).to(values.dtype)


def barrier() -> None:
    """Wait until every rank has called it. Collective."""
    current_world().barrier()


def print(*values: object, flush: bool = True, **options: Any) -> None:  # noqa: A001
    """Print on rank 0 only; ``options`` are those of Python's ``print``."""
    if rank() == 0:
        builtins.print(*values, flush=flush, **options)  # noqa: T201
