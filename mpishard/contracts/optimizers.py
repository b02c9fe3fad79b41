"""The interfaces of optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from mpishard.base import Array, Metadata


class IOptimizer(ABC):
    """An object that finds parameters for data."""

    @abstractmethod
    def optimize(self, input_data: Any) -> Any:
        """Train the model of ``input_data`` on its data; return an `OptimizationResult`."""

    @abstractmethod
    def get_options(self) -> Metadata:
        """Return the settings of this optimizer, by name."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all state."""

    def should_early_stop(self) -> bool:
        """Return whether training should end now."""
        return False


class IGradientBasedOptimizer(IOptimizer):
    """An optimizer whose update is a function of a gradient."""

    @abstractmethod
    def get_current_learning_rate(self) -> float:
        """Return the learning rate of the next update."""

    @property
    @abstractmethod
    def last_computed_gradients(self) -> Array | None:
        """The gradient of the last update; None before the first."""

    @abstractmethod
    def update_parameters(self, parameters: Any, gradients: Any) -> Any:
        """Return updated values of a vector, a matrix or a list of them; change no argument."""

    @abstractmethod
    def apply_gradients(self, *given: Any) -> Any:
        """Update a model and return it; the arguments are ``(gradients, model)``.

        With ``(original_parameters, gradients, model)`` the update begins at
        ``original_parameters``: those before a step that the model has made meanwhile.
        """

    @abstractmethod
    def reverse_update(self, updated: Array, gradients: Array) -> Array:
        """Return the parameters before the last update.

        Raises
        ------
        RuntimeError
            If there was no update, or it cannot be reversed.
        """


class IShardedOptimizer(IOptimizer):
    """An optimizer that works with the other ranks."""

    @property
    @abstractmethod
    def wrapped_optimizer(self) -> Any:
        """The user's optimizer."""

    @property
    def rank(self) -> int:
        """The rank of this process or thread."""
        return self.backend.rank  # type: ignore[no-any-return]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.backend.world_size  # type: ignore[no-any-return]

    @property
    @abstractmethod
    def sharding_configuration(self) -> Any:
        """The `ShardingConfiguration` of this optimizer."""

    @abstractmethod
    def synchronize_optimizer_state(self) -> None:
        """Make the state of all ranks equal. Collective.

        Raises
        ------
        NotImplementedError
            If the state is sharded: each part of it exists on one rank only.
        """

    # The type is not named, because this room comes before communication.
    @property
    def backend(self) -> Any:
        """The `mpishard.CommunicationBackend` of this rank."""
        return self.sharding_configuration.communication_backend
