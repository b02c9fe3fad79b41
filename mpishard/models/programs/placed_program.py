"""A model that computes with parameters in place, and returns gradients one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Self

import numpy as np

from mpishard.base import (
    Array,
    Data,
    DType,
    MissingLossError,
    MissingMemberError,
    Scalar,
    ShardingError,
    return_freed_memory,
)
from mpishard.communication import CommunicationBackend
from mpishard.contracts import ILossFunction, Saved, UserModel
from mpishard.models.programs.program import Batch, Replica, WholeProgram
from mpishard.models.stores.gradient_store import GradientStore
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.models.stores.vector import ModelVector
from mpishard.nn import Context
from mpishard.sharding import (
    ParameterEntry,
    Placement,
    ShardingConfiguration,
    Unit,
    build_units,
    owned_pieces,
)

OWN_DTYPE = (
    "computes in a dtype of its own, which nobody else can change; build it of the layers of "
    "mpishard.nn, or leave precision=None"
)
"""The reason why a black box is not computed in bfloat16."""


class IPlaceableModel(ABC):
    """A model whose parameters can be placed in given memory.

    A sharded wrapper places them in memory that a node's ranks share, where nothing is copied.
    """

    @property
    @abstractmethod
    def placed_object(self) -> Any:
        """The object whose parameters are placed; only one wrapper at a time may own it."""

    @property
    @abstractmethod
    def parameter_entries(self) -> Sequence[ParameterEntry]:
        """Name, shape and start of each parameter, in flat order."""

    @property
    @abstractmethod
    def dtype(self) -> DType:
        """The one dtype of the parameters."""

    def obstacle_to_bfloat16(self) -> str | None:
        """Return why the model cannot compute with rounded float32 parameters; None if it can."""
        return OWN_DTYPE

    @abstractmethod
    def fill_parameters(self, start: int, out: Array) -> None:
        """Write the parameters of the flat range that begins at ``start`` into ``out``."""

    @abstractmethod
    def place_parameters(self, arrays: Sequence[Array], holder: str, store: ParameterStore) -> None:
        """Compute with these arrays, of shape (size,), one per entry, that ``holder`` owns.

        Their values may change between two passes. They are in the memory of ``store``, whose ranks
        compute other samples.
        """

    @abstractmethod
    def reclaim_parameters(self, parameters: Array) -> None:
        """Take ``parameters`` back from a holder: the opposite of `place_parameters`."""

    @abstractmethod
    def with_parameters(self, parameters: Array) -> Self:
        """Return a model of the same structure that holds ``parameters`` without a copy."""

    def distribute_state(self, world: CommunicationBackend, ranks: CommunicationBackend) -> None:
        """Take rank 0's state other than parameters. Collective.

        ``ranks`` are those that draw different random numbers.
        """

    def share_changed_state(self, ranks: CommunicationBackend) -> bool:
        """Make one state besides parameters of those that the ranks' passes changed. Collective.

        Returns
        -------
        bool
            Whether any rank has such state.
        """
        return False

    def kept_state(self) -> object:
        """Return the state besides parameters that passes replace, for `restore_state`."""
        return None

    def restore_state(self, kept: object) -> None:
        """Take a state of before passes whose step was refused. Communicates nothing."""

    @property
    def may_use_some(self) -> bool:
        """True if a pass may give some parameters no gradient, and updates then leave them out."""
        return False

    @property
    def is_random(self) -> bool:
        """True if passes use the step and the index of each sample in the global batch."""
        return False

    @property
    def computes_together(self) -> bool:
        """True if a rank must make a pass even without samples, because others wait in it."""
        return False

    @abstractmethod
    def check_input(self, x: Data) -> None:
        """Refuse inputs that the model cannot compute with."""

    @abstractmethod
    def predict(self, x: Array) -> Array:
        """Return outputs for inputs."""

    @property
    def has_own_loss(self) -> bool:
        """True if the model has a loss of its own: see `own_loss`."""
        return False

    @property
    def loss_is_sum(self) -> bool:
        """True if the model's own loss is a sum over samples."""
        return False

    def own_loss(self, x: Array, y: Array) -> tuple[float, float]:
        """Return sum and weight of the model's own loss, without saving anything."""
        raise MissingMemberError(f"{type(self).__name__} has no loss of its own")

    @abstractmethod
    def forward_pass(
        self, x: Array, y: Array, loss: ILossFunction | None, context: Context
    ) -> tuple[Scalar, Scalar, Saved]:
        """Return sum and weight of the loss, and the saved values that `backward_pass` needs.

        With ``loss`` None it is the model's own. ``context`` has the step, and the index of the
        first sample.
        """

    @abstractmethod
    def backward_pass(self, saved: Saved, receive: Callable[[int, Array], None]) -> None:
        """Compute the gradient of the loss's *sum*, parameter by parameter.

        ``receive(index, gradient)`` is called, in any order, once for each entry that has a
        gradient in this pass, with an array of shape (size,) that it may keep.
        """


