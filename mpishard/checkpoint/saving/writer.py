"""Writing a checkpoint from arrays: all of it or nothing, by all ranks at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.checkpoint.format.protocol import Pieces
from mpishard.checkpoint.format.target import Target
from mpishard.checkpoint.saving.content import Content
from mpishard.checkpoint.saving.pending import PendingSave
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.sharding.table import ParameterEntry

__all__ = ["write_checkpoint"]


def write_checkpoint(
    path: str | os.PathLike[str],
    backend: CommunicationBackend | None,
    parameters: Sequence[ParameterEntry],
    dtype: np.dtype[Any],
    arrays: Pieces,
    metadata: Mapping[str, Any],
) -> None:
    """Write the checkpoint ``path``, or leave what was there as it was. Collective.

    At every moment ``path``, or ``<path>.previous`` between two renames, is a whole checkpoint;
    `CheckpointReader` knows where to look. What a killed save left behind is removed by the next
    one, so only one job may save to a path at a time.

    Parameters
    ----------
    path : path
        The directory to make or replace, on a file system that all ranks see. Rank 0's counts.
    backend : CommunicationBackend or None
        The ranks that write together; None for a single process.
    parameters, dtype, arrays, metadata
        As those of `Content`.

    Raises
    ------
    ValueError, TypeError
        For a blank path, or arrays that cannot be written.
    CheckpointError
        Where ``path`` holds something else, there is not enough room, a file cannot be written, or
        the pieces of all ranks do not make up each parameter exactly once. All ranks raise it, and
        it lists those that failed.
    """
    PendingSave(
        backend, lambda: Target(path), lambda: Content(parameters, dtype, arrays, metadata)
    ).wait()
