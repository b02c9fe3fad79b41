"""``mpishard verify``: compare sharded training of a model with training in one process."""
