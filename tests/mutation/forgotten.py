"""Replacements of collectives: the values that a rank has if it forgets to communicate.

Each function has the name of what is forgotten, takes what that was called on and its arguments,
and does what each rank can do alone: nothing crashes that need not, so that a test must look at
numbers, or at what a rank was to hear of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpishard.base.layout import ShardLayout
from mpishard.communication import agreement


class Done:
    """The result of a collective that did not run."""

    def __init__(self, result: Any = None) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result

    wait_until_over = wait


def reference(backend: Any, name: str) -> Callable[..., Any]:
    """A collective that another function is to call."""
    return functools.partial(globals()[name], backend)


def all_reduce(
    backend: Any, array: Any, operation: Any = None, *, out: Any = None, subject: int = 0
) -> Any:
    """The array as it is."""
    if out is None:
        return array
    out[...] = array
    return out


def all_reduce_async(*arguments: Any, **options: Any) -> Done:
    return Done(all_reduce(*arguments, **options))


def all_to_all(backend: Any, parts: Any) -> Any:
    """The values of this rank, as if all ranks had sent them."""
    return [parts[backend.rank]] * backend.world_size


def all_to_all_async(*arguments: Any) -> Done:
    return Done(all_to_all(*arguments))


def reduce_scatter(backend: Any, array: Any, *, subject: int = 0) -> Any:
    """This rank's own part."""
    return array[ShardLayout(len(array), backend.world_size).slice(backend.rank)].copy()


def reduce_scatter_async(backend: Any, array: Any, *, out: Any = None, subject: int = 0) -> Done:
    """This rank's own part."""
    mine = reduce_scatter(backend, array)
    if out is None:
        return Done(mine)
    out[...] = mine
    return Done(out)


def all_gather(backend: Any, array: Any, *, out: Any = None, subject: int = 0) -> Any:
    """This rank's values for every rank; into ``out`` this rank's part only."""
    if out is None:
        return np.concatenate([array] * backend.world_size)
    out[ShardLayout(len(out), backend.world_size).slice(backend.rank)] = array
    return out


def all_gather_async(*arguments: Any, **options: Any) -> Done:
    return Done(all_gather(*arguments, **options))


def broadcast(backend: Any, array: Any, root: int = 0, *, subject: int = 0) -> Any:
    return array


def scatter(
    backend: Any, array: Any, root: int = 0, *, counts: Sequence[int], subject: int = 0
) -> Any:
    """The root's own part, and zeros elsewhere."""
    return np.zeros(counts[backend.rank]) if array is None else array[: counts[0]].copy()


def gather(backend: Any, array: Any, root: int = 0, *, subject: int = 0) -> Any:
    return array if backend.rank == root else None


def split(backend: Any, color: int | None, key: int | None = None) -> Any:
    """The backend of all ranks, as if it had not been split."""
    return backend


def allocate_shared(backend: Any, length: int, dtype: Any) -> None:
    """None, as on machines without shared memory."""


def allocate_arena(
    backend: Any, length: int, dtype: Any = None, *, once_per_node: bool = False
) -> None:
    """None, as on machines without shared memory."""


def reduce_into(arena: Any, out: Any, part: slice = slice(None), *, subject: int = 0) -> Done:
    """This rank's own part."""
    return reduce_scatter_async(arena._backend, arena.mine[part], out=out)


def reduce_in_place(arena: Any, part: slice = slice(None), *, subject: int = 0) -> Done:
    """This rank's own vector."""
    return Done(arena.mine[part])


def gather_in_place(arena: Any, piece: Any, part: slice = slice(None), *, subject: int = 0) -> Done:
    """This rank's part only."""
    return all_gather_async(arena._backend, piece, out=arena.mine[part])


def barrier_async(backend: Any, *, subject: int = 0) -> Done:
    return Done()


def fence(arena: Any, *, subject: int = 0) -> Done:
    return Done()


def gather_texts(backend: Any, text: str, subject: int = 0) -> list[str]:
    return [text] * backend.world_size if backend.rank == 0 else []


def differences(backend: Any, mine: Any, subject: int = 0) -> str:
    return ""


def share_path(backend: Any, path: Any) -> Any:
    return path


def share_text(backend: Any, text: str) -> str:
    return text


def agree(backend: Any, prepare: Any, subject: int = 0) -> Any:
    return agreement.agree(None, prepare) * backend.world_size


def same_outcome(backend: Any, subject: int = 0) -> Any:
    return agreement.same_outcome(None)


def sum_over_owners(context: Any, array: Any) -> Any:
    return array


def nothing(*arguments: Any, **options: Any) -> None:
    """The replacement of calls that return nothing."""


barrier = progress = wait = wait_until_over = nothing
_finish_oldest = distribute_constants = fill = finish = publish = nothing
reduce = refresh = share_changed_state = synchronize = await_reductions = nothing
