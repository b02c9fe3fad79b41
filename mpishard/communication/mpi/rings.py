"""Headers through memory that a node's ranks share: a few stores and loads in place of messages.

Each rank of a node owns some *rings* of that memory, which it alone writes. A group whose ranks
share it takes one ring of each: its *mailbox*. The number n of an exchange is the same on all
ranks, and its row stands in slot ``n % SLOTS`` of each ring. Its *mark*, written last, is n; a
slot is written again when every other rank has written that it has read it. Numbers of a ring only
ever grow, from one group to the next, so that nothing that is left of a former group can be taken
for news.

It needs that stores are seen in the order in which they are made: x86-64. Where ranks are on
several nodes, share no memory, or have no ring left, headers are messages.
"""

from __future__ import annotations

import platform
import struct
from collections import deque
from collections.abc import Sequence

from mpishard.arrays import Array
from mpishard.communication.contract.backoff import yield_processor
from mpishard.communication.contract.call import HEADER_BYTES
from mpishard.communication.contract.work import Waitable
from mpishard.communication.mpi.headers import INLINE_BYTES, ROW_BYTES
from mpishard.communication.mpi.lanes import Condition

__all__ = ["NO_RING", "SLOTS", "Letter", "Mailbox", "PostOffice", "Ring", "stores_are_ordered"]

SLOTS = 32
"""Headers that a rank can be ahead of the slowest before it waits for room."""

