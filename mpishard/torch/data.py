"""Data loader that gives each rank its part of every batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader as PlainLoader
from torch.utils.data.distributed import DistributedSampler

from mpishard.arguments import as_count
from mpishard.torch.world import current_world


class DataLoader(PlainLoader):  # type: ignore[misc]
    """``torch.utils.data.DataLoader`` that gives each rank its part of every batch.

    The order of the samples depends only on seed and epoch. The parts of all ranks make up the
    global batch of one process, so that results do not depend on the number of ranks. Each
    iteration over the loader is the next epoch.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset
        Data set with a length, the same on every rank.
    batch_size : int
        Number of samples of the *global* batch, a multiple of the number of ranks.
    shuffle : bool
        True if each epoch has another random order.
    seed : int
        Seed of the random order.
    drop_last : bool
        True to leave out the last samples if they do not fill a batch. If False, and the number of
        ranks does not divide the number of samples, some samples are used twice.
    **options
        Options of ``torch.utils.data.DataLoader``: ``num_workers``, ``collate_fn``, and so on.

    Attributes
    ----------
    epoch : int
        Number of the next epoch. Set it to resume.

    Raises
    ------
    TypeError
        If the data set has no length.
    ValueError
        If the ranks cannot divide the batch evenly, or a sampler is given. With a sampler use
        PyTorch's loader and ``DistributedSampler(dataset, mst.world_size(), mst.rank())``.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        world = current_world()
        batch_size = as_count("batch_size", batch_size)
        if batch_size % world.world_size:
            raise ValueError(
                "batch_size is that of all ranks together, and must be a multiple of their number: "
                f"got {batch_size} for {world.world_size} ranks"
            )
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"mpishard.torch.DataLoader divides the samples by their numbers, and "
                f"{type(dataset).__name__} has no length; with an IterableDataset use "
                "torch.utils.data.DataLoader, and let each rank read its own samples, such as "
                "itertools.islice(samples, mst.rank(), None, mst.world_size())"
            )
        if "sampler" in options or "batch_sampler" in options:
            raise ValueError(
                "mpishard.torch.DataLoader makes the sampler; with one of your own use torch.utils."
                "data.DataLoader, each rank with its samples, as DistributedSampler(dataset, "
                "mst.world_size(), mst.rank()) gives them"
            )
        # Rank r of N gets samples r, r + N, ...: the ranks' parts of a step are consecutive samples
        # of the order, which are the batch of one process.
        order = DistributedSampler(
            dataset, world.world_size, world.rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        super().__init__(
            dataset, batch_size // world.world_size, sampler=order, drop_last=drop_last, **options
        )
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return super().__iter__()  # type: ignore[no-any-return]
