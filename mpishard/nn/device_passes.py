"""Passes over float32 and float64 activations on a GPU: the formulas of `passes`, in CUDA C++.

With CuPy's functions a layer is a chain of launches, each of which reads and writes whole arrays
and takes the host 5 to 20 microseconds. Here it is one launch, or two. A kernel over rows gives
each row to one block. Threads add elements that are a block's length apart; warps, and then the
block, add these sums in a tree. So the bits of a row's result depend on its values and on its
length, and not on the other rows, the launch or the run.

All functions take C-contiguous arrays on the current device, and begin their kernels on its
current stream. An array "is overwritten" if the function writes its results there.
"""

from __future__ import annotations

import functools

import numpy as np

from mpishard.arrays import NAMESPACES, Array
from mpishard.kernels import Kernel

_MOST_GRADIENT_BLOCKS = 512  # Each block of a norm's backward pass sums the gradients of its rows.
_SUM_COLUMNS = 32  # Columns that one block of `column_sums` sums.

_SUMS = r"""
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


_SIGMOID = r"""
OPERATION T sigmoid(T x) {  // from exp(-abs(x)), which does not overflow
    T small = exp(x < T(0) ? x : -x);
    return (x < T(0) ? small : T(1)) / (T(1) + small);
}
"""


def _elementwise(name: str, signature: str, body: str) -> Kernel:
    """Return a kernel whose thread i runs ``body`` for i < count."""
    return Kernel(
        name,
        _SIGMOID + f'extern "C" __global__ void {name}({signature}, long long count) {{\n'
        "    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;\n"
        f"    if (i >= count) return;\n{body}\n}}\n",
    )


ROW_KERNELS = {
    "norm_forward": _NORM_FORWARD,
    "norm_backward": _NORM_BACKWARD,
    "softmax_forward": _SOFTMAX_FORWARD,
    "softmax_backward": _SOFTMAX_BACKWARD,
    "softmax_gradient": _SOFTMAX_GRADIENT,
    "cross_entropy": _CROSS_ENTROPY,
}


@functools.cache
def _row_kernel(name: str, width: int) -> Kernel:
    """Return the kernel of a name with about four elements of a row for each thread."""
    threads = 32 if width <= 128 else 128 if width <= 512 else 256 if width <= 4096 else 1024
    return Kernel(name, _SUMS + ROW_KERNELS[name], threads)


# ------------------------------------------------------------------------------- normalisations


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
    h_ND = xp.empty_like(x_ND) if keeps_normal else None
    rows, width = x_ND.shape
    _row_kernel("norm_forward", width).launch(
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
    _row_kernel("norm_backward", width).launch(
        blocks, dy_ND.dtype, dy_ND, saved_ND, weight_D, inverse_N, partial, rows, width,
        int(has_bias),
    )  # fmt: skip
    return partial


_column_sums = Kernel("column_sums", _COLUMN_SUMS, 1024)


def column_sums(values_NC: Array, *places: tuple[Array, bool]) -> None:
    """Write, or add, the sums of ``values_NC`` over its first dim to one or two places.

    Parameters
    ----------
    values_NC : Array
        Array of shape (N, C).
    *places : (Array, bool)
        1-D arrays for the sums of the first columns and, if there are two, of the other columns.
        The bool is True if the sums are added to the array's contents.
    """
    (sums, adds), (others, adds_others) = places if len(places) == 2 else (*places, (None, False))
    rows, columns = values_NC.shape
    values_NC = NAMESPACES[type(values_NC)].ascontiguousarray(values_NC)
    _column_sums.launch(
        -(-columns // _SUM_COLUMNS), values_NC.dtype, values_NC, sums, others, rows, columns,
        sums.size, int(adds), int(adds_others),
    )  # fmt: skip


# -------------------------------------------------------------------------------------- softmax


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
    _row_kernel("softmax_forward", keys).launch(
        logs.size, scores.dtype, scores, out, logs, factor, keys, first, queries
    )
    return logs


def softmax_backward(
    scores: Array, dweights: Array, logs: Array, factor: float, first: int, queries: int
) -> None:
    """Overwrite the scores with their `softmax`, and ``dweights`` with the gradient of scores."""
    keys = scores.shape[-1]
    _row_kernel("softmax_backward", keys).launch(
        logs.size, scores.dtype, scores, dweights, logs, factor, keys, first, queries
    )


def softmax_gradient(dy_NV: Array, y_NV: Array) -> None:
    """Overwrite dy with the gradient y_v (dy_v - sum_u y_u dy_u) of the input of a softmax y."""
    rows, width = dy_NV.shape
    _row_kernel("softmax_gradient", width).launch(rows, dy_NV.dtype, dy_NV, y_NV, width)


# ------------------------------------------------------------------------------- cross entropy


def cross_entropy(
    logits_NV: Array, target_N: Array, weight_N: Array | None, *, ignore_index: int,
    label_smoothing: float, z_loss: float, needs_gradient: bool,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Return the sums of `mpishard.nn.CrossEntropy`, and its gradient if that is needed.

    The sums, of shape (2,) and float64, are those of the loss and of the weight.
    """
    xp = NAMESPACES[type(logits_NV)]
    rows, classes = logits_NV.shape
    gradient = xp.empty_like(logits_NV) if needs_gradient else None
    totals, sums = xp.empty((rows, 2), np.float64), xp.empty(2, np.float64)
    _row_kernel("cross_entropy", classes).launch(
        rows, logits_NV.dtype, logits_NV, _int64(target_N), weight_N, gradient,
        totals, ignore_index, label_smoothing, z_loss, classes,
    )  # fmt: skip
    column_sums(totals, (sums, False))
    return sums, gradient


