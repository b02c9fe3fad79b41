"""Programs: the computation of a step, and the ranks that share a batch."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mpishard.base import (
    HOST,
    Array,
    Data,
    Device,
    DType,
    MissingMemberError,
    Scalar,
    as_loss,
    beside,
    lies_on_device,
    read_numbers,
    require_plain,
)
from mpishard.communication import CommunicationBackend, ProcessMesh
from mpishard.contracts import ILossFunction, Saved, UserModel
from mpishard.data import map_arrays
from mpishard.models.stores.gradient_store import GradientStore
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.models.stores.vector import ModelVector
from mpishard.nn import Context, KeyValueCache
from mpishard.observe import span
from mpishard.sharding import ParameterEntry, Piece, Unit, pieces_within


def unread_loss(total: Any, loss: ILossFunction) -> Scalar:
    """Return a loss's sum as a float, or as an array of one element on a GPU, for which none waits.

    Raises
    ------
    ValueError, TypeError
        As `as_loss`.
    """
    if lies_on_device(total) and total.size == 1 and total.dtype.kind == "f":
        unread: Array = total
        return unread
    return as_loss(total, loss, "sum")


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples that one pass computes, as `Program.check_pair` returns them.

    Parameters
    ----------
    x, y : Array
        Inputs and targets.
    loss : ILossFunction or None
        Loss to minimise; None if a black box has its own.
    context : Context
        Seed, step and samples, for random layers.
    """

    x: Data
    y: Data
    loss: ILossFunction | None
    context: Context


