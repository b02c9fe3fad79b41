"""The last collectives of a rank, with the lines and the functions that called them."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from mpishard import settings
from mpishard.communication.contract.call import Call
from mpishard.communication.contract.call_file import LoggedCall, MessageWait, RankState
from mpishard.communication.contract.rank_record import RankRecord

__all__ = ["CallLog", "Journal"]

_PLACES_KEPT = 1024

_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
_CONTEXTLIB = contextlib.contextmanager.__code__.co_filename
# Frames that are not the user's: this package's, and those of the context managers in it.
_NOT_OF_USERS = (_PACKAGE, _CONTEXTLIB)


class Journal:
    """What one rank says of itself in all its worlds; its peers in this process may read it."""

    def __init__(self) -> None:
        self.state = RankState.STARTED
        self._calls: deque[tuple[int, Call, str, float]] = deque(maxlen=settings.CALL_LOG_LENGTH)
        self._count = 0
        self.awaited: Call | MessageWait | None = None
        """What the rank waits for."""
        self._since = 0.0

    def place(self, call: Call, group: str) -> Any:
        """What `record` takes of a call made where ``call`` was, on the world ``group``.

        That is what reports call the world. Worth keeping for the next time.
        """
        return group

    def record(self, call: Call, place: Any) -> None:
        """Write down ``call``, made at ``place``, and number it."""
        self._count = call.number = self._count + 1
        self._calls.append((call.number, call, place, time.time()))

    def wait(self, what: Call | MessageWait) -> None:
        """Say what the rank waits for from now on. A wait that is over soon need not be told."""
        self.awaited, self._since = what, time.time()

    def go_on(self) -> None:
        """Say that the wait is over."""
        self.awaited = None

    def end(self, state: RankState) -> None:
        """Say how the rank stands now."""
        self.state = state

    @property
    def last(self) -> LoggedCall | None:
        """Its last collective, in whichever world."""
        return LoggedCall(*self._calls[-1]) if self._calls else None

    def record_of(self, rank: int, now: float) -> RankRecord:
        """What a diagnosis takes."""
        waits, since = self.awaited, self._since
        calls = tuple(LoggedCall(*entry) for entry in tuple(self._calls))
        return RankRecord(
            rank,
            self.state,
            calls=calls,
            waits=next((c for c in calls if c.call is waits), None)
            if isinstance(waits, Call)
            else waits,
            waited=0.0 if waits is None else max(0.0, now - since),
        )


class CallLog:
    """The last collectives of one rank on one world, newest last.

    Parameters
    ----------
    journal : Journal
        What the rank says of itself, in all its worlds.
    group : str
        What reports call this world; empty for a root world.
    """

    def __init__(self, journal: Journal, group: str = "") -> None:
        self.journal = journal
        self.group = group
        self._calls: deque[Call] = deque(maxlen=settings.CALL_LOG_LENGTH)
        self._places: dict[object, tuple[object, str, int, str, Any]] = {}

    def __iter__(self) -> Iterator[Call]:
        return iter(tuple(self._calls))

    def __len__(self) -> int:
        return len(self._calls)

    def record(self, call: Call, frame: FrameType | None) -> None:
        """Append ``call``, placed at the nearest frame of the user's code.

        Its ``method`` is the function of this package that is called there, if that is not the
        collective itself.
        """
        called: FrameType | None = None
        while frame is not None:
            filename = frame.f_code.co_filename
            if not filename.startswith(_NOT_OF_USERS):
                break
            if filename != _CONTEXTLIB:
                called = frame
            frame = frame.f_back
        if frame is not None:
            # To count lines takes long; the codes are kept, so that their ids stay their own.
            code = frame.f_code
            inner = None if called is None else called.f_code
            key = id(code), frame.f_lasti, id(inner), self.group
            place = self._places.get(key)
            if place is None:
                if len(self._places) == _PLACES_KEPT:
                    self._places.clear()
                call.filename, call.line = code.co_filename, frame.f_lineno
                call.method = "" if called is None else _method(called)
                written = self.journal.place(call, self.group)
                place = (code, inner), call.filename, call.line, call.method, written
                self._places[key] = place
            _, call.filename, call.line, call.method, written = place
        else:
            written = self.journal.place(call, self.group)
        self._calls.append(call)
        self.journal.record(call, written)

    def tail(self, count: int = 3) -> str:
        """The last ``count`` calls, one a line."""
        calls = list(self._calls)[-count:]
        return "\n".join(f"    {c.sequence}: {c} at {c.place}" for c in calls) or "    none"


def _method(frame: FrameType) -> str:
    """What a user calls the function of ``frame``; empty for the collectives themselves.

    Of a method the class is that of the object, and not the base class in which it is written.
    """
    code: CodeType = frame.f_code
    name = code.co_qualname.partition(".<")[0]
    owner = frame.f_locals.get("self") if "self" in code.co_varnames else None
    module = str(frame.f_globals.get("__name__", "")).split(".")
    if isinstance(getattr(owner, "call_log", None), CallLog) or "testing" in module[:2]:
        return ""  # a backend; a test suite, which calls collectives as users do
    if owner is not None and "." in name:
        kind, method = type(owner).__name__, name.rpartition(".")[2]
        return kind if method == "__init__" else f"{kind}.{method}"
    room = f"{module[1]}." if len(module) > 2 and "." not in name else ""
    return room + name
