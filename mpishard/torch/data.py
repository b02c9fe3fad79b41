"""Data loader that gives each rank its part of every batch."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch.utils.data import DataLoader as PlainLoader
from torch.utils.data.distributed import DistributedSampler

from mpishard.base import Array, ShardingError, as_count
from mpishard.communication import CommunicationBackend
from mpishard.torch.world import current_world


class Training:
    """Backward passes of a rank, by which its loaders know an epoch from a look at some batches.

    A look of one rank alone must not change that rank's next epoch. A pass over a loader is an
    epoch if there was a ``backward()`` while it lasted. Other passes are epochs only if all ranks
    have made them before the next ``backward()``: then ranks train with the batches of a pass that
    has ended, and no rank has looked alone.

    Attributes
    ----------
    backwards : int
        Number of backward passes that have reduced gradients, which is the same on all ranks.
    undecided : dict of DataLoader to int
        Epochs of the passes since the last ``backward()`` that ended before it.
    """

    def __init__(self) -> None:
        self.backwards = 0
        self.undecided: dict[DataLoader, int] = {}
        self._compared: dict[DataLoader, int] = {}
        # Size and order of the passes that have given a batch since the last backward().
        self._taken: set[tuple[tuple[int, int], tuple[int, int] | None]] = set()
        self._thread = threading.get_ident()

    def take(self, loader: DataLoader, epoch: int) -> None:
        """Record that a pass over a loader gives a batch."""
        # Ranks may differ in the number of batches that a thread has loaded ahead.
        if threading.get_ident() == self._thread:
            order = (epoch, loader.sampler.seed) if loader.sampler.shuffle else None
            self._taken.add(((len(loader.dataset), loader.batch_size), order))

    def marks(self) -> Array:
        """Return the bytes that ranks compare, which compute the maximum of each."""
        # A thread that loads ahead may end a pass before `end_backward`.
        self._compared, self.undecided = self.undecided, {}
        taken, self._taken = sorted(self._taken, key=repr), set()
        ended = [(len(loader), epoch) for loader, epoch in self._compared.items()]
        sizes = [size for size, _ in taken]
        texts = [repr(values).encode() for values in (ended, sizes, taken)]
        own = np.array([zlib.crc32(text) for text in texts], np.uint32).view(np.uint8)
        # The maximum of the complements tells if all ranks have the same.
        is_unclear = len(set(sizes)) < len(sizes)
        return np.concatenate([own, 255 - own, np.array([is_unclear], np.uint8)])

    def end_backward(self, largest: Array) -> None:
        """Count a backward pass. ``largest`` is the maximum of all ranks' `marks`.

        Compared passes are epochs if all ranks have made the same.

        Raises
        ------
        ShardingError
            On every rank, if the ranks train with different orders of the samples.
        """
        self.backwards += 1
        own, complements = largest[:-1].reshape(2, 3, 4)
        has_ended, has_sizes, has_orders = (own + complements == 255).all(axis=1)
        if has_ended:
            for loader, epoch in self._compared.items():
                loader.end_epoch(epoch)
        self._compared.clear()
        if has_sizes and not has_orders and not largest[-1]:
            raise ShardingError(
                "the ranks train with batches of different orders of mst.DataLoader, so that some "
                "samples are used several times and others never: give the loaders one seed and "
                "shuffle on all ranks, and set loader.epoch to the same number"
            )


# An entry belongs to one rank, as its backend does.
_trainings: WeakKeyDictionary[CommunicationBackend, Training] = WeakKeyDictionary()


def training_of(backend: CommunicationBackend) -> Training:
    """Return the record of the rank's backward passes."""
    return _trainings.setdefault(backend, Training())


class DataLoader(PlainLoader):  # type: ignore[misc]
    """``torch.utils.data.DataLoader`` that gives each rank its part of every batch.

    The order of the samples depends only on seed and epoch. The parts of all ranks make up the
    global batch of one process, so that results do not depend on the number of ranks. Each pass
    over the loader in which ranks train, by ``backward()`` of a sharded module, is the next epoch,
    also if it is left early. Other passes do not count: an evaluation, or a look of one rank.

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
        ranks does not divide the number of samples, the first samples are used again at the end:
        see ``own_samples``.
    **options
        Options of ``torch.utils.data.DataLoader``: ``num_workers``, ``collate_fn``, and so on.

    Attributes
    ----------
    epoch : int
        Number of the present epoch or, between two passes, of the next. Set it, or call
        ``sampler.set_epoch``, to resume. Every rank sets the same.
    own_samples : int
        Number of samples of this rank's pass that are not there for the second time. Only the last
        sample of a pass may be; an evaluation leaves it out.

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
        self.own_samples = len(range(world.rank, len(dataset), world.world_size))
        self._training = training_of(world)
        self._open_epochs = 0  # Passes in which ranks have trained, and that have not ended.

    @property
    def epoch(self) -> int:
        return self.sampler.epoch  # type: ignore[no-any-return]

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(as_count("epoch", epoch, least=0))

    def end_epoch(self, epoch: int) -> None:
        """Go on to the epoch after ``epoch``, unless the loader has gone on, or the user set it."""
        if self.epoch == epoch:
            self.epoch += 1

    def __iter__(self) -> Iterator[Any]:
        # The sampler draws the order at the first batch, when the body of this generator begins.
        epoch, is_epoch, training = self.epoch, False, self._training
        before = training.backwards
        try:
            for batch in super().__iter__():
                if training.backwards > before and not is_epoch:
                    is_epoch = True
                    self._open_epochs += 1
                before = training.backwards
                training.take(self, epoch)
                yield batch
        finally:
            has_trained = is_epoch or training.backwards > before
            self._open_epochs -= is_epoch
            # In the middle of an epoch another pass is a look.
            if is_epoch or not self._open_epochs:
                if has_trained:
                    self.end_epoch(epoch)
                else:
                    training.undecided[self] = epoch