class PlacedProgram(WholeProgram):
    """Forward and backward of a model whose parameters are views of the store's memory.

    No step copies parameters. Gradients are written to the store as they come. Each unit is reduced
    when it and all units after it are complete, so that ranks communicate in one order even if
    their backward passes reach parameters in different orders.

    Parameters
    ----------
    model : IPlaceableModel
        The model.
    config : ShardingConfiguration
        All ranks, and the size of units. The parameters of one module are a layer.
    """

    _model: IPlaceableModel
    _plan: ArrivalPlan | None = None

    def __init__(self, model: IPlaceableModel, config: ShardingConfiguration) -> None:
        self._use(model)
        self.replica = Replica(config.communication_backend)
        self.dtype = model.dtype
        self.entries = tuple(model.parameter_entries)
        self.vector = ModelVector(Placement.whole(self.entries))
        self.units = units_of_modules(self.entries, config.minimum_parameter_group_size)
        # Nothing is gathered: the module reads its parameters in place.
        self.kept = frozenset()
        self.used = set() if model.may_use_some else None
        self.is_random = model.is_random
        self.freeze(frozenset(entry.name for entry in self.entries if not entry.trainable))

    def check(self, x: Data) -> Data:
        self._model.check_input(x)
        return x

    def check_pair(self, x: Data, y: Data, loss: ILossFunction | None) -> tuple[Data, Data]:
        if loss is None and not self.has_own_loss:
            raise MissingLossError("the model has no default loss; pass loss_function")
        # A loss of the model's own may need no targets.
        if not (hasattr(y, "__len__") or (y is None and loss is None)):
            raise TypeError(f"targets must be an array, got {type(y).__name__}")
        return super().check_pair(x, y, loss)

    @property
    def has_own_loss(self) -> bool:
        return self._model.has_own_loss

    def sums(self, loss: ILossFunction | None) -> bool:
        return self._model.loss_is_sum if loss is None else super().sums(loss)

    def fill(self, start: int, out: Array) -> None:
        self._model.fill_parameters(start, out)

    def distribute_constants(self, backend: CommunicationBackend) -> None:
        # Ranks that compute other samples draw other random numbers.
        self._model.distribute_state(backend, self.replica.sample_group)

    def share_changed_state(self, backend: CommunicationBackend) -> bool:
        return self._model.share_changed_state(backend)

    def kept_state(self) -> object:
        return self._model.kept_state()

    def restore_state(self, kept: object) -> None:
        self._model.restore_state(kept)

    def take_over(self, parameters: ParameterStore, holder: str) -> str | None:
        store = parameters.computed
        vectors = store.owned(owned_pieces(self.units, 1, 0))
        arrays = views_of_entries(self.units, self.entries, vectors)
        self._model.place_parameters(arrays, holder, parameters)
        return_freed_memory()  # of the parameters that the module had
        # The module needs whole tensors at any time: only shared memory holds them once per node.
        if store.once_per_node or store.backend.world_size == 1:
            return None
        return "because the ranks of a node share no memory here"

    def give_back(self, gather: Callable[[], Array]) -> None:
        self._model.reclaim_parameters(gather())

    def _copied_model(self) -> UserModel:
        # Memory without values: the caller copies them from this program's store.
        return self._model.with_parameters(np.empty(self.units[-1].stop, self.dtype))

    def predict(self, parameters: ParameterStore, x: Array) -> Array:
        return self._model.predict(x)

    def forward(self, parameters: ParameterStore, batch: Batch) -> tuple[Scalar, Scalar, Saved]:
        # Synchronised batch statistics, for example, are a collective inside of the pass.
        is_alone = not (batch.context.training and self._model.computes_together)
        if len(batch.x) == 0 and is_alone:
            return 0.0, 0.0, None
        if batch.loss is None and not batch.context.training:
            return *self._model.own_loss(batch.x, batch.y), None
        return self._model.forward_pass(batch.x, batch.y, batch.loss, batch.context)

    def backward(self, parameters: ParameterStore, gradients: GradientStore, saved: Saved) -> None:
        if self._plan is None or self._plan.without_gradient != self.frozen_units:
            self._plan = ArrivalPlan(self.units, self.entries, self.frozen_units)
        arrivals = Arrivals(self._plan, gradients)
        if saved is not None:
            self._model.backward_pass(saved, arrivals.receive)
        if self.used is not None:
            # Of this pass alone: a module may use other parameters for each batch.
            self.used = arrivals.names
        arrivals.finish()


