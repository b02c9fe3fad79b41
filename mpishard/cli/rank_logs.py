"""What one rank of a job left behind: its call logs, one of each root world that it entered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Self

from mpishard.communication.contract.call_file import CallFile, LoggedCall, RankState
from mpishard.communication.diagnostics.table import call_text

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
    files : sequence of CallFile
        One or more, in the order in which it entered their worlds.
    """

    files: Sequence[CallFile]

    @classmethod
    def of_job(cls, files: Iterable[CallFile]) -> dict[int, Self]:
        """The logs of each rank, from those of a job in the order of `call_files`."""
        by_rank = groupby(files, key=lambda file: file.launched_rank)
        return {rank: cls(tuple(of_rank)) for rank, of_rank in by_rank}

    @property
    def rank(self) -> int:
        """The launcher's number of the process."""
        return self.files[0].launched_rank

    @property
    def host(self) -> str:
        """Where the process ran."""
        return self.files[0].host

    @property
    def state(self) -> RankState:
        """How the rank stands: ``LEFT`` where it left every root world that it entered."""
        states = [file.state for file in self.files]
        # It waits in one init() while other worlds of it stand still.
        for decisive in (RankState.REPORTED, RankState.STARTED):
            if decisive in states:
                return decisive
        return next((s for s in reversed(states) if s is not RankState.LEFT), RankState.LEFT)

    @property
    def has_begun(self) -> bool:
        """Whether a world that the rank entered was complete."""
        return any(file.state is not RankState.STARTED for file in self.files)

    @property
    def is_saving(self) -> bool:
        """Whether the rank saves, and ends, when it is told to."""
        return any(file.is_saving for file in self.files)

    @property
    def code(self) -> int:
        """The exit code of the job that the rank reported with; 0 where it did not."""
        return next((f.code for f in self.files if f.state is RankState.REPORTED), 0)

    @property
    def last_call(self) -> LoggedCall | None:
        """Its last collective, in whichever world."""
        return self._last[1]

    @property
    def waits_in_last(self) -> bool:
        """Whether it waits in `last_call`."""
        file, last = self._last
        return last is not None and file.waits == last.number

    @property
    def _last(self) -> tuple[CallFile, LoggedCall | None]:
        found = [(file, next(iter(file.calls(1)), None)) for file in self.files]
        return max(found, key=lambda pair: pair[1].time if pair[1] else 0.0)

    def text(self) -> str:
        """Who a rank was that has ended, how it went, and its last collectives, to be read."""
        return "\n".join(_text(file) for file in self.files)


def _text(file: CallFile) -> str:
    stood = f"{_ENDS[file.state]}, {file.count} collectives"
    name = f"rank {file.rank} of {file.world_size}, process {file.pid} on {file.host}"
    if file.rank != file.launched_rank:
        name = f"rank {file.launched_rank} of the job, in a world of its own {name}"
    lines = [f"{name}: {stood}"]
    for logged in file.calls():
        time = datetime.fromtimestamp(logged.time).astimezone().isoformat(" ", "microseconds")
        lines.append(f"{time}  {call_text(logged)}")
    return "\n".join(lines) + "\n"
