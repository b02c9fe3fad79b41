"""The surface of a sharded model, and how a plain model becomes one."""
