"""Ranks in a grid: the replica, pipeline stage, tensor slice and data rank of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Literal

import numpy as np

from mpishard.base import as_count, as_index, as_integer, require_type
from mpishard.communication.contract.backend import CommunicationBackend

Axis = Literal["replica", "pipeline", "tensor", "data"]

AXES: tuple[Axis, ...] = ("pipeline", "tensor", "data")
"""The axes inside a replica, in the order of the coordinates."""

_ALL_AXES: tuple[Axis, ...] = ("replica", *AXES)


class ProcessMesh:
    """Divide a world into replicas, pipeline stages, tensor groups and data ranks. Collective.

    With the default order, data fastest, ``rank = (p * tensor + t) * data + d``. In a mesh of
    8 x 8 x 8, ranks 0 to 63 are pipeline stage 0, and ranks 0 to 7 are the data ranks of tensor
    slice 0.

    With ``replica=n`` there are n such meshes: rank ``r * replica_size + rank`` has the place in
    replica r that ``rank`` has in replica 0. Each replica has all of the model's parameters, also
    if they are sharded over its data axis. It is trained apart from the others, as by
    `LocalSGDOptimizer`.

    Parameters
    ----------
    backend : CommunicationBackend
        The world.
    pipeline, tensor : int
        Sizes of these axes, 1 or more.
    data : int
        Size of the data axis; -1 takes what is left of a replica's ranks.
    replica : int
        Number of replicas, 1 or more.
    order : sequence of str
        The axes, slowest first; ``"replica"`` is the slowest unless it is named, so that a replica
        has consecutive ranks: those of a node, for one. ``("pipeline", "data", "tensor")`` puts the
        ranks of a tensor group, which communicate most, next to each other: inside a node
        (Narayanan et al., "Efficient large-scale language model training on GPU clusters", SC 2021,
        section 3).

    Raises
    ------
    TypeError
        For a backend, size or order of another type.
    ValueError
        If the sizes do not make up the world, or ``order`` does not name each axis once; on every
        rank, if they differ between ranks.

    Attributes
    ----------
    world : CommunicationBackend
        All ranks.
    replica, pipeline, tensor, data : CommunicationBackend
        The ranks that share this rank's other three coordinates, by rising coordinate.
    model : CommunicationBackend
        The ranks that share this rank's replica and data coordinates, by (pipeline, tensor). They
        compute the same batch together.
    group : CommunicationBackend
        The ranks of this rank's replica, by rank.
    samples : CommunicationBackend
        The ranks that share this rank's pipeline and tensor coordinates, by (replica, data). The
        samples of a batch are divided among them.
    pipeline_size, tensor_size, data_size : int
        Sizes of these axes.
    replica_count : int
        Size of the replica axis.
    replica_rank, pipeline_rank, tensor_rank, data_rank : int
        This rank's coordinates.
    order : tuple of str
        The four axes, slowest first.

    Examples
    --------
    >>> from mpishard import run_in_threads
    >>> def body(b):
    ...     mesh = ProcessMesh(b, pipeline=2, tensor=1)
    ...     return mesh.pipeline_rank, mesh.data_rank
    >>> run_in_threads(4, body)
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    >>> def apart(b):
    ...     mesh = ProcessMesh(b, tensor=2, replica=2)
    ...     return mesh.replica_rank, mesh.group_of("replica")
    >>> run_in_threads(4, apart)
    [(0, (0, 2)), (0, (1, 3)), (1, (0, 2)), (1, (1, 3))]
    """

    def __init__(
        self,
        backend: CommunicationBackend,
        pipeline: int = 1,
        tensor: int = 1,
        data: int = -1,
        *,
        replica: int = 1,
        order: Sequence[str] = AXES,
    ) -> None:
        require_type("backend", backend, CommunicationBackend)
        self.order = mesh_order(order)
        self.pipeline_size, self.tensor_size, self.data_size = mesh_sizes(
            backend.world_size, pipeline, tensor, data, replica
        )
        self.replica_count = int(replica)
        self.world = backend
        self.pipeline_rank, self.tensor_rank, self.data_rank = self.coordinates_of(backend.rank)
        self.replica_rank = self.replica_of(backend.rank)
        backend.initialize()
        # Before the first split, which would otherwise make groups that contradict each other.
        self._require_same_on_all_ranks()
        # Groups of the same ranks share one backend, because each communicator costs memory.
        self._groups = {self._key(self.order): backend}
        self.pipeline = self._group("pipeline", "pipeline")
        self.tensor = self._group("tensor", "tensor")
        self.data = self._group("data", "data")
        self.group = self._group("group", *(a for a in self.order if a in AXES))
        if self.data_size == 1 and self.order.index("pipeline") < self.order.index("tensor"):
            # These are the same ranks in the same order. If only one axis is larger than 1, its
            # group is used here too, and the few bytes of ``model`` are counted for that axis.
            self.model = self.group
        else:
            # Split off even if another group has the same ranks, because bytes are counted by
            # axis, and these belong to none.
            self.model = self._split("model", ("pipeline", "tensor"))
        lone = next((a for a in AXES if self._size[a] == self.replica_count == 1), "replica")
        self.replica = self._group("replica", lone)
        self.samples = self._group("samples", "replica", "data")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes of (pipeline, tensor, data): of one replica."""
        return self.pipeline_size, self.tensor_size, self.data_size

    @property
    def _size(self) -> dict[str, int]:
        return dict(zip(_ALL_AXES, (self.replica_count, *self.sizes), strict=True))

    @property
    def replica_size(self) -> int:
        """Number of ranks of a replica: pipeline x tensor x data."""
        return math.prod(self.sizes)

    @property
    def model_size(self) -> int:
        """Number of ranks that compute one batch together: pipeline x tensor."""
        return self.pipeline_size * self.tensor_size

    def model_ranks(self, data: int, replica: int = 0) -> list[int]:
        """Return the ranks that compute one batch, those of ``data`` and ``replica``, in order.

        The order is by (pipeline, tensor).
        """
        places = product(range(self.pipeline_size), range(self.tensor_size))
        return [self.rank_of(pipeline, tensor, data, replica) for pipeline, tensor in places]

    def rank_of(self, pipeline: int, tensor: int, data: int, replica: int = 0) -> int:
        """Return the rank at these coordinates.

        Raises
        ------
        ValueError
            For a coordinate outside its axis.
        """
        return self._rank_at(
            {"replica": replica, "pipeline": pipeline, "tensor": tensor, "data": data}
        )

    def coordinates_of(self, rank: int) -> tuple[int, int, int]:
        """Return the coordinates (pipeline, tensor, data) of ``rank`` inside its replica.

        Raises
        ------
        ValueError
            For a rank outside the world.
        """
        at = self._coordinates(rank)
        return at["pipeline"], at["tensor"], at["data"]

    def replica_of(self, rank: int) -> int:
        """Return the replica of ``rank``.

        Raises
        ------
        ValueError
            For a rank outside the world.
        """
        return self._coordinates(rank)["replica"]

    def group_of(self, axis: str, rank: int | None = None) -> tuple[int, ...]:
        """Return the ranks along ``axis`` through ``rank`` (default: this one), by coordinate.

        Raises
        ------
        ValueError
            For another axis, or a rank outside the world.
        """
        if axis not in _ALL_AXES:
            raise ValueError(f"unknown axis {axis!r}; there are {', '.join(_ALL_AXES)}")
        at = self._coordinates(self.world.rank if rank is None else rank)
        return tuple(self._rank_at(at | {axis: n}) for n in range(self._size[axis]))

    def __repr__(self) -> str:
        return f"ProcessMesh({self.describe()})"

    def describe(self) -> str:
        """Return the sizes in words, with that of the replica axis if there are several."""
        axes = AXES if self.replica_count == 1 else _ALL_AXES
        return " x ".join(f"{self._size[axis]} {axis}" for axis in axes)

    def _rank_at(self, coordinates: dict[str, int]) -> int:
        rank = 0
        for axis in self.order:
            size = self._size[axis]
            rank = rank * size + as_index(f"{axis} coordinate", coordinates[axis], size)
        return rank

    def _coordinates(self, rank: int) -> dict[str, int]:
        as_index("rank", rank, math.prod(self._size.values()))
        found: dict[str, int] = {}
        for axis in reversed(self.order):
            rank, found[axis] = divmod(rank, self._size[axis])
        return found

    def _require_same_on_all_ranks(self) -> None:
        """Refuse meshes that differ: their groups would contradict each other. Collective."""
        mine = [*self._size.values(), *map(_ALL_AXES.index, self.order)]
        everyones = self.world.all_gather(np.array([mine])).tolist()
        other = next((rank for rank, mesh in enumerate(everyones) if mesh != everyones[0]), None)
        if other is None:
            return
        axes = len(_ALL_AXES)
        first, second = (
            " x ".join(f"{size} {axis}" for size, axis in zip(mesh[:axes], _ALL_AXES, strict=True))
            + f" in the order {', '.join(_ALL_AXES[number] for number in mesh[axes:])}"
            for mesh in (everyones[0], everyones[other])
        )
        raise ValueError(
            f"ranks ask for different meshes: rank 0 for {first}, rank {other} for {second}; every "
            "rank must give the same sizes and order"
        )

    def _key(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return those of ``axes`` with several ranks, or the last if none has several."""
        if self.world.world_size == 1:
            return ()
        return tuple(axis for axis in axes if self._size[axis] > 1) or (axes[-1],)

    def _group(self, name: str, *axes: str) -> CommunicationBackend:
        key = self._key(axes)
        if key not in self._groups:
            self._groups[key] = self._split(name, key)
        return self._groups[key]

    def _split(self, name: str, axes: Sequence[str]) -> CommunicationBackend:
        """Make the group of the ranks that differ from this one in ``axes`` alone."""
        own, ways = self._coordinates(self.world.rank), [range(self._size[axis]) for axis in axes]
        ranks = [self._rank_at(own | dict(zip(axes, at, strict=True))) for at in product(*ways)]
        # The lowest rank as color and the position as key: every rank computes both alone.
        member = self.world.split(min(ranks), ranks.index(self.world.rank))
        assert member is not None
        member._name_group(name)
        member.axis = name if name in _ALL_AXES else ""
        return member


def mesh_order(order: Sequence[str]) -> tuple[str, ...]:
    """Return the four axes, slowest first; ``"replica"`` is the slowest unless it is named.

    Raises
    ------
    TypeError
        For anything but a list or tuple.
    ValueError
        If it does not name each axis once.
    """
    is_sequence = isinstance(order, list | tuple)
    if not is_sequence or sorted(map(str, order)) not in (sorted(AXES), sorted(_ALL_AXES)):
        kind = ValueError if is_sequence else TypeError
        raise kind(
            f"order must name {', '.join(AXES)} once each, and may name replica, got {order!r}"
        )
    return tuple(order) if "replica" in order else ("replica", *order)


def mesh_sizes(
    world_size: int, pipeline: int, tensor: int, data: int, replica: int = 1
) -> tuple[int, int, int]:
    """Return the sizes of a replica's axes; ``data`` -1 stands for the rest of its ranks.

    Raises
    ------
    TypeError
        For anything but integers.
    ValueError
        If they do not multiply to the number of ranks of the world.
    """
    for name, size in {"pipeline": pipeline, "tensor": tensor, "replica": replica}.items():
        as_count(name, size)
    if as_integer("data", data) < 1 and data != -1:
        raise ValueError(f"data must be 1 or more, or -1 for what is left, got {data}")
    ranks = _divided("the world", world_size, f"replica {replica}", replica)
    whole = "the world" if replica == 1 else f"each of the {replica} replicas"
    size, text = pipeline * tensor, f"pipeline {pipeline} x tensor {tensor}"
    if data == -1:
        data = _divided(whole, ranks, f"{text} = {size}", size)
    if size * data != ranks:
        raise ValueError(f"{text} x data {data} = {size * data}, and {whole} has {ranks} ranks")
    return int(pipeline), int(tensor), int(data)


def _divided(whole: str, ranks: int, parts: str, count: int) -> int:
    """Return ``ranks / count``; raise ValueError if a remainder is left."""
    part, rest = divmod(ranks, count)
    if rest or not part:
        raise ValueError(f"{parts} does not divide {whole} of {ranks} ranks")
    return part
