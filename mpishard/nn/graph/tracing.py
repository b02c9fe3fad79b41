"""A model's computation as a graph of operations that any program can walk, traced from layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpishard.base import Array
from mpishard.contracts import DynamicShapeInfo
from mpishard.nn.graph.primitives import PRIMITIVES, Shape
from mpishard.nn.layers.activations import GELU, ReLU, Sigmoid, SiLU, Softmax, SwiGLU, Tanh
from mpishard.nn.layers.attention import Attention, CausalAttention
from mpishard.nn.layers.composites import Residual, Sequential, dynamic_shapes
from mpishard.nn.layers.convolution import Conv2D, Flatten, MaxPool2D
from mpishard.nn.layers.dropout import Dropout
from mpishard.nn.layers.embedding import Embedding, PositionalEmbedding
from mpishard.nn.layers.layer import Context, Layer
from mpishard.nn.layers.linear import FeatureLinear, Linear
from mpishard.nn.layers.normalization import LayerNorm, RMSNorm
from mpishard.sharding import ParameterTable, nested


# Nodes are compared by identity, because they are keys of dicts and their attributes have arrays.
@dataclass(frozen=True, eq=False, slots=True)
class ComputationNode:
    """One operation of a computation graph, and through ``inputs`` all that it depends on.

    Parameters
    ----------
    op : str
        Name of the operation. "input" and "constant" have no inputs, and "layer" runs a layer of
        the user's own. The others are operations of `mpishard.nn.graph.primitives`.
    inputs : tuple of ComputationNode
        Operands, in order.
    attributes : mapping
        Other arguments of the operation. An input has ``name``; a constant ``name`` and ``value``.
    shape : tuple of int or None
        Shape of the result, the batch dim first. None is a size that depends on the batch.

    Examples
    --------
    >>> import mpishard as ms
    >>> inputs = []
    >>> node = ms.nn.MLP([3, 4, 2]).export_computation_graph(inputs)
    >>> [(n.op, n.shape) for n in node.walk() if n.op != "constant"]
    [('input', (None, 3)), ('cast', (None, 3)), ('matmul_transposed', (None, 4)),
     ('add', (None, 4)), ('relu', (None, 4)), ('matmul_transposed', (None, 2)),
     ('add', (None, 2))]
    >>> node.evaluate({"x": [[0.0, 0.0, 0.0]]}).tolist()
    [[0.0, 0.0]]
    """

    op: str
    inputs: tuple[ComputationNode, ...] = field(default=(), repr=False)
    attributes: Mapping[str, Any] = field(default_factory=dict, repr=False)
    shape: Shape = ()

    @property
    def name(self) -> str:
        """Name of an input or of a constant; "" for other nodes."""
        return str(self.attributes.get("name", ""))

    def walk(self) -> Iterator[ComputationNode]:
        """Yield this node and all that it depends on, each once, inputs before their users."""
        seen: set[ComputationNode] = set()
        # A list is the stack, because chains of deep models exceed Python's recursion limit.
        stack = [(self, iter(self.inputs))]
        while stack:
            node, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                stack.pop()
                if node not in seen:
                    seen.add(node)
                    yield node
            elif following not in seen:
                stack.append((following, iter(following.inputs)))

    def evaluate(self, feeds: Mapping[str | ComputationNode, object]) -> Array:
        """Compute the node.

        Parameters
        ----------
        feeds : mapping
            Input node, or its name, -> array_like of the node's shape.

        Returns
        -------
        numpy.ndarray
            The result, of the node's shape.

        Raises
        ------
        TypeError
            If ``feeds`` is not a mapping.
        ValueError
            If an input is missing or has another shape, or an operation is unknown.
        """
        if not isinstance(feeds, Mapping):
            raise TypeError(f"feeds must map inputs to arrays, got {type(feeds).__name__}")
        order = list(self.walk())
        # Users are counted, so that a value is freed after the last of them.
        users = dict.fromkeys(order, 0)
        for node in order:
            for given in node.inputs:
                users[given] += 1
        # By node, because a value that several nodes use is computed once.
        values: dict[ComputationNode, Array] = {}
        for node in order:
            if node.op == "input":
                # The node comes before its name, as two inputs of joined graphs may have one name.
                value = feeds.get(node, feeds.get(node.name))
                if value is None:
                    names = [given.name for given in order if given.op == "input"]
                    raise ValueError(
                        f"nothing was fed to the input {node.name!r}; the graph needs {names}"
                    )
                array = np.asarray(value)
                if len(array.shape) != len(node.shape) or any(
                    size not in (None, given)
                    for size, given in zip(node.shape, array.shape, strict=True)
                ):
                    raise ValueError(
                        f"the input {node.name!r} has shape {node.shape} (None: any size), got "
                        f"{array.shape}"
                    )
                values[node] = array
            else:
                values[node] = _computed(node, [values[given] for given in node.inputs])
            for given in node.inputs:
                users[given] -= 1
                if not users[given]:
                    del values[given]
        return values[self]


def _computed(node: ComputationNode, values: list[Array]) -> Array:
    if node.op == "constant":
        return np.asarray(node.attributes["value"])
    if node.op == "layer":
        x, *arrays = values
        parameters = nested(dict(zip(node.attributes["parameter_names"], arrays, strict=True)))
        # As in prediction: without dropout, and with nothing saved.
        y, _ = node.attributes["layer"].forward(parameters, x, Context(training=False))
        return np.asarray(y)
    if node.op not in PRIMITIVES:
        raise ValueError(f"unknown operation {node.op!r}; there are {', '.join(PRIMITIVES)}")
    return PRIMITIVES[node.op].compute(*values, **node.attributes)


_Constants = Mapping[str, ComputationNode]
"""Mapping of dotted names inside a layer to its parameters, as nodes."""


def input_of(
    input_nodes: list[ComputationNode], input_shape: tuple[int, ...], dynamic: DynamicShapeInfo
) -> ComputationNode:
    """Return the input node of a model of samples of ``input_shape``, and append it if missing.

    Raises
    ------
    TypeError
        If ``input_nodes`` is not a list of nodes.
    ValueError
        If it has more than one node, or one whose shape the model cannot take.
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
    """Return the output node of ``chain`` for ``x``, with the parameters ``vector`` (length,)."""
    of_entry = {
        entry.name: ComputationNode(
            "constant",
            (),
            {"name": entry.name, "value": entry.view(vector)},
            entry.shape,
        )
        for entry in table.entries
    }
    # Tied parameters have one entry, and so one node under both names.
    constants = {name: of_entry[table[name].name] for name, _ in chain.walk_parameters()}
    # Layers compute in the dtype of the parameters, so that inputs of other dtypes are converted.
    if not chain.takes_integers:
        x = _apply("cast", x, dtype=vector.dtype.name)
    return _trace(chain, constants, x, input_shape)


