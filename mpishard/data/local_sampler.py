"""Global batches of data that every rank brings for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpishard.data.sampler import Indices, order_of
from mpishard.layout import ShardLayout

__all__ = ["LocalBatchSampler"]


@dataclass(frozen=True)
class LocalBatchSampler:
    """Deals global batches to which each rank brings samples of its own data set.

    Of a global batch each rank brings its `ShardLayout` share, from its own samples, until it has
    no more: then it brings fewer, and 0 in the end, while the others go on. An epoch ends when
    the last rank has brought its last sample, so every sample of every rank is seen once an
    epoch, and none is repeated. Lengths that differ much leave short batches at the end of each
    epoch.

    Parameters
    ----------
    lengths : sequence of int
        Number of samples of each rank, 0 included; not all 0.
    batch_size : int
        Samples of a global batch, over all ranks together; at least one for each rank.
    seed : int
        Names the sequence of orders; each rank's is another.
    shuffle : bool
        False: samples come in the order of the rank's data set.
    drop_last : bool
        Leave out the batches of an epoch to which a rank cannot bring its full share.

    Raises
    ------
    ValueError
        For lengths below 0 or all 0, a ``batch_size`` below the number of ranks, or where
        ``drop_last`` leaves no batch.

    Notes
    -----
    A rank's order is a function of (seed, rank, epoch), so a run goes on with the same number of
    ranks only: nobody else has a missing rank's samples.

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
    _last: list[tuple[tuple[int, int], Indices]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        lengths = list(self.lengths)
        if not lengths or min(lengths) < 0 or max(lengths) == 0:
            raise ValueError(f"some rank needs a sample; the numbers of samples are {lengths}")
        if self.batch_size < len(lengths):
            raise ValueError(
                f"batch_size {self.batch_size} is smaller than the number of ranks, "
                f"{len(lengths)}: where each brings its own data, each needs a share of a batch"
            )
        if self.drop_last and self.batches_per_epoch == 0:
            raise ValueError(
                f"drop_last=True leaves no batch: of batch_size {self.batch_size} the ranks' "
                f"shares are {self._shares}, and they have {lengths} samples"
            )

    @property
    def batches_per_epoch(self) -> int:
        """Number of global batches in an epoch."""
        pairs = list(zip(self.lengths, self._shares, strict=True))
        if self.drop_last:
            return min(length // share for length, share in pairs)
        return max(-(-length // share) for length, share in pairs)

    def local(self, epoch: int, index: int, rank: int, world_size: int) -> tuple[Indices, int]:
        """What a rank brings to a global batch.

        Parameters
        ----------
        epoch, index : int
            Numbers of the epoch and of the batch in it, from 0.
        rank, world_size : int
            The rank, and the number of ranks, which is that of ``lengths``.

        Returns
        -------
        indices : array of int64
            Indices into the rank's own data set, read-only; empty where it has brought all.
        sample_start : int
            Position in the global batch of the first of them.

        Raises
        ------
        ValueError
            Where ``epoch`` is negative, or ``world_size`` another.
        IndexError
            Where ``index`` is outside the epoch.
        """
        if world_size != len(self.lengths):
            raise ValueError(f"the data are of {len(self.lengths)} ranks, not of {world_size}")
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more, got {epoch}")
        if not 0 <= index < self.batches_per_epoch:
            raise IndexError(
                f"batch {index} is outside the epoch's {self.batches_per_epoch} batches"
            )
        share = self._shares[rank]
        brought_before = [
            min(max(length - index * other, 0), other)
            for length, other in zip(self.lengths[:rank], self._shares, strict=False)
        ]
        order = self._order(epoch, rank)
        return order[index * share : (index + 1) * share], sum(brought_before)

    @property
    def _shares(self) -> tuple[int, ...]:
        return tuple(ShardLayout(self.batch_size, len(self.lengths)).sizes)

    def _order(self, epoch: int, rank: int) -> Indices:
        for known, order in self._last:
            if known == (epoch, rank):
                return order
        name = f"{int(self.seed)}/sample order of rank {rank}/{int(epoch)}"
        order = order_of(self.lengths[rank], name, shuffle=self.shuffle)
        self._last[:] = [((epoch, rank), order)]
        return order
