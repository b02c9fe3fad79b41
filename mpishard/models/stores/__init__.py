"""Stores: the owners of parameters and gradients, which gather and reduce them.

Begin with `parameter_store` and `gradient_store`: an interface each. The ways to hold a flat vector
are replicated, sharded and once per node: for parameters in the same file, for gradients in
`replicated_gradients` and `sharded_gradients`. `store_layout` says how a rank's flat vector
is divided and where memory is booked; `vector` distributes the model's vector and gathers it.
`offload` keeps a GPU model's vectors in host memory.
Imports no other chapter of models.
"""
