"""The squared norm of a gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpishard.base import (
    Array,
    Kernel,
    array_namespace,
    chunk_length,
    is_device_array,
    lie_end_to_end,
    stretched,
)

_PER_THREAD = 16  # Elements of a thread; fewer threads would leave a large GPU idle.

_SUM = r"""
__device__ void sum_block(double value, double* out)
{
    __shared__ double sums[256];
    int i = threadIdx.x;
    sums[i] = value;
    __syncthreads();
    for (int step = 128; step; step /= 2) {
        if (i < step) sums[i] += sums[i + step];
        __syncthreads();
    }
    if (i == 0) *out = sums[0];
}
"""

_SQUARES = Kernel(
    "sum_squares",
    _SUM
    + r"""
extern "C" __global__ void sum_squares(const T* x, double* out, long long count)
{
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    double sum = 0;
    for (; i < count; i += gridDim.x * (long long)blockDim.x) sum += (double)x[i] * (double)x[i];
    sum_block(sum, out + blockIdx.x);
}
""",
)

_TOTAL = Kernel(
    "sum_partial_sums",
    _SUM
    + r"""
extern "C" __global__ void sum_partial_sums(const double* x, double* out, long long count)
{
    double sum = 0;
    for (long long i = threadIdx.x; i < count; i += blockDim.x) sum += x[i];
    sum_block(sum, out);
}
""",
)


def squared_norm(arrays: Sequence[Array]) -> float | Array:
    """Return the sum of squares of all elements; those of chunks are added in float64.

    On a GPU the result is an array of one element there, for which the host has not waited:
    `mpishard.base.arrays.read_numbers` reads it, together with other numbers.
    """
    if arrays and is_device_array(arrays[0]):
        return _squared_norm_on_device(arrays)
    total = 0.0
    for array in arrays:
        step = chunk_length(array)
        for start in range(0, int(array.size), step):
            chunk = array[start : start + step]
            # Chunks fit the cache, and adding them in float64 does not lose small ones.
            total += float(np.dot(chunk, chunk))
    return total


def _squared_norm_on_device(arrays: Sequence[Array]) -> Array:
    runs: list[Array] = []
    for array in arrays:
        # Pieces of neighbouring units: one kernel launch for them instead of one for each.
        if runs and lie_end_to_end(runs[-1], array):
            runs[-1] = stretched(runs[-1], int(runs[-1].size + array.size))
        elif array.size:
            runs.append(array)
    xp = array_namespace(arrays[0])
    # The sums of a run, and so their bits, depend on its length alone.
    blocks = [-(-int(run.size) // (_SQUARES.threads * _PER_THREAD)) for run in runs]
    partial, total, position = xp.empty(sum(blocks), np.float64), xp.empty(1, np.float64), 0
    for run, count in zip(runs, blocks, strict=True):
        if run.dtype == np.float16:
            run = run.astype(np.float32)  # noqa: PLW2901 - kernels have no float16
        sums = partial[position : position + count]
        _SQUARES.launch(count, run.dtype, run, sums, int(run.size))
        position += count
    # One block adds all partial sums in a fixed order: atomics would change bits from run to run.
    _TOTAL.launch(1, np.float64, partial, total, position)
    return total
