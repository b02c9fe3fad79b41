"""Saving: the ranks agree once, each rank writes its file, and rank 0 commits.

Begin with `save`, which users call, and `pending`: the steps of a save that all ranks make
together. A save has these parts, of which only `pending` communicates:

* `host_pieces`: the arrays of this rank in host memory; `staging` has the memory for copies.
* `save_files`: the files that this rank writes, and rank 0's commit.
* `free_space`: the refusal of a save that does not fit on the disk.
* `background`: the thread in which a rank writes.

This chapter may import `format` and `loading`.
"""
