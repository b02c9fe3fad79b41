"""The interfaces of optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from mpishard.arrays import Array


class IOptimizer(ABC):
    """Something that finds parameters for data."""

    @abstractmethod
    def optimize(self, input_data: Any) -> Any:
        """Train the model of ``input_data`` on its data; an `OptimizationResult`."""

    @abstractmethod
    def get_options(self) -> Mapping[str, Any]:
        """The choices this optimizer was made with."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all state."""

    def should_early_stop(self) -> bool:
        """True if training should end now."""
        return False


class IGradientBasedOptimizer(IOptimizer):
    """An optimizer whose update is a function of a gradient."""

    @abstractmethod
    def get_current_learning_rate(self) -> float:
        """The rate that the next update uses."""

    @property
    @abstractmethod
    def last_computed_gradients(self) -> Array | None:
        """The gradient of the last update; None before one."""

    @abstractmethod
    def update_parameters(self, parameters: Any, gradients: Any) -> Any:
        """One update of a vector, a matrix or a list of them; the arguments stay as they are."""

    @abstractmethod
    def apply_gradients(self, *given: Any) -> Any:
        """One update of a model, which it gives: ``(gradients, model)``.

        With ``(original_parameters, gradients, model)`` it begins at the parameters from before a
        step that the model has made meanwhile.
        """

    @abstractmethod
    def reverse_update(self, updated: Array, gradients: Array) -> Array:
        """The parameters before the last update.

        Raises
        ------
        RuntimeError
            If there is none to reverse, or it cannot be reversed.
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
        """The choices this optimizer was made with."""

    @abstractmethod
    def synchronize_optimizer_state(self) -> None:
        """Make the state of all ranks equal. Collective.

        Raises
        ------
        NotImplementedError
            If state is sharded, and so exists once.
        """

    @property
    def backend(self) -> Any:
        """The `mpishard.CommunicationBackend` of this rank."""
        return self.sharding_configuration.communication_backend
