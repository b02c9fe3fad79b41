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
from mpishard.checkpoint.exchange.plain import (
    PlainModelFiles,
    choices_in,
    choices_of,
    named_bytes,
    packed_vector,
)
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.format.content import (
    ANYTHING,
    COUNT,
    NUMBER,
    OBJECT,
    TEXT,
    Checkpointable,
    CheckpointableOptimizer,
    CheckpointedModel,
    CheckpointState,
    Form,
    Kind,
    Pieces,
    check_keys,
    require_form,
    spelled,
    states_of,
)
from mpishard.checkpoint.format.disk import replace_file
from mpishard.checkpoint.format.folder import LATEST, CheckpointFolder
from mpishard.checkpoint.format.manifest import MANIFEST, Manifest
from mpishard.checkpoint.format.tensor_file import (
    LazyTensor,
    TensorFile,
    bytes_of,
    tensors_and_document,
    tensors_of,
)
from mpishard.checkpoint.loading.inspection import (
    CheckpointProblem,
    CheckpointReport,
    check,
    describe,
    find_problems,
    load_arrays,
    problems_in,
)
from mpishard.checkpoint.loading.reader import CheckpointReader, find_checkpoint, find_single
from mpishard.checkpoint.loading.restore import load, load_states, newest_first, newest_valid
from mpishard.checkpoint.saving.pending import PendingSave
from mpishard.checkpoint.saving.save import (
    begin_save,
    reserve,
    save,
    save_async,
    save_states,
    write_checkpoint,
)
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
    "CheckpointedModel",
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
