"""A chain of layers as one rank of a tensor group computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from mpishard.nn.layer import Layer
from mpishard.sharding import Box

__all__ = ["LayerDecision", "SplitKind", "TensorPartition"]


class SplitKind(StrEnum):
    """Along what a layer's computation is dealt to the ranks."""

    COLUMN = "column"
    """Outputs of a linear layer: rows of its weight, in the literature's words a column split."""
    ROW = "row"
    """Inputs of a linear layer: columns of its weight."""
    VOCABULARY = "vocabulary"
    """Rows of an embedding."""
    HEADS = "heads"
    """Attention heads."""
    FEATURES = "features"
    """The last dim, between a column and a row split: activations and dropout."""
    POSITIONS = "positions"
    """Slices of the sequence."""
    WHOLE = "whole"
    """Not at all: each rank computes the same."""


@dataclass(frozen=True, slots=True)
class LayerDecision:
    """What was done with a leaf layer.

    Parameters
    ----------
    name : str
        Its dotted name in the model.
    kind : SplitKind
        Along what it is split.
    share : float
        The largest part of its computation that one rank has, in (0, 1]; 1 where it is whole.
    reason : str
        What it is now, with sizes, and why.
    """

    name: str
    kind: SplitKind
    share: float
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class TensorPartition:
    """What became of a chain of layers.

    Parameters
    ----------
    layers : mapping of str to Layer
        The same names in the same order; layers that could be split are this rank's part.
    boxes : mapping of str to tuple of Box
        Full parameter name -> what this rank holds of it, for those that are split; of one that
        is tied to another, both names. All others are whole on every rank, and have the same
        gradient there.
    splits_output : bool
        Whether the chain's output has this rank's part alone of its last dim, as
        ``ShardLayout(size, world_size)`` cuts it.
    decisions : tuple of LayerDecision
        What was done with each leaf layer, and why, in the chain's order.
    """

    layers: Mapping[str, Layer]
    boxes: Mapping[str, tuple[Box, ...]]
    splits_output: bool
    decisions: tuple[LayerDecision, ...]

    @property
    def log(self) -> tuple[str, ...]:
        """A line for each leaf layer: its name, what was done with it, and why."""
        return tuple(str(decision) for decision in self.decisions)
