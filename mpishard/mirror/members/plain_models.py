"""Documented members of plain models: those of `mpishard.nn`, and adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishard.base import Array
from mpishard.contracts import Saved
from mpishard.mirror.interfaces import IFullModel, IPipelineDecomposableModel

if TYPE_CHECKING:
    from mpishard.nn import Sequential

__all__ = ["LayeredModelMembers", "PlainModelMembers"]


class PlainModelMembers(IFullModel):
    """What the documented hierarchy has of an adapter: the members of `IFullModel`."""


class LayeredModelMembers(PlainModelMembers, IPipelineDecomposableModel):
    """What the documented hierarchy has of a model of `mpishard.nn`."""

    if TYPE_CHECKING:  # of the native class
        chain: Sequential

        def _run(self, x: Array, y: Array) -> Any: ...

    def compute_activation_gradients(self, x: Array, target: Array) -> tuple[Array | None, Saved]:
        run = self._run(x, target)
        return run.input_gradient(), run

    def compute_weight_gradients(self, x: Array, target: Array, cached: Saved) -> Array:
        # A pass of another model would give gradients of the wrong length, or of wrong values.
        is_ours = getattr(cached, "chain", None) is self.chain
        if not (is_ours and cached.is_pending):
            raise ValueError(
                "cached must be the result of this model's "
                "compute_activation_gradients(x, target), and serves once"
            )
        gradient: Array = cached.weight_gradients()
        return gradient
