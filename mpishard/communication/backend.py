"""The contract that every way of talking between ranks fulfils.

A collective is a generator: it yields whenever it needs the other ranks, and returns its result.
The blocking call drives it at once, its ``_async`` twin hands it out as a `Work`; there is one
implementation of each collective per backend, whether it blocks or not.

Concurrency: a backend belongs to one thread of one rank. All ranks issue the collectives of one
backend in the same order.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, Self

import numpy as np

from mpishard import settings
from mpishard.arrays import Array, array_namespace
from mpishard.communication.call import DTYPES, Call, CallLog, Kind, check_calls
from mpishard.communication.reduction import ReductionOperation, TreeReducer, check_reducible
from mpishard.communication.traffic import Traffic
from mpishard.errors import NotInitializedError
from mpishard.layout import ShardLayout

__all__ = ["CommunicationBackend", "Steps", "Waitable", "Work"]


class Waitable(ABC):
    """Something a collective waits for: peers that have not arrived, a message under way."""

    @abstractmethod
    def test(self) -> bool:
        """Whether it has happened. Never blocks; raises where it can no longer happen."""


Steps = Generator[Waitable, None, Any]
"""A collective under way: yields what it waits for, returns its result."""


class Work:
    """A collective that was issued and may not be complete.

    `wait` returns the collective's result, and may be called once or often. Arrays that were
    passed in must not be changed, and ``out`` not be read, before it returns.
    """

    def __init__(self, backend: CommunicationBackend, steps: Steps, call: Call) -> None:
        self.call = call
        self._backend = backend
        self._steps = steps
        self._waitable: Waitable | None = None
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None

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
        return True

    def wait(self) -> Any:
        """Block until the collective is complete and return its result.

        Raises
        ------
        CollectiveMismatchError, PeerError, CollectiveTimeoutError
            As the blocking collective does.
        """
        if not self._done:
            self._backend._drive(self)
        if self._error is not None:
            raise self._error
        return self._result


class CommunicationBackend(ABC):
    """How ranks talk: collectives on NumPy or CuPy arrays, with checks before data is mixed.

    Every collective takes any C-contiguous array of any length, 0 and fewer elements than ranks
    included, and splits along dim 0 as `ShardLayout` does unless told otherwise. Reductions
    combine in one tree order (`mpishard.communication.reduction`): the same inputs give the same
    bits on every backend, rank and run.

    A subclass gives the transport: ``_steps_<collective>`` generators, `_drive`, `_send`,
    `_receive`, `_split`, and the two life-cycle hooks. What is checked, logged and counted stands
    here, once.

    Use as a context manager (``with backend:``) on threads of your own: an exception in the body
    is told to the other ranks, and leaving the body counts as leaving the world.
    """

    def __init__(self) -> None:
        self._initialized = False
        self._sequence = 0
        self._pending: deque[Work] = deque()
        self._reducer = TreeReducer()
        self.check_collectives = True
        self.traffic = Traffic()
        self.call_log = CallLog()

    # ------------------------------------------------------------------ identity and life cycle

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of this thread, in ``[0, world_size)``."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def local_rank(self) -> int:
        """The rank's number among the ranks of its node."""
        return self.rank

    @property
    def node_count(self) -> int:
        """Number of nodes that the ranks run on."""
        return 1

    @property
    def is_initialized(self) -> bool:
        """Whether collectives may be called."""
        return self._initialized

    def initialize(self) -> None:
        """Make the backend ready. Idempotent."""
        if not self._initialized:
            self._on_initialize()
            self._initialized = True

    def shutdown(self) -> None:
        """Leave the world. Idempotent. Peers that still wait for this rank are told."""
        if self._initialized:
            self._on_shutdown()
            self._initialized = False

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Tell every rank that this one failed, so that none waits for it.

        In memory the others raise `PeerError`; under MPI the job ends.
        """

    def __enter__(self) -> Self:
        self.initialize()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # sys.exit is a way to leave, not a failure.
        if error is None or isinstance(error, SystemExit):
            self.shutdown()
        else:
            self.abort(error)

    def print(self, *values: object) -> None:
        """Print on rank 0 only. Not collective."""
        if self.rank == 0:
            print(*values, flush=True)  # noqa: T201

    def progress(self) -> None:
        """Let collectives that were issued go on as far as they can. Never blocks.

        Worth calling between pieces of a long computation, where a `Work` should advance.
        """
        for pending in tuple(self._pending):
            pending.advance()
        self._forget_done()

    def describe(self) -> str:
        """One line that names this backend in messages."""
        return f"{type(self).__name__}(rank {self.rank} of {self.world_size})"

    # ------------------------------------------------------------------------------- collectives

    def all_reduce(
        self,
        array: Array,
        operation: ReductionOperation = ReductionOperation.SUM,
        *,
        out: Array | None = None,
    ) -> Array:
        """Combine every rank's array, and give all of them the result.

        Parameters
        ----------
        array : Array
            Any shape, the same on every rank. Overwritten unless ``out`` is given.
        operation : ReductionOperation
            How to combine.
        out : Array, optional
            Array of the same shape and dtype that takes the result.

        Returns
        -------
        Array
            ``array``, or ``out``.

        Raises
        ------
        TypeError, ValueError
            For an argument that is wrong on this rank alone.
        CollectiveMismatchError
            Where operation, dtype or shape differ between ranks.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> run_in_threads(4, lambda b: b.all_reduce(np.array([b.rank, 1])).tolist())
        [[6, 4], [6, 4], [6, 4], [6, 4]]
        """
        return self.all_reduce_async(array, operation, out=out).wait()

    def all_reduce_async(
        self,
        array: Array,
        operation: ReductionOperation = ReductionOperation.SUM,
        *,
        out: Array | None = None,
    ) -> Work:
        """As `all_reduce`, issued and not waited for."""
        self._check_array(array, "all_reduce")
        check_reducible(array.dtype, operation)
        if out is None:
            out = array
        self._check_out(out, array.shape, array.dtype, "all_reduce")
        call = self._call(Kind.ALL_REDUCE, array, operation=operation)
        return self._issue(call, self._steps_all_reduce(call, array, out))

    def reduce_scatter(
        self,
        array: Array,
        operation: ReductionOperation = ReductionOperation.SUM,
        *,
        counts: Sequence[int] | None = None,
        strict: bool = False,
        out: Array | None = None,
    ) -> Array:
        """Combine every rank's array, and give each rank its piece of the result.

        Parameters
        ----------
        array : Array
            Shape (n, ...), the same on every rank. Unchanged.
        operation : ReductionOperation
            How to combine.
        counts : sequence of int, optional
            Rows of each rank's piece; they add up to n. Default: ``ShardLayout(n, world_size)``.
        strict : bool
            Refuse an n that the world size does not divide.
        out : Array, optional
            Takes the piece: shape (counts[rank], ...).

        Returns
        -------
        Array
            This rank's piece: ``out``, or a new array.

        Raises
        ------
        TypeError, ValueError
            For an argument that is wrong on this rank alone.
        CollectiveMismatchError
            Where operation, dtype, shape or counts differ between ranks.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> run_in_threads(4, lambda b: b.reduce_scatter(np.arange(6) * b.rank).tolist())
        [[0, 6], [12, 18], [24], [30]]
        """
        return self.reduce_scatter_async(
            array, operation, counts=counts, strict=strict, out=out
        ).wait()

    def reduce_scatter_async(
        self,
        array: Array,
        operation: ReductionOperation = ReductionOperation.SUM,
        *,
        counts: Sequence[int] | None = None,
        strict: bool = False,
        out: Array | None = None,
    ) -> Work:
        """As `reduce_scatter`, issued and not waited for."""
        self._check_array(array, "reduce_scatter", needs_dim=True)
        check_reducible(array.dtype, operation)
        pieces = self._counts(array.shape[0], counts, strict, "reduce_scatter")
        shape = (pieces[self.rank], *array.shape[1:])
        if out is None:
            out = array_namespace(array).empty(shape, array.dtype)
        self._check_out(out, shape, array.dtype, "reduce_scatter")
        call = self._call(Kind.REDUCE_SCATTER, array, operation=operation, counts=pieces)
        return self._issue(call, self._steps_reduce_scatter(call, array, pieces, out))

    def all_gather(self, array: Array, *, out: Array | None = None) -> Array:
        """Give every rank all ranks' arrays, end to end along dim 0 in rank order.

        Parameters
        ----------
        array : Array
            Shape (n_rank, ...); the rows may differ between ranks, the rest not. It may be the
            part of ``out`` that it will become.
        out : Array, optional
            Takes the result; its rows are the sum of all ranks' rows.

        Returns
        -------
        Array
            ``out``, or a new array.

        Raises
        ------
        TypeError, ValueError
            For an argument that is wrong on this rank alone, and on every rank where the rows of
            an ``out`` are not the sum of the ranks' rows.
        CollectiveMismatchError
            Where dtype or trailing dims differ between ranks.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> run_in_threads(4, lambda b: b.all_gather(np.full(b.rank, b.rank)).tolist())[0]
        [1, 2, 2, 3, 3, 3]
        """
        return self.all_gather_async(array, out=out).wait()

    def all_gather_async(self, array: Array, *, out: Array | None = None) -> Work:
        """As `all_gather`, issued and not waited for."""
        self._check_array(array, "all_gather", needs_dim=True)
        if out is not None:
            self._check_out(out, (out.shape[0], *array.shape[1:]), array.dtype, "all_gather")
        call = self._call(Kind.ALL_GATHER, array, out_rows=-1 if out is None else out.shape[0])
        return self._issue(call, self._steps_all_gather(call, array, out))

    def broadcast(self, array: Array | None, root: int = 0) -> Array:
        """Give every rank the root's array.

        Parameters
        ----------
        array : Array or None
            On the root, any shape. Elsewhere None, or an array of the root's shape and dtype
            that is overwritten and returned.
        root : int
            The rank whose array it is.

        Returns
        -------
        Array
            On the root ``array`` itself; elsewhere the array passed in, or a new one.

        Raises
        ------
        CollectiveMismatchError
            Where roots differ, or an array passed elsewhere has another shape or dtype.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> run_in_threads(4, lambda b: b.broadcast(
        ...     np.array([7.0, 8.0]) if b.rank == 2 else None, root=2).tolist())
        [[7.0, 8.0], [7.0, 8.0], [7.0, 8.0], [7.0, 8.0]]
        """
        self._check_root(root)
        if array is not None or self.rank == root:
            self._check_array(array, "broadcast")
        call = self._call(Kind.BROADCAST, array, root=root)
        return self._issue(call, self._steps_broadcast(call, array, root)).wait()

    def scatter(
        self,
        array: Array | None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        strict: bool = False,
    ) -> Array:
        """Give each rank its piece of the root's array along dim 0.

        Parameters
        ----------
        array : Array or None
            On the root, shape (n, ...). Ignored elsewhere.
        root : int
            The rank whose array it is.
        counts : sequence of int, optional
            On the root: rows of each rank's piece. Default: ``ShardLayout(n, world_size)``.
        strict : bool
            Refuse an n that the world size does not divide.

        Returns
        -------
        Array
            This rank's piece, a new array.

        Raises
        ------
        TypeError, ValueError
            For an argument that is wrong on the root.
        CollectiveMismatchError
            Where roots differ.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> run_in_threads(4, lambda b: b.scatter(np.arange(6) if b.rank == 0 else None).tolist())
        [[0, 1], [2, 3], [4], [5]]
        """
        self._check_root(root)
        pieces: tuple[int, ...] | None = None
        if self.rank == root:
            self._check_array(array, "scatter", needs_dim=True)
            assert array is not None
            pieces = self._counts(array.shape[0], counts, strict, "scatter")
        call = self._call(Kind.SCATTER, array if self.rank == root else None, root=root)
        return self._issue(call, self._steps_scatter(call, array, pieces, root)).wait()

    def gather(self, array: Array, root: int = 0) -> Array | None:
        """Give the root all ranks' arrays, end to end along dim 0 in rank order.

        Parameters
        ----------
        array : Array
            Shape (n_rank, ...); the rows may differ between ranks.
        root : int
            The rank that gets them.

        Returns
        -------
        Array or None
            The arrays end to end on the root, None elsewhere.

        Raises
        ------
        CollectiveMismatchError
            Where roots, dtype or trailing dims differ between ranks.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> run_in_threads(4, lambda b: b.gather(np.array([b.rank]), root=1))[1].tolist()
        [0, 1, 2, 3]
        """
        self._check_root(root)
        self._check_array(array, "gather", needs_dim=True)
        call = self._call(Kind.GATHER, array, root=root)
        return self._issue(call, self._steps_gather(call, array, root)).wait()

    def all_to_all(self, parts: Sequence[Array]) -> list[Array]:
        """Send ``parts[r]`` to rank r.

        Parameters
        ----------
        parts : sequence of Array
            One array for each rank, of any shapes and one dtype.

        Returns
        -------
        list of Array
            What each rank sent here, in rank order; new arrays.

        Raises
        ------
        TypeError, ValueError
            Where there is not one part for each rank, or their dtypes differ.
        CollectiveMismatchError
            Where dtypes differ between ranks.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> def swap(b):
        ...     parts = [np.array([10 * b.rank + r]) for r in range(4)]
        ...     return [int(part[0]) for part in b.all_to_all(parts)]
        >>> run_in_threads(4, swap)[1]
        [1, 11, 21, 31]
        """
        if len(parts) != self.world_size:
            raise ValueError(
                f"all_to_all needs one part for each of {self.world_size} ranks, got {len(parts)}"
            )
        for part in parts:
            self._check_array(part, "all_to_all")
            if part.dtype != parts[0].dtype:
                raise ValueError(
                    f"all_to_all parts must share a dtype, got {parts[0].dtype.name} "
                    f"and {part.dtype.name}"
                )
        call = self._call(Kind.ALL_TO_ALL, parts[0])
        received: list[Array] = self._issue(call, self._steps_all_to_all(call, parts)).wait()
        return received

    def barrier(self) -> None:
        """Return when every rank has called it."""
        call = self._call(Kind.BARRIER, None)
        self._issue(call, self._steps_barrier(call)).wait()

    def split(self, color: int | None, key: int | None = None) -> CommunicationBackend | None:
        """Divide the world: ranks of one color become a world of their own.

        Parameters
        ----------
        color : int or None
            Ranks with equal colors go together; None takes part and joins none.
        key : int, optional
            Order of the ranks in the new world; default this rank's number.

        Returns
        -------
        CommunicationBackend or None
            The initialised backend of the new world; None for color None.

        Examples
        --------
        >>> from mpishard import run_in_threads
        >>> run_in_threads(4, lambda b: b.split(b.rank % 2).world_size)
        [2, 2, 2, 2]
        """
        if color is not None and color < 0:
            raise ValueError(f"color must be 0 or more, or None; got {color}")
        call = self._call(Kind.SPLIT, None)
        member = self._issue(
            call, self._steps_split(call, color, self.rank if key is None else key)
        ).wait()
        if member is not None:
            member.check_collectives = self.check_collectives
            member.initialize()
        return member  # type: ignore[no-any-return]

    # ---------------------------------------------------------------------------- point to point

    def send(self, array: Array, destination_rank: int, tag: int = 0) -> None:
        """Send a copy of ``array``; returns without waiting for the receiver.

        Messages arrive in order for each (pair of ranks, tag).

        Raises
        ------
        ValueError
            For a rank outside the world or this one, or a negative tag.
        """
        self._ready()
        self._check_array(array, "send")
        self._check_peer(destination_rank, tag)
        self.traffic.count("send", array.nbytes if destination_rank != self.rank else 0)
        self._send(array, destination_rank, tag)

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
        self._ready()
        self._check_peer(source_rank, tag)
        if count < 0:
            raise ValueError(f"count must be 0 or more, got {count}")
        return self._receive(source_rank, count, tag)

    # -------------------------------------------------------------------------- for the transport

    @abstractmethod
    def _on_initialize(self) -> None: ...

    @abstractmethod
    def _on_shutdown(self) -> None: ...

    @abstractmethod
    def _drive(self, work: Work) -> None:
        """Advance the pending collectives, oldest first, until ``work`` is done.

        All of them are advanced, not only ``work``, so that ranks may wait in different orders.
        """

    @abstractmethod
    def _steps_all_reduce(self, call: Call, array: Array, out: Array) -> Steps: ...

    @abstractmethod
    def _steps_reduce_scatter(
        self, call: Call, array: Array, counts: tuple[int, ...], out: Array
    ) -> Steps: ...

    @abstractmethod
    def _steps_all_gather(self, call: Call, array: Array, out: Array | None) -> Steps: ...

    @abstractmethod
    def _steps_broadcast(self, call: Call, array: Array | None, root: int) -> Steps: ...

    @abstractmethod
    def _steps_scatter(
        self, call: Call, array: Array | None, counts: tuple[int, ...] | None, root: int
    ) -> Steps: ...

    @abstractmethod
    def _steps_gather(self, call: Call, array: Array, root: int) -> Steps: ...

    @abstractmethod
    def _steps_all_to_all(self, call: Call, parts: Sequence[Array]) -> Steps: ...

    @abstractmethod
    def _steps_barrier(self, call: Call) -> Steps: ...

    @abstractmethod
    def _steps_split(self, call: Call, color: int | None, key: int) -> Steps: ...

    @abstractmethod
    def _send(self, array: Array, destination: int, tag: int) -> None: ...

    @abstractmethod
    def _receive(self, source: int, count: int, tag: int) -> Array: ...

    # ------------------------------------------------------------------------------------ shared

    def _issue(self, call: Call, steps: Steps) -> Work:
        work = Work(self, steps, call)
        self._pending.append(work)
        work.advance()
        self._forget_done()
        return work

    def _forget_done(self) -> None:
        while self._pending and self._pending[0].done:
            self._pending.popleft()

    def _verify(self, calls: Sequence[Call]) -> None:
        """Refuse, on every rank alike, calls that do not belong together."""
        check_calls(calls)

    def _call(
        self,
        kind: Kind,
        array: Array | None,
        *,
        operation: ReductionOperation | None = None,
        root: int = -1,
        counts: tuple[int, ...] | None = None,
        out_rows: int = -1,
    ) -> Call:
        self._ready()
        self._sequence += 1
        call = Call.describe(
            self._sequence, kind, array, operation=operation, root=root, counts=counts,
            out_rows=out_rows,
        )  # fmt: skip
        self.call_log.record(call, sys._getframe(2))
        return call

    def _ready(self) -> None:
        if not self._initialized:
            raise NotInitializedError(
                f"{self.describe()} is not initialised; call initialize(), or use "
                "mpishard.init() which returns an initialised backend"
            )

    def _check_array(self, array: Any, name: str, *, needs_dim: bool = False) -> None:
        if array is None:
            raise TypeError(f"{name} needs an array, got None")
        array_namespace(array)
        if array.dtype not in DTYPES:
            known = ", ".join(dtype.name for dtype in DTYPES)
            raise ValueError(f"{name} cannot send dtype {array.dtype.name}; it knows {known}")
        if not array.flags.c_contiguous:
            raise ValueError(
                f"{name} needs a C-contiguous array, got shape {array.shape} with strides "
                f"{array.strides}; pass a copy (numpy.ascontiguousarray)"
            )
        if needs_dim and array.ndim == 0:
            raise ValueError(f"{name} splits along dim 0, and a 0-dim array has none")
        if array.ndim > settings.MAXIMUM_DIMS:
            raise ValueError(
                f"{name} takes arrays of up to {settings.MAXIMUM_DIMS} dims, got {array.ndim}"
            )

    def _check_out(
        self, out: Array, shape: tuple[int, ...], dtype: np.dtype[Any], name: str
    ) -> None:
        self._check_array(out, name)
        if out.shape != shape or out.dtype != dtype:
            raise ValueError(
                f"{name}: out has shape {out.shape} and dtype {out.dtype.name}, expected "
                f"{shape} and {dtype.name}"
            )

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.world_size:
            raise ValueError(f"root {root} is outside [0, {self.world_size})")

    def _check_peer(self, rank: int, tag: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside [0, {self.world_size})")
        if rank == self.rank:
            raise ValueError(f"rank {rank} cannot send to or receive from itself")
        if not 0 <= tag <= settings.MAXIMUM_TAG:
            raise ValueError(f"tag must be in [0, {settings.MAXIMUM_TAG}], got {tag}")

    # The bytes that a rank is booked with, the same on every backend.

    def _count_reduce_scatter(self, call: Call, counts: Sequence[int]) -> None:
        rows = sum(counts)
        row_bytes = call.nbytes // rows if rows else 0
        self.traffic.count(Kind.REDUCE_SCATTER.label, (rows - counts[self.rank]) * row_bytes)

    def _count_all_reduce(self, call: Call, counts: Sequence[int]) -> None:
        self._count_reduce_scatter(call, counts)
        rows = sum(counts)
        piece = counts[self.rank] * (call.nbytes // rows) if rows else 0
        self.traffic.count(Kind.ALL_GATHER.label, piece * (self.world_size - 1))

    def _count_all_gather(self, array: Array) -> None:
        self.traffic.count(Kind.ALL_GATHER.label, array.nbytes * (self.world_size - 1))

    def _count_broadcast(self, array: Array, root: int) -> None:
        nbytes = array.nbytes * (self.world_size - 1) if self.rank == root else 0
        self.traffic.count(Kind.BROADCAST.label, nbytes)

    def _count_scatter(self, sent: Array | None, piece: Array) -> None:
        """Book a scatter; ``sent`` is the root's array, None elsewhere."""
        self.traffic.count(Kind.SCATTER.label, 0 if sent is None else sent.nbytes - piece.nbytes)

    def _count_gather(self, array: Array, root: int) -> None:
        self.traffic.count(Kind.GATHER.label, 0 if self.rank == root else array.nbytes)

    def _count_all_to_all(self, parts: Sequence[Array]) -> None:
        nbytes = sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        self.traffic.count(Kind.ALL_TO_ALL.label, nbytes)

    def _counts(
        self, rows: int, counts: Sequence[int] | None, strict: bool, name: str
    ) -> tuple[int, ...]:
        if strict and rows % self.world_size:
            raise ValueError(
                f"{name}: {rows} rows over {self.world_size} ranks leave "
                f"{rows % self.world_size}; strict=True allows no remainder"
            )
        if counts is None:
            return ShardLayout(rows, self.world_size).sizes
        pieces = tuple(int(count) for count in counts)
        if len(pieces) != self.world_size or min(pieces) < 0 or sum(pieces) != rows:
            raise ValueError(
                f"{name}: counts {pieces} must be {self.world_size} numbers, none negative, "
                f"that add up to {rows}; they add up to {sum(pieces)}"
            )
        return pieces
