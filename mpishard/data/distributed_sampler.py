"""Samplers that divide a data set over replicas, for data loaders of other libraries."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np

from mpishard.base import as_count, as_flag, as_index, as_integer
from mpishard.data.sampler import Indices, order_of


class DistributedSampler:
    """Indices of one replica: a contiguous slice of each epoch's order.

    A PyTorch ``DataLoader``, or a loop of one's own, takes it as its sampler. Training with
    ``optimize`` does not need it: `GlobalBatchSampler` makes batches there, and repeats no sample.

    Parameters
    ----------
    data : int or object with a length
        Data set, or its number of samples N, 1 or more.
    num_replicas : int
        Number of replicas R that share the data set, 1 or more.
    rank : int
        The replica whose indices are wanted, from 0 to R - 1.
    shuffle : bool
        Draw a new order for each epoch, from `seed` and epoch. False: 0, 1, .., N - 1.
    seed : int
        Seed of the orders, the same on every replica.
    drop_last : bool
        If R does not divide N, leave out the last N mod R indices of the order. Otherwise the
        first ones are repeated at its end, so that every replica gets the same number.

    Raises
    ------
    TypeError
        If `data` is neither an int nor has a length, another number is not an integer, or a flag
        is not a bool.
    ValueError
        If N or R is below 1, `rank` is outside 0 .. R - 1, or `drop_last` leaves nothing.

    Examples
    --------
    >>> [list(DistributedSampler(7, 3, rank, shuffle=False)) for rank in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 0, 1]]
    >>> [list(DistributedSampler(7, 3, r, shuffle=False, drop_last=True)) for r in range(3)]
    [[0, 1], [2, 3], [4, 5]]
    """

    def __init__(
        self,
        data: int | Sized,
        num_replicas: int,
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        # To Python True is an int.
        if isinstance(data, bool) or not isinstance(data, int | np.integer | Sized):
            raise TypeError(
                f"data must be a number of samples or have a length, got {type(data).__name__}"
            )
        self.length = int(data) if isinstance(data, int | np.integer) else len(data)
        if self.length < 1:
            raise ValueError(f"a data set needs at least one sample, got length {self.length}")
        self.shuffle = as_flag("shuffle", shuffle)
        self.seed = as_integer("seed", seed)
        self.drop_last = as_flag("drop_last", drop_last)
        self._epoch = 0
        self._set_replicas(num_replicas, rank, self.length)

    @property
    def epoch(self) -> int:
        """Number of the epoch whose order is used."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Use the order of another epoch, from its beginning.

        Parameters
        ----------
        epoch : int
            Number of the epoch, from 0; the same on every replica.

        Raises
        ------
        ValueError
            If `epoch` is negative.
        """
        self._epoch = as_count("epoch", epoch, least=0)

    def __len__(self) -> int:
        """Return the number of indices that the replica gets in the epoch."""
        return self._share(self.length)

    def __iter__(self) -> Iterator[int]:
        share = len(self)
        # Cut, or repeated from the beginning, because all replicas need the same number of indices.
        order = np.resize(self._order(), share * self.num_replicas)
        # Python's numbers, because data loaders index lists by them, too.
        yield from order[self.rank * share : (self.rank + 1) * share].tolist()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(length={self.length}, num_replicas={self.num_replicas}, "
            f"rank={self.rank}, shuffle={self.shuffle}, seed={self.seed}, "
            f"drop_last={self.drop_last}, epoch={self.epoch})"
        )

    def _set_replicas(self, num_replicas: int, rank: int, left: int) -> None:
        """Set replicas and rank, after a check that `left` samples are enough for them."""
        as_index("rank", rank, as_count("num_replicas", num_replicas))
        # If nothing is left the epoch is over, which is no mistake.
        if self.drop_last and 0 < left < num_replicas:
            raise ValueError(
                f"drop_last=True leaves nothing: {left} samples are fewer than "
                f"{num_replicas} replicas"
            )
        self.num_replicas, self.rank = int(num_replicas), int(rank)

    def _share(self, samples: int) -> int:
        """Return the number of indices of each replica, for this number of samples."""
        return samples // self.num_replicas if self.drop_last else -(-samples // self.num_replicas)

    def _order(self) -> Indices:
        # Another name than that of global batches, so that one seed gives two orders.
        name = f"{int(self.seed)}/distributed sampler/{self.epoch}"
        return order_of(self.length, name, shuffle=self.shuffle)


class ElasticDistributedSampler(DistributedSampler):
    """Indices of one replica, every R-th of each epoch's order; R may change within an epoch.

    After k indices each, the R replicas have seen the first k R samples of the order. So `rescale`
    divides exactly the rest over the new replicas: no sample is lost, and only the padding at the
    epoch's end is seen twice.

    Parameters
    ----------
    data, num_replicas, rank, shuffle, seed, drop_last
        As for `DistributedSampler`.
    start : int
        Number of samples of the epoch that all replicas together have seen already: the value of
        `seen` when a checkpoint was written.

    Raises
    ------
    TypeError, ValueError
        As for `DistributedSampler`; also if `start` is outside 0 .. N.

    Examples
    --------
    >>> sampler = ElasticDistributedSampler(10, 4, 0, shuffle=False)
    >>> samples = iter(sampler)
    >>> next(samples)  # the other replicas see 1, 2 and 3
    0
    >>> sampler.rescale(2, 1)
    >>> list(sampler)  # replica 0 of the two sees 4, 6 and 8
    [5, 7, 9]
    """

    def __init__(
        self,
        data: int | Sized,
        num_replicas: int,
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        start: int = 0,
    ) -> None:
        self._start = self._taken = 0
        super().__init__(data, num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        # After the constructor of the base class, which checks the length.
        if not 0 <= as_integer("start", start) <= self.length:
            raise ValueError(f"start must be from 0 to {self.length}, got {start}")
        self._set_replicas(num_replicas, rank, self.length - start)
        self._start = int(start)

    @property
    def seen(self) -> int:
        """Number of samples of this epoch that all replicas together have seen."""
        return min(self._start + self._taken * self.num_replicas, self.length)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._start = self._taken = 0

    def rescale(self, num_replicas: int, rank: int) -> None:
        """Divide the rest of the epoch over another number of replicas.

        Every replica calls it after the same number of indices. Earlier iterators end.

        Parameters
        ----------
        num_replicas : int
            New number of replicas, 1 or more.
        rank : int
            The replica's number among them.

        Raises
        ------
        ValueError
            If `num_replicas` or `rank` does not fit, or `drop_last` leaves nothing; the sampler is
            unchanged then.
        """
        seen = self.seen
        # First, because it may refuse, and nothing must have changed then.
        self._set_replicas(num_replicas, rank, self.length - seen)
        # Iterators that are under way see the change, and end.
        self._start, self._taken = seen, 0

    def __len__(self) -> int:
        """Return the number of indices that the replica gets in the rest of the epoch."""
        return self._share(self.length - self._start) - self._taken

    def __iter__(self) -> Iterator[int]:
        # A second iterator before the end of the epoch continues where the first one stopped.
        # Two orders mixed in one epoch would show samples twice, so that an earlier iterator ends.
        begun_as = self._epoch, self._start, self.num_replicas, self.rank
        share = self._share(self.length - self._start)
        order = self._order()
        if share * self.num_replicas > self.length - self._start:
            # The padding comes from the beginning of the epoch, and not of its rest: after a
            # rescale near the end that may be a single sample.
            order = np.concatenate([order[self._start :], np.resize(order, self.num_replicas)])
        else:
            order = order[self._start :]
        for index in order[self.rank :: self.num_replicas][self._taken : share].tolist():
            if begun_as != (self._epoch, self._start, self.num_replicas, self.rank):
                return
            self._taken += 1
            yield index
