"""The surface of a sharded model, and how a plain model becomes one.

Begin with `base`: `ShardedModelBase` has every member that users call, and hands the work to its
engine. `wrapping` checks the ranks' models, chooses stores by the policy and builds the engine.
`held` is the part of the parameters on a rank, `files` reads and writes checkpoints and bytes,
`digest` compares checksums between ranks, `wrapped` reaches members of the user's own model.
Imports `engine`, `programs` and `stores`.
"""
