"""Why ranks wait: who is the odd one out, and what each rank does.

Begin with `describe_stall` (stall.py): from the ranks' status pages it follows who waits for whom
to the rank that waits for nobody, or round a circle, and prints the table of all ranks below.
May import tracing and contract.
"""
