"""Which samples form the global batch of a step, and which of them are a rank's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpishard.layout import LeafLayout

__all__ = ["GlobalBatchSampler", "Indices", "order_of"]

Indices = np.ndarray[Any, np.dtype[np.int64]]


def order_of(length: int, name: str, *, shuffle: bool) -> Indices:
    """The numbers from 0 to ``length`` in the order that ``name`` stands for, read-only.

    A Fisher-Yates shuffle by a counter-based Philox generator (Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", SC 2011) whose key is a hash of the name; with ``shuffle=False``
    as they come.
    """
    order: Indices = np.arange(length, dtype=np.int64)
    if shuffle:
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
        np.random.Generator(np.random.Philox(key=key)).shuffle(order)
    order.flags.writeable = False
    return order


@dataclass(frozen=True)
class GlobalBatchSampler:
    """Deals the samples of a data set into global batches, in an order that no rank influences.

    The order of an epoch is a function of (seed, epoch) alone, so a run that stops in the middle
    of an epoch goes on with the next batch at any other world size: there is no position to
    save but the step. Every sample is seen once an epoch; none is repeated to pad a batch.

    Parameters
    ----------
    length : int
        Number of samples in the data set, 1 or more.
    batch_size : int
        Samples of a global batch, over all ranks together, 1 or more.
    seed : int
        Names the sequence of orders.
    shuffle : bool
        False: samples come in the order of the data set.
    drop_last : bool
        Leave out the last batch of an epoch where it would be shorter.
    leaves : int, optional
        ``gradient_leaves`` of the model that is trained: a rank's part of a batch are its leaves,
        as `LeafLayout` deals them. Default: ``ShardLayout(batch, world_size)``.

    Raises
    ------
    ValueError
        Where ``length`` or ``batch_size`` is below 1, or ``drop_last`` leaves no batch.

    Notes
    -----
    An instance holds one epoch's order, 8 bytes a sample: that of `order_of`, named by seed and
    epoch.

    Examples
    --------
    >>> sampler = GlobalBatchSampler(10, 4, shuffle=False)
    >>> sampler.batches_per_epoch
    3
    >>> [sampler.batch(0, index).tolist() for index in range(3)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    >>> [sampler.local(0, 1, rank, 3)[0].tolist() for rank in range(3)]
    [[4, 5], [6], [7]]
    """

    length: int
    batch_size: int
    seed: int = field(default=0, kw_only=True)
    shuffle: bool = field(default=True, kw_only=True)
    drop_last: bool = field(default=False, kw_only=True)
    leaves: int | None = field(default=None, kw_only=True)
    _last: list[tuple[int, Indices]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"a data set needs at least one sample, got length {self.length}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, got {self.batch_size}")
        if self.drop_last and self.length < self.batch_size:
            raise ValueError(
                f"drop_last=True leaves no batch: {self.length} samples are fewer than "
                f"batch_size {self.batch_size}"
            )

    @property
    def batches_per_epoch(self) -> int:
        """Number of global batches in an epoch."""
        whole, rest = divmod(self.length, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def batch(self, epoch: int, index: int) -> Indices:
        """The samples of one global batch.

        Parameters
        ----------
        epoch : int
            Number of the epoch, from 0.
        index : int
            Number of the batch in its epoch, from 0.

        Returns
        -------
        array of int64
            Indices into the data set, shape (batch_size,), or fewer in an epoch's last batch;
            read-only.

        Raises
        ------
        ValueError
            Where ``epoch`` is negative.
        IndexError
            Where ``index`` is outside the epoch.
        """
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more, got {epoch}")
        if not 0 <= index < self.batches_per_epoch:
            raise IndexError(
                f"batch {index} is outside the epoch's {self.batches_per_epoch} batches"
            )
        start = index * self.batch_size
        return self._order(epoch)[start : start + self.batch_size]

    def local(self, epoch: int, index: int, rank: int, world_size: int) -> tuple[Indices, int]:
        """One rank's part of a global batch: consecutive samples, or those of its leaves.

        Parameters
        ----------
        epoch, index : int
            As for `batch`.
        rank, world_size : int
            The rank, and the number of ranks that the batch is dealt over.

        Returns
        -------
        indices : array of int64
            The rank's samples; empty where the batch has fewer samples than there are ranks.
        sample_start : int
            Position in the global batch of the first of them.
        """
        batch = self.batch(epoch, index)
        leaves = self.leaves or world_size
        parts = LeafLayout(len(batch), leaves, world_size).slices(rank)
        if len(parts) == 1:
            return batch[parts[0]], parts[0].start
        return np.concatenate([batch[part] for part in parts]), parts[0].start

    def _order(self, epoch: int) -> Indices:
        for known, order in self._last:
            if known == epoch:
                return order
        name = f"{int(self.seed)}/sample order/{int(epoch)}"
        order = order_of(self.length, name, shuffle=self.shuffle)
        self._last[:] = [(epoch, order)]
        return order
