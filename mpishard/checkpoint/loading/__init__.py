"""Reading a checkpoint at any world size, and looking into one.

Begin with `restore`: `load` fills a model, an optimizer and a training loop, or changes nothing;
`newest_valid` finds the newest checkpoint of a folder that verifies. `reader` reads any region of
any tensor: it finds it in the pieces that were written, and `mapped_file` compares checksums before
bytes are used. `inspection` describes one and lists damage.

May import `format`.
"""
