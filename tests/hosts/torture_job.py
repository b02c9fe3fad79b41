"""A job for `torture.py`: steps of a collective, with a checkpoint, that may fail at a step.

torture_job.py FOLDER STEPS [FAULT RANK STEP]

``saves`` is no fault: on SIGTERM or SIGUSR1 the job saves, as in `optimize` with a checkpoint.
"""

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np

import mpishard
from mpishard.base import settings
from mpishard.callbacks.preemption import Preemption

folder, steps, *fault = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
world = mpishard.init()
latest = folder / "latest"
begin = int(latest.read_text()) if latest.exists() else 0
with Preemption(world) if fault[:1] == ["saves"] else nullcontext() as preemption:
    for step in range(begin + 1, steps + 1):
        if fault[1:] == [f"{world.rank}", f"{step}"] and begin == 0:
            if fault[0] == "exit":
                os._exit(7)
            elif fault[0] == "raise":
                raise ValueError("a mistake")
            elif fault[0] == "asleep":
                time.sleep(600)
            elif fault[0] == "elsewhere":
                world.receive(1 - world.rank % 2, 1)
        total = world.all_reduce(np.ones(1000))
        assert total[0] == world.world_size
        time.sleep(0.02)
        if world.rank == 0 and step % 5 == 0:
            new = folder / "new"
            new.write_text(f"{step}")
            new.replace(latest)
        if preemption is not None and preemption.is_asked():
            sys.exit(settings.EXIT_PREEMPTED)
print(f"rank {world.rank} is at its end", flush=True)
