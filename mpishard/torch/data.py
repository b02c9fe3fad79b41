"""Batches of which each rank gets its part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader as PlainLoader
from torch.utils.data.distributed import DistributedSampler

from mpishard.arguments import as_count
from mpishard.torch.world import current_world


class DataLoader(PlainLoader):  # type: ignore[misc]
    """A ``torch.utils.data.DataLoader`` that gives each rank its part of every batch.

    The order of the samples depends on seed and epoch alone, and the parts of all ranks are
    the global batch of one process: results do not depend on the number of ranks. Each iteration
    over the loader is the next epoch.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset
        With a length, the same on every rank.
    batch_size : int
        Samples of the *global* batch; a multiple of the number of ranks.
    shuffle : bool
        Whether each epoch has an order of its own.
    seed : int
        Of the order.
    drop_last : bool
        Leave out the samples that make up no whole batch. If not, some samples are seen twice
        where the number of ranks does not divide their number.
    **options
        For ``torch.utils.data.DataLoader``: ``num_workers``, ``collate_fn``, and so on.

    Attributes
    ----------
    epoch : int
        The next epoch; set it to resume.

    Raises
    ------
    ValueError
        For a batch that cannot be divided evenly, or a sampler: use PyTorch's loader with a
        ``DistributedSampler(dataset, mst.world_size(), mst.rank())`` then.
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
                f"batch_size is that of all ranks together, a multiple of their number: got "
                f"{batch_size} for {world.world_size} ranks"
            )
        if "sampler" in options or "batch_sampler" in options:
            raise ValueError(
                "mpishard.torch.DataLoader makes the sampler; with one of your own use torch.utils."
                "data.DataLoader, each rank with its samples, as DistributedSampler(dataset, "
                "mst.world_size(), mst.rank()) gives them"
            )
        # It deals sample r, r + N, ... to rank r: parts of one step are one run of the order.
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
