"""Data sets, and the order in which their samples are seen."""

from mpishard.data.dataset import TokenWindows, check_dataset, take
from mpishard.data.sampler import GlobalBatchSampler, LocalBatchSampler

__all__ = ["GlobalBatchSampler", "LocalBatchSampler", "TokenWindows", "check_dataset", "take"]
