"""Checkpoints that fit every world size and strategy.

A checkpoint is a directory: one safetensors file for each rank that wrote something, and
``manifest.json``, written last. It has regions of the model's parameters and does not depend on
ranks: a rank that loads it reads the regions that it needs.

Begin with `saving.save` (`save`) and `loading.restore` (`load`). `format` has the files on the
disk. `exchange` converts to and from other programs' files. A chapter
imports from those before it: format, loading, saving, exchange. The room imports from `sharding`
and the rooms before that.
"""

from mpishard.checkpoint.exchange.convert import CheckpointForm, consolidate, convert
from mpishard.checkpoint.format.content import (
    Checkpointable,
    CheckpointableOptimizer,
    CheckpointState,
    Pieces,
)
from mpishard.checkpoint.format.folder import CheckpointFolder
from mpishard.checkpoint.format.manifest import Manifest
from mpishard.checkpoint.loading.inspection import (
    CheckpointProblem,
    CheckpointReport,
    check,
    describe,
    find_problems,
    load_arrays,
)
from mpishard.checkpoint.loading.reader import CheckpointReader
from mpishard.checkpoint.loading.restore import load, newest_valid
from mpishard.checkpoint.saving.save import PendingSave, reserve, save, save_async, write_checkpoint
from mpishard.checkpoint.saving.staging import StagingBuffer

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
