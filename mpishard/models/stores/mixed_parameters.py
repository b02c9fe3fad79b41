"""Mixed precision: float32 parameters with their owners, and the bfloat16 copy that is computed."""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.arrays import Array
from mpishard.bfloat16 import round_into
from mpishard.models.stores.parameter_store import ParameterStore, ReplicatedParameters
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.sharding import Piece, Unit

__all__ = ["MixedParameters"]


class MixedParameters(ParameterStore):
    """Float32 *masters*, which updates change, and bfloat16 copies, which layers compute with.

    Whoever owns a piece rounds it when it has updated it, and the copies are published as
    parameters of any dtype are: where a node's ranks share memory they stand once per node, and
    between nodes they are half the bytes. If every rank updates all parameters, each has copies
    of its own. Micikevicius et al., "Mixed Precision Training", ICLR 2018 (arXiv:1710.03740),
    section 3.1: without masters, updates smaller than half a spacing of the rounded parameter are
    lost.

    Parameters
    ----------
    layout : StoreLayout
        Of the masters, in float32.
    masters : ParameterStore
        All of them on every rank, or each rank's pieces.
    copies : ParameterStore
        The same parameters as bfloat16.
    """

    def __init__(
        self, layout: StoreLayout, masters: ParameterStore, copies: ParameterStore
    ) -> None:
        super().__init__(layout)
        self.held = masters.held
        self.in_flight = copies.in_flight
        self.owners_only = not isinstance(masters, ReplicatedParameters)
        self._masters = masters
        self._copies = copies

    @property
    def computed(self) -> ParameterStore:
        return self._copies

    def fill(self, unit: Unit, full: Array | None) -> None:
        self._masters.fill(unit, full)
        self._round([self.held[unit.index]])

    def refresh(self) -> None:
        self._masters.refresh()
        self._round(self.held)

    def prefetch(self, unit: Unit) -> None:
        self._copies.prefetch(unit)

    def unshard(self, unit: Unit) -> Array:
        return self._copies.unshard(unit)

    def reshard(self, unit: Unit) -> None:
        self._copies.reshard(unit)

    def read(self, unit: Unit, out: Array) -> None:
        self._masters.read(unit, out)

    def abandon(self) -> None:
        self._masters.abandon()
        self._copies.abandon()

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        return self._masters.owned(pieces)

    def publish(self, pieces: Sequence[Piece]) -> None:
        self._masters.publish(pieces)
        self._round(pieces)

    def changed(self) -> None:
        if not self.owners_only:
            self._round(self.held)

    def copy_from(self, other: ParameterStore) -> None:
        assert isinstance(other, MixedParameters)
        self._masters.copy_from(other._masters)
        self._copies.copy_from(other._copies)

    def _round(self, pieces: Sequence[Piece]) -> None:
        """Round masters that this rank holds. Collective if only their owners do."""
        masters, copies = self._masters.owned(pieces), self._copies.owned(pieces)
        for master, copy in zip(masters, copies, strict=True):
            round_into(copy, master)
        if self.owners_only:
            self._copies.publish(pieces)
