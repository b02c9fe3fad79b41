"""The interface of a model whose parameters live on several ranks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from mpishard.arrays import Array
from mpishard.contracts.models import IFullModel

__all__ = ["IShardedModel", "ShardedModel"]


class IShardedModel(IFullModel):
    """A model whose parameters live on several ranks."""

    @property
    @abstractmethod
    def wrapped_model(self) -> Any:
        """The user's model."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of this process or thread."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    @abstractmethod
    def local_parameter_shard(self) -> Array:
        """What this rank owns, end to end; all parameters where they are replicated."""

    @property
    @abstractmethod
    def sharding_configuration(self) -> Any:
        """The choices this model was made with."""

    @abstractmethod
    def gather_full_parameters(self) -> Array:
        """All parameters in layer order, on every rank. Collective."""

    @abstractmethod
    def synchronize_gradients(self) -> None:
        """Reduce gradients that are still local. Collective."""


ShardedModel = IShardedModel
"""`IShardedModel`, as users write it."""
