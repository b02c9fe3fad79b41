"""Training in one process, through the same engine: a world of one rank."""

from __future__ import annotations

import itertools
from dataclasses import replace

from mpishard.communication import InMemoryCommunicationBackend
from mpishard.optimizers.loop.data import OptimizationInputData
from mpishard.optimizers.loop.result import OptimizationResult
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.ddp import DDPOptimizer
from mpishard.sharding import ShardingConfiguration

__all__ = ["optimize_single"]

_numbers = itertools.count()


def optimize_single(optimizer: Optimizer, input_data: OptimizationInputData) -> OptimizationResult:
    """Train a plain model with a plain optimizer.

    Returns
    -------
    OptimizationResult
        Its ``model`` is the plain model that was passed, with the trained parameters.
    """
    if not isinstance(input_data, OptimizationInputData):
        raise TypeError(f"optimize needs an OptimizationInputData, got {type(input_data).__name__}")
    if input_data.model is None:
        input_data = replace(input_data, model=optimizer.model)
    input_data.checked()  # before a world is made for it
    plain = input_data.model
    with InMemoryCommunicationBackend(0, 1, f"single-{next(_numbers)}") as backend:
        sharded = DDPOptimizer(optimizer, ShardingConfiguration(backend))
        model = DDPOptimizer.model_class(plain, sharded.sharding_configuration)
        try:
            result = sharded.optimize(replace(input_data, model=model))
        finally:
            model.release()
    result.best_solution = plain
    return result
