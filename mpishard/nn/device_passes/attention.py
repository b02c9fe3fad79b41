"""Attention of all heads on a GPU, in blocks of scores.

Shape suffixes: M the groups of heads of all samples, each with its own keys and values; Q heads of
queries in a group; T queries, S keys, K size of a head, R queries of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mpishard.base import NAMESPACES, Array
from mpishard.nn.device_passes.products import gemm, narrowed
from mpishard.nn.device_passes.softmax import softmax, softmax_backward

# With as many queries, causal attention takes them in two halves: the first half sees no key of the
# second, which saves a quarter of the scores. More blocks would be too small to be fast.
_HALVED_QUERIES = 128
_MINIMUM_ROWS = 64


class Block(NamedTuple):
    """Scores that exist at the same time: those of some matrices and some queries."""

    matrices: slice
    queries: slice


def blocks_of(
    matrices: int, heads: int, queries: int, keys: int, *, limit: int, causal: bool
) -> list[Block]:
    """Return blocks of at most about ``limit`` scores. A block of the last queries comes first.

    Parameters
    ----------
    matrices, heads, queries, keys : int
        The sizes M, Q, T and S.
    limit : int
        Maximum number of scores of a block.
    causal : bool
        Whether a query sees only the keys up to its own position.
    """
    rows = -(-queries // 2) if causal and queries >= _HALVED_QUERIES else queries
    rows = min(rows, max(_MINIMUM_ROWS, limit // (heads * keys)))
    count = max(1, limit // (heads * rows * keys))
    return [
        Block(slice(m, min(m + count, matrices)), slice(t, min(t + rows, queries)))
        for m in range(0, matrices, count)
        for t in reversed(range(0, queries, rows))
    ]


def attend(
    q_QMTK: Array, k_MSK: Array, v_MSK: Array, blocks: Sequence[Block], *, causal: bool
) -> tuple[Array, list[Array]]:
    """Return the output y_QMTK, and for each block the logs of the softmax's denominators.

    If attention is causal, the last query sees all keys, and each query before it one key less.
    """
    y_QMTK = NAMESPACES[type(q_QMTK)].empty_like(q_QMTK)
    cached, scale = k_MSK.shape[1] - q_QMTK.shape[2], 1.0 / math.sqrt(q_QMTK.shape[-1])
    q, k, v = narrowed(q_QMTK), narrowed(k_MSK), narrowed(v_MSK)
    logs = []
    for matrices, queries in blocks:
        own = slice(0, cached + queries.stop if causal else None)
        scores = _scores(q[:, matrices, queries], k[matrices, own], y_QMTK)
        rows = scores.shape[2] if causal else 0
        logs.append(softmax(scores, scores, scale, cached + queries.start, rows))
        weights = narrowed(scores)
        for head, out in zip(weights, y_QMTK[:, matrices, queries], strict=True):
            gemm(head, v[matrices, own], out)
    return y_QMTK, logs


def attend_backward(
    q_QMTK: Array,
    k_MSK: Array,
    v_MSK: Array,
    d_QMTK: Array,
    logs: Sequence[Array],
    blocks: Sequence[Block],
    dq_QMTK: Array,
    dk_MSK: Array,
    dv_MSK: Array,
    *,
    causal: bool,
) -> None:
    """Write the gradients of queries, keys and values for that of the output, d.

    The scores are made again. The products of the last queries reach every key: they are written,
    and those of all other queries and heads are added.
    """
    scale = 1.0 / math.sqrt(q_QMTK.shape[-1])
    q, k, v, d = map(narrowed, (q_QMTK, k_MSK, v_MSK, d_QMTK))
    for (matrices, queries), log in zip(blocks, logs, strict=True):
        own = slice(0, queries.stop if causal else None)
        q_block, d_block = q[:, matrices, queries], d[:, matrices, queries]
        scores = _scores(q_block, k[matrices, own], dq_QMTK)
        dscores = _scores(d_block, v[matrices, own], dq_QMTK)
        rows = scores.shape[2] if causal else 0
        softmax_backward(scores, dscores, log, scale, queries.start, rows)
        weights, slopes = narrowed(scores), narrowed(dscores)
        adds = queries.stop < q.shape[2]
        for h in range(len(weights)):
            gemm(slopes[h], k[matrices, own], dq_QMTK[h, matrices, queries])
            gemm(weights[h], d_block[h], dv_MSK[matrices, own], a_is_turned=True, adds=adds)
            gemm(slopes[h], q_block[h], dk_MSK[matrices, own], a_is_turned=True, adds=adds)
            adds = True


def _scores(a_QMRK: Array, b_MSK: Array, like: Array) -> Array:
    """Return the products of the rows of a and b, of shape (Q, M, R, S) and the dtype of like."""
    shape = (*a_QMRK.shape[:3], b_MSK.shape[1])
    scores = NAMESPACES[type(like)].empty(shape, like.dtype)
    for a_MRK, out in zip(a_QMRK, scores, strict=True):
        gemm(a_MRK, b_MSK, out, b_is_turned=True)
    return scores
