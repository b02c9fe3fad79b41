"""The facts about one rank: its state, its last collectives, and its wait, as its page has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from mpishard.communication.contract.call import Call
from mpishard.communication.contract.matching import group_members

__all__ = ["MessageWait", "RankRecord", "RankState", "members_of"]


class RankState(IntEnum):
    """The state of a rank, as it wrote it down last."""

    STARTED = 0
    """In ``init``: the world is not complete yet."""
    RUNNING = 1
    LEFT = 2
    """It left every world in good order."""
    REPORTED = 3
    """It said on stderr why the job ends."""
    LEAVING = 4
    """It calls no more collectives, and waits until the others have left or were told."""


@dataclass(frozen=True, slots=True)
class MessageWait:
    """A message that a rank waits for, or waits for another rank to take.

    ``peer`` is the other rank, by its number in the root world; ``group`` is the label of the
    world that the message belongs to.
    """

    peer: int
    tag: int
    is_send: bool
    group: str
    sends: ClassVar[Mapping[str, int]] = {}
    """No bytes, unlike `Call.sends`: those of a message are counted when it is sent."""

    def __str__(self) -> str:
        message = f"a message with tag {self.tag}"
        receive, send = f"{message} from rank {self.peer}", f"rank {self.peer} to take {message}"
        return f"for {send if self.is_send else receive}" + (f" in {self.group}" * bool(self.group))


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The content of one rank's status page at one moment.

    Parameters
    ----------
    rank : int
        Its number in the root world.
    state : RankState, optional
        None if the rank has not come to ``init``, or if ``is_known`` is False.
    is_known : bool
        Whether its page can be read from here.
    is_alive : bool
        Whether its process runs, as far as is known: True for a process of another host.
    is_stopped : bool
        Whether its process is stopped, by SIGSTOP, Ctrl-Z or a debugger.
    calls : tuple of Call
        Its last collectives in all its worlds, newest last.
    waits : Call or MessageWait, optional
        The collective or message that it waits for; None if it waits for nothing, or for a
        collective that its log does not hold any more.
    waited : float
        Seconds since it began to wait; 0 if it does not wait.
    world_size, launched_rank, world_number : int
        Size of the root world; number of the process among those of the launcher; number of root
        worlds that the process entered before this one.
    pid, host : int, str
        The process of the rank.
    count : int
        Number of collectives that it has called, in all its worlds.
    code : int
        The exit code of the job that the rank reported with.
    is_saving : bool
        Whether it saves, and ends, when it is told to.
    shared_memory : tuple of str
        Files in shared memory that it had mapped.
    resumable_by : tuple of int
        The fewest and the most ranks that can go on from what it saves; (0, 0) if not known.
    """

    rank: int
    state: RankState | None = None
    is_known: bool = True
    is_alive: bool = True
    is_stopped: bool = False
    calls: tuple[Call, ...] = ()
    waits: Call | MessageWait | None = None
    waited: float = 0.0
    world_size: int = 0
    launched_rank: int = 0
    world_number: int = 0
    pid: int = 0
    host: str = ""
    count: int = 0
    code: int = 0
    is_saving: bool = False
    shared_memory: tuple[str, ...] = ()
    resumable_by: tuple[int, int] = (0, 0)

    @property
    def last(self) -> Call | None:
        """Its last collective in any world; None if it has called none."""
        return self.calls[-1] if self.calls else None

    @property
    def has_left(self) -> bool:
        """Whether it calls no collective any more, in good order."""
        return self.state in (RankState.LEFT, RankState.LEAVING)

    def calls_of(self, group: str) -> list[Call]:
        """Its last collectives in the world with the label ``group``."""
        return [call for call in self.calls if call.group == group]

    def last_of(self, group: str) -> int:
        """The number, on its world, of its last collective there; 0 if none is known."""
        return max((call.sequence for call in self.calls_of(group)), default=0)


def members_of(group: str, records: Sequence[RankRecord]) -> list[RankRecord]:
    """The ranks of the world with the label ``group``; those seen in it if the label is short."""
    if not group:
        return list(records)
    members = group_members(group)
    return [r for r in records if (r.calls_of(group) if members is None else r.rank in members)]
