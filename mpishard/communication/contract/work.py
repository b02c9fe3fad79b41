"""A collective or a message under way: the generator of its steps, and its handle.

A collective is a generator that yields a `Waitable` whenever it needs other ranks, and returns its
result. The blocking call drives it to its end; the ``_async`` twin returns it as a `Work`. So each
backend has one implementation of each collective, whether it blocks or not. `ITransport` has the
generators and the other members that a backend adds to `CommunicationBackend`.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from mpishard.base import Array, CommunicationError, DType, MpishardError
from mpishard.communication.contract.call import Call, MessageWait, Traffic
from mpishard.communication.contract.status import RankRecord, StatusPage
from mpishard.communication.contract.subject import Subjects
from mpishard.communication.tracing.recorder import InFlight

if TYPE_CHECKING:
    from mpishard.communication.contract.backend import CommunicationBackend


class Waitable(ABC):
    """An event for which a collective waits: the arrival of peers, the end of a message."""

    @abstractmethod
    def test(self) -> bool:
        """Return whether the event has happened. Never block; raise if it can no longer happen."""


class Condition(Waitable):
    """An event that has happened when a function returns True."""

    __slots__ = ("_happened",)

    def __init__(self, happened: Callable[[], bool]) -> None:
        self._happened = happened

    def test(self) -> bool:
        return self._happened()


Steps = Generator[Waitable, None, Any]
"""A collective under way: yields the events for which it waits, and returns its result."""


class Session:
    """The state that a rank's root world and the groups split off it have in common.

    The thread that communicates uses it as a context manager, which refuses a second thread.

    Parameters
    ----------
    rank : int
        The rank's number in the root world.
    """

    def __init__(self, rank: int) -> None:
        self.status: StatusPage | None = None
        """The rank's own page of the flight recorder; set by `initialize`."""
        self.broken: CommunicationError | None = None
        """The error of every call after one that was cut off; None if none was."""
        self.subjects = Subjects()
        """The models that this rank has made, by the number in their collectives."""
        self._rank = rank
        # Held by the thread that communicates now. Reentrant, because `split` calls collectives.
        self._lock = threading.RLock()
        self.turn = threading.RLock()
        """Held while operations advance: by that thread, or by one that advances them for it."""
        self._thread = 0  # the identity of the thread that communicated last, for the error
        # Weak, so that a group ends when the user drops it.
        self._worlds: list[weakref.ref[CommunicationBackend]] = []

    def __enter__(self) -> Self:
        # A second thread is refused and does not wait, because two threads of a rank would issue
        # collectives in an order that differs between ranks.
        if not self._lock.acquire(False):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise CommunicationError(
                f"thread {threading.current_thread().name!r} of rank {self._rank} calls a "
                f"collective or message while thread {names.get(self._thread)!r} is in one: a "
                "rank's backend and the groups split off it belong to one thread at a time. Let "
                "one thread of each rank communicate, or hand over when the first is through"
            )
        self._thread = threading.get_ident()
        self.turn.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.turn.release()
        self._lock.release()

    def join(self, world: CommunicationBackend) -> None:
        """Register ``world``, the root world or one that was split off it, by a weak reference."""
        # Once only, because a world that begins again joins again.
        self._worlds = [known for known in self._worlds if known() not in (None, world)]
        self._worlds.append(weakref.ref(world))

    def worlds(self) -> list[CommunicationBackend]:
        """Return the worlds of the rank that are still referenced."""
        return [world for known in self._worlds if (world := known()) is not None]

    def under_way(self) -> list[Work]:
        """Return the collectives and messages under way, in all worlds."""
        works: list[Work] = []
        for known in self._worlds:  # called in each wait: faster than a comprehension of `worlds`
            world = known()
            if world is not None:
                works += world._pending
                works += world._transfers
        return works

    def progress(self) -> None:
        """Advance all operations under way, because other ranks may wait for them in any world."""
        for world in self.worlds():
            world.progress()


