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
    """The parts that compression has left out so far, which are added to the next gradient.

    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML
    2019, algorithm 2. All errors are of sums over samples. A step writes new ones into separate
    memory, so that the old ones remain if it fails.

    Parameters
    ----------
    layout : StoreLayout
        Where memory is booked.
    across : CommunicationBackend
        The ranks that hold the same parts.
    parts : sequence of ExchangedPiece
        This rank's parts.

    Attributes
    ----------
    own : Array
        Errors of the codes of this rank's parts, shape (all their elements,).
    reduced : Array
        Errors of its codes of the sums that it owns among these ranks, shape (their elements,).
    own_pieces, reduced_pieces : tuple of Piece
        The ranges of both, part by part; ``offset`` is the place in the vector. A part that travels
        whole has no errors, except those read from a checkpoint of other ranks.
    """

    def __init__(
        self, layout: StoreLayout, across: CommunicationBackend, parts: Sequence[ExchangedPiece]
    ) -> None:
        own, reduced = [], []
        lengths = [0, 0]
        for part in parts:
            piece = part.piece
            own.append(piece)
            mine = ShardLayout(piece.length, across.world_size).slice(across.rank)
            if part.is_alike:  # the first replica has all errors: other ranks cut it elsewhere
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

    def of(self, part: int) -> list[tuple[Array, Array]]:
        """Return old and new errors: of a part, by its index, and of the sums that it owns."""
        pieces = self.own_pieces[part], self.reduced_pieces[part]
        return [
            (old[piece.in_shard], new[piece.in_shard])
            for old, new, piece in zip(self._kept, self._fresh, pieces, strict=True)
        ]

    def commit(self) -> None:
        """Take the new errors for the old ones: the step has updated the parameters."""
        if self._is_complete:
            self._kept, self._fresh = self._fresh, self._kept
        self.drop()

    def settle(self) -> None:
        """Record that all parts have new errors."""
        self._is_complete = True

    def drop(self) -> None:
        """Forget the new errors."""
        self._is_complete = False


@dataclass(frozen=True, slots=True)
class _EncodedPiece:
    """A part of the gradient in one exchange, on the host.

    Parameters
    ----------
    number : int
        Its index among the parts.
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
    in codes. Parts that other ranks of the replica exchange too are all-reduced as they are: codes
    of them would differ if these ranks cut them at other places.

    Parameters
    ----------
    across, parts
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
        Ranges of the flat vector that are not trained. They have no error, because checkpoints hold
        nothing of them.
    """

    def __init__(
        self,
        across: CommunicationBackend,
        parts: Sequence[ExchangedPiece],
        code: Code,
        errors: ErrorFeedback,
        key: Callable[[], tuple[int, int]],
        *,
        keeps_errors: bool,
        start_step: int,
        frozen: Sequence[tuple[int, int]],
    ) -> None:
        super().__init__(across, parts)
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
        units = groupby(range(len(self.parts)), lambda n: self.parts[n].piece.unit.index)
        for numbers in [list(unit) for _, unit in units]:
            parts = []
            for n in numbers:
                (old, error), sums = self._errors.of(n)
                parts.append(_EncodedPiece(n, to_host(values[n]) + old, error, *sums))
            is_finite &= self._exchange_unit(parts)
            for part in parts:
                copy_into(values[part.number], part.values)
        if is_finite:
            self._errors.settle()

    def _exchange_unit(self, parts: Sequence[_EncodedPiece]) -> bool:
        """Exchange the parts of a unit; return whether this rank's values are finite."""
        is_finite = all(np.isfinite(part.values).all() for part in parts)
        if not is_finite:
            # A code could lose the one element that is not finite, and every rank's step must fail.
            for part in parts:
                part.values.fill(np.nan)
        with np.errstate(invalid="ignore", over="ignore"):
            for part in parts:
                if self.parts[part.number].is_alike:
                    self._take_errors(part)
                    self.across.all_reduce(part.values)
            coded = [part for part in parts if not self.parts[part.number].is_alike]
            if coded:
                self._exchange_codes(coded)
        for part in parts:
            own, reduced = (
                pieces[part.number]
                for pieces in (self._errors.own_pieces, self._errors.reduced_pieces)
            )
            for new, piece in ((part.error, own), (part.new, reduced)):
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

    def _take_errors(self, part: _EncodedPiece) -> None:
        """Let errors of sums travel with the values of their owner, and leave none."""
        own = self._errors.own_pieces[part.number]
        reduced = self._errors.reduced_pieces[part.number]
        part.values[reduced.start - own.start : reduced.stop - own.start] += part.old
        part.error.fill(0)
        part.new.fill(0)

    def _encode(
        self, parts: Sequence[_EncodedPiece], arrays: Sequence[Array], owner: int, sender: int
    ) -> Array:
        """Return the codes of the pieces of all parts that ``owner`` owns, end to end."""
        return np.concatenate(
            [
                self._code.encode(
                    array, (*self._key(), *self.parts[part.number].key, owner, sender)
                )
                for part, array in zip(parts, arrays, strict=True)
            ]
        )

    def _decode(
        self,
        codes: Array,
        parts: Sequence[_EncodedPiece],
        out: Sequence[Array],
        owner: int,
        sender: int,
    ) -> int:
        """Write the values of `_encode` to ``out``; return the length of their codes."""
        position = 0
        for part, array in zip(parts, out, strict=True):
            stop = position + self._code.wire_bytes(array.size, array.dtype.itemsize)
            key = (*self._key(), *self.parts[part.number].key, owner, sender)
            self._code.decode(codes[position:stop], array, key)
            position = stop
        return position

    def _exchange_codes(self, parts: Sequence[_EncodedPiece]) -> None:
        """Replace the values by the decoded sums over ranks; write new errors."""
        size, rank = self.across.world_size, self.across.rank
        layouts = [ShardLayout(part.values.size, size) for part in parts]

        def owned(arrays: Sequence[Array], owner: int) -> list[Array]:
            return [a[layout.slice(owner)] for a, layout in zip(arrays, layouts, strict=True)]

        given, errors = [part.values for part in parts], [part.error for part in parts]
        sent = [self._encode(parts, owned(given, owner), owner, 1 + rank) for owner in range(size)]
        for owner, codes in enumerate(sent):
            self._decode(codes, parts, owned(errors, owner), owner, 1 + rank)
        # The error is the part of the values that their codes lose; receivers decode the same.
        for part in parts:
            np.subtract(part.values, part.error, out=part.error)
        received = []
        for sender, codes in enumerate(self.across.all_to_all(sent)):
            received.append([np.empty_like(array) for array in owned(given, rank)])
            self._decode(codes, parts, received[-1], rank, 1 + sender)
        totals = [np.empty_like(array) for array in owned(given, rank)]
        for total, contributions in zip(totals, zip(*received, strict=True), strict=True):
            self._reducer.reduce(list(contributions), ReductionOperation.SUM, total)
        # The sums are encoded once more on their way back, and that error stays with their owner.
        for total, part in zip(totals, parts, strict=True):
            np.add(total, part.old, out=total)
        codes = self.across.all_gather(self._encode(parts, totals, rank, 0))
        position = 0
        for owner in range(size):
            out = owned(given, owner)
            position += self._decode(codes[position:], parts, out, owner, 0)
        for total, result, part in zip(totals, owned(given, rank), parts, strict=True):
            np.subtract(total, result, out=part.new)
