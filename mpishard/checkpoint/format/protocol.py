"""The interface of models, optimizers and loops that can be saved and restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.sharding.regions import Region
from mpishard.sharding.table import ParameterEntry

__all__ = [
    "CheckpointState",
    "Checkpointable",
    "CheckpointableOptimizer",
    "Pieces",
    "require_checkpointable",
    "states_of",
]

Pieces = Mapping[str, Sequence[tuple[Region, Array]]]
"""Kind -> region of a parameter and 1-D array, for each piece.

A kind is ``"parameters"``, ``"optimizer/<state name>"`` or ``"training/<name>"``; it has an array
of the shape of each parameter. All ranks have the same kinds, even if a rank has no piece of one.
`mpishard.sharding.Placement.cut` makes pieces of a rank's own flat vector.
"""


class CheckpointState(Protocol):
    """Arrays in the shapes of the parameters, and JSON metadata."""

    def arrays_to_write(self) -> Pieces:
        """Return the pieces that this rank writes.

        Together the ranks' pieces of a kind are all parameters, each element once. Of replicated
        arrays each rank returns a part, or one rank everything.
        """
        ...

    def arrays_to_read(self) -> Pieces:
        """Return the pieces to be filled on this rank: writable views, which may overlap."""
        ...

    def checkpoint_metadata(self) -> Mapping[str, Any]:
        """Return what else must be restored, as JSON: step, schedule. Rank 0's is saved."""
        ...

    def restored(self, metadata: Mapping[str, Any]) -> None:
        """Finish, on every rank, when the arrays of all ranks are filled. May communicate.

        Parameters
        ----------
        metadata : mapping
            What `checkpoint_metadata` returned when it was saved.
        """
        ...


class Checkpointable(CheckpointState, Protocol):
    """A model whose parameters can be saved and restored."""

    @property
    def checkpoint_backend(self) -> CommunicationBackend | None:
        """The ranks that save and load together; None for a model of one process."""
        ...

    @property
    def checkpoint_dtype(self) -> np.dtype[Any]:
        """The dtype of the parameters."""
        ...

    def checkpoint_parameters(self) -> Sequence[ParameterEntry]:
        """Return the parameters along the flat vector, in order and without gaps."""
        ...

    def check_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Refuse metadata that `restored` could not use, before anything is read.

        Raises
        ------
        ValueError
            If they do not fit the model.
        """
        ...


class CheckpointableOptimizer(Protocol):
    """An optimizer whose state can be saved and restored beside its model's parameters."""

    def checkpoint_view(self, model: Any) -> CheckpointState:
        """Return the optimizer's state for the parameters of ``model``."""
        ...


def require_checkpointable(model: Any, optimizer: Any = None) -> None:
    """Refuse on this rank arguments that no rank could save or load; nothing is communicated.

    Raises
    ------
    TypeError
        For another model or optimizer.
    """
    if not hasattr(model, "checkpoint_parameters"):
        raise TypeError(
            "a checkpoint needs a model of mpishard, plain or sharded (Checkpointable), got "
            f"{type(model).__name__}"
        )
    if optimizer is not None and not hasattr(optimizer, "checkpoint_view"):
        raise TypeError(
            "a checkpoint needs a sharded optimizer (CheckpointableOptimizer), got "
            f"{type(optimizer).__name__}; mpishard.as_distributed makes one"
        )


def states_of(
    model: Checkpointable,
    optimizer: CheckpointableOptimizer | None,
    training: CheckpointState | None,
) -> dict[str, CheckpointState]:
    """Return the states that a checkpoint holds, by their names in its metadata."""
    states: dict[str, CheckpointState] = {"model": model}
    if optimizer is not None:
        states["optimizer"] = optimizer.checkpoint_view(model)
    if training is not None:
        states["training"] = training
    return states
