"""That the ranks that compute one batch together were given the same."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from mpishard.arrays import to_host
from mpishard.communication import ProcessMesh
from mpishard.errors import ShardingError

__all__ = ["require_one_batch"]


_CALLS = ("step", "compute_gradients", "predict")


def require_one_batch(
    mesh: ProcessMesh, call: str, x: Any, y: Any = None, *, everywhere: bool
) -> None:
    """Refuse calls and batches that differ between the ranks of one replica. Collective.

    Arrays are compared by checksums, and what is no array, which a black box may take, by its
    length.

    Parameters
    ----------
    mesh : ProcessMesh
        The ranks.
    call : str
        What this rank is about to do: "step", "compute_gradients" or "predict".
    x, y : Array
        This rank's batch.
    everywhere : bool
        Whether all ranks of the world take part, and hear of it; otherwise those of the replica.

    Raises
    ------
    ShardingError
        On every rank of a replica whose ranks call different methods.
    ValueError
        On every rank that takes part, with what each rank of a replica was given.
    """
    if mesh.replica.world_size == 1:
        return
    mine = [_CALLS.index(call), len(x), *(_checksum(array) for array in (x, y))]
    told = mesh.replica.all_gather(np.array([mine])).tolist()
    if any(row[0] != told[0][0] for row in told):  # then no other rank can be asked
        calls = ", ".join(
            f"rank {rank} is in {_CALLS[row[0]]}"
            for rank, row in zip(mesh.replica_ranks(mesh.data_rank), told, strict=True)
        )
        raise ShardingError(
            f"the {len(told)} ranks of one replica compute together, and must make the same "
            f"calls: {calls}. predict, compute_gradients and step are collective"
        )
    replicas = {mesh.data_rank: told}
    if everywhere and mesh.data_size > 1:
        rows = mesh.world.all_gather(np.array([mine])).tolist()
        for data in range(mesh.data_size):
            replicas[data] = [rows[rank] for rank in mesh.replica_ranks(data)]
    for data, rows in sorted(replicas.items()):
        if all(row == rows[0] for row in rows):
            continue
        given = ", ".join(
            f"rank {rank}: {row[1]} samples, checksums {row[2:]}"
            for rank, row in zip(mesh.replica_ranks(data), rows, strict=True)
        )
        raise ValueError(
            f"the {len(rows)} ranks of one replica (pipeline and tensor axes) compute one batch "
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
