"""Take steps until something ends the job: ``steps.py`` under ``mpishard run``."""

import sys
import time

import numpy as np

import mpishard as ms

backend = ms.init("mpi")
mlp = ms.nn.MLP([64] * 3, seed=0, dtype=np.float32)
model = ms.as_distributed(mlp, backend, "fsdp")
optimizer = ms.as_distributed(ms.optimizers.SGD(learning_rate=1e-3), backend, "fsdp")
x, y = np.ones((2, 4, 64), np.float32)
for step in range(10**6):
    optimizer.step(model, x, y)
    time.sleep(0.005)
    if step == 3 and backend.rank == 0:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
