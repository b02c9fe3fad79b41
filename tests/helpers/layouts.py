"""Models wrapped in replicas of several kinds, by a short name."""

from __future__ import annotations

import numpy as np

import mpishard as ms


def wrap(backend, plain, layout, unit=1, **options):
    """Return a plain model wrapped as ``layout`` says, and the strategy for its optimizer.

    A layout is "ddp" of replicas of one rank; a strategy and the ranks of a replica, as in
    "fsdp/2"; or a mesh, pipeline x tensor, as in "2x1", or pipeline x tensor x data with a strategy
    of the data axis, as in "1x2x2 fsdp".
    """
    mesh, _, inside = layout.partition(" ")
    strategy, _, ranks = layout.partition("/")
    sizes = [int(n) for n in mesh.split("x")] if "x" in mesh else []
    size = int(np.prod(sizes)) if sizes else int(ranks) if ranks else None
    config = ms.ShardingConfiguration(
        backend, minimum_parameter_group_size=unit, replica_size=size, **options
    )
    if sizes:
        return ms.HybridShardedModel(
            plain, config, *sizes, data_parallel_strategy=inside or "zero1"
        ), "hybrid"
    return ms.as_distributed(plain, config, strategy), strategy
