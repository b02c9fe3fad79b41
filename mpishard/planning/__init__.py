"""Memory and time of a run before it starts, on any number of ranks and hosts.

Begin with ``jobs.py``: the description of the run that is planned, and the model that its factory
builds without arrays. ``memory.py`` has the bytes of each rank and host by category.

This room makes no formulae of its own: it asks the layouts, policies, stores, layers and schedules
that a run asks. It imports models, optimizers, pipeline, nn, sharding, communication and observe.
"""

from mpishard.planning.costs import works_of
from mpishard.planning.jobs import Job, UnplannableError, planned_model
from mpishard.planning.machine import Link, Machine, MachineError, PassRate, ProductRate
from mpishard.planning.step import PARTS, StepPlan, plan_step

__all__ = [
    "PARTS",
    "Job",
    "Link",
    "Machine",
    "MachineError",
    "PassRate",
    "ProductRate",
    "StepPlan",
    "UnplannableError",
    "plan_step",
    "planned_model",
    "works_of",
]
