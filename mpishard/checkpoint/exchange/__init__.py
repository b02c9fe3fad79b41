"""Conversion of checkpoints to and from other programs' files.

Begin with `convert`: a checkpoint, one safetensors file, or a directory of such files, each from
any other. `sources` reads all three, a few MiB at a time. `plain` gives a model of one process its
`serialize`, `save_model` and their opposites.

May import every other chapter of checkpoint.
"""
