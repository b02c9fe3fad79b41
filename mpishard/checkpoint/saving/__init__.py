"""Saving: the ranks agree once, each rank writes its file, and rank 0 commits.

Begin with `save`: the arrays that a save takes from a model and an optimizer, its collective steps,
and its work in a thread. `staging` has the host memory from which a save in the background is
written.

This chapter may import `format` and `loading`.
"""
