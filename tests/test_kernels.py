"""Kernels on a GPU, or compiled for the host by its stand-in."""

import numpy as np
import pytest

from mpishard.base.kernels import Kernel

OPERATIONS = Kernel(
    "operations",
    """
extern "C" __global__ void operations(const T* a, const T* b, T* out, long long count)
{
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= count) return;
    out[i] = add(a[i], b[i]);
    out[count + i] = sub(a[i], b[i]);
    out[2 * count + i] = mul(a[i], b[i]);
    out[3 * count + i] = div(a[i], b[i]);
    out[4 * count + i] = root(a[i]);
    out[5 * count + i] = maximum(a[i], b[i]);
    out[6 * count + i] = minimum(a[i], b[i]);
    out[7 * count + i] = sign(a[i]);
    out[8 * count + i] = add(mul(a[i], b[i]), b[i]);
    out[9 * count + i] = T(less(a[i], b[i]) + 2 * differs(a[i], T(0)));
}
""",
)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_operations_have_the_bits_of_the_host(dtype, gpu):
    """Tiny numbers, which CuPy's own functions replace by 0, infinities and NaN among them."""
    generator = np.random.default_rng(0)
    tiny = np.finfo(dtype).smallest_normal
    special = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, tiny, -tiny / 8, tiny / 1024])
    a = np.concatenate([
        np.repeat(special, 10), generator.standard_normal(1000),
        tiny * generator.standard_normal(1000), np.exp(20 * generator.standard_normal(1000)),
    ]).astype(dtype)  # fmt: skip
    b = np.concatenate([np.tile(special, 10), generator.standard_normal(3000)]).astype(dtype)
    out = gpu.empty(10 * a.size, dtype)
    OPERATIONS.launch_for(a.size, dtype, gpu.asarray(a), gpu.asarray(b), out, a.size)
    with np.errstate(all="ignore"):
        wanted = [
            a + b, a - b, a * b, a / b, np.sqrt(a), np.maximum(a, b), np.minimum(a, b), np.sign(a),
            a * b + b, (a < b) + 2 * (a != 0),
        ]  # fmt: skip
    found = out.get().reshape(10, -1)
    word = {4: np.uint32, 8: np.uint64}[np.dtype(dtype).itemsize]
    for place, values in enumerate(wanted):
        ours, theirs = found[place], values.astype(dtype)
        same = (ours.view(word) == theirs.view(word)) | (np.isnan(ours) & np.isnan(theirs))
        if place in (5, 6):  # of +0 and -0 NumPy takes either one
            same |= (ours == 0) & (theirs == 0)
        assert same.all(), place
    assert 0 < np.nanmin(np.abs(found[2][found[2] != 0])) < tiny


def test_the_dtype_of_a_launch_decides_the_type_of_its_numbers(gpu):
    scale = Kernel(
        "scale",
        """
extern "C" __global__ void scale(T* x, T factor, long long count)
{
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < count) x[i] *= factor;
}
""",
    )
    for dtype in ("float32", "float64"):
        x = gpu.asarray(np.arange(1000, dtype=dtype))
        scale.launch_for(1000, dtype, x, 0.1, 1000)
        np.testing.assert_array_equal(
            x.get(), np.arange(1000, dtype=dtype) * np.dtype(dtype).type(0.1)
        )
    scale.launch_for(0, dtype, x, 0.1, 0)  # nothing is launched
