"""Checks of gradients against central differences, and of split layers against whole ones.

The numeric derivative is (f(t + h) - f(t - h)) / 2h with h near the cube root of the dtype's
epsilon, which balances truncation against rounding (Press et al., "Numerical recipes", 3rd ed.,
2007, section 5.7). An error is reported relative to the largest derivative of its parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mpishard.base import Array, as_amount, as_count, require_type
from mpishard.nn import (
    Context,
    GradientTargets,
    Layer,
    output_and_saved,
    parameter_generator,
)
from mpishard.sharding import ParameterTable, nested
from mpishard.tensor import TensorParallelLayer

# The error of a parameter with tiny derivatives is taken relative to this fraction of the model's
# largest derivative. Otherwise the rounding of the loss would count as an error of the gradient.
_FLOOR = 1e-3


class GradientMismatchError(AssertionError):
    """Raised if analytic and numeric gradients differ.

    Attributes
    ----------
    errors : dict of str to float
        Largest relative error of each parameter, the worst parameter first.
    """

    def __init__(self, errors: Mapping[str, float], tolerance: float) -> None:
        self.errors = dict(errors)
        wrong = [name for name, error in errors.items() if not error <= tolerance]
        lines = [f"  {name}: {errors[name]:.3g}" for name in wrong]
        super().__init__(
            f"{len(wrong)} of {len(errors)} gradients are off by more than {tolerance:g} "
            "(worst relative error of each):\n" + "\n".join(lines)
        )


_TOLERANCE = 1e-12  # of a split layer's arrays, relative to their largest element or to 1


def check_gradients(
    model: Any,
    x: ArrayLike,
    y: ArrayLike,
    loss: Callable[..., float] | None = None,
    *,
    tolerance: float | None = None,
    samples: int | None = 32,
) -> dict[str, float]:
    """Compare a model's ``compute_gradients(x, y)`` with central differences of its mean loss.

    Parameters
    ----------
    model : object
        A model with ``get_parameters``, ``set_parameters`` and ``compute_gradients``, and either
        ``compute_loss_and_gradients`` or ``predict``. Its parameters are restored afterwards.
    x, y : array_like
        Inputs and targets of one batch, as the model takes them.
    loss : callable, optional
        ``loss(prediction, target) -> mean``. Default: the loss that
        ``compute_loss_and_gradients`` returns, or the model's ``default_loss_function``.
    tolerance : float, optional
        Largest relative error; 1e-6 for float64 parameters and 3e-2 for others if not given.
    samples : int, optional
        Number of elements of each parameter that are checked, drawn at random but the same in each
        call; None for all.

    Returns
    -------
    dict of str to float
        Largest relative error by parameter name, worst first. A model without
        ``parameter_table`` or ``parameter_entries`` has the one name "parameters".

    Raises
    ------
    GradientMismatchError
        If an error is above the tolerance.
    TypeError
        If there is no way to compute the loss.
    """
    evaluate = _loss_function(model, x, y, loss)
    # A copy, because a model may return its own vector.
    start: Array = np.array(model.get_parameters())
    gradient = np.array(model.compute_gradients(x, y))
    _promise(
        gradient.shape == start.shape,
        f"compute_gradients returned shape {gradient.shape} for parameters of {start.shape}",
    )
    _promise(
        # Otherwise the numeric derivatives would be taken at another point than the gradient.
        np.array_equal(start, np.asarray(model.get_parameters())),
        "compute_gradients changed the parameters",
    )
    table = getattr(model, "parameter_table", None)
    entries = getattr(model, "parameter_entries", None) if table is None else table.entries
    ranges = {"parameters": slice(None)}
    if entries is not None:
        ranges = {e.name: slice(e.start, e.start + e.size) for e in entries}

    def at(parameters: Array) -> float:
        model.set_parameters(parameters.copy())
        return evaluate()

    checker = _Checker(samples)
    try:
        for name, part in ranges.items():
            checker.add(name, start[part], gradient[part], lambda: at(start))
    finally:
        model.set_parameters(start)
    # Central differences of float32 have few right digits: a loss with seven is divided by a small
    # step.
    if tolerance is None:
        tolerance = 1e-6 if start.dtype == np.float64 else 3e-2
    return checker.verdict(tolerance)


def check_layer_gradients(
    layer: Layer,
    x: ArrayLike,
    *,
    tolerance: float = 1e-6,
    samples: int | None = None,
) -> dict[str, float]:
    """Check a layer against central differences, and against the promises of `Layer`.

    The check is made in float64, with perturbed first parameters, and f = sum(r * y) for a random
    r. It tests these points:

    * The gradients of the input and of every parameter are right.
    * Input and parameters are not changed.
    * Nothing is saved without ``training``, and the output is then the same. The output of a layer
      that `is_random` is the same in every pass of one context.
    * Gradients are added to the values that are there.
    * `backward` and the two halves give the same bits, even if the caller overwrites the input's
      gradient between the halves. So does `backward` without the input's gradient.

    Parameters
    ----------
    layer : Layer
        Layer to check.
    x : array_like
        Input with its batch dim; floating, or integer tokens, which have no gradient.
    tolerance : float
        Largest relative error.
    samples : int, optional
        Number of elements of each array that are checked, drawn at random; None for all.

    Returns
    -------
    dict of str to float
        Largest relative error by name, worst first; that of the input is called "input".

    Raises
    ------
    TypeError, ValueError
        If ``layer`` is not a `Layer`, or a number is not in its range.
    GradientMismatchError
        If a gradient is off by more than the tolerance.
    AssertionError
        If a promise of `Layer` is broken, which the message names.
    """
    require_type("layer", layer, Layer)
    generator = parameter_generator(0, "check_layer_gradients")
    x = np.array(x)
    if x.dtype.kind == "f":
        x = x.astype(np.float64)
    # Moved away from 0 and 1, at which many wrong gradients happen to be right.
    values = perturbed_parameters(layer, generator)
    r = generator.standard_normal((len(x), *layer.output_shape(x.shape[1:])))
    dx, gradients = check_layer_promises(layer, values, x, r)

    # Without ``training`` dropout does nothing, and its gradient would not be tested.
    context = Context(training=layer.is_random)

    def evaluate() -> float:
        return float((r * layer.forward(nested(values), x, context)[0]).sum())

    checker = _Checker(samples)
    if x.dtype.kind == "f":
        assert dx is not None, "backward gave no gradient of an input of real numbers"
        checker.add("input", x, dx, evaluate)
    for name, value in values.items():
        checker.add(name, value, gradients[name], evaluate)
    return checker.verdict(tolerance)


class _Checker:
    """The errors of one check, collected array by array."""

    def __init__(self, samples: int | None) -> None:
        # A check of no elements would find every gradient right.
        self._samples = None if samples is None else as_count("samples", samples)
        self._generator = np.random.default_rng(0)
        self._pairs: dict[str, tuple[Array, Array]] = {}

    def add(self, name: str, values: Array, gradient: Array, evaluate: Callable[[], float]) -> None:
        """Add the differences of ``evaluate()`` when elements of ``values`` are moved in place."""
        indices = np.arange(values.size)
        if self._samples is not None and self._samples < values.size:
            indices = np.sort(self._generator.choice(indices, self._samples, replace=False))
        numeric = np.empty(len(indices))
        for position, index in enumerate(indices):
            place = np.unravel_index(index, values.shape)
            numeric[position] = _difference(values, place, evaluate)
        self._pairs[name] = (gradient.reshape(-1)[indices].astype(np.float64), numeric)

    def verdict(self, tolerance: float) -> dict[str, float]:
        """Return the largest relative error by name, worst first.

        Raises
        ------
        GradientMismatchError
            If one is above the tolerance.
        """
        tolerance = as_amount("tolerance", tolerance)
        largest = {
            name: max((float(np.abs(part).max(initial=0.0)) for part in pair), default=0.0)
            for name, pair in self._pairs.items()
        }
        floor = _FLOOR * max(largest.values(), default=0.0)
        errors = {}
        for name, (analytic, numeric) in self._pairs.items():
            worst = float(np.abs(analytic - numeric).max(initial=0.0))
            errors[name] = worst / max(largest[name], floor) if worst else 0.0
        # NaN compares False with every number, so the key replaces it by infinity: it comes first.
        errors = dict(sorted(errors.items(), key=lambda item: -np.nan_to_num(item[1], nan=np.inf)))
        if any(not error <= tolerance for error in errors.values()):
            raise GradientMismatchError(errors, tolerance)
        return errors


def _difference(values: Array, place: tuple[np.intp, ...], evaluate: Callable[[], float]) -> float:
    """Return the central difference of ``evaluate()`` with respect to one element."""
    middle = values[place]
    # The error of a central difference grows with step^2, and that of rounding with eps / step.
    # Their sum is smallest near the cube root of eps.
    step = float(np.cbrt(np.finfo(values.dtype).eps)) * max(1.0, abs(float(middle)))
    values[place] = middle + step
    above, high = float(values[place]), evaluate()
    values[place] = middle - step
    below, low = float(values[place]), evaluate()
    values[place] = middle
    # The divisor is the distance of the stored numbers, because ``middle + step`` was rounded.
    return (high - low) / (above - below)


def perturbed_parameters(layer: Layer, generator: np.random.Generator) -> dict[str, Array]:
    """Return first parameters moved at random, so that none is exactly 0 or 1."""
    return {
        name: spec.initializer(generator, spec.shape) + 0.1 * generator.standard_normal(spec.shape)
        for name, spec in layer.walk_parameters()
    }


def _loss_function(
    model: Any, x: ArrayLike, y: ArrayLike, loss: Callable[..., float] | None
) -> Callable[[], float]:
    """Return a function without arguments that computes the model's mean loss on the batch."""
    if loss is None and hasattr(model, "compute_loss_and_gradients"):
        return lambda: float(model.compute_loss_and_gradients(x, y)[0])
    chosen = loss if loss is not None else getattr(model, "default_loss_function", None)
    if chosen is None or not hasattr(model, "predict"):
        raise TypeError(
            f"{type(model).__name__} has no compute_loss_and_gradients; give a loss(prediction, "
            "target), and the model a predict(x)"
        )
    return lambda: float(chosen(model.predict(x), y))


