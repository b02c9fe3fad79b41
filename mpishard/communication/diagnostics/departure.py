"""What a rank says that waits for another which has left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpishard.communication.contract.call import Call
from mpishard.communication.contract.call_file import MessageWait
from mpishard.communication.contract.matching import advice_on_leaving
from mpishard.communication.contract.naming import of_group
from mpishard.communication.contract.rank_record import RankRecord
from mpishard.communication.diagnostics.stall import circle_of, parting
from mpishard.communication.diagnostics.table import exit_text

__all__ = ["Departure"]


@dataclass(frozen=True, slots=True)
class Departure:
    """A rank left a world in which another waits for it.

    Parameters
    ----------
    rank : int
        The one that left, by its number in the root world.
    last : int
        Its last collective in the world that it left.
    group : str
        The name of that world.
    waiting : int
        The one that waits, by its number in the root world.
    where : str
        Where that one waits, as ``in collective 3, ..``.
    awaited : Call or MessageWait
        What it waits for.
    """

    rank: int
    last: int
    group: str
    waiting: int
    where: str
    awaited: Call | MessageWait

    def describe(self, records: Sequence[RankRecord]) -> str:
        """Why the wait is in vain, as far as ``records``, of all ranks, tell; they may be none."""
        record = next((r for r in records if r.rank == self.rank), None)
        by = "" if record is None else exit_text(record)
        return (
            f"rank {self.rank} left after collective {self.last}{of_group(self.group)}{by}, while "
            f"rank {self.waiting} waits {self.where}. {self._advice(records, by)}"
        )

    def _advice(self, records: Sequence[RankRecord], by: str) -> str:
        if by and not by.endswith(("()", "(0)")):
            return (
                f"Look why rank {self.rank} called sys.exit; an exception that nobody catches says "
                "so, with the line, and ends all ranks"
            )
        circle = circle_of([self._as_waiting(r) if r.rank == self.waiting else r for r in records])
        if circle:
            return circle[0].upper() + circle[1:].removesuffix(".")
        if not isinstance(self.awaited, Call):
            return f"Look for a loop or a branch that ends earlier on rank {self.rank}"
        parted = parting(records, self.group, upto=self.awaited.sequence)
        return advice_on_leaving(self.awaited, self.rank) + (f"; {parted}" if parted else "")

    def _as_waiting(self, record: RankRecord) -> RankRecord:
        """The record of the rank that waits: it may not have said so yet."""
        awaited = self.awaited
        if isinstance(awaited, Call):
            found = (logged for logged in record.calls if logged.number == awaited.number)
            return replace(record, waits=next(found, None))
        return replace(record, waits=awaited)
