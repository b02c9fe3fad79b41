"""Loading and inspection of checkpoints at any world size.

Begin with `restore`: `load` fills a model, an optimizer and a training loop, or changes nothing.
`newest_valid` finds the newest checkpoint of a folder that verifies. `reader` reads any region of
any tensor from the pieces that were written. `mapped_file` compares checksums before bytes are
used. `inspection` describes a checkpoint and lists damage.

This chapter may import `format`.
"""
