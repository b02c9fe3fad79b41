"""The contract that every way of talking between ranks fulfils.

Concurrency: a backend belongs to one thread of one rank. All ranks issue the collectives of one
backend in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import DTypeLike

from mpishard.arguments import as_integer
from mpishard.arrays import Array, array_namespace
from mpishard.communication.contract.arguments import (
    check_array,
    check_out,
    check_root,
    check_writeable,
    piece_sizes,
)
from mpishard.communication.contract.call import DTYPES, Kind
from mpishard.communication.contract.point_to_point import PointToPoint
from mpishard.communication.contract.reduction import (
    ReductionOperation,
    accumulation_dtype,
    check_reducible,
)
from mpishard.communication.contract.work import Work
from mpishard.errors import CommunicationError

__all__ = ["CommunicationBackend"]


class CommunicationBackend(PointToPoint):
    """How ranks talk: collectives on NumPy or CuPy arrays, with checks before data is mixed.

    Every collective takes any C-contiguous array of any length, 0 and fewer elements than ranks
    included, and splits along dim 0 as `ShardLayout` does unless told otherwise. Reductions
    combine in one tree order (`mpishard.communication.contract.reduction`): the same inputs
    give the same bits on every backend, rank and run.

    A subclass gives what `Transport` names: ``_steps_<collective>`` generators, `_drive`, `_send`,
    `_steps_receive`, and the two life-cycle hooks.

    Use as a context manager (``with backend:``) on threads of your own: an exception in the body
    is told to the other ranks, and leaving the body counts as leaving the world.
    """

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
        check_array(array, "all_reduce")
        check_reducible(array.dtype, operation)
        if out is None:
            out = array
        check_out(out, array.shape, array.dtype, "all_reduce")
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
            Takes the piece: shape (counts[rank], ...), of the array's dtype; of 16-bit floats it
            may be float32, in which they are summed, and then nothing is rounded.

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
        check_array(array, "all_gather", needs_dim=True)
        if out is not None:
            check_array(out, "all_gather", needs_dim=True)
            check_out(out, (out.shape[0], *array.shape[1:]), array.dtype, "all_gather")
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
        TypeError, ValueError
            For an argument that is wrong on this rank alone.
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
        return self.broadcast_async(array, root).wait()

    def broadcast_async(self, array: Array | None, root: int = 0) -> Work:
        """As `broadcast`, issued and not waited for."""
        check_root(root, self.world_size)
        if array is not None or self.rank == root:
            check_array(array, "broadcast")
        if array is not None and self.rank != root:
            check_writeable(array, "broadcast")
        call = self._call(Kind.BROADCAST, array, root=root)
        return self._issue(call, self._steps_broadcast(call, array, root))

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
        return self.scatter_async(array, root, counts=counts, strict=strict).wait()

    def scatter_async(
        self,
        array: Array | None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        strict: bool = False,
    ) -> Work:
        """As `scatter`, issued and not waited for."""
        check_root(root, self.world_size)
        pieces: tuple[int, ...] | None = None
        if self.rank == root:
            check_array(array, "scatter", needs_dim=True)
            assert array is not None
            pieces = piece_sizes(array.shape[0], counts, self.world_size, "scatter", strict=strict)
        call = self._call(Kind.SCATTER, array if self.rank == root else None, root=root)
        return self._issue(call, self._steps_scatter(call, array, pieces, root))

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
        return self.gather_async(array, root).wait()

    def gather_async(self, array: Array, root: int = 0) -> Work:
        """As `gather`, issued and not waited for."""
        check_root(root, self.world_size)
        check_array(array, "gather", needs_dim=True)
        call = self._call(Kind.GATHER, array, root=root)
        return self._issue(call, self._steps_gather(call, array, root))

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
        received: list[Array] = self.all_to_all_async(parts).wait()
        return received

    def all_to_all_async(self, parts: Sequence[Array]) -> Work:
        """As `all_to_all`, issued and not waited for."""
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
        call = self._call(Kind.ALL_TO_ALL, parts[0])
        return self._issue(call, self._steps_all_to_all(call, parts))

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.barrier_async().wait()

    def barrier_async(self) -> Work:
        """As `barrier`; done when every rank has called it."""
        call = self._call(Kind.BARRIER, None)
        return self._issue(call, self._steps_barrier(call))

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
        order = self.rank if key is None else as_integer("key", key)
        call = self._call(Kind.SPLIT, None)
        member = self._issue(call, self._steps_split(call, color, order)).wait()
        if member is not None:
            member._is_root = False
            member.group = f"{self.group}/{call.sequence}.{color}"
            member.check_collectives = self.check_collectives
            member.status, member.label = self.status, "a new group"
            member.initialize()
            if member._world_ranks is None:
                mine = np.array([self.world_ranks[self.rank]])
                member._world_ranks = tuple(member.all_gather(mine).tolist())
            member._name_group("")
        return member  # type: ignore[no-any-return]

    def shrink(self) -> Self:
        """Go on without the ranks that are gone. Called by each rank that is left.

        To be called where a collective has raised `PeerError`, or any time. Ranks that still wait
        in this world, or in one that was split off it, raise `PeerError` then. A rank that has come
        to its end, or called `shutdown`, is not in the new world. This backend, its groups and
        what was made on them refuse from then on; arrays of `allocate_shared` stay as they are,
        half written where a rank was lost. What is to go on is restored from a checkpoint:
        `mpishard.launch` does all of it, with ``on_failure="shrink"``.

        Returns
        -------
        CommunicationBackend
            The initialised world of the ranks that are left, numbered from 0 in their old order.

        Raises
        ------
        NotInitializedError
            Before `initialize` and after `shutdown`.
        CommunicationError
            Of a world that was split off; where a rank's end ends all: under MPI without
            ``init(on_failure="shrink")``.
        CollectiveTimeoutError
            In memory, where a rank that is left does not come in time.

        Examples
        --------
        Rank 1 is lost; the others go on as ranks 0 and 1 of 2:

        >>> from mpishard import run_in_threads
        >>> from mpishard.errors import PeerError
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
                f"{self.describe()} was split off another world, which is the one to shrink(); "
                "split that again then"
            )
        heir = self._shrink()
        self._retire(heir)
        return heir

    # ------------------------------------------------------------------------------------- memory

    def allocate_shared(self, length: int, dtype: DTypeLike) -> Array | None:
        """Memory that all ranks of this rank's node read and write in place. Collective.

        One array for each node: what one rank writes the others of its node see, after the next
        collective of both. Collectives know such memory by its address: where the arrays of a
        node's ranks lie in one allocation, reductions read them in place, and an ``out`` that is
        the same array on all ranks of a node is written once. It is let go when no array in it
        is left. Pages belong to the NUMA domain of the rank that first writes them.

        Parameters
        ----------
        length : int
            Number of elements, 1 or more; the same on all ranks.
        dtype : dtype
            Of the elements; the same on all ranks.

        Returns
        -------
        Array or None
            Zeros, of shape (length,), beginning on a page; None, on every rank, where a node's
            ranks cannot share memory (``MPISHARD_ARENA=off``, or a system without).

        Raises
        ------
        ValueError
            For a length below 1, or a dtype that does not travel.
        CollectiveMismatchError
            Where length or dtype differ between ranks.

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
        if length < 1:
            raise ValueError(f"allocate_shared needs a length of 1 or more, got {length}")
        # Has the shape and dtype that are compared, and no memory.
        wanted = np.broadcast_to(np.zeros((), dtype), (length,))
        if wanted.dtype not in DTYPES:
            raise ValueError(f"allocate_shared cannot share dtype {wanted.dtype.name}")
        call = self._call(Kind.ALLOCATE_SHARED, wanted)
        memory = self._issue(call, self._steps_allocate_shared(call, wanted.nbytes)).wait()
        if memory is None:
            return None
        self._regions.add(memory)
        return memory[: wanted.nbytes].view(wanted.dtype)
