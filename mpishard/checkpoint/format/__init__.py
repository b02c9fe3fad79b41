"""What a checkpoint is on the disk, and what the ranks must agree on to make one.

Begin with `manifest`: the table of contents, read and written as JSON. `tensor_file` lays out
the file of one rank and writes it in safetensors format, `coverage` refuses pieces that do not make
up a tensor, `metadata` checks JSON. `folder` says where a checkpoint goes and which ones
stay, and `disk` holds every change of the file system, in order. `protocol` is what a model and an
optimizer show of themselves, `consensus` lets all ranks succeed or all raise.

Imports no other chapter of checkpoint.
"""
