"""Optimizers whose replicas of the model exchange little, or late.

Each is a wrapper around the two verbs of the engine, `gradient` and `update`, which know nothing of
it; `wrapper` has their base. Begin with `local_sgd`: replicas train alone, and exchange parameters
every H steps (`local_state`, `exchange`). `compression` and `asynchronous` exchange gradients:
`exchanged_passes` sums them inside a replica, and hands the sums to an exchange between replicas.
That is `compressed_sums`, with the `codes` that travel, or `delayed_sums`, whose gradients are used
some steps later (`delayed_state`).

This chapter imports from `rules` and `sharded`.
"""
