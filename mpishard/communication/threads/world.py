"""The state that the thread-ranks of a world share, guarded by one lock.

A collective in memory is a chain of *rendezvous*. At a rendezvous each rank leaves a value, and
goes on when all have arrived. Each rank sleeps on a condition variable of its own, so that the
members of one group do not wake the ranks of others.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpishard.base import (
    Array,
    CollectiveTimeoutError,
    CommunicationError,
    PeerError,
    ShardLayout,
    beside,
    settings,
    synchronize,
)
from mpishard.communication.contract.arena import number_nodes
from mpishard.communication.contract.backoff import READ_EVERY, RunningClock
from mpishard.communication.contract.status import RankRecord, StatusPage
from mpishard.communication.contract.work import Waitable
from mpishard.communication.failure.report import short_traceback

if TYPE_CHECKING:
    from mpishard.communication.threads.backend import InMemoryCommunicationBackend

NO_RANK = -1
"""The rank of a failure in a thread that is no rank."""

# Marks a rank that has not arrived. None is a value that a rank may leave at a rendezvous.
_ABSENT = object()
# Numbers the worlds that replace worlds with lost ranks, so that no two have one name.
_losses = itertools.count()


@dataclass(slots=True, eq=False)
class Rendezvous(Waitable):
    """A point that all ranks pass, with the value that each leaves there. `test` needs no lock."""

    values: list[object]
    arrived: int = 0

    def test(self) -> bool:
        """Return whether all ranks have arrived."""
        return self.arrived == len(self.values)

    def missing(self) -> list[int]:
        """Return the ranks that have not arrived yet."""
        return [rank for rank, value in enumerate(self.values) if value is _ABSENT]


@dataclass(slots=True, eq=False)
class Message(Waitable):
    """A message on its way. Its sender may wait until the receiver has copied it.

    Parameters
    ----------
    array : Array
        The content.
    is_copy : bool
        Whether the array is a copy for the receiver. The sender's own array is copied by `open`.
    """

    array: Array
    is_copy: bool
    is_taken: bool = False

    def test(self) -> bool:
        """Return whether the receiver has copied the message."""
        return self.is_taken

    def open(self) -> Array:
        """Return the content as an array of the receiver's own."""
        content = beside(self.array, self.array)  # a copy if it lies on another thread's GPU
        if content is self.array and self.is_copy:
            return content
        content = content.copy() if content is self.array else content
        synchronize(content)  # the sender may change its array after this
        return content


@dataclass(slots=True)
class Failure:
    """The reason why a world has ended.

    Parameters
    ----------
    rank : int
        The origin's number in the root world.
    message : str
        The reason, for the errors of the ranks.
    kind : type
        `PeerError` if the rank failed; `CollectiveTimeoutError` if another waited for it too long;
        `CommunicationError` if it was interrupted inside a collective and goes on.
    """

    rank: int
    message: str
    kind: type[CommunicationError] = PeerError

    def error(self, what: str, me: int) -> CommunicationError:
        """Return the error of rank ``me``; ``what`` is the consequence: "barrier cannot end"."""
        text = f"{what}: {self.message}"
        is_for_all = self.kind is CollectiveTimeoutError
        is_own = self.kind is CommunicationError and me == self.rank
        return self.kind(text) if is_for_all or is_own else PeerError(text, self.rank)


