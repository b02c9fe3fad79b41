"""The strategies: what each shards, and little else.

Begin with `data_parallel`: DDP, ZeRO and FSDP, each a policy of three booleans, and the bytes that
it sends. `mesh_parallel` has the strategies of a mesh, which assign layers to stages and split them
over tensor ranks; `mesh_options` checks the choices that these share with their optimizers.
Imports every other chapter.
"""
