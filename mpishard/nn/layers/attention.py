"""The core of self-attention.

Shape suffixes: B batch, T time of the queries, S time of the keys, D width, H heads, K size of
a head (D = H K), R queries of one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from mpishard.arguments import check_sizes
from mpishard.arrays import Array, array_namespace, chunk_length, is_device_array
from mpishard.contracts import LayerCategory
from mpishard.nn.layers.layer import Context, Layer, Parameters

__all__ = ["Attention", "CausalAttention"]

# Blocks of fewer queries make matrix products too small to be fast.
_MINIMUM_BLOCK_ROWS = 64


class Attention(Layer):
    """Scaled dot-product self-attention.

    The input holds queries, keys and values side by side, x_BT3D = [q | k | v], each of H heads
    of K elements; y = softmax(q k^T / sqrt(K) + mask) v for each head: Vaswani et al.,
    "Attention is all you need", 2017 (arXiv:1706.03762), eq. 1. It has no parameters; the
    projections before and after it are `Linear` layers, and the one before has no bias: softmax
    cannot see a bias of the keys, whose gradient would be rounding noise.

    Scores are made for a block of queries at a time, up to the block's last key if attention
    is causal, and never kept: the backward pass makes them again from the saved row sums, so that
    memory grows with T and not with T^2 (Dao et al., "FlashAttention", 2022, arXiv:2205.14135,
    section 3.1).

    Parameters
    ----------
    heads : int
        Number H of heads; must divide the width D.
    causal : bool
        Whether a position sees itself and what came before, or all positions.

    Raises
    ------
    ValueError
        If ``heads`` is no integer >= 1.
    """

    category = LayerCategory.ATTENTION

    def __init__(self, heads: int, *, causal: bool = False) -> None:
        check_sizes(type(self).__name__, heads=heads)
        self.heads = heads
        self.causal = bool(causal)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(T, 3 D) -> (T, D)."""
        if len(input_shape) != 2 or input_shape[1] == 0 or input_shape[1] % (3 * self.heads):
            raise ValueError(
                f"{type(self).__name__}({self.heads}) needs samples of shape (T, 3 * heads * K) = "
                f"(T, {3 * self.heads} * K), got {input_shape}"
            )
        return (input_shape[0], input_shape[1] // 3)

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """4 D for each pair that sees each other: T^2 of them, or T (T + 1) / 2 if causal."""
        length, width = self.output_shape(input_shape)
        pairs = length * (length + 1) // 2 if self.causal else length * length
        return 4 * width * pairs

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Attend: x_BT3D -> y_BTD; saves x, y and the log of each softmax's denominator.

        With a cache it also attends to the cached positions: S is then larger than T.

        Raises
        ------
        ValueError
            For a cache if attention is not causal, or in training, or without room for x.
        """
        xp = array_namespace(x)
        y = xp.empty((x.shape[0], *self.output_shape(x.shape[1:])), dtype=x.dtype)
        if not y.size:
            return y, (x, y, None) if context.training else None
        q_BHTK, k_BHSK, v_BHSK = self._split(x)
        if context.cache is not None:
            # The cache holds the keys of earlier positions, which this pass did not compute.
            self._check_cache(context)
            k_BHSK, v_BHSK = context.cache.extend(context.path, k_BHSK, v_BHSK)
        cached = k_BHSK.shape[2] - x.shape[1]
        y_BHTK = self._by_head(y)
        logsum_BHT1 = xp.empty((*y_BHTK.shape[:3], 1), dtype=x.dtype)
        mask_RR = self._causal_mask(x, cached)
        scale = 1.0 / math.sqrt(q_BHTK.shape[-1])
        for which, queries in self._blocks(x, cached):
            keys = self._keys(queries, cached)
            q = q_BHTK[which][..., queries, :] * scale
            scores = xp.matmul(q, k_BHSK[which][..., keys, :].swapaxes(-1, -2))
            size = queries.stop - queries.start
            # Small scores need no maximum per row: this saves a pass and a subtraction over them.
            are_small = _are_small(scores)
            if self.causal:
                scores[..., cached + queries.start :] += mask_RR[:size, :size]
            largest = 0.0 if are_small else scores.max(axis=-1, keepdims=True)
            if not are_small:
                scores -= largest
            xp.exp(scores, out=scores)
            total = xp.einsum("...rs->...r", scores)[..., None]
            y_block = y_BHTK[which][..., queries, :]
            xp.matmul(scores, v_BHSK[which][..., keys, :], out=y_block)
            y_block /= total
            xp.log(total, out=total)
            xp.add(total, largest, out=logsum_BHT1[which][..., queries, :])
        return y, (x, y, logsum_BHT1) if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The gradient of x_BT3D.

        With P the softmax and dP = dy v^T, the scores' gradient is P (dP - sum_K(dy y)):
        FlashAttention, appendix B.2, eq. 4.
        """
        x, y, logsum_BHT1 = saved
        xp = array_namespace(x)
        dx = xp.empty(x.shape, dtype=x.dtype)
        if not y.size:
            return dx, None
        q_BHTK, k_BHSK, v_BHSK = self._split(x)
        dq_BHTK, dk_BHSK, dv_BHSK = self._split(dx)
        y_BHTK, dy_BHTK = self._by_head(y), self._by_head(dy)
        mask_RR = self._causal_mask(x)
        scale = 1.0 / math.sqrt(q_BHTK.shape[-1])
        for which, queries in self._blocks(x):
            keys = self._keys(queries)
            k, v = k_BHSK[which][..., keys, :], v_BHSK[which][..., keys, :]
            dk, dv = dk_BHSK[which][..., keys, :], dv_BHSK[which][..., keys, :]
            d = dy_BHTK[which][..., queries, :]
            q = q_BHTK[which][..., queries, :]
            scores = xp.matmul(q * scale, k.swapaxes(-1, -2))
            if self.causal:
                size = queries.stop - queries.start
                scores[..., queries] += mask_RR[:size, :size]
            scores -= logsum_BHT1[which][..., queries, :]
            xp.exp(scores, out=scores)
            scaled_d = d * scale
            dscores = xp.matmul(scaled_d, v.swapaxes(-1, -2))
            y_block = y_BHTK[which][..., queries, :]
            dscores -= xp.einsum("...rk,...rk->...r", scaled_d, y_block)[..., None]
            dscores *= scores
            xp.matmul(dscores, k, out=dq_BHTK[which][..., queries, :])
            # The last queries come first and reach every key, so they write; all others add.
            if queries.stop == x.shape[1]:
                xp.matmul(scores.swapaxes(-1, -2), d, out=dv)
                xp.matmul(dscores.swapaxes(-1, -2), q, out=dk)
            else:
                dv += xp.matmul(scores.swapaxes(-1, -2), d)
                dk += xp.matmul(dscores.swapaxes(-1, -2), q)
        return dx, None

    def _split(self, x: Array) -> tuple[Array, Array, Array]:
        """Views of x_BT3D as queries, keys and values, each of shape (B, H, T, K)."""
        parts = x.reshape(*x.shape[:2], 3, self.heads, -1).transpose(2, 0, 3, 1, 4)
        return parts[0], parts[1], parts[2]

    def _by_head(self, y: Array) -> Array:
        """A view of y_BTD of shape (B, H, T, K)."""
        return y.reshape(*y.shape[:2], self.heads, -1).swapaxes(1, 2)

    def _keys(self, queries: slice, cached: int = 0) -> slice:
        """The keys that a block of queries sees, its own behind ``cached`` earlier ones."""
        return slice(0, cached + queries.stop if self.causal else None)

    def _blocks(self, x: Array, cached: int = 0) -> Iterator[tuple[tuple[slice, slice], slice]]:
        """Yield ((samples, heads), queries) whose scores make up about one chunk.

        The blocks of one group of samples and heads come last queries first, so that the first
        of them reaches all keys.
        """
        batch, length = x.shape[:2]
        samples, heads, rows = self._block_sizes(x, cached)
        for b in range(0, batch, samples):
            for h in range(0, self.heads, heads):
                for t in reversed(range(0, length, rows)):
                    which = (slice(b, b + samples), slice(h, h + heads))
                    yield which, slice(t, min(t + rows, length))

    def _block_sizes(self, x: Array, cached: int) -> tuple[int, int, int]:
        """The most samples, heads and queries that a block has."""
        length = int(x.shape[1])
        keys = length + cached
        limit = chunk_length(x)
        rows = min(length, max(_MINIMUM_BLOCK_ROWS, limit // (self.heads * keys)))
        heads = max(1, min(self.heads, limit // (rows * keys)))
        whole = rows == length and heads == self.heads
        samples = max(1, limit // (heads * rows * keys)) if whole else 1
        return samples, heads, rows

    def _causal_mask(self, x: Array, cached: int = 0) -> Array:
        """Mask of a block against its own positions: 0, or -infinity for a key after its query.

        Keys before the block need none, and keys after it are left out of the scores.
        """
        xp = array_namespace(x)
        rows = self._block_sizes(x, cached)[2] if self.causal else 0
        return xp.triu(xp.full((rows, rows), -xp.inf, dtype=x.dtype), k=1)

    def _check_cache(self, context: Context) -> None:
        if not self.causal:
            raise ValueError(
                f"{context.path}: attention that is not causal cannot read a sequence bit by bit, "
                "for earlier positions see later ones; compute the whole sequence, without a cache"
            )
        if context.training:
            raise ValueError(
                f"{context.path}: a cache is for prediction; pass Context(training=False)"
            )


class CausalAttention(Attention):
    """`Attention` in which a position sees itself and what came before.

    Parameters
    ----------
    heads : int
        Number H of heads; must divide the width D.

    Raises
    ------
    ValueError
        If ``heads`` is no integer >= 1.
    """

    def __init__(self, heads: int) -> None:
        super().__init__(heads, causal=True)


def _are_small(scores: Array) -> bool:
    """True if all scores can be exponentiated as they are, without the maximum of each row.

    Their exponentials then lie well inside the range of the dtype, and so do sums of them. On a
    GPU to ask would be to wait for it.
    """
    if is_device_array(scores):
        return False
    limit = 0.5 * math.log(array_namespace(scores).finfo(scores.dtype).max)
    return bool(scores.max() <= limit) and bool(scores.min() >= -limit)
