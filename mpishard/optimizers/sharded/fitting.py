"""Refusals of rules, models and data that do not fit an optimizer; nothing is communicated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mpishard.communication import CommunicationBackend
from mpishard.contracts import IGradientBasedOptimizer, IOptimizer, IShardedOptimizer
from mpishard.errors import ShardingError
from mpishard.models import ShardedModelBase
from mpishard.optimizers.loop.data import OptimizationInputData
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.sharding import ShardingConfiguration


def checked_rule(candidate: object, wrapper: str) -> Optimizer:
    """Return ``candidate`` if a sharded optimizer can run it."""
    kind = type(candidate).__name__
    if isinstance(candidate, IShardedOptimizer):
        raise TypeError(f"wrapped_optimizer is sharded already, as {kind}")
    if isinstance(candidate, IOptimizer) and not isinstance(candidate, IGradientBasedOptimizer):
        raise ValueError(  # noqa: TRY004 - the mirrored hierarchy's
            f"{wrapper} updates by reduced gradients, and {kind} is not gradient based "
            "(IGradientBasedOptimizer): wrap one of mpishard.optimizers"
        )
    if not isinstance(candidate, Optimizer):
        raise TypeError(
            f"wrapped_optimizer must be an optimizer of mpishard.optimizers, got {kind}"
        )
    return candidate


def require_model(
    model: object, optimizer: str, model_class: type[ShardedModelBase],
    backend: CommunicationBackend, rule: Optimizer,
) -> None:  # fmt: skip
    """Refuse a model that an optimizer for ``model_class`` on ``backend`` cannot train by ``rule``.

    Raises
    ------
    TypeError
        For a model that is not sharded.
    ShardingError
        For another strategy or backend, and a model whose gradients another optimizer keeps.
    ValueError
        With a rule that searches along a line: for a black box that computes no loss, a model with
        dropout, and replicas that drift apart.
    """
    if not isinstance(model, ShardedModelBase):
        raise TypeError(
            f"step needs a sharded model, got {type(model).__name__}; wrap it with "
            "mpishard.as_distributed(model, backend, strategy)"
        )
    if not isinstance(model, model_class):
        raise ShardingError(
            f"{optimizer} updates {model_class.__name__}, and the model is a "
            f"{type(model).__name__}; use one strategy for both"
        )
    if model.backend is not backend:
        names = [each.describe() for each in (model.backend, backend)]
        other = ", another object" if names[0] == names[1] else ""
        raise ShardingError(
            f"the model's backend, {names[0]}, is not the optimizer's, {names[1]}{other}; use "
            "one for both"
        )
    if model.engine.gradients_user is not None:
        raise ShardingError(
            f"{model.engine.gradients_user} trains this model, and keeps errors or sums of "
            "its gradients; call its reset() first"
        )
    if not rule.searches:
        return
    # A line search compares values of one function: the loss must depend on parameters alone.
    engine, name = model.engine, type(rule).__name__
    if not engine.knows_loss:
        raise ValueError(
            f"{name} compares losses, but {type(model.wrapped_model).__name__} computes none: give "
            "it compute_loss_and_gradients, or a default_loss_function"
        )
    if engine.program.is_random:
        raise ValueError(
            f"{name} evaluates the same function at several points, but dropout changes it each "
            "time: remove the dropout layers"
        )
    if not model.sharding_configuration.auto_sync_gradients:
        raise ValueError(
            f"{name} makes one line search on all ranks; it needs auto_sync_gradients=True"
        )


def checked_data(
    data: OptimizationInputData,
    model: Any,
    config: ShardingConfiguration,
    rule: Optimizer,
    *,
    differing: str,
) -> OptimizationInputData:
    """Return checked data for `optimize`, with the end of training that ``rule`` brings.

    Parameters
    ----------
    data : OptimizationInputData
        The user's argument.
    model : object
        The model to train if ``data`` has none.
    config : ShardingConfiguration
        Choices for a plain model.
    rule : Optimizer
        The rule.
    differing : str
        Name of the optimizer if its replicas differ between two steps; otherwise empty.

    Raises
    ------
    TypeError, ValueError
        For input that cannot be trained.
    """
    if not isinstance(data, OptimizationInputData):
        raise TypeError(f"optimize needs an OptimizationInputData, got {type(data).__name__}")
    if data.model is None:
        data = replace(data, model=model)
    data = data.checked()
    if isinstance(data.model, ShardedModelBase):
        config = data.model.sharding_configuration
    if not config.auto_sync_gradients:
        raise ValueError(
            "optimize reports one loss and one solution, and with auto_sync_gradients=False "
            "each rank has its own: call step() in a loop, and synchronize_gradients() on the "
            "model, or set auto_sync_gradients=True"
        )
    if data.digest_every is not None and differing:
        raise ValueError(
            f"digest_every compares replicas, and those of {differing} differ between two "
            "synchronisations: leave it out"
        )
    # Options of the mirrored hierarchy bring an end of training with them.
    options = rule.algorithm_options
    return data if options is None else options.applied(data)
