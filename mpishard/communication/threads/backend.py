"""Threads of one process as ranks: every rank reads its peers' arrays in place.

How a rank enters a world, waits in it and leaves it; `MemoryCollectives` is what it does there.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import NoReturn, Self

from mpishard import settings
from mpishard.communication.contract.call import Call, Kind
from mpishard.communication.contract.status import RankState
from mpishard.communication.contract.work import CollectiveWork, Steps, Work
from mpishard.communication.diagnostics.stall import describe_departure, describe_stall, parting
from mpishard.communication.threads.collectives import MemoryCollectives
from mpishard.communication.threads.world import Absence, Failure, World, new_world, split_worlds
from mpishard.communication.tracing.session import stop_recording
from mpishard.errors import CollectiveTimeoutError, CommunicationError, PeerError

__all__ = ["InMemoryCommunicationBackend"]


_environments: dict[str, list[World]] = {}
"""The worlds that meet under an id, oldest first: one, until a rank that has left comes again."""
_environments_lock = threading.Lock()


class InMemoryCommunicationBackend(MemoryCollectives):
    """One thread as one rank of a world that lives in this process.

    Parameters
    ----------
    rank : int
        This rank, in ``[0, world_size)``.
    world_size : int
        Number of ranks, 1 or more.
    environment_id : str
        Backends of one id meet. `run_in_threads` makes ids of its own.
    timeout : float
        Seconds to wait for the others before `CollectiveTimeoutError`; 0 is for ever.

    Raises
    ------
    TypeError
        For an id that is no string.
    ValueError
        For a rank outside the world, a world below 1, or a blank id.
    """

    _rank_is_process = False

    def __init__(
        self,
        rank: int,
        world_size: int,
        environment_id: str = "default",
        *,
        timeout: float = settings.MEMORY_TIMEOUT,
    ) -> None:
        super().__init__()
        if world_size < 1:
            raise ValueError(f"world_size must be 1 or more, got {world_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside [0, {world_size})")
        if not isinstance(environment_id, str):
            raise TypeError(f"environment_id must be a string, got {environment_id!r}")
        if not environment_id.strip():
            raise ValueError(f"environment_id must not be blank, got {environment_id!r}")
        self._rank = rank
        self._world_size = world_size
        self._environment_id = environment_id
        self._timeout = timeout
        self._world: World | None = None
        # This rank's backends: its peers may wait for it in any of them.
        self._family: weakref.WeakSet[InMemoryCommunicationBackend] = weakref.WeakSet((self,))

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def nodes(self) -> tuple[int, ...]:
        return self._joined().nodes

    @staticmethod
    def clear_environment(environment_id: str) -> None:
        """Forget an environment, so that its id can be used for a new world."""
        with _environments_lock:
            _environments.pop(environment_id, None)

    # ------------------------------------------------------------------------------- life cycle

    def _on_initialize(self) -> None:
        if not self._is_root:
            assert self._world is not None
            self._enter(self._world)
            return
        with _environments_lock:
            world = self._next_world()
            self._enter(world)
        if self._world is not None:  # what was under way there is of no world any more
            self._sequence = 0
            self._pending.clear()
            self._transfers.clear()
            self._lines.clear()
            self._family = weakref.WeakSet((self,))
        world.pages[self._rank] = self.status
        self._world = world

    def _next_world(self) -> World:
        """The oldest world of the environment that this rank has not entered yet.

        A world ends for a rank with its shutdown. Called with the environments' lock.
        """
        worlds = _environments.setdefault(self._environment_id, [])
        if worlds and worlds[0].world_size != self._world_size:
            raise ValueError(
                f"environment {self._environment_id!r} has {worlds[0].world_size} ranks, "
                f"this backend was made for {self._world_size}"
            )
        if any(self._rank in world.members for world in worlds):
            raise CommunicationError(
                f"rank {self._rank} of environment {self._environment_id!r} is taken; use "
                "another environment_id, or clear_environment() after a finished run"
            )
        for world in worlds:
            if self._rank not in world.left:
                return world
        worlds.append(new_world(self._environment_id, self._world_size))
        return worlds[-1]

    def _enter(self, world: World) -> None:
        with world.changed:
            world.members[self._rank] = self
            world.left.pop(self._rank, None)

    def _on_shutdown(self) -> None:
        world = self._joined()
        with world.changed:
            self._leave(world)
            world.changed.notify_all()
        if len(world.left) == world.world_size:
            _forget(self._environment_id, world)

    def _leave(self, world: World) -> None:
        """Mark this rank as gone, here and in every world split from this one."""
        world.members.pop(self._rank, None)
        world.left[self._rank] = self._sequence
        me = world.global_ranks[self._rank]
        for reference in world.children:
            child = reference()
            if child is not None and me in child.global_ranks:
                local = child.global_ranks.index(me)
                member = child.members.get(local)
                if member is not None:
                    member._leave(child)
                    member._initialized = False

    def abort(self, error: BaseException) -> None:
        """Make every other rank's present or next collective raise `PeerError`."""
        stop_recording(self, error)
        world = self._joined()
        self.status.end(RankState.REPORTED)
        with world.changed:
            world.lost.add(self._rank)
        world.fail(self._rank, error, self.status.last)

    def _shrink(self) -> Self:
        world = self._joined()
        deadline = time.monotonic() + self._timeout if self._timeout else None
        with world.changed:
            while not world.survive(self._rank):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    away = sorted(world.absent_survivors())
                    world.survivors.discard(self._rank)
                    raise CollectiveTimeoutError(
                        f"rank {self._rank} waited {self._timeout:g} s in shrink() for ranks "
                        f"{away}, which neither failed nor left: every rank that is left calls it"
                    )
                world.changed.wait(left)
            heirs = world.heirs
        _forget(self._environment_id, world)
        heir = type(self)(
            heirs.index(self._rank), len(heirs), world.heir_name, timeout=self._timeout
        )
        stop_recording(self, world.failures[0].error("the world was given up"))
        for member in tuple(self._family):
            member._retire(heir)
        heir.initialize()
        return heir

    def _joined(self) -> World:
        self._ready()
        assert self._world is not None
        return self._world

    # --------------------------------------------------------------------------------- waiting

    def _drive(self, work: Work) -> None:
        world = self._joined()
        deadline = time.monotonic() + self._timeout if self._timeout else None
        has_waited = False
        try:
            while True:
                for backend in tuple(self._family):
                    backend.progress()
                if work.done:
                    return
                with world.changed:
                    if not self._anything_ready():
                        self._raise_if_hopeless(work)
                        left = None if deadline is None else deadline - time.monotonic()
                        if left is not None and left <= 0:
                            self._give_up(work)
                        if not has_waited:
                            has_waited = True
                            self.status.wait(work.awaited)
                        world.changed.wait(left)
        finally:
            if has_waited:
                self.status.go_on()

    def _anything_ready(self) -> bool:
        return any(
            pending.waitable is not None and pending.waitable.test()
            for backend in tuple(self._family)
            for pending in (*backend._pending, *backend._transfers)
        )

    def _raise_if_hopeless(self, work: Work) -> None:
        """Raise where a rank that ``work`` waits for failed or left. Called with the lock."""
        world = self._joined()
        if world.failures:
            raise world.failures[0].error(f"{work.name} cannot complete")
        absence = work.waitable
        assert isinstance(absence, Absence)
        for local in absence.missing():
            if local in world.left:
                rank, me = world.global_ranks[local], world.global_ranks[self._rank]
                text = describe_departure(
                    rank, world.left[local], self.label, me, work.awaited, world.records()
                )
                raise PeerError(text, rank)

    def _give_up(self, work: Work) -> NoReturn:
        """Raise because ``work`` takes too long. Called with the lock."""
        world = self._joined()
        absence = work.waitable
        assert isinstance(absence, Absence)
        missing = [world.global_ranks[local] for local in absence.missing()]
        me = world.global_ranks[self._rank]
        text = (
            f"rank {me} waited {self._timeout:g} s {work.where}; ranks {missing} did not arrive. "
            f"{describe_stall(world.records())}"
        )
        if isinstance(work, CollectiveWork):
            # The ranks are out of step from here on. Who has waited nearly as long hears it now,
            # and who comes late when it comes; a message may still be received another time.
            world.failures.append(Failure(missing[0], text, is_timeout=True))
            world.changed.notify_all()
        raise CollectiveTimeoutError(text)

    def _parting(self, sequence: int) -> str:
        return parting(self._joined().records(), self.label, upto=sequence)

    def _admit(self, kind: Kind, sequence: int) -> None:
        world = self._joined()
        if world.failures:
            # It need not wait for the rank that failed: that may go on, after abort().
            raise world.failures[0].error(f"{kind.label} is called after a failure")

    def _steps_split(self, call: Call, color: int | None, key: int) -> Steps:
        wishes = yield from self._open(call, (color, key))
        world = self._joined()
        member: InMemoryCommunicationBackend | None = None
        worlds: dict[int, World] | None = None
        if self._rank == 0:
            worlds = split_worlds(world, wishes, call.sequence)
        shared = yield from self._exchange(call, worlds)
        if color is not None:
            child = shared[0][color]
            local = child.global_ranks.index(world.global_ranks[self._rank])
            member = InMemoryCommunicationBackend(
                local, child.world_size, child.name, timeout=self._timeout
            )
            member._world = child
            member._world_ranks = child.global_ranks
            member._family = self._family
            self._family.add(member)
        return member


def _forget(environment_id: str, world: World) -> None:
    """Let ranks that come to the environment from now on not meet in ``world``."""
    with _environments_lock:
        worlds = _environments.get(environment_id, [])
        if world in worlds:
            worlds.remove(world)
        if not worlds:
            _environments.pop(environment_id, None)
