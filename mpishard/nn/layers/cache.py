"""Keys and values of the sequences that a model reads, kept in blocks.

Shape suffixes: G heads of keys and values, T new positions, S all positions of a sequence, K size
of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from mpishard.arguments import check_sizes
from mpishard.arrays import Array, array_namespace

_Slots = slice | np.ndarray


class KeyValueCache:
    """The keys and values of any number of sequences, kept by the attention layers of one model.

    Kwon et al., "PagedAttention", 2023 (arXiv:2309.06180), section 4: memory is cut into blocks of
    `block_size` positions, and a sequence holds as many blocks as its length needs, wherever they
    lie. Sequences of different lengths then share the memory without gaps.

    Layers hold no arrays: the cache belongs to the caller, who passes it in
    ``Context(training=False, cache=cache)``. A forward pass inside `reading` is given *new* tokens
    alone, row b of the batch for the b-th sequence that is read: attention layers write their keys
    and values behind those that the sequence has, and attend to all of them; positional
    embeddings begin behind them. The arrays of a layer, of shape (G, block_count * block_size, K),
    are made when it first runs, in the dtype and on the device of its input, and hold the heads
    that this rank has.

    Parameters
    ----------
    block_count : int
        Number of blocks that all sequences share.
    block_size : int
        Positions of a block.

    Attributes
    ----------
    starts : list of int
        During a pass, the number of positions that each row's sequence had before it.

    Raises
    ------
    ValueError
        For sizes that are no integers >= 1.

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
        # The lowest free blocks go first: a sequence alone then has one run of memory.
        self._free = list(range(self.block_count))
        self._blocks: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0
        self._arrays: dict[str, tuple[Array, Array]] = {}

    @property
    def byte_count(self) -> int:
        """Bytes of all keys and values that there is room for."""
        return sum(int(array.nbytes) for pair in self._arrays.values() for array in pair)

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no sequence holds."""
        return len(self._free)

    def add(self) -> int:
        """Begin a sequence, which has no positions yet, and return its number."""
        self._next += 1
        self._blocks[self._next], self._lengths[self._next] = [], 0
        return self._next

    def length(self, sequence: int) -> int:
        """Number of positions of a sequence that have been read."""
        self._check([sequence])
        return self._lengths[sequence]

    def free(self, sequence: int) -> None:
        """Forget a sequence: others may have its blocks."""
        self._check([sequence])
        self._free = sorted(self._free + self._blocks.pop(sequence))
        del self._lengths[sequence]

    def blocks_for(self, positions: int) -> int:
        """Number of blocks of a sequence of so many positions."""
        return -(-positions // self.block_size)

    @contextmanager
    def reading(self, sequences: Sequence[int], count: int) -> Iterator[None]:
        """Read ``count`` more positions of each of ``sequences`` in the block: one forward pass.

        When the block is left, they count as read. A pass that fails leaves the cache as it was.

        Raises
        ------
        ValueError
            For unknown sequences, one that is named twice, and without enough free blocks for all
            of them; nothing has changed then.
        """
        self._check(sequences)
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
        # Only now, when all of them fit: a refusal leaves no sequence with blocks it cannot use.
        for sequence, number in wanted.items():
            self._blocks[sequence] += self._free[:number]
            del self._free[:number]
        self.starts = [self._lengths[sequence] for sequence in sequences]
        self._count = count
        self._rows = [self._slots_of(sequence, stop) for sequence, stop in stops.items()]
        try:
            yield
        except BaseException:
            for sequence, number in wanted.items():
                # The pass failed: the sequences are as long as before, and give the new blocks
                # back.
                kept = len(self._blocks[sequence]) - number
                self._free = sorted(self._free + self._blocks[sequence][kept:])
                del self._blocks[sequence][kept:]
            raise
        else:
            self._lengths.update(stops)
        finally:
            self.starts, self._rows, self._count = [], [], 0

    def extend(
        self, name: str, keys_BGTK: Array, values_BGTK: Array
    ) -> Iterator[tuple[Array, Array]]:
        """Keep the keys and values of the new positions of a pass, row by row.

        Parameters
        ----------
        name : str
            Dotted name of the attention layer in the model.
        keys_BGTK, values_BGTK : Array
            Keys and values of the new positions.

        Yields
        ------
        keys_1GSK, values_1GSK : Array
            All that is kept of the row's sequence: views if its blocks are neighbours.

        Raises
        ------
        ValueError
            If they are not those of the rows of a pass under way, or of other heads than before.
        """
        batch, heads, count, size = keys_BGTK.shape
        xp = array_namespace(keys_BGTK)
        # At the first pass, because only the layer knows its heads, their size and the dtype.
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
        """Places in a layer's arrays of a sequence's positions up to ``stop``, and of new ones."""
        blocks, size, start = self._blocks[sequence], self.block_size, self._lengths[sequence]
        first = blocks[0] if blocks else 0
        # A slice is a view of the keys, and an array of places copies them.
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
