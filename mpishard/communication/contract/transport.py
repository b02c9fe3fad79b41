"""The members that a backend adds to `CommunicationBackend`: how its calls reach other ranks.

A ``_steps_`` generator yields a `Waitable` whenever it has to wait for other ranks, and returns the
collective's result, which shares no memory with other ranks' arrays. Its arguments have been
checked on this rank alone: before it uses data of other ranks it hands all ranks' calls, in rank
order, to `CommunicationBackend._verify`. It runs for a world of one, too. After it has returned the
caller may change ``array``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.contract.call import Call, Kind
from mpishard.communication.contract.work import Steps, Work

__all__ = ["ITransport"]


class ITransport(ABC):
    """The interface between the collectives that users call and one way to reach other ranks.

    Members that are not abstract have a default, which a backend may replace.
    """

    # -------------------------------------------------------------------------- life cycle, waiting

    @abstractmethod
    def _on_initialize(self) -> None:
        """Enter the world. Also called for a world that `_steps_split` returns."""

    @abstractmethod
    def _on_shutdown(self) -> None:
        """Leave in good order: tell the others, and see that what was sent goes out.

        If this is the root, the worlds that were split from it end with it.
        """

    @abstractmethod
    def _drive(self, work: Work) -> None:
        """Wait until ``work`` is done.

        Meanwhile all of this rank's collectives and messages go on (`progress`), in all worlds
        that were split from one another, so that ranks may wait in different orders.

        Raises
        ------
        PeerError
            If a rank that ``work`` waits for has failed or left.
        CollectiveTimeoutError
            If one has not arrived in time.
        """

    def _explain(self, error: Exception, where: str) -> Exception:
        """The exception that a rank raises for ``error`` while it waits ``where``; here, itself."""
        return error

    def _tell_of_break(self) -> None:
        """Tell the other ranks, if `_break` has not: somebody caught the exception."""

    def _admit(self, kind: Kind, sequence: int) -> None:
        """Refuse a collective before it is recorded, if nothing can be called any more."""

    def _parting(self, sequence: int) -> str:
        """The collective, up to ``sequence``, at which the ranks went different ways, if known.

        Here empty: no rank knows of the others' earlier collectives.
        """
        return ""

    # ------------------------------------------------------------------------------- collectives

    @abstractmethod
    def _steps_all_reduce(self, call: Call, array: Array, out: Array) -> Steps:
        """Combine all ranks' arrays into ``out``, which may be ``array``; return ``out``."""

    @abstractmethod
    def _steps_reduce_scatter(
        self, call: Call, array: Array, counts: tuple[int, ...], out: Array
    ) -> Steps:
        """Combine into ``out`` this rank's ``counts[rank]`` rows; return ``out``.

        ``out`` may lie in ``array``, whose other rows stay as they are; of 16-bit floats it may be
        float32.
        """

    @abstractmethod
    def _steps_all_gather(self, call: Call, array: Array, out: Array | None) -> Steps:
        """All ranks' rows in ``out``, in any part of which ``array`` may lie, or a new array."""

    @abstractmethod
    def _steps_broadcast(self, call: Call, array: Array | None, root: int) -> Steps:
        """The root's array: itself there, elsewhere in ``array`` or a new one."""

    @abstractmethod
    def _steps_scatter(
        self, call: Call, array: Array | None, counts: tuple[int, ...] | None, root: int
    ) -> Steps:
        """A new array of this rank's rows; ``counts`` is None on all ranks but the root."""

    @abstractmethod
    def _steps_gather(self, call: Call, array: Array, root: int) -> Steps:
        """All ranks' rows, a new array, on the root; None elsewhere."""

    @abstractmethod
    def _steps_all_to_all(self, call: Call, parts: Sequence[Array]) -> Steps:
        """A list of new arrays, one from each rank, whose shapes this rank does not know."""

    @abstractmethod
    def _steps_barrier(self, call: Call) -> Steps:
        """End when every rank has called it."""

    @abstractmethod
    def _steps_split(self, call: Call, color: int | None, key: int) -> Steps:
        """A backend for the ranks of this color, by (key, rank), not initialised; or None.

        Its ``_world_ranks`` may be set here, to what `world_ranks` will be; otherwise the new
        group exchanges them, by one all_gather.
        """

    def _steps_allocate_shared(self, call: Call, nbytes: int) -> Steps:
        """Zeroed bytes that this rank's node shares; or None, as here: no node shares any."""
        yield from self._steps_barrier(call)
        return None

    @abstractmethod
    def _send(self, array: Array, destination: int, tag: int) -> None:
        """Send a copy; do not wait, not even if the receiver has left."""

    def _steps_send(self, array: Array, destination: int, tag: int) -> Steps:
        """Send ``array``, which stays as it is until this ends; here, a copy of it."""
        self._send(array, destination, tag)
        yield from ()

    @abstractmethod
    def _steps_receive(
        self, source: int, count: int, tag: int, dtype: np.dtype[Any] | None
    ) -> Steps:
        """Take the next message that no earlier receive of (source, tag) takes; a new array.

        ``dtype`` is None if the caller takes any. A message that `refuse_other_message` refuses
        stays for the next receive, and so does the place in line if the generator is closed.
        """
