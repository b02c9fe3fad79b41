"""Softmax, masked softmax, and cross entropy."""

from __future__ import annotations

import numpy as np

from mpishard.base import NAMESPACES, Array
from mpishard.nn.device_passes.norms import column_sums
from mpishard.nn.device_passes.text import over_rows
from mpishard.nn.device_passes.tokens import int64

# The factor is applied here, to save a pass over the scores. Keys that a query does not see are not
# read.
_SOFTMAX_FORWARD = r"""
extern "C" __global__ void softmax_forward(const T* scores, T* weights, T* logs, T factor,
                                           long long keys, long long first, long long queries) {
    __shared__ T room[32];
    const T* row = scores + blockIdx.x * keys;
    T* out = weights + blockIdx.x * keys;
    long long seen = queries ? first + blockIdx.x % queries + 1 : keys;
    T largest = row[0], total = 0;
    for (long long i = threadIdx.x; i < seen; i += blockDim.x) largest = maximum(largest, row[i]);
    T shift = factor * block_maximum(largest, room);
    for (long long i = threadIdx.x; i < seen; i += blockDim.x) {
        T value = exp(factor * row[i] - shift);
        out[i] = value;
        total += value;
    }
    total = block_sum(total, room);
    for (long long i = threadIdx.x; i < seen; i += blockDim.x) out[i] /= total;
    for (long long i = seen + threadIdx.x; i < keys; i += blockDim.x) out[i] = 0;
    if (logs && threadIdx.x == 0) logs[blockIdx.x] = shift + log(total);
}
"""

# The weights are made again from the scores and one number for each row, because they would take
# T^2 memory.
_SOFTMAX_BACKWARD = r"""
extern "C" __global__ void softmax_backward(T* scores, T* dweights, const T* logs, T factor,
                                            long long keys, long long first, long long queries) {
    __shared__ T room[32];
    T* weights = scores + blockIdx.x * keys;
    T* d = dweights + blockIdx.x * keys;
    long long seen = queries ? first + blockIdx.x % queries + 1 : keys;
    T shift = logs[blockIdx.x], mean = 0;
    for (long long i = threadIdx.x; i < seen; i += blockDim.x) {
        T weight = exp(factor * weights[i] - shift);
        weights[i] = weight;
        mean += weight * d[i];
    }
    mean = block_sum(mean, room);
    for (long long i = threadIdx.x; i < seen; i += blockDim.x)
        d[i] = weights[i] * (d[i] - mean) * factor;
    for (long long i = seen + threadIdx.x; i < keys; i += blockDim.x) weights[i] = d[i] = 0;
}
"""

_SOFTMAX_GRADIENT = r"""
extern "C" __global__ void softmax_gradient(T* d, const T* y, long long width) {
    __shared__ T room[32];
    T* row = d + blockIdx.x * width;
    const T* weights = y + blockIdx.x * width;
    T mean = 0;
    for (long long i = threadIdx.x; i < width; i += blockDim.x) mean += weights[i] * row[i];
    mean = block_sum(mean, room);
    for (long long i = threadIdx.x; i < width; i += blockDim.x)
        row[i] = weights[i] * (row[i] - mean);
}
"""

