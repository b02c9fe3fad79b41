"""What a trained model says about its input features."""

from __future__ import annotations

from mpishard.contracts import IFeatureAware
from mpishard.models import ShardedModelBase
from mpishard.nn.models.linear_models import LinearModel
from mpishard.optimizers.loop.result import OptimizationResult

__all__ = ["describe_features"]


def describe_features(model: ShardedModelBase, result: OptimizationResult) -> None:
    """Write into ``result`` which features a model uses, if it knows them. Collective.

    Of a linear model also their names, and the intercept, for which it is gathered once.
    """
    plain = model.wrapped_model
    if not isinstance(plain, IFeatureAware) or (
        type(plain).get_active_feature_indices is IFeatureAware.get_active_feature_indices
    ):
        return
    indices = sorted(int(index) for index in plain.get_active_feature_indices())
    result.selected_feature_indices = indices
    if isinstance(plain, LinearModel):
        result.selected_features = [plain.feature_names[index] for index in indices]
        with model.unsharded() as whole:
            result.best_intercept = whole.intercept