def check_layer_promises(
    layer: Layer, values: Mapping[str, Array], x: Array, r: Array
) -> tuple[Array | None, dict[str, Array]]:
    """Check the promises of `Layer` for one input and one gradient of the output.

    Input and parameters are read-only arrays, which raise if the layer writes to them.

    Returns
    -------
    dx : Array
        The gradient of the input. Its values are not checked here.
    gradients : dict of str to Array
        The gradients of the parameters, by name. Their values are not checked here.
    """
    kind = type(layer).__name__
    p, frozen_x = nested(_frozen(values)), _frozen({"x": x})["x"]
    y, saved = output_and_saved(layer.forward(p, frozen_x, Context()), layer)
    _promise(
        y.shape == r.shape,
        f"{kind}.output_shape gives {r.shape} with the batch, and the output has {y.shape}",
    )
    quiet, nothing = layer.forward(p, frozen_x, Context(training=False))
    _promise(
        nothing is None,
        f"{kind}.forward saved something without training: return (y, saved if context.training "
        "else None)",
    )
    if layer.is_random:
        again, _ = layer.forward(p, frozen_x, Context())
        _promise(np.array_equal(y, again), "the output differs between passes of one context")
    else:
        _promise(np.array_equal(y, quiet), "the output depends on training")

    whole = {name: np.zeros_like(value) for name, value in values.items()}
    dx = layer.backward(p, saved, r.copy(), nested(whole))

    halves = {name: np.zeros_like(value) for name, value in values.items()}
    _, saved = layer.forward(p, frozen_x, Context())
    dx_half, pending = layer.backward_input(p, saved, r.copy())
    if dx is None or dx_half is None:
        _promise(dx is dx_half, "only one of backward and backward_input gives a gradient")
    else:
        _promise(np.array_equal(dx, dx_half), "backward_input and backward differ")
        # Overwritten, as in a chain of layers, to detect pending arrays that share this memory.
        dx_half[...] = np.nan
    layer.backward_weight(pending, nested(halves))

    # The first layer of a chain needs no gradient of its input and may skip its computation.
    alone = {name: np.zeros_like(value) for name, value in values.items()}
    _, saved = layer.forward(p, frozen_x, Context())
    layer.backward(p, saved, r.copy(), nested(alone), needs_input_gradient=False)

    # Ones and not zeros: a layer that overwrites would pass with zeros.
    added = {name: np.ones_like(value) for name, value in values.items()}
    _, saved = layer.forward(p, frozen_x, Context())
    layer.backward(p, saved, r.copy(), nested(added))
    for name, gradient in whole.items():
        _promise(
            np.array_equal(gradient, halves[name]),
            f"backward_weight and backward differ in {name}; so they do where a pending array "
            "shares memory with the input's gradient",
        )
        _promise(
            np.array_equal(gradient, alone[name]),
            f"the gradient of {name} depends on whether the input's is asked for",
        )
        _promise(
            np.allclose(added[name], gradient + 1, rtol=1e-12, atol=1e-12),
            f'the gradient of {name} was not added to what was there: write g["{name}"] += ...',
        )
    return dx, whole


