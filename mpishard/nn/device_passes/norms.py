"""Layer norm, RMS norm, and sums over rows, which their parameters' gradients need."""

from __future__ import annotations

from mpishard.base import NAMESPACES, Array, Kernel
from mpishard.nn.device_passes.text import over_rows

_MOST_GRADIENT_BLOCKS = 512  # Each block of a norm's backward pass sums the gradients of its rows.
_SUM_COLUMNS = 32  # Columns that one block of `column_sums` sums.

# Two passes over a row, which is in the cache by then: the sum of squares minus the squared mean
# would lose digits.
_NORM_FORWARD = r"""
extern "C" __global__ void norm_forward(const T* x, const T* weight, const T* bias, T epsilon, T* y,
                                        T* h, T* inverse, long long width) {
    __shared__ T room[32];
    long long first = blockIdx.x * width;
    const T* row = x + first;
    T mean = 0, squares = 0;
    if (bias) {  // A layer norm; an RMS norm has no mean.
        T total = 0;
        for (long long i = threadIdx.x; i < width; i += blockDim.x) total += row[i];
        mean = block_sum(total, room) / width;
    }
    for (long long i = threadIdx.x; i < width; i += blockDim.x) {
        T apart = row[i] - mean;
        squares += apart * apart;
    }
    T factor = T(1) / sqrt(block_sum(squares, room) / width + epsilon);
    if (threadIdx.x == 0) inverse[blockIdx.x] = factor;
    for (long long i = threadIdx.x; i < width; i += blockDim.x) {
        T normal = (row[i] - mean) * factor;
        if (h) h[first + i] = normal;
        y[first + i] = bias ? normal * weight[i] + bias[i] : normal * weight[i];
    }
}
"""

# Each block adds up the parameters' gradients of its rows without atomics, whose order and so bits
# would vary.
_NORM_BACKWARD = r"""
extern "C" __global__ void norm_backward(T* d, const T* saved, const T* weight, const T* inverse,
                                         T* partial, long long rows, long long width,
                                         long long has_bias) {
    __shared__ T room[32];
    T* dweight = partial + blockIdx.x * width * (has_bias ? 2 : 1);
    T* dbias = dweight + width;
    for (long long i = threadIdx.x; i < width; i += blockDim.x) {
        dweight[i] = 0;
        if (has_bias) dbias[i] = 0;
    }
    for (long long n = blockIdx.x; n < rows; n += gridDim.x) {
        T* row = d + n * width;
        const T* kept = saved + n * width;
        T factor = inverse[n], sum_d = 0, sum_dh = 0;
        for (long long i = threadIdx.x; i < width; i += blockDim.x) {
            T value = row[i], h = has_bias ? kept[i] : kept[i] * factor, part = value * weight[i];
            dweight[i] += value * h;
            if (has_bias) dbias[i] += value;
            sum_d += part;
            sum_dh += part * h;
        }
        T mean_d = has_bias ? block_sum(sum_d, room) / width : T(0);
        T mean_dh = block_sum(sum_dh, room) / width;
        for (long long i = threadIdx.x; i < width; i += blockDim.x) {
            T h = has_bias ? kept[i] : kept[i] * factor;
            row[i] = (row[i] * weight[i] - mean_d - h * mean_dh) * factor;
        }
    }
}
"""

# A warp reads 32 adjacent columns at once. The rows of a block are added in a tree of fixed shape.
_COLUMN_SUMS = r"""
extern "C" __global__ void column_sums(const T* values, T* sums, T* others, long long rows,
                                       long long columns, long long split, long long adds,
                                       long long adds_others) {
    __shared__ T room[1024];
    int me = threadIdx.x;
    long long column = blockIdx.x * 32LL + me % 32;
    T total = 0;
    if (column < columns) {
        #pragma unroll 8
        for (long long n = me / 32; n < rows; n += 32) total += values[n * columns + column];
    }
    room[me] = total;
    for (int half = 512; half >= 32; half /= 2) {
        __syncthreads();
        if (me < half) room[me] += room[me + half];
    }
    if (me >= 32 || column >= columns) return;
    T* place = column < split ? sums + column : others + (column - split);
    bool has_contents = column < split ? adds : adds_others;
    *place = has_contents ? *place + room[me] : room[me];
}
"""


def norm(
    x_ND: Array, weight_D: Array, bias_D: Array | None, epsilon: float, *, keeps_normal: bool
) -> tuple[Array, Array | None, Array]:
    """Return the layer norm of each row, or its RMS norm if there is no bias.

    Returns
    -------
    y_ND : Array
        The result.
    h_ND : Array or None
        The normalised input, if ``keeps_normal`` is True.
    inverse_N : Array
        1 / sqrt(variance + epsilon) of each row, or 1 / its root mean square.
    """
    xp = NAMESPACES[type(x_ND)]
    y_ND, inverse_N = xp.empty_like(x_ND), xp.empty(x_ND.shape[0], x_ND.dtype)
    # An RMS norm's backward pass makes it from the input, which it has anyway.
    h_ND = xp.empty_like(x_ND) if keeps_normal else None
    rows, width = x_ND.shape
    over_rows("norm_forward", _NORM_FORWARD, width).launch(
        rows, x_ND.dtype, x_ND, weight_D, bias_D, epsilon, y_ND, h_ND, inverse_N, width
    )
    return y_ND, h_ND, inverse_N


def norm_backward(
    dy_ND: Array, saved_ND: Array, weight_D: Array, inverse_N: Array, *, has_bias: bool
) -> Array:
    """Overwrite dy with the input's gradient, and return sums of the parameters' gradients.

    ``saved_ND`` is the normalised input, or without a bias the input itself. Each row of the result
    is a sum over some of the rows: of dy times the normalised input, and, with a bias, of dy behind
    it. `add_column_sums` makes the gradients of it.
    """
    rows, width = dy_ND.shape
    blocks = min(rows, _MOST_GRADIENT_BLOCKS)
    shape = blocks, width * (2 if has_bias else 1)
    partial = NAMESPACES[type(dy_ND)].empty(shape, dy_ND.dtype)
    over_rows("norm_backward", _NORM_BACKWARD, width).launch(
        blocks,
        dy_ND.dtype,
        dy_ND,
        saved_ND,
        weight_D,
        inverse_N,
        partial,
        rows,
        width,
        int(has_bias),
    )
    return partial


_column_sums = Kernel("column_sums", _COLUMN_SUMS, 1024)


def column_sums(values_NC: Array, *targets: tuple[Array, bool]) -> None:
    """Write, or add, the sums of ``values_NC`` over its first dim to one or two arrays.

    Parameters
    ----------
    values_NC : Array
        Array of shape (N, C).
    *targets : (Array, bool)
        1-D arrays for the sums of the first columns and, if there are two, of the other columns.
        The bool is True if the sums are added to the array's contents.
    """
    (sums, adds), *rest = targets
    others, adds_others = rest[0] if rest else (None, False)
    rows, columns = values_NC.shape
    # The kernel steps through memory by rows of this width.
    values_NC = NAMESPACES[type(values_NC)].ascontiguousarray(values_NC)
    _column_sums.launch(
        -(-columns // _SUM_COLUMNS),
        values_NC.dtype,
        values_NC,
        sums,
        others,
        rows,
        columns,
        sums.size,
        int(adds),
        int(adds_others),
    )
