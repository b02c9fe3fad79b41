"""Sums of gradients that travel between replicas compressed, with error feedback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from mpishard.base import Array, ShardLayout, copy_into, to_host
from mpishard.communication import CommunicationBackend, ReductionOperation, TreeReducer
from mpishard.models import StoreLayout
from mpishard.observe import MemoryCategory
from mpishard.optimizers.replicas.codes import Code
from mpishard.optimizers.replicas.exchanged_passes import ExchangedPiece, SumExchange


class ErrorFeedback:
    """The values that compression has left out so far, which are added to the next gradient.

    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML
    2019, algorithm 2. All errors are of sums over samples. A step writes new ones into separate
    memory, so that the old ones remain if it fails.

    Parameters
    ----------
    layout : StoreLayout
        Where memory is booked.
    across : CommunicationBackend
        The ranks that hold the same pieces.
    pieces : sequence of ExchangedPiece
        This rank's pieces.

    Attributes
    ----------
    own : Array
        Errors of the codes of this rank's pieces, shape (all their elements,).
    reduced : Array
        Errors of its codes of the sums that it owns among these ranks, shape (their elements,).
    own_pieces, reduced_pieces : tuple of Piece
        Where both lie in the flat vector; ``offset`` is the index in `own` or `reduced`. A piece
        that is sent uncompressed has no errors, except those read from a checkpoint of other
        ranks.
    """

    def __init__(
        self, layout: StoreLayout, across: CommunicationBackend, pieces: Sequence[ExchangedPiece]
    ) -> None:
        own, reduced = [], []
        lengths = [0, 0]
        for exchanged in pieces:
            piece = exchanged.piece
            own.append(piece)
            mine = ShardLayout(piece.length, across.world_size).slice(across.rank)
            # The first replica has all of its errors: other ranks cut it at other elements.
            if exchanged.is_replicated:
                mine = slice(0, 0 if across.rank else piece.length)
            start, stop = piece.start + mine.start, piece.start + mine.stop
            reduced.append(replace(piece, start=start, stop=stop, offset=lengths[1]))
            lengths[0] += piece.length
            lengths[1] += stop - start
        self.own_pieces, self.reduced_pieces = tuple(own), tuple(reduced)
        allocate = layout.ledger.allocate
        self._kept, self._fresh = (
            [allocate(MemoryCategory.OPTIMIZER_STATE, n, layout.dtype) for n in lengths]
            for _ in range(2)
        )
        for vector in self._kept:
            vector.fill(0)
        self._is_complete = False

    @property
    def own(self) -> Array:
        return self._kept[0]

    @property
    def reduced(self) -> Array:
        return self._kept[1]

    def of(self, number: int) -> list[tuple[Array, Array]]:
        """Return old and new errors: of a piece, by its index, and of the sums that it owns."""
        pieces = self.own_pieces[number], self.reduced_pieces[number]
        return [
            (old[piece.in_shard], new[piece.in_shard])
            for old, new, piece in zip(self._kept, self._fresh, pieces, strict=True)
        ]

    def commit(self) -> None:
        """Take the new errors for the old ones: the step has updated the parameters."""
        # Swapped, not copied: the memory of the old errors receives those of the next step.
        if self._is_complete:
            self._kept, self._fresh = self._fresh, self._kept
        self.drop()

    def complete(self) -> None:
        """Record that all pieces have new errors."""
        self._is_complete = True

    def drop(self) -> None:
        """Forget the new errors."""
        self._is_complete = False


@dataclass(frozen=True, slots=True)
class _HostPiece:
    """A piece of the gradient in one exchange, copied to the host.

    Parameters
    ----------
    number : int
        Its index among the pieces.
    values : Array
        This rank's gradient and old errors; then the sum over ranks.
    error : Array
        Takes the error of the codes of these values.
    old, new : Array
        Errors of the codes of the sums that this rank owns: of the last step, and of this one.
    """

    number: int
    values: Array
    error: Array
    old: Array
    new: Array


class CompressedSums(SumExchange):
    """Each replica's sums travel as codes, and so do the sums over the replicas.

    Each rank adds its errors to its values, and encodes them for each owner of a range separately.
    The owner adds the decoded values in the order of the one tree, adds its own error, and sends
    the sum as a code to all. With w(n) the bytes of a code of n elements the N ranks of the
    exchange send 2 (N - 1) times the sum of w over the ranges that they own: as an all-reduce does,
    in codes. Pieces that are replicated inside the replica are all-reduced as they are.

    Parameters
    ----------
    across, pieces
        See `SumExchange`; in flat order.
    code : Code
        Encoding of the values that travel.
    errors : ErrorFeedback
        The optimizer's errors; none is added if ``keeps_errors`` is False.
    key : callable
        Returns seed and step.
    start_step : int
        Earlier steps all-reduce whole values, and neither use nor write errors.
    frozen : sequence of (int, int)
        Bounds in the flat vector of what is not trained. It has no error, because checkpoints hold
        nothing of it.
    """

    def __init__(
        self,
        across: CommunicationBackend,
        pieces: Sequence[ExchangedPiece],
        code: Code,
        errors: ErrorFeedback,
        key: Callable[[], tuple[int, int]],
        *,
        keeps_errors: bool,
        start_step: int,
        frozen: Sequence[tuple[int, int]],
    ) -> None:
        super().__init__(across, pieces)
        self._code = code
        self._errors = errors
        self._key = key
        self._keeps_errors = keeps_errors
        self._start_step = start_step
        self._frozen = frozen
        self._reducer = TreeReducer()

    def begin(self) -> None:
        self._errors.drop()

    def exchange(self, values: Sequence[Array]) -> None:
        if self._key()[1] < self._start_step:
            for work in [self.across.all_reduce_async(array) for array in values]:
                work.wait()
            return
        is_finite = True
        # Unit by unit, so that only one unit's codes take memory at a time.
        units = groupby(range(len(self.pieces)), lambda n: self.pieces[n].piece.unit.index)
        for numbers in [list(unit) for _, unit in units]:
            given = []
            for n in numbers:
                (old, error), sums = self._errors.of(n)
                given.append(_HostPiece(n, to_host(values[n]) + old, error, *sums))
            is_finite &= self._exchange_unit(given)
            for host in given:
                copy_into(values[host.number], host.values)
        # Otherwise the step fails on all ranks, and the old errors stay.
        if is_finite:
            self._errors.complete()

    def _exchange_unit(self, pieces: Sequence[_HostPiece]) -> bool:
        """Exchange the pieces of a unit; return whether this rank's values are finite."""
        is_finite = all(np.isfinite(host.values).all() for host in pieces)
        if not is_finite:
            # A code could lose the one element that is not finite, and every rank's step must fail.
            for host in pieces:
                host.values.fill(np.nan)
        with np.errstate(invalid="ignore", over="ignore"):
            for host in pieces:
                if self.pieces[host.number].is_replicated:
                    self._take_errors(host)
                    self.across.all_reduce(host.values)
            coded = [host for host in pieces if not self.pieces[host.number].is_replicated]
            if coded:
                self._exchange_codes(coded)
        # After the exchange, which writes errors everywhere: these elements must have none.
        for host in pieces:
            own, reduced = (
                pieces[host.number]
                for pieces in (self._errors.own_pieces, self._errors.reduced_pieces)
            )
            for new, piece in ((host.error, own), (host.new, reduced)):
                if not self._keeps_errors:
                    new.fill(0)
                for start, stop in self._frozen:
                    new[max(0, start - piece.start) : max(0, stop - piece.start)] = 0
        return is_finite

    def finish(self) -> None:
        """Keep the errors of this step: it has updated the parameters."""
        self._errors.commit()

    def abandon(self) -> None:
        self._errors.drop()

    def _take_errors(self, host: _HostPiece) -> None:
        """Let errors of sums travel with the values of their owner, and leave none."""
        own = self._errors.own_pieces[host.number]
        reduced = self._errors.reduced_pieces[host.number]
        host.values[reduced.start - own.start : reduced.stop - own.start] += host.old
        host.error.fill(0)
        host.new.fill(0)

    def _encode(
        self, pieces: Sequence[_HostPiece], arrays: Sequence[Array], owner: int, sender: int
    ) -> Array:
        """Return the codes of what ``owner`` owns of all these pieces, end to end."""
        return np.concatenate(
            [
                self._code.encode(
                    array, (*self._key(), *self.pieces[host.number].key, owner, sender)
                )
                for host, array in zip(pieces, arrays, strict=True)
            ]
        )

    def _decode(
        self,
        codes: Array,
        pieces: Sequence[_HostPiece],
        out: Sequence[Array],
        owner: int,
        sender: int,
    ) -> int:
        """Write the values of `_encode` to ``out``; return the length of their codes."""
        position = 0
        for host, array in zip(pieces, out, strict=True):
            stop = position + self._code.wire_bytes(array.size, array.dtype.itemsize)
            key = (*self._key(), *self.pieces[host.number].key, owner, sender)
            self._code.decode(codes[position:stop], array, key)
            position = stop
        return position

    def _exchange_codes(self, pieces: Sequence[_HostPiece]) -> None:
        """Replace the values by the decoded sums over ranks; write new errors."""
        size, rank = self.across.world_size, self.across.rank
        layouts = [ShardLayout(host.values.size, size) for host in pieces]

        def owned(arrays: Sequence[Array], owner: int) -> list[Array]:
            return [a[layout.slice(owner)] for a, layout in zip(arrays, layouts, strict=True)]

        # Sender 0 is the owner's sum, so that its random numbers differ from those of rank 0.
        values, errors = [host.values for host in pieces], [host.error for host in pieces]
        sent = [
            self._encode(pieces, owned(values, owner), owner, 1 + rank) for owner in range(size)
        ]
        for owner, codes in enumerate(sent):
            self._decode(codes, pieces, owned(errors, owner), owner, 1 + rank)
        # The error is the part of the values that their codes lose; receivers decode the same.
        for host in pieces:
            np.subtract(host.values, host.error, out=host.error)
        # By rank: the reducer adds them in the order of the one tree.
        received = []
        for sender, codes in enumerate(self.across.all_to_all(sent)):
            received.append([np.empty_like(array) for array in owned(values, rank)])
            self._decode(codes, pieces, received[-1], rank, 1 + sender)
        totals = [np.empty_like(array) for array in owned(values, rank)]
        for total, contributions in zip(totals, zip(*received, strict=True), strict=True):
            self._reducer.reduce(list(contributions), ReductionOperation.SUM, total)
        # The sums are encoded once more on their way back, and that error stays with their owner.
        for total, host in zip(totals, pieces, strict=True):
            np.add(total, host.old, out=total)
        codes = self.across.all_gather(self._encode(pieces, totals, rank, 0))
        position = 0
        for owner in range(size):
            out = owned(values, owner)
            position += self._decode(codes[position:], pieces, out, owner, 0)
        for total, result, host in zip(totals, owned(values, rank), pieces, strict=True):
            np.subtract(total, result, out=host.new)
