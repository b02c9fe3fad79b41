"""Layers of which each rank of a group computes a part."""

from mpishard.tensor.layer import TensorParallelLayer
from mpishard.tensor.partition import TensorPartition

__all__ = ["TensorParallelLayer", "TensorPartition"]
