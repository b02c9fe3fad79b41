"""Checkpoints that fit every world size and strategy.

A checkpoint is a directory: one safetensors file for each rank that wrote something, and
``manifest.json``, written last. It knows regions of the model's parameters and nothing of ranks,
so whoever loads it reads the regions that it needs.
"""

from mpishard.checkpoint.inspection import CheckpointReport, check, consolidate, load_arrays
from mpishard.checkpoint.manifest import Manifest
from mpishard.checkpoint.protocol import (
    Checkpointable,
    CheckpointableOptimizer,
    CheckpointState,
    Pieces,
)
from mpishard.checkpoint.reader import CheckpointReader
from mpishard.checkpoint.snapshot import load, save
from mpishard.checkpoint.writer import write_checkpoint

__all__ = [
    "CheckpointReader",
    "CheckpointReport",
    "CheckpointState",
    "Checkpointable",
    "CheckpointableOptimizer",
    "Manifest",
    "Pieces",
    "check",
    "consolidate",
    "load",
    "load_arrays",
    "save",
    "write_checkpoint",
]
