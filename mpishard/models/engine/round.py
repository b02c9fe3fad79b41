"""Rounds: the backward passes of one update, and the agreement of all ranks on them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpishard.callbacks.run import Wishes
from mpishard.checkpoint.format.consensus import differences
from mpishard.communication import CommunicationBackend
from mpishard.errors import NonFiniteLossError, ShardingError
from mpishard.sharding import ShardingConfiguration

__all__ = ["Round"]

_SETTINGS = 1 << 20  # so that squares of checksums add up exactly in float64, on 8192 ranks


class Round:
    """The passes since the last update: their losses, and what the ranks must agree on.

    Parameters
    ----------
    config : ShardingConfiguration
        All ranks, and whether what is not finite is refused.
    axis : CommunicationBackend
        The ranks that compute other samples than this one.
    replicas : sequence of sequence of int
        The ranks that compute one batch together, by data rank.

    Attributes
    ----------
    is_open : bool
        Whether a pass waits for its update.
    accumulates : bool
        Whether the next pass only adds to the round.
    defers : bool
        Whether its gradients stay local until the round's last pass.
    loss, weight : float
        Sums over this rank's samples.
    parts : list of (float, float)
        The same of each pass that this rank has added.
    wishes : Wishes or None
        Wishes of callbacks, which travel with the totals; None on all ranks if there are none.
    """

    def __init__(
        self,
        config: ShardingConfiguration,
        axis: CommunicationBackend,
        replicas: Sequence[Sequence[int]],
    ) -> None:
        self._replicas = replicas
        self.is_open = False
        self.accumulates = False
        self.defers = False
        self.loss = self.weight = 0.0
        self.parts: list[tuple[float, float]] = []
        self.wishes: Wishes | None = None
        self._samples = 0  # of all ranks; counted where the program is random
        self._backend = config.communication_backend
        self._axis = axis
        self._config = config

    def add(self, loss: float, weight: float) -> None:
        """Count one pass, with the sum and weight of its loss."""
        self.is_open = True
        self.loss += loss
        self.weight += weight
        self.parts.append((loss, weight))

    @property
    def passes(self) -> int:
        """Number of passes that this rank has added."""
        return len(self.parts)

    def end(self) -> None:
        """Begin anew, after an update or an error."""
        # What accumulates is not reset here: its block decides, also after an error in it.
        self.is_open = False
        self.loss = self.weight = 0.0
        self.parts.clear()
        self._samples = 0

    def require_none(self, purpose: str) -> None:
        """Refuse a change that would make gradients stale, which wait for their update.

        Raises
        ------
        ShardingError
            After a step inside `accumulate`, until a step has ended the round.
        """
        if self.is_open:
            raise ShardingError(
                f"{purpose} in the middle of a round of accumulate(): {self.passes} batches of "
                "this rank wait for the step that ends it"
            )

    @contextmanager
    def accumulating(self, *, defer: bool) -> Iterator[None]:
        """Inside, passes add to the round and do not end it."""
        if self.accumulates:
            raise RuntimeError("accumulate() cannot be nested")
        self.accumulates, self.defers = True, defer
        try:
            yield
        finally:
            self.accumulates = False

    def sample_start(self, samples: int, *, is_local: bool) -> int:
        """The index of the first of this rank's ``samples`` among those of all ranks. Collective.

        Not where ``is_local``: then this rank is alone.
        """
        before = self._samples
        # The other ranks are not in this call.
        if is_local or self._axis.world_size == 1:
            self._samples += samples
            return before
        counts = self._axis.all_gather(np.array([samples]))
        self._samples += int(counts.sum())
        return before + int(counts[: self._axis.rank].sum())

    def totals(
        self,
        message: Sequence[float] | np.ndarray[Any, Any],
        own_loss: float,
        settings: Mapping[str, Any],
        step: int,
        fold: Callable[[np.ndarray[Any, Any]], Iterable[float]] = tuple,
    ) -> tuple[float, float, float]:
        """Sums over ranks of [loss sum, weight, squared norm], in one small all-reduce.

        With them travel two numbers and their squares, which tell whether they are the same on all
        ranks: the passes of the round, and a checksum of the settings. ``step`` is the number that
        errors name. Where ``message`` is another, ``fold`` makes the three of the ranks' sum.

        Raises
        ------
        ShardingError, NonFiniteLossError
            On every rank.
        """
        backend = self._backend
        mark = zlib.crc32(repr(settings).encode()) % _SETTINGS
        # Half a pass more tells a rank inside accumulate() from one that ends its round.
        own = np.array([self.passes + 0.5 * self.accumulates, mark])
        wished = () if self.wishes is None else self.wishes.own
        sums = backend.all_reduce(np.array([*own, *(own * own), *wished, *message]))
        if self.wishes is not None:
            self.wishes.exchanged(sums[4:6])
        total, weight, squared = (float(v) for v in fold(sums[4 + len(wished) :]))
        # (sum)^2 = N (sum of squares) holds only if all summands are equal (Cauchy-Schwarz).
        same = sums[:2] ** 2 == sums[2:4] * backend.world_size
        if not same[0]:
            raise ShardingError(
                f"the ranks are in different rounds: rank {backend.rank} has added {self.passes} "
                f"batches, all {backend.world_size} together {int(sums[0])}. One has left "
                "accumulate() by an exception that its script caught, or did not enter it. Nothing "
                "was updated, and every rank drops its round"
            )
        if not same[1]:
            found = differences(backend, {name: str(value) for name, value in settings.items()})
            raise ShardingError(
                f"step {step}: the ranks would update with different settings; by rank, {found}. "
                "Nothing was updated; give every rank the same"
            )
        if not all(math.isfinite(v) for v in (total, weight, squared)):
            losses = []
            if not self._config.allow_nonfinite:
                # All ranks see the same sums, so that all come here: another collective is safe.
                losses = backend.all_gather(np.array([own_loss])).tolist()
            self.refuse_nonfinite(self._what_is_not_finite(losses), step)
        return total, weight, squared

    def _what_is_not_finite(self, losses: Sequence[float]) -> str:
        """Name the ranks in words; of the ranks of a replica one tells its loss, the others 0."""
        if not losses:
            return "the loss or the gradient is not finite"
        sums = [sum(losses[rank] for rank in ranks) for ranks in self._replicas]
        wrong = [place for place, value in enumerate(sums) if not math.isfinite(value)]
        if len(sums) == len(losses):
            what = f"the loss of ranks {wrong}" if wrong else "the gradient, and no rank's loss,"
            return f"{what} is not finite (loss sums by rank: {losses})"
        where = "; ".join(f"{place}: ranks {list(self._replicas[place])}" for place in wrong)
        what = (
            f"the loss of data ranks {wrong} ({where})"
            if wrong
            else "the gradient, and no replica's loss,"
        )
        return f"{what} is not finite (loss sums by data rank: {sums})"

    def refuse_nonfinite(self, what: str, step: int) -> None:
        """Raise `NonFiniteLossError`, which says ``what``, unless the configuration allows it."""
        if self._config.allow_nonfinite:
            return
        raise NonFiniteLossError(
            f"step {step}: {what}. The parameters are those of before the step. Lower the learning "
            "rate, clip_global_norm=1.0, or look at the data; "
            "ShardingConfiguration(allow_nonfinite=True) goes on regardless"
        )
