"""Files of a checkpoint.

Begin with `manifest`: the table of contents, read and written as JSON. `tensor_file` lays out
the file of one rank and writes it in safetensors format. `coverage` refuses pieces that do not make
up a tensor. `content` has the interface of models and optimizers that can be saved, and checks
JSON. `folder` decides where a checkpoint goes and which ones are kept, and `disk` has every change
of the file system.

This chapter imports no other chapter of checkpoint.
"""
