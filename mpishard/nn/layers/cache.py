"""Keys and values of the sequences that a model reads, kept in blocks of memory.

Shape suffixes: G heads of keys and values, T new positions, S all positions of a sequence, K size
of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from mpishard.base import NAMESPACES, Array, check_sizes

_Slots = slice | np.ndarray


class KeyValueCache:
    """Keys and values of any number of sequences, for the attention layers of one model.

    Memory is cut into blocks of `block_size` positions. A sequence holds as many blocks as its
    length needs, anywhere in it, so that sequences of different lengths share the memory without
    gaps: Kwon et al., "PagedAttention", 2023 (arXiv:2309.06180), section 4.

    Layers hold no arrays. The cache belongs to the caller, who passes it in
    ``Context(training=False, cache=cache)``. The input of a forward pass inside `reading` has only
    the *new* tokens; row b of the batch continues the b-th sequence that is read. Attention layers
    append the new keys and values to those of the sequence, and attend to all of them. Positional
    embeddings continue with the sequence's next position.

    The arrays of a layer, of shape (G, block_count * block_size, K), are made when the layer first
    runs, with the dtype and on the device of its input. G is the number of heads on this rank.

    Parameters
    ----------
    block_count : int
        Number of blocks that all sequences share.
    block_size : int
        Number of positions per block.

    Attributes
    ----------
    starts : list of int
        Number of positions that each row's sequence had before the pass under way. The list is
        empty between passes.

    Raises
    ------
    ValueError
        If a size is not an integer >= 1.

    Examples
    --------
    >>> import numpy as np
    >>> from mpishard.nn import CausalAttention, Context, KeyValueCache
    >>> x = np.random.default_rng(0).standard_normal((1, 4, 6))
    >>> core, cache = CausalAttention(1), KeyValueCache(block_count=2, block_size=2)
    >>> context, sequence = Context(training=False, cache=cache), cache.add()
    >>> with cache.reading([sequence], 3):
    ...     first, _ = core.forward({}, x[:, :3], context)
    >>> with cache.reading([sequence], 1):
    ...     last, _ = core.forward({}, x[:, 3:], context)
    >>> whole, _ = core.forward({}, x, Context(training=False))
    >>> bool(np.allclose(whole, np.concatenate([first, last], axis=1), rtol=0, atol=1e-15))
    True
    """

    def __init__(self, block_count: int, block_size: int = 16) -> None:
        check_sizes("KeyValueCache", block_count=block_count, block_size=block_size)
        self.block_count = int(block_count)
        self.block_size = int(block_size)
        self.starts: list[int] = []
        self._count = 0
        self._rows: list[tuple[_Slots, _Slots]] = []
        # Free blocks are sorted and the lowest are taken first. A single sequence then has one
        # contiguous run of memory, which attention reads without a copy.
        self._free = list(range(self.block_count))
        self._blocks: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0
        self._arrays: dict[str, tuple[Array, Array]] = {}

    @property
    def byte_count(self) -> int:
        """Size in bytes of the arrays of all layers that have run."""
        return sum(int(array.nbytes) for pair in self._arrays.values() for array in pair)

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no sequence holds."""
        return len(self._free)

    def add(self) -> int:
        """Begin a sequence without positions, and return its number."""
        self._next += 1
        self._blocks[self._next], self._lengths[self._next] = [], 0
        return self._next

    def length(self, sequence: int) -> int:
        """Number of positions of a sequence that have been read."""
        self._check([sequence])
        return self._lengths[sequence]

    def free(self, sequence: int) -> None:
        """Remove a sequence, whose blocks become free for others."""
        self._check([sequence])
        # Sorted again, so that the next sequence gets the lowest blocks, if possible in a row.
        self._free = sorted(self._free + self._blocks.pop(sequence))
        del self._lengths[sequence]

    def blocks_for(self, positions: int) -> int:
        """Number of blocks that a sequence of ``positions`` positions needs."""
        return -(-positions // self.block_size)

    @contextmanager
    def reading(self, sequences: Sequence[int], count: int) -> Iterator[None]:
        """Allow one forward pass, in the ``with`` statement, that reads ``count`` more positions.

        The positions are those of each of ``sequences``. At the end of the statement they count as
        read. If the pass fails, the sequences keep their lengths and the new blocks become free.

        Raises
        ------
        ValueError
            If a sequence is unknown or named twice, or there are too few free blocks for all of
            them. Nothing has changed then.
        """
        self._check(sequences)
        # Two rows of one sequence would write to the same positions.
        if len({*sequences}) < len(sequences):
            raise ValueError(f"a pass reads each sequence once, got {[*sequences]}")
        stops = {sequence: self._lengths[sequence] + count for sequence in sequences}
        wanted = {s: self.blocks_for(stop) - len(self._blocks[s]) for s, stop in stops.items()}
        if sum(wanted.values()) > len(self._free):
            raise ValueError(
                f"too few free blocks: {count} more positions for each of {len(sequences)} "
                f"sequences need {sum(wanted.values())} blocks of {self.block_size} positions, but "
                f"{len(self._free)} of {self.block_count} blocks are free. Free a sequence, or "
                "make the cache with more blocks"
            )
        # Blocks are taken only after the check of all sequences, so that a refusal changes nothing.
        for sequence, number in wanted.items():
            self._blocks[sequence] += self._free[:number]
            del self._free[:number]
        self.starts = [self._lengths[sequence] for sequence in sequences]
        self._count = count
        self._rows = [self._slots_of(sequence, stop) for sequence, stop in stops.items()]
        try:
            yield
        # Also for KeyboardInterrupt: the blocks would be lost for the cache's lifetime.
        except BaseException:
            for sequence, number in wanted.items():
                kept = len(self._blocks[sequence]) - number
                self._free = sorted(self._free + self._blocks[sequence][kept:])
                del self._blocks[sequence][kept:]
            raise
        else:
            # Only now, because every layer of the pass must append at the same position.
            self._lengths.update(stops)
        finally:
            self.starts, self._rows, self._count = [], [], 0

    def extend(
        self, name: str, keys_BGTK: Array, values_BGTK: Array
    ) -> Iterator[tuple[Array, Array]]:
        """Store the keys and values of a pass's new positions, row by row.

        Parameters
        ----------
        name : str
            Dotted name of the attention layer in the model.
        keys_BGTK, values_BGTK : Array
            Keys and values of the new positions.

        Yields
        ------
        keys_1GSK, values_1GSK : Array
            Keys and values of all positions of the row's sequence: views if the sequence's blocks
            are consecutive in memory, copies otherwise.

        Raises
        ------
        ValueError
            If the numbers of rows and positions are not those of a pass under way, or the heads
            are not those of earlier passes.
        """
        batch, heads, count, size = keys_BGTK.shape
        xp = NAMESPACES[type(keys_BGTK)]
        # The arrays are made here, as only the layer knows its number of heads, size and dtype.
        if name not in self._arrays:
            shape = heads, self.block_count * self.block_size, size
            self._arrays[name] = (
                xp.empty(shape, keys_BGTK.dtype),
                xp.empty(shape, values_BGTK.dtype),
            )
        arrays = self._arrays[name]
        if (known := (arrays[0].shape[0], arrays[0].shape[2])) != (heads, size):
            raise ValueError(
                f"{name} keeps keys for (heads, head size) = {known}, got {(heads, size)}: a cache "
                "is for one model"
            )
        if (len(self._rows), self._count) != (batch, count):
            raise ValueError(
                f"{name} got {batch} rows of {count} positions, and {len(self._rows)} rows of "
                f"{self._count} are to be read: run a pass inside KeyValueCache.reading, with the "
                "tokens of the sequences that are named there"
            )
        for row, slots in enumerate(self._rows):
            kept, new = (xp.asarray(s) if isinstance(s, np.ndarray) else s for s in slots)
            for array, given in zip(arrays, (keys_BGTK, values_BGTK), strict=True):
                array[:, new] = given[row]
            yield arrays[0][None, :, kept], arrays[1][None, :, kept]

    def _slots_of(self, sequence: int, stop: int) -> tuple[_Slots, _Slots]:
        """Return the slots of all positions up to ``stop`` in a layer's arrays, and of new ones."""
        blocks, size, start = self._blocks[sequence], self.block_size, self._lengths[sequence]
        first = blocks[0] if blocks else 0
        # Consecutive blocks are a slice, which is a view. An array of slots makes a copy.
        if blocks == list(range(first, first + len(blocks))):
            end = first * size + stop
            return slice(first * size, end), slice(first * size + start, end)
        slots = (np.array(blocks)[:, None] * size + np.arange(size)).reshape(-1)
        return slots[:stop], slots[start:stop]

    def _check(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            if sequence not in self._lengths:
                raise ValueError(
                    f"the cache has no sequence {sequence}: it has {sorted(self._lengths)}"
                )
