"""Record the activity of ranks over time, if a trace was asked for.

Begin with `recorder`: the spans, collectives and waits of one rank. `session` starts and stops a
trace and compares the ranks' clocks; `file` writes the trace of one rank to disk.
This is the lowest chapter: it imports no other.
"""
