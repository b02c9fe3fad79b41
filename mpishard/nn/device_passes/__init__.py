"""Passes over float32 and float64 activations on a GPU: the formulas of `passes`, in CUDA C++.

With CuPy's functions a layer is a chain of launches, each of which reads and writes whole arrays
and takes the host 5 to 20 microseconds. Here it is one launch, or two. A kernel over rows gives
each row to one block. Threads add elements that are a block's length apart; warps, and then the
block, add these sums in a tree. So the bits of a row's result depend on its values and on its
length, and not on the other rows, the launch or the run.

`norms`, `softmax` (with cross entropy), `activations`, `tokens` and `dropout` have the kernels, and
the functions that launch them; `text` has what their texts share. `products` has matrix products,
also of rounded operands, and `attention` uses them. All functions take C-contiguous
arrays on the current device, and begin their kernels on its current stream. An array "is
overwritten" if the function writes its results there.
"""

from __future__ import annotations

from mpishard.nn.device_passes.activations import (
    activation,
    activation_backward,
    activation_with_slope,
    swiglu,
    swiglu_backward,
)
from mpishard.nn.device_passes.attention import Block, attend, attend_backward, blocks_of
from mpishard.nn.device_passes.dropout import dropout, dropout_backward
from mpishard.nn.device_passes.norms import column_sums, norm, norm_backward
from mpishard.nn.device_passes.products import multiply, precision_of, products_in
from mpishard.nn.device_passes.softmax import (
    cross_entropy,
    softmax,
    softmax_backward,
    softmax_gradient,
)
from mpishard.nn.device_passes.tokens import add_rows, count_outside, take_rows

__all__ = [
    "Block",
    "activation",
    "activation_backward",
    "activation_with_slope",
    "add_rows",
    "attend",
    "attend_backward",
    "blocks_of",
    "column_sums",
    "count_outside",
    "cross_entropy",
    "dropout",
    "dropout_backward",
    "multiply",
    "norm",
    "norm_backward",
    "precision_of",
    "products_in",
    "softmax",
    "softmax_backward",
    "softmax_gradient",
    "swiglu",
    "swiglu_backward",
    "take_rows",
]
