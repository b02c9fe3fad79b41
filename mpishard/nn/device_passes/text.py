"""Text that kernels of layers and losses share, and the two forms of these kernels."""

from __future__ import annotations

import functools

from mpishard.base import Kernel

# Trees by shuffles, with one slot of shared memory for each warp. The tree depends only on the
# block's size.
SUMS = r"""
#define EVERY_LANE 0xffffffffu
OPERATION T block_sum(T value, T* room) {  // of all threads of the block, for each of them
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(EVERY_LANE, value, step);
    if (blockDim.x > 32) {
        int lane = threadIdx.x % 32;
        if (lane == 0) room[threadIdx.x / 32] = value;
        __syncthreads();
        value = lane < blockDim.x / 32 ? room[lane] : T(0);
        for (int step = 16; step; step /= 2) value += __shfl_xor_sync(EVERY_LANE, value, step);
        __syncthreads();
    }
    return value;
}
OPERATION T block_maximum(T value, T* room) {
    for (int step = 16; step; step /= 2)
        value = maximum(value, __shfl_xor_sync(EVERY_LANE, value, step));
    if (blockDim.x > 32) {
        int lane = threadIdx.x % 32;
        if (lane == 0) room[threadIdx.x / 32] = value;
        __syncthreads();
        value = room[lane < blockDim.x / 32 ? lane : 0];
        for (int step = 16; step; step /= 2)
            value = maximum(value, __shfl_xor_sync(EVERY_LANE, value, step));
        __syncthreads();
    }
    return value;
}
"""

_SIGMOID = r"""
OPERATION T sigmoid(T x) {  // from exp(-abs(x)), which does not overflow
    T small = exp(x < T(0) ? x : -x);
    return (x < T(0) ? small : T(1)) / (T(1) + small);
}
"""


def elementwise(name: str, signature: str, body: str) -> Kernel:
    """Return a kernel whose thread i runs ``body`` for i < count."""
    return Kernel(
        name,
        _SIGMOID + f'extern "C" __global__ void {name}({signature}, long long count) {{\n'
        "    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;\n"
        f"    if (i >= count) return;\n{body}\n}}\n",
    )


# A kernel is the key of the cache of compiled ones, and making it joins long texts.
@functools.cache
def over_rows(name: str, text: str, width: int) -> Kernel:
    """Return a kernel with a block for each row, and about four of its elements for each thread."""
    # A function of the width alone, because the number of threads decides the order of the sums.
    threads = 32 if width <= 128 else 128 if width <= 512 else 256 if width <= 4096 else 1024
    return Kernel(name, SUMS + text, threads)
