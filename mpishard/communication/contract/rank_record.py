"""What one rank of a job does at one moment, as its peers can know: the material of a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mpishard.communication.contract.call_file import CallFile, LoggedCall, MessageWait, RankState
from mpishard.communication.contract.naming import group_members

__all__ = ["RankRecord", "Watched", "members_of", "records_of_files"]

_HAS_LEFT = (RankState.LEFT, RankState.LEAVING)


@dataclass(frozen=True, slots=True)
class RankRecord:
    """How a rank stands, what it waits for, and its last collectives.

    Parameters
    ----------
    rank : int
        Its number in the root world.
    state : RankState, optional
        None where it has not come to ``init``, or where ``is_known`` is False.
    is_known : bool
        Whether its call log can be read from here.
    is_alive : bool
        Whether its process runs, as far as is known.
    calls : tuple of LoggedCall
        Its last collectives in all its worlds, newest last.
    waits : LoggedCall or MessageWait, optional
        What it waits for; None where it waits for nothing, or for a collective that its log does
        not hold any more.
    waited : float
        Seconds since it began to wait.
    exit_call : str
        How it left, as ``sys.exit(3)``; empty where it came to its end, or has not left.
    """

    rank: int
    state: RankState | None = None
    is_known: bool = True
    is_alive: bool = True
    calls: tuple[LoggedCall, ...] = ()
    waits: LoggedCall | MessageWait | None = None
    waited: float = 0.0
    exit_call: str = ""

    @property
    def has_left(self) -> bool:
        """Whether it calls no collective any more, in good order."""
        return self.state in _HAS_LEFT

    def calls_of(self, group: str) -> list[LoggedCall]:
        """Its last collectives in the world that is called ``group``."""
        return [logged for logged in self.calls if logged.group == group]

    def last_of(self, group: str) -> int:
        """The number, on its world, of its last collective there; 0 where none is known."""
        return max((logged.call.sequence for logged in self.calls_of(group)), default=0)


class Watched(Protocol):
    """Where the records of all ranks of a job can be had."""

    def records(self) -> list[RankRecord]:
        """One record of each rank of the root world, in rank order."""


def members_of(group: str, records: Sequence[RankRecord]) -> list[RankRecord]:
    """The ranks of the world that is called ``group``; those seen in it where its name is short."""
    if not group:
        return list(records)
    members = group_members(group)
    if members is None:
        return [record for record in records if record.calls_of(group)]
    wanted = set(members)
    return [record for record in records if record.rank in wanted]


def records_of_files(
    files: Mapping[int, CallFile], world_size: int, now: float, *, all_are_here: bool
) -> list[RankRecord]:
    """The records that call logs hold.

    Parameters
    ----------
    files : mapping of int to CallFile
        By world rank.
    world_size : int
        Number of ranks of the root world.
    now : float
        Seconds since the epoch.
    all_are_here : bool
        Whether a rank without a file has not come to ``init``; otherwise nothing is known of it.

    Returns
    -------
    list of RankRecord
        One for each rank.
    """
    return [
        _record_of(files[rank], now) if rank in files else RankRecord(rank, is_known=all_are_here)
        for rank in range(world_size)
    ]


def _record_of(file: CallFile, now: float) -> RankRecord:
    number, since = file.waits, file.waits_since
    calls = tuple(file.calls())
    waits: LoggedCall | MessageWait | None = None
    if number < 0:
        waits = file.message
    elif number:
        waits = next((logged for logged in calls if logged.number == number), None)
    return RankRecord(
        file.rank,
        file.state,
        is_alive=file.is_alive(),
        calls=calls,
        waits=waits,
        waited=max(0.0, now - since) if number else 0.0,
        exit_call=file.exit_call,
    )
