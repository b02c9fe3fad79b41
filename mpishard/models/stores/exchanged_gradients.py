"""Gradients that a store sums inside each replica, and an exchange between replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mpishard.arrays import Array
from mpishard.communication import CommunicationBackend
from mpishard.models.stores.gradient_store import (
    BackwardPass,
    GradientStore,
    ReplicatedGradients,
    WrappedGradients,
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


class ExchangedGradients(WrappedGradients):
    """The gradients of a store inside each replica, whose sums over replicas an exchange makes.

    A round's last pass reduces inside the replica, so that each rank has the sums of its parts; the
    exchange turns these into sums over all replicas, in their place. If only owners have them then,
    and every rank updates all, they are gathered inside the replica.

    Parameters
    ----------
    inner : GradientStore
        Holds the gradient, and reduces it inside the replica.
    exchange : SumExchange
        Runs between the replicas.
    is_alone : bool
        Whether this rank is a replica, so that nothing is reduced inside it. Then ``inner`` is a
        `ReplicatedGradients` of any ranks.
    """

    def __init__(self, inner: GradientStore, exchange: SumExchange, *, is_alone: bool) -> None:
        super().__init__(inner)
        self.is_late = exchange.is_late
        self.exchange = exchange
        self._is_alone = is_alone

    def begin(self, this: BackwardPass) -> None:
        self._is_last = this.is_last
        self.exchange.begin()
        self._inner.begin(replace(this, is_last=this.is_last and not self._is_alone))

    def reduce(self, unit: Unit) -> None:
        self._inner.reduce(unit)
        # Sums of earlier steps may be under way, and MPI moves data only while it is called.
        self.exchange.across.progress()

    def settle(self) -> None:
        self._inner.settle()
        if self._is_last:
            self.exchange.exchange(self.sums())
            self.spread()

    def sums(self) -> list[Array]:
        """Return writable views of this rank's parts; `spread` follows after they are written."""
        pieces = [part.piece for part in self.exchange.parts]
        if isinstance(self._inner, ReplicatedGradients):
            return self._inner.local(pieces)
        return self._inner.owned(pieces)

    def finish(self) -> None:
        self._inner.finish()
        self.exchange.finish()

    def abandon(self) -> None:
        self._inner.abandon()
        self.exchange.abandon()
