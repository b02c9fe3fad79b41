"""State of a JAX model besides its parameters, such as running means: the same on all ranks."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.base import Array, DType, ShardingError
from mpishard.checkpoint import bytes_of, tensors_of
from mpishard.communication import CommunicationBackend, differences


class JaxState:
    """Tree of arrays that each pass of a loss replaces, and that all ranks have in common.

    `share` makes one state of those that the ranks' passes have returned. Leaves of floats are
    averaged by the ranks' numbers of samples. Integers and bools must be equal.

    Parameters
    ----------
    tree : pytree
        Structure and first values, which are copied. With float64 parameters, leaves of float32
        become float64, as what a loss computes of both is float64.
    dtype : numpy.dtype
        Dtype of the parameters.

    Raises
    ------
    TypeError
        If a leaf is not an array of floats, integers or bools. The message names it.
    """

    def __init__(self, tree: Any, dtype: DType) -> None:
        import jax

        found, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self.names = names_of(tree, "state")
        self.leaves: list[Array] = []
        for name, (_, leaf) in zip(self.names, found, strict=True):
            if is_key(leaf):
                raise TypeError(
                    f"state {name!r} is a key of random numbers, which would draw the same on all "
                    "ranks: leave it out, and draw by the keys that the loss receives (of Flax NNX "
                    "modules: nnx.reseed)"
                )
            array = np.array(jax.numpy.asarray(leaf))
            if not (is_float(array.dtype) or array.dtype.kind in "iub"):
                raise TypeError(
                    f"state {name!r} must be an array of floats, integers or bools, got "
                    f"{array.dtype.name}"
                )
            self.leaves.append(array.astype(dtype) if array.dtype == np.float32 else array)
        # Samples since the last exchange, and those of earlier exchanges inside a replica.
        self._fresh = self._apart = 0.0

    @property
    def tree(self) -> Any:
        """The leaves in their structure."""
        return self._structure.unflatten(self.leaves)

    def checked(self, tree: Any) -> list[Any]:
        """Return the leaves of a state that a loss returned, in the dtypes of these; for a trace.

        Raises
        ------
        TypeError
            If it has other leaves, shapes or wider dtypes. The message names one.
        """
        import jax

        given = dict(zip(names_of(tree, "state"), jax.tree_util.tree_leaves(tree), strict=True))
        leaves = []
        for name, old in zip(self.names, self.leaves, strict=True):
            new = given.pop(name, None)
            form = "none" if new is None else form_of(new := jax.numpy.asarray(new))
            if new is None or new.shape != old.shape or not _fits(new.dtype, old.dtype):
                raise TypeError(
                    f"the loss returned {form} as state {name!r}, which is {form_of(old)}: a state "
                    "keeps its names, shapes and dtypes. Convert it in the loss, or give it so"
                )
            leaves.append(new.astype(old.dtype))
        if given:
            raise TypeError(f"the loss returned state {next(iter(given))!r}, which state= has not")
        return leaves

    def take(self, leaves: Sequence[object], samples: int) -> None:
        """Take the state that a pass over ``samples`` samples returned."""
        self.leaves = [np.asarray(leaf) for leaf in leaves]
        self._fresh += samples

    # ---------------------------------------------------------------------------------- all ranks

    def distribute(self, world: CommunicationBackend) -> None:
        """Take rank 0's values. Collective.

        Raises
        ------
        ValueError
            On every rank, if names, shapes or dtypes differ between ranks.
        """
        self._world_size = world.world_size
        forms = {
            f"state {name!r}": form_of(leaf)
            for name, leaf in zip(self.names, self.leaves, strict=True)
        }
        if differing := differences(world, forms):
            raise ValueError(f"every rank must have a state of the same form; by rank, {differing}")
        if self.leaves and world.world_size > 1:
            self.leaves = [*self.leaves]
            self._unpack(range(len(self.leaves)), world.broadcast(self._packed(), root=0))

    def share(self, ranks: CommunicationBackend) -> None:
        """Make one state of those that the passes of ``ranks`` returned. Collective.

        Raises
        ------
        ShardingError
            On every rank, if a leaf that is not averaged differs. The message names it.
        """
        is_world = ranks.world_size == self._world_size
        # Replicas that train apart have exchanged inside of each; all of it counts between them.
        weight = self._fresh + (self._apart if is_world else 0.0)
        self._fresh = 0.0
        if not self.leaves or ranks.world_size == 1:
            self._apart += weight
            return
        # A new list, because copies of the model have the old one.
        self.leaves = [*self.leaves]
        exact = [i for i, leaf in enumerate(self.leaves) if not is_float(leaf.dtype)]
        if exact:
            self._require_equal(exact, weight > 0, ranks)
        averaged = [i for i in range(len(self.leaves)) if i not in exact]
        values = [self.leaves[i].astype(np.float64).reshape(-1) for i in averaged]
        # A rank without samples has the state of before. 0 * infinity would be NaN.
        parts = [weight * v if weight else np.zeros_like(v) for v in values]
        sums = ranks.all_reduce(np.concatenate([*parts, [weight]]))
        total, position = float(sums[-1]), 0
        for index, part in zip(averaged, parts, strict=True):
            old, mean = self.leaves[index], sums[position : position + part.size] / (total or 1.0)
            position += part.size
            if total:
                self.leaves[index] = mean.astype(old.dtype).reshape(old.shape)
        self._apart = 0.0 if is_world else self._apart + total / ranks.world_size

    def _require_equal(
        self, indices: Sequence[int], has_samples: bool, ranks: CommunicationBackend
    ) -> None:
        """Take leaves that all ranks with samples have in common; refuse others. Collective."""
        packed = self._packed(indices)
        rows = ranks.all_gather(np.concatenate([[np.uint8(has_samples)], packed]))
        rows = rows.reshape(ranks.world_size, -1)
        used = np.flatnonzero(rows[:, 0])
        if used.size == 0:
            return
        self._unpack(indices, rows[used[0], 1:])
        chosen, position = rows[used[0]], 1
        for index in indices:
            leaf = self.leaves[index]
            columns = slice(position, position + leaf.nbytes)
            position += leaf.nbytes
            for rank in used[(rows[used, columns] != chosen[columns]).any(axis=1)]:
                other = rows[rank, columns].copy().view(leaf.dtype).reshape(leaf.shape)
                place = np.argwhere(other != leaf)[0]
                raise ShardingError(
                    f"state {self.names[index]!r} must be the same on all ranks, because "
                    f"{leaf.dtype.name} cannot be averaged: element {place.tolist()} is "
                    f"{leaf[tuple(place)]} on rank {used[0]} and {other[tuple(place)]} on rank "
                    f"{rank}. Make it a float, or let it depend on no sample"
                )

    def _packed(self, indices: Sequence[int] | None = None) -> Array:
        chosen = self.leaves if indices is None else [self.leaves[i] for i in indices]
        return np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in chosen])

    def _unpack(self, indices: Sequence[int], packed: Array) -> None:
        position = 0
        for index in indices:
            old = self.leaves[index]
            part = packed[position : position + old.nbytes].copy()
            self.leaves[index] = part.view(old.dtype).reshape(old.shape)
            position += old.nbytes

    # -------------------------------------------------------------------------------- checkpoints

    def to_text(self) -> str:
        """Return the leaves by name, as text for a checkpoint's metadata."""
        leaves = {}
        for name, leaf in zip(self.names, self.leaves, strict=True):
            # NumPy cannot read dtypes of JAX such as bfloat16, which are exact in float32.
            plain = leaf if leaf.dtype.kind in "fiub" else leaf.astype(np.float32)
            # np.ascontiguousarray would give an array without dims one.
            leaves[name] = np.asarray(plain, order="C")
        return base64.b64encode(bytes_of(leaves, None)).decode()

    def values_in(self, text: str) -> list[Array]:
        """Return the leaves in a checkpoint's text, in these dtypes.

        Raises
        ------
        ValueError
            If names, shapes or kinds of dtypes differ. The message names one.
        """
        saved = tensors_of(base64.b64decode(text))
        here = dict(zip(self.names, self.leaves, strict=True))
        for name in {**here, **saved}:
            old, new = here.get(name), saved.get(name)
            if old is None or new is None or old.shape != new.shape or not _alike(old, new):
                raise ValueError(
                    f"the checkpoint has state {name!r} as {form_of(new)}, and the model has it "
                    f"as {form_of(old)}"
                )
        return [saved[name].astype(old.dtype) for name, old in here.items()]


