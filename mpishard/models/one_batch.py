"""That the ranks that compute one batch together were given the same."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from mpishard.arrays import to_host
from mpishard.communication import ProcessMesh

__all__ = ["require_one_batch"]


def require_one_batch(mesh: ProcessMesh, x: Any, y: Any = None, *, everywhere: bool) -> None:
    """Refuse batches that differ between the ranks of one replica. Collective.

    Arrays are compared by checksums, and what is no array, which a black box may take, by its
    length.

    Parameters
    ----------
    mesh : ProcessMesh
        The ranks.
    x, y : Array
        This rank's batch.
    everywhere : bool
        Whether all ranks of the world take part, and hear of it; otherwise those of the replica.

    Raises
    ------
    ValueError
        On every rank that takes part, with what each of a replica was given.
    """
    if mesh.replica.world_size == 1:
        return
    marks = np.array([[len(x), *(_checksum(array) for array in (x, y))]])
    backend = mesh.world if everywhere else mesh.replica
    told = backend.all_gather(marks).tolist()
    replicas = range(mesh.data_size) if everywhere else [mesh.data_rank]
    for data in replicas:
        ranks = [
            mesh.rank_of(pipeline, tensor, data)
            for pipeline in range(mesh.pipeline_size)
            for tensor in range(mesh.tensor_size)
        ]
        rows = [told[rank] for rank in ranks] if everywhere else told
        if all(row == rows[0] for row in rows):
            continue
        given = ", ".join(
            f"rank {rank}: {row[0]} samples, checksums {row[1:]}"
            for rank, row in zip(ranks, rows, strict=True)
        )
        raise ValueError(
            f"the {len(ranks)} ranks of one replica (pipeline and tensor axes) compute one batch "
            f"together, and must be given the same: {given}. Deal samples by data_rank of "
            "data_size, not by rank"
        )


def _checksum(values: Any) -> int:
    dtype = getattr(values, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        return 0
    host = np.ascontiguousarray(to_host(values))
    what = f"{host.dtype}{host.shape}".encode()
    return zlib.crc32(host.reshape(-1).view(np.uint8).data, zlib.crc32(what))
