"""Memory and time of a run before it starts, on any number of ranks and hosts.

Begin with ``jobs.py``: the description of the run that is planned, and the model that its factory
builds without arrays. ``memory.py`` has the table of strategies and meshes, ``rank_memory.py`` one
row of it, and ``advice.py`` words for it. A row is measured: ``passes.py`` runs a step of the real
engine, stores and schedule with layers that compute nothing, ``backend.py`` has a rank of a world
that does not exist, and ``reserved.py`` arrays without memory.

This room makes no formulae of its own: it asks the layouts, policies, stores, layers and schedules
that a run asks. It imports models, optimizers, pipeline, nn, sharding, communication and observe.
"""

from mpishard.planning.jobs import Job, UnplannableError, planned_model
from mpishard.planning.memory import COLUMNS, MemoryPlan, plan_memory
from mpishard.planning.rank_memory import MemoryRow, MemoryUse, memory_of

__all__ = [
    "Job",
    "MemoryPlan",
    "MemoryRow",
    "MemoryUse",
    "UnplannableError",
    "plan_memory",
]
