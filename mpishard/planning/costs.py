"""Work of a layer: its matrix products, the elements of its other passes, and what it sends.

Shape suffixes are those of ``nn``. A layer computes 2 products in backward for each of forward, one
for the input's gradient and one for the weight's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from mpishard.nn import Attention, Conv2D, Layer, Linear, Residual, Sequential
from mpishard.tensor import (
    ColumnParallelLinear,
    CopyToRegion,
    GatherOutput,
    GatherSequence,
    ReduceFromRegion,
    RowParallelLinear,
    ScatterSequence,
    SequenceParallelNorm,
    SequenceParallelPositionalEmbedding,
    TensorParallelLayer,
    VocabularyParallelEmbedding,
)

__all__ = ["LayerWork", "Product", "Sent", "works_of"]

Shape = tuple[int, ...]

_BLOCK = 128  # queries of a block of causal scores, about


class Product(NamedTuple):
    """``matrices`` products of a matrix (rows, inner) by another one (inner, columns)."""

    rows: int
    columns: int
    inner: int
    matrices: float = 1


class Sent(NamedTuple):
    """A collective of the tensor group, on arrays of ``elements`` for the whole group.

    ``passes`` is 2 for an all-reduce, and 1 for an all-gather or a reduce-scatter. If it
    ``overlaps``, the next product is computed meanwhile.
    """

    passes: int
    elements: int
    overlaps: bool = False


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Work of a leaf layer for one batch.

    Parameters
    ----------
    name : str
        Class whose measured time the other passes have.
    elements : float
        Elements of these passes: see `PassRate`.
    arrays : float
        Elements that forward reads and writes, if the class was not measured.
    forward, input, weight : tuple of Product
        Products of forward, and of the two halves of backward.
    sent_forward, sent_backward : tuple of Sent
        Collectives on the tensor axis.
    is_known : bool
        False for a layer of another package, whose products nobody knows.
    """

    name: str
    elements: float
    arrays: float
    forward: tuple[Product, ...] = ()
    input: tuple[Product, ...] = ()
    weight: tuple[Product, ...] = ()
    sent_forward: tuple[Sent, ...] = ()
    sent_backward: tuple[Sent, ...] = ()
    is_known: bool = True


def works_of(layer: Layer, shape: Shape, samples: int) -> tuple[list[LayerWork], Shape]:
    """Return the work of a layer's leaves, and the shape of a sample's output.

    Parameters
    ----------
    layer : Layer
        A layer, or a composite.
    shape : tuple of int
        Shape of a sample of its input.
    samples : int
        Samples of the batch.
    """
    if isinstance(layer, Sequential):
        works: list[LayerWork] = []
        for child in layer.children.values():
            found, shape = works_of(child, shape, samples)
            works += found
        return works, shape
    if isinstance(layer, Residual):
        works, output = [], shape
        for child in layer.children.values():
            found, output = works_of(child, output, samples)
            works += found
        size = samples * math.prod(output)
        return [*works, LayerWork("Residual", size, 3 * size)], output
    parts = [getattr(layer, name, None) for name in ("before", "layer", "after")]
    if isinstance(parts[1], Layer):  # `Framed`: operators around a layer
        works = []
        for part in parts:
            if part is not None:
                found, shape = works_of(part, shape, samples)
                works += found
        return works, shape
    return _leaf(layer, shape, samples)


def _leaf(layer: Layer, shape: Shape, samples: int) -> tuple[list[LayerWork], Shape]:
    output = layer.output_shape(shape)
    incoming, outgoing = samples * math.prod(shape), samples * math.prod(output)
    if isinstance(layer, Attention):
        works = [_attention(layer, shape, samples, incoming + outgoing)]
    elif isinstance(layer, Conv2D):
        works = [_convolution(layer, output, samples, incoming + outgoing)]
    elif isinstance(layer, Linear):
        works = [_linear(layer, shape, samples, layer.inputs, layer.outputs)]
    elif isinstance(layer, ColumnParallelLinear):
        works = _column(layer, shape, output, samples)
    elif isinstance(layer, RowParallelLinear):
        works = _row(layer, shape, output, samples)
    elif isinstance(layer, TensorParallelLayer):
        works = [_on_tensor_axis(layer, shape, samples, incoming, outgoing)]
    else:
        works = [_other(layer, shape, output, samples)]
    return works, output


def _other(layer: Layer, shape: Shape, output: Shape, samples: int) -> LayerWork:
    """Return the work of a layer without products, or of a class of the user's own.

    Such a class may say its products by `Layer.estimated_flops`.
    """
    incoming, outgoing = math.prod(shape), math.prod(output)
    name = type(layer).__name__
    passes = LayerWork(name, samples * outgoing, samples * (incoming + outgoing))
    if type(layer).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return passes
    if type(layer).estimated_flops is Layer.estimated_flops:
        return replace(passes, is_known=False)
    # Most of them are products of the rows of the input.
    rows, columns = samples * math.prod(output[:-1]), math.prod(output[-1:])
    inner = max(1, round(layer.estimated_flops(shape) / (2 * outgoing)))
    return replace(
        passes,
        forward=(Product(rows, columns, inner),),
        input=(Product(rows, inner, columns),),
        weight=(Product(columns, inner, rows),),
    )


