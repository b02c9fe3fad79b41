"""Tracing: layers as operations of a computation graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mpishard.arrays import Array
from mpishard.contracts import DynamicShapeInfo
from mpishard.nn.graph.node import ComputationNode
from mpishard.nn.graph.primitives import PRIMITIVES
from mpishard.nn.layers.activations import GELU, ReLU, Sigmoid, SiLU, Softmax, SwiGLU, Tanh
from mpishard.nn.layers.attention import Attention, CausalAttention
from mpishard.nn.layers.composites import Residual, Sequential, dynamic_shapes
from mpishard.nn.layers.convolution import Conv2D
from mpishard.nn.layers.dropout import Dropout
from mpishard.nn.layers.embedding import Embedding, PositionalEmbedding
from mpishard.nn.layers.layer import Layer
from mpishard.nn.layers.linear import FeatureLinear, Linear
from mpishard.nn.layers.normalization import LayerNorm, RMSNorm
from mpishard.nn.layers.pooling import Flatten, MaxPool2D
from mpishard.sharding import ParameterTable

__all__ = ["input_of", "trace_chain"]

_Constants = Mapping[str, ComputationNode]
"""Dotted name inside the layer -> constant."""


def input_of(
    input_nodes: list[ComputationNode], input_shape: tuple[int, ...], dynamic: DynamicShapeInfo
) -> ComputationNode:
    """The node that a model of samples of ``input_shape`` reads, appended if there is none.

    Raises
    ------
    TypeError
        For an argument that is no list of nodes.
    ValueError
        For more than one node, or one whose shape the model cannot take.
    """
    if not isinstance(input_nodes, list):
        raise TypeError(f"input_nodes must be a list, got {type(input_nodes).__name__}")
    sizes = [None if i in dynamic.dynamic_input_dims else n for i, n in enumerate(input_shape)]
    shape = (None, *sizes)
    if not input_nodes:
        input_nodes.append(ComputationNode("input", (), {"name": "x"}, shape))
    if len(input_nodes) > 1:
        raise ValueError(f"the model has one input, got {len(input_nodes)} input nodes")
    (node,) = input_nodes
    if not isinstance(node, ComputationNode):
        raise TypeError(f"input_nodes must hold ComputationNodes, got a {type(node).__name__}")
    if len(node.shape) != len(shape) or any(
        None not in (n, m) and n != m for n, m in zip(node.shape, shape, strict=True)
    ):
        raise ValueError(f"the model takes inputs of shape {shape}, got a node of {node.shape}")
    return node


def trace_chain(
    chain: Sequential,
    table: ParameterTable,
    vector: Array,
    x: ComputationNode,
    input_shape: tuple[int, ...],
) -> ComputationNode:
    """The output of ``chain`` for ``x``, with the parameters of ``vector``, shape (length,)."""
    of_entry = {
        entry.name: ComputationNode(
            "constant",
            (),
            {"name": entry.name, "value": vector[entry.start : entry.stop].reshape(entry.shape)},
            entry.shape,
        )
        for entry in table.entries
    }
    constants = {name: of_entry[table[name].name] for name, _ in chain.walk_parameters()}
    if not chain.takes_integers:
        x = _apply("cast", x, dtype=vector.dtype.name)
    return _trace(chain, constants, x, input_shape)


def _apply(op: str, *inputs: ComputationNode, **attributes: Any) -> ComputationNode:
    shape = PRIMITIVES[op].shape(*(node.shape for node in inputs), **attributes)
    return ComputationNode(op, inputs, attributes, shape)


def _trace(
    layer: Layer, p: _Constants, x: ComputationNode, sample: tuple[int, ...]
) -> ComputationNode:
    """The operations of ``layer``; of one that is not ours, a node that runs it.

    ``sample`` is the shape of a sample if the graph leaves sizes open. What a layer computes
    is its ``forward``: a subclass with another is another layer.
    """
    for kind in type(layer).__mro__:
        if kind in _COMPOSITES and type(layer).forward is kind.forward:
            return _COMPOSITES[kind](layer, p, x, sample)
        if kind in _LEAVES and type(layer).forward is kind.forward:
            return _LEAVES[kind](layer, p, x)
    names = tuple(name for name, _ in layer.walk_parameters())
    open_dims = [dim for dim, size in enumerate(x.shape[1:]) if size is None]
    dynamic = dynamic_shapes(layer, sample, open_dims).dynamic_output_dims
    sizes = [None if i in dynamic else n for i, n in enumerate(layer.output_shape(sample))]
    return ComputationNode(
        "layer",
        (x, *(p[name] for name in names)),
        {"layer": layer, "parameter_names": names},
        (None, *sizes),
    )


def _sequential(
    layer: Sequential, p: _Constants, x: ComputationNode, sample: tuple[int, ...]
) -> ComputationNode:
    for name, child in layer.children.items():
        prefix = f"{name}."
        inner = {n.removeprefix(prefix): node for n, node in p.items() if n.startswith(prefix)}
        x = _trace(child, inner, x, sample)
        sample = child.output_shape(sample)
    return x


def _linear(layer: Linear, p: _Constants, x: ComputationNode) -> ComputationNode:
    y = _apply("matmul_transposed", x, p["weight"])
    return _apply("add", y, p["bias"]) if layer.bias else y


def _feature_linear(layer: FeatureLinear, p: _Constants, x: ComputationNode) -> ComputationNode:
    columns = tuple(sorted(set(range(layer.inputs)) - set(layer.active)))
    return _linear(layer, p, _apply("zero_columns", x, columns=columns) if columns else x)


def _convolution(layer: Conv2D, p: _Constants, x: ComputationNode) -> ComputationNode:
    windows = layer.windows
    y = _apply("convolve", x, p["weight"], stride=windows.stride, padding=windows.padding)
    return _apply("add_by_channel", y, p["bias"]) if layer.bias else y


def _attention(layer: Attention, _: _Constants, x: ComputationNode) -> ComputationNode:
    q, k, v = (
        _apply("split_heads", x, heads=layer.heads, kv_heads=layer.kv_heads, part=part)
        for part in range(3)
    )
    weights = _apply("softmax", _apply("causal_scores" if layer.causal else "scores", q, k))
    return _apply("merge_heads", _apply("weighted_sum", weights, v))


_COMPOSITES: dict[type[Layer], Callable[..., ComputationNode]] = {
    Residual: lambda layer, p, x, sample: _apply("add", x, _trace(layer.inner, p, x, sample)),
    Sequential: _sequential,
}
_LEAVES: dict[type[Layer], Callable[..., ComputationNode]] = {
    Attention: _attention,
    CausalAttention: _attention,
    Conv2D: _convolution,
    Dropout: lambda layer, p, x: x,  # predictions drop nothing
    Embedding: lambda layer, p, x: _apply("take_rows", p["weight"], x),
    FeatureLinear: _feature_linear,
    Flatten: lambda layer, p, x: _apply("flatten", x),
    GELU: lambda layer, p, x: _apply("gelu", x),
    LayerNorm: lambda layer, p, x: _apply(
        "layer_norm", x, p["weight"], p["bias"], epsilon=layer.epsilon
    ),
    Linear: _linear,
    MaxPool2D: lambda layer, p, x: _apply(
        "max_pool", x, kernel=layer.windows.kernel, stride=layer.windows.stride
    ),
    PositionalEmbedding: lambda layer, p, x: _apply("add", x, _apply("first_rows", p["weight"], x)),
    RMSNorm: lambda layer, p, x: _apply("rms_norm", x, p["weight"], epsilon=layer.epsilon),
    ReLU: lambda layer, p, x: _apply("relu", x),
    SiLU: lambda layer, p, x: _apply("silu", x),
    SwiGLU: lambda layer, p, x: _apply("swiglu", x),
    Sigmoid: lambda layer, p, x: _apply("sigmoid", x),
    Softmax: lambda layer, p, x: _apply("softmax", x),
    Tanh: lambda layer, p, x: _apply("tanh", x),
}
