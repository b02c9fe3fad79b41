"""Explain why ranks wait, from the status pages of all ranks.

Begin with `stall`: it finds the odd one out and says what it does instead. `table` prints a line
for each rank, with its last collectives. Nothing here communicates.
Imports `tracing` and `contract`.
"""
