"""Saving: the ranks agree once, each writes its file, rank 0 commits.

Begin with `save`: what a save takes of a model and an optimizer, which of its steps are
collective, and what happens in a thread. `staging` is the host memory that a save in the
background writes from.

May import `format` and `loading`.
"""
