"""Norms and clipping of gradients, over all parameters and ranks."""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpishard.base import ShardingError
from mpishard.torch.gradients import plain
from mpishard.torch.parameters import OwnedParameter
from mpishard.torch.sharded import module_of, owned_parameter


def norm_of(
    parts: Sequence[OwnedParameter], order: float = 2.0, max_norm: float = math.inf
) -> float:
    """Return the p-norm of the gradients over all parts and ranks. Collective.

    ``max_norm`` must be the same on all ranks.
    """
    is_largest = math.isinf(order)
    add = max if is_largest else operator.add
    sums = {True: 0.0, False: 0.0}  # Of gradients that are split, and of whole gradients.
    for part in parts:
        gradient = part.present_gradient()
        if gradient is None:
            continue
        gradient = plain(gradient)
        norm = float(torch.linalg.vector_norm(gradient, order)) if gradient.numel() else 0.0
        is_split = part.owner.shards_state
        sums[is_split] = add(sums[is_split], norm if is_largest else norm**order)
    # Only split gradients are summed over ranks. Whole gradients are equal on every rank, and would
    # count several times.
    if any(part.owner.shards_state for part in parts):
        # Ranks may give the parameters in any order.
        given = sorted((part.owner.layout.subject, part.index) for part in parts)
        mark = zlib.crc32(np.array(given).tobytes())
        row = np.array([[sums[True], mark, order, max_norm]])
        rows = parts[0].owner.backend.all_gather(row, subject=given[0][0])
        if (rows[:, 1] != mark).any():
            raise ShardingError(
                "the ranks compute the norm of the gradients of different parameters: give "
                "clip_grad_norm_() the same on every rank"
            )
        if len(np.unique(rows[:, 2:], axis=0)) > 1:
            given_norms = ", ".join(f"{limit:g} of order {p:g}" for p, limit in rows[:, 2:])
            raise ShardingError(
                f"the ranks clip gradients to different norms (max_norm by rank: {given_norms}); "
                "give clip_grad_norm_() the same on every rank"
            )
        norms = rows[:, 0]
        sums[True] = float(norms.max() if is_largest else norms.sum())
    total: float = add(sums[True], sums[False])
    return total if is_largest else total ** (1 / order)


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Any:
    """Scale gradients down to a norm, over all parameters and ranks, of ``max_norm``. Collective.

    It computes what ``torch.nn.utils.clip_grad_norm_`` computes in one process.

    Parameters
    ----------
    parameters : torch.nn.Module, torch.Tensor, or iterable of torch.Tensor
        A sharded model, or parameters of sharded models.
    max_norm : float
        Maximum norm. With infinity the norm is only computed.
    norm_type : float
        Order p > 0 of the p-norm. With infinity, or "inf", it is the largest absolute value.
    error_if_nonfinite : bool
        Raise an error if the norm is not finite.

    Returns
    -------
    torch.Tensor
        The norm before clipping, a scalar, the same on every rank.

    Raises
    ------
    ValueError
        If ``norm_type`` is not above 0, or not 2 with a complex parameter.
    ShardingError
        If a parameter is not one of a sharded model, or the last ``backward()`` was inside
        `no_sync`. On every rank, if ranks give different parameters or norms; under DDP the next
        step raises it.
    RuntimeError
        If the norm is not finite and ``error_if_nonfinite`` is True. Every rank raises it, and
        nothing has changed.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, got {norm_type}")
    if isinstance(parameters, torch.nn.Module):
        parts = module_of(parameters).parts
    else:
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        parts = [owned_parameter(parameter) for parameter in given if parameter.requires_grad]
    odd = [part.entry.name for part in parts if part.is_complex]
    if odd and norm_type != 2:
        raise ValueError(
            f"norm_type must be 2 with complex parameters, such as {odd[0]!r}, because a rank may "
            f"own one of the two numbers of an element; got {norm_type}"
        )
    owners = list(dict.fromkeys(part.owner for part in parts))
    for owner in owners:
        owner.require_reduced("clip_grad_norm_()")
    total = norm_of(parts, norm_type, max_norm)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is not finite, so they cannot be "
            "clipped; error_if_nonfinite=False turns this check off"
        )
    # torch.nn.utils.clip_grad_norm_ adds 1e-6, too, so that both give the same numbers.
    factor = max_norm / (total + 1e-6)
    if not factor >= 1:  # This is True for NaN, too, as in PyTorch.
        mark = zlib.crc32(f"{max_norm} {norm_type}".encode())
        for part in parts:
            gradient = part.present_gradient()
            if gradient is not None:
                plain(gradient).mul_(factor)
                part.note_change(gradient, mark)
                part.show_assigned(gradient)
    dtype = parts[0].tensor.dtype if parts else torch.float32
    return torch.tensor(total, dtype=dtype)
