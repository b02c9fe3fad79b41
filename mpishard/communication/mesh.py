"""Ranks in a grid: which pipeline stage, which tensor slice, which data replica."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from mpishard.arguments import as_integer
from mpishard.communication.contract.backend import CommunicationBackend

__all__ = ["AXES", "Axis", "ProcessMesh"]

Axis = Literal["pipeline", "tensor", "data"]

AXES: tuple[Axis, ...] = ("pipeline", "tensor", "data")
"""The axes, in the order that coordinates are given in."""


class ProcessMesh:
    """Divide a world into pipeline stages, tensor groups and data replicas. Collective.

    With the default order, data fastest, ``rank = (p * tensor + t) * data + d``; 512 ranks as
    8 x 8 x 8 have ranks 0 to 63 in pipeline stage 0, and ranks 0 to 7 are its data replicas of
    tensor slice 0.

    Parameters
    ----------
    backend : CommunicationBackend
        The world.
    pipeline, tensor : int
        Sizes of these axes, 1 or more.
    data : int
        Size of the data axis; -1 takes what is left of the world.
    order : sequence of str
        The three axes, slowest first. ``("pipeline", "data", "tensor")`` puts the ranks of a
        tensor group, which communicate most, next to each other: inside a node (Narayanan et al.,
        "Efficient large-scale language model training on GPU clusters", SC 2021, section 3).

    Raises
    ------
    TypeError
        For a backend, size or order of another type.
    ValueError
        If the sizes do not make up the world, or ``order`` does not name each axis once.

    Attributes
    ----------
    world : CommunicationBackend
        All ranks.
    pipeline, tensor, data : CommunicationBackend
        The ranks that share this rank's other two coordinates, by rising coordinate.
    replica : CommunicationBackend
        The ranks of this rank's data coordinate, by (pipeline, tensor): together they hold one
        replica of the model.
    pipeline_size, tensor_size, data_size : int
        Sizes of the axes.
    pipeline_rank, tensor_rank, data_rank : int
        This rank's coordinates.

    Examples
    --------
    >>> from mpishard import run_in_threads
    >>> def body(b):
    ...     mesh = ProcessMesh(b, pipeline=2, tensor=1)
    ...     return mesh.pipeline_rank, mesh.data_rank
    >>> run_in_threads(4, body)
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """

    def __init__(
        self,
        backend: CommunicationBackend,
        pipeline: int = 1,
        tensor: int = 1,
        data: int = -1,
        *,
        order: Sequence[str] = AXES,
    ) -> None:
        if not isinstance(backend, CommunicationBackend):
            raise TypeError(f"backend must be a CommunicationBackend, got {type(backend).__name__}")
        self.order = mesh_order(order)
        self.pipeline_size, self.tensor_size, self.data_size = mesh_sizes(
            backend.world_size, pipeline, tensor, data
        )
        self.world = backend
        self.pipeline_rank, self.tensor_rank, self.data_rank = self.coordinates_of(backend.rank)
        backend.initialize()
        self.pipeline = self._axis_backend("pipeline")
        self.tensor = self._axis_backend("tensor")
        self.data = self._axis_backend("data")
        self.replica = self.world
        if self.data_size > 1 or self.order.index("pipeline") > self.order.index("tensor"):
            key = self.pipeline_rank * self.tensor_size + self.tensor_rank
            self.replica = self._split("replica", color=self.data_rank, key=key)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes of (pipeline, tensor, data)."""
        return self.pipeline_size, self.tensor_size, self.data_size

    @property
    def _size(self) -> dict[str, int]:
        return dict(zip(AXES, self.sizes, strict=True))

    @property
    def replica_size(self) -> int:
        """Ranks that hold one replica of the model together."""
        return self.pipeline_size * self.tensor_size

    @property
    def replicas(self) -> list[list[int]]:
        """The ranks that hold each replica, by data rank: see `replica_ranks`."""
        return [self.replica_ranks(data) for data in range(self.data_size)]

    def replica_ranks(self, data: int) -> list[int]:
        """The ranks that hold the replica of data rank ``data``, by (pipeline, tensor)."""
        return [
            self.rank_of(pipeline, tensor, data)
            for pipeline in range(self.pipeline_size)
            for tensor in range(self.tensor_size)
        ]

    def rank_of(self, pipeline: int, tensor: int, data: int) -> int:
        """The rank at these coordinates.

        Raises
        ------
        ValueError
            For a coordinate outside its axis.
        """
        coordinates: dict[str, int] = dict(zip(AXES, (pipeline, tensor, data), strict=True))
        rank = 0
        for axis in self.order:
            size, coordinate = self._size[axis], coordinates[axis]
            if not 0 <= coordinate < size:
                raise ValueError(f"{axis} coordinate {coordinate} is outside [0, {size})")
            rank = rank * size + coordinate
        return rank

    def coordinates_of(self, rank: int) -> tuple[int, int, int]:
        """The coordinates (pipeline, tensor, data) of ``rank``.

        Raises
        ------
        ValueError
            For a rank outside the world.
        """
        if not 0 <= rank < math.prod(self.sizes):
            raise ValueError(f"rank {rank} is outside [0, {math.prod(self.sizes)})")
        found: dict[str, int] = {}
        for axis in reversed(self.order):
            rank, found[axis] = divmod(rank, self._size[axis])
        return found["pipeline"], found["tensor"], found["data"]

    def group_of(self, axis: str, rank: int | None = None) -> tuple[int, ...]:
        """The ranks along ``axis`` through ``rank`` (this one), by rising coordinate.

        Raises
        ------
        ValueError
            For another axis, or a rank outside the world.
        """
        if axis not in AXES:
            raise ValueError(f"unknown axis {axis!r}; there are {', '.join(AXES)}")
        here = self.coordinates_of(self.world.rank if rank is None else rank)
        at = dict(zip(AXES, here, strict=True))
        return tuple(self.rank_of(**{**at, axis: n}) for n in range(self._size[axis]))

    def describe(self) -> str:
        """The sizes, in words."""
        return " x ".join(f"{size} {axis}" for axis, size in self._size.items())

    def _axis_backend(self, axis: Axis) -> CommunicationBackend:
        ranks = self.group_of(axis)
        if len(ranks) == self.world.world_size:
            return self.world
        member = self._split(axis, color=min(ranks), key=ranks.index(self.world.rank))
        member.axis = axis
        return member

    def _split(self, name: str, *, color: int, key: int) -> CommunicationBackend:
        member = self.world.split(color, key)
        assert member is not None
        member._name_group(name)
        return member


