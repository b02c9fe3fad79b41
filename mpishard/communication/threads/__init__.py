"""Threads of one process as ranks."""
