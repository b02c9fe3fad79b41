"""The exchange of a unit between replicas: of its values, or of codes of their changes."""

from __future__ import annotations

import numpy as np

from mpishard.base import Array, DType, ShardLayout, copy_into, to_host
from mpishard.communication import CommunicationBackend, ReductionOperation, TreeReducer, Work
from mpishard.observe import MemoryCategory, MemoryLedger
from mpishard.optimizers.replicas.codes import Code
from mpishard.sharding import Piece


class Exchange:
    """Averages this rank's piece of a unit with those of the other replicas, in its own dtype.

    `begin` sends shares to their owners, and `mean` waits for them. `answer` sends the owners'
    values to all, and `finish` waits for them. Each call is collective. Shares, and then the
    result, overwrite the values, so that no other memory is needed.

    Parameters
    ----------
    across : CommunicationBackend
        The ranks that hold the same piece in the other replicas.
    piece : Piece
        This rank's piece of the unit.

    Attributes
    ----------
    own : slice
        The elements of the piece that this rank owns among these ranks.
    pieces : list of Piece
        The trained elements among them; the owner of the exchange fills the list.
    """

    def __init__(self, across: CommunicationBackend, piece: Piece) -> None:
        self.across = across
        self.piece = piece
        self.owners = ShardLayout(piece.length, across.world_size)
        self.own = self.owners.slice(across.rank)
        self.pieces: list[Piece] = []
        self._work: Work

    def agree(self, values: Array) -> None:
        """Record ``values``, shape (piece.length,), which all replicas have now."""

    def begin(self, values: Array, share: float, number: int) -> None:
        """Send ``share`` of ``values``, shape (piece.length,), after step ``number``."""
        # Shares are multiplied before they travel: the owner adds only, in the order of the tree.
        self._values = values
        self._values *= share
        self._work = self.across.reduce_scatter_async(values)

    def mean(self) -> Array:
        """Return the sum of all shares of the elements that this rank owns, as a writable array."""
        mean: Array = self._work.wait()
        return mean

    def answer(self, values: Array) -> None:
        """Send the values of the elements that this rank owns to all."""
        self._work = self.across.all_gather_async(values, out=self._values)

    def finish(self) -> None:
        """Write the pieces of all owners to the values: the same bits in all replicas."""
        self._work.wait()
        del self._values


class CodedExchange(Exchange):
    """An exchange in which changes since the last one travel as codes, in both directions.

    Each rank keeps the values that all replicas had then. An owner adds the decoded changes of all
    ranks, in the order of the one tree, and sends the sum as a code, which it decodes as all others
    do. The errors of codes are not kept: rounding is unbiased, and the next change begins at the
    values that all replicas have.

    Parameters
    ----------
    code : Code
        Encoding of the changes.
    dtype : numpy.dtype
        Dtype of the values.
    ledger : MemoryLedger
        Books the copy of the values.
    key : tuple of int
        Key of random numbers: it differs from piece to piece, and is equal in all replicas.
    """

    def __init__(
        self,
        across: CommunicationBackend,
        piece: Piece,
        code: Code,
        dtype: DType,
        ledger: MemoryLedger,
        key: tuple[int, ...],
    ) -> None:
        super().__init__(across, piece)
        self._code, self._piece_key = code, key
        self._agreed = ledger.allocate(MemoryCategory.OPTIMIZER_STATE, piece.length, dtype)
        self._number = 0
        self._reducer = TreeReducer()

    def _encode(self, change: Array, owner: int, sender: int) -> Array:
        with np.errstate(invalid="ignore", over="ignore"):  # the next loss reports NaN
            return self._code.encode(change, self._key(owner, sender))

    def _decode(self, code: Array, owner: int, sender: int) -> Array:
        change = np.empty(self.owners.size(owner), self._agreed.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            self._code.decode(code, change, self._key(owner, sender))
        return change

    def _key(self, owner: int, sender: int) -> tuple[int, ...]:
        return self._number, *self._piece_key, owner, sender

    def agree(self, values: Array) -> None:
        self._agreed[...] = to_host(values)

    def begin(self, values: Array, share: float, number: int) -> None:
        # The step is a part of the key, so that no two exchanges round by the same random numbers.
        self._values, self._number = values, number
        change = to_host(values) - self._agreed
        change *= share
        rank, size = self.across.rank, self.across.world_size
        self._work = self.across.all_to_all_async(
            [
                self._encode(change[self.owners.slice(owner)], owner, 1 + rank)
                for owner in range(size)
            ]
        )

    def mean(self) -> Array:
        rank = self.across.rank
        changes = [
            self._decode(code, rank, 1 + sender) for sender, code in enumerate(self._work.wait())
        ]
        mean = np.empty_like(changes[0])
        self._reducer.reduce(changes, ReductionOperation.SUM, mean)
        mean += self._agreed[self.own]
        return mean

    def answer(self, values: Array) -> None:
        # Sender 0 is the sum: its code draws other numbers than those of the ranks, 1 and up.
        code = self._encode(values - self._agreed[self.own], self.across.rank, 0)
        self._work = self.across.all_gather_async(code)

    def finish(self) -> None:
        codes = self._work.wait()
        # Codes have no headers: their lengths follow from the lengths of the values.
        position = 0
        for owner in range(self.across.world_size):
            length = self._code.wire_bytes(self.owners.size(owner), self._agreed.dtype.itemsize)
            change = self._decode(codes[position : position + length], owner, 0)
            self._agreed[self.owners.slice(owner)] += change
            position += length
        # The owner takes the decoded sum too, and not its own exact one: all must have one value.
        copy_into(self._values, self._agreed)
        del self._values