class Replica:
    """The groups of a rank, which here computes its samples alone.

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
        World ranks that compute each part of a batch, by rank of ``sample_group``.
    sample_group : CommunicationBackend
        The ranks that divide the samples of a batch: ``data``, unless ranks form groups.
    is_grouped : bool
        Whether ranks form groups, each of which trains a replica apart.
    group, across : CommunicationBackend
        The ranks of this group, and those that hold the same part in each group; by default all.
    reports_loss : bool
        Whether this rank, of all that compute its batch, adds the loss to sums over ranks.
    is_on_mesh : bool
        Whether ranks may hold different parts of the model, and have other units.
    """

    is_on_mesh = False

    def __init__(self, world: CommunicationBackend) -> None:
        # Without a mesh one backend is every group.
        self.world = self.data = self.sample_group = self.group = self.across = world
        self.is_grouped = False
        self.members: Sequence[Sequence[int]] = [[rank] for rank in range(world.world_size)]
        self.reports_loss = True

    def train_apart(self, mesh: ProcessMesh) -> None:
        """Train the replicas of ``mesh`` apart; inside a replica it has a data axis only."""
        self.is_grouped = True
        self.data, self.sample_group = mesh.data, mesh.samples
        self.group, self.across = mesh.group, mesh.replica

    @property
    def is_writer(self) -> bool:
        """True if this rank writes its pieces to checkpoints: only the first replica's ranks do."""
        return not self.is_grouped or self.across.rank == 0

    def owners(self, *, shards_state: bool) -> CommunicationBackend | None:
        """Return the ranks that together update every parameter once; None if each updates all."""
        return self.data if shards_state else None

    def share_loss(self, total: float, weight: float) -> tuple[float, float]:
        """Send the sum and weight of a loss from one rank to all that compute it. Collective."""
        return total, weight

    def require_one_batch(
        self, call: str, x: Data, y: Data = None, *, everywhere: bool, subject: int
    ) -> None:
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
        subject : int
            The model's number in collectives.

        Raises
        ------
        ShardingError
            On the ranks that compute one batch, if they call different methods.
        ValueError
            On every rank that takes part, with the batch that each rank was given.
        """


class Program(ABC):
    """Forward and backward through stores that may have to gather and reduce.

    Attributes
    ----------
    replica : Replica
        The ranks that compute one batch together.
    vector : ModelVector
        Layout of the model's flat vector over the ranks.
    units : tuple of Unit
        Ranges of this rank's flat vector that are gathered and reduced as one.
    kept : frozenset of int
        Indices of the units that stay unsharded from forward to backward.
    dtype : numpy.dtype
        Dtype of parameters and gradients.
    entries : tuple of ParameterEntry
        Name, shape and start of each parameter of this rank.
    device : Device
        Device that computes.
    needs_whole_parameters : bool
        Whether all parameters must be readable at any time, whatever the policy says.
    is_random : bool
        Whether the outputs in training depend on seed, step and sample.
    seed : int
        Seed of that randomness: rank 0's, on every rank.
    frozen : frozenset of str
        Names of the parameters that training leaves as they are.
    used : set of str or None
        Names of the parameters to which this rank's last pass gave a gradient. None if every pass
        gives one to all that are trained.
    default_loss : ILossFunction or None
        The model's own loss, as it was when the model was wrapped: a model may return a new object
        at each access.
    """

    replica: Replica
    vector: ModelVector
    units: tuple[Unit, ...]
    kept: frozenset[int]
    dtype: DType
    entries: tuple[ParameterEntry, ...]
    device: Device = HOST
    needs_whole_parameters: ClassVar[bool] = False
    is_random: bool = False
    seed: int = 0
    frozen: frozenset[str] = frozenset()
    used: set[str] | None = None
    default_loss: ILossFunction | None = None

    def freeze(self, names: frozenset[str]) -> None:
        """Do not train the parameters of these names from now on."""
        self.frozen = names

    @property
    def frozen_units(self) -> frozenset[int]:
        """Indices of the units without a trained parameter."""
        if not self.frozen:
            return frozenset()
        trained = {
            unit.index
            for unit in self.units
            for entry in self.entries
            if unit.start <= entry.start < unit.stop and entry.name not in self.frozen
        }
        return frozenset(unit.index for unit in self.units) - trained

    def trained(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """Return the parts of ``pieces`` that are not frozen."""
        if not self.frozen:
            return tuple(pieces)
        # By parameters and not by units, because a unit may hold trained and frozen ones.
        ranges = [(e.start, e.stop) for e in self.entries if e.name not in self.frozen]
        return pieces_within(pieces, ranges)

    @property
    def optional(self) -> list[str]:
        """Names of the trained parameters to which a pass may give no gradient."""
        # No message lists parameters that every pass uses.
        if self.used is None:
            return []
        return [entry.name for entry in self.entries if entry.name not in self.frozen]

    def structure(self) -> dict[str, object]:
        """Return what must be the same on all ranks: name -> value, for JSON."""
        units = {f"unit {u.index}": f"[{u.start}, {u.stop})" for u in self.units}
        parameters = {f"parameter {e.name}": f"{e.shape} from {e.start}" for e in self.entries}
        return {**parameters, "frozen parameters": sorted(self.frozen), **units}

    # ------------------------------------------------------------------------------- parameters

    @abstractmethod
    def fill(self, start: int, out: Array) -> None:
        """Write the range of the model's own values that begins at ``start`` into ``out``."""

    def distribute_constants(self, backend: CommunicationBackend) -> None:
        """Give every rank the state of rank 0's model other than parameters. Collective."""

    def share_changed_state(self, backend: CommunicationBackend) -> bool:
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

    def take_over(self, parameters: ParameterStore, holder: str) -> str | None:
        """Let the model release its parameters: from now on ``holder``'s store has them.

        Returns
        -------
        str or None
            The reason why every rank still has whole parameters, and the remedy; None otherwise.
        """
        self.changed(parameters)
        return None

    def changed(self, parameters: ParameterStore) -> None:
        """React to a change of the parameters. Collective."""

    def give_back(self, gather: Callable[[], Array]) -> None:
        """Return the parameters, which ``gather`` gathers, to the model. Collective."""

    def copy(self) -> tuple[Program, Any]:
        """Return a program of a copy of the model, and the copy. Communicates nothing.

        The programs share groups of ranks, and the layout of the vector over them.
        """
        # Groups of ranks are communicators: to make new ones would be collective.
        program, model = copy.copy(self), self._copied_model()
        program._use(model)
        program.vector = self.vector
        program.freeze(self.frozen)
        return program, model

    def _use(self, model: UserModel) -> None:
        """Compute with ``model`` from now on."""
        self._model = model
        self.default_loss = getattr(model, "default_loss_function", None)

    def _copied_model(self) -> UserModel:
        return copy.deepcopy(self._model)

    # -------------------------------------------------------------------------------- computing

    @abstractmethod
    def check(self, x: Data) -> Data:
        """Return inputs as `predict` takes them, or refuse them. Communicates nothing."""

    def check_next(self, x: Data) -> Data:
        """Do as `check`, for the inputs of `predict_next`."""
        return self.check(x)

    @abstractmethod
    def check_pair(self, x: Data, y: Data, loss: ILossFunction | None) -> tuple[Data, Data]:
        """Return inputs and targets as `Batch` has them, or refuse. Communicates nothing."""

    @property
    def has_own_loss(self) -> bool:
        """True if `forward` returns a loss without being given a loss function."""
        return False

    def sums(self, loss: ILossFunction | None) -> bool:
        """True if ``loss``, or with None the model's own, is a sum over samples and no mean."""
        return getattr(loss, "is_sum", False)

    @abstractmethod
    def predict(self, parameters: ParameterStore, x: Array) -> Array:
        """Return outputs. The calls of the store do not depend on the number of samples."""

    def predict_next(self, parameters: ParameterStore, x: Array, cache: KeyValueCache) -> Array:
        """Return outputs for the last position of new tokens of shape (B, T), shape (B, V).

        ``cache`` holds what layers keep of the positions before them.
        """
        raise MissingMemberError("generate needs a GPT, but this model is not one")

    def measure(self, loss: ILossFunction, prediction: Array, y: Data) -> tuple[float, float]:
        """Return sum and weight of ``loss``, without a gradient."""
        target = map_arrays(lambda array: beside(array, prediction), y)
        total, weight, _ = loss.forward(prediction, target, training=False)
        # Both by one copy, if the loss is on a GPU.
        total, weight = read_numbers([total, weight])
        return total, weight

    @abstractmethod
    def forward(self, parameters: ParameterStore, batch: Batch) -> tuple[Scalar, Scalar, Saved]:
        """Return sum and weight of the loss, and the saved activations for `backward`."""

    @abstractmethod
    def backward(self, parameters: ParameterStore, gradients: GradientStore, saved: Saved) -> None:
        """Add the gradient of the loss's *sum* to every unit, and reduce each as it is done."""

    def train(
        self, parameters: ParameterStore, gradients: GradientStore, batch: Batch
    ) -> tuple[Scalar, Scalar]:
        """Run both passes; return sum and weight of the loss, 0 unless this rank reports it."""
        with span("forward"):
            total, weight, saved = self.forward(parameters, batch)
        with span("backward"):
            self.backward(parameters, gradients, saved)
        return (total, weight) if self.replica.reports_loss else (0.0, 0.0)

    def finish_local(self, gradients: GradientStore) -> None:
        """Complete a gradient that is not reduced over ranks with other samples. Collective."""


class WholeProgram(Program):
    """A program that computes whole gradients with whole parameters, and cannot be cut."""

    needs_whole_parameters = True

    def check_pair(self, x: Data, y: Data, loss: ILossFunction | None) -> tuple[Data, Data]:
        self.check(x)
        require_plain(y)
        if y is not None and len(x) != len(y):
            raise ValueError(f"x has {len(x)} samples and y has {len(y)}")
        return x, y
