"""The core of self-attention.

Shape suffixes: B batch, T time of the queries, S time of the keys, D width, H heads, K size of
a head (D = H K), G heads of keys and values, Q heads that share one of them (H = G Q), R queries
of one block, P the queries of all heads of a group in one block (P = Q R).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpishard.base import (
    NAMESPACES,
    Array,
    DType,
    as_flag,
    check_divides,
    check_sizes,
    chunk_length,
    device_bytes,
    is_bfloat16,
    is_device_array,
    rounded,
    scratch,
    store,
    wide,
    wide_dtype,
    widened_dtype,
)
from mpishard.contracts import LayerCategory, Saved
from mpishard.nn import device_passes, passes
from mpishard.nn.layers.layer import Context, Layer, Parameters, SavedActivations
from mpishard.nn.layers.products import product
from mpishard.nn.passes import bits, compiled

# Matrix products of blocks with fewer queries are too small to be fast.
_MINIMUM_BLOCK_ROWS = 64
# Part of a GPU's memory that the scores of one block may take. It is a share of the whole memory
# and not of the free memory, so that blocks, and with them bits, are the same in every step.
_SHARE_OF_DEVICE = 1 / 32


class Attention(Layer):
    """Scaled dot-product self-attention.

    The input holds queries, keys and values side by side, [q | k | v]: H heads of queries and G
    heads each of keys and values, with K elements per head, (H + 2 G) K in all. With G = H this is
    multi-head attention, y = softmax(q k^T / sqrt(K) + mask) v for each head: Vaswani et al.,
    "Attention is all you need", 2017 (arXiv:1706.03762), eq. 1. With G < H, heads h Q to
    (h + 1) Q - 1 of the queries share head h of the keys and values, Q = H / G: Ainslie et al.,
    "GQA", 2023 (arXiv:2305.13245), section 2.2.

    The layer has no parameters. The projections before and after it are `Linear` layers. The one
    before it should have no bias: the softmax does not depend on a bias of the keys, whose gradient
    would be rounding noise.

    Scores are made for one block of queries at a time, up to the block's last key if attention
    is causal, and are never kept. The backward pass makes them again, with the saved row sums.
    Memory therefore grows with T and not with T^2 (Dao et al., "FlashAttention", 2022,
    arXiv:2205.14135, section 3.1).

    Parameters
    ----------
    heads : int
        Number H of heads, which must divide the width D.
    causal : bool
        If True, a position sees itself and earlier positions; if False, all positions.
    kv_heads : int, optional
        Number G of heads of keys and of values, which must divide `heads`. The default is `heads`.

    Raises
    ------
    ValueError
        If a number of heads is not an integer >= 1, or `kv_heads` does not divide `heads`.
    """

    category = LayerCategory.ATTENTION
    computes_bfloat16 = True  # Scores, softmax, and sums of the keys' gradients are float32.

    def __init__(self, heads: int, *, causal: bool = False, kv_heads: int | None = None) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        check_sizes(type(self).__name__, heads=heads, kv_heads=kv_heads)
        # Each head of keys serves the same number of heads of queries.
        check_divides("kv_heads", kv_heads, "heads", heads)
        self.heads = heads
        self.kv_heads = kv_heads
        self.causal = as_flag("causal", causal)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (T, H K) for the shape (T, (H + 2 G) K)."""
        runs = self.heads + 2 * self.kv_heads
        if len(input_shape) != 2 or input_shape[1] == 0 or input_shape[1] % runs:
            formula = "3 * heads" if self.kv_heads == self.heads else "(heads + 2 * kv_heads)"
            raise ValueError(
                f"{type(self).__name__}({self.heads}) needs samples of shape (T, {formula} * K) = "
                f"(T, {runs} * K), got {input_shape}"
            )
        return (input_shape[0], input_shape[1] // runs * self.heads)

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """Return 4 D for each pair of query and key: T^2 pairs, or T (T + 1) / 2 if causal."""
        length, width = self.output_shape(input_shape)
        pairs = length * (length + 1) // 2 if self.causal else length * length
        return 4 * width * pairs

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return that of input and output, and of a number for each query of each head."""
        numbers = self.heads * input_shape[0] * widened_dtype(dtype).itemsize
        return SavedActivations(numbers, keeps_input=True, keeps_output=True)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Map x of shape (B, T, (H + 2 G) K) to y_BTD.

        Save x, y and the log of each softmax's denominator; on a GPU x with its heads first, and no
        y. With a cache, each row also attends to the cached positions of its sequence: S is then
        larger than T.

        Raises
        ------
        ValueError
            If there is a cache, and attention is not causal, training is True, or x has other
            numbers of rows and positions than the cache's pass reads.
        """
        xp = NAMESPACES[type(x)]
        y = xp.empty((x.shape[0], *self.output_shape(x.shape[1:])), dtype=x.dtype)
        # An empty batch has no blocks, and no largest score.
        if not y.size:
            return y, (x, y, None) if context.training else None
        y_BGQTK = self._by_head(y)
        if context.cache is None and is_device_array(x):
            heads_HBTK = self._heads_first(x)
            logs = self._attend_on_device(*self._of_heads(heads_HBTK), y_BGQTK)
            return y, (heads_HBTK, None, logs) if context.training else None
        q_BGQTK, k_BGSK, v_BGSK = self._split(x)
        if context.cache is None:
            logsum_BGQT1 = self._attend(x, q_BGQTK, k_BGSK, v_BGSK, y_BGQTK)
            return y, (x, y, logsum_BGQT1) if context.training else None
        if not self.causal:
            raise ValueError(
                f"{context.path}: attention that is not causal cannot read a sequence in parts, "
                "because earlier positions see later ones; compute the whole sequence, without a "
                "cache"
            )
        if context.training:
            raise ValueError(
                f"{context.path}: a cache is for prediction; pass Context(training=False)"
            )
        # Sequences of different lengths have no common S, so that each row is a batch of its own.
        for b, (k_1GSK, v_1GSK) in enumerate(context.cache.extend(context.path, k_BGSK, v_BGSK)):
            row = slice(b, b + 1)
            if is_device_array(x):
                self._attend_on_device(q_BGQTK[row], k_1GSK, v_1GSK, y_BGQTK[row])
            else:
                self._attend(x[row], q_BGQTK[row], k_1GSK, v_1GSK, y_BGQTK[row])
        return y, None

    def _attend(
        self, x: Array, q_BGQTK: Array, k_BGSK: Array, v_BGSK: Array, y_BGQTK: Array
    ) -> Array:
        """Write the output for x into y, and return the log of each softmax's denominator."""
        cached = k_BGSK.shape[2] - x.shape[1]
        # In float32 for bfloat16 inputs: backward takes an exponential of the difference to it.
        logsum_BGQT1 = np.empty((*y_BGQTK.shape[:-1], 1), dtype=wide_dtype(x))
        mask_RR = self._causal_mask(x, cached)
        for rows, columns, start in self._blocks(x, cached):
            q, k, v, out = q_BGQTK[rows], k_BGSK[columns], v_BGSK[columns], y_BGQTK[rows]
            weights, total, logsum = self._softmax(x, q, k, mask_RR, cached + start)
            logsum_BGQT1[rows] = logsum.reshape(*out.shape[:-1], 1)
            if total is None:  # The weights are divided already.
                _product(weights, v, out)
                continue
            y_block = scratch(out)
            _product(weights, v, y_block)
            y_block /= total.reshape(*y_block.shape[:-1], 1)
            store(out, y_block)
        return logsum_BGQT1

    def _softmax(
        self, x: Array, q: Array, k: Array, mask_RR: Array, start: int
    ) -> tuple[Array, Array | None, Array]:
        """Return a block's softmax weights, their divisors, and the logs of the denominators.

        The weights have the dtype of x. Divisors and logs have shape (B, G, P, 1), one per row. A
        compiled loop divides while a row is in the cache, and its divisors are None. NumPy leaves
        the division to the caller, who divides the output, which is smaller than the scores.
        """
        scale = 1.0 / math.sqrt(q.shape[-1])
        loop = compiled(passes.softmax_forward, x)
        scores_BGPS = _scores(q, k, scale if loop is None else 1.0)
        # Small scores need no maximum per row: exponentials, and sums of them, are then well inside
        # the range of the dtype. This saves a pass and a subtraction over them.
        limit = 0.5 * math.log(np.finfo(scores_BGPS.dtype).max)
        are_small = -limit <= scores_BGPS.min() and scores_BGPS.max() <= limit
        # The loop skips keys that a row does not see. It needs the mask only for the maximum.
        if self.causal and not (loop is not None and are_small):
            self._mask(scores_BGPS, mask_RR, start)
        largest = 0.0 if are_small else scores_BGPS.max(axis=-1, keepdims=True)
        if loop is not None:
            shape = (*scores_BGPS.shape[:-1], 1)
            weights = np.empty(scores_BGPS.shape, x.dtype)
            logsum = np.broadcast_to(np.float32(scale) * largest, shape).astype(np.float32)
            loop(
                _rows(scores_BGPS),
                bits(_rows(weights)),
                logsum.reshape(-1),
                np.float32(scale),
                start,
                q.shape[-2] if self.causal else 0,
            )
            return weights, None, logsum
        if not are_small:
            # Without it the exponential of a large score is infinite.
            scores_BGPS -= largest
        np.exp(scores_BGPS, out=scores_BGPS)
        total = np.einsum("...ps->...p", scores_BGPS)[..., None]
        logsum = np.log(total)
        logsum += largest
        return _narrow(scores_BGPS, x), total, logsum

    def _softmax_backward(
        self,
        x: Array,
        q: Array,
        k: Array,
        v: Array,
        d: Array,
        y: Array,
        logsum: Array,
        mask_RR: Array,
        start: int,
    ) -> tuple[Array, Array]:
        """Return a block's softmax weights and the gradient of its scores, in the dtype of x."""
        scale = 1.0 / math.sqrt(q.shape[-1])
        loop = compiled(passes.softmax_backward, x)
        scores_BGPS = _scores(q, k, scale if loop is None else 1.0)
        if loop is not None:
            dscores_BGPS = _scores(d, v, 1.0)
            weights, gradient = (np.empty(scores_BGPS.shape, x.dtype) for _ in range(2))
            loop(
                _rows(scores_BGPS),
                _rows(dscores_BGPS),
                bits(_rows(weights)),
                bits(_rows(gradient)),
                np.ascontiguousarray(logsum).reshape(-1),
                np.float32(scale),
                start,
                q.shape[-2] if self.causal else 0,
            )
            return weights, gradient
        if self.causal:
            self._mask(scores_BGPS, mask_RR, start)
        # exp(score - logsum) is the softmax of the forward pass, which saved one number per row.
        scores_BGPS -= _rows_of_group(logsum)
        np.exp(scores_BGPS, out=scores_BGPS)
        # The scale is applied to K numbers for each query instead of S scores.
        scaled_d = wide(d) * scale
        if is_bfloat16(d):
            dscores_BGPS = _scores(d, v, scale)
        else:
            dscores_BGPS = product(_rows_of_group(scaled_d), v.swapaxes(-1, -2))
        # The gradient of a softmax needs the sum over a row's keys of weight times gradient. It
        # equals the product d y, a sum over only K numbers.
        sums = np.einsum("...rk,...rk->...r", scaled_d, wide(y))
        dscores_BGPS -= sums.reshape(*dscores_BGPS.shape[:-1], 1)
        dscores_BGPS *= scores_BGPS
        return _narrow(scores_BGPS, x), _narrow(dscores_BGPS, x)

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return the gradient of x.

        With P the softmax and dP = dy v^T, the scores' gradient is P (dP - sum_S(P dP)). This
        sum equals sum_K(dy y): FlashAttention, appendix B.2, eq. 4. A compiled loop, which has a
        row of P and dP in the cache, computes the first sum. NumPy computes the second, which is
        shorter.
        """
        x, y, logsum_BGQT1 = saved
        if is_device_array(dy) and dy.size:
            return self._backward_on_device(x, logsum_BGQT1, dy), None
        xp = NAMESPACES[type(x)]
        dx = xp.empty(x.shape, dtype=x.dtype)
        if not y.size:
            return dx, None
        q_BGQTK, k_BGSK, v_BGSK = self._split(x)
        dq_BGQTK, dk_BGSK, dv_BGSK = self._split(dx)
        y_BGQTK, dy_BGQTK = self._by_head(y), self._by_head(dy)
        mask_RR = self._causal_mask(x)
        for rows, columns, start in self._blocks(x):
            q, d, k, v = q_BGQTK[rows], dy_BGQTK[rows], k_BGSK[columns], v_BGSK[columns]
            is_first = start + d.shape[3] == x.shape[1]
            if is_first:
                # Float32 sums over all blocks of queries, which are rounded to bfloat16 once, at
                # the end.
                dk_all, dv_all = scratch(dk_BGSK[columns[:2]]), scratch(dv_BGSK[columns[:2]])
            dk, dv = dk_all[:, :, columns[2]], dv_all[:, :, columns[2]]
            scores_BGPS, dscores_BGPS = self._softmax_backward(
                x, q, k, v, d, y_BGQTK[rows], logsum_BGQT1[rows], mask_RR, start
            )
            _product(dscores_BGPS, k, dq_BGQTK[rows])
            # A product over P also sums over the heads of queries that share the keys and values.
            scores_BGSP, dscores_BGSP = scores_BGPS.swapaxes(-1, -2), dscores_BGPS.swapaxes(-1, -2)
            # The block of the last queries comes first and reaches every key: it writes to dk and
            # dv, and all other blocks add to them.
            if is_first:
                product(scores_BGSP, _rows_of_group(d), dv)
                product(dscores_BGSP, _rows_of_group(q), dk)
            else:
                dv += product(scores_BGSP, _rows_of_group(d), _empty_like(dv))
                dk += product(dscores_BGSP, _rows_of_group(q), _empty_like(dk))
            # The block of the first queries is the last of its samples and groups.
            if start == 0:
                store(dk_BGSK[columns[:2]], dk_all)
                store(dv_BGSK[columns[:2]], dv_all)
        return dx, None

    def _heads_first(self, x: Array) -> Array:
        """Return a copy of x of shape (H + 2 G, B, T, K), whose heads are whole matrices."""
        heads_BTHK = x.reshape(*x.shape[:2], self.heads + 2 * self.kv_heads, -1)
        return NAMESPACES[type(x)].ascontiguousarray(heads_BTHK.transpose(2, 0, 1, 3))

    def _of_heads(self, heads_HBTK: Array) -> tuple[Array, Array, Array]:
        """Return the views of `_split` for the result of `_heads_first`."""
        q_GQBTK = heads_HBTK[: self.heads].reshape(self.kv_heads, -1, *heads_HBTK.shape[1:])
        k_GBSK = heads_HBTK[self.heads : self.heads + self.kv_heads]
        v_GBSK = heads_HBTK[self.heads + self.kv_heads :]
        return q_GQBTK.transpose(2, 0, 1, 3, 4), k_GBSK.swapaxes(0, 1), v_GBSK.swapaxes(0, 1)

    def _device_blocks(self, q_QMTK: Array, k_MSK: Array) -> list[device_passes.Block]:
        shared, matrices, queries = q_QMTK.shape[:3]
        # On a GPU launches cost more than memory traffic, so that blocks are as large as memory
        # allows.
        limit = int(device_bytes(q_QMTK) * _SHARE_OF_DEVICE) // q_QMTK.dtype.itemsize
        return device_passes.blocks_of(
            matrices, shared, queries, k_MSK.shape[1], limit=limit, causal=self.causal
        )

    def _attend_on_device(
        self, q_BGQTK: Array, k_BGSK: Array, v_BGSK: Array, y_BGQTK: Array
    ) -> list[Array]:
        """Write the output to y, and return the logs of the denominators of each block."""
        q_QMTK, k_MSK, v_MSK = _by_matrix(q_BGQTK), _by_matrix(k_BGSK), _by_matrix(v_BGSK)
        blocks = self._device_blocks(q_QMTK, k_MSK)
        y_QMTK, logs = device_passes.attend(q_QMTK, k_MSK, v_MSK, blocks, causal=self.causal)
        y_QGBTK = y_QMTK.reshape(q_BGQTK.shape[2], *q_BGQTK.shape[1::-1], *q_BGQTK.shape[3:])
        y_BGQTK[...] = y_QGBTK.transpose(2, 1, 0, 3, 4)
        return logs

    def _backward_on_device(self, heads_HBTK: Array, logs: list[Array], dy: Array) -> Array:
        """Return the gradient of x."""
        q_BGQTK, k_BGSK, v_BGSK = self._of_heads(heads_HBTK)
        d_QMTK = _by_matrix(self._by_head(dy))
        dheads_HBTK = NAMESPACES[type(dy)].empty_like(heads_HBTK)
        dq_BGQTK, dk_BGSK, dv_BGSK = self._of_heads(dheads_HBTK)
        q_QMTK, k_MSK, dq_QMTK = _by_matrix(q_BGQTK), _by_matrix(k_BGSK), _by_matrix(dq_BGQTK)
        device_passes.attend_backward(
            q_QMTK,
            k_MSK,
            _by_matrix(v_BGSK),
            d_QMTK,
            logs,
            self._device_blocks(q_QMTK, k_MSK),
            dq_QMTK,
            _by_matrix(dk_BGSK),
            _by_matrix(dv_BGSK),
            causal=self.causal,
        )
        if self.heads != self.kv_heads:  # Then dq is no view of the heads.
            dq_QGBTK = dq_BGQTK.transpose(2, 1, 0, 3, 4)
            dq_QGBTK[...] = dq_QMTK.reshape(dq_QGBTK.shape)
        dx = dheads_HBTK.transpose(1, 2, 0, 3)
        return NAMESPACES[type(dy)].ascontiguousarray(dx).reshape(*dy.shape[:2], -1)

    def _split(self, x: Array) -> tuple[Array, Array, Array]:
        """Return views of x: queries of shape (B, G, Q, T, K), keys and values (B, G, T, K)."""
        shared = self.heads // self.kv_heads
        size = x.shape[-1] // (self.heads + 2 * self.kv_heads)
        ends = self.heads * size, (self.heads + self.kv_heads) * size
        # Views and not copies, so that products write gradients directly into the array dx.
        q = x[..., : ends[0]].reshape(*x.shape[:2], self.kv_heads, shared, size)
        k, v = (
            part.reshape(*x.shape[:2], self.kv_heads, size).swapaxes(1, 2)
            for part in (x[..., ends[0] : ends[1]], x[..., ends[1] :])
        )
        return q.transpose(0, 2, 3, 1, 4), k, v

    def _by_head(self, y: Array) -> Array:
        """Return a view of y_BTD, of shape (B, G, Q, T, K)."""
        shared = self.heads // self.kv_heads
        return y.reshape(*y.shape[:2], self.kv_heads, shared, -1).transpose(0, 2, 3, 1, 4)

    def _mask(self, scores_BGPS: Array, mask_RR: Array, start: int) -> None:
        """Add the mask to the scores of the block's own keys, which begin with key `start`."""
        shared = self.heads // self.kv_heads
        size = scores_BGPS.shape[2] // shared
        by_head = scores_BGPS.reshape(*scores_BGPS.shape[:2], shared, size, -1)
        by_head[..., start : start + size] += mask_RR[:size, :size]

    def _blocks(self, x: Array, cached: int = 0) -> Iterator[tuple[Any, Any, int]]:
        """Yield blocks whose scores are about as large as a chunk.

        A block has the index of its queries in arrays such as q_BGQTK, the index in arrays such as
        k_BGSK of the keys that they see, and the position of its first query in x. The queries' own
        keys follow ``cached`` earlier keys. Of the same samples and groups, the block of the last
        queries comes first.
        """
        batch, length = x.shape[:2]
        samples, groups, rows = self._block_sizes(x, cached)
        for b in range(0, batch, samples):
            for g in range(0, self.kv_heads, groups):
                # The last queries see every key. In backward they can therefore write to the keys'
                # and values' gradients, to which the other blocks add.
                for t in reversed(range(0, length, rows)):
                    which = slice(b, b + samples), slice(g, g + groups)
                    stop = min(t + rows, length)
                    keys = slice(0, cached + stop if self.causal else None)
                    yield (*which, slice(None), slice(t, stop)), (*which, keys), t

    def _block_sizes(self, x: Array, cached: int) -> tuple[int, int, int]:
        """Return the maximum numbers of samples, groups of heads, and queries of a block."""
        length = int(x.shape[1])
        keys = length + cached
        limit = chunk_length(x)
        # First the queries of a block, then groups, then samples: products of many queries are the
        # fastest.
        rows = min(length, max(_MINIMUM_BLOCK_ROWS, limit // (self.heads * keys)))
        if compiled(passes.softmax_forward, x) is not None:
            limit *= 2  # A loop passes over the scores twice, and NumPy eight times.
        shared = self.heads // self.kv_heads
        groups = max(1, min(self.kv_heads, limit // (shared * rows * keys)))
        is_whole = groups == self.kv_heads
        samples = max(1, limit // (self.heads * rows * keys)) if is_whole else 1
        return samples, groups, rows

    def _causal_mask(self, x: Array, cached: int = 0) -> Array:
        """Return the mask of a block's own positions: 0, or -infinity for a key after its query.

        Keys before the block need no mask, and there are no scores of keys after it.
        """
        rows = self._block_sizes(x, cached)[2] if self.causal else 0
        return np.triu(np.full((rows, rows), -np.inf, dtype=wide_dtype(x)), k=1)


class CausalAttention(Attention):
    """`Attention` in which a position sees itself and the positions before it.

    Parameters
    ----------
    heads : int
        Number H of heads, which must divide the width D.
    kv_heads : int, optional
        Number G of heads of keys and of values, which must divide `heads`. The default is `heads`.

    Raises
    ------
    ValueError
        As for `Attention`.
    """

    def __init__(self, heads: int, *, kv_heads: int | None = None) -> None:
        super().__init__(heads, causal=True, kv_heads=kv_heads)


def _by_matrix(a: Array) -> Array:
    """Return a_BGQTK as (Q, G B, T, K), or a_BGSK as (G B, S, K): a view of heads that are first.

    A copy if the array has another layout, or if there are several heads of queries in a group.
    """
    order = (2, 1, 0, 3, 4) if a.ndim == 5 else (1, 0, 2, 3)
    whole = NAMESPACES[type(a)].ascontiguousarray(a.transpose(*order))
    return whole.reshape(*whole.shape[: a.ndim - 4], -1, *a.shape[-2:])


def _rows_of_group(a_BGQRK: Array) -> Array:
    """Return the rows of all heads of a group as one dim, (B, G, P, K): a copy only if Q > 1."""
    return a_BGQRK.reshape(*a_BGQRK.shape[:2], -1, a_BGQRK.shape[-1])


def _product(a_BGPS: Array, b_BGSK: Array, out_BGQRK: Array) -> None:
    """Write the product to a view with separate heads; directly if a group has one head."""
    if out_BGQRK.shape[2] == 1:
        product(a_BGPS, b_BGSK, out_BGQRK[:, :, 0])
    else:
        shape = *a_BGPS.shape[:-1], b_BGSK.shape[-1]
        # BLAS writes only to matrices with one stride, and the rows of several heads have two.
        y_BGPK = product(a_BGPS, b_BGSK, NAMESPACES[type(a_BGPS)].empty(shape, out_BGQRK.dtype))
        out_BGQRK[...] = y_BGPK.reshape(out_BGQRK.shape)


def _rows(a_BGPS: Array) -> Array:
    return a_BGPS.reshape(-1, a_BGPS.shape[-1])


def _scores(q_BGQRK: Array, k_BGSK: Array, scale: float) -> Array:
    """Return ``scale * q k^T`` for each head; bfloat16 is scaled in float32, after the product."""
    k_BGKS = k_BGSK.swapaxes(-1, -2)
    if not is_bfloat16(q_BGQRK):
        # The queries are scaled, because they have K numbers for each row of S scores.
        scaled = q_BGQRK if scale == 1.0 else q_BGQRK * scale
        return product(_rows_of_group(scaled), k_BGKS)
    q_BGPK = _rows_of_group(q_BGQRK)
    scores = product(q_BGPK, k_BGKS, np.empty((*q_BGPK.shape[:-1], k_BGKS.shape[-1]), np.float32))
    if scale != 1.0:
        scores *= scale
    return scores


def _narrow(values: Array, like: Array) -> Array:
    """Return ``values`` rounded to bfloat16 if ``like`` is bfloat16, as products need one dtype."""
    return rounded(values) if is_bfloat16(like) else values


def _empty_like(out: Array) -> Array:
    """Return a new array for a product that is then added to ``out``."""
    return NAMESPACES[type(out)].empty(out.shape, out.dtype)
