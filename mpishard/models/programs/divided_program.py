"""A black box on a mesh: its flat vector is divided over the ranks, its computation not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace, beside, copy_into
from mpishard.communication import CommunicationBackend, ProcessMesh
from mpishard.contracts import ILossFunction
from mpishard.errors import ShardingError
from mpishard.models.programs.mesh_replica import MeshReplica
from mpishard.models.programs.program import Batch, Program, WholeProgram
from mpishard.models.stores.gradient_store import GradientStore
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.models.stores.vector import RangeVector
from mpishard.observe.ledger import MemoryCategory
from mpishard.pipeline import IPipelinePartitionStrategy
from mpishard.sharding import build_units


class DividedProgram(Program):
    """Pipeline and tensor ranks each compute the whole batch, and own ranges of the flat vector.

    The range is one unit (`RangeVector`), and the data axis treats it as it does a whole vector.
    A rank keeps and reduces only its range of the gradient. After an update the user's object gets
    the ranges of all pipeline and tensor ranks.

    Parameters
    ----------
    whole : WholeProgram
        Computes on each rank.
    mesh : ProcessMesh
        The ranks.
    strategy : IPipelinePartitionStrategy, optional
        Divides the flat vector among pipeline stages: see `RangeVector`.
    """

    needs_whole_parameters = True

    def __init__(
        self,
        whole: WholeProgram,
        mesh: ProcessMesh,
        strategy: IPipelinePartitionStrategy | None = None,
    ) -> None:
        self.replica = MeshReplica(mesh, speaks=mesh.model.rank == 0, predicts_together=False)
        self.vector: RangeVector = RangeVector(whole.entries, mesh, strategy)
        self._mesh = mesh
        self._whole = whole
        whole.replica = self.replica
        self.device = whole.device
        self.default_loss = whole.default_loss
        self._full: Array | None = None  # all parameters, if the model computes with this array
        length = self.vector.stop - self.vector.start
        self.units = build_units([length], 1) if length else ()
        self.kept = frozenset(unit.index for unit in self.units)
        self.entries = tuple(held.entry for held in self.vector.placement.slices)
        self.dtype = whole.dtype
        self.freeze(whole.frozen)

    def freeze(self, names: frozenset[str]) -> None:
        super().freeze(names)
        self._whole.freeze(names)

    # -------------------------------------------------------------------------------- computing

    def check(self, x: Any) -> Any:
        return self._whole.check(x)

    def check_pair(self, x: Any, y: Any, loss: ILossFunction | None) -> tuple[Any, Any]:
        return self._whole.check_pair(x, y, loss)

    @property
    def has_own_loss(self) -> bool:
        return self._whole.has_own_loss

    def measure(self, loss: ILossFunction, prediction: Array, y: Array) -> tuple[float, float]:
        return self._whole.measure(loss, prediction, y)

    def predict(self, parameters: ParameterStore, x: Array) -> Array:
        return self._whole.predict(parameters, x)

    def forward(self, parameters: ParameterStore, batch: Batch) -> tuple[float, float, Any]:
        total, weight, saved = self._whole.forward(parameters, batch)
        return total, weight, (total, saved)

    def backward(self, parameters: ParameterStore, gradients: GradientStore, saved: Any) -> None:
        start, stop = self.vector.start, self.vector.stop
        total, saved = saved
        projection = norm2 = math.nan  # a rank whose range is empty or frozen computes no gradient
        for unit in self.units:  # one, or none
            if unit.index in self.frozen_units:
                continue
            own = gradients.gradient(unit)
            projection = norm2 = 0.0

            def add(begin: int, values: Array, factor: float, own: Array = own) -> None:
                nonlocal projection, norm2
                projection += _projection(begin, values)
                norm2 += float(values @ values)
                low, high = max(begin, start), min(begin + int(values.size), stop)
                if low < high:
                    target = own[low - start : high - start]
                    target += beside(values[low - begin : high - begin], target) * factor

            if saved is not None:
                self._whole.contribute(saved, add)
        self._require_one_result(total, projection, norm2)
        for unit in self.units:
            if unit.index not in self.frozen_units:
                gradients.reduce(unit)

    def _require_one_result(self, total: float, projection: float, norm2: float) -> None:
        """Refuse a model whose loss or gradient depends on the rank that computes. Collective.

        Each rank keeps its range of its own gradient, so the ranges would be of different
        functions. Rounding may differ between machines: the square root of the dtype's resolution
        is allowed.

        Raises
        ------
        ShardingError
            On all ranks that compute the batch.
        """
        mine = np.array([[total, projection, norm2]])
        losses, projections, norms2 = self._mesh.model.all_gather(mine).T
        # Ranks may sum in other orders, as BLAS threads do: differences of rounding are allowed.
        allowed = 8 * math.sqrt(np.finfo(self.dtype).eps)
        ranges = []
        for values, scale in (
            (losses, np.abs(losses)),
            (projections, np.sqrt(norms2)),
            (norms2, norms2),
        ):
            # NaN comes from ranks that computed no gradient, or from a loss that is NaN on all.
            known = values[np.isfinite(values)]
            largest = scale[np.isfinite(scale)].max(initial=0.0)
            ranges.append(bool(known.size) and np.ptp(known) > allowed * largest)
        if any(ranges):
            ranks = self.replica.members[self.replica.dealt.rank]
            found = "; ".join(
                f"rank {rank}: loss sum {loss:.6g}, gradient norm {math.sqrt(norm2):.6g}"
                for rank, loss, norm2 in zip(ranks, losses, norms2, strict=True)
            )
            raise ShardingError(
                "the ranks of the pipeline and tensor axes computed one batch, and "
                f"their results differ: {found}. A black box there must not depend on its rank, "
                "for instance by random numbers with a seed of the rank; ranks that compute "
                "different samples belong on the data axis, as under strategy 'ddp'. Nothing was "
                "updated"
            )

    # ------------------------------------------------------------------------------- parameters

    def fill(self, start: int, out: Array) -> None:
        self._whole.fill(start, out)

    def deal_constants(self, backend: CommunicationBackend) -> None:
        self._whole.deal_constants(backend)

    def settle(self, backend: CommunicationBackend) -> bool:
        return self._whole.settle(backend)

    def take_over(self, parameters: ParameterStore, holder: str) -> str | None:
        self._holder = holder
        dealt = self._full if self._full is not None else self.vector.dealt
        if dealt is not None:  # None for a copy of a black box, which has its parameters
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
        """Give the model the parameters that its ranks store. Collective."""
        full = self.vector.gather(parameters, out=self._full)
        if not self._whole.computes_in_place:
            self._whole.compute_with(full, self._holder)

    def give_back(self, gather: Callable[[], Array]) -> None:
        self._whole.give_back(gather)

    def copy(self) -> tuple[Program, Any]:
        program = copy.copy(self)
        whole, model = self._whole.copy()
        assert isinstance(whole, WholeProgram)
        program._whole, program.default_loss = whole, whole.default_loss
        return program, model


_RAMP_LENGTH = 4096


def _projection(begin: int, values: Array) -> float:
    """Return the product of a part of a gradient, from element ``begin`` on, and fixed weights.

    Weights differ between elements and rows, so that the product shows exchanged elements.
    """
    xp = array_namespace(values)
    rows = int(values.size) // _RAMP_LENGTH
    whole = rows * _RAMP_LENGTH
    # By rows of one short ramp: weights for every element would take as much memory as the
    # gradient.
    ramp = xp.linspace(1.0, 2.0, _RAMP_LENGTH, dtype=values.dtype)
    total = float(values[whole:] @ ramp[: int(values.size) - whole])
    if rows:
        by_row = values[:whole].reshape(rows, _RAMP_LENGTH) @ ramp
        total += float(by_row @ xp.linspace(1.0, 2.0, rows, dtype=values.dtype))
    return total * (1 + begin % 97 / 97)
