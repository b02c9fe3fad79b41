"""A collective or a message under way: a generator that yields what it waits for, and its handle.

A collective is a generator: it yields whenever it needs the other ranks, and returns its result.
The blocking call drives it at once, its ``_async`` twin hands it out as a `Work`; each backend has
one implementation of each collective, whether it blocks or not.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, Protocol, Self

from mpishard.communication.contract.call import Call, Traffic
from mpishard.communication.contract.matching import of_group
from mpishard.communication.contract.records import MessageWait
from mpishard.communication.contract.status import StatusPage
from mpishard.communication.tracing.recorder import InFlight
from mpishard.errors import CommunicationError, MpishardError

__all__ = ["CollectiveWork", "Session", "Steps", "Transfer", "Waitable", "Work", "in_call"]


class Waitable(ABC):
    """Something a collective waits for: peers that have not arrived, a message under way."""

    @abstractmethod
    def test(self) -> bool:
        """Whether it has happened. Never blocks; raises if it can no longer happen."""


Steps = Generator[Waitable, None, Any]
"""A collective under way: yields what it waits for, returns its result."""


class Session:
    """The part of a rank that its root world and the groups split off it have in common.

    Used as a context manager by the thread that communicates; a second thread is refused.

    Parameters
    ----------
    rank : int
        The rank's number in the root world.
    """

    def __init__(self, rank: int) -> None:
        self.status: StatusPage | None = None
        """The rank's own page of the flight recorder; there from `initialize` on."""
        self.broken: CommunicationError | None = None
        """The error of every call after one that was cut off; None while all is well."""
        self._rank = rank
        self._lock = threading.RLock()  # held by the thread that communicates just now
        self._thread = 0  # the identity of the thread that communicated last
        self._worlds: list[weakref.ref[Any]] = []

    def __enter__(self) -> Self:
        # Without waiting: two threads of a rank would issue collectives in an order that other
        # ranks cannot know.
        if not self._lock.acquire(False):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise CommunicationError(
                f"thread {threading.current_thread().name!r} of rank {self._rank} calls a "
                f"collective or message while thread {names.get(self._thread)!r} is in one: a "
                "rank's backend and the groups split off it belong to one thread at a time. Let "
                "one thread of each rank communicate, or hand over when the first is through"
            )
        self._thread = threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def join(self, world: Any) -> None:
        """Take in ``world``, the root world or one that was split off it. Does not hold it."""
        self._worlds = [known for known in self._worlds if known() not in (None, world)]
        self._worlds.append(weakref.ref(world))

    def worlds(self) -> list[Any]:
        """The worlds of the rank that somebody holds."""
        return [world for known in self._worlds if (world := known()) is not None]

    def count_pending(self) -> int:
        """Number of collectives and messages under way, in all worlds."""
        count = 0
        for known in self._worlds:
            world = known()
            if world is not None:
                count += len(world._pending) + len(world._transfers)
        return count

    def progress(self) -> None:
        """Let all that is under way go on: other ranks may wait for it in any world."""
        for world in self.worlds():
            world.progress()


class Driver(Protocol):
    """The backend that issued a collective, and advances it."""

    traffic: Traffic
    _session: Session

    def _drive(self, work: Work) -> None: ...

    def _explain(self, error: Exception, where: str) -> Exception: ...

    def _break(self, where: str, error: BaseException) -> None: ...


class Work(ABC):
    """A collective or a message that was issued and may not be complete.

    `wait` returns the result, and may be called once or often. Arrays that were passed in must
    not be changed, and ``out`` not be read, before it returns.
    """

    def __init__(
        self, driver: Driver, steps: Steps, in_flight: InFlight | None, awaited: Call | MessageWait
    ) -> None:
        self._driver = driver
        self._steps = steps
        self.waitable: Waitable | None = None
        """The event that it waits for now; None when it is complete."""
        self.done = False
        """Whether `wait` would return at once. Does not drive it."""
        self._result: Any = None
        self._error: BaseException | None = None
        self._in_flight = in_flight  # None unless a trace is recorded
        self.awaited = awaited
        """The entry in the rank's status while the rank waits for it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in messages."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The end of the sentence "rank 1 waits .." about a rank that waits for it."""

    def advance(self) -> bool:
        """Go on as far as is possible without blocking; return whether it is complete."""
        while not self.done:
            try:
                if self.waitable is not None and not self.waitable.test():
                    return False
                self.waitable = next(self._steps)
            except StopIteration as stop:
                self.done, self._result, self.waitable = True, stop.value, None
                if self.awaited.sends:
                    self._driver.traffic.add(self.awaited.sends)
                if self._in_flight is not None:
                    self._in_flight.done(None, stop.value)
            except Exception as error:  # noqa: BLE001 - wait() raises it
                self._end(self._driver._explain(error, self.where))
            except BaseException as error:
                # Ctrl-C strikes whichever collective is advanced just then: it ends the wait.
                self._end(error)
                raise
        return True

    def wait(self) -> Any:
        """Block until it is complete and return its result.

        Raises
        ------
        CollectiveMismatchError, CommunicationError, PeerError, CollectiveTimeoutError
            As the blocking call does.
        """
        if not self.done:
            in_flight = self._in_flight
            since = 0 if in_flight is None else in_flight.now()
            with self._driver._session:
                try:
                    self._driver._drive(self)
                except MpishardError:
                    raise
                except BaseException as error:
                    self._interrupted(error)
                    raise
                finally:
                    if in_flight is not None:
                        in_flight.blocked(since)
        if self._error is not None:
            raise self._error
        return self._result

    def fail(self, error: BaseException) -> None:
        """Never go on: `wait` raises ``error``."""
        self.done, self._error, self.waitable = True, error, None

    def _end(self, error: BaseException) -> None:
        self.fail(error)
        if self._in_flight is not None:
            self._in_flight.done(error, None)
        if not isinstance(error, MpishardError):
            self._interrupted(error)

    def _interrupted(self, error: BaseException) -> None:
        """Note that ``error`` cut it off: not an error that every rank raises alike."""


class CollectiveWork(Work):
    """A collective under way."""

    awaited: Call

    @property
    def name(self) -> str:
        return _name(self.awaited)

    @property
    def where(self) -> str:
        return in_call(self.awaited)

    def _interrupted(self, error: BaseException) -> None:
        # The others went on with it, or wait in it: this rank is out of step from here on.
        self._driver._break(self.where, error)


def in_call(call: Call) -> str:
    """The place of a rank that waits in ``call``."""
    return f"in {_name(call)} called at {call.place}"


def _name(call: Call) -> str:
    of = of_group(call.group)
    return f"collective {call.sequence}, {call},{of and of + ','}"


class Transfer(Work):
    """A message under way."""

    awaited: MessageWait

    @property
    def name(self) -> str:
        message = self.awaited
        way = "send to" if message.is_send else "receive from"
        inside = f" in {message.group}," if message.group else ""
        return f"{way} rank {message.peer}, tag {message.tag},{inside}"

    @property
    def where(self) -> str:
        return str(self.awaited)

    def cancel(self) -> None:
        """Give up a receive: the message, come or not, is the next receive's. Idempotent.

        `wait` then raises `CommunicationError`. Nothing happens if it is complete.

        Raises
        ------
        ValueError
            For a send, which nobody can take back.
        """
        if self.awaited.is_send:
            raise ValueError(f"{self.name} is a send, which cannot be taken back")
        if not self.done:
            self._steps.close()
            self._end(CommunicationError(f"{self.name} was cancelled"))
