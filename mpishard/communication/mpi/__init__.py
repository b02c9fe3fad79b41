"""Processes as ranks, over MPI."""
