"""What one rank of a job left behind: its call logs, one of each root world that it entered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Self

from mpishard.communication.contract.status import LoggedCall, RankRecord, RankState

__all__ = ["RankLogs"]


_ENDS = {
    RankState.STARTED: "ended in init()",
    RankState.RUNNING: "ended without leaving",
    RankState.LEAVING: "ended while it waited for the others to leave",
    RankState.LEFT: "left",
    RankState.REPORTED: "said why the job ends",
}
"""What the last state of a process says of its end."""


@dataclass(frozen=True, slots=True)
class RankLogs:
    """The call logs of one process, which the launcher counts as ``rank``.

    Parameters
    ----------
    records : sequence of RankRecord
        One or more, in the order in which it entered their worlds.
    """

    records: Sequence[RankRecord]

    @classmethod
    def of_job(cls, records: Iterable[RankRecord]) -> dict[int, Self]:
        """The logs of each rank, from those of a job in the order of `records_in`."""
        by_rank = groupby(records, key=lambda record: record.launched_rank)
        return {rank: cls(tuple(of_rank)) for rank, of_rank in by_rank}

    @property
    def rank(self) -> int:
        """The launcher's number of the process."""
        return self.records[0].launched_rank

    @property
    def host(self) -> str:
        """Where the process ran."""
        return self.records[0].host

    @property
    def state(self) -> RankState:
        """How the rank stands: ``LEFT`` if it left every root world that it entered."""
        states = [record.state or RankState.STARTED for record in self.records]
        # It waits in one init() while other worlds of it stand still.
        for decisive in (RankState.REPORTED, RankState.STARTED):
            if decisive in states:
                return decisive
        return next((s for s in reversed(states) if s is not RankState.LEFT), RankState.LEFT)

    @property
    def has_begun(self) -> bool:
        """Whether a world that the rank entered was complete."""
        return any(record.state is not RankState.STARTED for record in self.records)

    @property
    def is_saving(self) -> bool:
        """Whether the rank saves, and ends, when it is told to."""
        return any(record.is_saving for record in self.records)

    @property
    def code(self) -> int:
        """The exit code of the job that the rank reported with; 0 if it did not."""
        return next((r.code for r in self.records if r.state is RankState.REPORTED), 0)

    @property
    def last_call(self) -> LoggedCall | None:
        """Its last collective, in whichever world."""
        return self._last[1]

    @property
    def waits_in_last(self) -> bool:
        """Whether it waits in `last_call`."""
        record, last = self._last
        return last is not None and record.waits == last

    @property
    def _last(self) -> tuple[RankRecord, LoggedCall | None]:
        found = [(record, record.calls[-1] if record.calls else None) for record in self.records]
        return max(found, key=lambda pair: pair[1].time if pair[1] else 0.0)

    def text(self) -> str:
        """Who a rank was that has ended, how it went, and its last collectives, to be read."""
        return "\n".join(_text(record) for record in self.records)


def _text(record: RankRecord) -> str:
    stood = f"{_ENDS[record.state or RankState.STARTED]}, {record.count} collectives"
    name = f"rank {record.rank} of {record.world_size}, process {record.pid} on {record.host}"
    if record.rank != record.launched_rank:
        name = f"rank {record.launched_rank} of the job, in a world of its own {name}"
    lines = [f"{name}: {stood}"]
    for logged in record.calls:
        time = datetime.fromtimestamp(logged.time).astimezone().isoformat(" ", "microseconds")
        lines.append(f"{time}  {logged}")
    return "\n".join(lines) + "\n"
