"""Documented members of `mpishard.ShardingConfiguration`: its presets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from mpishard.communication import CommunicationBackend

__all__ = ["ConfigurationPresets"]


class ConfigurationPresets:
    """Configurations by the links and the memory that they are for."""

    if TYPE_CHECKING:

        def __init__(
            self, communication_backend: CommunicationBackend, learning_rate: float, **choices: Any
        ) -> None: ...

    @classmethod
    def create_default(
        cls, communication_backend: CommunicationBackend, learning_rate: float = 0.01
    ) -> Self:
        """Return the defaults. Arguments and errors are those of the class, as for each preset."""
        return cls(communication_backend, learning_rate)

    @classmethod
    def create_for_high_bandwidth(
        cls, communication_backend: CommunicationBackend, learning_rate: float = 0.01
    ) -> Self:
        """Return choices for fast links: units from 512 elements, gradients not compressed."""
        return cls(communication_backend, learning_rate, minimum_parameter_group_size=512)

    @classmethod
    def create_for_low_bandwidth(
        cls, communication_backend: CommunicationBackend, learning_rate: float = 0.01
    ) -> Self:
        """Return choices for slow links: units from 4096 elements, gradients as bfloat16."""
        return cls(
            communication_backend,
            learning_rate,
            minimum_parameter_group_size=4096,
            enable_gradient_compression=True,
        )

    @classmethod
    def create_for_zero_offload(
        cls, communication_backend: CommunicationBackend, learning_rate: float = 0.01
    ) -> Self:
        """Return choices for little GPU memory: optimizer state and update on the host."""
        return cls(communication_backend, learning_rate, cpu_offload_optimizer=True)

    @classmethod
    def create_for_zero_offload_full(
        cls, communication_backend: CommunicationBackend, learning_rate: float = 0.01
    ) -> Self:
        """Return choices for the least GPU memory: all owned vectors on the host."""
        return cls(
            communication_backend,
            learning_rate,
            cpu_offload_optimizer=True,
            cpu_offload_gradients=True,
            cpu_offload_parameters=True,
        )
