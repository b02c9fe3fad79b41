"""Memory and time of a run before it starts, on any number of ranks and hosts.

Begin with ``jobs.py``: the description of the run that is planned, and the model that its factory
builds without arrays. ``memory.py`` has the table of strategies and meshes, ``rank_memory.py`` one
row of it, and ``advice.py`` words for it. A row is measured: ``passes.py`` runs a step of the real
engine, stores and schedule with layers that compute nothing, ``backend.py`` has a rank of a world
that does not exist, and ``reserved.py`` arrays without memory.

``layouts.py`` makes meshes and layouts once for all jobs that have them. ``machine.py`` has the
speeds of a machine, ``costs.py`` the work of each layer, ``stages.py`` the times of layers that
follow from both, ``messages.py`` those of messages, ``step.py`` the time of a step, and ``mesh.py``
the fastest way that fits a memory.

This room makes no formulae of its own: it asks the layouts, policies, stores, layers and schedules
that a run asks. It imports models, optimizers, pipeline, nn, sharding, communication and observe.
"""

from mpishard.planning.costs import works_of
from mpishard.planning.jobs import (
    DATA_STRATEGIES,
    NEIGHBOURS,
    RECOMPUTATION,
    Job,
    UnplannableError,
    identity_of,
    jobs_of,
    planned_model,
    title_of,
)
from mpishard.planning.machine import Link, Machine, MachineError, PassRate, ProductRate
from mpishard.planning.memory import MemoryPlan, plan_memory
from mpishard.planning.mesh import Candidate, MeshPlan, plan_mesh
from mpishard.planning.rank_memory import MemoryRow, MemoryUse, memory_of
from mpishard.planning.step import PARTS, StepPlan, plan_step

__all__ = [
    "Job",
    "Link",
    "Machine",
    "MachineError",
    "MemoryPlan",
    "MemoryRow",
    "MemoryUse",
    "MeshPlan",
    "PassRate",
    "ProductRate",
    "StepPlan",
    "UnplannableError",
    "plan_memory",
    "plan_mesh",
    "plan_step",
]