def mesh_order(order: Sequence[str]) -> tuple[str, ...]:
    """The axes, slowest first.

    Raises
    ------
    TypeError
        For anything but a list or tuple.
    ValueError
        If it does not name each axis once.
    """
    is_sequence = isinstance(order, list | tuple)
    if not is_sequence or sorted(map(str, order)) != sorted(AXES):
        kind = ValueError if is_sequence else TypeError
        raise kind(f"order must name {', '.join(AXES)} once each, got {order!r}")
    return tuple(order)


def mesh_sizes(world_size: int, pipeline: int, tensor: int, data: int) -> tuple[int, int, int]:
    """Sizes of the three axes, of which ``data`` may be -1: what is left of the world.

    Raises
    ------
    TypeError
        For anything but integers.
    ValueError
        If they do not make up the world.
    """
    for name, size in {"pipeline": pipeline, "tensor": tensor}.items():
        if as_integer(name, size) < 1:
            raise ValueError(f"{name} must be 1 or more, got {size}")
    if as_integer("data", data) < 1 and data != -1:
        raise ValueError(f"data must be 1 or more, or -1 for what is left, got {data}")
    if data == -1:
        data, rest = divmod(world_size, pipeline * tensor)
        if rest or not data:
            raise ValueError(
                f"pipeline {pipeline} x tensor {tensor} = {pipeline * tensor} does not divide the "
                f"world of {world_size} ranks"
            )
    if pipeline * tensor * data != world_size:
        raise ValueError(
            f"pipeline {pipeline} x tensor {tensor} x data {data} = {pipeline * tensor * data}, "
            f"and the world has {world_size} ranks"
        )
    return int(pipeline), int(tensor), int(data)