# ---------------------------------------------------------------------------------- activations

_GELU = r"""
    T v = x[i], square = v * v;
    T u = v * (T(0.7978845608028654) + T(0.035677408136300125) * square);
    T small = exp(u < T(0) ? u + u : -(u + u));
    T h = T(1) / (T(1) + small);  // (1 + tanh(u)) / 2
    if (u < T(0)) h *= small;
    T result = v * h;
    y[i] = result;
    T rise = T(1.5957691216057308) + T(0.21406444881780075) * square;  // 2 du/dx
    if (slope) slope[i] = h + result * (1 - h) * rise;
"""
_SILU = r"""
    T s = sigmoid(x[i]), result = x[i] * s;
    y[i] = result;
    if (slope) slope[i] = s + result * (1 - s);
"""
# The forward pass, and for activations whose slope is a function of the output y the backward pass.
_ACTIVATIONS = {
    "gelu": _elementwise("gelu", "const T* x, T* y, T* slope", _GELU),
    "silu": _elementwise("silu", "const T* x, T* y, T* slope", _SILU),
    "tanh": _elementwise("tanh_forward", "const T* x, T* y", "    y[i] = tanh(x[i]);"),
    "sigmoid": _elementwise("sigmoid_forward", "const T* x, T* y", "    y[i] = sigmoid(x[i]);"),
    "relu": _elementwise("relu_forward", "const T* x, T* y", "    y[i] = maximum(x[i], T(0));"),
}
_SLOPES = {
    name: _elementwise(f"{name}_backward", "T* d, const T* y", f"    d[i] *= {slope};")
    for name, slope in {
        "tanh": "1 - y[i] * y[i]",
        "sigmoid": "(1 - y[i]) * y[i]",
        "relu": "y[i] > T(0) ? T(1) : T(0)",
    }.items()
}


def activation_with_slope(name: str, x: Array, *, needs_slope: bool) -> tuple[Array, Array | None]:
    """Return y and, if it is needed, the slope dy/dx of the activation "gelu" or "silu"."""
    xp = NAMESPACES[type(x)]
    y, slope = xp.empty_like(x), xp.empty_like(x) if needs_slope else None
    _ACTIVATIONS[name].launch_for(x.size, x.dtype, x, y, slope, x.size)
    return y, slope


def activation(name: str, x: Array) -> Array:
    """Return the activation "tanh", "sigmoid" or "relu" of x."""
    y = NAMESPACES[type(x)].empty_like(x)
    _ACTIVATIONS[name].launch_for(x.size, x.dtype, x, y, x.size)
    return y


