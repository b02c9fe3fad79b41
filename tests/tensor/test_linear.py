"""Column- and row-parallel linear layers are the whole layer's parts, and send what they say."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard import nn
from mpishard.tensor import ColumnParallelLinear, RowParallelLinear
from mpishard.testing import check_parallel_layer
from mpishard.testing.worlds import in_worlds


def draw(*shape):
    return np.random.default_rng(7).standard_normal(shape)


COLUMN = {
    "uneven": (7, {}),
    "gathered": (7, {"gather_output": True}),
    "without bias": (7, {"bias": False}),
    "parts": (24, {"parts": 3, "multiple": 2}),
    "parts, gathered": (24, {"parts": 3, "multiple": 2, "gather_output": True}),
    "relu": (7, {"activation": nn.ReLU()}),
    "gelu, gathered": (7, {"activation": nn.GELU(), "gather_output": True}),
}


class Activated(nn.Layer):
    """The whole layer with its activation, under the names of the linear layer."""

    def __init__(self, linear, activation):
        self.linear, self.activation = linear, activation

    @property
    def parameters(self):
        return self.linear.parameters

    def output_shape(self, input_shape):
        return self.linear.output_shape(input_shape)

    def forward(self, p, x, context):
        y, saved = self.linear.forward(p, x, context)
        y, activation_saved = self.activation.forward({}, y, context)
        return y, (saved, activation_saved)

    def backward_input(self, p, saved, dy):
        dy, _ = self.activation.backward_input({}, saved[1], dy)
        return self.linear.backward_input(p, saved[0], dy)

    def backward_weight(self, pending, g):
        self.linear.backward_weight(pending, g)


def reference(inputs, outputs, bias=True, activation=None):
    linear = nn.Linear(inputs, outputs, bias)
    return linear if activation is None else Activated(linear, activation)


@pytest.mark.parametrize("name", COLUMN)
@pytest.mark.parametrize("shape", [(4, 5), (2, 12, 5), (0, 5)])
@in_worlds(1, 2, 3, 4)
def test_column(backend, name, shape, columns):
    outputs, options = COLUMN[name]
    layer = ColumnParallelLinear(backend, 5, outputs, **options)
    whole = reference(5, outputs, options.get("bias", True), options.get("activation"))
    take = (lambda y: y) if layer.gather_output else columns(layer.split, backend)
    check_parallel_layer(layer, whole, draw(*shape), take_output=take)


@pytest.mark.parametrize("name", COLUMN)
@pytest.mark.parametrize("batch", [1, 2, 0])
@in_worlds(1, 2, 3, 4)
def test_column_of_slices_of_the_sequence(backend, name, batch, columns, time_slice):
    outputs, options = COLUMN[name]
    layer = ColumnParallelLinear(backend, 5, outputs, **options, sequence_parallel=True)
    whole = reference(5, outputs, options.get("bias", True), options.get("activation"))
    take = (lambda y: y) if layer.gather_output else columns(layer.split, backend)
    check_parallel_layer(
        layer, whole, draw(batch, 12, 5), take_input=time_slice(backend), take_output=take
    )


ROW = {
    "uneven": (7, {}),
    "without bias": (7, {"bias": False}),
    "heads": (20, {"multiple": 4}),
    "relu": (7, {"activation": nn.ReLU()}),
}


@pytest.mark.parametrize("name", ROW)
@pytest.mark.parametrize("shape", [(4,), (2, 12), (0,)])
@in_worlds(1, 2, 3, 4)
def test_row(backend, name, shape, columns):
    inputs, options = ROW[name]
    layer = RowParallelLinear(backend, inputs, 5, **options)
    whole = reference(inputs, 5, options.get("bias", True), options.get("activation"))
    take = columns(layer.split, backend)
    check_parallel_layer(layer, whole, draw(*shape, inputs), take_input=take)


@pytest.mark.parametrize("name", ROW)
@pytest.mark.parametrize("batch", [1, 2, 0])
@in_worlds(1, 2, 3, 4)
def test_row_to_slices_of_the_sequence(backend, name, batch, columns, time_slice):
    inputs, options = ROW[name]
    layer = RowParallelLinear(backend, inputs, 5, **options, sequence_parallel=True)
    whole = reference(inputs, 5, options.get("bias", True), options.get("activation"))
    check_parallel_layer(
        layer, whole, draw(batch, 12, inputs),
        take_input=columns(layer.split, backend), take_output=time_slice(backend),
    )  # fmt: skip
