"""Input features: which a model uses, and how much each matters."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable

from mpishard.errors import MissingInterfaceError

__all__ = ["IFeatureAware", "IFeatureImportance"]


class IFeatureAware(ABC):
    """Input features in use. Only the linear models know theirs.

    Members that a model does not implement raise `MissingInterfaceError`, a RuntimeError.
    """

    def get_active_feature_indices(self) -> Iterable[int]:
        """Indices of the features in use."""
        raise MissingInterfaceError(f"{type(self).__name__} does not implement IFeatureAware")

    def set_active_feature_indices(self, indices: Iterable[int]) -> None:
        """Use these features and no others."""
        raise MissingInterfaceError(f"{type(self).__name__} does not implement IFeatureAware")

    def is_feature_used(self, index: int) -> bool:
        """Whether one feature is in use."""
        return index in set(self.get_active_feature_indices())


class IFeatureImportance(ABC):
    """How much each input feature matters."""

    def get_feature_importance(self) -> dict[str, float]:
        """Importance by feature name; `MissingInterfaceError` where the model knows none."""
        raise MissingInterfaceError(f"{type(self).__name__} does not implement IFeatureImportance")
