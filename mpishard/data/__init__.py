"""Data sets, and the order in which their samples are seen."""

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
