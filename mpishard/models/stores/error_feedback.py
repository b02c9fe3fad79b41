"""The errors of compressed gradients, which travel with the next gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mpishard.arrays import Array
from mpishard.communication import CommunicationBackend
from mpishard.layout import ShardLayout
from mpishard.models.stores.exchanged_gradients import Part
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.observe.ledger import MemoryCategory


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
    parts : sequence of Part
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
    factors : dict of str to Array
        Parameter -> second factor of PowerSGD in the last step, shape (columns, rank).
    """

    def __init__(
        self, layout: StoreLayout, across: CommunicationBackend, parts: Sequence[Part]
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
        self.factors: dict[str, Array] = {}
        self._fresh_factors: dict[str, Array] = {}
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

    def write_factor(self, name: str, factor: Array) -> None:
        """Keep a factor for the next step, if this one succeeds."""
        self._fresh_factors[name] = factor

    def commit(self) -> None:
        """Take the new errors for the old ones: the step has updated the parameters."""
        if self._is_complete:
            self._kept, self._fresh = self._fresh, self._kept
            self.factors = self._fresh_factors
        self.drop()

    def settle(self) -> None:
        """Record that all parts have new errors."""
        self._is_complete = True

    def drop(self) -> None:
        """Forget the new errors."""
        self._fresh_factors = {}
        self._is_complete = False
