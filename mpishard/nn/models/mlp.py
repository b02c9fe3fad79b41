"""The multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from mpishard.arguments import is_size
from mpishard.devices import Device
from mpishard.nn.layers.activations import GELU, ReLU, Sigmoid, SiLU, Tanh
from mpishard.nn.layers.composites import Sequential
from mpishard.nn.layers.initializers import glorot_uniform, kaiming_uniform
from mpishard.nn.layers.layer import Layer
from mpishard.nn.layers.linear import Linear
from mpishard.nn.losses.regression import MSE, Loss
from mpishard.nn.models.model import Model

__all__ = ["MLP", "mlp_chain"]

_ACTIVATIONS: dict[str, Callable[[], Layer]] = {
    "gelu": GELU,
    "relu": ReLU,
    "sigmoid": Sigmoid,
    "silu": SiLU,
    "tanh": Tanh,
}


class MLP(Model):
    """Linear layers with an activation between each two.

    Parameters
    ----------
    sizes : sequence of int
        Sizes of the input, of each hidden layer, and of the output. Inputs have shape
        (B, sizes[0]), predictions (B, sizes[-1]).
    activation : {"relu", "gelu", "silu", "sigmoid", "tanh"}
        Activation behind every linear layer but the last.
    seed : int
        Seed of the first parameters.
    dtype : str or numpy.dtype
        Dtype of parameters and computation.
    device : str or Device
        Device of parameters and computation: see `Model`.
    loss : Loss, optional
        `MSE` if not given.

    Raises
    ------
    ValueError
        For fewer than two sizes, one that is no integer >= 1, or an unknown activation.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str = "relu",
        *,
        seed: int = 0,
        dtype: Any = "float64",
        loss: Loss | None = None,
        device: str | Device = "cpu",
    ) -> None:
        chain = mlp_chain(sizes, activation)
        super().__init__(
            chain, loss or MSE(), input_shape=(sizes[0],), seed=seed, dtype=dtype, device=device
        )


def mlp_chain(sizes: Sequence[int], activation: str = "relu") -> Sequential:
    """The layers of an `MLP`: ``linear0``, ``relu0``, ``linear1``, ...

    Parameters and errors are those of `MLP`.
    """
    if len(sizes) < 2 or not all(is_size(size) for size in sizes):
        raise ValueError(f"an MLP needs at least two sizes, all integers >= 1, got {list(sizes)}")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {sorted(_ACTIVATIONS)}, got {activation!r}")
    layers: dict[str, Layer] = {}
    for i, (inputs, outputs) in enumerate(pairwise(int(size) for size in sizes)):
        if i > 0:
            layers[f"{activation}{i - 1}"] = _ACTIVATIONS[activation]()
        # The choice keeps the size of signals constant through layers of this activation.
        is_symmetric = activation in {"sigmoid", "tanh"}
        initializer = glorot_uniform(inputs, outputs) if is_symmetric else kaiming_uniform(inputs)
        layers[f"linear{i}"] = Linear(inputs, outputs, initializer=initializer)
    return Sequential(layers)
