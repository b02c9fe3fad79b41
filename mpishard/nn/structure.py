"""What is known of a chain of layers before it runs: offsets, shapes, costs."""

from __future__ import annotations

from collections.abc import Iterable

from mpishard.contracts import DynamicShapeInfo, LayerInfo
from mpishard.nn.composites import Sequential
from mpishard.nn.layer import Layer
from mpishard.sharding import ParameterTable

__all__ = ["dynamic_shapes", "layer_infos"]


def layer_infos(
    chain: Sequential, table: ParameterTable, input_shape: tuple[int, ...], item_size: int
) -> tuple[LayerInfo, ...]:
    """What is known of each layer of ``chain``, whose activations have ``item_size`` bytes each.

    Raises
    ------
    ValueError
        Where the layers' shapes do not fit each other.
    """
    infos = []
    shape = tuple(input_shape)
    offset = 0
    for index, (name, layer) in enumerate(chain.children.items()):
        count = sum(e.size for e in table.entries if e.name.startswith(f"{name}."))
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
                is_trainable=any(e.trainable for e in table.layer_entries(name).values()),
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
    """The dims of a sample for which a layer takes another size, and what follows behind.

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