_SMALL = 4096  # elements of a gradient that waits for its unit: a call of NumPy costs more


def _end_to_end(arrays: list[Array]) -> Array:
    """Return arrays of shape (size,), end to end."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class ArrivalPlan:
    """The entries of each unit, which the backward passes of a model have in common.

    Parameters
    ----------
    units, entries : tuple
        Units and parameters of the flat vector.
    without_gradient : frozenset of int
        Indices of the units without a trained parameter.
    """

    def __init__(
        self,
        units: tuple[Unit, ...],
        entries: tuple[ParameterEntry, ...],
        without_gradient: frozenset[int],
    ) -> None:
        self.units = units
        self.entries = entries
        self.without_gradient = without_gradient
        self.unit_of: list[int] = []
        self.ranges: list[slice] = []  # of each entry, in its unit
        self.is_small: list[bool] = []
        self.trained: list[frozenset[int]] = []
        self.untrained: list[list[int]] = []
        for unit in units:
            numbered = list(enumerate(unit.entries_of(entries), start=len(self.unit_of)))
            self.unit_of += [unit.index] * len(numbered)
            self.ranges += [slice(e.start - unit.start, e.stop - unit.start) for _, e in numbered]
            # Autograd gives no gradient to a parameter that is not trained: none is waited for.
            self.trained.append(frozenset(i for i, entry in numbered if entry.trainable))
            self.is_small += [entry.size < _SMALL for _, entry in numbered]
            self.untrained.append([i for i, entry in numbered if not entry.trainable])


class Arrivals:
    """Gradients of one backward pass, on their way to the store.

    Units are reduced from the last to the first. A gradient of an earlier unit waits for the unit's
    turn, so that the store has only one unit open at a time. Small gradients wait until their unit
    is complete, and are written together.

    Parameters
    ----------
    plan : ArrivalPlan
        The units and their parameters.
    gradients : GradientStore
        The store.
    scale : float
        Factor of all gradients.
    join : callable
        Returns one array of shape (size,) from gradients end to end, which may be of another
        library.
    """

    def __init__(
        self,
        plan: ArrivalPlan,
        gradients: GradientStore,
        scale: float = 1.0,
        join: Callable[[list[Any]], Array] = _end_to_end,
    ) -> None:
        self._plan = plan
        self._scale = scale
        self._join = join
        self._gradients = gradients
        self._missing = [set(trained) for trained in plan.trained]
        self._waiting: list[dict[int, Any]] = [{} for _ in plan.units]
        self._turn = len(plan.units) - 1
        self._open: tuple[Array, bool] | None = None

    @property
    def names(self) -> set[str]:
        """Names of the parameters whose gradients have come."""
        pairs = zip(self._plan.trained, self._missing, strict=True)
        return {self._plan.entries[i].name for all_of, missing in pairs for i in all_of - missing}

    def receive(self, index: int, gradient: Any) -> None:
        """Take the gradient of a parameter, and reduce the units that are complete."""
        unit = self._plan.unit_of[index]
        missing = self._missing[unit]
        # A second gradient would come after its unit was reduced, and be lost.
        if index not in missing:
            raise ShardingError(
                f"parameter {self._plan.entries[index].name!r} got two gradients in one backward "
                "pass; where it is used by several checkpointed parts, pass use_reentrant=False to "
                "torch.utils.checkpoint"
            )
        missing.remove(index)
        self._waiting[unit][index] = gradient
        # One unit after the other: autograd's order may differ between ranks, the order of
        # messages may not.
        if unit != self._turn or (missing and self._plan.is_small[index]):
            return
        while self._turn >= 0:
            self._write()
            if self._missing[self._turn]:
                return
            self._reduce()

    def finish(self) -> None:
        """Reduce the units that are left; a parameter without a gradient adds nothing."""
        while self._turn >= 0:
            self._write()
            if self._turn in self._plan.without_gradient:
                self._turn -= 1
                continue
            target, is_new = self._opened()
            # The store does not clear memory: parts that were not written have old gradients.
            if is_new:
                for index in self._missing[self._turn]:
                    target[self._plan.ranges[index]] = 0
            self._reduce()

    def _opened(self) -> tuple[Array, bool]:
        if self._open is None:
            self._open = target, is_new = self._gradients.target(self._plan.units[self._turn])
            if is_new:
                for index in self._plan.untrained[self._turn]:
                    target[self._plan.ranges[index]] = 0
        return self._open

    def _write(self) -> None:
        waiting = self._waiting[self._turn]
        if self._turn in self._plan.without_gradient:
            waiting.clear()
        if not waiting:
            return
        target, is_new = self._opened()
        for place, gradient in self._runs(waiting):
            if is_new:
                np.multiply(gradient, self._scale, out=target[place])
            else:
                target[place] += gradient * self._scale
        waiting.clear()

    def _runs(self, waiting: dict[int, Any]) -> Iterator[tuple[slice, Array]]:
        """Yield place and values of gradients; small ones that lie end to end as one."""
        ranges, is_small = self._plan.ranges, self._plan.is_small
        runs: list[list[int]] = []
        last = -1  # The last index of the run, if it may go on.
        for index in sorted(waiting):
            if index == last + 1 and runs and is_small[index]:
                runs[-1].append(index)
            else:
                runs.append([index])
            last = index if is_small[index] else -2
        for run in runs:
            place = slice(ranges[run[0]].start, ranges[run[-1]].stop)
            yield place, self._join([waiting[index] for index in run])

    def _reduce(self) -> None:
        if self._turn not in self._plan.without_gradient:
            self._gradients.reduce(self._plan.units[self._turn])
        self._open = None
        self._turn -= 1


def views_of_entries(
    units: Sequence[Unit], entries: Sequence[ParameterEntry], vectors: Sequence[Any]
) -> list[Any]:
    """Return a view of each parameter, of shape (size,), in vectors that have a unit each."""
    return [
        vector[entry.start - unit.start : entry.stop - unit.start]
        for unit, vector in zip(units, vectors, strict=True)
        for entry in unit.entries_of(entries)
    ]


def units_of_modules(entries: Sequence[ParameterEntry], minimum_unit_size: int) -> tuple[Unit, ...]:
    """Return the units of named parameters; the parameters of one module are a layer."""
    layers = groupby(entries, lambda entry: entry.name.rpartition(".")[0])
    return build_units(
        [sum(entry.size for entry in layer) for _, layer in layers], minimum_unit_size
    )