def _on_tensor_axis(
    layer: TensorParallelLayer, shape: Shape, samples: int, incoming: int, outgoing: int
) -> LayerWork:
    """Return the work of a layer that is no product, and is split or joins what is split."""
    match layer:
        case VocabularyParallelEmbedding(sequence_parallel=True):
            whole = samples * math.prod(shape) * layer.width
            sent = (Sent(1, whole),)
            return LayerWork("Embedding", whole, 2 * whole, sent_forward=sent, sent_backward=sent)
        case VocabularyParallelEmbedding():
            return LayerWork("Embedding", outgoing, 2 * outgoing, sent_forward=(Sent(2, outgoing),))
        case CopyToRegion():
            return LayerWork("", 0, 0, sent_backward=(Sent(2, incoming),))
        case ReduceFromRegion():
            return LayerWork("", 0, 0, sent_forward=(Sent(2, incoming),))
        case GatherOutput() | GatherSequence():
            return LayerWork("", 0, outgoing, sent_forward=(Sent(1, outgoing),))
        case ScatterSequence():
            return LayerWork("", 0, outgoing, sent_backward=(Sent(1, incoming),))
    # A split layer computes as the whole one does; the gradients of its parameters are summed.
    name = type(getattr(layer, "whole", layer)).__name__
    sums: tuple[Sent, ...] = ()
    if isinstance(layer, SequenceParallelNorm | SequenceParallelPositionalEmbedding):
        count = sum(math.prod(spec.shape) for spec in layer.whole_parameters.values())
        sums = (Sent(2 if isinstance(layer, SequenceParallelNorm) else 1, count),)
    return LayerWork(name, outgoing, incoming + outgoing, sent_backward=sums)


def _convolution(layer: Conv2D, output: Shape, samples: int, arrays: int) -> LayerWork:
    """The product makes the outputs at a position from a window of the input, a column."""
    positions = math.prod(output) // layer.outputs
    window = math.prod(layer.parameters["weight"].shape[1:])
    columns = samples * positions * window
    return LayerWork(
        "Conv2D",
        columns,
        arrays + columns,
        (Product(layer.outputs, positions, window, samples),),
        (Product(window, positions, layer.outputs, samples),),
        (Product(layer.outputs, window, positions, samples),),
    )


def _linear(layer: object, shape: Shape, samples: int, inputs: int, outputs: int) -> LayerWork:
    rows = samples * math.prod(shape[:-1])
    has_bias = bool(getattr(layer, "bias", False))
    return LayerWork(
        "Linear" if has_bias else "",
        rows * outputs if has_bias else 0,
        0,
        (Product(rows, outputs, inputs),),
        (Product(rows, inputs, outputs),),
        (Product(outputs, inputs, rows),),
    )


def _column(
    layer: ColumnParallelLinear, shape: Shape, output: Shape, samples: int
) -> list[LayerWork]:
    ranks = layer.backend.world_size
    whole = shape
    if layer.sequence_parallel:
        whole = (shape[0] * ranks, *shape[1:])
    size = samples * math.prod(whole)
    base = _linear(layer, whole, samples, layer.input_size, layer.local_output_size)
    forward: tuple[Sent, ...] = ()
    backward: tuple[Sent, ...] = (Sent(2, size, overlaps=True),)
    if layer.sequence_parallel:
        forward, backward = (Sent(1, size),), (Sent(1, size, overlaps=True),) * 2
    if layer.gather_output:
        forward = (*forward, Sent(1, samples * math.prod(output)))
    return [_sending(base, forward, backward), *_activation(layer, output, samples)]


def _row(layer: RowParallelLinear, shape: Shape, output: Shape, samples: int) -> list[LayerWork]:
    base = _linear(layer, shape, samples, layer.local_input_size, layer.output_size)
    size = samples * math.prod((*shape[:-1], layer.output_size))
    if layer.sequence_parallel:
        sent = _sending(base, (Sent(1, size),), (Sent(1, size),))
    else:
        sent = _sending(base, (Sent(2, size),), ())
    return [sent, *_activation(layer, output, samples)]


def _sending(work: LayerWork, forward: tuple[Sent, ...], backward: tuple[Sent, ...]) -> LayerWork:
    return replace(work, sent_forward=forward, sent_backward=backward)


def _activation(
    layer: ColumnParallelLinear | RowParallelLinear, output: Shape, samples: int
) -> list[LayerWork]:
    if layer.activation is None:
        return []
    return works_of(layer.activation, output, samples)[0]


def _attention(layer: Attention, shape: Shape, samples: int, arrays: float) -> LayerWork:
    length, width = layer.output_shape(shape)
    size = width // layer.heads
    # Causal scores are made in blocks of queries, with all keys up to the last query's.
    pairs = length * (length + min(length, _BLOCK)) / 2 if layer.causal else float(length**2)
    matrices = samples * layer.heads * pairs / length**2
    one = Product(length, length, size, matrices)
    # Forward has scores and output; backward makes the scores again, and has a product for the
    # gradient of scores, queries, keys and values.
    return LayerWork(
        type(layer).__name__,
        samples * layer.heads * pairs,
        arrays + 4 * samples * layer.heads * pairs,
        (one, one),
        (one,) * 5,
        (),
    )
