"""How a job ends: abort, time limits, hooks, reports, preemption."""
