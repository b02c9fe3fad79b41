"""A black box on a mesh: its flat vector is divided over a replica's ranks, its computation not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from mpishard.arrays import Array, beside, copy_into
from mpishard.communication import CommunicationBackend, ProcessMesh
from mpishard.contracts import ILossFunction
from mpishard.models.programs.program import Batch, Program, WholeProgram
from mpishard.models.programs.replica import MeshReplica
from mpishard.models.stores.gradient_store import GradientStore
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.models.stores.vector import RangeVector
from mpishard.observe.ledger import MemoryCategory
from mpishard.sharding import build_units

__all__ = ["DividedProgram"]


class DividedProgram(Program):
    """Every rank of a replica computes one batch, all of it, and owns a range of the flat vector.

    The range is one unit (`RangeVector`), and the data axis treats it as it does a whole vector.
    Of the gradient that a rank computes it keeps and reduces its range alone. After an update the
    user's object gets the ranges of all ranks of the replica.

    Parameters
    ----------
    whole : WholeProgram
        Computes on each rank.
    mesh : ProcessMesh
        The ranks.
    """

    needs_whole_parameters = True

    def __init__(self, whole: WholeProgram, mesh: ProcessMesh) -> None:
        self.replica = MeshReplica(mesh, speaks=mesh.replica.rank == 0, predicts_together=False)
        self.vector: RangeVector = RangeVector(whole.entries, mesh)
        self._mesh = mesh
        self._compute_by(whole)
        length = self.vector.stop - self.vector.start
        self.units = build_units([length], 1) if length else ()
        self.kept = frozenset(unit.index for unit in self.units)
        self.entries = tuple(held.entry for held in self.vector.placement.slices)
        self.dtype = whole.dtype
        self.freeze(whole.frozen)

    def _compute_by(self, whole: WholeProgram) -> None:
        self._whole = whole
        self.device = whole.device
        self._full: Array | None = None  # all parameters, if the model computes with this array

    @property
    def default_loss(self) -> ILossFunction | None:
        """The model's own loss."""
        return self._whole.default_loss

    @default_loss.setter
    def default_loss(self, loss: ILossFunction | None) -> None:
        self._whole.default_loss = loss

    def structure(self) -> str:
        return repr((self._whole.structure(), self._mesh.sizes, self._mesh.order))

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

    def forward(self, parameters: ParameterStore, batch: Batch) -> tuple[float, float, Any]:
        return self._whole.forward(parameters, batch)

    def backward(self, parameters: ParameterStore, gradients: GradientStore, saved: Any) -> None:
        start, stop = self.vector.start, self.vector.stop
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

    # ------------------------------------------------------------------------------- parameters

    def fill(self, start: int, out: Array) -> None:
        self._whole.fill(start, out)

    def deal_constants(self, backend: CommunicationBackend) -> None:
        self._whole.deal_constants(backend)

    def take_over(self, parameters: ParameterStore, holder: str) -> str | None:
        self._holder = holder
        dealt = self._full if self._full is not None else self.vector.dealt
        if dealt is not None:  # a copy of a black box has its parameters
            if self._whole.computes_in_place:
                full = parameters.layout.allocate(MemoryCategory.GATHERED, int(dealt.size))
            else:
                full = self.device.namespace.empty(dealt.size, self.dtype)
            copy_into(full, dealt)
            self._whole.compute_with(full, holder)
            self._full = full if self._whole.computes_in_place else None
            self.vector.dealt = None
        return (
            "because it is a black box. A model that implements ILayeredModel (mpishard.nn) is "
            "computed in parts, each of them by the ranks that hold its parameters"
        )

    def changed(self, parameters: ParameterStore) -> None:
        """Let the model compute with what the replica's ranks have. Collective."""
        full = self.vector.gather(parameters, out=self._full)
        if not self._whole.computes_in_place:
            self._whole.compute_with(full, self._holder)

    def give_back(self, gather: Callable[[], Array]) -> None:
        self._whole.give_back(gather)

    def copy(self) -> tuple[Program, Any]:
        program = copy.copy(self)
        whole, model = self._whole.copy()
        assert isinstance(whole, WholeProgram)
        program._compute_by(whole)
        program._full = self._full
        return self._copied(program), model
