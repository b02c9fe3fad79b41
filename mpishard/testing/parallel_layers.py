"""Layers that are split over ranks against the whole layers that they stand for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpishard.nn.layers.initializers import parameter_generator
from mpishard.nn.layers.layer import Context, Layer
from mpishard.nn.layers.targets import GradientTargets
from mpishard.sharding import ParameterTable
from mpishard.tensor import TensorParallelLayer
from mpishard.testing.gradients import check_layer_promises, perturbed_parameters

__all__ = ["check_parallel_layer"]

_Vector = np.ndarray[Any, Any]


def _all_of_it(array: _Vector) -> _Vector:
    return array


def check_parallel_layer(
    layer: TensorParallelLayer,
    whole: Layer,
    x: Any,
    *,
    take_input: Callable[[_Vector], _Vector] = _all_of_it,
    take_output: Callable[[_Vector], _Vector] = _all_of_it,
    seed: int = 0,
    tolerance: float = 1e-12,
) -> None:
    """Compare a split layer with the whole one. Collective: all ranks of the layer's group call it.

    In float64, with perturbed first parameters and a random gradient of the output, all the same
    on every rank: the output, the input's gradient and every parameter's are this rank's part of
    the whole layer's; so are the first values; what the ranks hold covers each parameter that is
    split once. And the layer keeps what `Layer` promises its callers, as `check_layer_gradients`
    says, also if gradients are written into memory that nobody has cleared.

    Parameters
    ----------
    layer : TensorParallelLayer
        This rank's.
    whole : Layer
        Computes the same on one rank; its parameters have the same names.
    x : array_like
        The whole layer's input, with its batch dim.
    take_input, take_output : callable
        This rank's part of the whole layer's input and output; all of it, unless given.
    seed : int
        Seed of parameters and the output's gradient.
    tolerance : float
        Largest difference, relative to the largest element of an array (or to 1).

    Raises
    ------
    AssertionError
        Saying what differs, or which promise is broken.
    """
    generator = parameter_generator(seed, "check_parallel_layer")
    x = np.array(x)
    wholes = perturbed_parameters(whole, generator)
    _check_parameters(layer, whole, wholes)
    owns = {name: _held(layer, name, value) for name, value in wholes.items()}

    context = Context()
    y, saved = whole.forward(wholes, x, context)
    r = generator.standard_normal(y.shape)
    gradients = {name: np.zeros_like(value) for name, value in wholes.items()}
    dx = whole.backward(wholes, saved, r.copy(), gradients)

    own_x, own_r = take_input(x).copy(), take_output(r).copy()
    own_y, _ = layer.forward(owns, own_x, context)
    _compare("output", own_y, take_output(y), tolerance)
    own_dx, own_gradients = check_layer_promises(layer, owns, own_x, own_r)
    if dx is not None:
        _compare("input's gradient", own_dx, take_input(dx), tolerance)
    written = _written_gradients(layer, owns, own_x, own_r)
    for name, gradient in gradients.items():
        part = _held(layer, name, gradient)
        _compare(f"gradient of {name}", own_gradients[name], part, tolerance)
        _compare(f"gradient of {name}, where written,", written[name], part, tolerance)


def _held(layer: TensorParallelLayer, name: str, value: _Vector) -> _Vector:
    """Part of this rank in the whole parameter ``value``."""
    parts = [value[tuple(slice(*r) for r in box)].reshape(-1) for box in layer.boxes(name)]
    return np.concatenate([value[:0].reshape(-1), *parts]).reshape(layer.parameters[name].shape)


def _check_parameters(
    layer: TensorParallelLayer, whole: Layer, wholes: Mapping[str, _Vector]
) -> None:
    """Names and shapes, first values, and that each element is held once or by all."""
    if list(layer.parameters) != list(wholes) or list(layer.whole_parameters) != list(wholes):
        raise AssertionError(
            f"the layer has {list(layer.parameters)}, the whole layer {list(wholes)}"
        )
    for name, value in wholes.items():
        spec, of_whole = layer.parameters[name], whole.parameters[name]
        first = spec.initializer(parameter_generator(1, name), spec.shape)
        expected = of_whole.initializer(parameter_generator(1, name), of_whole.shape)
        if not np.array_equal(first, _held(layer, name, expected)):
            raise AssertionError(f"first values of {name} are not the whole layer's")
        holders = np.zeros(value.shape, np.int64)
        for box in layer.boxes(name):
            holders[tuple(slice(*r) for r in box)] += 1
        layer.backend.all_reduce(holders)
        count = 1 if layer.is_split(name) else layer.backend.world_size
        if (holders != count).any():
            raise AssertionError(f"not every element of {name} is held by {count} ranks")


def _written_gradients(
    layer: Layer, values: Mapping[str, _Vector], x: _Vector, r: _Vector
) -> dict[str, _Vector]:
    """The parameters' gradients, in memory that held NaN."""
    table = ParameterTable(layer.walk_parameters())
    flat = np.full(table.length, math.nan)
    targets = GradientTargets(
        {entry.name: entry for entry in table.entries},
        lambda entry: flat[entry.start : entry.stop],
        {entry.name for entry in table.entries},
    )
    _, saved = layer.forward(values, x, Context())
    layer.backward(values, saved, r.copy(), targets)
    targets.clear_unwritten()
    return {e.name: flat[e.start : e.stop].reshape(e.shape) for e in table.entries}


def _compare(what: str, found: _Vector, expected: _Vector, tolerance: float) -> None:
    if found.shape != expected.shape:
        raise AssertionError(f"the {what} has shape {found.shape}, expected {expected.shape}")
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    worst = float(np.abs(found - expected).max(initial=0.0)) / scale
    if not worst <= tolerance:
        raise AssertionError(f"the {what} is off by {worst:.3g}, allowed is {tolerance:g}")
