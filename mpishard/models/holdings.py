"""What the stores of one model on one rank have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication import CommunicationBackend
from mpishard.observe.ledger import MemoryCategory, MemoryLedger
from mpishard.sharding import Piece, Unit, owned_pieces

__all__ = ["Holdings"]


@dataclass(frozen=True, slots=True)
class Holdings:
    """How a flat vector is divided, who takes part, and where memory is booked.

    Parameters
    ----------
    units : tuple of Unit
        What is gathered and reduced as one, in order.
    kept : frozenset of int
        Indices of the units that stay unsharded from forward to backward.
    dtype : numpy.dtype
        Of parameters, gradients and state.
    backend : CommunicationBackend
        How the ranks talk.
    ledger : MemoryLedger
        Counts what is held.
    """

    units: tuple[Unit, ...]
    kept: frozenset[int]
    dtype: np.dtype[Any]
    backend: CommunicationBackend
    ledger: MemoryLedger

    @property
    def length(self) -> int:
        """Length of the flat vector."""
        return self.units[-1].stop

    def pieces(self, *, sharded: bool = True) -> tuple[Piece, ...]:
        """What this rank owns of each unit; every unit whole where nothing is sharded."""
        if sharded:
            return owned_pieces(self.units, self.backend.world_size, self.backend.rank)
        return owned_pieces(self.units, 1, 0)

    def allocate(self, category: MemoryCategory, length: int) -> Array:
        """An uninitialised vector, booked under ``category``."""
        return self.ledger.allocate(category, length, self.dtype)
