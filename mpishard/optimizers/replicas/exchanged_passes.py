"""Gradients that are summed inside each replica, and exchanged between replicas."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from mpishard.base import Array, read_numbers
from mpishard.communication import CommunicationBackend
from mpishard.models import (
    Engine,
    GradientStore,
    Passes,
    Reduced,
    ReplicatedGradients,
    StepReport,
    StoreLayout,
    UpdatePieces,
    WrappedGradients,
    dealt,
    make_gradient_store,
    squared_norm,
)
from mpishard.sharding import Piece, Unit


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the gradient that this rank sums with those of the other replicas.

    Parameters
    ----------
    piece : Piece
        Its range; ``offset`` is its place in the vector of all parts, end to end.
    key : tuple of int
        Key of random numbers: it differs from part to part, and is equal in all replicas.
    is_alike : bool
        Whether other ranks of the replica exchange it too, and must get the same sums. They may
        cut it at other places.
    """

    piece: Piece
    key: tuple[int, ...]
    is_alike: bool = False


def parts_of(
    pieces: Sequence[Piece], *place: int, alike: Sequence[tuple[int, int]] = ()
) -> tuple[Part, ...]:
    """Return the parts of ``pieces``, cut at the bounds of ranges with copies.

    Parameters
    ----------
    pieces : sequence of Piece
        The pieces that this rank exchanges, one of each unit.
    *place : int
        Index of the rank in its replica, if the replica has several ranks.
    alike : sequence of (int, int)
        Ranges of the flat vector that other ranks of the replica hold too.
    """
    parts, position = [], 0
    for piece in pieces:
        inside = [(max(a, piece.start), min(b, piece.stop)) for a, b in alike]
        cuts = sorted({piece.start, piece.stop, *(n for a, b in inside if a < b for n in (a, b))})
        for start, stop in pairwise(cuts) if piece.length else [(piece.start, piece.stop)]:
            is_alike = any(a <= start and stop <= b for a, b in inside)
            key = piece.unit.index, *place, *([start - piece.unit.start] if alike else [])
            parts.append(Part(Piece(piece.unit, start, stop, position), key, is_alike=is_alike))
            position += stop - start
    return tuple(parts)


class SumExchange(ABC):
    """Turns this rank's parts of a gradient into their sums over all replicas.

    Parameters
    ----------
    across : CommunicationBackend
        The ranks that hold the same parts in the other replicas.
    parts : sequence of Part
        This rank's parts.

    Attributes
    ----------
    is_late : bool
        Whether the sums are those of an earlier step.
    """

    is_late = False

    def __init__(self, across: CommunicationBackend, parts: Sequence[Part]) -> None:
        self.across = across
        self.parts = tuple(parts)

    def begin(self) -> None:
        """Begin a backward pass."""

    @abstractmethod
    def exchange(self, values: Sequence[Array]) -> None:
        """Replace the values of each part, shape (piece.length,), by a sum. Collective.

        The sums have the same bits in all replicas.
        """

    def finish(self) -> None:
        """React to the end of a step that has updated the parameters."""

    @abstractmethod
    def abandon(self) -> None:
        """Forget the step, after an error. Communicates nothing."""


class _Progressing(WrappedGradients):
    """A store that lets sums between replicas progress whenever it reduces a unit."""

    def __init__(self, inner: GradientStore, across: CommunicationBackend) -> None:
        super().__init__(inner)
        self._across = across

    def reduce(self, unit: Unit) -> None:
        self._inner.reduce(unit)
        # Sums of earlier steps may be under way, and MPI moves data only while it is called.
        self._across.progress()


class ExchangedPasses(Passes):
    """Passes that reduce inside each replica; an exchange turns these sums into those of all.

    A round's last pass reduces inside the replica, so that each rank has the sums of its parts. The
    exchange writes the sums over all replicas in their place. If only owners have them then, and
    every rank updates all, they are gathered inside the replica. Without replicas of several ranks
    each rank is a replica.

    Parameters
    ----------
    user : str
        Class of the optimizer.
    make_exchange : callable
        ``make_exchange(layout, across, parts)`` gets the ranks that hold the same parts of all
        replicas, and these parts. Called again if other units are frozen.

    Attributes
    ----------
    exchange : SumExchange
        Runs between the replicas.
    """

    exchange: SumExchange
    are_exact = False  # they may be those of an earlier step, or have errors of codes

    def __init__(
        self,
        user: str,
        make_exchange: Callable[[StoreLayout, CommunicationBackend, tuple[Part, ...]], SumExchange],
    ) -> None:
        self.user = user
        self._make_exchange = make_exchange

    def prepare(self, engine: Engine, layout: StoreLayout) -> UpdatePieces:
        replica = engine.replica
        self._is_alone, across = not replica.is_grouped, replica.across
        place: tuple[int, ...] = ()
        alike: list[tuple[int, int]] = []
        if self._is_alone:
            inner: GradientStore = ReplicatedGradients(layout)
        else:
            inner = make_gradient_store(layout, engine.policy, in_leaves=True)
            # Ranks that repeat the work on a black box must draw the same numbers: they have one
            # key.
            is_whole = engine.program.needs_whole_parameters
            ranks = engine.backend if is_whole else replica.together
            # A replica of one rank has the same keys with and without ``replica_size``.
            place = () if ranks.world_size == 1 else (ranks.rank,)
            alike = engine.program.vector.held_alike()
        pieces = layout.pieces(sharded=not self._is_alone)
        trained = [piece for piece in pieces if piece.unit.index not in layout.frozen]
        parts = parts_of(trained, *place, alike=alike)
        self.exchange = self._make_exchange(layout, across, parts)
        self.is_late = self.exchange.is_late
        self._inner = inner
        self.store = _Progressing(inner, across)
        found = UpdatePieces.of(engine.program, layout, engine.policy)
        if self._is_alone:
            return found
        # All replicas have the same sums: each counts a part.
        return replace(found, counted=tuple(dealt(found.counted, across.world_size, across.rank)))

    def run(
        self, engine: Engine, x: object, y: object, sample_start: int, *, is_last: bool
    ) -> tuple[float | Array, float | Array]:
        self.exchange.begin()
        reduces = is_last and not self._is_alone
        own = super().run(engine, x, y, sample_start, is_last=reduces)
        if is_last:
            self.exchange.exchange(self.sums())
            self.store.spread()
        return own

    def sums(self) -> list[Array]:
        """Return writable views of this rank's parts; ``spread`` follows after they are written."""
        pieces = [part.piece for part in self.exchange.parts]
        if isinstance(self._inner, ReplicatedGradients):
            return self._inner.local(pieces)
        return self._inner.owned(pieces)

    def again(self, engine: Engine, weight: float) -> Reduced:
        """Return sums that were written to `sums` since, of samples of this weight. Collective.

        Raises
        ------
        NonFiniteLossError
            On every rank, if they are not finite.
        """
        squares = np.array(read_numbers([squared_norm(self.store.owned(engine.pieces.counted))]))
        total = engine.world.all_reduce(squares, subject=engine.layout.subject)
        norm = math.sqrt(float(total[0])) / weight
        if not math.isfinite(norm):
            engine.round.refuse_nonfinite("the gradient is not finite", engine.step_number + 1)
        gradients = self.store.owned(engine.pieces.updated)
        return Reduced(gradients, StepReport(math.nan, weight, norm), finish=self.finish)

    def finish(self) -> None:
        super().finish()
        self.exchange.finish()

    def abandon(self) -> None:
        super().abandon()
        self.exchange.abandon()
