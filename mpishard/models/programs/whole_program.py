"""A program that computes with all parameters at once, wherever they come from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from mpishard.arrays import Array
from mpishard.models.programs.program import Program

__all__ = ["WholeProgram"]


class WholeProgram(Program):
    """What computes whole gradients with whole parameters, and cannot be cut.

    Attributes
    ----------
    computes_in_place : bool
        Whether the model computes with the array that it is given, whose values may change.
    """

    needs_whole_parameters = True
    computes_in_place: ClassVar[bool]

    @abstractmethod
    def compute_with(self, full: Array, holder: str) -> None:
        """Compute with ``full``, shape (length,), from now on; the model may keep the array.

        ``holder`` is the name of who owns it.
        """

    @abstractmethod
    def contribute(self, saved: Any, add: Callable[[int, Array, float], None]) -> None:
        """Compute the gradient of the loss's *sum* that belongs to what `forward` saved.

        ``add(start, values, factor)`` is called with ranges of the flat vector, in any order:
        ``factor * values`` is to be added at ``start``.
        """
