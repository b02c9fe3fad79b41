"""The training loop: data, evaluation, early stopping, checkpoints and resume."""