@dataclass(slots=True, eq=False)
class World:
    """The state that the thread-ranks of one world share. Every field is guarded by ``lock``.

    Attributes
    ----------
    name : str
        The environment id, and for a group the collectives that split it off.
    global_ranks : tuple of int
        The number in the root world of each rank of this world.
    nodes : tuple of int
        The number of the node of each rank.
    pages : list of StatusPage or None
        The status page of each rank of the root world. This field and ``lock``, ``conditions``,
        ``clock`` and ``failures`` belong to all worlds of one root: a failure in one of them wakes
        every rank, and a report shows the activity of each rank in all of them.
    lock : RLock
        Guards every field.
    conditions : list of Condition
        A condition variable of ``lock`` for each rank of the root world.
    clock : RunningClock
        The clock of time limits.
    failures : list of Failure
        The reasons why the worlds have ended, the first one first.
    rendezvous : dict
        Those that some ranks have not reached, by (collective, phase).
    messages : dict
        Messages that were not received yet, by (sender, receiver, tag), oldest first.
    members : dict of int to backend
        The backend of each rank that has entered this world and not left it.
    left : dict of int to int
        The last collective of each rank that has left.
    lost : set of int
        The ranks that failed.
    survivors : set of int
        The ranks that wait in `shrink`.
    successor_ranks : tuple of int
        The ranks of the world that replaces this one, once all survivors have called `shrink`.
    successor_name : str
        The name of that world.
    """

    name: str
    global_ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    pages: list[StatusPage | None]
    lock: threading.RLock
    conditions: list[threading.Condition]
    clock: RunningClock = field(default_factory=RunningClock)
    failures: list[Failure] = field(default_factory=list)
    rendezvous: dict[tuple[int, int], Rendezvous] = field(default_factory=dict)
    messages: dict[tuple[int, int, int], deque[Message]] = field(default_factory=dict)
    members: dict[int, InMemoryCommunicationBackend] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    survivors: set[int] = field(default_factory=set)
    successor_ranks: tuple[int, ...] = ()
    successor_name: str = ""

    @classmethod
    def root(cls, name: str, world_size: int) -> World:
        """Return a new world that was split off no other."""
        pretended = ShardLayout(world_size, settings.virtual_nodes())
        nodes = number_nodes([pretended.owner(rank) for rank in range(world_size)])
        lock = threading.RLock()
        conditions = [threading.Condition(lock) for _ in range(world_size)]
        return cls(name, tuple(range(world_size)), nodes, [None] * world_size, lock, conditions)

    def split(self, choices: Sequence[tuple[int | None, int]], sequence: int) -> dict[int, World]:
        """Return a new world for each color, by color; its ranks are ordered by (key, old rank).

        ``choices`` has the color and key of each rank.
        """
        shared = self.pages, self.lock, self.conditions, self.clock, self.failures
        worlds: dict[int, World] = {}
        for color in {color for color, _ in choices if color is not None}:
            # Equal keys keep the order of the old ranks, as in MPI.
            order = sorted((key, rank) for rank, (c, key) in enumerate(choices) if c == color)
            ranks = tuple(self.global_ranks[rank] for _, rank in order)
            nodes = number_nodes([self.nodes[rank] for _, rank in order])
            worlds[color] = World(f"{self.name}/{sequence}.{color}", ranks, nodes, *shared)
        return worlds

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.global_ranks)

    def meet(self, sequence: int, phase: int, rank: int, value: object) -> Rendezvous:
        """Leave the value of ``rank`` at a rendezvous.

        A rendezvous is identified by (collective, phase) and not by a running number, because ranks
        may issue the next collective before or after they finish this one.
        """
        key = sequence, phase
        with self.lock:
            rendezvous = self.rendezvous.get(key)
            if rendezvous is None:
                rendezvous = self.rendezvous[key] = Rendezvous([_ABSENT] * self.world_size)
            rendezvous.values[rank] = value
            rendezvous.arrived += 1
            if rendezvous.arrived == self.world_size:
                # Removed when complete: each rank keeps a reference until it has read the values.
                del self.rendezvous[key]
                self.wake(range(self.world_size))
        return rendezvous

    def wait(self, rank: int, deadline: float) -> bool:
        """Wait until ``rank`` is woken, or a short time; return False after ``deadline``.

        Needs the lock. ``deadline`` is a reading of ``clock``, which must be read every
        `READ_EVERY` seconds.
        """
        left = deadline - self.clock.now()
        if left > 0:
            self.conditions[self.global_ranks[rank]].wait(min(left, READ_EVERY))
        return left > 0

    def wake(self, ranks: Iterable[int]) -> None:
        """Wake the threads of ``ranks`` that wait in this world or in another. Needs the lock."""
        for rank in ranks:
            self.conditions[self.global_ranks[rank]].notify_all()

    def wake_all(self) -> None:
        """Wake every rank of the root world. Needs the lock."""
        for condition in self.conditions:
            condition.notify_all()

    def fail(self, rank: int, who: str, after: str, error: BaseException) -> None:
        """End the world on every rank, because ``who``, which is ``rank``, raised ``error``.

        An error that ``who`` raised because of another rank is the failure of that rank.
        """
        if isinstance(error, PeerError):
            self.end(Failure(error.rank, str(error)))
        else:
            text = f"{who} failed {after}with {type(error).__name__}: {error}"
            trace = f"--- traceback of {who} ---\n{short_traceback(error)}"
            self.end(Failure(rank, f"{text}\n{trace}"))

    def end(self, failure: Failure) -> None:
        """Notify every rank that this world and all worlds of the same root have ended."""
        with self.lock:
            self.failures.append(failure)
            self.wake_all()

    def absent(self) -> set[int]:
        """Return the ranks that have not failed, left or called `shrink`. Needs the lock."""
        return set(range(self.world_size)) - self.survivors - self.lost - self.left.keys()

    def survive(self, rank: int) -> None:
        """Record that ``rank`` waits for the next world, and wake all ranks. Needs the lock."""
        if not self.failures:
            # A rank that left is the likely reason; otherwise no rank is to blame.
            origin = min(self.left, default=NO_RANK)
            why = f"rank {origin} left, and " if self.left else ""
            text = f"{why}rank {rank} goes on without this world: it called shrink()"
            self.failures.append(Failure(origin, text))
        self.survivors.add(rank)
        self.wake_all()

    def has_successor(self) -> bool:
        """Return whether all remaining ranks wait for the next world; then set its ranks.

        Needs the lock.
        """
        if not self.successor_ranks and not self.absent():
            self.successor_ranks = tuple(sorted(self.survivors))
            self.successor_name = f"{self.name}, after loss {next(_losses)}"
        return bool(self.successor_ranks)

    def records(self) -> list[RankRecord]:
        """Return one record of each rank of the root world. Needs no lock."""
        return [page.read() if page else RankRecord(rank) for rank, page in enumerate(self.pages)]
