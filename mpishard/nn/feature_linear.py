"""A linear layer that can leave out some of its input features."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpishard.arrays import Array, array_namespace
from mpishard.nn.layer import Context, Parameters
from mpishard.nn.linear import Linear
from mpishard.nn.sizes import is_size

__all__ = ["FeatureLinear"]


class FeatureLinear(Linear):
    """`Linear`, of which the input features that are not active count as 0.

    Whatever an inactive feature holds, NaN too, the output does not depend on it, and neither
    it nor its column of the weight has a gradient. At first all are active. Parameters and errors
    are those of `Linear`.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self._active = frozenset(range(inputs))

    @property
    def active(self) -> tuple[int, ...]:
        """Indices of the active features, ascending."""
        return tuple(sorted(self._active))

    @active.setter
    def active(self, indices: Iterable[int]) -> None:
        self._active = self.checked(indices)

    def checked(self, indices: Iterable[int]) -> frozenset[int]:
        """These indices, where each is that of a feature.

        Raises
        ------
        ValueError
            For one that is not.
        """
        chosen = list(indices)
        wrong = [index for index in chosen if not is_size(index, 0) or int(index) >= self.inputs]
        if wrong:
            raise ValueError(
                f"indices of features must be integers in [0, {self.inputs}), got {wrong[0]!r}"
            )
        return frozenset(int(index) for index in chosen)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Map x of shape (..., I) to (..., O); saves x, masked where a feature is inactive."""
        if len(self._active) < self.inputs:
            x = x.copy()
            self._clear_inactive(x)
        return super().forward(p, x, context)

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The input's gradient, 0 for what is inactive."""
        dx, pending = super().backward_input(p, saved, dy)
        self._clear_inactive(dx)
        return dx, pending

    def _clear_inactive(self, x: Array) -> None:
        inactive = sorted(frozenset(range(self.inputs)) - self._active)
        if inactive:
            x[..., array_namespace(x).asarray(inactive)] = 0
