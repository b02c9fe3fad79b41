"""Explain why ranks wait: the odd one out, and the table of all ranks (`stall`)."""
