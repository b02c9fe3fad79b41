"""A model's computation as a graph of operations that any program can walk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.nn.graph.primitives import PRIMITIVES, Shape
from mpishard.nn.layers.layer import Context
from mpishard.sharding.table import nested

__all__ = ["ComputationNode"]


@dataclass(frozen=True, eq=False, slots=True)
class ComputationNode:
    """One operation of a computation graph, and through ``inputs`` all that it depends on.

    Parameters
    ----------
    op : str
        "input" and "constant" begin a graph; "layer" runs a layer of the user's own; the others
        are the operations of `mpishard.nn.graph.primitives`.
    inputs : tuple of ComputationNode
        Operands, in order.
    attributes : mapping
        What else it depends on. Of an input ``name``; of a constant ``name`` and ``value``.
    shape : tuple of int or None
        Shape of the result, the batch dim first. None is a size that batches decide.

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
        """Name of an input or of a constant; "" of what has none."""
        return str(self.attributes.get("name", ""))

    def walk(self) -> Iterator[ComputationNode]:
        """Yield this node and all that it depends on, each once, inputs before their users."""
        seen: set[ComputationNode] = set()
        # A stack, for deep models have chains that are longer than Python's own.
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

    def evaluate(self, feeds: Mapping[str | ComputationNode, Any]) -> Array:
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
            For feeds that are no mapping.
        ValueError
            If an input is missing or has another shape, naming it and the inputs there are;
            for an operation that is not known.
        """
        if not isinstance(feeds, Mapping):
            raise TypeError(f"feeds must map inputs to arrays, got {type(feeds).__name__}")
        order = list(self.walk())
        users = dict.fromkeys(order, 0)
        for node in order:
            for given in node.inputs:
                users[given] += 1
        values: dict[ComputationNode, Array] = {}
        for node in order:
            if node.op == "input":
                values[node] = _fed(node, feeds, order)
            else:
                values[node] = _computed(node, [values[given] for given in node.inputs])
            for given in node.inputs:
                users[given] -= 1
                if not users[given]:
                    del values[given]  # large, and nobody needs it any more
        return values[self]


def _fed(node: ComputationNode, feeds: Mapping[Any, Any], order: list[ComputationNode]) -> Array:
    value = feeds.get(node, feeds.get(node.name))
    if value is None:
        names = [given.name for given in order if given.op == "input"]
        raise ValueError(f"nothing was fed to the input {node.name!r}; the graph needs {names}")
    array = np.asarray(value)
    if len(array.shape) != len(node.shape) or any(
        size not in (None, given) for size, given in zip(node.shape, array.shape, strict=True)
    ):
        raise ValueError(
            f"the input {node.name!r} has shape {node.shape} (None: any size), got {array.shape}"
        )
    return array


def _computed(node: ComputationNode, values: list[Array]) -> Array:
    if node.op == "constant":
        return np.asarray(node.attributes["value"])
    if node.op == "layer":
        return _run_layer(values, **node.attributes)
    if node.op not in PRIMITIVES:
        raise ValueError(f"unknown operation {node.op!r}; there are {', '.join(PRIMITIVES)}")
    return PRIMITIVES[node.op].compute(*values, **node.attributes)


def _run_layer(values: list[Array], *, layer: Any, parameter_names: tuple[str, ...]) -> Array:
    """The output of a layer, for its input and its parameters by dotted name inside it."""
    x, *arrays = values
    parameters = nested(dict(zip(parameter_names, arrays, strict=True)))
    y, _ = layer.forward(parameters, x, Context(training=False))
    return np.asarray(y)
