"""How long each layer of a model takes, measured."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpishard.arguments import as_integer
from mpishard.arrays import Array, array_namespace, synchronize
from mpishard.errors import MissingLossError
from mpishard.nn import Context, Model

__all__ = ["measured_layer_costs"]


def measured_layer_costs(model: Model, x: Array, y: Array, *, repeats: int = 5) -> list[float]:
    """Seconds of forward and backward of each top-level layer, for `partition_layers`.

    Those of the loss are the last layer's.
    A first run does not count, and of the others the median is taken. The model's parameters are
    read and not changed. Ranks that measure for themselves measure different times, and would
    deal the layers differently: measure on one, and broadcast.

    Parameters
    ----------
    model : Model
        A plain model of `mpishard.nn` with a default loss.
    x, y : Array
        A batch; times are those of micro-batches of its size.
    repeats : int
        How often; 1 or more.

    Returns
    -------
    list of float
        One for each of ``model.layers``.

    Raises
    ------
    ValueError
        For fewer than one repeat, and for inputs or targets that the model cannot take.
    MissingLossError
        Where the model has no loss.

    Examples
    --------
    >>> import numpy as np
    >>> import mpishard as ms
    >>> from mpishard.pipeline import measured_layer_costs, partition_layers
    >>> model = ms.nn.MLP([8, 32, 32, 4])
    >>> seconds = measured_layer_costs(model, np.ones((16, 8)), np.ones((16, 4)))
    >>> stages = partition_layers(model.get_all_layer_info(), 2, costs=seconds)
    """
    if as_integer("repeats", repeats) < 1:
        raise ValueError(f"repeats must be 1 or more, got {repeats}")
    loss = model.default_loss_function
    if loss is None:
        raise MissingLossError(f"this {type(model).__name__} has no default loss to go back from")
    x = model.as_input(x)
    loss.check_target((*x.shape[:1], *model.chain.output_shape(x.shape[1:])), y)
    y = model.device.put(y)
    table = model.parameter_table
    vector = model.get_parameters()
    views = table.nested_views(vector)
    gradients = table.nested_views(array_namespace(vector).zeros_like(vector))
    seconds = np.zeros((repeats + 1, len(model.layers)))
    for row in seconds:
        _measure(model, views, gradients, x, y, row)
    return [float(s) for s in np.median(seconds[1:], axis=0)]


def _measure(
    model: Model, views: Any, gradients: Any, x: Array, y: Array, seconds: np.ndarray[Any, Any]
) -> None:
    """One forward and backward pass, whose times are added to ``seconds``."""
    context = Context(seed=model.seed)
    saved = []
    for index, (name, layer) in enumerate(model.chain.children.items()):
        start = time.perf_counter()
        x, layer_saved = layer.forward(views.get(name, {}), x, context.enter(name, layer))
        synchronize(x)
        seconds[index] += time.perf_counter() - start
        saved.append(layer_saved)
    loss = model.default_loss_function
    assert loss is not None
    start = time.perf_counter()
    dy = loss.backward(loss.forward(x, y)[2])
    synchronize(dy)
    seconds[-1] += time.perf_counter() - start  # the last stage computes it
    for index, (name, layer) in reversed(list(enumerate(model.chain.children.items()))):
        start = time.perf_counter()
        dy = layer.backward(
            views.get(name, {}),
            saved.pop(),
            dy,
            gradients.get(name, {}),
            needs_input_gradient=index > 0,
        )
        if dy is not None:
            synchronize(dy)
        seconds[index] += time.perf_counter() - start
