"""Callbacks: code that runs at the start, steps, evaluations, checkpoints and end of a run.

Begin with ``run.py``: `Run` calls the callbacks, and is the object that they stop, save and log
with; `Record` has the figures that they receive. ``loop.py`` has `running`, for loops written by
hand; `optimize` has its own loop. ``writers.py`` writes files and shows progress, ``stopping.py``
stops early, and ``preemption.py`` receives the order to save and end.

The room imports observe and the rooms before it. Functions import the optional packages that they
need.
"""

from mpishard.callbacks.loop import LoopHooks, running
from mpishard.callbacks.preemption import Preemption
from mpishard.callbacks.run import Record, Requests, Run, check_callbacks, names_of
from mpishard.callbacks.stopping import EarlyStopping
from mpishard.callbacks.writers import CSVFile, JSONLines, ProgressLine, TensorBoard, WandB

__all__ = [
    "CSVFile",
    "EarlyStopping",
    "JSONLines",
    "LoopHooks",
    "ProgressLine",
    "Record",
    "Run",
    "TensorBoard",
    "WandB",
    "running",
]
