"""A black box on a mesh: its flat vector is divided over a replica's ranks, its computation not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpishard.arrays import Array, beside, copy_into
from mpishard.communication import CommunicationBackend, ProcessMesh
from mpishard.contracts import ILossFunction
from mpishard.models.programs.one_batch import require_one_batch
from mpishard.models.programs.program import Program
from mpishard.models.programs.whole_program import WholeProgram
from mpishard.models.stores.gradient_store import GradientStore
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.models.stores.vector_slice import own_range, placed_range
from mpishard.nn.layers.layer import Context
from mpishard.observe.ledger import MemoryCategory
from mpishard.sharding import Placement, ShardingConfiguration, Unit, build_units

__all__ = ["DividedProgram"]


class DividedProgram(Program):
    """Every rank of a replica computes one batch, all of it, and owns a range of the flat vector.

    A rank's own flat vector is `own_range` of the model's, as one unit; ranks that differ in their
    data coordinate own the same, and the data axis treats it as it does a whole vector. Of the
    gradient that a rank computes it keeps and reduces its range alone. After an update the ranges
    of a replica, end to end in the order of its ranks, are the parameters that the user's object
    gets.

    Parameters
    ----------
    whole : WholeProgram
        What computes on each rank.
    mesh : ProcessMesh
        The ranks.
    """

    needs_whole_parameters = True
    is_on_mesh = True

    def __init__(self, whole: WholeProgram, mesh: ProcessMesh) -> None:
        self.mesh = mesh
        self._own = own_range(whole.length, mesh)
        self._placement = placed_range(whole.entries, *self._own)
        self._compute_by(whole)
        start, stop = self._own
        self.units = build_units([stop - start], 1) if start < stop else ()
        self.kept = frozenset(unit.index for unit in self.units)
        self.entries = tuple(held.entry for held in self._placement.slices)
        self.dtype = whole.dtype
        self.freeze(whole.frozen)

    def _compute_by(self, whole: WholeProgram) -> None:
        self._whole = whole
        self.device = whole.device
        # All parameters: where the model computes with them, or until it has them.
        self._full: Array | None = None

    @property
    def default_loss(self) -> ILossFunction | None:
        """The model's own loss."""
        return self._whole.default_loss

    @default_loss.setter
    def default_loss(self, loss: ILossFunction | None) -> None:
        self._whole.default_loss = loss

    # ------------------------------------------------------------------------------ on the mesh

    @property
    def placement(self) -> Placement:
        return self._placement

    @property
    def speaks(self) -> bool:
        """Whether this rank tells its replica's loss, which all of its ranks compute."""
        return self.mesh.replica.rank == 0

    def axis(self, config: ShardingConfiguration) -> CommunicationBackend:
        return self.mesh.data

    def owners(
        self, config: ShardingConfiguration, *, shards_state: bool
    ) -> CommunicationBackend | None:
        return self.mesh.world if shards_state else self.mesh.replica

    def tell(self, total: float, weight: float) -> tuple[float, float]:
        told = self.mesh.replica.broadcast(np.array([total, weight]), root=0)
        return float(told[0]), float(told[1])

    def structure(self) -> str:
        return repr((self._whole.structure(), self.mesh.sizes, self.mesh.order))

    # -------------------------------------------------------------------------------- computing

    def check(self, x: Any) -> Any:
        return self._whole.check(x)

    def check_pair(self, x: Any, y: Any, loss: ILossFunction | None) -> tuple[Any, Any]:
        return self._whole.check_pair(x, y, loss)

    def knows_loss(self, loss: ILossFunction | None) -> bool:
        return self._whole.knows_loss(loss)

    def measure(self, loss: ILossFunction, prediction: Array, y: Array) -> tuple[float, float]:
        return self._whole.measure(loss, prediction, y)

    def predict(self, parameters: ParameterStore, x: Array) -> Array:
        return self._whole.predict(parameters, x)

    def forward(
        self,
        parameters: ParameterStore,
        x: Array,
        y: Array,
        loss: ILossFunction | None,
        context: Context,
    ) -> tuple[float, float, Any]:
        return self._whole.forward(parameters, x, y, loss, context)

    def backward(self, parameters: ParameterStore, gradients: GradientStore, saved: Any) -> None:
        start, stop = self._own
        for unit in self.units:  # one, or none
            if unit.index in self.frozen_units:
                continue
            own = gradients.gradient(unit)

            def add(begin: int, values: Array, factor: float, own: Array = own) -> None:
                low, high = max(begin, start), min(begin + int(values.size), stop)
                if low < high:
                    target = own[low - start : high - start]
                    target += beside(values[low - begin : high - begin], target) * factor

            if saved is not None:
                self._whole.contribute(saved, add)
            gradients.reduce(unit)

    def require_one_batch(self, call: str, x: Any, y: Any = None, *, everywhere: bool) -> None:
        if call != "predict":  # which each rank does alone
            require_one_batch(self.mesh, call, x, y, everywhere=everywhere)

    def replicas(self, config: ShardingConfiguration) -> Sequence[Sequence[int]]:
        return self.mesh.replicas

    def train(
        self,
        parameters: ParameterStore,
        gradients: GradientStore,
        x: Array,
        y: Array,
        loss: ILossFunction | None,
        context: Context,
    ) -> tuple[float, float]:
        total, weight = super().train(parameters, gradients, x, y, loss, context)
        return (total, weight) if self.speaks else (0.0, 0.0)

    # ------------------------------------------------------------------------ the whole vector

    def deal(self, parameters: ParameterStore, world: CommunicationBackend) -> None:
        full = np.empty(self._placement.length, self.dtype)
        if world.rank == 0:
            for unit in self._whole.units:
                self._whole.fill(unit, full[unit.start : unit.stop])
        world.broadcast(full, root=0)
        start, stop = self._own
        for unit in self.units:
            parameters.fill(unit, full[start:stop] if self.mesh.data_rank == 0 else None)
        self._whole.deal_constants(world)
        self._full = full

    def fill(self, unit: Unit, out: Array) -> None:
        raise NotImplementedError("a black box on a mesh deals its vector whole: see deal()")

    def take_over(self, parameters: ParameterStore, holder: str) -> str | None:
        self._holder = holder
        if self._full is not None:  # a copy of a black box has its parameters
            if self._whole.computes_in_place:
                full = parameters.layout.allocate(MemoryCategory.GATHERED, int(self._full.size))
            else:
                full = self.device.namespace.empty(self._full.size, self.dtype)
            copy_into(full, self._full)
            self._whole.compute_with(full, holder)
            self._full = full if self._whole.computes_in_place else None
        return (
            "because it is a black box. A model that implements ILayeredModel (mpishard.nn) is "
            "computed in parts, each of them by the ranks that hold its parameters"
        )

    def changed(self, parameters: ParameterStore) -> None:
        """Let the model compute with what the replica's ranks have. Collective."""
        with self._own_values(parameters) as own:
            full = self.mesh.replica.all_gather(own, out=self._full)
        if not self._whole.computes_in_place:
            self._whole.compute_with(full, self._holder)

    def gather(self, parameters: ParameterStore) -> Array:
        with self._own_values(parameters) as own:
            return self.mesh.replica.all_gather(own)

    def gather_on(self, parameters: ParameterStore, root: int, *, is_sharded: bool) -> Array | None:
        pipeline, tensor, data = self.mesh.coordinates_of(root)
        if data != self.mesh.data_rank:
            return None
        with self._own_values(parameters) as own:
            place = pipeline * self.mesh.tensor_size + tensor
            return self.mesh.replica.gather(own, root=place)

    @contextmanager
    def _own_values(self, parameters: ParameterStore) -> Iterator[Array]:
        if not self.units:
            yield self.device.namespace.empty(0, self.dtype)
        for unit in self.units:
            yield parameters.unshard(unit)
            parameters.reshard(unit)

    def assemble(self, own: Array) -> Array:
        return self.mesh.replica.all_gather(own)

    def give_back(self, gather: Callable[[], Array]) -> None:
        self._whole.give_back(gather)

    def copy(self) -> tuple[Program, Any]:
        program = copy.copy(self)
        whole, model = self._whole.copy()
        assert isinstance(whole, WholeProgram)
        program._compute_by(whole)
        program._full = self._full
        return self._copied(program), model
