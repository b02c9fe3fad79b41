"""Messages from one rank to another, as every backend gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpishard.arguments import as_integer
from mpishard.arrays import Array
from mpishard.communication.contract.arguments import check_array, check_peer
from mpishard.communication.contract.call import DTYPES
from mpishard.communication.contract.transport import Transport
from mpishard.communication.contract.work import Transfer
from mpishard.communication.tracing.recorder import MessageInFlight, current_recorder
from mpishard.errors import CommunicationError

__all__ = ["PointToPoint", "refuse_other_message"]


class PointToPoint(Transport):
    """Messages, in order for each (pair of ranks, tag), whichever way they are sent and taken."""

    def send(self, array: Array, destination_rank: int, tag: int = 0) -> None:
        """Send a copy of ``array``; returns without waiting for the receiver.

        Messages arrive in order for each (pair of ranks, tag).

        Raises
        ------
        ValueError
            For a rank outside the world or this one, or a negative tag.
        """
        self._check_send(array, destination_rank, tag, "send")
        in_flight = self._record_message(self.rank, destination_rank, tag, array)
        self._enter()
        try:
            self._send(array, destination_rank, tag)
        finally:
            self._leave()
        if in_flight is not None:
            in_flight.done()
            in_flight.blocked(in_flight.start)

    def send_async(self, array: Array, destination_rank: int, tag: int = 0) -> Transfer:
        """As `send`, without a copy where the transport can do without.

        ``array`` must not be changed before ``wait`` of what this returns has returned. That may
        be when the receiver has taken the message: two ranks that each wait for a send to the
        other before they receive may wait for ever.

        Raises
        ------
        ValueError
            As `send`.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> def shift(b):
        ...     right, left = (b.rank + 1) % b.world_size, (b.rank - 1) % b.world_size
        ...     coming = b.receive_async(left, 2, dtype=np.int64)
        ...     going = b.send_async(np.array([b.rank, 10 * b.rank]), right)
        ...     got = coming.wait().tolist()
        ...     going.wait()
        ...     return got
        >>> run_in_threads(3, shift)
        [[2, 20], [0, 0], [1, 10]]
        """
        self._check_send(array, destination_rank, tag, "send_async")
        in_flight = self._record_message(self.rank, destination_rank, tag, array)
        steps = self._steps_send(array, destination_rank, tag)
        return self._begin(
            Transfer(self, steps, destination_rank, tag, is_send=True, in_flight=in_flight)
        )

    def receive(self, source_rank: int, count: int, tag: int = 0) -> Array:
        """Wait for the next message of ``source_rank`` with ``tag`` and return it.

        Parameters
        ----------
        source_rank : int
            The sender.
        count : int
            Number of elements expected.
        tag : int
            The sender's tag.

        Returns
        -------
        Array
            The message, in the shape it was sent; a new array.

        Raises
        ------
        ValueError
            For a rank outside the world or this one, a negative tag or count.
        CommunicationError
            Where the message has another number of elements; it then stays queued.
        """
        self._check_receive(source_rank, count, tag)
        transfer = self._begin_receive(source_rank, count, tag, None)
        try:
            return transfer.wait()
        except BaseException:
            transfer.cancel()  # nobody holds it, and what comes later is not for it
            raise

    def receive_async(
        self, source_rank: int, count: int, tag: int = 0, *, dtype: DTypeLike
    ) -> Transfer:
        """As `receive`, issued and not waited for, so that the message may come meanwhile.

        Receives of one (source, tag) take messages in the order in which they were issued, and
        in whichever order they are waited for. Their memory is set aside at once.

        Parameters
        ----------
        source_rank, count, tag : int
            As `receive`.
        dtype : dtype
            Of the message: the transport may be told where to put it before it comes.

        Returns
        -------
        Transfer
            ``wait`` gives the message, a new array in the shape it was sent; ``cancel`` gives
            it up.

        Raises
        ------
        ValueError
            As `receive`, and for a dtype that does not travel.
        CommunicationError
            By ``wait``, where the message has another dtype or number of elements. It then stays
            queued; if it is longer than expected, MPI may have lost it.
        """
        self._check_receive(source_rank, count, tag)
        expected = np.dtype(dtype)
        if expected not in DTYPES:
            raise ValueError(f"receive_async cannot take dtype {expected.name}")
        return self._begin_receive(source_rank, count, tag, expected)

    def _begin_receive(
        self, source: int, count: int, tag: int, dtype: np.dtype[Any] | None
    ) -> Transfer:
        in_flight = self._record_message(source, self.rank, tag)
        steps = self._steps_receive(source, count, tag, dtype)
        return self._begin(Transfer(self, steps, source, tag, is_send=False, in_flight=in_flight))

    def _record_message(
        self, source: int, destination: int, tag: int, sent: Array | None = None
    ) -> MessageInFlight | None:
        """What a message is recorded with from now on; None where no trace is."""
        recorder = current_recorder.get()
        if recorder is None:
            return None
        way = {"group": self.group, "source": source, "destination": destination, "tag": tag}
        return MessageInFlight(recorder, way | ({"axis": self.axis} if self.axis else {}), sent)

    def begin_round(self) -> int:
        """The number, from 0, of a round of messages that is told from others by its tags.

        Whoever runs rounds of messages that may fail halfway takes one for each, on all ranks
        alike. What a failed round left behind is then not taken for the next one's.
        """
        self._rounds += 1
        return self._rounds - 1

    def _check_send(self, array: Array, destination: int, tag: int, name: str) -> None:
        self._ready()
        check_array(array, name)
        check_peer(destination, tag, self.rank, self.world_size)
        self.traffic.count("send", array.nbytes)

    def _check_receive(self, source: int, count: int, tag: int) -> None:
        self._ready()
        check_peer(source, tag, self.rank, self.world_size)
        if as_integer("count", count) < 0:
            raise ValueError(f"count must be 0 or more, got {count}")


def refuse_other_message(
    size: int,
    dtype: np.dtype[Any],
    expected_size: int,
    expected_dtype: np.dtype[Any] | None,
    source: int,
    tag: int,
) -> None:
    """Refuse a message that is not the one expected.

    ``source`` is what the error calls the sender: its number in the root world.

    Raises
    ------
    CommunicationError
        Naming both.
    """
    if size != expected_size or expected_dtype not in (None, dtype):
        of, expected_of = "", ""
        if expected_dtype is not None:
            of, expected_of = f" of {dtype.name}", f" of {expected_dtype.name}"
        raise CommunicationError(
            f"the next message with tag {tag} from rank {source} has {size} elements{of}, "
            f"{expected_size}{expected_of} were expected; it stays queued"
        )
