"""Model of a function that returns loss and gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.adapters.placed_vector import FlatVectorModel
from mpishard.base import Array, MissingMemberError, as_array, as_loss, require_plain
from mpishard.contracts import ILossFunction, ModelMetadata
from mpishard.sharding import ParameterEntry


class FunctionModel(FlatVectorModel):
    """Model from ``fun(theta, x, y) -> (loss, gradient)``, as ``scipy.optimize``'s ``jac=True``.

    Parameters
    ----------
    loss_and_gradient : callable
        ``fun(theta, x, y)`` returns the *mean* loss over the samples of ``x``, a float, and its
        gradient, an array of theta's shape. Both may be of JAX or PyTorch. It must not change
        theta.
    initial_parameters : array_like
        Initial parameters, a floating-point vector of shape (n,).
    predict : callable, optional
        ``predict(theta, x)``, for the method `predict`.
    loss_is_sum : bool
        True if the loss is the *sum* over the samples. Then gradients are added over ranks, and not
        averaged, as those of one process with all samples.

    Raises
    ------
    TypeError
        If an argument for a function is not callable.
    ValueError
        If the parameters are not a non-empty 1-D floating-point vector of at most 64 bits per
        element, in the machine's byte order.
    """

    def __init__(
        self,
        loss_and_gradient: Callable[[Array, Array, Array], tuple[float, Array]],
        initial_parameters: Any,
        predict: Callable[[Array, Array], Array] | None = None,
        *,
        loss_is_sum: bool = False,
    ) -> None:
        if not callable(loss_and_gradient):
            raise TypeError("loss_and_gradient must be fun(theta, x, y) -> (loss, gradient)")
        if predict is not None and not callable(predict):
            raise TypeError("predict must be predict(theta, x)")
        initial_parameters = as_array(initial_parameters)
        # An array stays on its device, which may be a GPU; a list becomes a NumPy array.
        theta = initial_parameters if hasattr(initial_parameters, "dtype") else None
        theta = np.array(initial_parameters) if theta is None else theta.copy()
        if theta.ndim != 1 or theta.size == 0 or theta.dtype.kind != "f":
            raise ValueError(
                "initial_parameters must be a non-empty 1-D floating vector, got "
                f"{theta.dtype.name} of shape {theta.shape}"
            )
        if not theta.dtype.isnative or theta.dtype.itemsize > 8:
            raise ValueError(
                f"initial_parameters must be float64 or smaller, in this machine's byte order, got "
                f"{theta.dtype.name} ({theta.dtype.str}); use .astype(float)"
            )
        self._function = loss_and_gradient
        self._predict = predict
        self.loss_is_sum = loss_is_sum
        self._theta = theta
        self._entries = (ParameterEntry("parameters", theta.shape, 0),)

    def __repr__(self) -> str:
        return f"FunctionModel({self.get_model_metadata().description})"

    def get_model_metadata(self) -> ModelMetadata:
        function = getattr(self._function, "__qualname__", type(self._function).__qualname__)
        return ModelMetadata(
            type(self).__name__,
            model_type=type(self).__name__,
            complexity=self.parameter_count,
            description=f"{function}(theta, x, y) of {self.parameter_count} parameters",
            properties={"ParameterCount": self.parameter_count, "DType": self._theta.dtype.name},
        )

    def compute_loss_and_gradients(self, x: Array, y: Array) -> tuple[float, Array]:
        require_plain(x)
        require_plain(y)
        result: Any = self._function(self._theta, x, y)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise TypeError(
                f"the function must return (loss, gradient), got {type(result).__name__}"
            )
        # The gradient may be a list, or an array on a GPU, as the parameters may.
        loss, gradient = result[0], as_array(result[1])
        shape = getattr(gradient, "shape", None)
        if shape != self._theta.shape:
            raise ValueError(
                "the function returned "
                + (
                    f"a gradient of shape {shape}"
                    if shape is not None
                    else f"a {type(gradient).__name__} as its gradient"
                )
                + f" for parameters of shape {self._theta.shape}; it must return (loss, gradient)"
            )
        return as_loss(loss, self), gradient

    def compute_gradients(
        self, x: Array, y: Array, loss_function: ILossFunction | None = None
    ) -> Array:
        if loss_function is not None:
            raise ValueError("a FunctionModel's loss is its function's; pass no loss_function")
        return self.compute_loss_and_gradients(x, y)[1]

    def predict(self, x: Array) -> Array:
        if self._predict is None:
            raise MissingMemberError(
                "this FunctionModel was made without predict; pass predict=lambda theta, x: ..."
            )
        return self._predict(self._theta, x)

    def _flat_vector(self) -> Array:
        return self._theta
