"""Checkpoints that fit every world size and strategy.

A checkpoint is a directory: one safetensors file for each rank that wrote something, and
``manifest.json``, written last. It knows regions of the model's parameters and nothing of ranks,
so whoever loads it reads the regions that it needs.
"""

from mpishard.checkpoint.content import StagingBuffer
from mpishard.checkpoint.exchange import CheckpointForm, consolidate, convert
from mpishard.checkpoint.folder import CheckpointFolder
from mpishard.checkpoint.inspection import (
    CheckpointProblem,
    CheckpointReport,
    check,
    describe,
    find_problems,
    load_arrays,
)
from mpishard.checkpoint.manifest import Manifest
from mpishard.checkpoint.pending import PendingSave
from mpishard.checkpoint.protocol import (
    Checkpointable,
    CheckpointableOptimizer,
    CheckpointState,
    Pieces,
)
from mpishard.checkpoint.reader import CheckpointReader
from mpishard.checkpoint.resume import newest_valid
from mpishard.checkpoint.snapshot import load, reserve, save, save_async
from mpishard.checkpoint.writer import write_checkpoint

__all__ = [
    "CheckpointFolder",
    "CheckpointForm",
    "CheckpointProblem",
    "CheckpointReader",
    "CheckpointReport",
    "CheckpointState",
    "Checkpointable",
    "CheckpointableOptimizer",
    "Manifest",
    "PendingSave",
    "Pieces",
    "StagingBuffer",
    "check",
    "consolidate",
    "convert",
    "describe",
    "find_problems",
    "load",
    "load_arrays",
    "newest_valid",
    "reserve",
    "save",
    "save_async",
    "write_checkpoint",
]
