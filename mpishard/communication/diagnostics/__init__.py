"""Explain why ranks wait: the odd one out (`stall`), and the table of all ranks (`table`)."""
