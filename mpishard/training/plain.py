"""Training of a plain model in this process, by the sharded engine in a world of one rank."""

from __future__ import annotations

import itertools
from dataclasses import replace

from mpishard.base import require_type
from mpishard.communication import InMemoryCommunicationBackend
from mpishard.optimizers import DDPOptimizer, Optimizer, refuse_sharded
from mpishard.sharding import ShardingConfiguration
from mpishard.training.data import OptimizationInputData
from mpishard.training.result import OptimizationResult

_numbers = itertools.count()


def train_plain(
    rule: Optimizer, input_data: OptimizationInputData, model: object = None
) -> OptimizationResult:
    """Train a plain model; what `Optimizer.optimize` does.

    The model has the trained parameters afterwards, and is the result's ``model``: that of the
    data, or ``model`` if they have none.
    """
    require_type("input_data", input_data, OptimizationInputData)
    data = input_data.checked(model)  # before a world is made for it
    plain = data.model
    refuse_sharded(rule, plain)
    # Two such runs may be under way in two threads, so each world has a name of its own.
    with InMemoryCommunicationBackend(0, 1, f"single-{next(_numbers)}") as backend:
        sharded = DDPOptimizer(rule, ShardingConfiguration(backend))
        wrapper = DDPOptimizer.model_class(plain, sharded.sharding_configuration)
        try:
            result = sharded.optimize(replace(data, model=wrapper))
        finally:  # also after an error the plain model has its parameters back
            wrapper.release()
    result.best_solution = plain
    return result
