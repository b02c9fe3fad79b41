"""``mpishard run``: start a script on N ranks, watch it, restart it, and report how it ended."""
