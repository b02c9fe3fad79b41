"""The norm of gradients that ranks have divided, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpishard.communication import ReductionOperation
from mpishard.torch.module import module_of, part_of
from mpishard.torch.parameters import Part

__all__ = ["clip_grad_norm_", "norm_of"]


def norm_of(parts: Sequence[Part], order: float = 2.0) -> float:
    """Return the p-norm of the gradients over all parts and ranks. Collective."""
    is_largest = math.isinf(order)
    shared, alone = 0.0, 0.0  # of divided gradients, and of those that each rank has whole
    for part in parts:
        gradient = part.tensor.grad
        if gradient is None:
            continue
        norm = float(torch.linalg.vector_norm(gradient, order)) if gradient.numel() else 0.0
        value = norm if is_largest else norm**order
        if not part.owner.shards_state:
            alone = max(alone, value) if is_largest else alone + value
        else:
            shared = max(shared, value) if is_largest else shared + value
    # Replicas have the same gradients: added up over the ranks each would count several times.
    if any(part.owner.shards_state for part in parts):
        operation = ReductionOperation.MAX if is_largest else ReductionOperation.SUM
        shared = float(parts[0].owner.backend.all_reduce(np.array([shared]), operation)[0])
    return max(shared, alone) if is_largest else (shared + alone) ** (1 / order)


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Any:
    """Scale gradients down if their norm over all parameters and ranks is larger. Collective.

    As ``torch.nn.utils.clip_grad_norm_`` does in one process.

    Parameters
    ----------
    parameters : torch.nn.Module, torch.Tensor, or iterable of torch.Tensor
        A sharded model, or parameters of sharded models.
    max_norm : float
        Largest norm; infinity only computes it.
    norm_type : float
        p of the p-norm, above 0; infinity for the largest element.
    error_if_nonfinite : bool
        Refuse gradients that are not finite.

    Returns
    -------
    torch.Tensor
        The norm before, a scalar, the same on every rank.

    Raises
    ------
    ShardingError
        For parameters of no sharded model; if the last ``backward()`` was inside `no_sync`.
    RuntimeError
        On every rank, for a norm that is not finite, if that is asked for. Nothing has changed.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, got {norm_type}")
    if isinstance(parameters, torch.nn.Module):
        parts = module_of(parameters).parts
    else:
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        parts = [part_of(parameter) for parameter in given if parameter.requires_grad]
    owners = list(dict.fromkeys(part.owner for part in parts))
    for owner in owners:
        owner.require_reduced("clip_grad_norm_()")
    total = norm_of(parts, norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is not finite, so they cannot be "
            "clipped; error_if_nonfinite=False goes on regardless"
        )
    # As torch.nn.utils.clip_grad_norm_ computes it, so that both give the same numbers.
    factor = max_norm / (total + 1e-6)
    if not factor >= 1:  # NaN, too
        for part in parts:
            if part.tensor.grad is not None:
                part.tensor.grad.mul_(factor)
    dtype = parts[0].tensor.dtype if parts else torch.float32
    return torch.tensor(total, dtype=dtype)
