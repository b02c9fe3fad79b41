"""What a user chooses about sharding."""

from __future__ import annotations

from mpishard.communication import CommunicationBackend

__all__ = ["ShardingConfiguration"]


class ShardingConfiguration:
    """Choices that a sharded model and its sharded optimizer share.

    Parameters
    ----------
    communication_backend : CommunicationBackend
        How the ranks talk. Read-only afterwards.
    learning_rate : float
        Step size of ``model.train``, plain gradient descent. Optimizers have their own.
    minimum_parameter_group_size : int
        Consecutive layers are merged into one unit until it has this many elements. Larger units
        mean fewer, longer messages, and more memory for the units in use.
    check_collectives : bool
        Compare every rank's call before data is mixed. Costs one small message per collective.
    allow_nonfinite : bool
        Go on where a loss or gradient is infinite or NaN, instead of raising
        `NonFiniteLossError` on every rank before the update.

    Raises
    ------
    TypeError
        Where the backend is None or no `CommunicationBackend`.
    ValueError
        Where ``learning_rate`` is not above 0, or the group size is below 1.
    """

    def __init__(
        self,
        communication_backend: CommunicationBackend,
        learning_rate: float = 0.01,
        *,
        minimum_parameter_group_size: int = 1024,
        check_collectives: bool = True,
        allow_nonfinite: bool = False,
    ) -> None:
        if not isinstance(communication_backend, CommunicationBackend):
            raise TypeError(
                "communication_backend must be a CommunicationBackend, got "
                f"{type(communication_backend).__name__}; mpishard.init() returns one"
            )
        self._backend = communication_backend
        self.learning_rate = learning_rate
        self.minimum_parameter_group_size = minimum_parameter_group_size
        self.check_collectives = check_collectives
        self.allow_nonfinite = allow_nonfinite

    @property
    def communication_backend(self) -> CommunicationBackend:
        """How the ranks talk."""
        return self._backend

    @property
    def learning_rate(self) -> float:
        """Step size of ``model.train``."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if not 0 < value < float("inf"):
            raise ValueError(f"learning_rate must be above 0 and finite, got {value}")
        self._learning_rate = float(value)

    @property
    def minimum_parameter_group_size(self) -> int:
        """Elements below which a unit takes in another layer."""
        return self._minimum_parameter_group_size

    @minimum_parameter_group_size.setter
    def minimum_parameter_group_size(self, value: int) -> None:
        if value < 1:
            raise ValueError(f"minimum_parameter_group_size must be 1 or more, got {value}")
        self._minimum_parameter_group_size = int(value)

    @property
    def check_collectives(self) -> bool:
        """Whether every rank's call is compared before data is mixed."""
        return self._backend.check_collectives

    @check_collectives.setter
    def check_collectives(self, value: bool) -> None:
        self._backend.check_collectives = bool(value)
