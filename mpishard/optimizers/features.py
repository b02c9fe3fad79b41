"""What a trained model says about its input features."""

from __future__ import annotations

from mpishard.contracts import IFeatureAware
from mpishard.models import ShardedModelBase
from mpishard.optimizers.result import OptimizationResult

__all__ = ["describe_features"]


def describe_features(model: ShardedModelBase, result: OptimizationResult) -> None:
    """Write into ``result`` which features a model uses, if it knows them. Collective."""
    plain = model.wrapped_model
    own = getattr(type(plain), "get_active_feature_indices", None)
    if own is None or own is IFeatureAware.get_active_feature_indices:
        return
    result.selected_feature_indices = sorted(int(i) for i in plain.get_active_feature_indices())
