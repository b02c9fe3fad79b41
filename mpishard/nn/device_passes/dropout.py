"""Dropout with the masks of the host, bit by bit."""

from __future__ import annotations

import numpy as np

from mpishard.base import NAMESPACES, Array, Kernel
from mpishard.nn.device_passes.text import elementwise

# Philox4x64-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A thread
# makes the eight words of one count of a sample's counter, and masks their elements.
_DROPOUT = Kernel(
    "dropout",
    r"""
extern "C" __global__ void dropout(const T* x, T* y, bool* mask, T scale,
                                   unsigned long long key_low, unsigned long long key_high,
                                   unsigned long long counter_low, unsigned long long counter_high,
                                   unsigned long long threshold, long long samples,
                                   long long elements, long long counts, long long counts_between,
                                   long long skipped) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= samples * counts) return;
    long long sample = i / counts, count = i % counts;
    unsigned long long ahead = sample * (counts + counts_between) + count + 1;
    unsigned long long a = counter_low + ahead, b = counter_high + (a < ahead), c = 0, d = 0;
    for (int round = 0; round < 10; round++) {
        unsigned long long low_a = 0xD2E7470EE14C6C93ULL * a, low_c = 0xCA5A826395121157ULL * c;
        unsigned long long high_a = __umul64hi(0xD2E7470EE14C6C93ULL, a);
        unsigned long long high_c = __umul64hi(0xCA5A826395121157ULL, c);
        a = high_c ^ b ^ key_low;
        b = low_c;
        c = high_a ^ d ^ key_high;
        d = low_a;
        key_low += 0x9E3779B97F4A7C15ULL;
        key_high += 0xBB67AE8584CAA73BULL;
    }
    unsigned long long words[4] = {a, b, c, d};
    #pragma unroll
    for (int w = 0; w < 8; w++) {
        long long element = count * 8 + w - skipped;
        if (element < 0 || element >= elements) continue;
        unsigned long long word = w % 2 ? words[w / 2] >> 32 : words[w / 2] & 0xffffffffULL;
        long long place = sample * elements + element;
        mask[place] = word >= threshold;
        y[place] = x[place] * scale * T(word >= threshold);
    }
}
""",
)
_DROPOUT_BACKWARD = elementwise(
    "dropout_backward",
    "T* d, const bool* mask, T scale",
    "    d[i] = d[i] * scale * T(mask[i]);",
)


def dropout(
    x_BE: Array,
    scale: float,
    *,
    key: int,
    counter: int,
    threshold: int,
    counts: int,
    counts_between: int,
    skipped: int,
) -> tuple[Array, Array]:
    """Return x * scale * mask, and the mask: see `mpishard.nn.Dropout`.

    Parameters
    ----------
    x_BE : Array
        Elements of each sample.
    scale : float
        Factor of the elements that are kept.
    key, counter : int
        State of NumPy's generator ``Philox(key=key, counter=counter)``.
    threshold : int
        An element is kept if its 32-bit word is at least this.
    counts, counts_between : int
        Number of values of the counter for the elements of a sample, and from there to the next.
    skipped : int
        Number of words of a sample before that of its first element.
    """
    xp = NAMESPACES[type(x_BE)]
    y_BE, mask_BE = xp.empty_like(x_BE), xp.empty(x_BE.shape, bool)
    samples, elements = x_BE.shape
    # The key and the counter have 128 bits, and a kernel's arguments at most 64.
    words = (key, key >> 64, counter, counter >> 64, threshold)
    _DROPOUT.launch_for(
        samples * counts,
        x_BE.dtype,
        x_BE,
        y_BE,
        mask_BE,
        scale,
        *(np.uint64(word & (2**64 - 1)) for word in words),
        samples,
        elements,
        counts,
        counts_between,
        skipped,
    )
    return y_BE, mask_BE


def dropout_backward(dy_BE: Array, mask_BE: Array, scale: float) -> None:
    """Multiply dy by the scale and the mask, in place."""
    _DROPOUT_BACKWARD.launch_for(dy_BE.size, dy_BE.dtype, dy_BE, mask_BE, scale, dy_BE.size)
