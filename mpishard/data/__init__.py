"""Data sets, and the order in which their samples are seen.

Begin with ``sampler.py``: the global batch of each step and each rank's part of it, a function of
(seed, epoch) alone. ``dataset.py`` reads samples from arrays, files and windows of tokens.
``distributed_sampler.py`` has samplers for other libraries' data loaders. This room imports layout
and arrays.
"""

from mpishard.data.dataset import TokenWindows, check_dataset, take
from mpishard.data.distributed_sampler import DistributedSampler, ElasticDistributedSampler
from mpishard.data.sampler import GlobalBatchSampler, LocalBatchSampler

__all__ = [
    "DistributedSampler",
    "ElasticDistributedSampler",
    "GlobalBatchSampler",
    "LocalBatchSampler",
    "TokenWindows",
    "check_dataset",
    "take",
]
