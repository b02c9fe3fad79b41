"""A function of a vector and of samples, as the black box that the sharded engine runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.data import take
from mpishard.layout import ShardLayout

__all__ = ["Objective", "Samples"]


class Samples:
    """The part of the data that one rank evaluates: arrays of equal length, or nothing.

    Parameters
    ----------
    arrays : sequence of Array
        What the function takes beside theta, cut along the first dim.
    count : int
        Number of samples. A function without data counts as one sample, on rank 0.
    """

    def __init__(self, arrays: Sequence[Array], count: int) -> None:
        self.arrays = arrays
        self.count = count

    def __len__(self) -> int:
        return self.count

    @classmethod
    def of(cls, args: Sequence[Any], rank: int, world_size: int, *, local_data: bool) -> Samples:
        """Return the samples of ``rank``, of data that all ranks have, or of its own."""
        if not args:
            return cls((), int(rank == 0))
        if local_data:
            return cls(tuple(args), len(args[0]))
        part = ShardLayout(len(args[0]), world_size).slice(rank)
        return cls(tuple(_cut(array, part) for array in args), part.stop - part.start)


def _cut(array: Any, part: slice) -> Array:
    """Return a view of an array, or the samples of what is read by index arrays."""
    if isinstance(array, np.ndarray):
        return array[part]
    return take(array, np.arange(part.start, part.stop))


class Objective:
    """``fun(theta, *samples)`` with the members of a black box.

    While ``numbers["product"]`` is true the parameters are a vector v, and the gradient is the
    product of the Hessian at the base point with it.

    Parameters
    ----------
    function : callable
        ``function(theta, *arrays)`` returns mean loss and gradient.
    theta : Array
        First parameters, shape (n,).
    product : callable, optional
        ``product(theta, v, *arrays)`` returns the mean Hessian times v.
    described_as : str
        Name of the user's functions in messages.
    """

    def __init__(
        self,
        function: Callable[..., tuple[float, Array]],
        theta: Array,
        product: Callable[..., Array] | None,
        described_as: str,
    ) -> None:
        self.described_as = described_as
        self.numbers: Mapping[str, Any] = {}  # of the rule's state, once there is one
        self._function = function
        self._product = product
        self._theta = theta
        self._base = theta

    @property
    def has_product(self) -> bool:
        """Whether Hessian-vector products are given."""
        return self._product is not None

    def get_parameters(self) -> Array:
        return self._theta

    def set_parameters(self, parameters: Array) -> None:
        # The engine's copy, which nobody else changes.
        if self._product is not None and not self.numbers.get("product"):
            self._base = parameters
        self._theta = parameters

    def compute_loss_and_gradients(self, x: Samples, y: None) -> tuple[float, Array]:
        """Return the mean loss of the samples and its gradient, shape (n,)."""
        if self._product is not None and self.numbers.get("product"):
            return 0.0, np.asarray(self._product(self._base, self._theta, *x.arrays))
        found: Any = self._function(self._theta, *x.arrays)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(
                f"{self.described_as} must return (loss, gradient), got a {type(found).__name__}"
            )
        loss, gradient = found
        return loss, np.asarray(gradient) if isinstance(gradient, list | tuple) else gradient
