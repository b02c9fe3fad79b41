"""Loading: read regions of a checkpoint, find the newest valid one, and inspect checkpoints."""
