"""Optimizers whose state lies on several ranks, one for each strategy."""
