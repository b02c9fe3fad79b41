"""Element-wise activations, and the gated activation SwiGLU."""

from __future__ import annotations

from mpishard.base import NAMESPACES, Array
from mpishard.nn.device_passes.text import elementwise

# From exp(-2 abs(u)), which does not overflow. The slope is a by-product of the same exponential,
# so that backward only multiplies.
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
# Backward could compute the slope from x, but saving it costs the same memory and no exponential.
_SILU = r"""
    T s = sigmoid(x[i]), result = x[i] * s;
    y[i] = result;
    if (slope) slope[i] = s + result * (1 - s);
"""
# The forward pass, and for activations whose slope is a function of the output y the backward pass.
_ACTIVATIONS = {
    "gelu": elementwise("gelu", "const T* x, T* y, T* slope", _GELU),
    "silu": elementwise("silu", "const T* x, T* y, T* slope", _SILU),
    "tanh": elementwise("tanh_forward", "const T* x, T* y", "    y[i] = tanh(x[i]);"),
    "sigmoid": elementwise("sigmoid_forward", "const T* x, T* y", "    y[i] = sigmoid(x[i]);"),
    "relu": elementwise("relu_forward", "const T* x, T* y", "    y[i] = maximum(x[i], T(0));"),
}
_SLOPES = {
    name: elementwise(f"{name}_backward", "T* d, const T* y", f"    d[i] *= {slope};")
    for name, slope in {
        "tanh": "1 - y[i] * y[i]",
        "sigmoid": "(1 - y[i]) * y[i]",
        "relu": "y[i] > T(0) ? T(1) : T(0)",
    }.items()
}


def activation_with_slope(name: str, x: Array, *, needs_slope: bool) -> tuple[Array, Array | None]:
    """Return y and, if it is needed, the slope dy/dx of the activation "gelu" or "silu"."""
    xp = NAMESPACES[type(x)]
    # A null pointer tells the kernel to leave out the slope, which prediction does not need.
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


# One thread has an element of both halves: they lie a row's width apart.
_SWIGLU_FORWARD = elementwise(
    "swiglu_forward",
    "const T* x, T* y, long long width",
    """    const T* a = x + i / width * 2 * width + i % width;
    y[i] = sigmoid(a[0]) * a[0] * a[width];""",
)
_SWIGLU_BACKWARD = elementwise(
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