class Work:
    """A collective or a message that was issued and may not be complete.

    `wait` returns the result, and may be called more than once. Before it returns, do not change
    the arrays that were passed in, and do not read ``out``.
    """

    def __init__(
        self,
        driver: ITransport,
        steps: Steps,
        in_flight: InFlight | None,
        awaited: Call | MessageWait,
    ) -> None:
        self._driver = driver
        self._steps = steps
        self.waitable: Waitable | None = None
        """The event that it waits for now; None when it is complete."""
        self.done = False
        """Whether `wait` would return at once. To read this does not advance the operation."""
        self._result: Any = None
        self._error: BaseException | None = None
        self._has_raised = False
        self._in_flight = in_flight  # None unless a trace is recorded
        self.awaited = awaited
        """The entry in the rank's status while the rank waits for it."""

    @property
    def where(self) -> str:
        """The place of a rank that waits for it, to stand after "rank 1 waits"."""
        return self.awaited.where

    def advance(self) -> bool:
        """Advance as far as possible without blocking; return whether it is complete."""
        while not self.done:
            try:
                if self.waitable is not None and not self.waitable.test():
                    return False
                # Also before the first test: steps that need no other rank end without any wait.
                self.waitable = next(self._steps)
            except StopIteration as stop:
                # The flag is last, because another thread may advance it while its rank reads it.
                self._result, self.waitable = stop.value, None
                # Counted at the end and not at the issue, because a call that is refused sends no
                # data.
                if self.awaited.sends:
                    self._driver.traffic.add(self.awaited.sends)
                if self._in_flight is not None:
                    self._in_flight.done(None, stop.value)
                self.done = True
            except BaseException as error:
                cause = error
                if isinstance(error, Exception):
                    cause = self._driver._explain(error, self.where)
                self._end(cause)
                # Others may need the rest of this one before they come to what this rank waits
                # for. So only errors that leave the world whole are kept for its own wait().
                if not isinstance(cause, MpishardError):
                    self._has_raised = True
                    raise
        return True

    def wait(self) -> Any:
        """Block until it is complete and return its result.

        Raises
        ------
        CollectiveMismatchError, CommunicationError, PeerError, CollectiveTimeoutError
            As the blocking call does.
        """
        # An error that nobody has seen yet is raised itself, also if it has ended the world.
        if self._error is not None and (self._has_raised or isinstance(self._error, MpishardError)):
            self._driver._require_whole()
        if not self.done:
            in_flight = self._in_flight
            since = 0 if in_flight is None else in_flight.now()
            with self._driver._session:
                try:
                    # Another thread may have advanced it to its end meanwhile.
                    if not self.done:
                        self._driver._require_whole()
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
            self._has_raised = True
            raise self._error
        return self._result

    def wait_until_over(self) -> None:
        """Wait until it uses its arrays no more; an error that was raised is not raised again."""
        if not self._has_raised:
            self.wait()

    def fail(self, error: BaseException) -> None:
        """End the operation without a result, so that `wait` raises ``error``."""
        self._error, self.waitable = error, None
        self.done = True

    def _end(self, error: BaseException) -> None:
        if not isinstance(error, MpishardError):
            self._interrupted(error)
        if not self.done:  # else with the error of the world, which has ended
            self.fail(error)
        if self._in_flight is not None:
            self._in_flight.done(error, None)

    def _interrupted(self, error: BaseException) -> None:
        """Break the world after ``error``, which only this rank raises."""
        # The others have gone on, or wait in the collective: this rank is out of step.
        self._driver._break(self.where, error)


class Transfer(Work):
    """A message under way."""

    awaited: MessageWait

    def _end(self, error: BaseException) -> None:
        # Closed, because a receive that failed in `Waitable.test` would else block later ones.
        self._steps.close()
        super()._end(error)

    def _interrupted(self, error: BaseException) -> None:
        """Do nothing: collectives do not wait for messages, so no rank is out of step."""

    def cancel(self) -> None:
        """Give up a receive; the next receive takes the message. Idempotent.

        `wait` then raises `CommunicationError`. A receive that is complete stays complete.

        Raises
        ------
        ValueError
            For a send, which cannot be taken back.
        """
        if self.awaited.is_send:
            raise ValueError(f"{self.awaited.name} is a send, which cannot be taken back")
        if not self.done:
            self._end(CommunicationError(f"{self.awaited.name} was cancelled"))


