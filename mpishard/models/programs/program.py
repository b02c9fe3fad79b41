"""What is computed in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from mpishard.arrays import Array, beside, copy_into
from mpishard.communication import CommunicationBackend
from mpishard.contracts import ILossFunction
from mpishard.devices import HOST, Device
from mpishard.errors import MissingMemberError
from mpishard.models.stores.gradient_store import GradientStore
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.nn.layers.layer import Context, KeyValueCache
from mpishard.observe import span
from mpishard.sharding import (
    ParameterEntry,
    Placement,
    ShardingConfiguration,
    Unit,
)

__all__ = ["Program"]


class Program(ABC):
    """Forward and backward through stores that may have to gather and reduce.

    Attributes
    ----------
    units : tuple of Unit
        What is gathered and reduced as one.
    kept : frozenset of int
        Indices of the units that stay unsharded from forward to backward.
    dtype : numpy.dtype
        Of parameters and gradients.
    entries : tuple of ParameterEntry
        Name, shape and start of each parameter.
    device : Device
        Where it computes.
    needs_whole_parameters : bool
        Whether all parameters must be readable at any time, whatever the policy says.
    is_on_mesh : bool
        Whether ranks may hold different parts of the model, and have other units.
    is_random : bool
        Whether what is computed in training depends on seed, step and sample.
    seed : int
        Of that randomness; rank 0's on every rank.
    frozen : frozenset of str
        Names of the parameters that training leaves as they are.
    default_loss : ILossFunction or None
        The model's own loss, which a model may make anew whenever it is asked.
    """

    units: tuple[Unit, ...]
    kept: frozenset[int]
    dtype: np.dtype[Any]
    entries: tuple[ParameterEntry, ...]
    device: Device = HOST
    needs_whole_parameters: ClassVar[bool] = False
    is_on_mesh: ClassVar[bool] = False
    is_random: bool = False
    seed: int = 0
    frozen: frozenset[str] = frozenset()
    default_loss: ILossFunction | None = None
    _whole_placement: Placement | None = None

    def freeze(self, names: frozenset[str]) -> None:
        """Leave the parameters of these names as they are from now on."""
        self.frozen = names

    @property
    def frozen_units(self) -> frozenset[int]:
        """Indices of the units of which nothing is trained."""
        if not self.frozen:
            return frozenset()
        trained = {
            unit.index
            for unit in self.units
            for entry in self.entries
            if unit.start <= entry.start < unit.stop and entry.name not in self.frozen
        }
        return frozenset(unit.index for unit in self.units) - trained

    def description(self) -> str:
        """What must be the same on all ranks beside units, entries and dtype."""
        return repr(sorted(self.frozen))

    def knows_loss(self, loss: ILossFunction | None) -> bool:
        """Whether `forward` can tell the loss; a black box need only know its gradient."""
        return loss is not None

    @property
    def placement(self) -> Placement:
        """Which part of the model this rank's own flat vector is; all of it, unless told."""
        if self._whole_placement is None:
            self._whole_placement = Placement.whole(self.entries)
        return self._whole_placement

    @property
    def length(self) -> int:
        """Length of this rank's own flat vector."""
        return self.units[-1].stop if self.units else 0

    @property
    def speaks(self) -> bool:
        """Whether this rank's loss counts, of all ranks that compute the same samples."""
        return True

    def axis(self, config: ShardingConfiguration) -> CommunicationBackend:
        """The ranks that hold the same part of the model, and compute other samples."""
        return config.communication_backend

    def owners(
        self, config: ShardingConfiguration, *, shards_state: bool
    ) -> CommunicationBackend | None:
        """The ranks that together update every parameter once; None where each updates all."""
        return config.communication_backend if shards_state else None

    def tell(self, total: float, weight: float) -> tuple[float, float]:
        """Sum and weight of a loss, told to all ranks that compute the same samples. Collective."""
        return total, weight

    def structure(self) -> str:
        """What must be the same on all ranks of how the model is cut."""
        units = [(u.start, u.stop) for u in self.units]
        return repr((units, [(e.name, e.shape) for e in self.entries]))

    @abstractmethod
    def check(self, x: Any) -> Any:
        """The inputs as `predict` takes them; refuses unfit ones. Communicates nothing."""

    def check_next(self, x: Any) -> Any:
        """As `check`, for the inputs of `predict_next`."""
        return self.check(x)

    @abstractmethod
    def check_pair(self, x: Any, y: Any, loss: ILossFunction | None) -> tuple[Any, Any]:
        """Inputs and targets as `forward` takes them; refuses unfit ones, as `check`."""

    def require_one_batch(self, call: str, x: Any, y: Any = None, *, everywhere: bool) -> None:
        """Refuse calls and batches that differ between ranks that compute together. Collective.

        ``call`` is what this rank is about to do. Over all ranks of the world with
        ``everywhere``, otherwise over those ranks.
        """

    def replicas(self, config: ShardingConfiguration) -> Sequence[Sequence[int]]:
        """The ranks that compute the samples of each data rank, in that order."""
        return [[rank] for rank in range(config.communication_backend.world_size)]

    @abstractmethod
    def fill(self, unit: Unit, out: Array) -> None:
        """Write the model's own values of ``unit`` into ``out``."""

    def deal(self, parameters: ParameterStore, world: CommunicationBackend) -> None:
        """Give every rank world rank 0's values: no rank holds two full units. Collective."""
        is_root = world.rank == 0
        longest = max(unit.length for unit in self.units)
        full = np.empty(longest if is_root else 0, self.dtype)
        for unit in self.units:
            values = None
            if is_root:
                values = full[: unit.length]
                self.fill(unit, values)
            parameters.fill(unit, values)
        self.deal_constants(world)

    def gather(self, parameters: ParameterStore) -> Array:
        """The model's flat vector, a new array on every rank. Collective."""
        full = self.device.namespace.empty(self.length, self.dtype)
        for unit in self.units:
            full[unit.start : unit.stop] = parameters.unshard(unit)
            parameters.reshard(unit)
        return full

    def gather_on(self, parameters: ParameterStore, root: int, *, is_sharded: bool) -> Array | None:
        """As `gather`, on world rank ``root`` alone: each unit's pieces travel to it."""
        layout = parameters.layout
        full = None
        if layout.backend.rank == root:
            full = self.device.namespace.empty(self.length, self.dtype)
        pieces = layout.pieces(sharded=is_sharded)
        for piece, owned in zip(pieces, parameters.owned(pieces), strict=True):
            values = layout.backend.gather(owned, root=root) if is_sharded else owned
            if full is not None:
                copy_into(full[piece.unit.start : piece.unit.stop], values)
        return full

    def assemble(self, own: Array) -> Array:
        """The model's flat vector, from one of which each rank has its own part. Collective."""
        return own

    def finish_local(self, gradients: GradientStore) -> None:
        """Complete a gradient that is not reduced over ranks with other samples. Collective."""

    def deal_constants(self, backend: CommunicationBackend) -> None:
        """Give every rank what rank 0's model holds beside parameters. Collective."""

    def take_over(self, parameters: ParameterStore, holder: str) -> str | None:
        """Hear that the store has the parameters now, for ``holder``.

        Returns
        -------
        str or None
            Why, nonetheless, they stand whole on every rank, and what would shard them; None
            where they do not.
        """
        self.changed(parameters)
        return None

    def changed(self, parameters: ParameterStore) -> None:
        """Hear that parameters have changed."""

    def give_back(self, gather: Callable[[], Array]) -> None:
        """Let the model have its parameters again, as ``gather`` gives them. Collective."""

    @abstractmethod
    def copy(self) -> tuple[Program, Any]:
        """A program of a model that shares nothing that changes with this one's, and the model."""

    def _copied(self, program: Program) -> Program:
        """``program``, of a copy of the model, with what this one was told."""
        program.freeze(self.frozen)
        program.seed = self.seed
        return program

    @abstractmethod
    def predict(self, parameters: ParameterStore, x: Array) -> Array:
        """Outputs. Makes the same calls of the store for any number of samples, 0 included."""

    def predict_next(self, parameters: ParameterStore, x: Array, cache: KeyValueCache) -> Array:
        """Outputs for the last position of new tokens of shape (B, T), shape (B, V).

        What layers keep of the positions before them is in ``cache``.
        """
        raise MissingMemberError(f"a {type(self).__name__} generates nothing")

    def measure(self, loss: ILossFunction, prediction: Array, y: Array) -> tuple[float, float]:
        """Sum and weight of ``loss``, without a gradient."""
        total, weight, _ = loss.forward(prediction, beside(y, prediction), training=False)
        return total, weight

    @abstractmethod
    def forward(
        self,
        parameters: ParameterStore,
        x: Array,
        y: Array,
        loss: ILossFunction | None,
        context: Context,
    ) -> tuple[float, float, Any]:
        """Sum and weight of the loss, and what `backward` needs."""

    @abstractmethod
    def backward(self, parameters: ParameterStore, gradients: GradientStore, saved: Any) -> None:
        """Add the gradient of the loss's *sum* to every unit, and reduce each as it is done."""

    def train(
        self,
        parameters: ParameterStore,
        gradients: GradientStore,
        x: Array,
        y: Array,
        loss: ILossFunction | None,
        context: Context,
    ) -> tuple[float, float]:
        """Forward and backward: sum and weight of the loss, of what this rank speaks for."""
        with span("forward"):
            total, weight, saved = self.forward(parameters, x, y, loss, context)
        with span("backward"):
            self.backward(parameters, gradients, saved)
        return total, weight
