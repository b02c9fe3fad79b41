"""Conversion of checkpoints to and from other programs' files."""