# A target that is neither a class nor ignored gives NaN: the host would have to wait to refuse it.
_CROSS_ENTROPY = r"""
extern "C" __global__ void cross_entropy(const T* logits, const long long* targets,
                                         const double* weights, T* gradient, double* totals,
                                         long long ignored, T smoothing, T z_loss,
                                         long long classes) {
    __shared__ T room[32];
    const T* row = logits + blockIdx.x * classes;
    long long target = targets[blockIdx.x];
    double weight = weights ? weights[blockIdx.x] : 1.0;
    bool is_class = target >= 0 && target < classes;
    bool counts = target != ignored && is_class && weight > 0;
    T largest = row[0], total = 0, sum = 0;
    for (long long i = threadIdx.x; i < classes; i += blockDim.x)
        largest = maximum(largest, row[i]);
    largest = block_maximum(largest, room);
    for (long long i = threadIdx.x; i < classes; i += blockDim.x) {
        T value = row[i] - largest;
        total += exp(value);
        sum += value;
    }
    total = block_sum(total, room);
    if (smoothing != T(0)) sum = block_sum(sum, room);
    T log_total = log(total), log_z = log_total + largest;
    if (threadIdx.x == 0) {
        T expected = counts ? row[target] - largest : T(0);
        if (smoothing != T(0)) expected = (1 - smoothing) * expected + smoothing * (sum / classes);
        T loss = log_total - expected + z_loss * log_z * log_z;
        double nothing = 0;
        if (target != ignored && !is_class) nothing /= nothing;
        totals[blockIdx.x * 2LL] = counts ? loss * weight : nothing;
        totals[blockIdx.x * 2LL + 1] = counts ? weight : 0.0;
    }
    if (!gradient) return;
    T* d = gradient + blockIdx.x * classes;
    T factor = T(weight) * ((1 + 2 * z_loss * log_z) / total);
    T evenly = T(smoothing / classes * weight), at_target = T((1 - smoothing) * weight);
    for (long long i = threadIdx.x; i < classes; i += blockDim.x) {
        T slope = exp(row[i] - largest) * factor - evenly - (i == target ? at_target : T(0));
        d[i] = counts ? slope : T(0);
    }
}
"""


def softmax(
    scores: Array, out: Array, factor: float = 1.0, first: int = 0, queries: int = 0
) -> Array:
    """Write the softmax of factor * scores over the last dim to ``out``, which may be ``scores``.

    Row n sees ``first + n % queries + 1`` keys, or all keys if ``queries`` is 0; the others get
    weight 0. Return the logs of the rows' denominators, of the shape of ``scores`` but for a last
    dim of 1.
    """
    *rows, keys = scores.shape
    logs = NAMESPACES[type(scores)].empty((*rows, 1), scores.dtype)
    over_rows("softmax_forward", _SOFTMAX_FORWARD, keys).launch(
        logs.size, scores.dtype, scores, out, logs, factor, keys, first, queries
    )
    return logs


def softmax_backward(
    scores: Array, dweights: Array, logs: Array, factor: float, first: int, queries: int
) -> None:
    """Overwrite the scores with their `softmax`, and ``dweights`` with the gradient of scores."""
    keys = scores.shape[-1]
    over_rows("softmax_backward", _SOFTMAX_BACKWARD, keys).launch(
        logs.size, scores.dtype, scores, dweights, logs, factor, keys, first, queries
    )


def softmax_gradient(dy_NV: Array, y_NV: Array) -> None:
    """Overwrite dy with the gradient y_v (dy_v - sum_u y_u dy_u) of the input of a softmax y."""
    rows, width = dy_NV.shape
    over_rows("softmax_gradient", _SOFTMAX_GRADIENT, width).launch(
        rows, dy_NV.dtype, dy_NV, y_NV, width
    )


def cross_entropy(
    logits_NV: Array,
    target_N: Array,
    weight_N: Array | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    needs_gradient: bool,
) -> tuple[Array, Array | None]:
    """Return the sums of `mpishard.nn.CrossEntropy`, and its gradient if that is needed.

    The sums, of shape (2,) and float64, are those of the loss and of the weight.
    """
    xp = NAMESPACES[type(logits_NV)]
    rows, classes = logits_NV.shape
    # Made in the forward pass, which has the exponentials; prediction and evaluation do not need
    # it.
    gradient = xp.empty_like(logits_NV) if needs_gradient else None
    # In float64, as the host sums losses: their number grows with the batch.
    totals, sums = xp.empty((rows, 2), np.float64), xp.empty(2, np.float64)
    over_rows("cross_entropy", _CROSS_ENTROPY, classes).launch(
        rows,
        logits_NV.dtype,
        logits_NV,
        int64(target_N),
        weight_N,
        gradient,
        totals,
        ignore_index,
        label_smoothing,
        z_loss,
        classes,
    )
    column_sums(totals, (sums, False))
    return sums, gradient
