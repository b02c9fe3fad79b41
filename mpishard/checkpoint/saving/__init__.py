"""Saving: what each rank writes, how all ranks agree, and when a checkpoint is committed."""
