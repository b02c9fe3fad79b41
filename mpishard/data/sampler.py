"""The samples of the global batch of each step, and each rank's part of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mpishard.base import LeafLayout, ShardLayout, as_count, as_index, as_integer, take_plain_fields

Indices = npt.NDArray[np.int64]


def order_of(length: int, name: str, *, shuffle: bool) -> Indices:
    """Return the numbers below ``length`` in the order that ``name`` stands for, read-only.

    It is a Fisher-Yates shuffle by a counter-based Philox generator (Salmon et al., "Parallel
    random numbers: as easy as 1, 2, 3", SC 2011) whose key is a hash of the name. With
    ``shuffle=False`` the numbers rise.
    """
    order: Indices = np.arange(length, dtype=np.int64)
    if shuffle:
        _generator(name).shuffle(order)
    # All batches of an epoch are views of one order, which no caller may change.
    order.flags.writeable = False
    return order


WINDOW_BLOCKS = 16
"""Least number of blocks whose samples a shuffle in blocks mixes with each other."""


def window_of(batch_size: int, block_size: int) -> int:
    """Return the number of consecutive batches that hold `WINDOW_BLOCKS` blocks or more."""
    # Rounded up, so that no window has fewer blocks.
    return -(-WINDOW_BLOCKS * block_size // batch_size)


def block_order_of(length: int, name: str, *, batch_size: int, block_size: int) -> Indices:
    """Return the numbers below ``length``, shuffled for storage that reads runs fast.

    The blocks, runs of ``block_size`` numbers, are shuffled and laid end to end. The samples of
    `window_of` consecutive batches are a window. It is cut into groups of as many samples as it has
    batches, and each group gives one sample to each batch, in an order of its own: sample i of a
    batch comes from group i. So consecutive positions in a window's batches hold whole runs. A
    rank, which has the same positions of each batch, reads only its own part of the window, in
    runs, for any number of ranks.
    """
    blocks = order_of(-(-length // block_size), name, shuffle=True)
    # A matrix of blocks; the numbers behind the end of the last block are cut below.
    laid = (blocks[:, None] * block_size + np.arange(min(block_size, length))).reshape(-1)
    # The last block may be shorter than the others.
    laid = laid[laid < length]
    # A stream of its own, so that the order of blocks does not depend on the batch size.
    generator = _generator(f"{name}/windows")
    window = window_of(batch_size, block_size)
    # The last window may be shorter; it is mixed below by the same rule.
    whole = length - length % (batch_size * window)
    # Each batch of a window takes one sample from every group, so that all batches mix all blocks.
    groups = laid[:whole].reshape(-1, batch_size, window)
    mixed = [generator.permuted(groups, axis=2).swapaxes(1, 2).reshape(-1)]
    if whole < length:
        # Only the first `last` groups of a last window have a sample for its last batch.
        full, last = divmod(length - whole - 1, batch_size)
        last += 1
        # The first `last` groups have one sample more than the others.
        cut = whole + last * (full + 1)
        longer = generator.permuted(laid[whole:cut].reshape(last, full + 1), axis=1)
        shorter = generator.permuted(laid[cut:].reshape(batch_size - last, full), axis=1)
        mixed.append(np.concatenate([longer[:, :full], shorter]).T.reshape(-1))
        mixed.append(longer[:, full])
    order: Indices = np.concatenate(mixed)
    order.flags.writeable = False
    return order


def _generator(name: str) -> np.random.Generator:
    # Seeded by a hash of the name, so that an epoch's order does not depend on earlier epochs.
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def _order(
    sampler: GlobalBatchSampler | LocalBatchSampler, length: int, name: str, batch_size: int
) -> Indices:
    # A list, because the samplers are frozen: its content may change.
    for known, order in sampler._last:
        if known == name:
            return order
    block = sampler.shuffle_block_size
    if block is None or not sampler.shuffle or not length:
        order = order_of(length, name, shuffle=sampler.shuffle)
    else:
        order = block_order_of(length, name, batch_size=batch_size, block_size=block)
    # Only one epoch is kept: an order has 8 bytes for each sample of the data set.
    sampler._last[:] = [(name, order)]
    return order


def _check_block(block_size: int | None) -> None:
    if block_size is not None:
        as_count("shuffle_block_size", block_size)


def _check_index(epoch: int, index: int, batches: int) -> None:
    as_count("epoch", epoch, least=0)
    if not 0 <= as_integer("index", index) < batches:
        raise IndexError(f"batch {index} is outside the epoch's {batches} batches")


@dataclass(frozen=True)
class GlobalBatchSampler:
    """Divides a data set into global batches, in an order that does not depend on the ranks.

    The order of an epoch is a function of (seed, epoch) alone. So a run that stops in the middle of
    an epoch can continue with the next batch at any other world size, and the step is the only
    position to save. Every sample is seen once an epoch; none is repeated to pad a batch.

    Parameters
    ----------
    length : int
        Number of samples in the data set, 1 or more.
    batch_size : int
        Number of samples of a global batch, over all ranks together, 1 or more.
    seed : int
        Seed of the orders.
    shuffle : bool
        False: samples come in the order of the data set.
    drop_last : bool
        Leave out the last batch of an epoch if it would be shorter.
    shuffle_block_size : int, optional
        Shuffle blocks of this number of consecutive samples, and the samples within windows of
        16 blocks or more, as `block_order_of` does. Then the order is a function of ``batch_size``,
        too. Default: shuffle all samples with each other.
    leaves : int, optional
        ``gradient_leaves`` of the model that is trained: a rank's part of a batch is its leaves in
        `LeafLayout`. Default: ``ShardLayout(batch, world_size)``.

    Raises
    ------
    TypeError
        If a number is not an integer, or a flag is not a bool.
    ValueError
        If ``length``, ``batch_size``, ``shuffle_block_size`` or ``leaves`` is below 1, or
        ``drop_last`` leaves no batch.

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
    shuffle_block_size: int | None = field(default=None, kw_only=True)
    leaves: int | None = field(default=None, kw_only=True)
    _last: list[tuple[str, Indices]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        take_plain_fields(self)
        if self.length < 1:
            raise ValueError(f"a data set needs at least one sample, got length {self.length}")
        as_count("batch_size", self.batch_size)
        if self.leaves is not None:
            as_count("leaves", self.leaves)
        _check_block(self.shuffle_block_size)
        # Otherwise an epoch would have no batch, and a run no end.
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

    @property
    def window(self) -> int:
        """Number of consecutive batches whose samples a shuffle in blocks mixes; 1 without it."""
        block = self.shuffle_block_size if self.shuffle else None
        return 1 if block is None else window_of(self.batch_size, block)

    def batch(self, epoch: int, index: int) -> Indices:
        """Return the samples of one global batch.

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
            If ``epoch`` is negative.
        IndexError
            If ``index`` is outside the epoch.
        """
        _check_index(epoch, index, self.batches_per_epoch)
        start = index * self.batch_size
        name = f"{int(self.seed)}/sample order/{int(epoch)}"
        order = _order(self, self.length, name, self.batch_size)
        return order[start : start + self.batch_size]

    def local(self, epoch: int, index: int, rank: int, world_size: int) -> tuple[Indices, int]:
        """Return a rank's part of a global batch: consecutive samples, or those of its leaves.

        Parameters
        ----------
        epoch, index : int
            As for `batch`.
        rank, world_size : int
            The rank, and the number of ranks that divide the batch.

        Returns
        -------
        indices : array of int64
            The rank's samples; empty if the batch has fewer samples than there are ranks.
        sample_start : int
            Position in the global batch of the first of them.

        Raises
        ------
        ValueError, IndexError
            As `batch`; ValueError if ``rank`` is not one of the ranks.
        """
        as_index("rank", rank, as_count("world_size", world_size))
        batch = self.batch(epoch, index)
        # Leaves are divided, and not samples, so that every world has the same leaves.
        leaves = self.leaves or world_size
        parts = LeafLayout(len(batch), leaves, world_size).slices(rank)
        # A view of the order, without a copy.
        if len(parts) == 1:
            return batch[parts[0]], parts[0].start
        return np.concatenate([batch[part] for part in parts]), parts[0].start


@dataclass(frozen=True)
class LocalBatchSampler:
    """Makes global batches to which each rank contributes samples of its own data set.

    Each rank contributes its `ShardLayout` share of a global batch, until its samples are used up:
    then it contributes fewer, and in the end none, while the other ranks continue. An epoch ends
    with the last sample of the last rank. So every sample of every rank is seen once an epoch, and
    none is repeated. If lengths differ much, the last batches of each epoch are short.

    Parameters
    ----------
    lengths : sequence of int
        Number of samples of each rank, 0 included; not all 0.
    batch_size : int
        Number of samples of a global batch, over all ranks together; at least one for each rank.
    seed : int
        Seed of the orders, which differ from rank to rank.
    shuffle : bool
        False: samples come in the order of the rank's data set.
    drop_last : bool
        Leave out the batches of an epoch to which a rank cannot contribute its full share.
    shuffle_block_size : int, optional
        As for `GlobalBatchSampler`, with a rank's share as the batch.

    Raises
    ------
    TypeError
        If a number is not an integer, or a flag is not a bool.
    ValueError
        For lengths below 0 or all 0, a ``batch_size`` below the number of ranks, a
        ``shuffle_block_size`` below 1, or if ``drop_last`` leaves no batch.

    Notes
    -----
    A rank's order is a function of (seed, rank, epoch). A run continues only with the same number
    of ranks: no other rank has a missing rank's samples.

    Examples
    --------
    >>> sampler = LocalBatchSampler([5, 2], 4, shuffle=False)
    >>> sampler.batches_per_epoch
    3
    >>> [sampler.local(0, index, 0, 2)[0].tolist() for index in range(3)]
    [[0, 1], [2, 3], [4]]
    >>> [sampler.local(0, index, 1, 2)[0].tolist() for index in range(3)]
    [[0, 1], [], []]
    """

    lengths: Sequence[int]
    batch_size: int
    seed: int = field(default=0, kw_only=True)
    shuffle: bool = field(default=True, kw_only=True)
    drop_last: bool = field(default=False, kw_only=True)
    shuffle_block_size: int | None = field(default=None, kw_only=True)
    _last: list[tuple[str, Indices]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        take_plain_fields(self)
        if not isinstance(self.lengths, Iterable):
            raise TypeError(f"lengths must be a sequence of integers, got {self.lengths!r}")
        lengths = [as_integer("a rank's number of samples", length) for length in self.lengths]
        _check_block(self.shuffle_block_size)
        if not lengths or min(lengths) < 0 or max(lengths) == 0:
            raise ValueError(f"some rank needs a sample; the numbers of samples are {lengths}")
        # A rank whose share is 0 would never bring its samples, and the epoch would not end.
        if self.batch_size < len(lengths):
            raise ValueError(
                f"batch_size {self.batch_size} is smaller than the number of ranks, "
                f"{len(lengths)}: each rank with data of its own needs at least one sample of a "
                "batch"
            )
        if self.drop_last and self.batches_per_epoch == 0:
            raise ValueError(
                f"drop_last=True leaves no batch: of batch_size {self.batch_size} the ranks' "
                f"shares are {self._shares}, and they have {lengths} samples"
            )

    @property
    def batches_per_epoch(self) -> int:
        """Number of global batches in an epoch."""
        # Until the last rank has used up its samples; with drop_last, until the first one has.
        pairs = list(zip(self.lengths, self._shares, strict=True))
        if self.drop_last:
            return min(length // share for length, share in pairs)
        return max(-(-length // share) for length, share in pairs)

    @property
    def window(self) -> int:
        """Number of batches that are mixed, as of `GlobalBatchSampler`: the ranks' largest."""
        block = self.shuffle_block_size if self.shuffle else None
        # The smallest share needs the most batches for its blocks.
        return 1 if block is None else window_of(min(self._shares), block)

    def local(self, epoch: int, index: int, rank: int, world_size: int) -> tuple[Indices, int]:
        """Return a rank's samples of a global batch, from a data set that only this rank has.

        Parameters
        ----------
        epoch, index : int
            Numbers of the epoch and of the batch in it, from 0.
        rank, world_size : int
            The rank, and the number of ranks, which is that of ``lengths``.

        Returns
        -------
        indices : array of int64
            Indices into the rank's own data set, read-only; empty if all are used up.
        sample_start : int
            Position in the global batch of the first of them.

        Raises
        ------
        ValueError
            If ``epoch`` is negative, ``rank`` is not one of the ranks, or ``world_size`` is not
            the number of ``lengths``.
        IndexError
            If ``index`` is outside the epoch.
        """
        if world_size != len(self.lengths):
            raise ValueError(f"the data are of {len(self.lengths)} ranks, not of {world_size}")
        as_index("rank", rank, world_size)
        _check_index(epoch, index, self.batches_per_epoch)
        # Fixed for the whole run, so that a rank's batch follows from its index alone.
        share = self._shares[rank]
        # The samples follow those of the ranks before, some of which may have none left.
        brought_before = [
            min(max(length - index * other, 0), other)
            for length, other in zip(self.lengths[:rank], self._shares, strict=False)
        ]
        # The rank is part of the name: ranks with equal data need different orders.
        name = f"{int(self.seed)}/sample order of rank {rank}/{int(epoch)}"
        order = _order(self, self.lengths[rank], name, share)
        return order[index * share : (index + 1) * share], sum(brought_before)

    @property
    def _shares(self) -> tuple[int, ...]:
        return tuple(ShardLayout(self.batch_size, len(self.lengths)).sizes)
