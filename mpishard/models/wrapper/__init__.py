"""The surface of a sharded model, and how a plain model becomes one.

Begin with `base`: `ShardedModelBase` has every member that users call, and hands the work to its
engine. `wrapping` checks the ranks' models, chooses stores by the policy and builds the engine.
`local_shard` is the part of the parameters on a rank, and compares replicas; `files` reads and
writes checkpoints and bytes; `wrapped` reaches members of the user's own model, and refuses
arguments that differ between ranks; `paged` continues many sequences of tokens at once.
Imports `engine`, `programs` and `stores`.
"""
