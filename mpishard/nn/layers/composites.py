"""Layers that hold layers, `Sequential` and `Residual`, and facts about chains of layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Self

from mpishard.arrays import Array
from mpishard.contracts import DynamicShapeInfo, LayerCategory, LayerInfo
from mpishard.nn.layers.layer import Context, Gradients, Layer, Parameters
from mpishard.nn.passes import added
from mpishard.sharding import ParameterTable

_NONE: Mapping[str, Any] = MappingProxyType({})


class Sequential(Layer):
    """Layers one after the other.

    Parameters and gradients are nested by child, ``p["name"]["weight"]``; a child without
    parameters may be missing in them. A backward pass uses up ``saved``, and `backward_weight`
    uses up ``pending``: each child's part is let go as soon as it has served.

    Parameters
    ----------
    *layers : Layer or mapping of str to Layer
        Either one mapping, name -> layer, or layers, which are then called "0", "1", ...

    Raises
    ------
    ValueError
        Without layers, or for a name that is empty or holds a dot.

    Examples
    --------
    >>> from mpishard.nn import Linear, ReLU, Sequential
    >>> chain = Sequential({"hidden": Linear(3, 4), "relu": ReLU(), "out": Linear(4, 2)})
    >>> chain.output_shape((3,))
    (2,)
    >>> [name for name, _ in chain.walk_parameters()]
    ['hidden.weight', 'hidden.bias', 'out.weight', 'out.bias']
    """

    category = LayerCategory.COMPOSITE
    computes_bfloat16 = True
    children: dict[str, Layer]

    def __init__(self, *layers: Layer | Mapping[str, Layer]) -> None:
        named: dict[str, Layer] = {}
        for position, layer in enumerate(layers):
            if isinstance(layer, Layer):
                named[str(position)] = layer
            elif len(layers) == 1:
                named.update(layer)
            else:
                raise ValueError("Sequential takes either layers or one mapping, not both")
        if not named:
            raise ValueError("Sequential needs at least one layer")
        for name in named:
            if not name or "." in name:
                raise ValueError(f"a layer's name must not be empty or hold a dot, got {name!r}")
        self.children = named

    def copy(self) -> Self:
        """A chain of copies; a layer that stands in it twice is one layer in the copy too."""
        # By identity: a layer that stands twice shares one description, as in the original.
        own = {id(child): child.copy() for child in self.children.values()}
        chain = super().copy()
        chain.children = {name: own[id(child)] for name, child in self.children.items()}
        return chain

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The last layer's output shape, each layer being asked with the one before's."""
        shape = input_shape
        for child in self.children.values():
            shape = child.output_shape(shape)
        return shape

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """The sum over the layers."""
        return sum(child.estimated_flops(shape) for child, shape in self._walk_shapes(input_shape))

    def estimated_activation_size(self, input_shape: tuple[int, ...]) -> int:
        """The sum over the layers."""
        return sum(
            child.estimated_activation_size(shape)
            for child, shape in self._walk_shapes(input_shape)
        )

    def _walk_shapes(self, shape: tuple[int, ...]) -> Iterator[tuple[Layer, tuple[int, ...]]]:
        """The layers in order, each with the shape that it takes."""
        for child in self.children.values():
            yield child, shape
            shape = child.output_shape(shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Run the layers in order; saves the list of their saved values."""
        saved = []
        for name, child in self.children.items():
            # A layer without parameters has no entry in ``p``.
            x, child_saved = child.forward(p.get(name, _NONE), x, context.enter(name, child))
            saved.append(child_saved)
        return x, saved if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """Run the layers' halves in reverse; pending is the list of theirs, last layer first."""
        pending = []
        for name, child in reversed(self.children.items()):
            # pop, not an index: the activations of a layer are freed as soon as it has used them.
            dy, child_pending = child.backward_input(p.get(name, _NONE), saved.pop(), dy)
            pending.append(child_pending)
        return dy, pending

    def backward_weight(self, pending: Any, g: Gradients) -> None:
        """Run the layers' halves, first layer first."""
        for name, child in self.children.items():
            child.backward_weight(pending.pop(), g.get(name, _NONE))

    def backward(
        self, p: Parameters, saved: Any, dy: Array, g: Gradients, *,
        needs_input_gradient: bool = True,
    ) -> Array:  # fmt: skip
        """Both halves of one layer after the other, in reverse, so that little is pending."""
        # Only the first layer may leave out its input gradient: the others' is the next one's dy.
        first = next(iter(self.children))
        for name, child in reversed(self.children.items()):
            dy = child.backward(
                p.get(name, _NONE), saved.pop(), dy, g.get(name, _NONE),
                needs_input_gradient=needs_input_gradient or name != first,
            )  # fmt: skip
        return dy


class Residual(Layer):
    """y = x + inner(x), inner being a `Sequential` whose children are this layer's children.

    He et al., "Deep residual learning", 2015 (arXiv:1512.03385), eq. 1.

    Parameters
    ----------
    *inner : Layer or mapping of str to Layer
        A `Sequential`, or what makes one. The output's shape must be the input's.

    Raises
    ------
    ValueError
        As `Sequential`.
    """

    category = LayerCategory.COMPOSITE
    computes_bfloat16 = True

    def __init__(self, *inner: Layer | Mapping[str, Layer]) -> None:
        first = inner[0] if len(inner) == 1 else None
        self.inner = first if isinstance(first, Sequential) else Sequential(*inner)
        self.children = self.inner.children

    def copy(self) -> Self:
        """The same way around a copy of the inner layers."""
        layer = super().copy()
        layer.inner = self.inner.copy()
        layer.children = layer.inner.children
        return layer

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The input's shape, which the inner layers must keep."""
        shape = self.inner.output_shape(input_shape)
        if shape != input_shape:
            raise ValueError(
                f"the layers of a Residual must keep the shape, got {input_shape} -> {shape}"
            )
        return input_shape

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """FLOPs of the inner layers, and one addition for each element."""
        return self.inner.estimated_flops(input_shape) + math.prod(input_shape)

    def estimated_activation_size(self, input_shape: tuple[int, ...]) -> int:
        """The inner layers' outputs, and the sum."""
        return self.inner.estimated_activation_size(input_shape) + math.prod(input_shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Add x to the inner output, in a new array: the inner layers may have saved theirs."""
        y, saved = self.inner.forward(p, x, context)
        return added(x, y), saved

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The inner gradient plus ``dy``; the inner layers get a copy of that to overwrite."""
        # The inner layers may overwrite their dy, and this one is needed for the sum below.
        dx, pending = self.inner.backward_input(p, saved, dy.copy())
        return added(dx, dy, out=dx), pending

    def backward_weight(self, pending: Any, g: Gradients) -> None:
        """The inner layers' half."""
        self.inner.backward_weight(pending, g)

    def backward(
        self, p: Parameters, saved: Any, dy: Array, g: Gradients, *,
        needs_input_gradient: bool = True,
    ) -> Array:  # fmt: skip
        """Both halves, layer by layer; always with the input's gradient."""
        dx = self.inner.backward(p, saved, dy.copy(), g)
        return added(dx, dy, out=dx)


def layer_infos(
    chain: Sequential, table: ParameterTable, input_shape: tuple[int, ...], item_size: int
) -> tuple[LayerInfo, ...]:
    """Facts about each layer of ``chain``, whose activations have ``item_size`` bytes each.

    Raises
    ------
    ValueError
        If the layers' shapes do not fit each other.
    """
    infos = []
    shape = tuple(input_shape)
    offset = 0
    for index, (name, layer) in enumerate(chain.children.items()):
        entries = table.layer_entries(name).values()
        count = sum(e.size for e in entries if e.name.startswith(f"{name}."))
        output = layer.output_shape(shape)
        infos.append(
            LayerInfo(
                index=index,
                name=name,
                category=layer.category,
                layer=layer,
                parameter_offset=offset,
                parameter_count=count,
                input_shape=shape,
                output_shape=output,
                is_trainable=any(e.trainable for e in entries),
                estimated_flops=layer.estimated_flops(shape),
                estimated_activation_memory=layer.estimated_activation_size(shape) * item_size,
            )
        )
        offset += count
        shape = output
    return tuple(infos)


def dynamic_shapes(
    layer: Layer, input_shape: tuple[int, ...], dims: Iterable[int] | None = None
) -> DynamicShapeInfo:
    """The dims of a sample for which a layer takes another size, and those of the output.

    A dim of n elements is tried with n - 1, n + 1 and 2 n: all dims, or ``dims``.
    """
    output_shape = layer.output_shape(input_shape)
    inputs: set[int] = set()
    outputs: set[int] = set()
    for dim in range(len(input_shape)) if dims is None else dims:
        size = input_shape[dim]
        for other in (size - 1, size + 1, 2 * size):
            shape = (*input_shape[:dim], other, *input_shape[dim + 1 :])
            try:
                changed = layer.output_shape(shape) if other > 0 else None
            except ValueError:
                continue
            if changed is not None and len(changed) == len(output_shape):
                inputs.add(dim)
                outputs |= {d for d, n in enumerate(changed) if n != output_shape[d]}
    return DynamicShapeInfo(tuple(sorted(inputs)), tuple(sorted(outputs)))