def _promise(kept: bool, message: str) -> None:
    if not kept:
        raise AssertionError(message)


def _frozen(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return read-only copies."""
    copies = {name: array.copy() for name, array in arrays.items()}
    for copy in copies.values():
        copy.flags.writeable = False
    return copies


def _all_of_it(array: Array) -> Array:
    return array


def check_parallel_layer(
    layer: TensorParallelLayer,
    whole: Layer,
    x: ArrayLike,
    *,
    take_input: Callable[[Array], Array] = _all_of_it,
    take_output: Callable[[Array], Array] = _all_of_it,
) -> None:
    """Compare a split layer with the whole one. Collective: all ranks of the layer's group call it.

    The check is made in float64, with perturbed first parameters and a random gradient of the
    output, all the same on every rank. It tests these points:

    * The first values, the output, and the gradients of the input and of every parameter are this
      rank's part of those of the whole layer.
    * The parts of all ranks cover each element of a split parameter once.
    * The layer keeps the promises that `check_layer_gradients` tests, also if gradients are written
      into memory that was not cleared.

    Parameters
    ----------
    layer : TensorParallelLayer
        The layer of this rank.
    whole : Layer
        The same layer on one rank; its parameters have the same names.
    x : array_like
        The whole layer's input, with its batch dim.
    take_input, take_output : callable
        Return this rank's part of the whole layer's input and output. Default: all of it.

    Raises
    ------
    TypeError, ValueError
        If ``layer`` is not a `TensorParallelLayer`.
    AssertionError
        Naming the array that differs by more than 1e-12, relative to its largest element (or to
        1), or the promise that is broken.
    """
    require_type("layer", layer, TensorParallelLayer)
    generator = parameter_generator(0, "check_parallel_layer")
    x = np.array(x)
    wholes = perturbed_parameters(whole, generator)
    _check_parameters(layer, whole, wholes)
    owns = {name: _own_elements(layer, name, value) for name, value in wholes.items()}

    context = Context()
    y, saved = whole.forward(wholes, x, context)
    r = generator.standard_normal(y.shape)
    gradients = {name: np.zeros_like(value) for name, value in wholes.items()}
    dx = whole.backward(wholes, saved, r.copy(), gradients)

    # Copies, because a part may be a view, and layers may require contiguous arrays.
    own_x, own_r = take_input(x).copy(), take_output(r).copy()
    own_y, _ = layer.forward(owns, own_x, context)
    _compare("output", own_y, take_output(y))
    own_dx, own_gradients = check_layer_promises(layer, owns, own_x, own_r)
    if dx is not None:
        assert own_dx is not None, "the parallel layer gave no gradient of its input"
        _compare("input's gradient", own_dx, take_input(dx))
    written = _written_gradients(layer, owns, own_x, own_r)
    for name, gradient in gradients.items():
        expected = _own_elements(layer, name, gradient)
        _compare(f"gradient of {name}", own_gradients[name], expected)
        _compare(f"gradient of {name}, where written,", written[name], expected)


def _own_elements(layer: TensorParallelLayer, name: str, value: Array) -> Array:
    """Return this rank's part of the whole parameter ``value``."""
    parts = [value[tuple(slice(*r) for r in box)].reshape(-1) for box in layer.boxes(name)]
    return np.concatenate([value[:0].reshape(-1), *parts]).reshape(layer.parameters[name].shape)


def _check_parameters(
    layer: TensorParallelLayer, whole: Layer, wholes: Mapping[str, Array]
) -> None:
    """Check names, first values, and that each element is held by one rank or by all."""
    if list(layer.parameters) != list(wholes) or list(layer.whole_parameters) != list(wholes):
        raise AssertionError(
            f"the layer has {list(layer.parameters)}, the whole layer {list(wholes)}"
        )
    for name, value in wholes.items():
        spec, of_whole = layer.parameters[name], whole.parameters[name]
        first = spec.initializer(parameter_generator(1, name), spec.shape)
        expected = of_whole.initializer(parameter_generator(1, name), of_whole.shape)
        if not np.array_equal(first, _own_elements(layer, name, expected)):
            raise AssertionError(f"first values of {name} are not the whole layer's")
        # Counted over all ranks: each alone may hold right elements, and all together not every
        # one.
        holders = np.zeros(value.shape, np.int64)
        for box in layer.boxes(name):
            holders[tuple(slice(*r) for r in box)] += 1
        layer.backend.all_reduce(holders)
        # Every rank holds a whole copy of each parameter that is not split.
        count = 1 if layer.is_split(name) else layer.backend.world_size
        if (holders != count).any():
            raise AssertionError(f"not every element of {name} is held by {count} ranks")


def _written_gradients(
    layer: Layer, values: Mapping[str, Array], x: Array, r: Array
) -> dict[str, Array]:
    """Return the parameters' gradients, written into memory that held NaN."""
    table = ParameterTable(layer.walk_parameters())
    # NaN, because an element that is added to instead of written then stays NaN.
    flat = np.full(table.length, math.nan)
    targets = GradientTargets(
        {entry.name: entry for entry in table.entries},
        lambda entry: flat[entry.start : entry.stop],
        {entry.name for entry in table.entries},
    )
    _, saved = layer.forward(values, x, Context())
    layer.backward(values, saved, r.copy(), targets)
    targets.clear_unwritten()
    return {entry.name: entry.view(flat) for entry in table.entries}


def _compare(what: str, found: Array, expected: Array) -> None:
    if found.shape != expected.shape:
        raise AssertionError(f"the {what} has shape {found.shape}, expected {expected.shape}")
    # At least 1, so that rounding in arrays of tiny values does not count as a difference.
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    worst = float(np.abs(found - expected).max(initial=0.0)) / scale
    if not worst <= _TOLERANCE:
        raise AssertionError(f"the {what} is off by {worst:.3g}, the tolerance is {_TOLERANCE:g}")
