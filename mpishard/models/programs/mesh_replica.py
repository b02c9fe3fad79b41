"""The ranks of a mesh that compute one batch together."""

from __future__ import annotations

import zlib

import numpy as np

from mpishard.base import Data, ShardingError, to_host
from mpishard.communication import CommunicationBackend, ProcessMesh
from mpishard.data import Samples
from mpishard.models.programs.program import Replica

_CALLS = ("step", "compute_gradients", "predict")


class MeshReplica(Replica):
    """The groups of a rank that computes a batch with others: pipeline stages, tensor slices.

    Parameters
    ----------
    mesh : ProcessMesh
        The ranks.
    reports_loss : bool
        See `Replica`.
    predicts_together : bool
        Whether `predict`, too, needs all ranks that compute one batch.
    """

    is_on_mesh = True

    def __init__(
        self, mesh: ProcessMesh, *, reports_loss: bool, predicts_together: bool = True
    ) -> None:
        super().__init__(mesh.world)
        self.data, self.sample_group, self.group = mesh.data, mesh.samples, mesh.group
        self.members = [
            mesh.model_ranks(data, replica)
            for replica in range(mesh.replica_count)
            for data in range(mesh.data_size)
        ]
        self.reports_loss = reports_loss
        self._mesh = mesh
        self._predicts_together = predicts_together

    def owners(self, *, shards_state: bool) -> CommunicationBackend | None:
        return self.group if shards_state else self._mesh.model

    def share_loss(self, total: float, weight: float) -> tuple[float, float]:
        # One rank has the loss, and the others add zeros: it needs no message from a known root.
        sums = self._mesh.model.all_reduce(np.array([total, weight]))
        return float(sums[0]), float(sums[1])

    def require_one_batch(
        self, call: str, x: Data, y: Data = None, *, everywhere: bool, subject: int
    ) -> None:
        mesh = self._mesh
        # A black box predicts on each rank alone.
        if mesh.model_size == 1 or (call == "predict" and not self._predicts_together):
            return
        # Checksums and not the batch itself: the message is as short as a barrier's.
        mine = [_CALLS.index(call), len(x), *(_checksum(array) for array in (x, y))]
        own_rows = mesh.model.all_gather(np.array([mine]), subject=subject).tolist()
        here = self.members[self.sample_group.rank]
        # Ranks outside this group may be in another call, too, so that only this group compares.
        if any(row[0] != own_rows[0][0] for row in own_rows):
            calls = ", ".join(
                f"rank {rank} is in {_CALLS[row[0]]}"
                for rank, row in zip(here, own_rows, strict=True)
            )
            raise ShardingError(
                f"the {len(own_rows)} ranks of the pipeline and tensor axes compute together, and "
                f"must make the same calls: {calls}. predict, compute_gradients and step are "
                "collective"
            )
        given = dict(zip(here, own_rows, strict=True))
        # Replicas that are trained apart make only steps together.
        group = mesh.world if call == "step" else mesh.group
        if everywhere and group.world_size > mesh.model_size:
            ranks = [
                rank
                for rank in range(mesh.world.world_size)
                if group is mesh.world or mesh.replica_of(rank) == mesh.replica_rank
            ]
            rows = group.all_gather(np.array([mine]), subject=subject).tolist()
            given = dict(zip(ranks, rows, strict=True))
        for members in self.members:
            rows = [given[rank] for rank in members if rank in given]
            if all(row == rows[0] for row in rows):
                continue
            batches = ", ".join(
                f"rank {rank}: {row[1]} samples, checksums {row[2:]}"
                for rank, row in zip(members, rows, strict=True)
            )
            raise ValueError(
                f"the {len(rows)} ranks of the pipeline and tensor axes compute one batch "
                f"together, and must be given the same: {batches}. Divide samples by data_rank and "
                "data_size, not by rank"
            )


def _checksum(values: Data) -> int:
    if isinstance(values, Samples):
        return zlib.crc32(repr([_checksum(array) for array in values.leaves()]).encode())
    dtype = getattr(values, "dtype", None)
    # A black box may take any object, whose bytes would be addresses.
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        return 0
    host = np.ascontiguousarray(to_host(values))
    # Equal bytes of another dtype or shape are another batch.
    what = f"{host.dtype}{host.shape}".encode()
    return zlib.crc32(host.reshape(-1).view(np.uint8).data, zlib.crc32(what))