def names_of(tree: Any, alone: str) -> list[str]:
    """Return the path to each leaf of a pytree, as in ``params.Dense_0.kernel``.

    A tree that is one leaf has the name ``alone``.
    """
    import jax

    def names(is_leaf: Any) -> list[str]:
        found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
        return [
            jax.tree_util.keystr(path, simple=True, separator=".") or alone for path, _ in found
        ]

    # A Variable of Flax NNX is named as in the module, without the ".value" of its only leaf.
    whole, short = names(None), names(lambda node: hasattr(node, "get_raw_value"))
    return short if len(short) == len(whole) else whole


def is_key(leaf: object) -> bool:
    """Return True for a typed key of ``jax.random``, or an array of keys."""
    import jax

    return bool(jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key))


def is_float(dtype: DType) -> bool:
    """Return True for a dtype of real floats, also for those of JAX such as bfloat16."""
    import jax

    return bool(jax.dtypes.issubdtype(dtype, np.floating))


def form_of(leaf: Any) -> str:
    """Return dtype and shape of an array for messages; "none" for None."""
    return "none" if leaf is None else f"{leaf.dtype.name}{list(leaf.shape)}"


def _fits(new: DType, old: DType) -> bool:
    return new == old or (is_float(new) and is_float(old) and new.itemsize < old.itemsize)


def _alike(one: Array, other: Array) -> bool:
    return is_float(one.dtype) == is_float(other.dtype) and (
        is_float(one.dtype) or one.dtype == other.dtype
    )
