"""Data sets, and the order in which their samples are seen.

Begin with ``sampler.py``: the global batch of each step and each rank's part of it, a function of
(seed, epoch) alone. ``dataset.py`` reads samples from arrays, files, windows of tokens and trees
of them; ``batches.py`` makes a rank's batches, and reads files ahead on a thread; ``tables.py``
reads columns of Parquet and Arrow files. ``distributed_sampler.py`` has samplers for other
libraries' data loaders. This room imports layout and arrays.
"""

from mpishard.data.batches import Batches, RankBatch, origin_of
from mpishard.data.dataset import (
    Dataset,
    Samples,
    TokenWindows,
    check_dataset,
    count_samples,
    is_sparse,
    map_arrays,
    map_tree,
    take,
    tree_of,
)
from mpishard.data.distributed_sampler import DistributedSampler, ElasticDistributedSampler
from mpishard.data.sampler import GlobalBatchSampler, LocalBatchSampler
from mpishard.data.tables import Column, ParquetColumns

__all__ = [
    "Batches",
    "Column",
    "DistributedSampler",
    "ElasticDistributedSampler",
    "GlobalBatchSampler",
    "LocalBatchSampler",
    "ParquetColumns",
    "RankBatch",
    "Samples",
    "TokenWindows",
    "check_dataset",
    "count_samples",
    "is_sparse",
    "map_arrays",
    "take",
    "tree_of",
]
