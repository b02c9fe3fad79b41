"""Column- and row-parallel linear layers: results, gradients and the bytes of their docstrings."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard import nn
from mpishard.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelLayerPartitioner,
    VocabularyParallelEmbedding,
    partition_chain,
)
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


def run(layer, x, values=None, *, needs_input_gradient=True):
    """Forward and backward, of an output gradient of ones."""
    p = values or {name: np.ones(spec.shape) for name, spec in layer.parameters.items()}
    y, saved = layer.forward(p, x, nn.Context())
    yield y
    g = {name: np.zeros_like(value) for name, value in p.items()}
    dy = np.ones_like(y)
    yield layer.backward(p, saved, dy, g, needs_input_gradient=needs_input_gradient)


@pytest.mark.parametrize("gather_output", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@in_worlds(1, 2, 3, 4)
def test_bytes_of_columns(backend, gather_output, sequence_parallel, sent_by_all):
    others, whole_input, whole_output = backend.world_size - 1, 2 * 12 * 5 * 8, 2 * 12 * 7 * 8
    layer = ColumnParallelLinear(backend, 5, 7, gather_output, sequence_parallel=sequence_parallel)
    length = 12 // backend.world_size if sequence_parallel else 12
    for needed in (True, False):
        steps = run(layer, draw(2, length, 5), needs_input_gradient=needed)
        with sent_by_all(backend) as forward:
            next(steps)
        gathered = others * whole_output if gather_output else 0
        if sequence_parallel:
            gathered += others * whole_input
        assert forward.nbytes == gathered
        with sent_by_all(backend) as backward:
            assert (next(steps) is not None) == needed
        if sequence_parallel:
            assert backward.nbytes == others * whole_input * (2 if needed else 1)
        else:
            assert backward.nbytes == (2 * others * whole_input if needed else 0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@in_worlds(1, 2, 3, 4)
def test_bytes_of_rows(backend, sequence_parallel, sent_by_all):
    others, whole_output = backend.world_size - 1, 2 * 12 * 5 * 8
    layer = RowParallelLinear(backend, 7, 5, sequence_parallel=sequence_parallel)
    for needed in (True, False):
        steps = run(layer, draw(2, 12, layer.local_input_size), needs_input_gradient=needed)
        with sent_by_all(backend) as forward:
            next(steps)
        assert forward.nbytes == others * whole_output * (1 if sequence_parallel else 2)
        with sent_by_all(backend) as backward:
            assert (next(steps) is not None) == needed
        assert backward.nbytes == (others * whole_output if sequence_parallel else 0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@in_worlds(2)
def test_a_missing_reduction_is_detected(
    backend, sequence_parallel, forgetting, columns, time_slice
):
    column = ColumnParallelLinear(backend, 5, 7, sequence_parallel=sequence_parallel)
    row = RowParallelLinear(backend, 7, 5, sequence_parallel=sequence_parallel)
    slices = time_slice(backend) if sequence_parallel else np.copy
    with forgetting(backend), pytest.raises(AssertionError, match="input's gradient is off"):
        check_parallel_layer(
            column, nn.Linear(5, 7), draw(2, 6, 5),
            take_input=slices, take_output=columns(column.split, backend),
        )  # fmt: skip
    with forgetting(backend), pytest.raises(AssertionError, match="output is off"):
        check_parallel_layer(
            row, nn.Linear(7, 5), draw(2, 6, 7),
            take_input=columns(row.split, backend), take_output=slices,
        )  # fmt: skip


@in_worlds(1, 3)
def test_the_sum_of_the_input_gradient_overlaps_the_weight_product(backend):
    """The all-reduce is issued before the weight's gradient is asked for, and waited for after."""
    events = []
    layer = ColumnParallelLinear(backend, 5, 7)
    issue = backend.all_reduce_async

    def all_reduce_async(array):
        work = issue(array)
        events.append("issued")

        class Watched:
            def wait(self):
                events.append("waited")
                return work.wait()

        return Watched()

    class Gradients(dict):
        def __getitem__(self, name):
            events.append(name)
            return super().__getitem__(name)

    p = {name: np.ones(spec.shape) for name, spec in layer.parameters.items()}
    g = Gradients({name: np.zeros_like(value) for name, value in p.items()})
    y, saved = layer.forward(p, draw(2, 5), nn.Context())
    backend.all_reduce_async = all_reduce_async
    layer.backward(p, saved, y, g)
    del backend.all_reduce_async
    assert events == ["issued", "weight", "bias", "waited"]


