"""The contract of all backends: the collectives, with their checks.

Concurrency: a rank's backend and the groups split off it belong to one thread at a time; a call
from a second thread while one is under way is refused. All ranks issue the collectives of one
backend in the same order.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn, Self

import numpy as np
from numpy.typing import DTypeLike

from mpishard.base import (
    Array,
    CommunicationError,
    DType,
    MpishardError,
    NotInitializedError,
    address,
    array_namespace,
    as_count,
    as_flag,
    as_index,
    as_integer,
    copy_into,
    is_device_array,
    set_up_logging,
    settings,
)
from mpishard.communication.contract.arena import Arena, Nodes
from mpishard.communication.contract.call import (
    Call,
    CollectiveKind,
    MessageWait,
    Traffic,
    check_array,
    check_dtype,
    check_out,
    check_peer,
    piece_sizes,
    sent_by_all_reduce,
)
from mpishard.communication.contract.matching import check_calls, divergence, group_label
from mpishard.communication.contract.reduction import (
    ReductionOperation,
    Reductions,
    TreeReducer,
    accumulation_dtype,
    check_reducible,
)
from mpishard.communication.contract.status import RankState, StatusPage, user_frame
from mpishard.communication.contract.work import (
    Condition,
    ITransport,
    Session,
    Steps,
    Transfer,
    Work,
)
from mpishard.communication.tracing.recorder import (
    InFlight,
    Recorder,
    current_recorder,
    stop_recording,
)

# A cache line. Vectors of two ranks in one line would make their cores exchange it at each write.
_LINE_BYTES = 64


class CommunicationBackend(ITransport):
    """Collectives on NumPy or CuPy arrays, with checks before data is mixed.

    Every collective takes C-contiguous arrays of any length, also 0, and fewer elements than ranks.
    By default it splits along dim 0 as `ShardLayout` does. Reductions
    combine in one tree order (`mpishard.communication.contract.reduction`): the same inputs
    give the same bits on every backend, rank and run.

    Use it as a context manager (``with backend:``) on threads of your own. An exception in the body
    is reported to the other ranks, and the end of the body leaves the world.

    Notes
    -----
    A subclass implements `abort` and the members of `ITransport`. It may override `nodes` and
    `_break`, and set ``_rank_is_process = False`` for threads. It can use `_verify`, which compares
    the ranks' calls; ``_reducer``, which combines contributions in the one tree order;
    ``_sequence``, the number of this rank's last collective; ``_is_root``, False for a world that
    was split off; and ``group``, the name of this world, which no other world has. The bytes sent
    are counted here and not in subclasses.

    Parameters
    ----------
    rank : int
        This rank, in ``[0, world_size)``.
    world_size : int
        Number of ranks.
    """

    _rank_is_process = True  # False if a rank is a thread
    _begins_again = False  # whether the program begins again, in a smaller world, if ranks are lost
    _successor: Self | None  # the world that replaces this one after ranks were lost

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._initialized = False
        self._is_root = True  # False if it was split off another world
        self._ended: CommunicationError | None = None  # the error of every later call, if any
        self._successor = None
        self._sequence = 0
        self._world_ranks: tuple[int, ...] | None = None
        self._topology: Nodes | None = None
        # In order of issue. Data of collectives share one communicator under MPI, so they take
        # turns in it.
        self._pending: deque[Work] = deque()
        self._transfers: list[Transfer] = []
        # The receives that wait for a message, by source and tag, oldest first.
        self._receives: dict[tuple[int, int], deque[object]] = {}
        # Counted here and not by the caller: all ranks begin rounds in one order, whatever object
        # does.
        self._rounds = 0
        self._reducer = TreeReducer()
        self._arenas = 0  # number of arenas made so far
        # Replaced in `initialize`; a group gets that of its root world from `split`.
        self._session = Session(rank=0)
        self.traffic = Traffic()
        """Bytes that this rank has sent and read."""
        self.check_collectives = True
        """Whether every collective compares the ranks' calls before data is mixed.

        Results do not depend on it. False saves the header, one wait for the other ranks, of
        `all_reduce` and `reduce_scatter` above 128 bytes. All other collectives keep their header,
        which carries lengths or the data itself, and its checks. Set it alike on all ranks. In
        memory and in a world of one it saves nothing.
        """
        self.reductions: Reductions = "exact"
        """Whether sums have the one order, or on GPUs that of a faster library.

        Only `NCCLCommunicationBackend` offers the latter.
        """
        self.label = ""
        """The name of this world in messages; empty for a root world."""
        self.group, self.axis = "world", ""
        """The name of this world in traces, which no other world has, and its mesh axis."""
        self.recorder: Recorder | None = None
        """The recorder of a trace, until this backend is shut down; None if none is recorded."""

    # --------------------------------------------------------------------------- ranks and nodes

    @property
    def rank(self) -> int:
        """The rank of this thread, in ``[0, world_size)``."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The numbers of this world's ranks in the root world, used in errors and reports.

        In a root world, which was not split off another, they are 0, 1 and so on.
        """
        return self._world_ranks or tuple(range(self.world_size))

    @property
    def nodes(self) -> tuple[int, ...]:
        """The number of the node that each rank runs on; nodes are numbered by first rank."""
        return (0,) * self.world_size

    @property
    def topology(self) -> Nodes:
        """`nodes`, and the ranks that exchange data between nodes."""
        if self._topology is None:
            self._topology = Nodes(self.nodes, self.rank)
        return self._topology

    @property
    def local_rank(self) -> int:
        """The rank's number among the ranks of its node."""
        return self.peers.index(self.rank)

    @property
    def node_count(self) -> int:
        """Number of nodes that the ranks run on."""
        return self.topology.count

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks of this rank's node, itself among them, in order."""
        return self.topology.peers

    @property
    def status(self) -> StatusPage:
        """The flight recorder's page of this rank: its last collectives, and its wait."""
        page = self._session.status
        if page is None:
            page = self._session.status = StatusPage(self.rank, self.world_size)
        return page

    # -------------------------------------------------------------------------------- life cycle

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the buffers that this backend keeps from one collective to the next.

        The memory of a rank consists of these and of its callers' arrays. A world that was split
        off has its own buffers, and counts only those.
        """
        return self._reducer.scratch_bytes

    @property
    def is_initialized(self) -> bool:
        """Whether collectives may be called."""
        return self._initialized

    def initialize(self) -> None:
        """Make the backend ready. Idempotent.

        Raises
        ------
        ValueError
            For an environment variable of the package that has no meaning.
        """
        if self._successor is not None:
            raise self._not_ready_error()
        if not self._initialized:
            settings.check()
            if self._is_root:
                # A backend that enters a world again starts anew: operations that were under way
                # belonged to the earlier world, which this rank has left.
                self._session, self._ended, self._sequence = Session(self.rank), None, 0
                self._pending.clear()
                self._transfers.clear()
                self._receives = {}
            self._session.join(self)
            self._on_initialize()
            if self._is_root:
                set_up_logging(self.rank, is_process=self._rank_is_process)
            # Last, so that an exception in `_on_initialize` leaves a backend that refuses calls.
            self._initialized = True
            if self._is_root:
                self.status.end(RankState.RUNNING)

    def shutdown(self) -> None:
        """Leave the world, and notify peers that still wait for this rank. Idempotent."""
        if self._initialized:
            stop_recording(self)
            self._on_shutdown()
            self._initialized = False
            if self._is_root:
                self.status.end(RankState.LEFT)

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Report to every rank that this rank has failed, so that none waits for it.

        In memory the others raise `PeerError`; under MPI the job ends.
        """

    def __enter__(self) -> Self:
        self.initialize()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # sys.exit leaves in good order: it is no failure.
        if error is None or isinstance(error, SystemExit):
            self.shutdown()
        else:
            self.abort(error)

    def print(self, *values: object) -> None:
        """Print on rank 0 only. Not collective."""
        if self.rank == 0:
            print(*values, flush=True)  # noqa: T201

    def progress(self) -> None:
        """Advance all issued operations as far as possible, without blocking.

        Call it between the pieces of a long computation during which a `Work` should advance.
        """
        if not self._pending and not self._transfers:
            return
        with self._session:
            # A copy, because a work that advances may issue another one or be forgotten.
            for pending in (*self._pending, *self._transfers):
                pending.advance()
            self._forget_done()

    def describe(self) -> str:
        """Return one line that names this backend in messages."""
        return f"{type(self).__name__}(rank {self.rank} of {self.world_size})"

    def __repr__(self) -> str:
        return self.describe()

    def __reduce__(self) -> NoReturn:
        # Models, optimizers and configurations refer to a backend: this is their error, too.
        raise TypeError(
            f"{self.describe()} cannot be pickled or copied, nor can a sharded model, an optimizer "
            "or another object that refers to it. Pickle the plain model of `with "
            "model.unsharded() as plain`, save with mpishard.checkpoint.save, or copy a model with "
            "model.deep_copy()"
        )

    def number_model(self, name: str, units: Sequence[str] = ()) -> int:
        """Return a number for a model that is made now, to be the ``subject`` of its collectives.

        Every rank of this world calls it after the same collective. Communicates nothing. Two
        models of one size send arrays of one shape, so that only this number shows whether ranks
        use them in the same order. `mpishard.communication.contract.subject.unit_subject` has the
        numbers of the model's units.

        Parameters
        ----------
        name : str
            Its name in messages, which also have the line of the user's code. If one line makes
            several models of one name, they have their number there.
        units : sequence of str
            The names of its units in messages.
        """
        # The line is a part of the name: two models of one class on two lines are then told apart.
        frame, _ = user_frame(sys._getframe(1))
        place = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return self._session.subjects.add(self.group, self._sequence, name, place, units)

    # ------------------------------------------------------------------------------- collectives

    def all_reduce(
        self,
        array: Array,
        operation: ReductionOperation = ReductionOperation.SUM,
        *,
        out: Array | None = None,
        subject: int = 0,
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
        subject : int
            The model or unit that the data belong to: see `number_model`. Ranks must agree.

        Returns
        -------
        Array
            ``array``, or ``out``.

        Raises
        ------
        TypeError, ValueError
            For an argument that is wrong on this rank alone.
        CollectiveMismatchError
            If operation, dtype or shape differ between ranks.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> run_in_threads(4, lambda b: b.all_reduce(np.array([b.rank, 1])).tolist())
        [[6, 4], [6, 4], [6, 4], [6, 4]]
        """
        result: Array = self.all_reduce_async(array, operation, out=out, subject=subject).wait()
        return result

    def all_reduce_async(
        self,
        array: Array,
        operation: ReductionOperation = ReductionOperation.SUM,
        *,
        out: Array | None = None,
        subject: int = 0,
    ) -> Work:
        """Issue an `all_reduce` without waiting for it."""
        check_array(array, "all_reduce", is_written=out is None)
        check_reducible(array.dtype, operation)
        if out is None:
            out = array
        else:
            check_out(out, array.shape, array.dtype, "all_reduce")
        # Counted by the contract before a backend chooses its messages, so that all backends agree.
        sends = sent_by_all_reduce(array.size, array.itemsize, self._world_size, self._rank)
        call = Call.describe(
            CollectiveKind.ALL_REDUCE, array, operation=operation, subject=subject, sends=sends
        )
        if self._is_alone_on_gpu(array):
            return self._start(call, self._steps_alone, array, out)
        return self._start(call, self._steps_all_reduce, array, out)

    def reduce_scatter(
        self,
        array: Array,
        operation: ReductionOperation = ReductionOperation.SUM,
        *,
        counts: Sequence[int] | None = None,
        strict: bool = False,
        out: Array | None = None,
        subject: int = 0,
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
            Takes the piece: shape (counts[rank], ...), of the array's dtype. For 16-bit floats it
            may be float32, the dtype in which they are summed; the sums are then not rounded.
        subject : int
            The model or unit that the data belong to: see `number_model`. Ranks must agree.

        Returns
        -------
        Array
            This rank's piece: ``out``, or a new array.

        Raises
        ------
        TypeError, ValueError
            For an argument that is wrong on this rank alone.
        CollectiveMismatchError
            If operation, dtype, shape or counts differ between ranks.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> run_in_threads(4, lambda b: b.reduce_scatter(np.arange(6) * b.rank).tolist())
        [[0, 6], [12, 18], [24], [30]]
        """
        piece: Array = self.reduce_scatter_async(
            array, operation, counts=counts, strict=strict, out=out, subject=subject
        ).wait()
        return piece

    def reduce_scatter_async(
        self,
        array: Array,
        operation: ReductionOperation = ReductionOperation.SUM,
        *,
        counts: Sequence[int] | None = None,
        strict: bool = False,
        out: Array | None = None,
        subject: int = 0,
    ) -> Work:
        """Issue a `reduce_scatter` without waiting for it."""
        check_array(array, "reduce_scatter", needs_dim=True)
        check_reducible(array.dtype, operation)
        pieces = piece_sizes(
            array.shape[0], counts, self.world_size, "reduce_scatter", strict=strict
        )
        shape = (pieces[self.rank], *array.shape[1:])
        if out is None:
            out = array_namespace(array).empty(shape, array.dtype)
        wide = accumulation_dtype(array.dtype)
        check_out(out, shape, wide if out.dtype == wide else array.dtype, "reduce_scatter")
        # A rank keeps its own piece. A slice counts the others' bytes with any trailing dims.
        sends = {"reduce_scatter": array[pieces[self.rank] :].nbytes}
        call = Call.describe(
            CollectiveKind.REDUCE_SCATTER,
            array,
            operation=operation,
            counts=pieces,
            subject=subject,
            sends=sends,
        )
        if self._is_alone_on_gpu(array):
            return self._start(call, self._steps_alone, array, out)
        return self._start(call, self._steps_reduce_scatter, array, pieces, out)

    def all_gather(self, array: Array, *, out: Array | None = None, subject: int = 0) -> Array:
        """Give every rank all ranks' arrays, end to end along dim 0 in rank order.

        Parameters
        ----------
        array : Array
            Shape (n_rank, ...). The number of rows may differ between ranks, the other dims may
            not. The array may be its own part of ``out``.
        out : Array, optional
            Takes the result; its number of rows is the sum of all ranks' rows.
        subject : int
            The model or unit that the data belong to: see `number_model`. Ranks must agree.

        Returns
        -------
        Array
            ``out``, or a new array.

        Raises
        ------
        TypeError, ValueError
            For an argument that is wrong on this rank alone; on every rank, if the rows of an
            ``out`` are not the sum of the ranks' rows.
        CollectiveMismatchError
            If dtype or trailing dims differ between ranks.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> run_in_threads(4, lambda b: b.all_gather(np.full(b.rank, b.rank)).tolist())[0]
        [1, 2, 2, 3, 3, 3]
        """
        whole: Array = self.all_gather_async(array, out=out, subject=subject).wait()
        return whole

    def all_gather_async(self, array: Array, *, out: Array | None = None, subject: int = 0) -> Work:
        """Issue an `all_gather` without waiting for it."""
        check_array(array, "all_gather", needs_dim=True)
        if out is not None:
            check_array(out, "all_gather", needs_dim=True)
            check_out(out, (out.shape[0], *array.shape[1:]), array.dtype, "all_gather")
        # The rows of ``out`` can be compared only when all ranks' rows are known: see
        # `check_calls`.
        rows = -1 if out is None else out.shape[0]
        sends = {"all_gather": array.nbytes * (self.world_size - 1)}
        call = Call.describe(
            CollectiveKind.ALL_GATHER, array, out_rows=rows, subject=subject, sends=sends
        )
        if self._is_alone_on_gpu(array):
            return self._start(call, self._steps_alone, array, out)
        return self._start(call, self._steps_all_gather, array, out)

    def broadcast(self, array: Array | None, root: int = 0, *, subject: int = 0) -> Array:
        """Give every rank the root's array.

        Parameters
        ----------
        array : Array or None
            On the root, any shape. Elsewhere None, or an array of the root's shape and dtype
            that is overwritten and returned.
        root : int
            The rank that sends its array.
        subject : int
            The model or unit that the data belong to: see `number_model`. Ranks must agree.

        Returns
        -------
        Array
            On the root ``array`` itself; elsewhere the array passed in, or a new one.

        Raises
        ------
        TypeError, ValueError
            For an argument that is wrong on this rank alone.
        CollectiveMismatchError
            If roots differ, or an array passed on another rank has another shape or dtype.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> run_in_threads(4, lambda b: b.broadcast(
        ...     np.array([7.0, 8.0]) if b.rank == 2 else None, root=2).tolist())
        [[7.0, 8.0], [7.0, 8.0], [7.0, 8.0], [7.0, 8.0]]
        """
        sent: Array = self.broadcast_async(array, root, subject=subject).wait()
        return sent

    def broadcast_async(self, array: Array | None, root: int = 0, *, subject: int = 0) -> Work:
        """Issue a `broadcast` without waiting for it."""
        as_index("root", root, self.world_size)
        if array is not None or self.rank == root:
            check_array(array, "broadcast", is_written=self.rank != root)
        sent = 0
        if array is not None and self.rank == root:
            sent = array.nbytes * (self.world_size - 1)
        call = Call.describe(
            CollectiveKind.BROADCAST, array, root=root, subject=subject, sends={"broadcast": sent}
        )
        if array is not None and self._is_alone_on_gpu(array):
            return self._start(call, self._steps_alone, array, array)
        return self._start(call, self._steps_broadcast, array, root)

    def scatter(
        self,
        array: Array | None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        strict: bool = False,
        subject: int = 0,
    ) -> Array:
        """Give each rank its piece of the root's array along dim 0.

        Parameters
        ----------
        array : Array or None
            On the root, shape (n, ...). Ignored elsewhere.
        root : int
            The rank that sends its array.
        counts : sequence of int, optional
            On the root: rows of each rank's piece. Default: ``ShardLayout(n, world_size)``.
        strict : bool
            Refuse an n that the world size does not divide.
        subject : int
            The model or unit that the data belong to: see `number_model`. Ranks must agree.

        Returns
        -------
        Array
            This rank's piece, a new array.

        Raises
        ------
        TypeError, ValueError
            For an argument that is wrong on the root.
        CollectiveMismatchError
            If roots differ.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> run_in_threads(4, lambda b: b.scatter(np.arange(6) if b.rank == 0 else None).tolist())
        [[0, 1], [2, 3], [4], [5]]
        """
        piece: Array = self.scatter_async(
            array, root, counts=counts, strict=strict, subject=subject
        ).wait()
        return piece

    def scatter_async(
        self,
        array: Array | None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        strict: bool = False,
        subject: int = 0,
    ) -> Work:
        """Issue a `scatter` without waiting for it."""
        as_index("root", root, self.world_size)
        strict = as_flag("strict", strict)
        pieces: tuple[int, ...] | None = None
        # Other ranks may pass anything, as in MPI; what they pass is not looked at.
        sent, sends = None, {"scatter": 0}
        if self.rank == root:
            check_array(array, "scatter", needs_dim=True)
            assert array is not None
            pieces = piece_sizes(array.shape[0], counts, self.world_size, "scatter", strict=strict)
            sent, sends = array, {"scatter": array[pieces[root] :].nbytes}
        call = Call.describe(CollectiveKind.SCATTER, sent, root=root, subject=subject, sends=sends)
        return self._start(call, self._steps_scatter, sent, pieces, root)

    def gather(self, array: Array, root: int = 0, *, subject: int = 0) -> Array | None:
        """Give the root all ranks' arrays, end to end along dim 0 in rank order.

        Parameters
        ----------
        array : Array
            Shape (n_rank, ...). The number of rows may differ between ranks.
        root : int
            The rank that receives them.
        subject : int
            The model or unit that the data belong to: see `number_model`. Ranks must agree.

        Returns
        -------
        Array or None
            The arrays end to end on the root, None elsewhere.

        Raises
        ------
        CollectiveMismatchError
            If roots, dtype or trailing dims differ between ranks.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> run_in_threads(4, lambda b: b.gather(np.array([b.rank]), root=1))[1].tolist()
        [0, 1, 2, 3]
        """
        whole: Array | None = self.gather_async(array, root, subject=subject).wait()
        return whole

    def gather_async(self, array: Array, root: int = 0, *, subject: int = 0) -> Work:
        """Issue a `gather` without waiting for it."""
        as_index("root", root, self.world_size)
        check_array(array, "gather", needs_dim=True)
        sends = {"gather": 0 if self.rank == root else array.nbytes}
        call = Call.describe(CollectiveKind.GATHER, array, root=root, subject=subject, sends=sends)
        return self._start(call, self._steps_gather, array, root)

    def all_to_all(self, parts: Sequence[Array]) -> list[Array]:
        """Send ``parts[r]`` to rank r.

        Parameters
        ----------
        parts : sequence of Array
            One array for each rank, of any shapes and one dtype.

        Returns
        -------
        list of Array
            New arrays: the part that each rank sent to this rank, in rank order.

        Raises
        ------
        TypeError, ValueError
            If there is not one part for each rank, or their dtypes differ.
        CollectiveMismatchError
            If dtypes differ between ranks.

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
        received: list[Array] = self.all_to_all_async(parts).wait()
        return received

    def all_to_all_async(self, parts: Sequence[Array]) -> Work:
        """Issue an `all_to_all` without waiting for it."""
        if not isinstance(parts, Sequence | np.ndarray):
            raise TypeError(f"all_to_all needs a list of arrays, one for each rank, got {parts!r}")
        if len(parts) != self.world_size:
            raise ValueError(
                f"all_to_all needs one part for each of {self.world_size} ranks, got {len(parts)}"
            )
        for part in parts:
            check_array(part, "all_to_all")
            if part.dtype != parts[0].dtype:
                raise ValueError(
                    f"all_to_all parts must share a dtype, got {parts[0].dtype.name} "
                    f"and {part.dtype.name}"
                )
        sent = sum(part.nbytes for part in parts) - parts[self.rank].nbytes
        # The shapes differ between receivers, so only the dtype is compared.
        call = Call.describe(CollectiveKind.ALL_TO_ALL, parts[0], sends={"all_to_all": sent})
        return self._start(call, self._steps_all_to_all, parts)

    def barrier(self, *, subject: int = 0) -> None:
        """Return when every rank has called it; ``subject`` as in `all_reduce`."""
        self.barrier_async(subject=subject).wait()

    def barrier_async(self, *, subject: int = 0) -> Work:
        """Issue a `barrier`, which is done when every rank has called it."""
        return self._start(
            Call.describe(CollectiveKind.BARRIER, None, subject=subject), self._steps_barrier
        )

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
        if color is not None and as_integer("color", color) < 0:
            raise ValueError(f"color must be 0 or more, or None; got {color}")
        # The default keeps the order of this world, as in MPI.
        order = self.rank if key is None else as_integer("key", key)
        call = Call.describe(CollectiveKind.SPLIT, None)
        with self._session as session:
            try:
                member = self._start(call, self._steps_split, color, order).wait()
                if member is not None:
                    # One session for all groups: a wait in one of them advances the collectives of
                    # all.
                    member._is_root, member._session = False, session
                    # The same on all members and in no other group, without communication.
                    member.group = f"{self.group}/{call.sequence}.{color}"
                    member.check_collectives = self.check_collectives
                    # For an error during `initialize`; the ranks in its final label are known only
                    # after it.
                    member.label = "a new group"
                    member.initialize()
                    if member._world_ranks is None:
                        mine = np.array([self.world_ranks[self.rank]])
                        member._world_ranks = tuple(member.all_gather(mine).tolist())
                    member._name_group("")
            except MpishardError:
                raise
            except BaseException as error:
                # If this rank has entered the collective, the others make the group and wait for
                # this rank there.
                if 0 < call.sequence == self._sequence:
                    self._break(call.where, error)
                raise
        return member  # type: ignore[no-any-return]

    def shrink(self) -> Self:
        """Continue without the lost ranks. Called by each remaining rank.

        Call it when a collective has raised `PeerError`, or at any time. Ranks that still wait in
        this world, or in one that was split off it, then raise `PeerError`. A rank that has ended,
        or has called `shutdown`, is not in the new world. This backend, its groups, and objects
        that use them refuse every later call. Arrays of `allocate_shared` stay as they are, which
        may be half written. Restore the state of training from a checkpoint: `mpishard.launch`
        does all of this with ``on_failure="shrink"``.

        Returns
        -------
        CommunicationBackend
            The initialised world of the ranks that are left, numbered from 0 in their old order.

        Raises
        ------
        NotInitializedError
            Before `initialize` and after `shutdown`.
        CommunicationError
            For a world that was split off; under MPI also without ``init(on_failure="shrink")``,
            because the end of a rank then ends all ranks.
        CollectiveTimeoutError
            In memory, if a remaining rank does not call it in time.

        Examples
        --------
        Rank 1 is lost; the others go on as ranks 0 and 1 of 2:

        >>> from mpishard import run_in_threads
        >>> from mpishard.base.errors import PeerError
        >>> def body(b):
        ...     if b.rank == 1:
        ...         raise OSError("no space left on device")
        ...     try:
        ...         b.barrier()
        ...     except PeerError:
        ...         b = b.shrink()
        ...     return b.rank, b.world_size
        >>> run_in_threads(3, body, on_failure="shrink")
        [(0, 2), None, (1, 2)]
        """
        self._ready()
        if not self._is_root:
            raise CommunicationError(
                f"{self.describe()} was split off another world: call shrink() of that world, and "
                "split the new one again"
            )
        successor = self._shrink()
        # Also the groups: their communicators contain the lost ranks.
        for world in self._session.worlds():
            world._retire(successor)
        return successor

    # ------------------------------------------------------------------------------------- memory

    def allocate_shared(self, length: int, dtype: DTypeLike) -> Array | None:
        """Memory that all ranks of this rank's node read and write in place. Collective.

        There is one array for each node. A rank sees the values that another rank of its node has
        written after the next collective of both. To a collective it is an ordinary array, so two
        ranks must not pass the same part of it for a result; collectives in place are those of
        `allocate_arena`. The memory is freed with the last array in it. Pages belong to the NUMA
        domain of the rank that first writes them.

        Parameters
        ----------
        length : int
            Number of elements, 1 or more; the same on all ranks.
        dtype : dtype
            Of the elements; the same on all ranks.

        Returns
        -------
        Array or None
            Zeros, of shape (length,), beginning on a page; None, on every rank, if a node's
            ranks cannot share memory (``MPISHARD_ARENA=off``, or a system without).

        Raises
        ------
        ValueError
            For a length below 1, or a dtype that cannot be sent.
        CollectiveMismatchError
            If length or dtype differ between ranks.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> def body(b):
        ...     shared = b.allocate_shared(b.world_size, np.int64)
        ...     shared[b.rank] = b.rank ** 2
        ...     b.barrier()
        ...     return shared.tolist()
        >>> run_in_threads(3, body)
        [[0, 1, 4], [0, 1, 4], [0, 1, 4]]
        """
        return self._allocate(length, dtype)

    def _allocate(self, length: int, dtype: DTypeLike, arena: int = 0) -> Array | None:
        """Allocate as `allocate_shared`, plain memory or that of the arena with this number."""
        if as_integer("length", length) < 1:
            raise ValueError(f"allocate_shared needs a length of 1 or more, got {length}")
        # The array for the header, with the shape and dtype that ranks compare, needs no memory.
        wanted = np.broadcast_to(np.zeros((), dtype), (length,))
        check_dtype(wanted.dtype, "allocate_shared cannot share")
        call = Call.describe(CollectiveKind.ALLOCATE_SHARED, wanted, arena=arena)
        memory: Array | None = self._start(call, self._steps_allocate_shared, wanted.nbytes).wait()
        return None if memory is None else memory[: wanted.nbytes].view(wanted.dtype)

    def allocate_arena(
        self, length: int, dtype: DTypeLike, *, once_per_node: bool = False
    ) -> Arena | None:
        """Make a vector for each rank of this node, which all of them read in place. Collective.

        Parameters
        ----------
        length : int
            Elements of each vector, 1 or more; the same on all ranks.
        dtype : dtype
            Of the elements; the same on all ranks.
        once_per_node : bool
            Make one vector for all ranks of a node instead.

        Returns
        -------
        Arena or None
            Zeros, each vector beginning on a cache line of its own; None, on every rank, if a
            node's ranks cannot share memory.

        Raises
        ------
        ValueError, CollectiveMismatchError
            As `allocate_shared`.

        Examples
        --------
        >>> import numpy as np
        >>> from mpishard import run_in_threads
        >>> def body(b):
        ...     arena = b.allocate_arena(4, np.float64)
        ...     arena.mine[:] = b.rank + 1
        ...     piece = np.empty(2)
        ...     arena.reduce_into(piece).wait()
        ...     return piece.tolist(), float(arena.of(1 - b.rank)[0])
        >>> run_in_threads(2, body)
        [([3.0, 3.0], 2.0), ([3.0, 3.0], 1.0)]
        """
        line = max(1, _LINE_BYTES // np.dtype(dtype).itemsize)
        stride = -(-length // line) * line
        # As long on every node as the largest node needs, because all ranks must pass one length.
        # Memory that no rank writes takes no pages.
        most = 1 if once_per_node else max(self.nodes.count(node) for node in self.nodes)
        number = self._arenas + 1
        shared = self._allocate(length if length < 1 else stride * most, dtype, number)
        if shared is None:
            return None
        self._arenas = number
        vectors = {}
        for index, rank in enumerate(self.peers):
            at = 0 if once_per_node else index * stride
            vectors[rank] = shared[at : at + length]
        return Arena(self, vectors, number, once_per_node=once_per_node)

    # ---------------------------------------------------------------------------- point to point

    def send(self, array: Array, destination_rank: int, tag: int = 0) -> None:
        """Send a copy of ``array``; returns without waiting for the receiver.

        Messages arrive in order for each (pair of ranks, tag).

        Raises
        ------
        ValueError
            For a rank outside the world or this one, or a negative tag.
        """
        self._check_send(array, destination_rank, tag, "send")
        steps = ITransport._steps_send(self, array, destination_rank, tag)  # which sends a copy
        self._begin(steps, destination_rank, tag, array).wait()

    def send_async(self, array: Array, destination_rank: int, tag: int = 0) -> Transfer:
        """Issue a `send` without waiting for it, and without a copy if the transport allows it.

        Do not change ``array`` before ``wait`` of the returned `Transfer` has returned. It may
        return only when the receiver has taken the message. So two ranks may wait for ever if each
        waits for its send to the other before it receives.

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
        steps = self._steps_send(array, destination_rank, tag)
        return self._begin(steps, destination_rank, tag, array)

    def receive(
        self, source_rank: int, count: int, tag: int = 0, *, dtype: DTypeLike | None = None
    ) -> Array:
        """Wait for the next message of ``source_rank`` with ``tag`` and return it.

        Parameters
        ----------
        source_rank : int
            The sender.
        count : int
            Number of elements expected.
        tag : int
            The sender's tag.
        dtype : dtype, optional
            Dtype expected; any by default.

        Returns
        -------
        Array
            The message in the shape in which it was sent, a new array.

        Raises
        ------
        ValueError
            For a rank outside the world or this one, a negative tag or count, or a dtype that
            cannot be sent.
        CommunicationError
            If the message has another dtype or number of elements; it then stays queued.
        """
        self._check_receive(source_rank, count, tag)
        expected = None if dtype is None else _sendable(dtype, "receive")
        steps = self._take(source_rank, count, tag, expected)
        transfer = self._begin(steps, source_rank, tag)
        try:
            message: Array = transfer.wait()
        except BaseException:
            # No caller holds it, so it must not take a later message.
            transfer.cancel()
            raise
        return message

    def receive_async(
        self, source_rank: int, count: int, tag: int = 0, *, dtype: DTypeLike
    ) -> Transfer:
        """Issue a `receive` without waiting for it, so that the message may come meanwhile.

        Receives of one (source, tag) take messages in the order in which they were issued, whatever
        the order of their waits.

        Parameters
        ----------
        source_rank, count, tag : int
            As `receive`.
        dtype : dtype
            Dtype of the message.

        Returns
        -------
        Transfer
            Its ``wait`` returns the message, a new array in the shape in which it was sent; its
            ``cancel`` gives the receive up.

        Raises
        ------
        ValueError
            As `receive`, and for a dtype that cannot be sent.
        CommunicationError
            By ``wait``, if the message has another dtype or number of elements. The message then
            stays queued.
        """
        self._check_receive(source_rank, count, tag)
        expected = _sendable(dtype, "receive_async")
        steps = self._take(source_rank, count, tag, expected)
        return self._begin(steps, source_rank, tag)

    def _take(self, source: int, count: int, tag: int, dtype: DType | None) -> Steps:
        """Return the next message after those that earlier receives of (source, tag) take."""
        receives, turn = self._receives, object()
        line = receives.setdefault((source, tag), deque())
        try:
            line.append(turn)
            if line[0] is not turn:
                yield Condition(lambda: line[0] is turn)
            return (yield from self._steps_receive(source, count, tag, dtype))
        finally:
            line.remove(turn)
            if not line:
                receives.pop((source, tag), None)

    def _begin(self, steps: Steps, peer: int, tag: int, sent: Array | None = None) -> Transfer:
        """Issue the send of ``sent``, or a receive. Collectives do not wait for it."""
        is_send, in_flight, recorder = sent is not None, None, current_recorder.get()
        if recorder is not None:
            source, destination = (self.rank, peer) if is_send else (peer, self.rank)
            way = {"group": self.group, "source": source, "destination": destination, "tag": tag}
            # Group, ends and tag are the same on both ranks, so a trace can join the two ends.
            way |= {"axis": self.axis} if self.axis else {}
            in_flight = InFlight(recorder, "send" if is_send else "receive", way, sent)
        message = MessageWait(self.world_ranks[peer], tag, is_send, self.label)
        transfer = Transfer(self, steps, in_flight, message)
        try:
            with self._session:
                self._require_whole()
                self._transfers.append(transfer)
                transfer.advance()
                self._forget_done()
            if in_flight is not None:
                in_flight.blocked(in_flight.start)
        except BaseException:
            if not is_send:
                transfer.cancel()  # as in `receive`, because no caller gets it
            raise
        return transfer

    def begin_round(self) -> int:
        """Return the number, from 0, of a new round of messages, to be used in their tags.

        Code that exchanges messages in rounds takes one number for each round, on all ranks alike.
        Messages of a round that failed halfway then differ from those of the next round.
        """
        self._rounds += 1
        return self._rounds - 1

    def _check_send(self, array: Array, destination: int, tag: int, name: str) -> None:
        self._ready()
        check_array(array, name)
        check_peer(destination, tag, self.rank, self.world_size)
        self.traffic.add({"send": array.nbytes})

    def _check_receive(self, source: int, count: int, tag: int) -> None:
        self._ready()
        check_peer(source, tag, self.rank, self.world_size)
        as_count("count", count, least=0)

    # -------------------------------------------------------------------------- the end of a world

    def _break(self, where: str, error: BaseException) -> None:
        """End this world because ``error`` interrupted a collective of this rank, at ``where``.

        Every later call raises, on this world and on all worlds of the same root. A subclass also
        notifies the other ranks.
        """
        if self.world_size > 1 and self._session.broken is None:
            # World numbers, because the user reads messages of several groups side by side.
            me = self.world_ranks[self.rank]
            self._session.broken = CommunicationError(
                f"rank {me} was cut off by {type(error).__name__} {where}, and the other ranks go "
                "on from there: this world has ended, and nothing more can be called on it. Let "
                "such an exception end the job"
            )

    def _shrink(self) -> Self:
        """Return a new, initialised root world of the remaining ranks.

        The caller then retires this rank's old worlds. Here it raises: no rank outlives another.
        """
        raise CommunicationError(f"{self.describe()} ends when one of its ranks does")

    def _retire(self, successor: Self) -> None:
        """End this world; ``successor``, the world of the remaining ranks, replaces it."""
        stop_recording(self)
        if self._is_root and self._initialized:
            self.status.end(RankState.LEFT)
        self._initialized, self._successor = False, successor
        self._pending.clear()
        self._transfers.clear()

    @property
    def _newest(self) -> Self:
        """The world that has replaced this one after ranks were lost; itself if none has."""
        newest = self
        while newest._successor is not None:
            newest = newest._successor
        return newest

    # ----------------------------------------------------------------------------- calls under way

    def _start(self, call: Call, steps: Callable[..., Steps], *arguments: object) -> Work:
        """Number, record and begin a collective: ``steps`` of ``call`` and ``arguments``."""
        if not self._initialized:
            raise self._not_ready_error()
        with self._session as session:
            if session.broken is not None:
                self._require_whole()
            if self._ended is not None:
                raise self._ended
            # Not stored before `_admit`: a refused call must leave the numbers of all ranks equal.
            sequence = call.sequence = self._sequence + 1
            call.group = self.label
            self._admit(call)
            try:
                (session.status or self.status).record(call, sys._getframe(2))
                self._sequence = sequence
                return self._issue(call, steps(call, *arguments))
            except BaseException as error:
                if self._sequence == sequence:  # the other ranks wait in it for this one
                    self._break(call.where, error)
                raise

    def _is_alone_on_gpu(self, array: Array) -> bool:
        return self._world_size == 1 and is_device_array(array)

    def _steps_alone(self, call: Call, array: Array, out: Array | None) -> Steps:
        """Run a collective of a world of one on a GPU: at most one copy, without a wait."""
        self._verify([call])
        yield from ()  # steps are a generator, of which these wait for nothing
        if out is None:
            out = array.copy()
        elif call.operation is ReductionOperation.AVERAGE:
            self._reducer.reduce([array.reshape(-1)], call.operation, out.reshape(-1))
        elif address(out) != address(array):
            overlaps = array_namespace(array).may_share_memory(array, out)
            copy_into(out, array.copy() if overlaps else array)
        return out

    def _issue(self, call: Call, steps: Steps) -> Work:
        """Begin a collective, and advance it as far as possible without blocking."""
        recorder = current_recorder.get()
        in_flight = None
        if recorder is not None:
            # Group and sequence number are the same on every rank, so traces can be compared.
            about = {"bytes": call.nbytes, "group": self.group, "sequence": call.sequence}
            about |= {"axis": self.axis} if self.axis else {}
            if call.filename:
                about["site"] = f"{call.filename.rpartition('/')[2]}:{call.line}"
            in_flight = InFlight(recorder, call.kind.label, about)
        work = Work(self, steps, in_flight, call)
        self._pending.append(work)
        work.advance()
        self._forget_done()
        if in_flight is not None:
            in_flight.blocked(in_flight.start)
        return work

    def _forget_done(self) -> None:
        while self._pending and self._pending[0].done:
            self._pending.popleft()
        if self._transfers:
            self._transfers = [transfer for transfer in self._transfers if not transfer.done]

    def _verify(self, calls: Sequence[Call]) -> None:
        """Refuse calls that do not match, with the same error on every rank."""
        # In a world of one only the rows of ``out`` can be wrong.
        if len(calls) == 1 and calls[0].out_rows < 0:
            return

        def diverged(upto: int) -> str:
            return divergence(self._records(), self.label, upto)

        check_calls(calls, self.world_ranks, self.label, diverged, self._session.subjects.text)

    def _ready(self) -> None:
        if not self._initialized:
            raise self._not_ready_error()

    def _not_ready_error(self) -> CommunicationError:
        if self._successor is not None:
            return NotInitializedError(
                f"{self.describe()} has lost ranks and has ended: go on with the backend of "
                f"{self._successor.world_size} that shrink() returned, and with groups, models and "
                "optimizers that are made on it"
            )
        return NotInitializedError(
            f"{self.describe()} is not initialised; call initialize(), or use "
            "mpishard.init() which returns an initialised backend"
        )

    def _name_group(self, purpose: str) -> None:
        """Give this group, which was split off another, a label with its purpose."""
        steps = [step.partition(".")[0] for step in self.group.split("/")[1:]]
        self.label = group_label(purpose, ".".join(steps), self.world_ranks)


def _sendable(dtype: DTypeLike, name: str) -> DType:
    """Return the dtype of a message, or refuse one that cannot be sent."""
    expected = np.dtype(dtype)
    check_dtype(expected, f"{name} cannot take")
    return expected
