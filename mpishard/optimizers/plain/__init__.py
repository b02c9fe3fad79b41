"""Optimizers without ranks: whole vectors and plain models, in this process."""
