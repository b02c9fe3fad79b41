"""A chain of layers as one rank of a tensor group computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpishard.nn.layer import Layer
from mpishard.sharding import Box

__all__ = ["TensorPartition"]


@dataclass(frozen=True, slots=True)
class TensorPartition:
    """What became of a chain of layers.

    Parameters
    ----------
    layers : mapping of str to Layer
        The same names in the same order; layers that could be split are this rank's part.
    boxes : mapping of str to tuple of Box
        Full parameter name -> what this rank holds of it, for those that are split. All others
        are whole on every rank, and have the same gradient there.
    splits_output : bool
        Whether the chain's output has this rank's part alone of its last dim, as
        ``ShardLayout(size, world_size)`` cuts it.
    log : tuple of str
        What was done with each layer, and why.
    """

    layers: Mapping[str, Layer]
    boxes: Mapping[str, tuple[Box, ...]]
    splits_output: bool
    log: tuple[str, ...]
