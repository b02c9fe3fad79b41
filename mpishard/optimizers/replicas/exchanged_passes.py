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
    divided_pieces,
    make_gradient_store,
    squared_norm,
)
from mpishard.sharding import Piece, Unit


@dataclass(frozen=True, slots=True)
class ExchangedPiece:
    """A piece of the gradient that this rank sums with those of the other replicas.

    Parameters
    ----------
    piece : Piece
        Its ``offset`` is that in the vector of all these pieces, end to end.
    key : tuple of int
        Key of random numbers: it differs from piece to piece, and is equal in all replicas.
    is_replicated : bool
        True for parameters that several tensor ranks hold. They are sent uncompressed, because
        each rank would cut, and so encode, them differently.
    """

    piece: Piece
    key: tuple[int, ...]
    is_replicated: bool = False


def exchanged_pieces(
    pieces: Sequence[Piece], *rank: int, replicated: Sequence[tuple[int, int]] = ()
) -> tuple[ExchangedPiece, ...]:
    """Return ``pieces`` with their keys, cut at the bounds of replicated parameters.

    Parameters
    ----------
    pieces : sequence of Piece
        The pieces that this rank exchanges, one of each unit.
    *rank : int
        Index of the rank in its replica, if the replica has several ranks.
    replicated : sequence of (int, int)
        Bounds in the flat vector of the parameters that other ranks of the replica hold too.
    """
    found, position = [], 0
    for piece in pieces:
        inside = [(max(a, piece.start), min(b, piece.stop)) for a, b in replicated]
        cuts = sorted({piece.start, piece.stop, *(n for a, b in inside if a < b for n in (a, b))})
        # An empty piece has one bound, and so no pair of bounds, but is kept.
        for start, stop in pairwise(cuts) if piece.length else [(piece.start, piece.stop)]:
            is_replicated = any(a <= start and stop <= b for a, b in inside)
            key = piece.unit.index, *rank, *([start - piece.unit.start] if replicated else [])
            exchanged = Piece(piece.unit, start, stop, position)
            found.append(ExchangedPiece(exchanged, key, is_replicated=is_replicated))
            position += stop - start
    return tuple(found)


class SumExchange(ABC):
    """Turns this rank's pieces of a gradient into their sums over all replicas.

    Parameters
    ----------
    across : CommunicationBackend
        The ranks that hold the same pieces in the other replicas.
    pieces : sequence of ExchangedPiece
        This rank's pieces.

    Attributes
    ----------
    is_late : bool
        Whether the sums are those of an earlier step.
    """

    is_late = False

    def __init__(self, across: CommunicationBackend, pieces: Sequence[ExchangedPiece]) -> None:
        self.across = across
        self.pieces = tuple(pieces)

    def begin(self) -> None:
        """Begin a backward pass."""

    @abstractmethod
    def exchange(self, values: Sequence[Array]) -> None:
        """Replace the values of each piece, shape (piece.length,), by a sum. Collective.

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

    A round's last pass reduces inside the replica, so that each rank has the sums of its pieces.
    The exchange overwrites them with the sums over all replicas. If only owners have them then, and
    every rank updates all, they are gathered inside the replica. Without replicas of several ranks
    each rank is a replica.

    Parameters
    ----------
    user : str
        Class of the optimizer.
    make_exchange : callable
        ``make_exchange(layout, across, pieces)`` receives the ranks that hold the same pieces of
        all replicas, and these pieces. Called again if other units are frozen.

    Attributes
    ----------
    exchange : SumExchange
        Runs between the replicas.
    """

    exchange: SumExchange
    are_exact = False  # they may be those of an earlier step, or have errors of codes
    are_of_replicas = True

    def __init__(
        self,
        user: str,
        make_exchange: Callable[
            [StoreLayout, CommunicationBackend, tuple[ExchangedPiece, ...]], SumExchange
        ],
    ) -> None:
        self.user = user
        self._make_exchange = make_exchange

    def prepare(self, engine: Engine, layout: StoreLayout) -> UpdatePieces:
        replica = engine.replica
        self._is_alone, across = not replica.is_grouped, replica.across
        rank: tuple[int, ...] = ()
        alike: list[tuple[int, int]] = []
        if self._is_alone:
            inner: GradientStore = ReplicatedGradients(layout)
        else:
            inner = make_gradient_store(layout, engine.policy, in_leaves=True)
            # Ranks that repeat the work on a black box must draw the same numbers: they have one
            # key.
            is_whole = engine.program.needs_whole_parameters
            ranks = engine.backend if is_whole else replica.group
            # A replica of one rank has the same keys with and without ``replica_size``.
            rank = () if ranks.world_size == 1 else (ranks.rank,)
            alike = engine.program.vector.replicated_ranges()
        pieces = layout.pieces(sharded=not self._is_alone)
        trained = [piece for piece in pieces if piece.unit.index not in layout.frozen]
        exchanged = exchanged_pieces(trained, *rank, replicated=alike)
        self.exchange = self._make_exchange(layout, across, exchanged)
        self.is_late = self.exchange.is_late
        self._inner = inner
        self.store = _Progressing(inner, across)
        found = UpdatePieces.of(engine.program, layout, engine.policy)
        if self._is_alone:
            return found
        # All replicas have the same sums: each adds a share of the squares to the norm.
        return replace(
            found, counted=tuple(divided_pieces(found.counted, across.world_size, across.rank))
        )

    def run(
        self, engine: Engine, x: Array, y: Array, sample_start: int, *, is_last: bool
    ) -> tuple[float | Array, float | Array]:
        self.exchange.begin()
        # Without groups each rank's own sums are those of its replica: nothing is reduced before.
        reduces = is_last and not self._is_alone
        own = super().run(engine, x, y, sample_start, is_last=reduces)
        # Between replicas only once a round, however many batches it accumulates.
        if is_last:
            self.exchange.exchange(self.sums())
            self.store.spread()
        return own

    def sums(self) -> list[Array]:
        """Return writable views of this rank's pieces; `spread` follows after they are written."""
        pieces = [exchanged.piece for exchanged in self.exchange.pieces]
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
        # No backward pass has made these sums, so that their norm is not known yet.
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
