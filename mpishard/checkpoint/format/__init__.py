"""The files of a checkpoint, and the agreement of the ranks that make one.

Begin with `manifest`: the table of contents, read and written as JSON. `tensor_file` lays out
the file of one rank and writes it in safetensors format, `coverage` refuses pieces that do not make
up a tensor, `metadata` checks JSON. `folder` says where a checkpoint goes and which ones stay, and
`disk` holds every change of the file system, in order. `protocol` is the interface of models and
optimizers that can be saved, `consensus` lets all ranks succeed or all raise.

Imports no other chapter of checkpoint.
"""
