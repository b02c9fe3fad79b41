"""Saving: the ranks agree once, each writes its file, rank 0 commits.

Begin with `snapshot`: `save`, `save_async` and what they take of a model and an optimizer.
`pending` is the save under way: which of its steps are collective, and what happens in a thread.
`staging` is the host memory that a save in the background writes from.

May import `format` and `loading`.
"""
