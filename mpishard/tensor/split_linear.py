"""What linear layers share whose weight is split over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace, to_host
from mpishard.communication import CommunicationBackend
from mpishard.contracts import LayerCategory
from mpishard.nn.layer import Context, Initializer, Layer, ParameterSpec
from mpishard.nn.linear import Linear
from mpishard.nn.sizes import check_sizes
from mpishard.nn.softmax import Softmax
from mpishard.tensor.layer import TensorParallelLayer

__all__ = ["SplitLinear"]


class SplitLinear(TensorParallelLayer):
    """A linear map y = activation(x W^T + b) whose weight W of shape (O, I) is split over ranks.

    Parameters
    ----------
    backend : CommunicationBackend
        The ranks.
    input_size, output_size : int
        I and O, of the whole layer.
    activation : Layer or None
        Applied element by element to the output.
    bias : bool
        Whether there is a bias b of shape (O,), first 0.
    initializer : Initializer, optional
        Of the whole W; `kaiming_uniform` of I where not given, as of `mpishard.nn.Linear`.
    tied_to : str, optional
        Full name of another parameter that serves as W.
    """

    category = LayerCategory.DENSE

    def __init__(
        self,
        backend: CommunicationBackend,
        input_size: int,
        output_size: int,
        activation: Layer | None = None,
        *,
        bias: bool = True,
        initializer: Initializer | None = None,
        tied_to: str | None = None,
    ) -> None:
        super().__init__(backend)
        check_sizes(type(self).__name__, input_size=input_size, output_size=output_size)
        _check_activation(activation)
        self.input_size = int(input_size)
        self.output_size = int(output_size)
        self.activation = activation
        self.bias = bias
        whole = Linear(self.input_size, self.output_size, bias, initializer, tied_to)
        self._whole: Mapping[str, ParameterSpec] = whole.parameters

    @property
    def whole_parameters(self) -> Mapping[str, ParameterSpec]:
        """``weight`` of shape (output_size, input_size) and, with a bias, ``bias``."""
        return self._whole

    def set_from_full_weights(self, weight: Array, bias: Array | None = None) -> None:
        """Let the first values of models that are built from this layer be slices of these.

        The layer itself holds no parameters: a model that has been built keeps its own.

        Parameters
        ----------
        weight : Array
            The whole W, shape (output_size, input_size).
        bias : Array, optional
            Shape (output_size,); where not given, the bias starts as it did.

        Raises
        ------
        TypeError
            For what are no arrays of real numbers.
        ValueError
            For other shapes, a bias of a layer without one, and where W is another parameter.
        """
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        values = {name: self._checked(name, array) for name, array in given.items()}
        self._whole = {
            name: replace(spec, initializer=_constant(values[name])) if name in values else spec
            for name, spec in self._whole.items()
        }

    def _checked(self, name: str, array: Array) -> np.ndarray[Any, Any]:
        owner = f"{type(self).__name__}({self.input_size}, {self.output_size})"
        spec = self._whole.get(name)
        if spec is None:
            raise ValueError(f"{owner} has no {name} to set")
        if spec.tied_to is not None:
            raise ValueError(f"the {name} of {owner} is {spec.tied_to}: set the values of that")
        array_namespace(array)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"the {name} of {owner} must be real, got an array of {array.dtype}")
        if array.shape != spec.shape:
            raise ValueError(
                f"the whole {name} of {owner} has shape {spec.shape}, got {array.shape}"
            )
        return np.array(to_host(array), dtype=np.float64)

    def _activate(self, y: Array, context: Context) -> tuple[Array, Any]:
        if self.activation is None:
            return y, None
        return self.activation.forward({}, y, context)

    def _before_activation(self, saved: Any, dy: Array) -> Array:
        """The gradient of what the activation took, in the place of ``dy`` or a new array."""
        if self.activation is None:
            return dy
        return self.activation.backward_input({}, saved, dy)[0]


def _check_activation(activation: Layer | None) -> None:
    if activation is None:
        return
    if not isinstance(activation, Layer):
        raise TypeError(f"activation must be a layer, such as ReLU(), or None; got {activation!r}")
    mixes = isinstance(activation, Softmax)
    if mixes or next(activation.walk_parameters(), None) or activation.is_random:
        raise ValueError(
            "activation must work element by element, without parameters and randomness, which "
            f"{type(activation).__name__} does not: make it a layer of its own, behind whole "
            "outputs"
        )


def _constant(values: np.ndarray[Any, Any]) -> Initializer:
    return lambda _, __: values
