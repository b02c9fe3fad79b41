"""Shapes of what goes in and of what comes out."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

__all__ = ["DynamicShapeInfo", "IModelShape"]


@dataclass(frozen=True, slots=True)
class DynamicShapeInfo:
    """Which dims may differ from one batch to the next.

    The number of samples always may. Dims are counted in a *sample's* shape, without the batch
    dim: (0,) for a model of sequences of shape (T, D) says that T may differ.
    """

    dynamic_input_dims: tuple[int, ...] = ()
    dynamic_output_dims: tuple[int, ...] = ()


class IModelShape(ABC):
    """Shapes of one sample, without the batch dim; unless a model knows better, none."""

    def get_input_shape(self) -> list[int]:
        """Shape of one sample; [] where the model has none to tell."""
        return []

    def get_output_shape(self) -> list[int]:
        """Shape of one sample's prediction; [] where the model has none to tell."""
        return []

    def get_dynamic_shape_info(self) -> DynamicShapeInfo:
        """Which dims of those shapes may differ from batch to batch."""
        return DynamicShapeInfo()
