"""Conversion of checkpoints to and from other programs' files.

Begin with `convert`, which writes a checkpoint, one safetensors file, or a directory of such files,
from any of the three. `sources` reads them, a few MiB at a time. `plain` has `serialize`,
`save_model`, `deserialize` and `load_model` of models in one process.

This chapter may import every other chapter of checkpoint.
"""
