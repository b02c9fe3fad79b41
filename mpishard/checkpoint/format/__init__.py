"""What a checkpoint is on disk: tensor files, their table of contents, folders of checkpoints."""
