"""That the ranks that compute one batch together were given the same."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from mpishard.arrays import to_host
from mpishard.communication import ProcessMesh

__all__ = ["require_one_batch"]


def require_one_batch(mesh: ProcessMesh, x: Any, y: Any = None) -> None:
    """Refuse batches that differ between the ranks of one replica. Collective over `mesh.replica`.

    Arrays are compared by checksums, and what is no array, which a black box may take, by its
    length.

    Raises
    ------
    ValueError
        On every rank of the replica, with what each was given.
    """
    if mesh.replica.world_size == 1:
        return
    marks = [len(x), *(_checksum(array) for array in (x, y))]
    everyone = mesh.replica.all_gather(np.array([marks]))
    if (everyone == everyone[0]).all():
        return
    rows = ", ".join(
        f"rank {mesh.rank_of(*divmod(place, mesh.tensor_size), mesh.data_rank)}: "
        f"{row[0]} samples, checksums {row[1:]}"
        for place, row in enumerate(everyone.tolist())
    )
    raise ValueError(
        f"the {mesh.replica.world_size} ranks of one replica (pipeline and tensor axes) "
        f"compute one batch together, and must be given the same: {rows}. Deal samples by "
        "data_rank of data_size, not by rank"
    )


def _checksum(values: Any) -> int:
    dtype = getattr(values, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        return 0
    host = np.ascontiguousarray(to_host(values))
    what = f"{host.dtype}{host.shape}".encode()
    return zlib.crc32(host.reshape(-1).view(np.uint8).data, zlib.crc32(what))
