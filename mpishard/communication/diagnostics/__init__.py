"""Why ranks wait: who is the odd one out, and the table of all ranks."""