def _apply(op: str, *inputs: ComputationNode, **attributes: object) -> ComputationNode:
    shape = PRIMITIVES[op].shape(*(node.shape for node in inputs), **attributes)
    return ComputationNode(op, inputs, attributes, shape)


def _trace(
    layer: Layer, p: _Constants, x: ComputationNode, sample: tuple[int, ...]
) -> ComputationNode:
    """Return the output node of ``layer``: operations, or one "layer" node for a user's own layer.

    ``sample`` is the shape of a sample, for layers whose output shape the graph leaves open.
    """
    # A user's subclass that only changes settings or initial values keeps its base's operations.
    for kind in type(layer).__mro__:
        # A subclass with another ``forward`` computes something else: it becomes a "layer" node.
        if kind in _COMPOSITES and type(layer).forward is kind.forward:
            return _COMPOSITES[kind](layer, p, x, sample)
        if kind in _LEAVES and type(layer).forward is kind.forward:
            return _LEAVES[kind](layer, p, x)
    # A layer of the user's own has no formula here, so that its node calls the layer itself.
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
    # The inactive features, whose weights take no part in the layer's result.
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
# Layers whose lower-case name is that of their operation.
_SAME_NAME = (Flatten, GELU, ReLU, SiLU, SwiGLU, Sigmoid, Softmax, Tanh)
_LEAVES: dict[type[Layer], Callable[..., ComputationNode]] = {
    **{
        kind: lambda layer, p, x, kind=kind: _apply(kind.__name__.lower(), x) for kind in _SAME_NAME
    },
    Attention: _attention,
    CausalAttention: _attention,
    Conv2D: _convolution,
    Dropout: lambda layer, p, x: x,  # The graph is that of a prediction, which drops nothing.
    Embedding: lambda layer, p, x: _apply("take_rows", p["weight"], x),
    FeatureLinear: _feature_linear,
    LayerNorm: lambda layer, p, x: _apply(
        "layer_norm", x, p["weight"], p["bias"], epsilon=layer.epsilon
    ),
    Linear: _linear,
    MaxPool2D: lambda layer, p, x: _apply(
        "max_pool", x, kernel=layer.windows.kernel, stride=layer.windows.stride
    ),
    PositionalEmbedding: lambda layer, p, x: _apply("add", x, _apply("first_rows", p["weight"], x)),
    RMSNorm: lambda layer, p, x: _apply("rms_norm", x, p["weight"], epsilon=layer.epsilon),
}
