"""What every backend fulfils: collectives, calls, works, the one tree of reductions."""
