"""Ranks that are MPI processes with a GPU each, whose GPU arrays travel by NCCL.

Begin with `backend`: `NCCLCommunicationBackend` is an MPI backend with other `collectives` for
arrays on GPUs. `channel` moves and sums their data, and `communicator` is the part of NCCL: its
start, its stream, its end.
"""
