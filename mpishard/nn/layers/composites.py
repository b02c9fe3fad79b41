"""Layers that contain layers, `Sequential` and `Residual`, and reports about chains of layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Self

from mpishard.base import Array, DType, require_type
from mpishard.contracts import DynamicShapeInfo, LayerCategory, LayerInfo, Saved
from mpishard.nn.layers.layer import (
    Context,
    Gradients,
    Layer,
    Parameters,
    SavedActivations,
    output_and_saved,
)
from mpishard.nn.passes import added
from mpishard.sharding import ParameterTable

_NONE: Mapping[str, Any] = MappingProxyType({})


class Sequential(Layer):
    """Chain of layers, each of which takes the output of the layer before it.

    Parameters and gradients are nested by child, ``p["name"]["weight"]``. They need no entry for a
    child without parameters. A backward pass empties ``saved``, and `backward_weight` empties
    ``pending``, so that each child's part is freed as soon as it has been used.

    Parameters
    ----------
    *layers : Layer or mapping of str to Layer
        Either one mapping, name -> layer, or layers, whose names are then "0", "1", ...

    Raises
    ------
    TypeError
        If a layer is none, or a name is not a string.
    ValueError
        For layers beside a mapping, or none; if a name is empty or contains a dot.

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
        named: dict[Any, Any] = {str(position): layer for position, layer in enumerate(layers)}
        if any(isinstance(layer, Mapping) for layer in layers):
            if len(layers) > 1:
                raise ValueError("Sequential takes either layers or one mapping, not both")
            # A copy, because the caller may change the mapping later.
            named = dict(named["0"])
        if not named:
            raise ValueError("Sequential needs at least one layer")
        for name, layer in named.items():
            require_type("a layer's name", name, str)
            require_type(f"layer {name!r}", layer, Layer)
            # Dots separate the names of nested layers in a parameter's name.
            if not name or "." in name:
                raise ValueError(f"a layer's name must not be empty or hold a dot, got {name!r}")
        self.children = named

    def copy(self) -> Self:
        """Return a chain of copies; a layer that is in the chain twice is copied once."""
        # By identity: a shared layer shares its parameters, and its copies must do so, too.
        own = {id(child): child.copy() for child in self.children.values()}
        chain = super().copy()
        chain.children = {name: own[id(child)] for name, child in self.children.items()}
        return chain

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the last layer's output shape; each layer checks the shape of the one before."""
        shape = input_shape
        for child in self.children.values():
            shape = child.output_shape(shape)
        return shape

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """Return the sum over the layers."""
        return sum(child.estimated_flops(shape) for child, shape in self._walk_shapes(input_shape))

    def estimated_activation_size(self, input_shape: tuple[int, ...]) -> int:
        """Return the sum over the layers."""
        return sum(
            child.estimated_activation_size(shape)
            for child, shape in self._walk_shapes(input_shape)
        )

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return the layers' together; an array that two of them save counts once."""
        return SavedActivations.of_chain(
            (
                child.saved_activations(shape, dtype),
                math.prod(child.output_shape(shape)) * dtype.itemsize,
            )
            for child, shape in self._walk_shapes(input_shape)
        )

    def _walk_shapes(self, shape: tuple[int, ...]) -> Iterator[tuple[Layer, tuple[int, ...]]]:
        """Yield the layers in order, each with the shape of its input."""
        for child in self.children.values():
            yield child, shape
            shape = child.output_shape(shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Run the layers in order, and save the list of their saved values."""
        saved = []
        for name, child in self.children.items():
            result = child.forward(p.get(name, _NONE), x, context.enter(name, child))
            x, child_saved = output_and_saved(result, child)
            saved.append(child_saved)
        return x, saved if context.training else None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array | None, Saved]:
        """Run `backward_input` of the layers in reverse; pending lists theirs in that order."""
        pending: list[object] = []
        dx: Array | None = dy
        del dy  # held no longer than a layer needs it
        for name, child in reversed(self.children.items()):
            if dx is None:  # the layer after this one takes tokens: none has a gradient from here
                pending.append(None)
                continue
            # pop and not an index, so that a layer's activations are freed as soon as it used them.
            dx, child_pending = child.backward_input(p.get(name, _NONE), saved.pop(), dx)
            pending.append(child_pending)
        return dx, pending

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        """Run `backward_weight` of the layers, first layer first."""
        for name, child in self.children.items():
            # backward_input appended from the last layer to the first, so that pop gives the first
            # one's.
            child.backward_weight(pending.pop(), g.get(name, _NONE))

    def backward(
        self,
        p: Parameters,
        saved: Saved,
        dy: Array,
        g: Gradients,
        *,
        needs_input_gradient: bool = True,
    ) -> Array | None:
        """Run both halves layer by layer, last layer first, so that little is pending."""
        # Only the first layer may leave out its input gradient: it is dy of the layer before.
        first = next(iter(self.children))
        dx: Array | None = dy
        del dy  # held no longer than a layer needs it
        for name, child in reversed(self.children.items()):
            if dx is None:  # the layer after this one takes tokens: none has a gradient from here
                break
            dx = child.backward(
                p.get(name, _NONE),
                saved.pop(),
                dx,
                g.get(name, _NONE),
                needs_input_gradient=needs_input_gradient or name != first,
            )
        return dx


class Residual(Layer):
    """Sum y = x + inner(x) of the input and the output of a `Sequential`.

    The children of the inner chain are this layer's children. He et al., "Deep residual learning",
    2015 (arXiv:1512.03385), eq. 1.

    Parameters
    ----------
    *inner : Layer or mapping of str to Layer
        A `Sequential`, or the arguments of one. The output must have the shape of the input.

    Raises
    ------
    ValueError
        As for `Sequential`.
    """

    category = LayerCategory.COMPOSITE
    computes_bfloat16 = True

    def __init__(self, *inner: Layer | Mapping[str, Layer]) -> None:
        first = inner[0] if len(inner) == 1 else None
        self.inner = first if isinstance(first, Sequential) else Sequential(*inner)
        # Without a level of its own, so that names of parameters do not repeat "inner".
        self.children = self.inner.children

    def copy(self) -> Self:
        """Return a copy with copies of the inner layers."""
        layer = super().copy()
        layer.inner = self.inner.copy()
        layer.children = layer.inner.children
        return layer

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape, which the inner layers must keep."""
        shape = self.inner.output_shape(input_shape)
        if shape != input_shape:
            raise ValueError(
                f"the layers of a Residual must keep the shape, got {input_shape} -> {shape}"
            )
        return input_shape

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """Return the operations of the inner layers, and one addition for each element."""
        return self.inner.estimated_flops(input_shape) + math.prod(input_shape)

    def estimated_activation_size(self, input_shape: tuple[int, ...]) -> int:
        """Return the sizes of the inner layers' outputs, and of the sum."""
        return self.inner.estimated_activation_size(input_shape) + math.prod(input_shape)

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return the inner layers'; the sum is a new array, which is not saved here."""
        inner = self.inner.saved_activations(input_shape, dtype)
        outputs = (math.prod(input_shape) * dtype.itemsize,) * inner.keeps_output
        arrays = (*inner.arrays, *outputs)
        return SavedActivations(sum(arrays), inner.keeps_input, arrays=arrays)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Add x to the inner output."""
        y, saved = self.inner.forward(p, x, context)
        # The sum is a new array, because the inner layers may have saved y.
        return added(x, y), saved

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return the inner gradient plus ``dy``."""
        # The inner layers may overwrite their dy, and the sum below needs it: they get a copy.
        dx, pending = self.inner.backward_input(p, saved, dy.copy())
        assert dx is not None, "a sum with x has an input gradient"
        return added(dx, dy, out=dx), pending

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        """Run `backward_weight` of the inner layers."""
        self.inner.backward_weight(pending, g)

    def backward(
        self,
        p: Parameters,
        saved: Saved,
        dy: Array,
        g: Gradients,
        *,
        needs_input_gradient: bool = True,
    ) -> Array:
        """Run both halves, layer by layer, and always return the input's gradient."""
        # A copy, as in `backward_input`. A model rarely begins with a Residual: dx is always made.
        dx = self.inner.backward(p, saved, dy.copy(), g)
        assert dx is not None, "a sum with x has an input gradient"
        return added(dx, dy, out=dx)


def layer_infos(
    chain: Sequential, table: ParameterTable, input_shape: tuple[int, ...], item_size: int
) -> tuple[LayerInfo, ...]:
    """Return facts about each layer of ``chain``, whose activations take ``item_size`` bytes each.

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
        # Tied parameters of other layers are among the entries, and are counted in those layers.
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
    """Return the dims of a sample that may have other sizes, and the output dims that then change.

    Each dim of ``dims`` (default: all dims) of size n is tried with n - 1, n + 1 and 2 n.
    """
    output_shape = layer.output_shape(input_shape)
    inputs: set[int] = set()
    outputs: set[int] = set()
    for dim in range(len(input_shape)) if dims is None else dims:
        size = input_shape[dim]
        # The smaller size suits layers with a maximum, such as a context length. The double suits
        # layers that need a multiple, such as SwiGLU.
        for other in (size - 1, size + 1, 2 * size):
            shape = (*input_shape[:dim], other, *input_shape[dim + 1 :])
            try:
                changed = layer.output_shape(shape) if other > 0 else None
            except ValueError:
                continue
            # A size that changes the number of dims is not a size of the same model.
            if changed is not None and len(changed) == len(output_shape):
                inputs.add(dim)
                outputs |= {d for d, n in enumerate(changed) if n != output_shape[d]}
    return DynamicShapeInfo(tuple(sorted(inputs)), tuple(sorted(outputs)))