_RINGS = 32
_LINE = 64  # bytes that cores hand to each other
# Of a ring: the last number read; the last fence come to; the rows.
_FENCE = _LINE
_ROWS = _FENCE + _LINE
# Of a row: header, mark, payload.
_MARK = HEADER_BYTES
_PAYLOAD = _MARK + 8
_STRIDE = -(-(_PAYLOAD + INLINE_BYTES) // _LINE) * _LINE
_RING_BYTES = _ROWS + SLOTS * _STRIDE
# The mark is 0 while the row is written.
_ROW = struct.Struct(f"q{HEADER_BYTES - 8}s8x{INLINE_BYTES}s")


def stores_are_ordered() -> bool:
    """Whether other cores see this one's stores in their order."""
    return platform.machine() in ("x86_64", "AMD64")


Ring = tuple[int, int]
"""A ring's place in the memory of its node, and the last number that it has seen."""

NO_RING: Ring = (-1, 0)


class PostOffice:
    """The rings of one rank, in memory that its node shares.

    Parameters
    ----------
    memory : Array
        Zeroed, of `nbytes` bytes; dtype uint8.
    local_rank : int
        This rank's number on the node.
    """

    def __init__(self, memory: Array, local_rank: int) -> None:
        self.memory = memory
        first = local_rank * _RINGS
        self._free: list[Ring] = [(ring, 0) for ring in range(first, first + _RINGS)]
        self._closed: list[Mailbox] = []

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Bytes for a node of so many ranks."""
        return ranks * _RINGS * _RING_BYTES

    def take(self) -> Ring:
        """A ring of this rank; `NO_RING` where none is free."""
        closed, self._closed = self._closed, []
        for mailbox in closed:
            mailbox.close()
        return self._free.pop() if self._free else NO_RING

    def put_back(self, ring: Ring) -> None:
        """Return a ring that nobody reads any more."""
        if ring != NO_RING:
            self._free.append(ring)

    def put_off(self, mailbox: Mailbox) -> None:
        """Close a mailbox later, which others have not read to its end."""
        self._closed.append(mailbox)


class Letter(Waitable):
    """One exchange of rows under way; ``rows`` is complete when it is."""

    __slots__ = ("_mailbox", "done", "number", "row", "rows")

    def __init__(self, mailbox: Mailbox, number: int, row: bytearray, rows: bytearray) -> None:
        self._mailbox = mailbox
        self.number = number
        self.row = row
        self.rows = rows
        self.done = False

    def test(self) -> bool:
        if not self.done:
            self._mailbox.collect()
        return self.done


class Mailbox:
    """The rings through which the ranks of one group exchange rows, in order of issue.

    Parameters
    ----------
    post_office : PostOffice
        Where this rank's ring comes from, and goes back to.
    rings : sequence of Ring
        What each rank of the group took there.
    rank : int
        This rank of the group.
    """

    def __init__(self, post_office: PostOffice, rings: Sequence[Ring], rank: int) -> None:
        self._rank = rank
        self._memory = post_office.memory
        self._bytes = memoryview(self._memory)
        self._numbers = self._bytes.cast("q")
        self._post_office = post_office
        self._closed = False
        self._ring = rings[rank][0]
        self._last = self._fences = max(last for _, last in rings)
        starts = [ring * _RING_BYTES for ring, _ in rings]
        self.peers = [other for other in range(len(rings)) if other != rank]
        self._rows = [[start + _ROWS + slot * _STRIDE for start in starts] for slot in range(SLOTS)]
        """Where each rank's row begins, of each slot."""
        self._marks = [[(row[peer] + _MARK) // 8 for peer in self.peers] for row in self._rows]
        self._read = starts[rank] // 8
        self._reads = [starts[peer] // 8 for peer in self.peers]
        self._fence = (starts[rank] + _FENCE) // 8
        self._peer_fences = [(starts[peer] + _FENCE) // 8 for peer in self.peers]
        self._room = 0
        self._unsent: deque[Letter] = deque()
        self._letters: deque[Letter] = deque()
        self._numbers[self._read] = self._numbers[self._fence] = self._last

    # --------------------------------------------------------------------------------- exchanges

    def post(self, row: bytearray) -> Letter:
        """Exchange rows of `ROW_BYTES` bytes. Never blocks: a row that has no room yet waits."""
        self._last += 1
        letter = Letter(self, self._last, row, bytearray(ROW_BYTES * (1 + len(self.peers))))
        self._letters.append(letter)
        self._unsent.append(letter)
        self._send()
        return letter

    def collect(self) -> None:
        """Take the rows that have come, in order of issue, and send those that have room now."""
        if self._unsent:
            self._send()
        while self._letters and self._letters[0].number <= self._last - len(self._unsent):
            letter = self._letters[0]
            number = letter.number
            for mark in self._marks[number % SLOTS]:
                if self._numbers[mark] < number:
                    return
            for rank, start in enumerate(self._rows[number % SLOTS]):
                at = rank * ROW_BYTES
                if rank == self._rank:
                    letter.rows[at : at + ROW_BYTES] = letter.row
                else:
                    end = start + _PAYLOAD
                    letter.rows[at : at + HEADER_BYTES] = self._bytes[start : start + HEADER_BYTES]
                    letter.rows[at + HEADER_BYTES : at + ROW_BYTES] = (
                        self._bytes[end : end + INLINE_BYTES]
                    )  # fmt: skip
            letter.done = True
            self._letters.popleft()
            self.have_read(number)

    def have_read(self, number: int) -> None:
        """Let the others write over the rows up to ``number``."""
        self._numbers[self._read] = number

    def _send(self) -> None:
        while self._unsent:
            letter = self._unsent[0]
            if not self._has_room(letter.number):
                return
            start = self._rows[letter.number % SLOTS][self._rank]
            row, end = letter.row, start + _PAYLOAD
            self._numbers[(start + _MARK) // 8] = 0
            self._bytes[start : start + HEADER_BYTES] = row[:HEADER_BYTES]
            self._bytes[end : end + INLINE_BYTES] = row[HEADER_BYTES:]
            self._numbers[(start + _MARK) // 8] = letter.number
            self._unsent.popleft()

    def _has_room(self, number: int) -> bool:
        if number > self._room:
            self._room = SLOTS + min([self._numbers[index] for index in self._reads])
        return number <= self._room

    # ------------------------------------------------------------------ one exchange, at once

    @property
    def is_idle(self) -> bool:
        """Whether no exchange is under way, and there is room for one."""
        return not self._letters and self._has_room(self._last + 1)

    def post_at_once(self, sequence: int, description: bytes, payload: bytes) -> int:
        """Send a row, where `is_idle`; return the number of the exchange.

        What follows is `meet`, and then either `have_read` or `take_up`.
        """
        self._last = number = self._last + 1
        start = self._rows[number % SLOTS][self._rank]
        _ROW.pack_into(self._bytes, start, sequence, description, payload)
        self._numbers[(start + _MARK) // 8] = number
        return number

    def meet(self, number: int, polls: int, *, crowded: bool) -> bool:
        """Whether all ranks' rows come within so many polls, and say what this rank's says."""
        numbers = self._numbers
        slot = number % SLOTS
        for mark in self._marks[slot]:
            while numbers[mark] < number:
                polls -= 1
                if polls < 0:
                    return False
                if crowded:
                    yield_processor()
        rows = self._rows[slot]
        start = rows[self._rank]
        mine = self._bytes[start : start + HEADER_BYTES]
        for peer in self.peers:
            start = rows[peer]
            if self._bytes[start : start + HEADER_BYTES] != mine:
                return False
        return True

    def differs(self, number: int, payload: bytes) -> bool:
        """Whether the payload of any rank does not begin as ``payload``, where they `meet`."""
        for start in self._rows[number % SLOTS]:
            at = start + _PAYLOAD
            if self._bytes[at : at + len(payload)] != payload:
                return True
        return False

    def take_up(self, row: bytearray) -> Letter:
        """The exchange that `post_at_once` began with ``row``, as a letter to wait for."""
        letter = Letter(self, self._last, row, bytearray(ROW_BYTES * (1 + len(self.peers))))
        self._letters.append(letter)
        return letter

    def payloads(self, slot: int) -> list[Array]:
        """Where the payload of each rank stands: views of `INLINE_BYTES` bytes."""
        starts = [start + _PAYLOAD for start in self._rows[slot]]
        return [self._memory[start : start + INLINE_BYTES] for start in starts]

    # ----------------------------------------------------------------------------- fences, end

    def fence(self) -> Waitable:
        """What is true when every rank has come to this fence. All ranks count them alike."""
        self._fences += 1
        number = self._numbers[self._fence] = self._fences
        return Condition(lambda: all(self._numbers[index] >= number for index in self._peer_fences))

    def close(self) -> None:
        """Give the ring back, as soon as the others have read what it holds. Idempotent."""
        if self._closed:
            return
        if all(self._numbers[index] >= self._last for index in self._reads):
            self._closed = True
            self._post_office.put_back((self._ring, max(self._last, self._fences)))
        else:
            self._post_office.put_off(self)
