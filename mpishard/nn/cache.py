"""Keys and values of the tokens that a language model has read.

Shape suffixes: B batch, H heads, T new positions, S all positions, C capacity, K head size.
"""

from __future__ import annotations

from mpishard.arrays import Array, array_namespace
from mpishard.nn.sizes import check_sizes

__all__ = ["KeyValueCache"]


class KeyValueCache:
    """What the attention layers of one model keep of one batch of sequences, while it is read.

    Layers hold no arrays: the cache belongs to the caller, who passes it in
    ``Context(training=False, cache=cache)``. A forward pass is then given the *new* tokens alone:
    attention layers write their keys and values behind those of the `length` positions that
    were read before and attend to all of them, and positional embeddings begin at `length`. When
    the pass is over, the caller says so with `advance`; a pass that fails therefore leaves the
    cache as it was. The arrays of a layer, of shape (B, H, C, K), are made when it first runs, in
    the dtype and on the device of its input, and hold the heads that this rank has.

    Parameters
    ----------
    capacity : int
        Greatest number C of positions: at most the model's context length.

    Attributes
    ----------
    length : int
        Number of positions that have been read.

    Raises
    ------
    ValueError
        For a capacity that is no integer >= 1.

    Examples
    --------
    >>> import numpy as np
    >>> from mpishard.nn import CausalAttention, Context, KeyValueCache
    >>> x = np.random.default_rng(0).standard_normal((1, 4, 6))
    >>> core, cache = CausalAttention(1), KeyValueCache(4)
    >>> context = Context(training=False, cache=cache)
    >>> first, _ = core.forward({}, x[:, :3], context)
    >>> cache.advance(3)
    >>> last, _ = core.forward({}, x[:, 3:], context)
    >>> whole, _ = core.forward({}, x, Context(training=False))
    >>> bool(np.allclose(whole, np.concatenate([first, last], axis=1), rtol=0, atol=1e-15))
    True
    """

    def __init__(self, capacity: int) -> None:
        check_sizes("KeyValueCache", capacity=capacity)
        self.capacity = int(capacity)
        self.length = 0
        self._arrays: dict[str, tuple[Array, Array]] = {}

    @property
    def byte_count(self) -> int:
        """Bytes of all keys and values that there is room for."""
        return sum(int(array.nbytes) for pair in self._arrays.values() for array in pair)

    def extend(self, name: str, keys_BHTK: Array, values_BHTK: Array) -> tuple[Array, Array]:
        """Keep the keys and values of new positions.

        Parameters
        ----------
        name : str
            Dotted name of the attention layer in the model.
        keys_BHTK, values_BHTK : Array
            Of the positions from `length` on.

        Returns
        -------
        keys_BHSK, values_BHSK : Array
            Views of all that is kept, S = length + T.

        Raises
        ------
        ValueError
            Where they do not fit behind the others, or are of another batch.
        """
        batch, heads, count, size = keys_BHTK.shape
        stop = self.length + count
        if stop > self.capacity:
            raise ValueError(
                f"{self.length} positions are kept and {count} more do not fit in a cache for "
                f"{self.capacity}"
            )
        if name not in self._arrays:
            xp, shape = array_namespace(keys_BHTK), (batch, heads, self.capacity, size)
            self._arrays[name] = (
                xp.empty(shape, keys_BHTK.dtype),
                xp.empty(shape, values_BHTK.dtype),
            )
        keys_BHCK, values_BHCK = self._arrays[name]
        kept = (*keys_BHCK.shape[:2], keys_BHCK.shape[3])
        if kept != (batch, heads, size):
            raise ValueError(
                f"{name} keeps keys for (batch, heads, head size) = {kept}, got "
                f"{(batch, heads, size)}: a cache is for one batch of sequences"
            )
        keys_BHCK[:, :, self.length : stop] = keys_BHTK
        values_BHCK[:, :, self.length : stop] = values_BHTK
        return keys_BHCK[:, :, :stop], values_BHCK[:, :, :stop]

    def advance(self, count: int) -> None:
        """Count ``count`` more positions as read: a forward pass over them is over.

        Raises
        ------
        ValueError
            Where there is no room for them, or ``count`` is negative.
        """
        if not 0 <= count <= self.capacity - self.length:
            raise ValueError(
                f"cannot advance by {count}: {self.length} of {self.capacity} positions are read"
            )
        self.length += count

    def clear(self) -> None:
        """Forget all positions; the arrays stay for the next sequences."""
        self.length = 0
