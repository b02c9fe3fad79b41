"""Where thread-ranks meet: the state that they share, guarded by one condition.

A collective in memory is a chain of *meetings*. At a meeting each rank leaves a value, and goes
on when all have come. What one rank sends another are *letters*.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpishard import settings
from mpishard.communication.contract.arena import number_nodes
from mpishard.communication.contract.call import Call
from mpishard.communication.contract.status import LoggedCall, RankRecord, StatusPage
from mpishard.communication.contract.work import Waitable
from mpishard.communication.failure.tracebacks import short_traceback
from mpishard.errors import CollectiveTimeoutError, PeerError
from mpishard.layout import ShardLayout

if TYPE_CHECKING:
    from mpishard.communication.threads.backend import InMemoryCommunicationBackend
    from mpishard.communication.threads.messages import Letter

__all__ = ["NO_RANK", "Absence", "Arrival", "World", "new_world", "split_worlds"]


_losses = itertools.count()
NO_RANK = -1
"""The rank of a failure in a thread that is none."""


@dataclass(slots=True)
class Failure:
    """Which rank failed, by its number in the root world, and what the others are told."""

    rank: int
    message: str
    is_timeout: bool = False
    """Whether nobody failed, and a rank waited for too long."""

    def error(self, what: str) -> CollectiveTimeoutError | PeerError:
        """What another rank raises; ``what`` of it comes of the failure."""
        text = f"{what}: {self.message}"
        return CollectiveTimeoutError(text) if self.is_timeout else PeerError(text, self.rank)


class Meeting:
    """One point that all ranks pass: what each has left there, and how many have."""

    __slots__ = ("arrived", "values")

    def __init__(self, world_size: int) -> None:
        self.values: list[Any] = [None] * world_size
        self.arrived = 0


@dataclass(slots=True, weakref_slot=True, eq=False)
class World:
    """What the thread-ranks of one environment share. Every field is guarded by ``changed``.

    Worlds that were split from one another share ``changed``, ``failures`` and ``pages``, so
    that a failure anywhere wakes every rank, and a report shows what each does in any of them.
    """

    name: str
    world_size: int
    global_ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    changed: threading.Condition
    failures: list[Failure]
    pages: list[StatusPage | None]
    """Of each rank of the root world; None where it has not come yet."""
    meetings: dict[tuple[int, int], Meeting] = field(default_factory=dict)
    letters: dict[tuple[int, int, int], deque[Letter]] = field(default_factory=dict)
    members: dict[int, InMemoryCommunicationBackend] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    children: list[weakref.ref[World]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    """Ranks that failed, and will not come again."""
    survivors: set[int] = field(default_factory=set)
    """Ranks that wait in `shrink` for the others that are left."""
    heirs: tuple[int, ...] = ()
    """The ranks of the world that comes after this one, once all that are left have come."""
    heir_name: str = ""
    """What that world is called."""

    def meet(self, call: Call, phase: int, rank: int, value: Any) -> Arrival:
        """Leave ``value`` of ``rank`` at a meeting; the arrival tells when all ranks have.

        A meeting is known by (collective, phase) and not by a running number, because ranks
        may issue the next collective before or after they finish this one.
        """
        key = (call.sequence, phase)
        with self.changed:
            meeting = self.meetings.get(key)
            if meeting is None:
                meeting = self.meetings[key] = Meeting(self.world_size)
            meeting.values[rank] = (value,)
            meeting.arrived += 1
            if meeting.arrived == self.world_size:
                del self.meetings[key]
                self.changed.notify_all()
        return Arrival(meeting)

    def fail(self, rank: int, error: BaseException, last: LoggedCall | None) -> None:
        """Tell every rank that ``rank``, whose last collective is ``last``, failed.

        What it raised because of another rank is that one's failure.
        """
        after = f"after {last}" if last else "before any collective"
        name = self.global_ranks[rank]
        self._tell(f"rank {name}", name, f"{after}, ", error)

    def fail_in_thread(self, name: str, error: BaseException) -> None:
        """Tell every rank that a thread that is no rank failed."""
        self._tell(f"thread {name!r}, which is no rank,", NO_RANK, "", error)

    def _tell(self, who: str, rank: int, after: str, error: BaseException) -> None:
        message = (
            f"{who} failed {after}with {type(error).__name__}: {error}\n"
            f"--- traceback of {who} ---\n{short_traceback(error)}"
        )
        failure = Failure(rank, message)
        if isinstance(error, PeerError):
            failure = Failure(error.rank, str(error))
        with self.changed:
            self.failures.append(failure)
            self.changed.notify_all()

    def absent_survivors(self) -> set[int]:
        """Ranks that neither failed nor left, nor wait in `shrink`. Called with the lock."""
        return set(range(self.world_size)) - self.survivors - self.lost - set(self.left)

    def survive(self, rank: int) -> bool:
        """Let ``rank`` be in the world that comes after this one; whether all that are left are.

        Called with the lock.
        """
        if not self.failures:
            origin, why = NO_RANK, ""
            if self.left:
                origin = min(self.left)
                why = f"rank {origin} left, and "
            text = f"{why}rank {rank} goes on without this world: it called shrink()"
            self.failures.append(Failure(origin, text))
        self.survivors.add(rank)
        if not self.heirs and not self.absent_survivors():
            self.heirs = tuple(sorted(self.survivors))
            self.heir_name = f"{self.name}, after loss {next(_losses)}"
        self.changed.notify_all()
        return bool(self.heirs)

    def records(self) -> list[RankRecord]:
        """One record of each rank of the root world. Needs no lock."""
        return [
            RankRecord(rank) if page is None else page.read()
            for rank, page in enumerate(self.pages)
        ]


class Absence(Waitable):
    """Something that other thread-ranks have yet to do. Its test is made with the world's lock."""

    @abstractmethod
    def missing(self) -> list[int]:
        """The ranks that have not done it."""


class Arrival(Absence):
    """A meeting that is not complete yet."""

    __slots__ = ("meeting",)

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting

    def test(self) -> bool:
        """Whether all ranks have come."""
        return self.meeting.arrived == len(self.meeting.values)

    def missing(self) -> list[int]:
        return [r for r, value in enumerate(self.meeting.values) if value is None]


def new_world(name: str, world_size: int) -> World:
    """A world that is split from no other."""
    ranks = tuple(range(world_size))
    pretended = ShardLayout(world_size, settings.virtual_nodes())
    nodes = number_nodes([pretended.owner(rank) for rank in ranks])
    return World(name, world_size, ranks, nodes, threading.Condition(), [], [None] * world_size)


def split_worlds(
    world: World, wishes: Sequence[tuple[int | None, int]], sequence: int
) -> dict[int, World]:
    """One new world per color; its members ordered by (key, old rank)."""
    worlds: dict[int, World] = {}
    for color in sorted({c for c, _ in wishes if c is not None}):
        ranks = sorted((key, rank) for rank, (c, key) in enumerate(wishes) if c == color)
        child = World(
            f"{world.name}/{sequence}.{color}",
            len(ranks),
            tuple(world.global_ranks[rank] for _, rank in ranks),
            number_nodes([world.nodes[rank] for _, rank in ranks]),
            world.changed,
            world.failures,
            world.pages,
        )
        worlds[color] = child
        world.children.append(weakref.ref(child))
    return worlds
