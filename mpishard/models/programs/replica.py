"""The ranks that hold one replica of the model together, and their agreement on a batch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.arrays import to_host
from mpishard.communication import CommunicationBackend, ProcessMesh
from mpishard.errors import ShardingError

__all__ = ["GroupReplica", "MeshReplica", "Replica"]

_CALLS = ("step", "compute_gradients", "predict")


class Replica:
    """A replica of one rank, which computes its samples alone.

    Parameters
    ----------
    world : CommunicationBackend
        All ranks.

    Attributes
    ----------
    data : CommunicationBackend
        The ranks that hold the same part of the model and compute other samples.
    members : sequence of sequence of int
        World ranks of each replica, by data rank.
    dealt : CommunicationBackend
        The ranks among which samples are dealt: ``data``, unless replicas are trained apart.
    across : CommunicationBackend or None
        The ranks that hold the same part of the other replicas, if these are trained apart.
    together : CommunicationBackend
        The ranks of one replica, if these are trained apart.
    speaks : bool
        Whether this rank's loss counts, of all ranks of the replica.
    is_on_mesh : bool
        Whether ranks may hold different parts of the model, and have other units.
    """

    is_on_mesh = False

    def __init__(self, world: CommunicationBackend) -> None:
        self.world = self.data = self.dealt = self.together = world
        self.across: CommunicationBackend | None = None
        self.members: Sequence[Sequence[int]] = [[rank] for rank in range(world.world_size)]
        self.speaks = True

    def owners(self, *, shards_state: bool) -> CommunicationBackend | None:
        """The ranks that together update every parameter once; None if each updates all."""
        return self.world if shards_state else None

    def tell(self, total: float, weight: float) -> tuple[float, float]:
        """Tell the speaker's sum and weight of a loss to all ranks of the replica. Collective."""
        return total, weight

    def require_one_batch(self, call: str, x: Any, y: Any = None, *, everywhere: bool) -> None:
        """Refuse calls and batches that differ between the ranks of one replica. Collective.

        Arrays are compared by checksums. Other batches, which a black box may take, are compared
        by their lengths.

        Parameters
        ----------
        call : str
            The call that this rank makes: "step", "compute_gradients" or "predict".
        x, y : Array
            This rank's batch.
        everywhere : bool
            Whether all ranks of the world take part and raise; otherwise those of the replica.

        Raises
        ------
        ShardingError
            On every rank of a replica whose ranks call different methods.
        ValueError
            On every rank that takes part, with the batch that each rank of a replica was given.
        """


class GroupReplica(Replica):
    """A replica of consecutive ranks, which compute other samples. Collective.

    Each is trained apart from the others. In names of groups and in traces the ranks of a replica
    are the axis ``data``, and those that hold the same part of all replicas the axis ``replica``.

    Parameters
    ----------
    world : CommunicationBackend
        All ranks.
    size : int
        Number of ranks of each replica.
    """

    def __init__(self, world: CommunicationBackend, size: int) -> None:
        super().__init__(world)
        number, place = divmod(world.rank, size)

        def split(color: int, axis: str) -> CommunicationBackend:
            group = world.split(color)
            assert group is not None
            group._name_group(axis)
            group.axis = axis
            return group

        self.data = self.together = split(number, "data")
        self.across = split(place, "replica")

    def owners(self, *, shards_state: bool) -> CommunicationBackend | None:
        return self.data if shards_state else None


class MeshReplica(Replica):
    """A replica of all ranks of a mesh that differ in pipeline and tensor coordinates alone.

    Parameters
    ----------
    mesh : ProcessMesh
        The ranks.
    speaks : bool
        See `Replica`.
    predicts_together : bool
        Whether `predict`, too, takes all ranks of the replica.
    """

    is_on_mesh = True

    def __init__(self, mesh: ProcessMesh, *, speaks: bool, predicts_together: bool = True) -> None:
        super().__init__(mesh.world)
        self.data = self.dealt = mesh.data
        self.together = mesh.replica
        self.members = mesh.replicas
        self.speaks = speaks
        self._mesh = mesh
        self._predicts_together = predicts_together

    def train_apart(self) -> None:
        """Let each replica be trained apart: the data axis lies between them. Collective."""
        # The data axis lies between replicas now: a rank reduces its gradients with nobody.
        alone = self.world.split(self.world.rank)
        assert alone is not None
        self.data, self.across = alone, self._mesh.data

    def owners(self, *, shards_state: bool) -> CommunicationBackend | None:
        return self.world if shards_state else self._mesh.replica

    def tell(self, total: float, weight: float) -> tuple[float, float]:
        told = self._mesh.replica.all_reduce(np.array([total, weight]))
        return float(told[0]), float(told[1])

    def require_one_batch(self, call: str, x: Any, y: Any = None, *, everywhere: bool) -> None:
        mesh = self._mesh
        if mesh.replica.world_size == 1 or (call == "predict" and not self._predicts_together):
            return
        # Checksums and not the batch itself: the message is as short as a barrier's.
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
                f"the {len(rows)} ranks of one replica (pipeline and tensor axes) compute one "
                f"batch together, and must be given the same: {given}. Deal samples by data_rank "
                "of data_size, not by rank"
            )


def _checksum(values: Any) -> int:
    dtype = getattr(values, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        return 0
    host = np.ascontiguousarray(to_host(values))
    # Equal bytes of another dtype or shape are another batch.
    what = f"{host.dtype}{host.shape}".encode()
    return zlib.crc32(host.reshape(-1).view(np.uint8).data, zlib.crc32(what))
