"""Rows of a table for tokens, their gradient, and the check of integers."""

from __future__ import annotations

import numpy as np

from mpishard.base import NAMESPACES, Array, Kernel, beside
from mpishard.nn.device_passes.text import SUMS, elementwise

# A token outside of the table gives NaN: the host would have to wait to refuse it.
_TAKE_ROWS = elementwise(
    "take_rows",
    "const T* table, const long long* tokens, T* y, long long rows, long long width",
    """    long long token = tokens[i / width];
    T zero = 0;
    y[i] = token >= 0 && token < rows ? table[token * width + i % width] : zero / zero;""",
)


def take_rows(table_VD: Array, tokens: Array) -> Array:
    """Return the table's row of each token, NaN for a token outside of [0, V)."""
    rows, width = table_VD.shape
    xp = NAMESPACES[type(table_VD)]
    y = xp.empty((*tokens.shape, width), table_VD.dtype)
    _TAKE_ROWS.launch_for(y.size, y.dtype, table_VD, int64(tokens), y, rows, width, y.size)
    return y


# Each block has one token and 256 columns. The block of a token's first place adds the rows of all
# its places, in their order; the blocks of its other places end at once.
_ADD_ROWS = Kernel(
    "add_rows",
    r"""
extern "C" __global__ void add_rows(T* table, const long long* tokens, const T* d, long long count,
                                    long long rows, long long width, long long parts) {
    __shared__ int has_earlier;
    __shared__ unsigned long long words[32];  // a byte for each of 256 tokens: 1 if it is ours
    unsigned char* is_ours = (unsigned char*)words;
    long long place = blockIdx.x / parts, token = tokens[place];
    long long column = blockIdx.x % parts * blockDim.x + threadIdx.x;
    if (token < 0 || token >= rows) return;
    if (threadIdx.x == 0) has_earlier = 0;
    __syncthreads();
    for (long long i = threadIdx.x; i < place; i += blockDim.x)
        if (tokens[i] == token) { has_earlier = 1; break; }
    __syncthreads();
    if (has_earlier) return;
    T total = 0;
    for (long long start = place; start < count; start += 256) {
        long long mine = start + threadIdx.x;
        is_ours[threadIdx.x] = mine < count && tokens[mine] == token;
        __syncthreads();
        if (column < width) {
            for (int w = 0; w < 32; w++) {
                if (!words[w]) continue;
                for (int b = 8 * w; b < 8 * w + 8; b++)
                    if (is_ours[b]) total += d[(start + b) * width + column];
            }
        }
        __syncthreads();
    }
    if (column < width) table[token * width + column] += total;
}
""",
    256,
)


def add_rows(table_VD: Array, tokens_N: Array, dy_ND: Array) -> None:
    """Add each row of dy to the table's row of its token; leave out tokens outside of [0, V).

    The rows of a token are added in their order, so that the bits are the same in every run. All
    tokens are compared with each distinct token. This takes less time than to sort them for some
    100,000 tokens and fewer.
    """
    # Wide rows are cut into parts of a block's threads.
    (rows, width), parts = table_VD.shape, -(-table_VD.shape[1] // _ADD_ROWS.threads)
    _ADD_ROWS.launch(
        tokens_N.size * parts,
        dy_ND.dtype,
        table_VD,
        int64(tokens_N),
        dy_ND,
        tokens_N.size,
        rows,
        width,
        parts,
    )


# One block is enough: tokens are few, and the host does not wait for it.
_COUNT_OUTSIDE = Kernel(
    "count_outside",
    SUMS
    + r"""
extern "C" __global__ void count_outside(const long long* values, T* found, long long count,
                                         long long stop, long long allowed) {
    __shared__ T room[32];
    T total = 0;
    for (long long i = threadIdx.x; i < count; i += blockDim.x)
        total += (values[i] < 0 || values[i] >= stop) && values[i] != allowed;
    total = block_sum(total, room);
    if (threadIdx.x == 0) *found = total;
}
""",
    1024,
)


def count_outside(values: Array, stop: int, allowed: int = 0) -> Array:
    """Return the number of integers that are neither in [0, stop) nor the allowed value.

    The values may lie on another GPU.
    """
    found = NAMESPACES[type(values)].empty((), np.float64)
    here = int64(beside(values, found))
    _COUNT_OUTSIDE.launch(1, np.float64, here, found, values.size, stop, allowed)
    return found


def int64(values: Array) -> Array:
    """Return integers as a C-contiguous array of int64: themselves if they are one."""
    # One integer type, so that the kernels need no variants.
    return NAMESPACES[type(values)].ascontiguousarray(values, np.int64)
