"""``mpishard bench``: benchmarks of collectives, training steps and checkpoints."""
