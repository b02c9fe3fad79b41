"""The strategies: what each shards, and little else.

Begin with `fsdp`, or `ddp` and `zero`: a policy of three booleans, and the bytes sent. On a mesh,
`mesh_model` deals layers to stages and tensor ranks for `tensor`, `pipeline` and `hybrid`;
`mesh_options` checks the choices that these share with their optimizers.
Imports every other chapter.
"""
