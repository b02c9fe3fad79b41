"""A collective under way: a generator that says what it waits for, and its handle.

A collective is a generator: it yields whenever it needs the other ranks, and returns its result.
The blocking call drives it at once, its ``_async`` twin hands it out as a `Work`; there is one
implementation of each collective per backend, whether it blocks or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, Protocol

from mpishard.communication.call import Call
from mpishard.communication.recorder import InFlight

__all__ = ["Steps", "Waitable", "Work"]


class Waitable(ABC):
    """Something a collective waits for: peers that have not arrived, a message under way."""

    @abstractmethod
    def test(self) -> bool:
        """Whether it has happened. Never blocks; raises where it can no longer happen."""


Steps = Generator[Waitable, None, Any]
"""A collective under way: yields what it waits for, returns its result."""


class Driver(Protocol):
    """Who advances collectives: the backend that issued them."""

    def _drive(self, work: Work) -> None: ...


class Work:
    """A collective that was issued and may not be complete.

    `wait` returns the collective's result, and may be called once or often. Arrays that were
    passed in must not be changed, and ``out`` not be read, before it returns.
    """

    def __init__(
        self, driver: Driver, steps: Steps, call: Call, in_flight: InFlight | None = None
    ) -> None:
        self.call = call
        self._driver = driver
        self._steps = steps
        self._waitable: Waitable | None = None
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._in_flight = in_flight  # where a trace is recorded

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once. Does not drive the collective."""
        return self._done

    @property
    def waitable(self) -> Waitable | None:
        """What the collective waits for now; None when it is complete."""
        return self._waitable

    def advance(self) -> bool:
        """Go on as far as is possible without blocking; return whether it is complete."""
        while not self._done:
            try:
                if self._waitable is not None and not self._waitable.test():
                    return False
                self._waitable = next(self._steps)
            except StopIteration as stop:
                self._done, self._result, self._waitable = True, stop.value, None
            except Exception as error:  # noqa: BLE001 - wait() raises it
                self._done, self._error, self._waitable = True, error, None
            except BaseException as error:
                # Ctrl-C strikes whichever collective is advanced just then: it ends the wait.
                self._done, self._error, self._waitable = True, error, None
                raise
            if self._done and self._in_flight is not None:
                self._in_flight.done(self._error)
        return True

    def wait(self) -> Any:
        """Block until the collective is complete and return its result.

        Raises
        ------
        CollectiveMismatchError, PeerError, CollectiveTimeoutError
            As the blocking collective does.
        """
        if not self._done:
            self._wait()
        if self._error is not None:
            raise self._error
        return self._result

    def _wait(self) -> None:
        in_flight = self._in_flight
        if in_flight is None:
            self._driver._drive(self)
            return
        since = in_flight.now()
        try:
            self._driver._drive(self)
        finally:
            in_flight.blocked(since)