@pytest.mark.parametrize("make", [ColumnParallelLinear, RowParallelLinear])
@in_worlds(1, 3)
def test_initial_values_from_full_weights(backend, make):
    layer, weight, bias = make(backend, 6, 9), draw(9, 6), draw(9)
    before = {name: spec.initializer for name, spec in layer.parameters.items()}
    copy = layer.copy()
    given = weight.copy(), bias.copy()
    layer.set_from_full_weights(*given)
    for array in given:
        array.fill(0)  # they stay the caller's
    for name, full in {"weight": weight, "bias": bias}.items():
        spec = layer.parameters[name]
        (box,) = layer.boxes(name)
        np.testing.assert_array_equal(
            spec.initializer(np.random.default_rng(0), spec.shape),
            full[tuple(slice(*sides) for sides in box)],
        )
        untouched = copy.parameters[name]
        generators = np.random.default_rng(0), np.random.default_rng(0)
        np.testing.assert_array_equal(
            untouched.initializer(generators[0], spec.shape),
            before[name](generators[1], spec.shape),
        )
    with pytest.raises(ValueError, match=r"has shape \(9, 6\), got \(6, 9\)"):
        layer.set_from_full_weights(weight.T)
    with pytest.raises(ValueError, match="has no bias to set"):
        make(backend, 6, 9, bias=False).set_from_full_weights(weight, bias)
    with pytest.raises(ValueError, match=r"is table\.weight: set the values of that"):
        make(backend, 6, 9, tied_to="table.weight").set_from_full_weights(weight)
    with pytest.raises(TypeError, match="complex128"):
        layer.set_from_full_weights(weight.astype(complex))
    with pytest.raises(TypeError, match="list"):
        layer.set_from_full_weights(weight.tolist())


@in_worlds(3)
def test_refusals(backend):
    for make in (ColumnParallelLinear, RowParallelLinear):
        with pytest.raises(TypeError, match="backend must be a CommunicationBackend, got NoneType"):
            make(None, 6, 9)
        with pytest.raises(ValueError, match="needs integer sizes >= 1, got input_size=0"):
            make(backend, 0, 9)
        with pytest.raises(ValueError, match="output_size=-1"):
            make(backend, 6, -1)
        with pytest.raises(TypeError, match="activation must be a layer"):
            make(backend, 6, 9, activation="relu")
        for activation in (nn.Softmax(), nn.Dropout(0.5), nn.LayerNorm(9)):
            with pytest.raises(ValueError, match=f"which {type(activation).__name__} does not"):
                make(backend, 6, 9, activation=activation)
        slices = make(backend, 6, 9, sequence_parallel=True)
        with pytest.raises(ValueError, match="needs samples of shape \\(time"):
            slices.output_shape((6 if make is ColumnParallelLinear else 2,))
    with pytest.raises(ValueError, match="2 runs of 4 elements cannot be divided among 3 ranks"):
        ColumnParallelLinear(backend, 6, 24, parts=3, multiple=4)
    with pytest.raises(ValueError, match="2 runs of 1 elements cannot be divided among 3 ranks"):
        RowParallelLinear(backend, 2, 9)
    with pytest.raises(ValueError, match="10 elements do not make 3 equal parts of runs of 1"):
        ColumnParallelLinear(backend, 6, 10, parts=3)
    with pytest.raises(ValueError, match="T = 7 positions into 3 equal slices, and 1 are left"):
        RowParallelLinear(backend, 6, 9, sequence_parallel=True).output_shape((7, 2))
    with pytest.raises(ValueError, match="last dim is 6, got sample shape"):
        ColumnParallelLinear(backend, 6, 9).output_shape((7, 5))


@in_worlds(3)
def test_local_sizes_and_flops(backend):
    column = ColumnParallelLinear(backend, 6, 24, parts=3, multiple=2)
    heads = (2, 1, 1)[backend.rank]
    assert column.local_output_size == 6 * heads
    assert column.estimated_flops((4, 6)) == 2 * 4 * 6 * 6 * heads
    row = RowParallelLinear(backend, 7, 5)
    assert row.local_input_size == (3, 2, 2)[backend.rank]
    assert row.estimated_flops((4, row.local_input_size)) == 2 * 4 * 5 * row.local_input_size
    assert column.is_split("weight")
    assert column.is_split("bias")
    assert row.is_split("weight")
    assert not row.is_split("bias")


@in_worlds(1, 2)
def test_flags_and_chains_of_another_type_are_refused(backend):
    for flag in ("no", 1, np.ones(2)):
        for name in ("gather_output", "sequence_parallel", "bias"):
            with pytest.raises(TypeError, match=f"{name} must be True or False"):
                ColumnParallelLinear(backend, 4, 4, **{name: flag})
        with pytest.raises(TypeError, match="sequence_parallel must be True or False"):
            VocabularyParallelEmbedding(backend, 4, 4, sequence_parallel=flag)
        with pytest.raises(TypeError, match="sequence_parallel must be True or False"):
            TensorParallelLayerPartitioner(backend, sequence_parallel=flag)
        for name in ("sequence_parallel", "split_output"):
            with pytest.raises(TypeError, match=f"{name} must be True or False"):
                partition_chain({"linear": nn.Linear(4, 4)}, backend, **{name: flag})
    with pytest.raises(TypeError, match="layers must be a Mapping, got list"):
        partition_chain([nn.Linear(4, 4)], backend)
