"""Two ranks that save, load, train and resume in a folder whose name is not ASCII."""

import os
import sys
from pathlib import Path

import numpy as np

import mpishard as ms
from mpishard import checkpoint

backend = ms.init()
# As a script does that lists folders; the name is the same bytes, whatever the locale.
folder = os.fsdecode(os.fsencode(sys.argv[1]) + b"/f\xc3\xb6lder")
X, Y = np.ones((8, 3)), np.ones((8, 1))
model = ms.as_distributed(ms.nn.MLP([3, 4, 1]), backend)
optimizer = ms.as_distributed(ms.optimizers.SGD(0.1, 0.9), backend)
optimizer.step(model, X, Y)
before = model.gather_full_parameters()

single = f"{folder}/single"
checkpoint.save(single, model, optimizer)
model.set_parameters(0 * before)
checkpoint.load(single, model, optimizer)
assert (model.gather_full_parameters() == before).all()
checkpoint.save_async(f"{folder}/other", model, optimizer).wait()


def train(epochs):
    optimizer.reset()
    data = ms.OptimizationInputData(
        model=model,
        x_train=X,
        y_train=Y,
        epochs=epochs,
        checkpoint=f"{folder}/run",
        metrics=f"{folder}/metrics.jsonl",
        progress=False,
    )
    return optimizer.optimize(data).iterations


assert train(2) == 2
assert train(3) == 3
model.load_model(f"{folder}/run")
Path(folder, f"encoding-{backend.rank}").write_text(sys.getfilesystemencoding())
