"""The ranks that compute one batch together, and the replicas that are trained apart."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.arrays import to_host
from mpishard.communication import CommunicationBackend, ProcessMesh
from mpishard.errors import ShardingError

__all__ = ["MeshReplica", "Replica"]

_CALLS = ("step", "compute_gradients", "predict")


class Replica:
    """The place of a rank that computes its samples alone.

    Parameters
    ----------
    world : CommunicationBackend
        All ranks.

    Attributes
    ----------
    data : CommunicationBackend
        The ranks that have the same part of the model, if it is divided, and compute other samples.
        Gradients are reduced among them.
    members : sequence of sequence of int
        World ranks that compute each part of a batch, by rank of ``dealt``.
    dealt : CommunicationBackend
        The ranks among which samples are dealt: ``data``, unless replicas are trained apart.
    across : CommunicationBackend or None
        The ranks that hold the same part of the other replicas, if these are trained apart.
    together : CommunicationBackend
        The ranks of one replica, if these are trained apart.
    speaks : bool
        Whether this rank's loss counts, of all ranks that compute its batch.
    is_on_mesh : bool
        Whether ranks may hold different parts of the model, and have other units.
    """

    is_on_mesh = False

    def __init__(self, world: CommunicationBackend) -> None:
        self.world = self.data = self.dealt = self.together = world
        self.across: CommunicationBackend | None = None
        self.members: Sequence[Sequence[int]] = [[rank] for rank in range(world.world_size)]
        self.speaks = True

    def train_apart(self, mesh: ProcessMesh) -> None:
        """Let each replica of ``mesh``, which has no other axis than data, be trained apart."""
        self.data, self.dealt = mesh.data, mesh.samples
        self.together, self.across = mesh.together, mesh.replica

    def owners(self, *, shards_state: bool) -> CommunicationBackend | None:
        """The ranks that together update every parameter once; None if each updates all."""
        return self.data if shards_state else None

    def tell(self, total: float, weight: float) -> tuple[float, float]:
        """Tell the speaker's sum and weight of a loss to the ranks that compute it. Collective."""
        return total, weight

    def require_one_batch(self, call: str, x: Any, y: Any = None, *, everywhere: bool) -> None:
        """Refuse calls and batches that differ between ranks that compute one. Collective.

        Arrays are compared by checksums. Other batches, which a black box may take, are compared
        by their lengths.

        Parameters
        ----------
        call : str
            The call that this rank makes: "step", "compute_gradients" or "predict".
        x, y : Array
            This rank's batch.
        everywhere : bool
            Whether all ranks take part and raise: in a step those of the world, in other calls
            those of the replica. Otherwise the ranks that compute one batch.

        Raises
        ------
        ShardingError
            On the ranks that compute one batch, if they call different methods.
        ValueError
            On every rank that takes part, with the batch that each rank was given.
        """


class MeshReplica(Replica):
    """The place of a rank that computes a batch with others: pipeline stages and tensor slices.

    Parameters
    ----------
    mesh : ProcessMesh
        The ranks.
    speaks : bool
        See `Replica`.
    predicts_together : bool
        Whether `predict`, too, takes all ranks that compute one batch.
    """

    is_on_mesh = True

    def __init__(self, mesh: ProcessMesh, *, speaks: bool, predicts_together: bool = True) -> None:
        super().__init__(mesh.world)
        self.data, self.dealt, self.together = mesh.data, mesh.samples, mesh.together
        self.members = [
            mesh.model_ranks(data, replica)
            for replica in range(mesh.replica_count)
            for data in range(mesh.data_size)
        ]
        self.speaks = speaks
        self._mesh = mesh
        self._predicts_together = predicts_together

    def owners(self, *, shards_state: bool) -> CommunicationBackend | None:
        return self.together if shards_state else self._mesh.model

    def tell(self, total: float, weight: float) -> tuple[float, float]:
        told = self._mesh.model.all_reduce(np.array([total, weight]))
        return float(told[0]), float(told[1])

    def require_one_batch(self, call: str, x: Any, y: Any = None, *, everywhere: bool) -> None:
        mesh = self._mesh
        if mesh.model_size == 1 or (call == "predict" and not self._predicts_together):
            return
        # Checksums and not the batch itself: the message is as short as a barrier's.
        mine = [_CALLS.index(call), len(x), *(_checksum(array) for array in (x, y))]
        told = mesh.model.all_gather(np.array([mine])).tolist()
        here = self.members[self.dealt.rank]
        if any(row[0] != told[0][0] for row in told):  # then no other rank can be asked
            calls = ", ".join(
                f"rank {rank} is in {_CALLS[row[0]]}" for rank, row in zip(here, told, strict=True)
            )
            raise ShardingError(
                f"the {len(told)} ranks of the pipeline and tensor axes compute together, and must "
                f"make the same calls: {calls}. predict, compute_gradients and step are collective"
            )
        given = dict(zip(here, told, strict=True))
        # Replicas that are trained apart meet in steps alone.
        together = mesh.world if call == "step" else mesh.together
        if everywhere and together.world_size > mesh.model_size:
            ranks = [
                rank for rank in range(mesh.world.world_size)
                if together is mesh.world or mesh.replica_of(rank) == mesh.replica_rank
            ]  # fmt: skip
            given = dict(zip(ranks, together.all_gather(np.array([mine])).tolist(), strict=True))
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
                f"together, and must be given the same: {batches}. Deal samples by data_rank of "
                "data_size, not by rank"
            )


def _checksum(values: Any) -> int:
    dtype = getattr(values, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        return 0
    host = np.ascontiguousarray(to_host(values))
    # Equal bytes of another dtype or shape are another batch.
    what = f"{host.dtype}{host.shape}".encode()
    return zlib.crc32(host.reshape(-1).view(np.uint8).data, zlib.crc32(what))
