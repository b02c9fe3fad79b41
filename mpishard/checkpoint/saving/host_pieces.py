"""The content of a save on one rank, and its pieces in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpishard.base import Array, DType, Metadata, is_device_array, to_host
from mpishard.checkpoint.format.content import Pieces
from mpishard.checkpoint.saving.staging import StagingBuffer, aligned
from mpishard.sharding import ParameterEntry, Region

HostPieces = dict[str, list[tuple[Region, Array]]]
"""As `Pieces`, but NumPy arrays, none of which is empty."""


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a checkpoint from one rank.

    Parameters
    ----------
    parameters : sequence of ParameterEntry
        The parameters along the flat vector. Those of rank 0 are used.
    dtype : dtype
        Dtype of the parameters.
    arrays : mapping of str to sequence of (Region, Array)
        Kind -> this rank's pieces: see `CheckpointState.arrays_to_write`.
    metadata : mapping
        Values that JSON can represent, or NumPy scalars and arrays. Those of rank 0 are used.
    """

    parameters: Sequence[ParameterEntry]
    dtype: DType
    arrays: Pieces
    metadata: Metadata


def pieces_on_host(arrays: Pieces, staging: StagingBuffer | None) -> HostPieces:
    """Return the pieces in host memory, without empty ones, as copies if there is a buffer."""
    pieces: HostPieces = {}
    shared: list[tuple[str, int]] = []
    for kind, given in arrays.items():
        pieces[kind] = []
        for region, array in given:
            length = region.stop - region.start
            # Values of another length would be saved under the wrong region, and no checksum would
            # tell.
            if array.shape != (length,):
                raise ValueError(
                    f"{kind}: the piece {region} has shape ({length},), got {array.shape}"
                )
            # Empty pieces need no place in a file.
            if array.size:
                is_host = not is_device_array(array)
                host = np.ascontiguousarray(array if is_host else to_host(array))
                # `to_host` has copied CuPy arrays already, and NumPy cannot test them.
                if staging is not None and is_host and np.may_share_memory(host, array):
                    shared.append((kind, len(pieces[kind])))
                pieces[kind].append((region, host))
    if staging is not None:
        # One call for all, so that arrays that are end to end are copied together.
        copies = staging.copies([pieces[kind][index][1] for kind, index in shared])
        for (kind, index), copy in zip(shared, copies, strict=True):
            pieces[kind][index] = (pieces[kind][index][0], copy)
    return pieces


def staged_bytes(arrays: Pieces) -> int:
    """Return the number of bytes that `pieces_on_host` copies into a staging buffer."""
    return sum(
        aligned(array.nbytes)
        for given in arrays.values()
        for _, array in given
        if not is_device_array(array)
    )
