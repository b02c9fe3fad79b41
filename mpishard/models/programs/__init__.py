"""Programs: the computation of a step.

Begin with `program`, the interface, and `layered_program`, which runs a chain of layers. `chain`
unshards, computes and reduces unit by unit: the heart of FSDP. `opaque_program` calls a black box,
`placed_program` a model that computes with the store's own memory. `mesh_program` computes pipeline
stages and tensor slices, laid out by `stage_layout`. `mesh_replica` is the ranks that compute one
batch together.
Imports `stores`.
"""