class ITransport(ABC):
    """The interface between the collectives that users call and one way to reach other ranks.

    Members that are not abstract have a default, which a backend may replace.

    A ``_steps_`` generator yields a `Waitable` whenever it has to wait for other ranks, and returns
    the collective's result, which shares no memory with other ranks' arrays. Its arguments have
    been checked on this rank alone. So before it uses data of other ranks it passes all ranks'
    calls, in rank order, to `CommunicationBackend._verify`. It also runs in a world of one. After
    it has returned, the caller may change ``array``.
    """

    traffic: Traffic
    _session: Session

    # -------------------------------------------------------------------------- life cycle, waiting

    @abstractmethod
    def _on_initialize(self) -> None:
        """Enter the world. Also called for a world that `_steps_split` returns."""

    @abstractmethod
    def _on_shutdown(self) -> None:
        """Leave normally: notify the others, and complete the messages that were sent.

        If this is the root, the worlds that were split from it end with it.
        """

    @abstractmethod
    def _drive(self, work: Work) -> None:
        """Wait until ``work`` is done.

        Meanwhile all of this rank's collectives and messages go on (`Session.progress`), in all
        worlds of one root. So ranks may wait in different orders.

        Raises
        ------
        PeerError
            If a rank that ``work`` waits for has failed or left.
        CollectiveTimeoutError
            If one has not arrived in time.
        """

    def _explain(self, error: Exception, where: str) -> Exception:
        """Return the exception to raise for ``error`` in a wait at ``where``; here ``error``."""
        return error

    @abstractmethod
    def _break(self, where: str, error: BaseException) -> None:
        """End this world because ``error`` interrupted a collective of this rank, at ``where``."""

    def _notify_of_break(self) -> None:
        """Notify the other ranks, if `_break` has not, that the script caught the exception."""

    def _require_whole(self) -> None:
        """Raise if a call was cut off: its rank is out of step, so nothing more can complete."""
        if self._session.broken is not None:
            self._notify_of_break()
            raise self._session.broken

    def _admit(self, call: Call) -> None:
        """Refuse a collective before it is recorded, if nothing can be called any more."""

    def _records(self) -> Sequence[RankRecord]:
        """Return a record of each rank of the root world; here none, as if none could be read."""
        return ()

    # ------------------------------------------------------------------------------- collectives

    @abstractmethod
    def _steps_all_reduce(self, call: Call, array: Array, out: Array) -> Steps:
        """Combine all ranks' arrays into ``out``, which may be ``array``; return ``out``."""

    @abstractmethod
    def _steps_reduce_scatter(
        self, call: Call, array: Array, counts: tuple[int, ...], out: Array
    ) -> Steps:
        """Combine this rank's ``counts[rank]`` rows of all arrays into ``out``; return ``out``.

        ``out`` may lie in ``array``, whose other rows stay as they are. It may be float32 if
        ``array`` has 16-bit floats.
        """

    @abstractmethod
    def _steps_all_gather(self, call: Call, array: Array, out: Array | None) -> Steps:
        """Return the rows of all ranks in ``out``, or a new array; ``array`` may lie in ``out``."""

    @abstractmethod
    def _steps_broadcast(self, call: Call, array: Array | None, root: int) -> Steps:
        """Return the root's array: itself on the root, in ``array`` or a new one elsewhere."""

    @abstractmethod
    def _steps_scatter(
        self, call: Call, array: Array | None, counts: tuple[int, ...] | None, root: int
    ) -> Steps:
        """Return a new array of this rank's rows; only the root has ``array`` and ``counts``."""

    @abstractmethod
    def _steps_gather(self, call: Call, array: Array, root: int) -> Steps:
        """Return a new array of all ranks' rows on the root, None elsewhere."""

    @abstractmethod
    def _steps_all_to_all(self, call: Call, parts: Sequence[Array]) -> Steps:
        """Return a list of new arrays, one from each rank; no receiver knows their shapes."""

    @abstractmethod
    def _steps_barrier(self, call: Call) -> Steps:
        """Return when every rank has called it."""

    @abstractmethod
    def _steps_split(self, call: Call, color: int | None, key: int) -> Steps:
        """Return a backend, not initialised, for the ranks of this color by (key, rank); or None.

        ``_world_ranks`` of the backend may be set here to its `world_ranks`. Otherwise the new
        group exchanges them by one all_gather.
        """

    def _steps_allocate_shared(self, call: Call, nbytes: int) -> Steps:
        """Return zeroed bytes that this rank's node shares; here None, as if no node shared any."""
        # As collective as the real one, so that code which allocates stays in step on all ranks.
        yield from self._steps_barrier(call)
        return None

    # The collectives of an `Arena`, for backends that share memory. ``arrays`` has the part of the
    # vector of each rank of this node. Each rank's piece is that of `ShardLayout`.

    def _steps_reduce_into(self, call: Call, arrays: Mapping[int, Array], out: Array) -> Steps:
        """Combine this rank's piece of all ranks' arrays into ``out``, which may be that piece."""
        raise NotImplementedError

    def _steps_reduce_in_place(self, call: Call, arrays: Mapping[int, Array]) -> Steps:
        """Combine all ranks' arrays into each of them."""
        raise NotImplementedError

    def _steps_gather_in_place(
        self, call: Call, arrays: Mapping[int, Array], piece: Array, once_per_node: bool
    ) -> Steps:
        """Collect all ranks' pieces in every array; ``once_per_node``: a node has but one."""
        raise NotImplementedError

    @abstractmethod
    def _send(self, array: Array, destination: int, tag: int) -> None:
        """Send a copy without waiting, even if the receiver has left."""

    def _steps_send(self, array: Array, destination: int, tag: int) -> Steps:
        """Send ``array``, which is not changed before this ends; here, send a copy."""
        self._send(array, destination, tag)
        yield from ()

    @abstractmethod
    def _steps_receive(self, source: int, count: int, tag: int, dtype: DType | None) -> Steps:
        """Return the next message of (source, tag) as a new array.

        Only one such generator runs at a time for each (source, tag), in the order in which
        receives were issued. ``dtype`` is None if the caller takes any. A message stays for the
        next receive if `refuse_other_message` refuses it, or if the generator is closed.
        """