def activation_backward(name: str, dy: Array, y: Array) -> None:
    """Multiply dy by the slope of an `activation`, in place."""
    _SLOPES[name].launch_for(dy.size, dy.dtype, dy, y, dy.size)


_SWIGLU_FORWARD = _elementwise(
    "swiglu_forward",
    "const T* x, T* y, long long width",
    """    const T* a = x + i / width * 2 * width + i % width;
    y[i] = sigmoid(a[0]) * a[0] * a[width];""",
)
_SWIGLU_BACKWARD = _elementwise(
    "swiglu_backward",
    "const T* x, const T* dy, T* dx, long long width",
    """    long long place = i / width * 2 * width + i % width;
    T a = x[place], b = x[place + width], s = sigmoid(a), gate = a * s;
    dx[place] = ((1 - s) * gate + s) * b * dy[i];
    dx[place + width] = gate * dy[i];""",
)


def swiglu(x_N2F: Array) -> Array:
    """Return a s(a) b, of shape (N, F), for x = [a | b] with the logistic function s."""
    rows, width = x_N2F.shape[0], x_N2F.shape[1] // 2
    y_NF = NAMESPACES[type(x_N2F)].empty((rows, width), x_N2F.dtype)
    _SWIGLU_FORWARD.launch_for(y_NF.size, x_N2F.dtype, x_N2F, y_NF, width, y_NF.size)
    return y_NF


def swiglu_backward(x_N2F: Array, dy_NF: Array) -> Array:
    """Return the gradient of x, of shape (N, 2 F), for that of `swiglu`."""
    dx_N2F = NAMESPACES[type(x_N2F)].empty_like(x_N2F)
    _SWIGLU_BACKWARD.launch_for(
        dy_NF.size, x_N2F.dtype, x_N2F, dy_NF, dx_N2F, dy_NF.shape[1], dy_NF.size
    )
    return dx_N2F


# -------------------------------------------------------------------------- tokens and their rows

# A token outside of the table gives NaN: the host would have to wait to refuse it.
_TAKE_ROWS = _elementwise(
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
    _TAKE_ROWS.launch_for(y.size, y.dtype, table_VD, _int64(tokens), y, rows, width, y.size)
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
    (rows, width), parts = table_VD.shape, -(-table_VD.shape[1] // _ADD_ROWS.threads)
    _ADD_ROWS.launch(
        tokens_N.size * parts, dy_ND.dtype, table_VD, _int64(tokens_N), dy_ND, tokens_N.size, rows,
        width, parts,
    )  # fmt: skip


_COUNT_OUTSIDE = Kernel(
    "count_outside",
    _SUMS
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
    """Return the number of integers that are neither in [0, stop) nor the allowed value."""
    found = NAMESPACES[type(values)].empty((), np.float64)
    _COUNT_OUTSIDE.launch(1, np.float64, _int64(values), found, values.size, stop, allowed)
    return found


def _int64(values: Array) -> Array:
    """Return integers as a C-contiguous array of int64: themselves if they are one."""
    return NAMESPACES[type(values)].ascontiguousarray(values, np.int64)


# -------------------------------------------------------------------------------------- dropout

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
_DROPOUT_BACKWARD = _elementwise(
    "dropout_backward",
    "T* d, const bool* mask, T scale",
    "    d[i] = d[i] * scale * T(mask[i]);",
)


def dropout(
    x_BE: Array, scale: float, *, key: int, counter: int, threshold: int, counts: int,
    counts_between: int, skipped: int,
) -> tuple[Array, Array]:  # fmt: skip
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
    words = (key, key >> 64, counter, counter >> 64, threshold)
    _DROPOUT.launch_for(
        samples * counts, x_BE.dtype, x_BE, y_BE, mask_BE, scale,
        *(np.uint64(word & (2**64 - 1)) for word in words),
        samples, elements, counts, counts_between, skipped,
    )  # fmt: skip
    return y_BE, mask_BE


def dropout_backward(dy_BE: Array, mask_BE: Array, scale: float) -> None:
    """Multiply dy by the scale and the mask, in place."""
    _DROPOUT_BACKWARD.launch_for(dy_BE.size, dy_BE.dtype, dy_BE, mask_BE, scale, dy_BE.size)
